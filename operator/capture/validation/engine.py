"""What is to be known of the vLLM that was recorded: a version that nobody tried, or another than was planned for."""

from collections.abc import Mapping
from typing import Any

from specdecode_operator.capture.files.manifest import Manifest
from specdecode_operator.capture.recorder.shapes import TRIED
from specdecode_operator.engine.image_version import version_of_engine
from specdecode_operator.problems import printable
from specdecode_operator.redaction import clip
from specdecode_operator.version import __version__, is_newer

_LONGEST_VERSION = 64


def engine_notes(vllm: str, *, recorder_tried: bool, context: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each doubt; ``context`` is what the operator gave."""
    version, notes = _short(vllm), []
    if not recorder_tried:
        notes.append(
            f"nobody tried the recorder with vLLM {version}: it recorded because all that it uses of the engine is as"
            f" in {TRIED}, with which it was tried"
        )
    planned, said = context.get("engine_version"), version_of_engine(vllm)
    if isinstance(planned, str) and said not in (None, planned):
        notes.append(
            f"the engine is vLLM {version}, and was planned and started as spec.engine.version"
            f" {_short(planned)} of its deployment"
        )
    return notes


def maker_note(specdecode: str) -> list[str]:
    """Say of files that a newer operator's pod made that they may hold more than is read here."""
    if not is_newer(specdecode, __version__):
        return []
    return [f"made by {_short(specdecode)}, newer than this {__version__}, which passes over what it does not know"]


def engine_status(manifest: Manifest) -> dict[str, Any]:
    """Return what ``status.summary`` of a SpecDecodeCapture says of the engine."""
    notes = engine_notes(manifest.vllm, recorder_tried=manifest.recorder_tried, context=manifest.context)
    return {"engineVersion": _short(manifest.vllm)} | ({"engineNotes": notes} if notes else {})


def _short(version: str) -> str:
    return clip(printable(version), _LONGEST_VERSION)
