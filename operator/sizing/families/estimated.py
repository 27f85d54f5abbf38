"""Estimate the geometry of a model whose class sizing does not implement, from common config keys.

If an omitted key is ambiguous, the larger estimate is used: no window, as many key/value heads as query heads, and
an untied output head. If the headers of the files were read, layers are scaled to the bytes in them.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

from specdecode_operator.enums import FLOAT32_BYTES, Knowledge, Method, Precision
from specdecode_operator.sizing.config_fields import MAX_TOKENS, Fields
from specdecode_operator.sizing.errors import GeometryError, UnmodelledError
from specdecode_operator.sizing.families.decoder import (
    CHUNKED,
    FULL,
    LINEAR,
    SLIDING,
    Decoder,
    assemble,
    first_that_borrows,
    has_indexer,
    model_rope,
)
from specdecode_operator.sizing.geometry import (
    DEFAULT_FORMATS,
    TOKEN_ID_BYTES,
    DeltaNet,
    DenseMlp,
    Experts,
    FeedForward,
    HeadParts,
    Indexer,
    LatentAttention,
    Mixer,
    ModelGeometry,
    ParallelMixers,
    RopeTable,
    SelectiveScan,
    SelfAttention,
    SingleMixer,
    StateSpace,
    StoredWeights,
    Tower,
    WeightFormat,
)
from specdecode_operator.sizing.quantization import in_16_bits_for_prediction, read_checkpoint
from specdecode_operator.sizing.rank_layers import Split, whole_model
from specdecode_operator.sizing.weights import expected_file_bytes, weight_parts

LAYERS: Final = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "num_decoder_layers")
WIDTH: Final = ("hidden_size", "n_embd", "d_model", "dim", "model_dim")
HEADS: Final = ("num_attention_heads", "n_head", "n_heads", "num_heads")
KV_HEADS: Final = (
    *("num_key_value_heads", "num_kv_heads", "n_head_kv", "n_kv_heads", "multi_query_group_num"),
    *("num_attention_groups", "num_query_groups"),
)
HEAD_DIM: Final = ("head_dim", "kv_channels", "attention_head_dim", "head_size", "qk_head_dim")
EXPERTS: Final = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", "num_moe_experts")
EXPERTS_A_TOKEN: Final = (
    *("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_top_k", "moe_k"),
    *("experts_per_token", "num_selected_experts"),
)
LAYER_KINDS: Final = ("layer_types", "layers_block_type", "block_types", "layer_kinds")
VOCABULARY: Final = ("vocab_size", "padded_vocab_size", "n_vocab")
LENGTH: Final = (
    *("max_position_embeddings", "seq_length", "n_positions", "max_seq_len", "max_sequence_length"),
    *("model_max_length", "max_seq_length"),
)
"""Names of one size in different files, the most specific first."""

_ONE_SIZE: Final = (LAYERS, WIDTH, HEADS[:-1], HEAD_DIM[:-1], KV_HEADS, EXPERTS, EXPERTS_A_TOKEN)
"""Names of one size that a file needs only once. Other names have fallbacks, or also count the heads of a state."""

_MOST_DIGITS: Final = 18
"""Of a number that a file writes as text."""


def settled(fields: Fields, levels: Iterable[Fields]) -> tuple[Fields, tuple[str, ...]]:
    """Return the fields with one value for each size, and a sentence for each size that has several values.

    ``levels`` are the sections of the file that may hold them. Which one the engine reads depends on its class, so the
    larger one is used, because it needs more memory. For layers, the length of a list of layer types wins.
    """
    levels, values, names, doubts = tuple(levels), dict(fields.values), {}, []
    for keys in _ONE_SIZE:
        found = {level.path(key): size for level in levels for key in keys if (size := _size(level.values.get(key)))}
        if len(set(found.values())) <= 1:
            continue
        listed = {len(kinds) for key in LAYER_KINDS if isinstance(kinds := fields.values.get(key), list)}
        taken = max(listed & set(found.values()) if keys is LAYERS else (), default=max(found.values()))
        where = next(path for path, size in found.items() if size == taken)
        for key in filter(fields.is_set, keys):
            values[key], names[key] = taken, where
        told = " and ".join(f"{path} {size}" for path, size in found.items())
        doubts.append(f"its config.json contradicts itself ({told}); the plan uses {taken}; correct the file")
    return fields.having(values, names), tuple(doubts)


def _size(value: object) -> int | None:
    """Return a size as files write it: a number, one in quotes, or the largest of one for each layer; else None."""
    if isinstance(value, list):
        return max((each for each in value if type(each) is int), default=None)
    if isinstance(value, str) and value.isdecimal() and len(value) <= _MOST_DIGITS:
        return int(value)
    return value if type(value) is int else None


def number(fields: Fields, keys: tuple[str, ...], default: int) -> int:
    """Return the size under the first key that is set and not zero; the largest if it is a list with one per layer."""
    for key in keys:
        value = fields.values.get(key)
        size = _size(value)
        if size or not (value in (None, 0, False) or isinstance(value, str | list)):
            return fields.having({**fields.values, key: size or value}).size(key)
    return default


def required(fields: Fields, keys: tuple[str, ...]) -> int:
    """Return a size as number does, or raise GeometryError if no key is set."""
    found = number(fields, keys, 0)
    if not found:
        raise fields.error(keys[0], "is missing; copy it from the model's config.json")
    return found


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


_INNER_WIDTH: Final = (
    *("dense_intermediate_size", "intermediate_size_mlp", "intermediate_size", "ffn_hidden_size", "n_inner"),
    *("ffn_dim", "ffn_intermediate_size", "hidden_dim"),
)
_EXPERT_WIDTH: Final = (
    *("moe_intermediate_size", "expert_intermediate_size", "moe_ffn_hidden_size", "expert_ffn_hidden_size"),
    *("intermediate_size", "ffn_hidden_size"),
)
_SHARED_WIDTH: Final = (
    *("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "shared_intermediate_size"),
    *("shared_expert_intermediate_dim", "share_expert_dim"),
)
_SHARED_EXPERTS: Final = ("n_shared_experts", "num_shared_experts", "num_shared_expert", "moe_num_shared_experts")
_DENSE_FIRST: Final = (
    "first_k_dense_replace",
    "num_dense_layers",
    "moe_layer_start_index",
    "moe_first_k_dense_replace",
    "dense_mlp_idx",
)
"""Names of one size in different files, the most specific first."""

_EXPERT_LAYERS: Final = ("moe_layers_enum", "moe_layers")
"""Keys that name the layers with experts."""

_NO_GATE: Final = ("relu2", "gelu_new", "gelu_fast", "squared_relu")
_WIDENS: Final = 4


def feed_forwards(fields: Fields, kinds: tuple[str, ...]) -> Callable[[int], FeedForward | None]:
    """Return the second half of each layer."""
    gated = not any(
        fields.values.get(key) in _NO_GATE for key in ("hidden_act", "mlp_hidden_act", "activation_function")
    )
    width = number(fields, _INNER_WIDTH, 0)
    dense = DenseMlp(width or _WIDENS * fields.size("hidden_size"), gated=gated)
    experts = _experts(fields, gated=gated)
    apart = bool(set(kinds) & set(NO_MIXER))
    has_experts = _where_experts(fields, len(kinds))

    def feed_forward(index: int) -> FeedForward | None:
        kind = kinds[index]
        if apart:
            return (experts if kind == "moe" and experts else dense) if kind in NO_MIXER else None
        if not width and experts is None and kinds[index] == LINEAR:
            # Mamba alone has no feed-forward layer.
            return None
        return experts if experts is not None and has_experts(index) else dense

    return feed_forward


def _experts(fields: Fields, *, gated: bool) -> Experts | None:
    count = number(fields, EXPERTS, 0)
    if count <= 1:
        return None
    width = required(fields, _EXPERT_WIDTH)
    shared = number(fields, _SHARED_WIDTH, 0)
    times = number(fields, _SHARED_EXPERTS, 0)
    if shared and times:
        shared *= times
    latent = number(fields, ("moe_latent_size", "routed_expert_hidden_size"), 0)
    return Experts(
        count,
        min(number(fields, EXPERTS_A_TOKEN, 1), count),
        width,
        score_bias_bytes=FLOAT32_BYTES,
        shared_intermediate_size=shared or times * width,
        gated=gated,
        latent_size=latent or None,
    )


def expert_doubts(fields: Fields, kinds: tuple[str, ...]) -> Iterator[str]:
    """Yield a warning for each key that puts experts into layers that the model does not have."""
    count = number(fields, EXPERTS, 0)
    if count <= 1 or set(kinds) & set(NO_MIXER):
        return
    if not _has_some(_named_experts(fields), len(kinds)):
        yield f"its config.json has {count} experts but no layer for them; the plan counts experts in all layers"
    for key in filter(fields.is_set, _EXPERT_LAYERS):
        if beyond := [place for place in _places(fields, key) if place >= len(kinds)]:
            yield f"{fields.path(key)} lists layer {beyond[0]}, but the last layer is {len(kinds) - 1}; check both"


def _where_experts(fields: Fields, layers: int) -> Callable[[int], bool]:
    """Return which layers have experts; all others are dense.

    A file that names experts and no layer for them is wrong: with experts in all layers the model takes most memory.
    """
    has_experts = _named_experts(fields)
    return has_experts if _has_some(has_experts, layers) else lambda _: True


def _has_some(has_experts: Callable[[int], bool], layers: int) -> bool:
    return any(has_experts(index) for index in range(layers))


def _places(fields: Fields, key: str) -> list[int]:
    """Return layers that a file names in a list or in text, such as 4,5,6."""
    return [int(each) for each in re.findall(r"\d{1,9}", str(fields.values[key]))]


def _named_experts(fields: Fields) -> Callable[[int], bool]:
    """Return which layers have experts by the keys with which files say it."""
    values = fields.values
    first = number(fields, _DENSE_FIRST, 0)
    marks = values.get("moe_layer_freq")
    dense_only = values.get("mlp_only_layers")
    named = next((key for key in _EXPERT_LAYERS if values.get(key)), None)
    places = set() if named is None else set(_places(fields, named))
    step = 1
    for key in ("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval", "expert_layer_period"):
        step = max(step, number(fields, (key,), 1))
    offset = number(fields, ("expert_layer_offset",), -1)

    def has_experts(index: int) -> bool:
        if places:
            return index in places
        if isinstance(marks, list):
            return bool(marks[index]) if index < len(marks) else True
        if isinstance(dense_only, list) and index in dense_only:
            return False
        if index < first:
            return False
        return index % step == offset if offset >= 0 else (index + 1) % step == 0

    return has_experts


_INNER: Final = (
    *("thinker_config", "text_config", "llm_config", "language_config", "text_model_config"),
    *("language_model_config", "transformer_layer_config"),
)
"""Sections that hold the language model."""

_TOWER_SECTIONS: Final = ("vision_config", "vision_tower_config", "visual", "vision", "audio_config", "sound_config")
_TOWER_LAYERS: Final = ("num_hidden_layers", "depth", "encoder_layers", "num_layers", "n_layers", "layers", "n_layer")
_TOWER_WIDTH: Final = ("hidden_size", "embed_dim", "d_model", "width", "n_embd", "dim")
_TOWER_INNER: Final = ("intermediate_size", "encoder_ffn_dim", "ffn_dim", "mlp_dim")
_TOWER_WIDENS: Final = 4
_TOWER_PROJECTIONS: Final = 3
"""Encoders and the sizes in them; feed-forward layers are counted with a gate."""

_PREDICTS: Final = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers", "num_mtp_modules")
_MORE_IN_FILES_PERCENT: Final = 5
"""By how much files may exceed what a config.json describes before the plan counts the files."""

MORE_IN_FILES: Final = "weights"
"""Why a model of a known class is estimated: what `ModelGeometry.estimated_because` says of `as_in_files`."""

SCALE_TOLERANCE_PERCENT: Final = 25
"""How far the layers in the files may be from those that a config.json describes before a plan warns.

By config.json alone, `estimated_geometry` finds the layers of the 301 exact models of the catalogue within 3 % for 299,
and within 7 % for 300.
"""

_NORMS: Final = 2
_AUXILIARY_STATES: Final = 3


def estimated_geometry(
    fields: Fields, architecture: str, because: UnmodelledError, stored: StoredWeights | None, tower: Tower | None
) -> ModelGeometry:
    """Return the geometry of a model that sizing does not implement.

    Parameters
    ----------
    fields
        Its config.json, whole.
    because
        What sizing does not implement.
    stored
        What the headers of its files say; None if they were not read.
    tower
        Its encoder if sizing implements that; None to estimate it.

    Raises
    ------
    GeometryError
        If a size is missing, of the wrong type, out of range, or contradicts another.
    """
    text, doubts = settled(_language_model(fields), _levels(fields))
    model = _decoder(text, architecture, stored, doubts)
    model = replace(model, tower=tower or _tower(fields, stored, model.dtype_bytes))
    count = number(text, _PREDICTS, 0)
    if count and model.layers:
        block = model.layers[-1] if model.checkpoint is None else in_16_bits_for_prediction(model.layers[-1], text)
        model = replace(model, mtp_layers=count, mtp_block=(block,))
    return _estimated(model, because.field, stored)


def as_in_files(model: ModelGeometry, stored: StoredWeights) -> ModelGeometry:
    """Return a model of a known class, scaled to its files if these hold much more than its config.json describes.

    Then one of both is wrong, or the model has parts that sizing does not know.
    """
    quantized = model.checkpoint is not None
    loaded = stored.loaded_bytes(quantized=quantized) - stored.unused_bytes
    without_prediction, most = expected_file_bytes(model, output_head=stored.output_head)
    if stored.unused_bytes:
        most = without_prediction
    if loaded * 100 <= most * (100 + _MORE_IN_FILES_PERCENT):
        return model
    return _estimated(model, MORE_IN_FILES, stored)


def with_estimated_encoders(model: ModelGeometry, fields: Fields, stored: StoredWeights | None) -> ModelGeometry:
    """Return a model with the encoders of a class of which sizing implements the language model alone."""
    model = replace(model, tower=_tower(fields, stored, model.dtype_bytes))
    return _estimated(model, next((key for key, _ in _encoder_sections(fields)), "architectures"), stored)


def estimated_head(
    fields: Fields, architecture: str, method: str, because: UnmodelledError, stored: StoredWeights | None
) -> ModelGeometry:
    """Return the geometry of a draft head that sizing does not implement; parameters and errors as above."""
    text, doubts = settled(_language_model(fields), _levels(fields))
    model = _decoder(text, architecture, stored, doubts)
    model = replace(model, head=_head_parts(text, model, method, stored))
    if method == Method.EAGLE3 and model.layers:
        # Its first layer reads the token beside the hidden state (vLLM, llama_eagle3.py).
        model = replace(model, layers=(replace(model.layers[0], input_multiple=2), *model.layers[1:]))
    return _estimated(model, because.field, stored)


def _estimated(model: ModelGeometry, because: str, stored: StoredWeights | None) -> ModelGeometry:
    return _scaled(replace(model, knowledge=Knowledge.ESTIMATED, estimated_because=because), stored)


def _language_model(fields: Fields) -> Fields:
    """Return the fields with those of the innermost language model on top."""
    for key in _INNER:
        section = fields.section(key)
        if section is None:
            continue
        outer = {name: value for name, value in fields.values.items() if name not in (*_INNER, *_TOWER_SECTIONS)}
        # Sections of encoders stay: they tell nothing of the language model.
        inner = {name: value for name, value in section.values.items() if value is not None or name not in outer}
        names = {name: section.path(name) for name in inner}
        return _language_model(fields.having({**outer, **inner}, names))
    return fields


def _decoder(fields: Fields, architecture: str, stored: StoredWeights | None, doubts: tuple[str, ...]) -> ModelGeometry:
    of_layers = kinds(fields)
    hidden = required(fields, WIDTH)
    checkpoint, fields = _checkpoint(fields)
    tied = fields.flag("tie_word_embeddings") or (stored is not None and not stored.output_head)
    found = {
        "hidden_size": hidden,
        "num_hidden_layers": len(of_layers),
        "vocab_size": required(fields, VOCABULARY),
        "max_position_embeddings": number(fields, LENGTH, MAX_TOKENS),
        "tie_word_embeddings": tied,
        "dtype": "bfloat16",
    }
    fields = fields.having({**fields.values, **found})
    mixer, rope_dim = mixers(fields, of_layers, architecture)
    feed_forward = feed_forwards(fields, of_layers)
    decoder = Decoder(
        mixer,
        feed_forward,
        _ropes(fields, rope_dim),
        norms=_NORMS,
        tables_on_every_stage=True,
        norm_on_every_stage=True,
    )
    model = assemble(fields, architecture, decoder)
    doubts = (*doubts, *attention_doubts(fields, of_layers, architecture), *expert_doubts(fields, of_layers))
    stored_as = _with_experts(model.checkpoint if checkpoint is None else checkpoint, fields, architecture)
    return replace(model, checkpoint=stored_as, doubts=doubts)


def _with_experts(checkpoint: WeightFormat | None, fields: Fields, architecture: str) -> WeightFormat | None:
    """Return the format of a checkpoint with that of its experts, if they are in 4 bits beside layers in FP8.

    vLLM, models/deepseek_v41/quant_config.py, DeepseekV4FP8Config: files of DeepSeek V4 that do not say are so.
    """
    if checkpoint is None or checkpoint.precision is not Precision.FP8:
        return checkpoint
    default = "fp4" if architecture.startswith("DeepseekV4") else ""
    if fields.text("expert_dtype", default=default) != "fp4":
        return checkpoint
    return replace(checkpoint, expert_format=DEFAULT_FORMATS[Precision.MXFP4])


def _checkpoint(fields: Fields) -> tuple[WeightFormat | None, Fields]:
    """Return the format of a checkpoint that sizing does not implement, and the fields without it."""
    try:
        read_checkpoint(fields.having({"num_hidden_layers": 1, **fields.values}))
    except UnmodelledError:
        section = fields.values.get("quantization_config") or fields.values.get("compression_config")
        rest = {
            key: value
            for key, value in fields.values.items()
            if key not in ("quantization_config", "compression_config")
        }
        return _guessed_format(section), fields.having(rest)
    return None, fields


def _guessed_format(section: object) -> WeightFormat:
    """Return the format of most weights by the words and bits that a quantization_config names."""
    words = str(section).lower()
    bits = [str(value) for key, value in _leaves(section) if key in ("bits", "num_bits", "w_bit", "weight_bits")]
    by_word = {"nvfp4": Precision.NVFP4, "mxfp4": Precision.MXFP4, "fp8": Precision.FP8, "nf4": Precision.INT4}
    precision = next((each for word, each in by_word.items() if word in words), None)
    if precision is None:
        precision = Precision.INT4 if "4" in bits or "load_in_4bit': true" in words else Precision.FP8
    return DEFAULT_FORMATS[precision]


def _leaves(value: object, key: str = "") -> Iterable[tuple[str, object]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _leaves(inner, str(name))
    else:
        yield key, value


def _ropes(fields: Fields, head_dim: int) -> tuple[RopeTable, ...]:
    if not head_dim or fields.size("max_position_embeddings") == MAX_TOKENS:
        return ()
    try:
        return (model_rope(fields, head_dim),)
    except GeometryError:
        # Its table is small, and covered by the margin.
        return ()


def _tower(fields: Fields, stored: StoredWeights | None, dtype_bytes: int) -> Tower:
    """Return the encoders: their bytes in the files, or else by the sizes of their sections.

    They are divided over the ranks, as most classes of vLLM do; the margin holds them whole.
    """
    elements = 0
    sections = list(_encoder_sections(fields))
    for _, section in sections:
        width = number(section, _TOWER_WIDTH, 0)
        inner = number(section, _TOWER_INNER, _TOWER_WIDENS * width)
        elements += number(section, _TOWER_LAYERS, 0) * width * (_TOWER_WIDENS * width + _TOWER_PROJECTIONS * inner)
    if stored is not None and stored.bytes_by_part:
        elements = stored.encoder_bytes // dtype_bytes
    return Tower(split_elements=elements, unknown_items=True) if elements or sections else Tower()


def _encoder_sections(fields: Fields) -> Iterable[tuple[str, Fields]]:
    for level in _levels(fields):
        for key in _TOWER_SECTIONS:
            if section := _object(level, key):
                yield key, section


def _levels(fields: Fields) -> Iterable[Fields]:
    yield fields
    for key in _INNER:
        section = fields.section(key)
        if section is not None:
            yield from _levels(section)


def _object(fields: Fields, key: str) -> Fields | None:
    return fields.section(key) if isinstance(fields.values.get(key), Mapping) else None


def _head_parts(fields: Fields, model: ModelGeometry, method: str, stored: StoredWeights | None) -> HeadParts:
    """Return what a head of a method holds beside its layers; an output head that its files lack is the target's."""
    size = model.hidden_size
    width = number(fields, ("target_hidden_size",), size)
    rows = number(fields, ("draft_vocab_size",), model.vocab_size)
    no_output = stored is not None and not stored.output_head
    joins = method in (Method.EAGLE3, Method.DFLASH, Method.DSPARK)
    states = _joined(fields, method) if joins else 0
    blocks = method in (Method.DFLASH, Method.DSPARK)
    mapped = rows * TOKEN_ID_BYTES if rows != model.vocab_size else 0
    shares_output = method in (Method.EAGLE, Method.MTP) or blocks or no_output
    return HeadParts(
        output_rows=rows,
        shares_embedding=width == size,
        shares_output=shares_output,
        whole_elements=(states * width if joins else 2 * size) * size + _NORMS * size,
        whole_bytes=mapped,
        token_map_bytes=mapped,
        auxiliary_states=states,
        copies_keys_and_values=blocks,
        reads_width=width,
    )


def _joined(fields: Fields, method: str) -> int:
    for section in (fields, *(found for key in ("eagle_config", "dflash_config") if (found := _object(fields, key)))):
        for key in ("eagle_aux_hidden_state_layer_ids", "target_layer_ids"):
            ids = section.values.get(key)
            if isinstance(ids, list) and ids:
                return len(ids)
    return _AUXILIARY_STATES if method == Method.EAGLE3 else fields.size("num_hidden_layers", default=_AUXILIARY_STATES)


def _scaled(model: ModelGeometry, stored: StoredWeights | None) -> ModelGeometry:
    """Return the model with its layers scaled to the bytes that the files hold for them."""
    if stored is None or not stored.total_bytes:
        return replace(model, stored=stored)
    precision, one = model.checkpoint_precision or Precision.BF16, Split(1)
    parts = weight_parts(model, precision, one, whole_model(model))
    by_shape = parts["layers"]
    loaded = stored.loaded_bytes(quantized=model.checkpoint is not None)
    tables = stored.table_bytes
    if tables is not None:
        # Further tables, such as those of n-grams, count with the layers.
        by_vocabulary = next((int(size) for part, size in parts.items() if part.startswith("embedding")), 0)
        tables = min(tables * loaded // stored.total_bytes, by_vocabulary)
    else:
        count = (
            1 if model.head is None else int(model.head.embeds and not model.head.shares_embedding)
        ) + stored.output_head
        tables = count * model.vocab_size * model.hidden_size * model.dtype_bytes
    beside = parts["encoder"] + parts.get("joining layers", 0)
    unused = stored.unused_bytes * loaded // stored.total_bytes
    in_files = loaded - tables - beside - unused
    model = replace(model, stored=stored, mtp_scale=_prediction_scale(model, stored))
    if by_shape <= 0 or in_files <= 0:
        return model
    return replace(model, layer_scale=(in_files, int(by_shape)))


def _prediction_scale(model: ModelGeometry, stored: StoredWeights) -> tuple[int, int]:
    """Return the bytes of layers for multi-token prediction in the files, and as their shapes give them.

    Files often hold them in 16 bits beside quantized layers, and their experts may have other sizes.
    """
    projections = model.mtp_layers * 2 * model.hidden_size**2 * model.dtype_bytes
    in_files = stored.prediction_bytes - projections
    if not model.mtp_block or in_files <= 0:
        return (1, 1)
    layers = replace(model, layers=model.mtp_block * model.mtp_layers, final_norms=0, layer_scale=(1, 1))
    precision = model.checkpoint_precision or Precision.BF16
    return in_files, int(weight_parts(layers, precision, Split(1), whole_model(layers))["layers"])
