"""What loads come to: one verdict, and the load from which an arm stops paying."""

from pathlib import Path

import msgspec
import pytest

from specdecode_operator.capture.comparison.compare import compare_capture
from specdecode_operator.capture.comparison.result import Load, LoadVerdict
from specdecode_operator.capture.comparison.sentences import arm_verdict, crossover, percent
from tests.support.compared_captures import MadeCapture

P, D, I = "Pays", "DoesNotPay", "Inconclusive"  # noqa: E741


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    folder: Path = MadeCapture(requests=16).make(tmp_path_factory.mktemp("capture"))
    return compare_capture(folder).arm("drafted").loads[0]


def loads(load: Load, *found: tuple[float, float, str]) -> list[Load]:
    """Make loads of (requests running, ratio, verdict)."""
    compared = load.compared
    assert isinstance(compared, LoadVerdict)
    return [
        msgspec.structs.replace(
            load,
            phase=f"at-{running}",
            running=running,
            compared=msgspec.structs.replace(compared, ratio=ratio, verdict=verdict),
        )
        for running, ratio, verdict in found
    ]


@pytest.mark.parametrize(
    ("verdicts", "verdict"),
    [
        ([P], P),
        ([P, I], P),
        ([I, D], D),
        ([I, I], I),
        ([], I),
        ([P, D], "DependsOnLoad"),
        ([D, I, P], "DependsOnLoad"),
    ],
)
def test_the_verdict_of_an_arm_is_that_of_the_loads_that_decide(load: Load, verdicts: list[str], verdict: str) -> None:
    assert arm_verdict(loads(load, *((at + 1, 1.0, each) for at, each in enumerate(verdicts))), None) == verdict


@pytest.mark.parametrize(
    ("found", "at"),
    [
        # As far above 1 as below it: in the middle, on a log scale.
        ([(1, 2.0, P), (16, 0.5, D)], 4.0),
        ([(16, 0.5, D), (1, 2.0, P)], 4.0),
        # What is not decided lies between, and on the line.
        ([(1, 2.0, P), (4, 1.0, I), (64, 0.5, D)], 4.0),
        ([(1, 2.0, P), (4, 2.0, P), (9, 0.5, D), (100, 0.1, D)], 6.0),
        ([(1, 2.0, P), (16, 1.5, P)], None),
        ([(1, 0.5, D), (16, 0.4, D)], None),
        # It pays at more load, as adaptive verification does.
        ([(1, 0.5, D), (16, 2.0, P)], None),
        ([(1, 0.5, D), (4, 2.0, P), (16, 0.5, D)], 8.0),
        ([(1, 2.0, P), (16, 0.9, I)], None),
        ([], None),
    ],
)
def test_the_crossover_is_where_the_ratio_falls_to_one(
    load: Load, found: list[tuple[float, float, str]], at: float | None
) -> None:
    of_arm = loads(load, *found)
    crossing = crossover(of_arm, of_arm)
    assert crossing == (None if at is None else pytest.approx(at, abs=0.06))


@pytest.mark.parametrize(
    ("ratio", "text"), [(1.184, "+18.4 %"), (0.91, "-9.0 %"), (2.5, "+150 %"), (1.0, "+0.0 %"), (0.75, "-25 %")]
)
def test_ratios_are_read_as_percent(ratio: float, text: str) -> None:
    assert percent(ratio) == text
