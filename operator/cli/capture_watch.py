"""Watches a capture on its way, and tells what is new."""

import json
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

from specdecode_operator.api.base import Body
from specdecode_operator.api.capture_status import CapturePhase
from specdecode_operator.cli.kubectl import Kubectl

RESOURCE: Final = "specdecodecaptures.specdecode.io"
FINAL: Final = frozenset({CapturePhase.SUCCEEDED, CapturePhase.FAILED, CapturePhase.CANCELLED})
_SERVING: Final = frozenset({CapturePhase.LOADING, CapturePhase.SUCCEEDED})
_PERIOD_S: Final = 2.0
_LOAD_CONTAINER: Final = "load"


class CaptureError(Exception):
    """A capture did not come to what was waited for, in one line that says why."""


def phase_of(capture: Body) -> CapturePhase | None:
    """Return how far a capture is; None before the operator has looked at it."""
    phase = capture.get("status", {}).get("phase")
    return CapturePhase(phase) if phase in {each.value for each in CapturePhase} else None


def words_of(capture: Body) -> str:
    """Return what the operator says of a capture now."""
    conditions = {each["type"]: each for each in capture.get("status", {}).get("conditions") or []}
    for type_ in ("Stalled", "WaitingForGPUs", "Reconciling"):
        if conditions.get(type_, {}).get("status") == "True":
            return str(conditions[type_]["message"])
    return str(conditions.get("Succeeded", conditions.get("Ready", {})).get("message", "not looked at yet"))


def get_capture(kubectl: Kubectl, name: str) -> Body:
    """Return a capture.

    Raises
    ------
    CaptureError
        When there is none of this name.
    """
    found = kubectl.find(RESOURCE, name)
    if found is None:
        names = ", ".join(each["metadata"]["name"] for each in kubectl.items(RESOURCE)) or "none"
        raise CaptureError(
            f"capture {name}: is not there (captures here: {names}): name another, or its namespace (-n)"
        )
    return found


def wait_for(
    kubectl: Kubectl, name: str, phases: frozenset[CapturePhase], timeout_s: float, say: Callable[[str], None]
) -> Body:
    """Wait until a capture is in one of these phases; tell each change on the way.

    Raises
    ------
    CaptureError
        When it stalls, ends otherwise, or takes longer.
    """
    told = ""
    deadline = time.monotonic() + timeout_s
    while True:
        capture = get_capture(kubectl, name)
        phase = phase_of(capture)
        if phase in phases:
            return capture
        words = f"{phase or CapturePhase.PENDING}: {words_of(capture)}"
        if phase in FINAL or _is_stalled(capture):
            raise CaptureError(f"capture {name}: {words}")
        if words != told:
            say(f"  {words}")
            told = words
        if time.monotonic() > deadline:
            raise CaptureError(f"capture {name}: after {timeout_s:.0f} s still {words}")
        time.sleep(_PERIOD_S)


def wait_until_it_serves(kubectl: Kubectl, name: str, timeout_s: float, say: Callable[[str], None]) -> Body:
    """Wait until the capture's engine serves, or served: all may be over already.

    Raises
    ------
    CaptureError
        When the capture stalls, failed, was cancelled, or takes longer.
    """
    return wait_for(kubectl, name, _SERVING, timeout_s, say)


def _is_stalled(capture: Body) -> bool:
    conditions = capture.get("status", {}).get("conditions") or []
    stalled: Body = next((each for each in conditions if each["type"] == "Stalled"), {})
    current = stalled.get("observedGeneration") == capture["metadata"].get("generation")
    return current and stalled.get("status") == "True"


def progress(kubectl: Kubectl, capture: Body) -> Iterator[dict[str, Any]]:
    """Yield what the load generator said of its progress and says, until it ends.

    The stream may break before; the caller looks at the phase afterwards.
    """
    job = capture["status"].get("job")
    if not job:
        return
    stream = kubectl.stream("logs", f"job/{job}", f"--container={_LOAD_CONTAINER}", "--follow")
    try:
        for line in stream.stdout or ():
            try:
                said = json.loads(line)
            except ValueError:
                continue
            if isinstance(said, dict) and "phase" in said:
                yield said
    finally:
        stream.terminate()
        stream.communicate()


def progress_text(said: dict[str, Any]) -> str:
    """Return one line of progress for people."""
    parts = [f"{said.get('phase'):<14}", f"sent {said.get('sent', 0):>6,}"]
    if said.get("recorded") is not None:
        parts.append(f"recorded {said['recorded']:>6,}")
    parts.append(f"answered {said.get('completed', 0):>6,}")
    if said.get("failed"):
        parts.append(f"failed {said['failed']:,}")
    if said.get("rate") is not None:
        parts.append(f"{said['rate']:.1f}/s")
    if said.get("eta_s") is not None:
        parts.append(f"{said['eta_s']:.0f} s to go")
    return "  ".join(parts)
