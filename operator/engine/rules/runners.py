"""Which of vLLM's two model runners serves what is asked for, and what a draft has of it."""

from specdecode_operator.engine.profiles import EngineProfile
from specdecode_operator.engine.rules.extra_args import last_option
from specdecode_operator.engine.settings import EngineSettings, Platform
from specdecode_operator.vocabulary import Method

_V1 = "V1"


def runs_on_v1(settings: EngineSettings, profile: EngineProfile) -> bool:
    """Decide whether model runner V1 serves an engine (vllm/config/vllm.py, use_v2_model_runner)."""
    if settings.platform is Platform.CPU or settings.target_on_v1:
        return True
    if settings.speculation is not None and profile.runners.get(settings.speculation.method) == _V1:
        return True
    return any(last_option(flag, settings.extra_args, profile) is not None for flag in profile.flags_to_v1)


def draft_follows_target(method: Method, profile: EngineProfile, *, on_cpu: bool = False) -> bool:
    """Decide whether the engine fails with a draft that is split otherwise than its target.

    vllm/v1/spec_decode/draft_model.py raises in every worker; model runner V2 ignores the setting.
    """
    return method is Method.DRAFT_MODEL and (on_cpu or profile.runners[method] == _V1)
