"""Verifying only as many drafted tokens as pay: what the engine is told, and what is refused before it starts."""

import json
from typing import Any

import pytest

from specdecode_operator.enums import METHODS_WITH_DRAFT, METHODS_WITH_SAMPLING, CudagraphMode, Method
from specdecode_operator.vllm.profiles import KNOWN_VERSIONS, EngineProfile, find_profile
from specdecode_operator.vllm.settings import EngineSettings
from specdecode_operator.vllm.speculation_rules import speculation_problems
from specdecode_operator.vllm.speculative_config import speculative_config
from tests.support.engine_settings import replace, speculating_with
from tests.unit.vllm.engine_cases import CPU, PLAIN

NEWEST = find_profile(KNOWN_VERSIONS[-1])
FIELD = "spec.speculation.adaptiveVerification"


def adapting(method: Method = Method.EAGLE3, **changes: Any) -> EngineSettings:
    draft = "/models/draft" if method in METHODS_WITH_DRAFT else None
    speculation = speculating_with(method, 4, draft_model=draft, adaptive_verification=True)
    return replace(PLAIN, speculation=speculation, **changes)


def said(settings: EngineSettings, profile: EngineProfile = NEWEST) -> str:
    return "\n".join(each.message for each in speculation_problems(settings, profile) if each.field == FIELD)


@pytest.mark.parametrize("wanted", [None, True, False])
def test_the_engine_is_told_what_the_user_said_and_nothing_else(wanted: bool | None) -> None:
    settings = adapting()
    assert settings.speculation is not None
    told = replace(settings, speculation=replace(settings.speculation, adaptive_verification=wanted))
    config = json.loads(speculative_config(told, NEWEST) or "{}")
    assert config.get("enable_adaptive_verification") is wanted


@pytest.mark.parametrize(
    ("version", "methods"),
    [
        ("0.28", {"dspark"}),
        ("0.29", {"dspark"}),
        ("0.30", {"dspark", "eagle", "eagle3", "mtp", "dflash"}),
        ("0.31", set(METHODS_WITH_SAMPLING)),
        (NEWEST.version, set(METHODS_WITH_SAMPLING)),
    ],
)
def test_each_version_adapts_with_the_methods_that_its_source_names(version: str, methods: set[str]) -> None:
    profile = find_profile(version)
    assert {method for method in profile.runners if not said(adapting(method), profile)} == methods


def test_a_method_that_a_later_version_adapts_with_names_that_version() -> None:
    assert said(adapting(Method.EAGLE3), find_profile("0.29")) == (
        "vLLM 0.29 adapts with dspark alone, not with eagle3; remove it, or set engine.version 0.30 or later"
    )
    assert said(adapting(Method.DRAFT_MODEL), find_profile("0.30")).endswith("or set engine.version 0.31 or later")
    assert "no draft that says how sure it is" in said(adapting(Method.NGRAM))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"cpu": CPU}, "which the CPU does not have"),
        ({"target_on_v1": True}, "V1 serves method eagle3 here"),
        ({"pipeline_parallel_size": 2}, "parallelism.pipeline 2"),
        ({"enforce_eager": True}, "which serving.enforceEager leaves out"),
        ({"cudagraph_mode": CudagraphMode.NONE}, "which serving.cudagraphMode NONE leaves out"),
        ({"cudagraph_mode": CudagraphMode.PIECEWISE}, "which serving.cudagraphMode PIECEWISE leaves out"),
        ({"extra_args": ("-O0",)}, "which engine.extraArgs -O0 leaves out"),
        ({"extra_args": ("--optimization-level", "1")}, "which engine.extraArgs -O1 leaves out"),
        ({"extra_args": ("--enable-lora",)}, "engine.extraArgs --enable-lora"),
        ({"extra_args": ("--return-sampling-mask",)}, "engine.extraArgs --return-sampling-mask"),
    ],
)
def test_what_excludes_it_is_named(changes: dict[str, Any], words: str) -> None:
    assert words in said(adapting(**changes))
    assert "\n" not in said(adapting(**changes)), "told once"
    settings = adapting(**changes)
    assert settings.speculation is not None
    without = replace(settings, speculation=replace(settings.speculation, adaptive_verification=False))
    assert said(without) == ""


@pytest.mark.parametrize(
    "changes",
    [
        {"cudagraph_mode": CudagraphMode.FULL_DECODE_ONLY},
        {"cudagraph_mode": CudagraphMode.FULL, "extra_args": ("-O1",)},
        {"extra_args": ("-O2",)},
        {"extra_args": ("--enable-lora", "--no-enable-lora")},
    ],
)
def test_what_leaves_whole_graphs_goes_with_it(changes: dict[str, Any]) -> None:
    assert said(adapting(**changes)) == ""


def test_flags_exclude_it_in_the_versions_that_say_so() -> None:
    routed = adapting(Method.DSPARK, extra_args=("--enable-return-routed-experts",))
    assert said(routed, find_profile("0.30")) == ""
    assert "--enable-return-routed-experts" in said(routed, find_profile("0.31"))
