"""What our rules let pass, drawn at random with every method, the real vLLM takes for what was meant."""

import pytest
from hypothesis import Phase, assume, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from specdecode_operator.enums import Method
from specdecode_operator.vllm.extra_args_rules import extra_args_problems
from specdecode_operator.vllm.profiles import EngineProfile, find_profile
from specdecode_operator.vllm.serving_rules import serving_problems
from specdecode_operator.vllm.settings import EngineSettings
from specdecode_operator.vllm.speculation_rules import speculation_problems
from tests.engine.contract_cases import METHODS
from tests.engine.contract_checks import Vllm, check_parsed, check_started, skip_without_package
from tests.engine.contract_draws import any_settings, settings_of

VERSION, DRAWS = "0.32", 40
"""The newest version that has all methods, and how often each is drawn."""


def passes(settings: EngineSettings, profile: EngineProfile) -> bool:
    """Whether our rules have nothing against it."""
    return not (
        serving_problems(settings, profile)
        or speculation_problems(settings, profile)
        or extra_args_problems(settings.extra_args, profile)
    )


def check_drawn(vllm: Vllm, drawn: st.SearchStrategy[EngineSettings], examples: int) -> None:
    """Ask the engine about so many settings that pass."""

    @hypothesis_settings(max_examples=examples, deadline=None)
    @given(settings=drawn)
    def check(settings: EngineSettings) -> None:
        assume(passes(settings, vllm.profile))
        check_parsed(vllm, settings)
        check_started(vllm, settings)

    check()


def test_vllm_accepts_random_settings_that_pass_our_rules(vllm: Vllm) -> None:
    check_drawn(vllm, any_settings, 75)


@pytest.mark.parametrize("method", METHODS)
def test_vllm_accepts_random_settings_of_each_method_that_pass_our_rules(vllm: Vllm, method: Method) -> None:
    if method not in vllm.profile.ended_methods:
        skip_without_package(vllm, method)
        check_drawn(vllm, settings_of(method), 8)


@pytest.mark.parametrize("method", METHODS)
def test_enough_random_settings_of_each_method_pass_our_rules(method: Method) -> None:
    profile = find_profile(VERSION)
    drawn = []

    @hypothesis_settings(max_examples=DRAWS, database=None, derandomize=True, phases=[Phase.generate])
    @given(settings=settings_of(method))
    def draw(settings: EngineSettings) -> None:
        drawn.append(passes(settings, profile))

    draw()
    assert sum(drawn) > DRAWS / 8
