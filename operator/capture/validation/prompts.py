"""What is to be known of the prompts of a capture: random tokens say nothing of acceptance."""

from collections.abc import Mapping
from typing import Any, Final

from specdecode_operator.capture.files.manifest import Manifest

RANDOM_PROMPTS: Final = (
    "the prompts are random tokens (workload.prompts): times and memory hold for other prompts of these lengths,"
    " acceptance does not: decide by prompts of a dataset"
)
_TRACE: Final = "Trace"


def prompt_notes(workload: Mapping[str, Any], summary: Mapping[str, Any]) -> list[str]:
    """Return the doubt about acceptance that was measured with random prompts, if it was; from a manifest's parts."""
    return [RANDOM_PROMPTS] if summary.get("speculation") and _are_random(workload.get("prompts")) else []


def prompt_status(manifest: Manifest) -> dict[str, Any]:
    """Return what ``status.summary`` of a SpecDecodeCapture says of the prompts."""
    notes = prompt_notes(manifest.workload, manifest.summary)
    return {"promptNotes": notes} if notes else {}


def _are_random(prompts: Any) -> bool:
    # What is not there is not known: the operator spells every default out.
    if not isinstance(prompts, Mapping):
        return False
    dataset = prompts.get("dataset")
    return "synthetic" in prompts or (isinstance(dataset, Mapping) and dataset.get("format") == _TRACE)
