"""Pages that are kept give the same figures as two looks at engines."""

import pytest

from specdecode_operator.stats.figures import FIGURES_WITHOUT_LIMIT, SAMPLE_INTERVAL_S, WINDOW_S, SampleBuffer
from tests.support.figure_cases import expected, hear, page

MINUTE_S = 60.0


def looked(*pods: str, minutes: int) -> SampleBuffer:
    looks = SampleBuffer()
    for minute in range(minutes + 1):
        for pod in pods:
            hear(looks, pod, page(pod, minute), minute * MINUTE_S)
    return looks


def test_figures_are_those_that_prometheus_is_held_to() -> None:
    found = looked("a", "b", minutes=20).figures(20 * MINUTE_S)
    assert found is not None
    values, over_s = found
    assert over_s == WINDOW_S
    compared = 0
    for name, known in expected():
        if name in {each.name for each in FIGURES_WITHOUT_LIMIT}:
            assert {label: round(value, 3) for label, value in values[name].items()} == pytest.approx(known, abs=1e-3)
            compared += 1
    assert compared > 10


def test_nothing_is_said_before_an_engine_was_looked_at_twice() -> None:
    looks = looked("a", minutes=0)
    hear(looks, "a", page("a", 1), SAMPLE_INTERVAL_S - 1)
    assert looks.figures(SAMPLE_INTERVAL_S) is None, "too close to the first"
    hear(looks, "a", "hello", SAMPLE_INTERVAL_S)
    assert looks.figures(SAMPLE_INTERVAL_S) is None, "no page of an engine"
    hear(looks, "a", page("a", 1), SAMPLE_INTERVAL_S)
    assert looks.figures(SAMPLE_INTERVAL_S) is not None


def test_a_page_is_read_for_figures_once_a_minute_however_many_there_were() -> None:
    looks = looked("a", minutes=1)
    assert not looks.names_due("a", MINUTE_S + SAMPLE_INTERVAL_S - 1)
    assert looks.names_due("a", MINUTE_S + SAMPLE_INTERVAL_S)


def test_engines_that_are_gone_or_silent_are_left_out() -> None:
    looks = looked("a", "b", minutes=5)
    both = looks.figures(5 * MINUTE_S)
    looks.retain({"a"})
    one = looks.figures(5 * MINUTE_S)
    assert both is not None
    assert one is not None
    assert one[0]["output_tokens_per_second"][""] < both[0]["output_tokens_per_second"][""]
    assert looks.figures(5 * MINUTE_S + WINDOW_S) is None


def test_engines_that_tell_more_of_one_thing_are_not_taken_for_those_that_tell_less() -> None:
    gauge = "vllm:num_requests_waiting"
    looks = SampleBuffer()
    for minute in (0, 1):
        less = "".join(line + "\n" for line in page("a", minute).splitlines() if gauge not in line)
        hear(looks, "less", less, minute * MINUTE_S)
        hear(looks, "more", page("a", minute), minute * MINUTE_S)
    alone = looked("a", minutes=1).figures(MINUTE_S)
    found = looks.figures(MINUTE_S)
    assert found is not None
    assert alone is not None
    assert found[0]["output_tokens_per_second"][""] == 2 * alone[0]["output_tokens_per_second"][""]
    assert found[0]["waiting_requests"] == alone[0]["waiting_requests"]
