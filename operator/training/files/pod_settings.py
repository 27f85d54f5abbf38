"""Settings of the containers `export` and `publish`, from the variable that all steps of a training's Job read."""

from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from specdecode_operator.api.training import TrainingMethod
from specdecode_operator.capture.files.formats import CaptureError
from specdecode_operator.training import rows
from specdecode_operator.training.job.settings import Places

ROOT: Final = "/training"  # of the claim
BUNDLE_FOLDER: Final = "/specdecode/trainer"
BUNDLE: Final = f"{BUNDLE_FOLDER}/training.zip"
CAPTURES, DATASETS, DATASET, HEAD = "/captures", "/datasets", "/dataset", "/from"


class Target(Struct, frozen=True):
    """Model that the head drafts for."""

    name: str
    layers: int
    hidden_size: int
    vocabulary: int


class Source(Struct, frozen=True, kw_only=True):
    """Capture, or a file of rows if the name is None."""

    path: str  # in the volume
    mount: str
    name: str | None = None
    dataset: str | None = None


class PodSettings(Struct, frozen=True, kw_only=True):
    """Settings of one training."""

    namespace: str
    training: str
    uid: str
    root: str
    folder: str
    method: TrainingMethod
    sources: list[Source]
    target_model: str
    target_quantization: str
    target_layers: int
    hidden_size: int
    vocabulary: int
    engine_version: str
    trainer_image: str
    holdout_percent: int
    max_tokens: int
    min_rows: int
    seed: int
    epochs: int
    sequence_length: int
    learning_rate: str | None = None
    args: list[str] = []
    target_revision: str | None = None
    starting_head: str | None = None

    @property
    def places(self) -> Places:
        """Return the folders of the training."""
        return Places(Path(self.root) / self.folder, self.uid)

    @property
    def target(self) -> Target:
        """Return the properties of the target that the head must match."""
        return Target(self.target_model, self.target_layers, self.hidden_size, self.vocabulary)

    def row_sources(self) -> list[rows.RowSource]:
        """Return the captures or the file with the rows."""
        target = rows.Target(
            model=self.target_model, revision=self.target_revision, quantization=self.target_quantization
        )
        return [
            rows.FileSource(mount=Path(each.mount), path=each.path)
            if each.name is None
            else rows.CaptureSource(
                name=each.name,
                mount=Path(each.mount),
                path=each.path,
                target=target,
                dataset=Path(each.dataset) if each.dataset else None,
            )
            for each in self.sources
        ]


def read_pod_settings(text: str | None) -> PodSettings:
    """Parse the variable of the container."""
    try:
        return msgspec.json.decode(text or "", type=PodSettings)
    except msgspec.DecodeError as error:
        raise CaptureError("InvalidSettings", f"the settings of the training cannot be read: {error}") from error
