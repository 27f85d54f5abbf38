"""The engine's rules about verifying only as many drafted tokens as pay, checked before it starts.

What depends on the target's layers and on the GPU: sizing/choice/adaptive_rules.py.
"""

from collections.abc import Iterator

from specdecode_operator.api.values import METHODS_WITH_SAMPLING, CudagraphMode
from specdecode_operator.engine.profiles import EngineProfile
from specdecode_operator.engine.rules.extra_args import last_option
from specdecode_operator.engine.rules.runners import runs_on_v1
from specdecode_operator.engine.settings import EngineSettings, Platform
from specdecode_operator.problems import Problem
from specdecode_operator.vocabulary import Method

FIELD = "spec.speculation.adaptiveVerification"

_WITHOUT_WHOLE_GRAPHS = (CudagraphMode.NONE, CudagraphMode.PIECEWISE)
_LEVELS_WITHOUT = ("0", "1")
"""Levels of optimization that capture nothing, or pieces (vllm/config/vllm.py, OPTIMIZATION_LEVEL_TO_CONFIG)."""


def adaptive_problems(settings: EngineSettings, profile: EngineProfile) -> list[Problem]:
    """Return why an engine that is asked to adapt would not start, or would not adapt."""
    speculation = settings.speculation
    if speculation is None or not speculation.adaptive_verification:
        return []
    method = speculation.method
    if method not in profile.adaptive_verification.methods:
        return [_problem(_without_method(method, profile))]
    return [_problem(message) for message in _excluded(settings, method, profile)]


def _without_method(method: Method, profile: EngineProfile) -> str:
    if method not in METHODS_WITH_SAMPLING:
        # vllm/v1/worker/gpu/spec_decode: no speculator of a lookup has the flag, and model runner V1 refuses it.
        return f"method {method} has no draft that says how sure it is; remove it, or use a method with a draft"
    known = ", ".join(sorted(profile.adaptive_verification.methods))
    later = profile.adaptive_verification.later_methods.get(method)
    instead = f"set engine.version {later} or later" if later else "use one of these"
    return f"vLLM {profile.version} adapts with {known} alone, not with {method}; remove it, or {instead}"


def _excluded(settings: EngineSettings, method: Method, profile: EngineProfile) -> Iterator[str]:
    """vllm/config/vllm.py, _validate_adaptive_verification and the checks of other settings against it."""
    version = profile.version
    if settings.platform is Platform.CPU:
        yield "needs vLLM's model runner V2, which the CPU does not have; remove it"
        return
    if runs_on_v1(settings, profile):
        yield f"needs vLLM's model runner V2, and V1 serves method {method} here with vLLM {version}; remove it"
    if settings.pipeline_parallel_size > 1:
        yield (
            f"does not go with parallelism.pipeline {settings.pipeline_parallel_size}: only the last stage knows what"
            " pays; use pipeline 1, or remove it"
        )
    if (without := _no_whole_graphs(settings, profile)) is not None:
        yield f"weighs the costs of whole CUDA graphs, which {without} leaves out; remove one of the two"
    for flag in sorted(profile.adaptive_verification.refused_flags):
        option = last_option(flag, settings.extra_args, profile)
        if option is not None and not option.negated:
            yield f"vLLM {version} does not combine it with engine.extraArgs {option.name}; remove one of the two"


def _no_whole_graphs(settings: EngineSettings, profile: EngineProfile) -> str | None:
    """Return what leaves CUDA graphs of whole steps out; None where there are."""
    if settings.enforce_eager:
        return "serving.enforceEager"
    mode = settings.cudagraph_mode
    if mode is not None:
        return f"serving.cudagraphMode {mode}" if mode in _WITHOUT_WHOLE_GRAPHS else None
    level = last_option("--optimization-level", settings.extra_args, profile)
    return f"engine.extraArgs -O{level.value}" if level is not None and level.value in _LEVELS_WITHOUT else None


def _problem(message: str) -> Problem:
    return Problem(FIELD, "true", message)
