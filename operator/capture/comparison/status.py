"""``status.comparison`` of a SpecDecodeCapture: decimals are text, as everywhere in that API."""

import json
from collections.abc import Iterator
from typing import Any, Final

from specdecode_operator.api.status.comparison import (
    ArmVerdict,
    ComparedArm,
    ComparedLoad,
    ComparisonStatus,
    Outputs,
)
from specdecode_operator.capture.comparison.result import Arm, Comparison
from specdecode_operator.capture.comparison.sentences import compared_loads

MOST_BYTES: Final = 3072
"""Of a termination message's 4096: the rest is for status.summary."""

_SHORTER: Final = ((400, 32), (200, 16), (160, 8), (120, 4), (120, 2), (80, 1), (60, 0))
"""Letters of each message, and loads of each arm, tried until it fits."""


def comparison_status(comparison: Comparison, most_bytes: int = MOST_BYTES) -> dict[str, Any]:
    """Return the status that a comparison gives, as it stands in the object, in so many bytes of JSON at most.

    Where it would be more, messages are cut, then loads in the middle are left out: all of it is in comparison.json.
    """
    status = _whole(comparison)
    for letters, loads in _SHORTER:
        if len(json.dumps(status, separators=(",", ":"))) <= most_bytes:
            break
        for arm in status["arms"]:
            text = arm["message"]
            arm["message"] = text if len(text) <= letters else f"{text[: letters - 1]}…"
            arm["loads"] = _thinned(arm.get("loads", []), loads)
    return status


def _thinned(loads: list[Any], most: int) -> list[Any]:
    """Return some of the loads, evenly, the first and the last among them."""
    if len(loads) <= most:
        return loads
    return [loads[round(place * (len(loads) - 1) / max(1, most - 1))] for place in range(most)]


def _whole(comparison: Comparison) -> dict[str, Any]:
    baseline, *others = comparison.arms
    status = ComparisonStatus(
        baseline=baseline.name,
        level_percent=round(100 * comparison.level),
        arms=[
            ComparedArm(
                name=arm.name,
                verdict=ArmVerdict(arm.verdict or ArmVerdict.INCONCLUSIVE),
                message=arm.message,
                outputs=Outputs(arm.outputs.outputs) if arm.outputs is not None else Outputs.NOT_CHECKED,
                acceptance_percent=None if arm.drafting is None else round(100 * arm.drafting.acceptance),
                loads=list(_loads(baseline, arm)),
            )
            for arm in others
        ],
        crossover_running=_decimal(others[0].crossover_running, 1) if others else None,
    )
    return status.model_dump(mode="json", by_alias=True, exclude_none=True)


def _loads(baseline: Arm, arm: Arm) -> Iterator[ComparedLoad]:
    of_baseline = {each.phase: each for each in baseline.loads}
    for load, compared in compared_loads(arm.loads):
        plain = of_baseline[load.phase]
        yield ComparedLoad(
            phase=load.phase,
            running=_decimal(plain.running, 1) or "0",
            baseline_goodput=_decimal(plain.goodput, 1) or "0",
            goodput=_decimal(load.goodput, 1) or "0",
            verdict=ArmVerdict(compared.verdict),
            ratio=_decimal(compared.ratio, 3),
            low=_decimal(compared.low, 3),
            high=_decimal(compared.high, 3),
        )


def _decimal(value: float | None, digits: int) -> str | None:
    return None if value is None else f"{value:.{digits}f}"
