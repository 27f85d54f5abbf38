"""What loads come to: one verdict, and the load from which an arm stops paying."""

from pathlib import Path

import msgspec
import pytest

from specdecode_operator.api.capture_status import ArmVerdict
from specdecode_operator.capture.comparison.arm_verdict import arm_verdict, crossover, percent, sentence
from specdecode_operator.capture.comparison.compare_arms import compare_capture
from specdecode_operator.capture.comparison.comparison_file import Load, LoadVerdict
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


def asked(load: Load, ratio: float, low: float, high: float, **others: int | None) -> Load:
    compared = load.compared
    assert compared is not None
    ends = {"low": low, "high": high, "blocks_low": low, "blocks_high": high}
    found = msgspec.structs.replace(
        compared, verdict=I, ratio=ratio, blocks=32, blocks_needed=None, repetitions_needed=None
    )
    return msgspec.structs.replace(load, compared=msgspec.structs.replace(found, **ends, **others))


@pytest.mark.parametrize(
    ("needed", "repetitions", "said"),
    [
        ({"repetitions_needed": 4, "blocks_needed": 60}, 2, "about 4 repetitions in place of 2 would tell"),
        # Phases are cut into sixteen blocks, however long: more of them are repetitions, or longer phases.
        ({"repetitions_needed": 2, "blocks_needed": 100}, 2, "about 3.2 times as many requests would tell"),
        (
            {"repetitions_needed": 3, "blocks_needed": 96},
            2,
            "about 3 repetitions in place of 2 with 2 times as many requests would tell",
        ),
        # Enough of both as measured, and undecided all the same.
        ({"repetitions_needed": 2, "blocks_needed": 11}, 2, "about 3 repetitions in place of 2 would tell"),
        ({}, 2, "more than 20 repetitions, or many times as many requests, would be needed to tell"),
    ],
)
def test_what_would_tell_is_what_a_capture_can_be_given(
    load: Load, needed: dict[str, int], repetitions: int, said: str
) -> None:
    of_arm = [asked(load, 1.04, 0.95, 1.1, **needed)]
    assert said in sentence(ArmVerdict.INCONCLUSIVE, of_arm, of_arm, None, None, 0.95, repetitions, None)


def test_no_difference_is_told_from_an_interval_that_hides_one(load: Load) -> None:
    narrow, wide = [asked(load, 1.004, 0.99, 1.02)], [asked(load, 1.004, 0.8, 1.3)]
    said = [sentence(ArmVerdict.INCONCLUSIVE, each, each, None, None, 0.95, 2, None) for each in (narrow, wide)]
    assert "more repetitions" not in said[0]
    assert "intervals are wide: more repetitions make them narrower" in said[1]
