"""The engine's own division of KV caches, wherever its version has it; runs in the engine's Python.

From 0.33 on it is a module of its own, and the groups of all stages come first.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from vllm.v1.core import kv_cache_utils

PLANNING: Any = (
    import_module("vllm.v1.core.kv_cache_planning") if find_spec("vllm.v1.core.kv_cache_planning") else kv_cache_utils
)


def divided(config: Any, specs: list[dict[str, Any]], available: list[int]) -> tuple[list[Any], Any]:
    """Return how each stage divides its space, and the whole as the scheduler sees it."""
    groups = getattr(PLANNING, "get_global_kv_cache_groups", None)
    before = () if groups is None else (groups(config, specs),)
    caches = PLANNING.get_kv_cache_configs(config, specs, available, *before)
    return caches, kv_cache_utils.generate_scheduler_kv_cache_config(caches)
