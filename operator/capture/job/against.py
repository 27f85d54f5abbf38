"""The end of a capture that is held against a golden one: what was published is judged, inside of its pod."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct

from specdecode_operator.capture.comparison.answers import NotComparableError, repetitions_of
from specdecode_operator.capture.comparison.regression import (
    DEFAULT_LIMITS,
    Figure,
    Limits,
    Regression,
    RegressionVerdict,
    judge,
)
from specdecode_operator.capture.files.publish import read_manifest, verify
from specdecode_operator.capture.validation.summary import MESSAGE_BYTES
from specdecode_operator.problems import printable
from specdecode_operator.redaction import clip

AGAINST_VARIABLE: Final = "SPECDECODE_AGAINST"
AGAINST_MOUNT: Final = "/against"
"""Where the volume of the golden capture is."""

_MOST_FIGURES: Final = 12
_MESSAGE_CHARACTERS: Final = 1000
_OF_THE_SUMMARY: Final = ("files", "lateMs", "latencyMs", "perPositionPercent")


class GoldenCapture(Struct, kw_only=True, frozen=True):
    """What a capture is held against, in the words of the operator."""

    capture: str
    folder: str  # from the root of the volume
    limits: Limits = DEFAULT_LIMITS


def regression_status(environment: Mapping[str, str], published: Path) -> dict[str, Any] | None:
    """Return ``status.regression`` of a published capture; None where it is held against none.

    Whatever is wrong with the golden files is part of it: this capture is published all the same.
    """
    text = environment.get(AGAINST_VARIABLE)
    if not text:
        return None
    golden = msgspec.json.decode(text, type=GoldenCapture)
    folder = Path(AGAINST_MOUNT) / golden.folder
    try:
        return _status(golden.capture, _judged(folder, published, golden.limits))
    except NotComparableError as error:
        why = str(error)
    except Exception as error:  # noqa: BLE001  files that others may write to
        why = f"it could not be judged: {type(error).__name__}: {error}"
    return {"against": golden.capture, "verdict": "NotComparable", "message": clip(printable(why), _MESSAGE_CHARACTERS)}


def _judged(golden: Path, found: Path, limits: Limits) -> Regression:
    folders = repetitions_of(golden), repetitions_of(found)
    for folder in folders[0]:
        if faults := verify(folder):
            raise NotComparableError(f"{folder}: {faults[0]}: the golden capture was changed: take it anew")
    manifests = [read_manifest(each[0]) for each in folders]
    for name in ("workload", "seed"):
        first, second = (getattr(each, name, None) for each in manifests)
        if first != second:
            raise NotComparableError(f"{golden}: was made with another {name}: take a new golden capture with this one")
    return judge(*folders, limits)


def _status(name: str, regression: Regression) -> dict[str, Any]:
    told = [each for each in regression.figures if each.verdict is not None]
    first = sorted(told, key=lambda each: each.verdict is RegressionVerdict.HOLDS)
    return {
        "against": name,
        "verdict": regression.verdict.value,
        "message": clip(regression.message, _MESSAGE_CHARACTERS),
        "figures": [_figure(each) for each in first[:_MOST_FIGURES]],
    }


def _figure(figure: Figure) -> dict[str, str]:
    change = "" if figure.change_percent is None else f"{figure.change_percent:+.1f} %"
    if figure.low_percent is not None and figure.high_percent is not None:
        change += f" ({figure.low_percent:+.1f} to {figure.high_percent:+.1f} %)"
    golden, found = ("none" if each is None else f"{each:,.4g} {figure.unit}" for each in (figure.golden, figure.found))
    verdict = figure.verdict.value if figure.verdict else ""
    return {"name": clip(figure.name, 96), "golden": golden, "found": found, "change": change, "verdict": verdict}


def with_regression(message: bytes, regression: dict[str, Any] | None) -> bytes:
    """Return the termination message of a success with what it was judged as, small enough for Kubernetes."""
    if regression is None:
        return message
    said: dict[str, Any] = msgspec.json.decode(message)
    said = (said if "summary" in said else {"summary": said}) | {"regression": dict(regression)}
    figures: list[dict[str, str]] = said["regression"].get("figures") or []
    for dropped in _OF_THE_SUMMARY:
        if len(msgspec.json.encode(said)) <= MESSAGE_BYTES:
            break
        said["summary"].pop(dropped, None)
    while figures and len(msgspec.json.encode(said)) > MESSAGE_BYTES:
        figures = said["regression"]["figures"] = figures[:-1]
    while (words := said["regression"]["message"]) and len(msgspec.json.encode(said)) > MESSAGE_BYTES:
        # Characters outside ASCII take more bytes, and half a message is none.
        said["regression"]["message"] = clip(words, len(words) * 3 // 4)
    return msgspec.json.encode(said)
