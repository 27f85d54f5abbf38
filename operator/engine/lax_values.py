"""Reads values of --speculative-config as vLLM's pydantic classes do: in lax mode, which takes numbers as text."""

import math
import re
from contextlib import suppress
from typing import Any, Final

WHOLE_KEYS: Final = frozenset(
    {
        "draft_tensor_parallel_size",
        "dspark_draft_topk",
        "fly_entropy_top_k",
        "fly_window_size",
        "max_model_len",
        "num_speculative_tokens",
        "prompt_lookup_max",
        "prompt_lookup_min",
        "suffix_decoding_max_cached_requests",
        "suffix_decoding_max_tree_depth",
        "xpress_topc",
    }
)
REAL_KEYS: Final = frozenset(
    {"fly_entropy_threshold", "suffix_decoding_max_spec_factor", "suffix_decoding_min_token_prob"}
)
SWITCH_KEYS: Final = frozenset(
    {
        "disable_eagle_block_drop",
        "disable_lookahead_block_hashes",
        "disable_padded_drafter_batch",
        "enable_adaptive_verification",
        "enforce_eager",
        "index_share_for_mtp_iteration",
        "parallel_drafting",
        "use_heterogeneous_vocab",
        "use_local_argmax_reduction",
    }
)
_ON: Final = frozenset({"1", "on", "t", "true", "y", "yes"})
_OFF: Final = frozenset({"0", "off", "f", "false", "n", "no"})
_NUMBER: Final = re.compile(r"\s*([+-]?\d{1,18})(?:\.0{1,18})?\s*")


def read_lax(key: str, value: Any) -> Any:
    """Return the value of a key as vLLM reads it; what vLLM would refuse, unchanged.

    Source: vllm/config/speculative.py, SpeculativeConfig, a pydantic dataclass without strict mode.
    """
    text = str(value).strip()
    if key in WHOLE_KEYS and isinstance(value, str | float):
        match = _NUMBER.fullmatch(text)
        return int(match[1]) if match else value
    if key in REAL_KEYS and isinstance(value, str):
        with suppress(ValueError):
            number = float(text)
            return number if math.isfinite(number) else value
    if key in SWITCH_KEYS and isinstance(value, str | int | float) and not isinstance(value, bool):
        word = "1" if value == 1 else "0" if value == 0 else text.lower()
        return True if word in _ON else False if word in _OFF else value
    return value
