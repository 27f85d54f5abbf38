"""Definitions of figures, and figures computed from kept samples."""

from collections import Counter

import pytest

from specdecode_operator.stats.figures import (
    FIGURES,
    FIGURES_WITHOUT_LIMIT,
    SAMPLE_INTERVAL_S,
    WINDOW_S,
    SampleBuffer,
    find_figure,
)
from specdecode_operator.stats.measures import POD_LEVEL, Scope
from specdecode_operator.vllm.profiles import KNOWN_VERSIONS, find_profile
from tests.support.figure_cases import expected, hear, page


@pytest.mark.parametrize("version", KNOWN_VERSIONS)
def test_all_vllm_versions_have_the_same_metrics(version: str) -> None:
    assert find_profile(version).metrics == find_profile(KNOWN_VERSIONS[-1]).metrics


def test_recorded_figures_have_unique_names() -> None:
    names = Counter(figure.recorded(level) for figure in FIGURES for level in figure.levels)
    assert set(names.values()) == {1}


def test_promql_of_figure_uses_window_and_pod_scope() -> None:
    asked = find_figure("acceptance_rate").promql(Scope(POD_LEVEL, "1h"))
    assert asked.count("sum by (namespace, specdecode_deployment, pod)") == 2
    assert asked.count("[1h]") == 2
    assert asked.count('specdecode_deployment!=""') == 2, "engines of others are never mixed in"


MINUTE_S = 60.0


def looked(*pods: str, minutes: int) -> SampleBuffer:
    looks = SampleBuffer()
    for minute in range(minutes + 1):
        for pod in pods:
            hear(looks, pod, page(pod, minute), minute * MINUTE_S)
    return looks


def test_figures_from_samples_match_prometheus() -> None:
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


def test_figures_need_two_samples_of_an_engine() -> None:
    looks = looked("a", minutes=0)
    hear(looks, "a", page("a", 1), SAMPLE_INTERVAL_S - 1)
    assert looks.figures(SAMPLE_INTERVAL_S) is None, "too close to the first"
    hear(looks, "a", "hello", SAMPLE_INTERVAL_S)
    assert looks.figures(SAMPLE_INTERVAL_S) is None, "no page of an engine"
    hear(looks, "a", page("a", 1), SAMPLE_INTERVAL_S)
    assert looks.figures(SAMPLE_INTERVAL_S) is not None


def test_page_is_sampled_at_most_once_per_interval() -> None:
    looks = looked("a", minutes=1)
    assert not looks.names_due("a", MINUTE_S + SAMPLE_INTERVAL_S - 1)
    assert looks.names_due("a", MINUTE_S + SAMPLE_INTERVAL_S)


def test_removed_and_silent_engines_are_left_out() -> None:
    looks = looked("a", "b", minutes=5)
    both = looks.figures(5 * MINUTE_S)
    looks.retain({"a"})
    one = looks.figures(5 * MINUTE_S)
    assert both is not None
    assert one is not None
    assert one[0]["output_tokens_per_second"][""] < both[0]["output_tokens_per_second"][""]
    assert looks.figures(5 * MINUTE_S + WINDOW_S) is None
