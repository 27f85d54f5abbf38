"""What our rules refuse, the real vLLM does not take either: no rule is stricter than what it stands for.

`test_contract.py` shows the other direction. Each place of the rules that says
no has a case in `refusal_cases.py` or `refused_pairs.py` that comes to no
other place; its line is rendered as if no rule were there, and the real parser
and configuration are asked. Where vLLM takes a line, the case says why we do
not, and this holds for as long as vLLM takes it.
"""

import ast
import importlib
import json
import pkgutil
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import assume, given
from hypothesis import settings as hypothesis_settings

from specdecode_operator import vllm
from specdecode_operator.deployment import model_checks
from specdecode_operator.enums import Method, RejectionSampling
from specdecode_operator.problems import Problem
from specdecode_operator.vllm import extra_args_parser, extra_args_rules
from specdecode_operator.vllm.arguments import command_line
from specdecode_operator.vllm.extra_args_rules import extra_args_problems
from specdecode_operator.vllm.flag_values import flag_value_problems
from specdecode_operator.vllm.profiles import KNOWN_VERSIONS, EngineProfile, find_profile
from specdecode_operator.vllm.serving_rules import serving_problems
from specdecode_operator.vllm.settings import EngineSettings
from specdecode_operator.vllm.speculation_rules import speculation_problems
from specdecode_operator.vllm.speculative_config import extra_config_problems
from specdecode_operator.vllm.versions import FLY_KEY
from tests.engine import suffix_package
from tests.engine.contract_cases import FAILING_EXTRA, LOSSY_CHECKS, TARGET, with_models_under
from tests.engine.contract_checks import Vllm, check_parsed, check_started
from tests.engine.contract_draws import any_settings
from tests.engine.differences import assert_none
from tests.engine.engine_versions import NEWEST
from tests.engine.refusal_cases import REFUSALS
from tests.engine.refusal_sites import refusal_sites, sites_visited
from tests.engine.refused_pairs import PAIRS, WITHOUT_PACKAGE
from tests.engine.refused_specs import settings_despite
from tests.engine.verdicts import Changed, Later, Refused, Verdict

NOT_OF_THE_ENGINE = {
    "environment.owned_variable_problems": "variables that the operator itself sets",
    "profiles.find_profile": "versions that nobody here knows",
    "serving_rules._version_problems": "flags that a version lacks, which its parser refuses: none of a field so far",
    "serving_rules.image_problems": "images of versions that nobody here knows",
    "hf_overrides._rejected": "what vLLM takes, and answers otherwise with: test_ropes.py",
    "speculation_rules._head_problems 4": "a copy of a head in float32, at which vLLM ends after loading",
    "speculative_config.extra_config_problems 3": "keys of fly without it, which vLLM ignores where it knows them",
    "model_checks._unregistered 1": "classes that a version does not register: test_classes.py",
    "model_checks._unregistered 2": "the same of a model with a config of its own",
    "extra_args_rules.extra_args_problems": "whatever is wrong with one argument: see FAILING_EXTRA",
}
"""Places that say no to what an engine never sees, or that other tables are about."""


def modules() -> list[ModuleType]:
    """Return what says no for the engine's sake."""
    names = [f"{vllm.__name__}.{module.name}" for module in pkgutil.iter_modules(vllm.__path__)]
    return [*map(importlib.import_module, names), model_checks]


def problems(settings: EngineSettings, profile: EngineProfile) -> list[Problem]:
    """What all rules of the engine say of settings."""
    speculation = settings.speculation
    further = json.loads(speculation.extra_config or "{}") if speculation else {}
    return [
        *serving_problems(settings, profile),
        *flag_value_problems(settings, profile),
        *speculation_problems(settings, profile),
        *extra_config_problems(further, profile),
    ]


def told_of(settings: EngineSettings) -> Callable[[], object]:
    """Return how to ask the rules of the newest version that says no."""
    newest_first = map(find_profile, reversed(KNOWN_VERSIONS))
    profile = next(profile for profile in newest_first if problems(settings, profile))
    return lambda: problems(settings, profile)


def test_every_refusal_in_the_rules_has_its_own_case(tmp_path: Path) -> None:
    askers = {name: told_of(settings) for name, (settings, _) in REFUSALS.items()}
    askers |= {name: lambda body=body: settings_despite(body, tmp_path) for name, (body, _) in PAIRS.items()}
    assert len(askers) == len(REFUSALS) + len(PAIRS)
    known = refusal_sites(modules())
    visited = {}
    for name, ask in askers.items():
        with sites_visited() as places:
            ask()
        visited[name] = places & known
    assert {name: places for name, places in visited.items() if len(places) != 1} == {}, "one place a case"
    assert set.union(*visited.values()) == known - set(NOT_OF_THE_ENGINE)


def departure(vllm: Vllm, settings: EngineSettings, verdict: Verdict) -> str:
    """Return what vLLM does otherwise than the verdict says; empty where it does that."""
    oracle, line = vllm.oracle(settings), command_line(settings, vllm.profile)[2:]
    started = oracle.ask("start", line)
    if isinstance(verdict, Refused):
        said = started.error or "takes it"
        return "" if verdict.words in said else said
    if started.error:
        return started.error
    if isinstance(verdict, Later):
        said = oracle.ask("after_start", line, verdict.check).error or "takes it"
        return "" if verdict.words in said else said
    if isinstance(verdict, Changed):
        found = started.value[verdict.key]
        return "" if found == verdict.becomes else f"{verdict.key} is {found}"
    return ""


def adapts_later(settings: EngineSettings, vllm: Vllm) -> bool:
    """Whether a version refuses to adapt with a method, and so says nothing of the rest: see test_contract.py."""
    speculation, known = settings.speculation, vllm.profile.adaptive_verification
    if speculation is None or not speculation.spec.adaptive_verification:
        return False
    method = speculation.method
    return known.methods == {Method.DSPARK} or method in known.later_methods or vllm.profile.runners.get(method) == "V1"


def checks_later(settings: EngineSettings, vllm: Vllm) -> bool:
    """Whether a version has no such check of drafted tokens, and so says nothing of the rest: see below."""
    is_lossy = (
        settings.speculation is not None and settings.speculation.spec.rejection_sampling is RejectionSampling.FLY
    )
    return is_lossy and FLY_KEY not in vllm.profile.speculative_keys


@pytest.mark.parametrize("name", LOSSY_CHECKS)
def test_lossy_rejection_sampling_is_accepted_from_the_listed_version(vllm: Vllm, name: str) -> None:
    settings = LOSSY_CHECKS[name]
    if checks_later(settings, vllm):
        assert problems(settings, vllm.profile)
        assert "Input should be 'standard'" in (vllm.start(settings).error or "accepted")
        return
    assert problems(settings, vllm.profile) == []
    check_parsed(vllm, settings)
    check_started(vllm, settings)
    assert settings.speculation is not None
    window, threshold = vllm.start(settings).value["entropy"]
    assert (window, threshold) == (min(6, settings.speculation.num_speculative_tokens - 1), 0.3)


def later(settings: EngineSettings, vllm: Vllm) -> bool:
    """Whether a version lacks what a case is about."""
    return adapts_later(settings, vllm) or checks_later(settings, vllm)


def of_this_version(vllm: Vllm) -> Iterator[tuple[str, EngineSettings, Verdict]]:
    """Yield the cases that a version's rules refuse, but for flags that only later versions have."""
    for name, (settings, verdict) in REFUSALS.items():
        known = not set(settings.extra_args) & set(vllm.profile.later_flags)
        if known and problems(settings, vllm.profile) and not later(settings, vllm):
            yield name, with_models_under(vllm.models, settings), verdict


def test_vllm_refuses_settings_that_our_rules_refuse(vllm: Vllm) -> None:
    departures = {name: departure(vllm, *case) for name, *case in of_this_version(vllm)}
    assert_none(f"{name}: {what}" for name, what in departures.items() if what)


def test_vllm_refuses_pairs_that_our_rules_refuse(vllm: Vllm, tmp_path: Path) -> None:
    pairs = {
        name: (body, verdict)
        for name, (body, verdict) in PAIRS.items()
        if body.get("engine", {}).get("version", NEWEST) == vllm.profile.version
    }
    if suffix_package.PACKAGE.find():
        # It is there beside every version: the contract asks for the method, then.
        pairs.pop(WITHOUT_PACKAGE, None)
    if not pairs:
        pytest.skip("the pairs are of other versions")
    departures = {}
    for name, (body, verdict) in pairs.items():
        settings, _ = settings_despite(body, tmp_path / name.replace(" ", "-"))
        departures[name] = departure(vllm, settings, verdict)
    assert_none(f"{name}: {what}" for name, what in departures.items() if what)


def proven() -> dict[str, set[type]]:
    """Return the verdicts on each place, of all cases that come to it."""
    found: dict[str, set[type]] = {}
    for settings, verdict in REFUSALS.values():
        with sites_visited() as places:
            problems(settings, find_profile(NEWEST))
        for place in places:
            found.setdefault(place, set()).add(type(verdict))
    return found


REFUSED_AT_START = {place for place, verdicts in proven().items() if verdicts == {Refused}}


@hypothesis_settings(max_examples=150, deadline=None)
@given(settings=any_settings)
def test_random_settings_refused_by_our_rules_are_refused_by_vllm(vllm: Vllm, settings: EngineSettings) -> None:
    with sites_visited() as places:
        told = problems(settings, vllm.profile)
    assume(places & REFUSED_AT_START)
    assert not vllm.start(settings).ok, told


OURS = {
    "--": "says nothing, as the last argument",
    "--tensor-parallel-size 4": "a field says it",
    "--tensor-par 4": "a field says it",
    f"--hf-overrides{'.a' * 40} 1": "objects in one another, of which thousands would end what reads them here",
}
"""Arguments that vLLM's parser takes, and why we do not."""


def complaints() -> Iterator[str]:
    """Yield a pattern for each text that the parser of arguments and its rules return of an argument."""
    files = [Path(module.__file__) for module in (extra_args_parser, extra_args_rules)]
    for node in (each for file in files for each in ast.walk(ast.parse(file.read_text(encoding="utf-8")))):
        if isinstance(node, ast.Return) and node.value is not None:
            for text in ast.walk(node.value):
                if isinstance(text, ast.JoinedStr):
                    yield "".join(
                        re.escape(part.value) if isinstance(part, ast.Constant) else ".*" for part in text.values
                    )
                elif isinstance(text, ast.Constant) and isinstance(text.value, str) and " " in text.value:
                    yield re.escape(text.value)


def test_every_message_about_extra_args_has_a_case() -> None:
    lines = [*(line.split() for line in (*FAILING_EXTRA, *OURS)), ["--seed 1 --port 2"]]
    profiles = [find_profile(version) for version in KNOWN_VERSIONS]
    later = [(profile, flag.split()) for profile in profiles for flag in profile.later_flags]
    asked = [*((profiles[-1], line) for line in lines), *later]
    said = [problem.message for profile, line in asked for problem in extra_args_problems(line, profile)]
    assert [text for text in complaints() if not any(re.search(text, message) for message in said)] == []


def test_vllm_accepts_arguments_that_only_we_refuse(vllm: Vllm) -> None:
    answers = {line: vllm.cpu.ask("options_of", [TARGET, *line.split()]).error for line in OURS}
    assert answers == dict.fromkeys(OURS)
