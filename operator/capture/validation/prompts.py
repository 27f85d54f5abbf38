"""What is to be known of the prompts of a capture: random tokens say nothing of acceptance."""

from collections.abc import Mapping
from typing import Any, Final

from specdecode_operator.capture.files.manifest import Manifest

RANDOM_PROMPTS: Final = (
    "the prompts are random tokens (workload.prompts): times and memory hold for other prompts of these lengths,"
    " acceptance does not: 0.13 to 0.27 is usual, and more where a model repeats itself; decide by prompts of your own"
)
_TRACE: Final = "Trace"


def are_random(workload: Mapping[str, Any]) -> bool:
    """Whether the prompts of a manifest's workload are; one without prompts has the usual ones, which are."""
    prompts = workload.get("prompts", {"synthetic": {}})
    if not isinstance(prompts, Mapping):
        return False
    dataset = prompts.get("dataset")
    return prompts.get("synthetic") is not None or (isinstance(dataset, Mapping) and dataset.get("format") == _TRACE)


def prompt_notes(workload: Mapping[str, Any], summary: Mapping[str, Any]) -> list[str]:
    """Return the doubt about acceptance that was measured with random prompts, if it was; from a manifest's parts."""
    return [RANDOM_PROMPTS] if summary.get("speculation") and are_random(workload) else []


def prompt_status(manifest: Manifest) -> dict[str, Any]:
    """Return what ``status.summary`` of a SpecDecodeCapture says of the prompts."""
    notes = prompt_notes(manifest.workload, manifest.summary)
    return {"promptNotes": notes} if notes else {}
