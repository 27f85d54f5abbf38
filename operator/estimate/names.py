"""The keys of a case: ours, vLLM's own names for them, and what is no setting."""

from collections.abc import Iterable, Mapping
from typing import Final

CASE_NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    "id": (),
    "vllm_version": (),
    "gpu": (),
    "gpu_total_gib": (),
    "tp": ("tensor_parallel_size",),
    "pp": ("pipeline_parallel_size",),
    "dp": ("data_parallel_size",),
    "enable_expert_parallel": (),
    "gpu_memory_utilization": (),
    "max_model_len": ("max_seq_len",),
    "max_num_seqs": (),
    "max_num_batched_tokens": (),
    "dtype": (),
    "kv_cache_dtype": (),
    "block_size": (),
    "enforce_eager": (),
    "warm_compile_cache": (),
    "language_model_only": (),
    "limit_mm_per_prompt": (),
    "max_cudagraph_capture_size": (),
    "compilation_config": (),
    "decode_context_parallel_size": (),
    "mamba_ssm_cache_dtype": (),
    "enable_prefix_caching": (),
    "quantization": (),
    "model": ("model_tag",),
    "revision": (),
    "model_config": (),
    "hf_overrides": (),
    "speculative": ("speculative_config",),
    "min_concurrency": (),
    "available_kv_gib": (),
}
"""Keys of a case, with other names that vLLM has for them in its arguments and its log."""

REMARKS: Final = ("notes", "comment", "source", "source_url", "observed", "confidence", "gpu_count")
"""Keys of collected logs that set nothing; of gpu_count more than one is asked what is spread over them."""

SPECULATIVE_NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    "method": (),
    "num_speculative_tokens": (),
    "num_speculative_tokens_per_batch_size": (),
    "model": (),
    "revision": (),
    "model_config": (),
    "quantization": (),
    "max_model_len": (),
    "draft_tensor_parallel_size": (),
    "draft_sample_method": (),
    "enable_adaptive_verification": (),
    "use_heterogeneous_vocab": (),
    "parallel_drafting": (),
    "draft_lm_head_quantization": (),
    "xpress_topc": (),
    "rejection_sample_method": (),
}
"""Keys of its speculative section that say something of memory, or what else is asked of a draft."""

SPECULATIVE_REMARKS: Final = (
    *("prompt_lookup_min", "prompt_lookup_max", "disable_padded_drafter_batch"),
    *("suffix_decoding_max_tree_depth", "suffix_decoding_max_cached_requests", "suffix_decoding_max_spec_factor"),
    *("suffix_decoding_min_token_prob", "draft_layers"),
    *("fly_window_size", "fly_entropy_threshold", "fly_entropy_top_k"),
)
"""Keys of vLLM's --speculative-config that change no memory, and one of collected logs."""


def _spellings(names: Mapping[str, Iterable[str]]) -> Mapping[str, str]:
    return {spelling: name for name, others in names.items() for spelling in (name, *others)}


CASE_SPELLINGS: Final = _spellings(CASE_NAMES)
SPECULATIVE_SPELLINGS: Final = _spellings(SPECULATIVE_NAMES)
"""Our key for each name that a key has."""
