"""Attention and recurrent states of the layers of an estimated model."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

from specdecode_operator.sizing.base.fields import MAX_TOKENS, Fields
from specdecode_operator.sizing.estimated.keys import (
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    LAYER_KINDS,
    LAYERS,
    LENGTH,
    number,
    required,
)
from specdecode_operator.sizing.families.decoder import CHUNKED, FULL, LINEAR, SLIDING, first_that_borrows
from specdecode_operator.sizing.families.latent import has_indexer
from specdecode_operator.sizing.model.layers import (
    DeltaNet,
    Indexer,
    LatentAttention,
    Mixer,
    ParallelMixers,
    SelectiveScan,
    SelfAttention,
    SingleMixer,
    StateSpace,
)
from specdecode_operator.vocabulary import FLOAT32_BYTES

_STATE_HEADS: Final = ("mamba_num_heads", "mamba_n_heads", "ssm_num_heads")
_STATE_HEAD_DIM: Final = ("mamba_head_dim", "mamba_d_head", "ssm_head_dim")
_STATE_GROUPS: Final = ("n_groups", "mamba_n_groups", "mamba_num_groups", "ssm_n_groups")
_STATE_SIZE: Final = ("ssm_state_size", "mamba_d_state", "mamba_state_dim", "state_size", "d_state")
_STATE_KERNEL: Final = ("conv_kernel", "mamba_d_conv", "mamba_conv_kernel", "d_conv", "conv_L_cache")
"""Names of one size in different files, the most specific first."""

_PATTERN: Final = "hybrid_override_pattern"
_LETTERS: Final = {"M": LINEAR, "*": FULL, "E": "moe", "-": "mlp"}

_STATE_WORDS: Final = ("linear", "mamba", "ssm", "recurrent", "lightning", "conv", "delta", "kda", "rwkv")
_WIDE_WORDS: Final = ("sliding", "swa", "local", "window")
_SHARED_LAYERS: Final = "num_kv_shared_layers"
NO_MIXER: Final = ("mlp", "moe", "ffn", "feed_forward")

_DEFAULT_LATENT_DIM: Final = 128
_STEP_SHARE: Final = 16


@dataclass(frozen=True)
class _Sizes:
    heads: int
    kv_heads: int
    head_dim: int


def kinds(fields: Fields) -> tuple[str, ...]:
    """Return the kind of each layer, in words of layer_types or as the file calls it."""
    listed: tuple[str, ...] = ()
    for key in LAYER_KINDS:
        listed = listed or fields.strings(key)
    pattern = fields.values.get(_PATTERN)
    if isinstance(pattern, str) and pattern and not listed:
        listed = tuple(_LETTERS.get(letter, FULL) for letter in pattern)
    count = number(fields, LAYERS, len(listed))
    if not count:
        raise fields.error(LAYERS[0], "is missing; copy it from the model's config.json")
    if listed:
        # Files may name more than there are: modules for multi-token prediction come after.
        if len(listed) < count:
            raise fields.error(
                next(key for key in (*LAYER_KINDS, _PATTERN) if fields.is_set(key)), f"must name {count} layers"
            )
        found = tuple(map(_kind, listed[:count]))
    else:
        found = tuple(_unlisted_kind(fields, index) for index in range(count))
    if set(found) <= set(NO_MIXER):
        key = next(key for key in (*LAYER_KINDS, _PATTERN) if fields.is_set(key))
        raise fields.error(key, "lists no layer with attention or a state; correct the file")
    return found


def attention_doubts(fields: Fields, kinds: tuple[str, ...], architecture: str) -> Iterator[str]:
    """Yield a warning for each KV cache saving in the file that is unusual or that vLLM does not implement."""
    shared = number(fields, (_SHARED_LAYERS,), 0)
    if shared and not _shares_layers(architecture):
        path = fields.path(_SHARED_LAYERS)
        yield f"{path}: {shared} is ignored, because in vLLM no layer of {architecture} shares the KV cache of another"
    heads = next((key for key in HEADS[:-1] if fields.is_set(key)), None)
    if heads is not None and set(kinds) <= {LINEAR, *NO_MIXER}:
        yield f"in its config.json, no layer has a KV cache, but {fields.path(heads)} is set; check its layers"


def _shares_layers(architecture: str) -> bool:
    """Return whether layers read keys and values of earlier ones: in vLLM 0.33 those of gemma3n.py and gemma4.py."""
    return architecture.startswith("Gemma")


def _kind(name: str) -> str:
    lowered = name.lower()
    if any(word in lowered for word in _WIDE_WORDS):
        return SLIDING
    if "chunk" in lowered:
        return CHUNKED
    if any(word in lowered for word in _STATE_WORDS):
        return LINEAR
    return lowered if lowered in NO_MIXER else FULL


def _unlisted_kind(fields: Fields, index: int) -> str:
    """Return the kind of a layer by the keys with which files say it in numbers."""
    found = _marked_kind(fields, index) or _periodic_kind(fields, index) or _windowed_kind(fields, index)
    if found:
        return found
    has_attention = any(fields.is_set(key) for key in HEADS[:3])
    return FULL if has_attention else LINEAR


def _marked_kind(fields: Fields, index: int) -> str | None:
    """Return the kind of a layer if a list marks each (Kimi Linear, MiniMax, MiMo V2)."""
    section = fields.values.get("linear_attn_config")
    if isinstance(section, Mapping) and isinstance(section.get("kda_layers"), list):
        return LINEAR if index + 1 in section["kda_layers"] else FULL
    for key, marked, other in (("attn_type_list", FULL, LINEAR), ("hybrid_layer_pattern", SLIDING, FULL)):
        marks = fields.values.get(key)
        if isinstance(marks, list) and index < len(marks):
            return marked if marks[index] else other
    return None


def _periodic_kind(fields: Fields, index: int) -> str | None:
    """Return the kind of a layer if one in N has attention (Jamba, Qwen3-Next, Ring)."""
    if fields.is_set("attn_layer_period"):
        return (
            FULL
            if index % fields.size("attn_layer_period") == (fields.values.get("attn_layer_offset") or 0)
            else LINEAR
        )
    if fields.is_set("linear_num_value_heads") or fields.is_set("full_attention_interval"):
        return LINEAR if (index + 1) % fields.size("full_attention_interval", default=4) else FULL
    if fields.is_set("layer_group_size") and "group_norm_size" in fields.values:
        return LINEAR if (index + 1) % fields.size("layer_group_size") else FULL
    return None


def _windowed_kind(fields: Fields, index: int) -> str | None:
    """Return the kind of a layer if every Nth sees everything, or all have a window that no sequence fills."""
    every = fields.values.get("sliding_window_pattern") or fields.values.get("_sliding_window_pattern")
    window = number(fields, ("sliding_window",), 0)
    if window and isinstance(every, int) and every > 1:
        return SLIDING if (index + 1) % every else FULL
    if window and isinstance(every, str) and every:
        return SLIDING if every[index % len(every)] == "L" else FULL
    if fields.values.get("use_sliding_window") is not False and window >= number(fields, LENGTH, MAX_TOKENS):
        # Such a window takes a block more than none.
        return SLIDING
    return None


def mixers(fields: Fields, kinds: tuple[str, ...], architecture: str) -> tuple[Callable[[int], Mixer | None], int]:
    """Return the mixer of each layer, and the width of a head's rotated part; zero for none."""
    states = _states(fields, kinds) if LINEAR in kinds else None
    beside = _states_beside(fields, kinds)
    if set(kinds) <= {LINEAR, *NO_MIXER}:
        return (lambda index: states if kinds[index] == LINEAR else None), 0
    if fields.is_set("kv_lora_rank"):
        return _latent_mixers(fields, kinds, states)
    sizes = _attention_sizes(fields)
    full = _attention(fields, sizes)
    wide = replace(
        full,
        num_kv_heads=number(fields, ("num_global_key_value_heads",), full.num_kv_heads),
        head_dim=number(fields, ("global_head_dim",), full.head_dim),
    )
    near = _windowed(fields, full) if {SLIDING, CHUNKED} & set(kinds) else {}
    shared = number(fields, (_SHARED_LAYERS,), 0) if _shares_layers(architecture) else 0
    first_borrower = first_that_borrows(fields, kinds, shared)
    by_kind: dict[str, Mixer | None] = {FULL: wide, LINEAR: states, **near}

    def mixer(index: int) -> Mixer | None:
        kind = kinds[index]
        found = by_kind.get(kind)
        if isinstance(found, SelfAttention):
            if index >= first_borrower:
                found = replace(found, borrows_cache=True)
            return ParallelMixers(found, beside) if beside is not None else found
        return found

    return mixer, max(sizes.head_dim, wide.head_dim)


def _windowed(fields: Fields, full: SelfAttention) -> dict[str, Mixer | None]:
    """Return the attention of layers with a window or a chunk."""
    heads = number(fields, ("swa_num_attention_heads",), full.num_heads)
    near = replace(
        full,
        num_heads=heads,
        num_kv_heads=number(fields, ("swa_num_key_value_heads",), full.num_kv_heads),
        head_dim=number(fields, ("swa_head_dim",), full.head_dim),
        value_head_dim=number(fields, ("swa_v_head_dim", "v_head_dim"), 0) or None,
    )
    window = number(fields, ("sliding_window", "sliding_window_size", "attention_window_size", "window_size"), 0)
    chunk = number(fields, ("attention_chunk_size",), 0)
    return {
        SLIDING: replace(near, window_tokens=window or None),
        CHUNKED: replace(near, chunk_tokens=chunk or None),
    }


def _attention_sizes(fields: Fields) -> _Sizes:
    count = required(fields, HEADS)
    kv_heads = 1 if fields.values.get("multi_query") is True else count
    kv_heads = number(fields, KV_HEADS, kv_heads)
    if count % kv_heads:
        key = next(key for key in KV_HEADS if fields.is_set(key))
        raise fields.error(key, f"must divide the {count} attention heads")
    return _Sizes(count, kv_heads, number(fields, HEAD_DIM, 0) or max(fields.size("hidden_size") // count, 1))


def _attention(fields: Fields, sizes: _Sizes) -> SelfAttention:
    biased = any(fields.values.get(key) is True for key in ("attention_bias", "qkv_bias", "add_qkv_bias", "use_bias"))
    return SelfAttention(
        sizes.heads,
        sizes.kv_heads,
        sizes.head_dim,
        qkv_bias=biased,
        output_bias=fields.values.get("attention_bias") is True,
        qk_norm=True,
        gated=fields.values.get("attn_output_gate") is True,
        value_head_dim=number(fields, ("v_head_dim",), 0) or None,
    )


def _latent_mixers(
    fields: Fields, kinds: tuple[str, ...], states: SingleMixer | None
) -> tuple[Callable[[int], Mixer | None], int]:
    rope_dim = number(fields, ("qk_rope_head_dim",), 64)
    sparse = number(fields, ("index_topk",), 0)
    latent = LatentAttention(
        num_heads=required(fields, HEADS),
        query_rank=number(fields, ("q_lora_rank",), 0) or None,
        kv_rank=fields.size("kv_lora_rank"),
        nope_head_dim=number(fields, ("qk_nope_head_dim",), _DEFAULT_LATENT_DIM),
        rope_head_dim=rope_dim,
        value_head_dim=number(fields, ("v_head_dim",), _DEFAULT_LATENT_DIM),
        sparse_tokens=sparse,
    )
    indexed = latent
    if sparse and latent.query_rank:
        indexed = replace(latent, indexer=Indexer(fields.size("index_n_heads"), fields.size("index_head_dim")))

    def mixer(index: int) -> Mixer | None:
        if kinds[index] == LINEAR:
            return states
        if kinds[index] in NO_MIXER:
            return None
        return indexed if sparse and has_indexer(fields, index) else latent

    return mixer, rope_dim


def _states(fields: Fields, kinds: tuple[str, ...]) -> SingleMixer:
    """Return a layer with a state of fixed size: a delta rule, Mamba 2 or Mamba 1, or else linear attention."""
    hidden = fields.size("hidden_size")
    if fields.is_set("linear_num_value_heads"):
        keys = number(fields, ("linear_num_key_heads",), fields.size("linear_num_value_heads"))
        return DeltaNet(
            keys,
            fields.size("linear_num_value_heads"),
            fields.size("linear_key_head_dim", default=_DEFAULT_LATENT_DIM),
            fields.size("linear_value_head_dim", default=_DEFAULT_LATENT_DIM),
            fields.size("linear_conv_kernel_dim", default=4),
            _state_bytes(fields),
        )
    section = fields.section("linear_attn_config")
    if section is not None:
        count, dim = section.size("num_heads"), section.size("head_dim")
        return DeltaNet(count, count, dim, dim, section.size("short_conv_kernel_size", default=4), FLOAT32_BYTES)
    state, kernel = number(fields, _STATE_SIZE, 0), number(fields, _STATE_KERNEL, 4)
    if state:
        alone = () if FULL in kinds else ("num_heads",)
        count = number(fields, (*_STATE_HEADS, *alone), 0)
        width = number(fields, ("mamba_d_ssm", "mamba_intermediate_size"), 0)
        width = width or number(fields, ("mamba_expand", "expand"), 2) * hidden
        if count:
            alone_dim = () if FULL in kinds else ("head_dim",)
            dim = number(fields, (*_STATE_HEAD_DIM, *alone_dim), 0) or max(width // count, 1)
            return StateSpace(
                count,
                dim,
                number(fields, _STATE_GROUPS, 8 if alone else 1),
                state,
                kernel,
                projection_bias=fields.values.get("mamba_proj_bias") is True,
                state_element_bytes=_state_bytes(fields),
            )
        step = number(fields, ("mamba_dt_rank", "time_step_rank"), max(hidden // _STEP_SHARE, 1))
        return SelectiveScan(width, state, step, kernel)
    if fields.is_set("conv_L_cache"):
        # A short convolution keeps its columns alone.
        return SelectiveScan(fields.size("conv_dim", default=hidden), 1, 1, kernel)
    sizes = _attention_sizes(fields)
    return DeltaNet(sizes.heads, sizes.heads, sizes.head_dim, sizes.head_dim, kernel, FLOAT32_BYTES)


def _states_beside(fields: Fields, kinds: tuple[str, ...]) -> StateSpace | None:
    """Return the states that stand beside the attention of each layer (Falcon-H1, Hymba); None for none."""
    if LINEAR in kinds or not fields.is_set("mamba_d_ssm"):
        return None
    states = _states(fields, kinds)
    return states if isinstance(states, StateSpace) else None


def _state_bytes(fields: Fields) -> int:
    """Return the bytes of a number in a state: float32 if the file does not say, as some classes of vLLM choose."""
    named = fields.values.get("mamba_ssm_cache_dtype") or fields.values.get("mamba_ssm_dtype")
    return {"bfloat16": 2, "float16": 2}.get(str(named), FLOAT32_BYTES)
