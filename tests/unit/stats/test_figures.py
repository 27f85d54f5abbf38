"""Figures are defined for all engines alike; what they come to is asked of Prometheus (tests/component/admission)."""

from collections import Counter

import pytest

from specdecode_operator.stats.figures import FIGURES, find_figure
from specdecode_operator.stats.measures import POD_LEVEL, Scope
from specdecode_operator.vllm.profiles import KNOWN_VERSIONS, find_profile


@pytest.mark.parametrize("version", KNOWN_VERSIONS)
def test_engines_of_all_versions_are_read_by_the_same_rules(version: str) -> None:
    assert find_profile(version).metrics == find_profile(KNOWN_VERSIONS[-1]).metrics


def test_each_recorded_figure_has_a_name_of_its_own() -> None:
    names = Counter(figure.recorded(level) for figure in FIGURES for level in figure.levels)
    assert set(names.values()) == {1}


def test_a_figure_is_taken_over_any_window_and_of_each_pod() -> None:
    asked = find_figure("acceptance_rate").promql(Scope(POD_LEVEL, "1h"))
    assert asked.count("sum by (namespace, specdecode_deployment, pod)") == 2
    assert asked.count("[1h]") == 2
    assert asked.count('specdecode_deployment!=""') == 2, "engines of others are never mixed in"
