"""Find the folders of a capture's arms and read their manifests and checks, which are untrusted input."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

from msgspec import Meta, Struct

from specdecode_operator.capture.comparison.comparison_file import Slo
from specdecode_operator.capture.files.formats import CHECKS, MANIFEST, CaptureError, Checks, EngineCounters, FileEntry
from specdecode_operator.capture.files.publish import UnreadableManifestError, decode_manifest
from specdecode_operator.capture.recorder.segment_format import EngineConfig
from specdecode_operator.problems import printable, shown

_ARM: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,38}[a-z0-9])?")
_HOW: Final = "fetch the capture again"

ArmName = Annotated[str, Meta(min_length=1, max_length=40)]
_Text = Annotated[str, Meta(max_length=2048)]
_Kind = TypeVar("_Kind")


class Experiment(Struct, kw_only=True, frozen=True):
    """The compared arms, repeated in each manifest."""

    arms: Annotated[list[ArmName], Meta(min_length=1, max_length=8)]
    baseline: ArmName
    repetitions: Annotated[int, Meta(ge=1, le=20)]
    order: list[list[str]] = []
    slo: Slo = Slo()
    lossy: dict[str, _Text] = {}


class ArmManifest(Struct, kw_only=True, frozen=True):
    """The fields of a manifest that a comparison needs; others are ignored."""

    namespace: _Text
    capture: _Text
    arm: _Text
    repetition: int
    vllm: _Text = ""
    model: _Text | None = None
    gpu: _Text | None = None
    gpu_uuids: list[_Text] = []
    node: _Text | None = None
    image_id: _Text | None = None
    config: EngineConfig
    context: dict[str, Any] = {}
    workload: dict[str, Any] = {}
    seed: int = 0
    record: dict[str, Any] = {}
    engine_counters: EngineCounters | None = None
    files: dict[str, FileEntry] = {}
    experiment: Experiment | None = None

    @property
    def gpus(self) -> int:
        """How many GPUs the engine had; on CPU one machine counts."""
        if self.gpu is None:
            return 1
        shape = (self.config.tensor_parallel, self.config.pipeline_parallel, self.config.data_parallel)
        return max(len(self.gpu_uuids), math.prod(max(1, each or 1) for each in shape))


@dataclass(frozen=True)
class Repetition:
    """One published folder."""

    folder: Path
    number: int
    manifest: ArmManifest


@dataclass(frozen=True)
class ArmFolders:
    """The published folders of a capture."""

    experiment: Experiment
    repetitions: Mapping[str, list[Repetition]]  # by arm, in order; empty if none is published

    @property
    def first(self) -> ArmManifest:
        """A manifest of the baseline, with the fields that are equal in all manifests."""
        return self.repetitions[self.experiment.baseline][0].manifest


def not_comparable(message: str) -> CaptureError:
    """Return the error for folders that cannot be compared."""
    return CaptureError("NotComparable", printable(message))


def find_arms(folder: Path) -> ArmFolders:
    """Return the arms of a capture: ``<arm>/<repetition>/`` with a manifest each."""
    found = [*_published(folder)]
    experiments = [each.manifest.experiment for _, each in found]
    if not found or None in experiments:
        raise not_comparable(f"{folder}: holds no capture with arms: name the folder that contains one folder per arm")
    experiment = experiments[0]
    assert experiment is not None  # noqa: S101  as was asked above
    if any(each != experiment for each in experiments):
        raise not_comparable(
            f"{folder}: its arms belong to different captures: their manifests list different arms: {_HOW}"
        )
    bad = next((name for name in experiment.arms if not _ARM.fullmatch(name)), None)
    if bad is not None:
        raise not_comparable(f"{folder}: experiment.arms: {shown(bad)}: is not a valid arm name: {_HOW}")
    if len(set(experiment.arms)) < len(experiment.arms) or experiment.arms[0] != experiment.baseline:
        raise not_comparable(
            f"{folder}: experiment.arms: {shown(experiment.arms)}: must name each arm once, baseline first: {_HOW}"
        )
    repetitions: dict[str, list[Repetition]] = {name: [] for name in experiment.arms}
    for arm, repetition in found:
        if arm in repetitions and repetition.number <= experiment.repetitions:
            repetitions[arm].append(repetition)
    if not repetitions[experiment.baseline]:
        raise not_comparable(f"{folder / experiment.baseline}: not found: the other arms are compared with it: {_HOW}")
    if not any(each for name, each in repetitions.items() if name != experiment.baseline):
        raise not_comparable(f"{folder}: has only arm {experiment.baseline}, without an arm to compare it with: {_HOW}")
    _check_workloads(repetitions)
    return ArmFolders(experiment, repetitions)


def _check_workloads(repetitions: Mapping[str, list[Repetition]]) -> None:
    """Reject arms that were sent different workloads."""
    manifests = [(name, each.manifest) for name, all_of in repetitions.items() for each in all_of]
    (first_name, first), *others = manifests
    for name, manifest in others:
        for what in ("namespace", "capture", "workload", "seed"):
            if getattr(manifest, what) != getattr(first, what):
                raise not_comparable(
                    f"workloads differ: arms {name} and {first_name} have a different {what}: compare arms of "
                    "one capture"
                )


def _published(folder: Path) -> Iterator[tuple[str, Repetition]]:
    try:
        arms = sorted(each for each in folder.iterdir() if each.is_dir() and _ARM.fullmatch(each.name))
        numbered = [
            (arm.name, int(each.name), each)
            for arm in arms
            for each in sorted(arm.iterdir())
            if re.fullmatch(r"[1-9][0-9]?", each.name) and (each / MANIFEST).is_file()
        ]
    except OSError as error:
        raise not_comparable(f"{error.filename or folder}: cannot be read: {error.strerror}") from error
    for name, number, place in sorted(numbered):
        manifest = _decoded(place / MANIFEST, ArmManifest)
        if (manifest.arm, manifest.repetition) != (name, number):
            whose = f"repetition {manifest.repetition} of arm {shown(manifest.arm)}"
            raise not_comparable(f"{place}: holds {whose}: restore the name of the folder, or fetch the capture again")
        yield name, Repetition(place, number, manifest)


def read_checks(repetitions: Sequence[Repetition]) -> Checks | None:
    """Return the answers to the checks of an arm, if there are some."""
    paths = (each.folder / CHECKS for each in repetitions)
    return next((_decoded(path, Checks) for path in paths if path.is_file()), None)


def _decoded(path: Path, kind: type[_Kind]) -> _Kind:
    try:
        return decode_manifest(path, kind)
    except OSError as error:
        raise not_comparable(f"{path}: cannot be read: {error.strerror}") from error
    except UnreadableManifestError as error:
        raise not_comparable(f"{path}: cannot be read: {error}: {_HOW}") from error
