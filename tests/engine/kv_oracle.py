"""Ask the installed vLLM how it divides KV caches; runs in the engine's Python.

Reads a JSON list of cases from standard input and writes the answers as JSON
to the file named by the first argument. A case is::

    {"stages": [[[LAYER, COUNT], ...], ...], "settings": KvSettings, "max_model_len": L, "available_bytes": [N, ...]}

with the fields of the project's own data classes. The engine's functions see
specifications made by hand and a configuration of just what they read; what
that configuration decides by itself, the engine's own code decides.
"""

import ast
import inspect
import json
import os
import sys
import textwrap
from contextlib import nullcontext
from fractions import Fraction
from functools import cache
from pathlib import Path
from types import CodeType, SimpleNamespace
from typing import Any

import torch
import vllm.config.vllm as main_config
from kv_planning import PLANNING, bytes_per_block, divided, layout, on_hopper, stored_checkpoints
from vllm import platforms
from vllm.config import SpeculativeConfig
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.models import ModelRegistry
from vllm.platforms.interface import Platform
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.core.kv_cache_utils import get_kv_cache_capacity
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

ELEMENTS = {1: torch.uint8, 2: torch.bfloat16, 4: torch.float32}


class Backend:
    """An attention backend that takes blocks of any multiple of 16 tokens, as FlashAttention does."""

    @staticmethod
    def customize_spec(spec: KVCacheSpec) -> KVCacheSpec:
        """Return the specification as it is."""
        return spec

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[MultipleOf]:
        """Return the multiples of 16."""
        return [MultipleOf(16)]


class Gpu(Platform):
    """A platform whose models use that backend."""

    @classmethod
    def _find_non_ssm_backends(cls, vllm_config: Any) -> list[type[Backend]]:
        return [Backend]


class Speculation:
    """What the engine's functions read of a draft, decided by its own configuration."""

    disable_eagle_block_drop = False

    def __init__(self, said: dict[str, Any]) -> None:
        """Draft by the target's hidden states, with so many modules, or with a model of its own."""
        self.method = "mtp" if said["draft_reads_hidden_states"] else "draft_model"
        self.num_speculative_tokens = said["num_speculative_tokens"]
        hf_config = SimpleNamespace(num_nextn_predict_layers=said["prediction_modules"])
        self.draft_model_config = SimpleNamespace(hf_config=hf_config)

    def __getattr__(self, name: str) -> Any:
        """Return a method of the engine's own."""
        return getattr(SpeculativeConfig, name).__get__(self)


class Exporter(MambaBase):  # type: ignore[misc]
    """A layer with a state, as far as it says on which grid of tokens a prefill stores it."""

    def __init__(self, layer: dict[str, Any]) -> None:
        """Export each 64 tokens what is a gated delta net."""
        self.grid = 64 if layer["delta_rule"] else None

    def get_prefill_checkpoint_alignment(self) -> int | None:
        """Return the grid; the engine asks from 0.33 on, with prefix caching."""
        return self.grid


Exporter.__abstractmethods__ = frozenset()


def is_state(layer: dict[str, Any]) -> bool:
    """Whether a layer of the target keeps a state."""
    return bool(layer["kind"] == "state" and not layer["of_draft"])


@cache
def statements_on_manager() -> CodeType:
    """Return those of VllmConfig.__post_init__ that say whether layers of several kinds are managed as such."""
    source = textwrap.dedent(inspect.getsource(main_config.VllmConfig.__post_init__))
    (function,) = ast.parse(source).body
    deciding = [one for one in function.body if "need_disable_hybrid_kv_cache_manager" in ast.unparse(one)]
    assert len(deciding) > 2, "vLLM decides elsewhere now"
    return compile(ast.Module(deciding, []), "vllm", "exec")


def configuration(case: dict[str, Any]) -> SimpleNamespace:
    """Return what the engine's functions read of its configuration."""
    said = case["settings"]
    layers = [layer for stage in case["stages"] for layer, _ in stage]
    chunks = [layer["reach_tokens"] for layer in layers if layer["kind"] == "chunked"]
    os.environ["VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE"] = str(int(said["chunked_hybrid"]))
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(
            disable_hybrid_kv_cache_manager=None if said["hybrid_manager"] else True,
            async_scheduling=said["async_scheduling"],
            max_num_batched_tokens=said["max_num_batched_tokens"],
        ),
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=said["pipeline"], tensor_parallel_size=1, decode_context_parallel_size=1
        ),
        cache_config=SimpleNamespace(
            block_size=said["block_size"],
            cache_dtype="auto",
            kv_cache_dtype_skip_layers=None,
            mamba_cache_mode="align" if said["prefix_caching"] else "none",
            mamba_page_size_padded=None,
            user_specified_mamba_block_size=False,
            num_gpu_blocks_override=None,
            prefix_cache_retention_interval=None,
            get_resolved_kv_cache_layout=layout,
        ),
        attention_config=SimpleNamespace(hisparse_config=None),
        model_config=SimpleNamespace(
            max_model_len=case["max_model_len"],
            original_max_model_len=None,
            hf_config=SimpleNamespace(model_type="x"),
            attention_chunk_size=max(chunks, default=None),
            supports_kv_cache_grouping=False,
        ),
        compilation_config=SimpleNamespace(
            static_forward_context={str(n): Exporter(layer) for n, layer in enumerate(layers) if is_state(layer)}
        ),
        kv_transfer_config=None,
        speculative_config=Speculation(said),
        num_speculative_tokens=said["num_speculative_tokens"],
        use_v2_model_runner=said["v2_runner"],
    )
    for name in ("max_concurrent_batches", "max_in_flight_tokens", "num_prefill_lookahead_tokens"):
        if found := getattr(main_config.VllmConfig, name, None):  # the last from 0.31 on
            setattr(config, name, found.fget(config))
    exec(statements_on_manager(), vars(main_config) | {"self": config, "current_platform": platforms.current_platform})
    return config


def state_shape(layer: dict[str, Any], tokens: int) -> tuple[tuple[int, ...], ...]:
    """Return the shape of a state, in bytes, with room for the speculated tokens."""
    return ((layer["state_bytes"] + tokens * layer["state_bytes_per_speculated_token"],),)


def raise_blocks(config: Any, layers: list[dict[str, Any]]) -> None:
    """Let the platform raise the block size of a target with states beside attention; it does not look at the draft."""
    target = [layer for layer in layers if not layer["of_draft"]]
    states = [layer for layer in target if layer["kind"] == "state"]
    attention = next((layer for layer in target if layer["kind"] != "state"), None)
    if attention is None or not states:
        return
    shape = max(state_shape(layer, config.num_speculative_tokens) for layer in states)
    model = SimpleNamespace(
        get_mamba_state_shape_from_config=lambda _: shape, get_mamba_state_dtype_from_config=lambda _: (torch.uint8,)
    )
    spec = attention_spec(attention, 1)
    config.model_config.use_mla = attention["kind"] == "latent"
    config.model_config.dtype = spec.dtype
    config.model_config.get_num_kv_heads = lambda _: spec.num_kv_heads
    config.model_config.get_head_size = lambda: spec.head_size
    config.model_config.architecture = "any"
    ModelRegistry.resolve_model_cls = lambda *_, **__: (model, None)
    main_config.set_current_vllm_config = lambda _: nullcontext()
    Gpu._align_hybrid_block_size(config, Backend)


def attention_spec(layer: dict[str, Any], block_size: int) -> Any:
    """Return the engine's specification of one attention layer."""
    shape = {
        "block_size": block_size,
        "num_kv_heads": int(Fraction(layer["token_bytes"], 2 * layer["head_width"] * layer["element_bytes"])) or 1,
        "head_size": layer["head_width"],
        "dtype": ELEMENTS[layer["element_bytes"]],
        **on_hopper(),
    }
    if layer["kind"] == "latent":
        return MLAAttentionSpec(**shape | {"num_kv_heads": 1})
    if layer["kind"] == "sliding":
        return SlidingWindowSpec(**shape, sliding_window=layer["reach_tokens"])
    if layer["kind"] == "chunked":
        return ChunkedLocalAttentionSpec(**shape, attention_chunk_size=layer["reach_tokens"])
    return FullAttentionSpec(**shape)


def layer_spec(layer: dict[str, Any], config: Any) -> KVCacheSpec:
    """Return the engine's specification of one layer, whose page must be what the case says."""
    if layer["kind"] == "state":
        return MambaSpec(
            block_size=config.model_config.max_model_len,
            shapes=state_shape(layer, config.num_speculative_tokens),
            dtypes=(torch.uint8,),
            page_size_padded=config.cache_config.mamba_page_size_padded,
            num_speculative_blocks=config.num_speculative_tokens,
            **stored_checkpoints(layer),
        )
    spec = attention_spec(layer, config.cache_config.block_size)
    assert spec.page_size_bytes == config.cache_config.block_size * layer["token_bytes"], layer
    return spec


def answer(case: dict[str, Any]) -> dict[str, Any]:
    """Return how the engine divides the memory, or the error that it ends in."""
    config = configuration(case)
    raise_blocks(config, [layer for stage in case["stages"] for layer, _ in stage])
    specs = []
    of_draft = set()
    for number, stage in enumerate(case["stages"]):
        run = [layer for layer, count in stage for _ in range(count)]
        of_draft |= {f"{number}.{index}" for index, layer in enumerate(run) if layer["of_draft"]}
        specs.append({f"{number}.{index}": layer_spec(layer, config) for index, layer in enumerate(run)})
    verdicts = []
    PLANNING._check_enough_kv_cache_memory = lambda size, needed, _, longest: verdicts.append(
        (size > 0 and needed() <= size, longest(size))
    )
    try:
        caches, whole = divided(config, specs, list(case["available_bytes"]))
        tokens, concurrency = get_kv_cache_capacity(config, whole)
    except (ValueError, NotImplementedError) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {
        "num_blocks": caches[0].num_blocks,
        "group_layers": [sorted(len(group.layer_names) for group in cache.kv_cache_groups) for cache in caches],
        "groups_of_draft": max(1, sum(bool(of_draft & set(group.layer_names)) for group in caches[-1].kv_cache_groups)),
        "bytes_per_block": [bytes_per_block(config, cache.kv_cache_groups) for cache in caches],
        "tokens": tokens,
        "max_concurrency": concurrency,
        "starts": all(fits for fits, _ in verdicts),
        "largest_length": min(length for _, length in verdicts),
    }


def main() -> None:
    """Answer the cases on standard input."""
    answers = [answer(case) for case in json.load(sys.stdin)]
    Path(sys.argv[1]).write_text(json.dumps(answers), encoding="utf-8")


if __name__ == "__main__":
    main()
