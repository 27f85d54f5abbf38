"""What vLLM changes by itself when it starts, and tells of in its log alone.

Each line was read in the sources of 0.28 to 0.33, in vllm/config/vllm.py where no other is named. A record is known
by the template that it was made of, and not by what is put in for its arguments, which requests and models may have
written.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

CHANGED_SETTINGS: Final[Mapping[str, str]] = MappingProxyType(
    {
        # From _maybe_disable_dynamic_sd_for_data_parallel.
        "schedule_with_data_parallel": r"^Dynamic speculative decoding is not supported with data parallelism",
        # From _maybe_disable_dynamic_sd_for_v1, as of 0.33.
        "schedule_on_v1": r"^Dynamic speculative decoding is not supported with the '%s' speculative method",
        # From _limit_max_model_len_to_draft, as of 0.33.
        "max_model_len": r"^The draft model's max_model_len \(%d\) is smaller than the target model's",
        # From _set_max_num_scheduled_tokens, as of 0.33.
        "max_num_seqs": r"^The %s draft pass needs %d query tokens per request",
        # From use_v2_model_runner.
        "model_runner": r"^Model Runner V2 does not yet support %s",
        # From __post_init__, up to 0.32 and in 0.33.
        "async_scheduling": r"^Async scheduling (?:not supported with %s-based speculative decoding"
        r"|is not compatible with disable_padded_drafter_batch|is disabled because the V1 model runner does not)",
        # From _maybe_override_dynamic_sd_cudagraph_mode.
        "cudagraph_mode_with_schedule": r"^Dynamic speculative decoding changes the target verification length",
        # vllm/config/compilation.py, resolve_cudagraph_mode_and_sizes: its arguments are in the template
        "cudagraph_mode_with_drafts": r"^CUDAGraphMode\.\w+ is not supported with spec-decode for attention backend",
        # vllm/v1/worker/gpu/spec_decode/dflash/speculator.py, init_cudagraph_manager
        "draft_graphs": r"^%s draft attention \(%s\) does not support full CUDA graphs",
    }
)
"""Regular expressions that find the template of a log record, by our name for what is changed."""
