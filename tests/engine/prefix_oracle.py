"""Ask the installed vLLM how much of a prompt it finds in its prefix cache; runs in the engine's Python.

Reads a JSON list of cases from standard input and writes the answers as JSON to the file named by the first argument.
A case is::

    {"method": M or null, "k": K, "modules": MTP_MODULES, "block": TOKENS, "window": TOKENS or null, "shared": TOKENS,
     "prompt": TOKENS}

A first prompt of ``prompt`` tokens is computed, a second one of the same length begins with the same ``shared`` tokens;
the answer is how many of its tokens the engine's own KV cache manager finds. What the draft changes, the engine's own
configuration decides.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import vllm.config.vllm as main_config
from vllm.config import SpeculativeConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.request import Request

BLOCKS = 4000


class Speculation:
    """What the engine's functions read of a draft, decided by its own configuration."""

    disable_eagle_block_drop = False
    disable_lookahead_block_hashes = False

    def __init__(self, case: dict[str, Any]) -> None:
        """Draft by a method; MTP with so many modules."""
        self.method, self.num_speculative_tokens = case["method"], case["k"]
        modules = SimpleNamespace(num_nextn_predict_layers=case["modules"])
        self.draft_model_config = SimpleNamespace(hf_config=modules)

    def __getattr__(self, name: str) -> Any:
        """Return a method of the engine's own."""
        return getattr(SpeculativeConfig, name).__get__(self)


def drafting(case: dict[str, Any]) -> tuple[bool, int]:
    """Return whether a block is dropped, and how many tokens behind a block its hash covers (Scheduler.__init__)."""
    if case["method"] is None:
        return False, 0
    speculation = Speculation(case)
    config = SimpleNamespace(
        speculative_config=speculation,
        cache_config=SimpleNamespace(enable_prefix_caching=True),
        kv_transfer_config=None,
        num_speculative_tokens=case["k"],
    )
    ahead = 0
    if hasattr(main_config.VllmConfig, "num_hash_lookahead_tokens"):
        config.num_prefill_lookahead_tokens = main_config.VllmConfig.num_prefill_lookahead_tokens.fget(config)
        ahead = main_config.VllmConfig.num_hash_lookahead_tokens.fget(config)
    knows_drop = hasattr(SpeculativeConfig, "use_eagle_block_drop")
    drops = speculation.use_eagle_block_drop() if knows_drop else speculation.use_eagle()
    return bool(drops) and not ahead, ahead


def groups(case: dict[str, Any]) -> list[KVCacheGroupSpec]:
    """Return the groups of layers: full attention with the draft's own, and maybe a window."""
    shape = {"block_size": case["block"], "num_kv_heads": 1, "head_size": 64, "dtype": torch.bfloat16}
    found = [KVCacheGroupSpec(["full"], FullAttentionSpec(**shape))]
    if case["window"]:
        found.append(KVCacheGroupSpec(["window"], SlidingWindowSpec(**shape, sliding_window=case["window"])))
    found[0].is_eagle_group = bool(case["method"]) and Speculation(case).use_eagle()
    return found


def answer(case: dict[str, Any]) -> int:
    """Return how many tokens of the second prompt are found."""
    drops, ahead = drafting(case)
    covering = {"num_hash_lookahead_tokens": ahead} if ahead else {}
    config = KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups(case))
    manager = KVCacheManager(
        config,
        max_model_len=100_000,
        scheduler_block_size=case["block"],
        hash_block_size=case["block"],
        max_in_flight_tokens=100_000,
        use_eagle=drops,
        **covering,
    )
    hasher = get_request_block_hasher(case["block"], sha256, **covering)
    shared = list(range(case["shared"]))
    own = case["prompt"] - case["shared"]
    first, second = (
        Request(name, shared + [1_000_000 * number] * own, SamplingParams(max_tokens=1), None, block_hasher=hasher)
        for number, name in enumerate(("first", "second"), start=1)
    )
    manager.allocate_slots(first, first.num_tokens)
    first.num_computed_tokens = first.num_tokens
    manager.free(first)
    return int(manager.get_computed_blocks(second)[1])


def main() -> None:
    """Answer the cases on standard input."""
    init_none_hash(sha256)
    Path(sys.argv[1]).write_text(json.dumps([answer(case) for case in json.load(sys.stdin)]), encoding="utf-8")


if __name__ == "__main__":
    main()
