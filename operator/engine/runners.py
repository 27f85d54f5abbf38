"""Which of vLLM's two model runners serves what is asked for."""

from specdecode_operator.engine.extra_args import last_given
from specdecode_operator.engine.profiles import EngineProfile
from specdecode_operator.engine.settings import EngineSettings, Platform

_V1 = "V1"


def runs_on_v1(settings: EngineSettings, profile: EngineProfile) -> bool:
    """Decide whether model runner V1 serves an engine (vllm/config/vllm.py, use_v2_model_runner)."""
    if settings.platform is Platform.CPU or settings.target_on_v1:
        return True
    if settings.speculation is not None and profile.runners.get(settings.speculation.method) == _V1:
        return True
    flags = [profile.flags[name] for name in profile.flags_to_v1 if name in profile.flags]
    return any(last_given(flag, settings.extra_args, profile) is not None for flag in flags)
