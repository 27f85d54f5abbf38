"""Publish a trained head on the claim: two files and a manifest, which is written last.

If the container is killed before it writes the manifest, the next attempt publishes again. Otherwise, the next attempt
only cleans up and reports.
"""

import hashlib
import json
import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from specdecode_operator.api.training_status import RowCounts, TrainedHead
from specdecode_operator.capture.files.formats import MESSAGE_BYTES, CaptureError
from specdecode_operator.capture.files.publish import flush, write_whole
from specdecode_operator.capture.files.training_rows import TrainingError
from specdecode_operator.capture.job.pod_files import volume_errors
from specdecode_operator.training.files.head_check import CONFIG, WEIGHTS, check_head, invalid, open_regular
from specdecode_operator.training.files.pod_settings import PodSettings, read_pod_settings
from specdecode_operator.training.job.settings import SETTINGS_VARIABLE
from specdecode_operator.training.job.training import best_checkpoint
from specdecode_operator.training.rows import ROWS, read_counts, write_rows
from specdecode_operator.untrusted import UnreadableTextError, parse_json
from specdecode_operator.version import __version__
from specdecode_operator.vllm.plugin_bundle import TRAINER

_SMALLEST_FREE_BYTES: Final = 64 * 2**20


def export_job(bundle: Path) -> bytes:
    """Write the rows and the bundle, and return the termination message."""
    settings = read_pod_settings(os.environ.get(SETTINGS_VARIABLE))
    bundle.write_bytes(TRAINER.zipped())
    bundle.chmod(0o644)
    places, root = settings.places, Path(settings.root)
    with volume_errors(root):
        if not root.is_dir():
            raise CaptureError("VolumeMissing", f"{root}: no volume is mounted here")
        if shutil.disk_usage(root).free < _SMALLEST_FREE_BYTES:
            raise CaptureError("DiskFull", f"the volume at {root} is full: free some space, or use a larger volume")
        places.folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        _reject_head_of_another(_read_manifest(places.folder), settings)
        places.rows.mkdir(mode=0o755, exist_ok=True)
        # The trainer's containers mount these three folders and no other part of the claim.
        places.hidden_states.mkdir(mode=0o700, exist_ok=True)
        places.checkpoints.mkdir(mode=0o700, parents=True, exist_ok=True)
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
    """Check and publish the head, and return the termination message."""
    settings = read_pod_settings(os.environ.get(SETTINGS_VARIABLE))
    with volume_errors(Path(settings.root)):
        counts = read_counts(settings.places.rows)
        if counts is None:
            raise CaptureError("VolumeFailed", f"{settings.places.rows} has no complete rows: create another training")
        return message_of(counts, publish_head(settings), MESSAGE_BYTES)


HEAD_FOLDER: Final = "head"
MANIFEST: Final = "manifest.json"
SCHEMA: Final = 1
_METRICS: Final = "val_metrics.json"
_MOST_METRICS_BYTES: Final = 64 * 1024
_MOST_MANIFEST_BYTES: Final = 2**20
_CHUNK_BYTES: Final = 2**22
_LOSS: Final = "loss_epoch"
_MOST_POSITIONS: Final = 32
# Share of correct tokens at a position if all earlier ones are correct: EAGLE-3, and methods with blocks.
_ACCURACIES: Final = ("full_acc_{}_epoch", "position_{}_acc_epoch")
_LICENCE_NOTE: Final = (
    "The head was trained on answers of the target and contains weights of the target. The licences of the target and"
    " of the prompts apply to it."
)


def publish_head(settings: PodSettings) -> TrainedHead:
    """Check and publish the best checkpoint, and delete the hidden states; return the published head.

    Raises
    ------
    CaptureError
        If vLLM cannot serve the head for the target, or the folder has the head of another training.
    """
    folder = settings.places.folder
    manifest = _read_manifest(folder)
    if manifest is None:
        manifest = _publish(settings, folder)
    _reject_head_of_another(manifest, settings)
    shutil.rmtree(settings.places.hidden_states, ignore_errors=True)
    return _trained_head(settings, manifest)


def _reject_head_of_another(manifest: Mapping[str, Any] | None, settings: PodSettings) -> None:
    if manifest is not None and manifest.get("uid") != settings.uid:
        folder = settings.places.folder
        message = f"{folder} holds the head of another training, which is never overwritten: choose another name"
        raise CaptureError("AlreadyPublished", message)


def _publish(settings: PodSettings, folder: Path) -> dict[str, Any]:
    checkpoint = _checkpoint(settings)
    checked = check_head(checkpoint, settings.method, settings.target, settings.engine_version)
    part, final = folder / f"{HEAD_FOLDER}.part", folder / HEAD_FOLDER
    for each in (part, final):  # left by an attempt that was killed: without a manifest it is not published
        shutil.rmtree(each, ignore_errors=True)
    part.mkdir(mode=0o755)
    part.chmod(0o755)  # engines run as other users, despite the umask
    _write(part / CONFIG, json.dumps(checked.config, indent=2).encode() + b"\n")
    files = {CONFIG: _entry(part / CONFIG), WEIGHTS: _copy(checkpoint / WEIGHTS, part / WEIGHTS)}
    flush(part)
    # A pod that mounts the claim may have changed the checkpoint since it was checked.
    check_head(part, settings.method, settings.target, settings.engine_version)
    part.rename(final)
    folder.chmod(0o755)
    manifest = _manifest(settings, checkpoint, files)
    write_whole(folder / MANIFEST, manifest)
    (folder / MANIFEST).chmod(0o644)
    flush(folder)
    return manifest


def _checkpoint(settings: PodSettings) -> Path:
    checkpoints = settings.places.checkpoints
    found = best_checkpoint(checkpoints) if checkpoints.is_dir() and not checkpoints.is_symlink() else None
    if found is None or found.is_symlink() or not found.is_dir():
        raise invalid("the trainer wrote no checkpoint")
    return found


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    path.chmod(0o644)
    flush(path)


def _copy(source: Path, destination: Path) -> dict[str, Any]:
    digest, size = hashlib.sha256(), 0
    with open_regular(source) as stream, destination.open("xb") as out:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
            out.write(chunk)
            size += len(chunk)
    destination.chmod(0o644)
    flush(destination)
    return {"bytes": size, "sha256": digest.hexdigest()}


def _entry(path: Path) -> dict[str, Any]:
    content = path.read_bytes()
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def _manifest(settings: PodSettings, checkpoint: Path, files: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "namespace": settings.namespace,
        "training": settings.training,
        "uid": settings.uid,
        "specdecode": __version__,
        "target": {
            "model": settings.target_model,
            "revision": settings.target_revision,
            "quantization": settings.target_quantization,
        },
        "method": settings.method,
        "trainer": {
            "image": settings.trainer_image,
            "args": settings.args,
            "epochs": settings.epochs,
            "learningRate": settings.learning_rate,
            "sequenceLength": settings.sequence_length,
            "seed": settings.seed,
            "from": settings.starting_head,
        },
        "sources": [{"capture": each.name, "path": each.path} for each in settings.sources],
        "rows": _rows_file(settings),
        "checkpoint": checkpoint.name,
        "validation": _metrics(checkpoint),
        "files": dict(files),
        "licence": _LICENCE_NOTE,
    }


def _rows_file(settings: PodSettings) -> Any:
    try:
        return parse_json((settings.places.rows / ROWS).read_bytes())
    except (OSError, UnreadableTextError):
        return None


def _metrics(checkpoint: Path) -> dict[str, float]:
    """Return the validation metrics of the trainer; empty if they cannot be read."""
    try:
        with open_regular(checkpoint / _METRICS) as stream:
            found = parse_json(stream.read(_MOST_METRICS_BYTES + 1), _MOST_METRICS_BYTES)
    except (CaptureError, UnreadableTextError):
        return {}
    names = {_LOSS, *(form.format(place) for form in _ACCURACIES for place in range(_MOST_POSITIONS))}
    given = found.items() if isinstance(found, dict) else ()
    return {name: float(value) for name, value in given if name in names and _is_figure(value)}


def _is_figure(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(float(value))  # type: ignore[arg-type]


def _read_manifest(folder: Path) -> dict[str, Any] | None:
    try:
        with (folder / MANIFEST).open("rb") as stream:
            found = parse_json(stream.read(_MOST_MANIFEST_BYTES), _MOST_MANIFEST_BYTES)
    except FileNotFoundError:
        return None
    except UnreadableTextError as error:
        message = f"{folder / MANIFEST} is invalid: {error}; delete it, or use another claim"
        raise CaptureError("AlreadyPublished", message) from error
    return found if isinstance(found, dict) else {}


def _trained_head(settings: PodSettings, manifest: Mapping[str, Any]) -> TrainedHead:
    final = settings.places.folder / HEAD_FOLDER
    with open_regular(final / CONFIG) as stream:
        config = parse_json(stream.read())
    weights, figures = manifest["files"][WEIGHTS], manifest["validation"]
    loss = figures.get(_LOSS)
    return TrainedHead(
        path=str(final.relative_to(settings.root)),
        sha256=weights["sha256"],
        bytes=weights["bytes"],
        config=config,
        validation_loss=None if loss is None else f"{loss:.4g}",
        accuracy_percent=_accuracies(figures) or None,
    )


def _accuracies(figures: Mapping[str, float]) -> list[int]:
    for form in _ACCURACIES:
        # A head for blocks has no accuracy for position 0, the given token.
        values = [figures.get(form.format(position)) for position in range(_MOST_POSITIONS)]
        if found := [round(100 * min(max(value, 0.0), 1.0)) for value in values if value is not None]:
            return found
    return []


def message_of(counts: RowCounts, head: TrainedHead, most_bytes: int) -> bytes:
    """Return the termination message of a success: rows and head as in the status.

    If config.json is too long for the message, keys that do not affect size and serving are omitted.
    """
    told = head.model_dump(mode="json", by_alias=True, exclude_none=True)
    rows = counts.model_dump(mode="json", by_alias=True, exclude_none=True)
    config = told["config"]
    for candidate in (config, _without_none(config), _needed(config)):
        message = msgspec.json.encode({"rows": rows, "head": told | {"config": candidate}})
        if len(message) <= most_bytes:
            return message
        rows.pop("leftOut", None)
    raise invalid(f"{CONFIG} does not fit into a termination message of {most_bytes} bytes")


def _without_none(config: dict[str, Any]) -> dict[str, Any]:
    return {
        name: _without_none(value) if isinstance(value, dict) else value
        for name, value in config.items()
        if value is not None
    }


_NOT_NEEDED: Final = frozenset(
    {
        *("attention_dropout", "initializer_range", "use_cache", "pretraining_tp", "transformers_version"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "embed_requires_grad", "proposal_methods"),
    }
)


def _needed(config: dict[str, Any]) -> dict[str, Any]:
    return {
        name: _needed(value) if isinstance(value, dict) else value
        for name, value in _without_none(config).items()
        if name not in _NOT_NEEDED
    }
