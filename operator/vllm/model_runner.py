"""Decide which of vLLM's two model runners (V1 or V2) serves an engine, and the effects on a draft."""

from specdecode_operator.enums import Method, Platform
from specdecode_operator.vllm.extra_args_parser import last_option
from specdecode_operator.vllm.profiles import EngineProfile
from specdecode_operator.vllm.settings import EngineSettings, SpeculationSettings

_V1 = "V1"

_WAIT_ON_V1 = (Method.NGRAM, Method.SUFFIX, Method.MEDUSA)
"""Methods that draft on the host with model runner V1 (vllm/config/vllm.py, __post_init__)."""


def runs_on_v1(settings: EngineSettings, profile: EngineProfile) -> bool:
    """Test whether model runner V1 serves an engine (vllm/config/vllm.py, use_v2_model_runner)."""
    if settings.platform is Platform.CPU or settings.target_on_v1:
        return True
    if settings.speculation is not None and _drafts_on_v1(settings.speculation, profile):
        return True
    return any(last_option(flag, settings.extra_args, profile) is not None for flag in profile.flags_to_v1)


def draft_follows_target(speculation: SpeculationSettings, profile: EngineProfile, *, on_cpu: bool = False) -> bool:
    """Test whether the draft needs the target's tensor-parallel size, because the engine fails with another.

    vllm/v1/spec_decode/draft_model.py raises in every worker; model runner V2 ignores the setting.
    """
    return speculation.method is Method.DRAFT_MODEL and (on_cpu or _drafts_on_v1(speculation, profile))


def _drafts_on_v1(speculation: SpeculationSettings, profile: EngineProfile) -> bool:
    """Test whether only V1 supports this draft (vllm/config/vllm.py, _get_v2_model_runner_unsupported_features)."""
    not_on_v2 = speculation.drafts_in_parallel or speculation.maps_vocabulary
    return not_on_v2 or profile.runners.get(speculation.method) == _V1


def waits_for_steps(method: Method, profile: EngineProfile, *, on_v1: bool) -> bool:
    """Test whether the engine schedules each step after the one before, because a method drafts on the host."""
    return not profile.async_scheduling.get(method, True) or (on_v1 and method in _WAIT_ON_V1)
