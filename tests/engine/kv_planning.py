"""The engine's own division of KV caches, wherever its version has it; runs in the engine's Python.

From 0.33 on it is a module of its own, and the groups of all stages come first.
"""

import inspect
from dataclasses import fields
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import AttentionSpec, MambaSpec

PLANNING: Any = (
    import_module("vllm.v1.core.kv_cache_planning") if find_spec("vllm.v1.core.kv_cache_planning") else kv_cache_utils
)


def layout() -> Any:
    """Return the order of dimensions of caches on Hopper; 0.28 does not ask for it."""
    return import_module("vllm.v1.kv_cache_layout").KVCacheLayout.LBNHC


def on_hopper() -> dict[str, bool]:
    """Return what backends of Hopper, those of latent attention too, add to a specification: 0.28 pads pages by it."""
    name = "indexes_kv_by_block_stride"
    return {name: True} if name in {field.name for field in fields(AttentionSpec)} else {}


def divided(config: Any, specs: list[dict[str, Any]], available: list[int]) -> tuple[list[Any], Any]:
    """Return how each stage divides its space, and the whole as the scheduler sees it."""
    groups = getattr(PLANNING, "get_global_kv_cache_groups", None)
    before = () if groups is None else (groups(config, specs),)
    caches = PLANNING.get_kv_cache_configs(config, specs, available, *before)
    return caches, kv_cache_utils.generate_scheduler_kv_cache_config(caches)


def bytes_per_block(config: Any, groups: list[Any]) -> int:
    """Return what a block of the pool takes; 0.29 to 0.31 do not ask for the configuration."""
    function = PLANNING._pool_bytes_per_block
    asks = "vllm_config" in inspect.signature(function).parameters
    size: int = function(config, groups) if asks else function(groups)
    return size


def stored_checkpoints(layer: dict[str, Any]) -> dict[str, int]:
    """Return what a specification says of states that this version stores from inside a prefill, if it can say it.

    Those of Mamba 2 from 0.32 on, where its layer has a specification of its own; those of gated delta nets from 0.33.
    """
    if "num_prefill_checkpoint_blocks" not in {field.name for field in fields(MambaSpec)}:
        return {}
    mixer = import_module("vllm.model_executor.layers.mamba.mamba_mixer2").MambaMixer2
    of_mamba = layer["exports_checkpoint"] and "get_kv_cache_spec" in vars(mixer)
    of_delta_net = layer["delta_rule"] and hasattr(MambaBase, "get_prefill_checkpoint_alignment")
    return {"num_prefill_checkpoint_blocks": int(of_mamba or of_delta_net)}
