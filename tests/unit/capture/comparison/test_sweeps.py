"""Comparisons whose phases, or whose arms, ask something of their own: sweeps, and precisions before and after."""

from dataclasses import replace
from pathlib import Path

import pytest

from specdecode_operator.capture.comparison.compare_arms import compare_capture
from tests.support.compared_captures import PLAIN, RATES, SPECULATING, MadeCapture

SWEEP = MadeCapture(arrivals="closed:2,closed:24", requests=320, curve=((1, 10.0), (16, 11.0), (128, 60.0)))
DEAR = replace(SPECULATING, rates=(0.5, 0.2, 0.1, 0.05), draft_ms=1.0)
BF16 = {"targetQuantization": "BF16", "kvCacheDtype": "auto"}


def test_phases_of_a_sweep_are_told_by_name_and_have_no_crossover(tmp_path: Path) -> None:
    """The same pair without temperatures turns with load, and says where: test_compare."""
    made = replace(SWEEP, arms={"plain": PLAIN, "dear": DEAR}, temperatures=("0.0", "1.0"))
    found = compare_capture(made.make(tmp_path)).arm("dear")
    assert [load.asks for load in found.loads] == ["temperature 0.0", "temperature 1.0"]
    assert found.verdict == "DependsOnLoad"
    assert found.crossover_running is None
    assert "in closed-2" in found.message
    assert "in closed-24" in found.message
    assert "running" not in found.message


def quantized(rates: tuple[float, ...], plan: dict[str, str], k: int = 4) -> MadeCapture:
    """A capture before and after another precision."""
    before = replace(SPECULATING, plan=BF16)
    return MadeCapture(arms={"bf16": before, "fp8": replace(SPECULATING, rates=rates[:k], plan=BF16 | plan)})


@pytest.mark.parametrize(
    ("rates", "plan", "said"),
    [
        ((0.7, 0.5, 0.32, 0.2), {"targetQuantization": "FP8"}, "points less, more than 5, say that the draft no"),
        (RATES, {"targetQuantization": "FP8"}, "it cost no more than 5 points, the draft still fits"),
        (RATES, {"kvCacheDtype": "fp8"}, "its KV cache is in fp8, the baseline's in auto: it cost no more than 5"),
    ],
)
def test_another_precision_is_held_to_five_points_and_never_called_equal(
    tmp_path: Path, rates: tuple[float, ...], plan: dict[str, str], said: str
) -> None:
    found = compare_capture(quantized(rates, plan).make(tmp_path))
    (note,) = (each for each in found.notes if "acceptance is" in each)
    assert note.startswith("arm fp8: acceptance is ")
    assert said in note
    arm = found.arm("fp8")
    assert arm.outputs is not None
    assert arm.outputs.outputs == "Lossy"
    assert arm.lossy is not None
    assert arm.lossy in next(each for each in found.notes if "may answer otherwise" in each)


def test_answers_of_another_precision_do_not_hide_its_goodput(tmp_path: Path) -> None:
    """Whoever quantizes asked for other answers: that is told, and no reason to withhold the verdict."""
    after = replace(SPECULATING, plan=BF16 | {"targetQuantization": "FP8"}, slower=0.7, greedy=(7, 7))
    made = MadeCapture(arms={"bf16": replace(SPECULATING, plan=BF16), "fp8": after})
    assert compare_capture(made.make(tmp_path)).arm("fp8").verdict == "Pays"


def test_acceptance_at_another_k_says_nothing_of_precision(tmp_path: Path) -> None:
    found = compare_capture(quantized(RATES, {"targetQuantization": "FP8"}, k=2).make(tmp_path))
    assert not any("acceptance is" in each for each in found.notes)


def test_equal_precisions_are_not_held_to_anything(tmp_path: Path) -> None:
    found = compare_capture(quantized((0.5, 0.2, 0.1, 0.1), {}).make(tmp_path))
    assert not any("acceptance is" in each or "may answer otherwise" in each for each in found.notes)
