"""Folders of captures with arms: what they come to, and which of them stand for each arm."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specdecode_operator.capture.comparison.compare import compare_capture
from specdecode_operator.capture.comparison.result import Comparison
from specdecode_operator.capture.files.errors import CaptureError
from specdecode_operator.capture.files.formats import MANIFEST
from specdecode_operator.documents.json_text import parse_json
from specdecode_operator.documents.limits import MAX_BYTES, UnreadableTextError


@dataclass(frozen=True)
class Arms:
    """A capture with arms."""

    folders: Sequence[Path]  # of the first repetition of each
    comparison: Comparison | None
    warning: str | None  # why there is none


def arms_of(path: Path) -> Arms | None:
    """Return the arms in a capture's folder; None where it has none."""
    firsts: dict[str, Path] = {}
    for manifest in sorted(path.glob(f"*/*/{MANIFEST}")):
        if _of_an_experiment(manifest):
            firsts.setdefault(manifest.parent.parent.name, manifest.parent)
    if not firsts:
        return None
    try:
        comparison = compare_capture(path)
    except CaptureError as error:
        return Arms(list(firsts.values()), None, f"{path}: its arms are not compared: {error.message}")
    return Arms([firsts[arm.name] for arm in comparison.arms if arm.name in firsts], comparison, None)


def _of_an_experiment(manifest: Path) -> bool:
    try:
        with manifest.open("rb") as stream:
            found = parse_json(stream.read(MAX_BYTES + 1))
    except (OSError, UnreadableTextError):
        return False
    return isinstance(found, dict) and isinstance(found.get("experiment"), dict)
