"""Which attention lets the engine verify only as many drafted tokens as pay; runs in the engine's Python."""

from importlib import import_module
from typing import Any

_STATES = ("mamba1", "mamba2", "gdn")
"""Modules of attention that keeps states, as far as the catalogue has models with it."""

_ELSEWHERE = ("ROCM", "CPU", "XPU", "CUTLASS")
"""In names of backends of other hardware; CUTLASS's, of Blackwell, takes memory while it is imported."""


def adaptive_attention(config: Any) -> dict[str, list[str]]:
    """Return the backends of keys and values, and the modules of states, with which an engine on Hopper adapts.

    The two checks of maybe_create_adaptive_verification_manager (vllm/v1/worker/gpu/spec_decode).
    """
    registry = import_module("vllm.v1.attention.backends.registry")
    capability = import_module("vllm.platforms.interface").DeviceCapability(9, 0)
    with import_module("vllm.config").set_current_vllm_config(config):
        named = {each.name: each for each in registry.AttentionBackendEnum}
        backends = {name: _loaded(each) for name, each in named.items() if not any(map(name.__contains__, _ELSEWHERE))}
        on_hopper = {
            name: backend
            for name, backend in backends.items()
            if backend is not None and backend.supports_compute_capability(capability)
        }
        states = {name: _state_backend(name) for name in _STATES}
        return {
            "backends": sorted(name for name, backend in on_hopper.items() if _adapts(backend, config)),
            "states": sorted(name for name, backend in states.items() if _adapts(backend, config)),
        }


def _loaded(backend: Any) -> Any:
    """Return the class; None for one of another platform, which is not there."""
    try:
        return backend.get_class()
    except (ImportError, AttributeError, ValueError):
        return None


def _state_backend(name: str) -> Any:
    module = import_module(f"vllm.v1.attention.backends.{name}_attn")
    return next(
        each for each in vars(module).values() if getattr(each, "__module__", "") == module.__name__ and _keeps(each)
    )


def _keeps(each: Any) -> bool:
    return isinstance(each, type) and hasattr(each, "is_ssm") and bool(each.is_ssm())


def _adapts(backend: Any, config: Any) -> bool:
    if not backend.supports_device_cpu_query_lens_mismatch():
        return False
    always = import_module("vllm.v1.attention.backend").AttentionCGSupport.ALWAYS
    builder = backend.get_builder_cls()
    if builder.get_cudagraph_support(config, None) == always:
        return True
    # Since 0.31 a bound that takes a whole draft will do.
    bound = getattr(builder, "get_varlen_cudagraph_max_query_len", lambda *_: None)(config, None)
    return bound is not None and bound > config.speculative_config.num_speculative_tokens
