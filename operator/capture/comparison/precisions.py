"""Arms that are served in another precision than the baseline: other answers, and whether the draft still fits."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from specdecode_operator.capture.comparison.reading.folders import ArmFolders, ArmManifest
from specdecode_operator.capture.comparison.result import Arm
from specdecode_operator.problems import shown

MOST_POINTS_LOST: Final = 5.0
"""Of acceptance, from where on a draft no longer fits a target that was quantized: a rule of thumb, which says where to
look. Goodput decides."""

_PRECISIONS: Final = {"targetQuantization": "its target is in", "kvCacheDtype": "its KV cache is in"}


def lossy_of(folders: ArmFolders, name: str) -> str | None:
    """Return why an arm may answer otherwise than the baseline by its settings, precision among them."""
    experiment = folders.experiment
    return experiment.lossy.get(name) or (_other_precision(folders, name) if name != experiment.baseline else None)


def precision_notes(folders: ArmFolders, arms: list[Arm]) -> Iterator[str]:
    """Yield what another precision did to acceptance, of arms that speculate as the baseline does."""
    baseline, *others = arms
    for arm in others:
        precision = _other_precision(folders, arm.name)
        if precision is None or arm.drafting is None or baseline.drafting is None or arm.engine is None:
            continue
        speculation = arm.engine.method, arm.drafting.k
        if baseline.engine is None or speculation != (baseline.engine.method, baseline.drafting.k):
            continue
        own, of_baseline = 100 * arm.drafting.acceptance, 100 * baseline.drafting.acceptance
        lost = of_baseline - own
        said = f"arm {arm.name}: acceptance is {own:.1f} %, the baseline's {of_baseline:.1f} %, and {precision}"
        if lost > MOST_POINTS_LOST:
            yield (
                f"{said}: {lost:.1f} points less, more than {MOST_POINTS_LOST:g}, say that the draft no longer fits:"
                " take a higher precision, a draft trained beside this one, or a smaller K"
            )
        else:
            yield f"{said}: it cost no more than {MOST_POINTS_LOST:g} points, the draft still fits"


def _other_precision(folders: ArmFolders, name: str) -> str | None:
    repetitions = folders.repetitions.get(name)
    if not repetitions:
        return None
    own, of_baseline = _plan(repetitions[0].manifest), _plan(folders.first)
    said = [
        f"{words} {shown(own[field], 40)}, the baseline's in {shown(of_baseline[field], 40)}"
        for field, words in _PRECISIONS.items()
        if field in own and field in of_baseline and own[field] != of_baseline[field]
    ]
    return " and ".join(said) or None


def _plan(manifest: ArmManifest) -> Mapping[str, Any]:
    plan = manifest.context.get("plan")
    return plan if isinstance(plan, Mapping) else {}
