"""vLLM's CPU platform with the scheduler settings of a GPU."""

from typing import Any, Final

from vllm.exceptions import VLLMValidationError
from vllm.platforms.cpu import CpuPlatform

from .engine_model import KEY, read_settings

_KEPT: Final = (
    ("scheduler_config", ("async_scheduling", "enable_chunked_prefill", "max_num_batched_tokens")),
    ("cache_config", ("block_size", "enable_prefix_caching", "mamba_ssm_cache_dtype")),
)
"""Settings that the CPU platform would change for its kernels, which are not used."""


class EmulatedPlatform(CpuPlatform):  # type: ignore[misc]  # vLLM ships types only where it is installed
    """CPU platform that schedules like a GPU, and rejects requests that need a model."""

    specdecode_emulated: str | None = None
    """Name of the emulated GPU, which the recorder writes into captures."""

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """Run the checks of the CPU platform, and keep the settings that were chosen for a GPU."""
        chosen = [(getattr(vllm_config, part), name) for part, names in _KEPT for name in names]
        before = [getattr(config, name, None) for config, name in chosen]
        super().check_and_update_config(vllm_config)
        if KEY in (vllm_config.additional_config or {}):
            cls.specdecode_emulated = read_settings(vllm_config.additional_config).gpu or "engine"
        for (config, name), value in zip(chosen, before, strict=True):
            if hasattr(config, name):
                setattr(config, name, value)

    @classmethod
    def validate_request(cls, *given: Any, **named: Any) -> None:
        """Reject requests that need a model; the client gets 400."""
        params = named.get("params", given[-1] if given else None)
        wanted = getattr(params, "logprobs", None)
        if getattr(params, "prompt_logprobs", None) is not None:
            _refuse("prompt_logprobs", "does not return these: omit them")
        if getattr(params, "logprob_token_ids", None) or (wanted is not None and wanted < 0):
            _refuse("logprobs", "invents these for a number of tokens: request 0 or more")


def _refuse(parameter: str, message: str) -> None:
    raise VLLMValidationError(f"{parameter}: an emulated engine {message}", parameter=parameter)
