"""Run the containers `export` and `publish` of a training's Job.

`export` writes the rows and the bundle for the trainer's image, `publish` checks and publishes the head. Both report in
the container's termination message: counts and head, or ``{"error": {"reason", "message"}}``.
"""

import os
import shutil
from pathlib import Path
from typing import Final

import msgspec

from specdecode_operator.api.training import RowCounts
from specdecode_operator.capture.files.formats import CaptureError
from specdecode_operator.capture.files.summary import MESSAGE_BYTES
from specdecode_operator.capture.files.training_rows import TrainingError
from specdecode_operator.capture.job.pod_files import volume_errors
from specdecode_operator.training.files import publish
from specdecode_operator.training.files.pod_settings import PodSettings, read_pod_settings
from specdecode_operator.training.job.settings import SETTINGS_VARIABLE
from specdecode_operator.training.rows import read_counts, write_rows
from specdecode_operator.vllm.plugin_bundle import TRAINER

_SMALLEST_FREE_BYTES: Final = 64 * 2**20


def export_job(bundle: Path) -> bytes:
    """Write rows and bundle; return the termination message."""
    settings = read_pod_settings(os.environ.get(SETTINGS_VARIABLE))
    bundle.write_bytes(TRAINER.zipped())
    bundle.chmod(0o644)
    places, root = settings.places, Path(settings.root)
    with volume_errors(root):
        if not root.is_dir():
            raise CaptureError("VolumeMissing", f"{root}: no volume is mounted here")
        if shutil.disk_usage(root).free < _SMALLEST_FREE_BYTES:
            raise CaptureError("DiskFull", f"the volume at {root} is full: free some of it, or use a larger one")
        places.folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        places.rows.mkdir(mode=0o755, exist_ok=True)
        try:
            counts = _counts(settings)
        except TrainingError as error:
            raise CaptureError(error.reason, error.message) from error
    return msgspec.json.encode({"rows": counts.model_dump(mode="json", by_alias=True, exclude_none=True)})


def _counts(settings: PodSettings) -> RowCounts:
    return write_rows(
        settings.row_sources(),
        settings.places.rows,
        holdout_percent=settings.holdout_percent,
        max_tokens=settings.max_tokens,
        min_rows=settings.min_rows,
        seed=settings.seed,
    )


def publish_job() -> bytes:
    """Check and publish the head; return the termination message."""
    settings = read_pod_settings(os.environ.get(SETTINGS_VARIABLE))
    with volume_errors(Path(settings.root)):
        counts = read_counts(settings.places.rows)
        if counts is None:
            raise CaptureError("VolumeFailed", f"{settings.places.rows} has no complete rows: create another training")
        return publish.message_of(counts, publish.publish_head(settings), MESSAGE_BYTES)
