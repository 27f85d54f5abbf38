"""Estimate the geometry of a model whose class sizing does not implement, from common config keys.

If an omitted key is ambiguous, the larger estimate is used: no window, as many key/value heads as query heads, and
an untied output head. If the headers of the files were read, layers are scaled to the bytes in them.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
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
from specdecode_operator.sizing.families.draft_heads import dspark_stages
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

_LAYERS: Final = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "num_decoder_layers")
_WIDTH: Final = ("hidden_size", "n_embd", "d_model", "dim", "model_dim")
_HEADS: Final = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_KV_HEADS: Final = (
    *("num_key_value_heads", "num_kv_heads", "n_head_kv", "n_kv_heads", "multi_query_group_num"),
    *("num_attention_groups", "num_query_groups"),
)
_HEAD_DIM: Final = ("head_dim", "kv_channels", "attention_head_dim", "head_size", "qk_head_dim")
_EXPERTS: Final = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", "num_moe_experts")
_EXPERTS_A_TOKEN: Final = (
    *("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_top_k", "moe_k"),
    *("experts_per_token", "num_selected_experts"),
)
_LAYER_KINDS: Final = ("layer_types", "layers_block_type", "block_types", "layer_kinds")
_VOCABULARY: Final = ("vocab_size", "padded_vocab_size", "n_vocab")
_LENGTH: Final = (
    *("max_position_embeddings", "seq_length", "n_positions", "max_seq_len", "max_sequence_length"),
    *("model_max_length", "max_seq_length"),
)
"""Names of one size in different files, the most specific first."""

_ONE_SIZE: Final = (_LAYERS, _WIDTH, _HEADS[:-1], _HEAD_DIM[:-1], _KV_HEADS, _EXPERTS, _EXPERTS_A_TOKEN)
"""Names of one size that a file needs only once. Other names have fallbacks, or also count the heads of a state."""

_MOST_DIGITS: Final = 18
"""Maximum length of a number that a file writes as text."""


def _settled(fields: Fields, levels: Iterable[Fields]) -> tuple[Fields, tuple[str, ...]]:
    """Return the fields with one value for each size, and a sentence for each size that has several values.

    ``levels`` are the sections of the file that may hold them. Which one the engine reads depends on its class, so the
    larger one is used, because it needs more memory. For layers, the length of a list of layer types wins.
    """
    levels, values, names, doubts = tuple(levels), dict(fields.values), {}, []
    for keys in _ONE_SIZE:
        found = {level.path(key): size for level in levels for key in keys if (size := _size(level.values.get(key)))}
        if len(set(found.values())) <= 1:
            continue
        listed = {len(kinds) for key in _LAYER_KINDS if isinstance(kinds := fields.values.get(key), list)}
        taken = max(listed & set(found.values()) if keys is _LAYERS else (), default=max(found.values()))
        where = next(path for path, size in found.items() if size == taken)
        for key in filter(fields.is_set, keys):
            values[key], names[key] = taken, where
        told = " and ".join(f"{path} {size}" for path, size in found.items())
        doubts.append(f"its config.json contradicts itself ({told}); the plan uses {taken}; correct the file")
    return fields.having(values, names), tuple(doubts)


def _size(value: object) -> int | None:
    """Return a size as files write it: a number, one in quotes, or the largest of one per layer; otherwise None."""
    if isinstance(value, list):
        return max((each for each in value if type(each) is int), default=None)
    if isinstance(value, str) and value.isdecimal() and len(value) <= _MOST_DIGITS:
        return int(value)
    return value if type(value) is int else None


def _number(fields: Fields, keys: tuple[str, ...], default: int) -> int:
    """Return the size under the first key that is set and not zero; the largest if it is a list with one per layer."""
    for key in keys:
        value = fields.values.get(key)
        size = _size(value)
        if size or not (value in (None, 0, False) or isinstance(value, str | list)):
            return fields.having({**fields.values, key: size or value}).size(key)
    return default


def _required(fields: Fields, keys: tuple[str, ...]) -> int:
    """Return a size as _number does, or raise GeometryError if no key is set."""
    found = _number(fields, keys, 0)
    if not found:
        raise fields.error(keys[0], "is missing; copy it from the model's config.json")
    return found


_STATE_HEADS: Final = ("mamba_num_heads", "mamba_n_heads", "ssm_num_heads")
_STATE_HEAD_DIM: Final = ("mamba_head_dim", "mamba_d_head", "ssm_head_dim")
_STATE_GROUPS: Final = ("n_groups", "mamba_n_groups", "mamba_num_groups", "ssm_n_groups")
_STATE_SIZE: Final = ("ssm_state_size", "mamba_d_state", "mamba_state_dim", "state_size", "d_state")
_STATE_KERNEL: Final = ("conv_kernel", "mamba_d_conv", "mamba_conv_kernel", "d_conv", "conv_L_cache")

_PATTERN: Final = "hybrid_override_pattern"
_LETTERS: Final = {"M": LINEAR, "*": FULL, "E": "moe", "-": "mlp"}

_STATE_WORDS: Final = ("linear", "mamba", "ssm", "recurrent", "lightning", "conv", "delta", "kda", "rwkv")
_WIDE_WORDS: Final = ("sliding", "swa", "local", "window")
_SHARED_LAYERS: Final = "num_kv_shared_layers"
_NO_MIXER: Final = ("mlp", "moe", "ffn", "feed_forward")

_DEFAULT_LATENT_DIM: Final = 128
_STEP_SHARE: Final = 16


def _kinds(fields: Fields) -> tuple[str, ...]:
    """Return the kind of each layer, in words of layer_types or as the file calls it."""
    listed = next((names for key in _LAYER_KINDS if (names := fields.strings(key))), ())
    pattern = fields.values.get(_PATTERN)
    if isinstance(pattern, str) and pattern and not listed:
        listed = tuple(_LETTERS.get(letter, FULL) for letter in pattern)
    count = _number(fields, _LAYERS, len(listed))
    if not count:
        raise fields.error(_LAYERS[0], "is missing; copy it from the model's config.json")
    key = next((key for key in (*_LAYER_KINDS, _PATTERN) if fields.is_set(key)), _PATTERN)
    # Files may name more than there are: modules for multi-token prediction come after.
    if listed and len(listed) < count:
        raise fields.error(key, f"must name {count} layers")
    found = tuple(map(_kind, listed[:count])) or tuple(_unlisted_kind(fields, index) for index in range(count))
    if set(found) <= set(_NO_MIXER):
        raise fields.error(key, "lists no layer with attention or a state; correct the file")
    return found


def _attention_doubts(fields: Fields, kinds: tuple[str, ...], architecture: str) -> Iterator[str]:
    """Yield a warning for each KV cache saving in the file that is unusual or that vLLM does not implement."""
    shared = _number(fields, (_SHARED_LAYERS,), 0)
    if shared and not _shares_layers(architecture):
        path = fields.path(_SHARED_LAYERS)
        yield f"{path}: {shared} is ignored, because in vLLM no layer of {architecture} shares the KV cache of another"
    heads = next((key for key in _HEADS[:-1] if fields.is_set(key)), None)
    if heads is not None and set(kinds) <= {LINEAR, *_NO_MIXER}:
        yield f"in its config.json, no layer has a KV cache, but {fields.path(heads)} is set; check its layers"


def _shares_layers(architecture: str) -> bool:
    """Return whether layers read keys and values of earlier ones: in vLLM 0.33 in gemma3n.py and gemma4.py."""
    return architecture.startswith("Gemma")


def _kind(name: str) -> str:
    lowered = name.lower()
    if any(word in lowered for word in _WIDE_WORDS):
        return SLIDING
    if "chunk" in lowered:
        return CHUNKED
    if any(word in lowered for word in _STATE_WORDS):
        return LINEAR
    return lowered if lowered in _NO_MIXER else FULL


def _unlisted_kind(fields: Fields, index: int) -> str:
    """Return the kind of a layer by lists of marks, by periods, or by windows."""
    found = _marked_kind(fields, index) or _periodic_kind(fields, index)
    if found:
        return found
    # Every Nth layer sees everything, or all have a window that no sequence fills.
    every = fields.values.get("sliding_window_pattern") or fields.values.get("_sliding_window_pattern")
    window = _number(fields, ("sliding_window",), 0)
    if window and isinstance(every, int) and every > 1:
        return SLIDING if (index + 1) % every else FULL
    if window and isinstance(every, str) and every:
        return SLIDING if every[index % len(every)] == "L" else FULL
    if fields.values.get("use_sliding_window") is not False and window >= _number(fields, _LENGTH, MAX_TOKENS):
        # Such a window takes one block more than full attention.
        return SLIDING
    has_attention = any(fields.is_set(key) for key in _HEADS[:3])
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
    """Return the kind of a layer if every Nth has attention (Jamba, Qwen3-Next, Ring)."""
    if fields.is_set("attn_layer_period"):
        offset = fields.values.get("attn_layer_offset") or 0
        return FULL if index % fields.size("attn_layer_period") == offset else LINEAR
    if fields.is_set("linear_num_value_heads") or fields.is_set("full_attention_interval"):
        return LINEAR if (index + 1) % fields.size("full_attention_interval", default=4) else FULL
    if fields.is_set("layer_group_size") and "group_norm_size" in fields.values:
        return LINEAR if (index + 1) % fields.size("layer_group_size") else FULL
    return None


def _mixers(fields: Fields, kinds: tuple[str, ...], architecture: str) -> tuple[Callable[[int], Mixer | None], int]:
    """Return the mixer of each layer, and the width of a head's rotated part, or 0."""
    states = _states(fields, kinds) if LINEAR in kinds else None
    beside = None
    if LINEAR not in kinds and fields.is_set("mamba_d_ssm"):
        # The states are in parallel to the attention of each layer (Falcon-H1, Hymba).
        found = _states(fields, kinds)
        beside = found if isinstance(found, StateSpace) else None
    if set(kinds) <= {LINEAR, *_NO_MIXER}:
        return (lambda index: states if kinds[index] == LINEAR else None), 0
    if fields.is_set("kv_lora_rank"):
        return _latent_mixers(fields, kinds, states)
    heads, kv_heads, head_dim = _attention_sizes(fields)
    biases = ("attention_bias", "qkv_bias", "add_qkv_bias", "use_bias")
    full = SelfAttention(
        heads,
        kv_heads,
        head_dim,
        qkv_bias=any(fields.values.get(key) is True for key in biases),
        output_bias=fields.values.get("attention_bias") is True,
        qk_norm=True,
        gated=fields.values.get("attn_output_gate") is True,
        value_head_dim=_number(fields, ("v_head_dim",), 0) or None,
    )
    wide = replace(
        full,
        num_kv_heads=_number(fields, ("num_global_key_value_heads",), kv_heads),
        head_dim=_number(fields, ("global_head_dim",), head_dim),
    )
    by_kind: dict[str, Mixer | None] = {FULL: wide, LINEAR: states}
    if {SLIDING, CHUNKED} & set(kinds):
        near = replace(
            full,
            num_heads=_number(fields, ("swa_num_attention_heads",), heads),
            num_kv_heads=_number(fields, ("swa_num_key_value_heads",), kv_heads),
            head_dim=_number(fields, ("swa_head_dim",), head_dim),
            value_head_dim=_number(fields, ("swa_v_head_dim", "v_head_dim"), 0) or None,
        )
        windows = ("sliding_window", "sliding_window_size", "attention_window_size", "window_size")
        by_kind[SLIDING] = replace(near, window_tokens=_number(fields, windows, 0) or None)
        by_kind[CHUNKED] = replace(near, chunk_tokens=_number(fields, ("attention_chunk_size",), 0) or None)
    shared = _number(fields, (_SHARED_LAYERS,), 0) if _shares_layers(architecture) else 0
    first_borrower = first_that_borrows(fields, kinds, shared)

    def mixer(index: int) -> Mixer | None:
        found = by_kind.get(kinds[index])
        if isinstance(found, SelfAttention):
            if index >= first_borrower:
                found = replace(found, borrows_cache=True)
            return ParallelMixers(found, beside) if beside is not None else found
        return found

    return mixer, max(head_dim, wide.head_dim)


def _attention_sizes(fields: Fields) -> tuple[int, int, int]:
    """Return query heads, key/value heads, and the width of a head."""
    count = _required(fields, _HEADS)
    kv_heads = _number(fields, _KV_HEADS, 1 if fields.values.get("multi_query") is True else count)
    if count % kv_heads:
        key = next(key for key in _KV_HEADS if fields.is_set(key))
        raise fields.error(key, f"must divide the {count} attention heads")
    return count, kv_heads, _number(fields, _HEAD_DIM, 0) or max(fields.size("hidden_size") // count, 1)


def _latent_mixers(
    fields: Fields, kinds: tuple[str, ...], states: SingleMixer | None
) -> tuple[Callable[[int], Mixer | None], int]:
    rope_dim = _number(fields, ("qk_rope_head_dim",), 64)
    sparse = _number(fields, ("index_topk",), 0)
    latent = LatentAttention(
        num_heads=_required(fields, _HEADS),
        query_rank=_number(fields, ("q_lora_rank",), 0) or None,
        kv_rank=fields.size("kv_lora_rank"),
        nope_head_dim=_number(fields, ("qk_nope_head_dim",), _DEFAULT_LATENT_DIM),
        rope_head_dim=rope_dim,
        value_head_dim=_number(fields, ("v_head_dim",), _DEFAULT_LATENT_DIM),
        sparse_tokens=sparse,
    )
    indexed = latent
    if sparse and latent.query_rank:
        indexed = replace(latent, indexer=Indexer(fields.size("index_n_heads"), fields.size("index_head_dim")))

    def mixer(index: int) -> Mixer | None:
        if kinds[index] == LINEAR:
            return states
        if kinds[index] in _NO_MIXER:
            return None
        return indexed if sparse and has_indexer(fields, index) else latent

    return mixer, rope_dim


def _states(fields: Fields, kinds: tuple[str, ...]) -> SingleMixer:
    """Return a layer with a state of fixed size: a delta rule, Mamba 2 or Mamba 1, or else linear attention."""
    hidden = fields.size("hidden_size")
    if fields.is_set("linear_num_value_heads"):
        keys = _number(fields, ("linear_num_key_heads",), fields.size("linear_num_value_heads"))
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
    state, kernel = _number(fields, _STATE_SIZE, 0), _number(fields, _STATE_KERNEL, 4)
    if state:
        alone = () if FULL in kinds else ("num_heads",)
        count = _number(fields, (*_STATE_HEADS, *alone), 0)
        width = _number(fields, ("mamba_d_ssm", "mamba_intermediate_size"), 0)
        width = width or _number(fields, ("mamba_expand", "expand"), 2) * hidden
        if count:
            alone_dim = () if FULL in kinds else ("head_dim",)
            dim = _number(fields, (*_STATE_HEAD_DIM, *alone_dim), 0) or max(width // count, 1)
            return StateSpace(
                count,
                dim,
                _number(fields, _STATE_GROUPS, 8 if alone else 1),
                state,
                kernel,
                projection_bias=fields.values.get("mamba_proj_bias") is True,
                state_element_bytes=_state_bytes(fields),
            )
        step = _number(fields, ("mamba_dt_rank", "time_step_rank"), max(hidden // _STEP_SHARE, 1))
        return SelectiveScan(width, state, step, kernel)
    if fields.is_set("conv_L_cache"):
        # A short convolution only keeps its columns.
        return SelectiveScan(fields.size("conv_dim", default=hidden), 1, 1, kernel)
    heads, _, dim = _attention_sizes(fields)
    return DeltaNet(heads, heads, dim, dim, kernel, FLOAT32_BYTES)


def _state_bytes(fields: Fields) -> int:
    """Return the bytes of a number in a state; float32 if the file does not set it, as in some classes of vLLM."""
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
    *("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index", "moe_first_k_dense_replace"),
    "dense_mlp_idx",
)
"""Names of one size in different files, the most specific first."""

_EXPERT_LAYERS: Final = ("moe_layers_enum", "moe_layers")
"""Keys that name the layers with experts."""

_NO_GATE: Final = ("relu2", "gelu_new", "gelu_fast", "squared_relu")
_WIDENS: Final = 4


def _feed_forwards(fields: Fields, kinds: tuple[str, ...]) -> Callable[[int], FeedForward | None]:
    gated = not any(
        fields.values.get(key) in _NO_GATE for key in ("hidden_act", "mlp_hidden_act", "activation_function")
    )
    width = _number(fields, _INNER_WIDTH, 0)
    dense = DenseMlp(width or _WIDENS * fields.size("hidden_size"), gated=gated)
    experts = _experts(fields, gated=gated)
    apart = bool(set(kinds) & set(_NO_MIXER))
    has_experts = _named_experts(fields)
    # A file that names experts and no layer for them is wrong: experts in all layers take most memory.
    everywhere = not _has_some(has_experts, len(kinds))

    def feed_forward(index: int) -> FeedForward | None:
        kind = kinds[index]
        if apart:
            return (experts if kind == "moe" and experts else dense) if kind in _NO_MIXER else None
        if not width and experts is None and kinds[index] == LINEAR:
            # Only Mamba has no feed-forward layer.
            return None
        return experts if experts is not None and (everywhere or has_experts(index)) else dense

    return feed_forward


def _experts(fields: Fields, *, gated: bool) -> Experts | None:
    count = _number(fields, _EXPERTS, 0)
    if count <= 1:
        return None
    width = _required(fields, _EXPERT_WIDTH)
    shared = _number(fields, _SHARED_WIDTH, 0)
    times = _number(fields, _SHARED_EXPERTS, 0)
    if shared and times:
        shared *= times
    latent = _number(fields, ("moe_latent_size", "routed_expert_hidden_size"), 0)
    return Experts(
        count,
        min(_number(fields, _EXPERTS_A_TOKEN, 1), count),
        width,
        score_bias_bytes=FLOAT32_BYTES,
        shared_intermediate_size=shared or times * width,
        gated=gated,
        latent_size=latent or None,
    )


def _expert_doubts(fields: Fields, kinds: tuple[str, ...]) -> Iterator[str]:
    """Yield a warning for each key that puts experts into layers that the model does not have."""
    count = _number(fields, _EXPERTS, 0)
    if count <= 1 or set(kinds) & set(_NO_MIXER):
        return
    if not _has_some(_named_experts(fields), len(kinds)):
        yield f"its config.json has {count} experts but no layer for them; the plan counts experts in all layers"
    for key in filter(fields.is_set, _EXPERT_LAYERS):
        if beyond := [place for place in _places(fields, key) if place >= len(kinds)]:
            yield f"{fields.path(key)} lists layer {beyond[0]}, but the last layer is {len(kinds) - 1}; check both"


def _has_some(has_experts: Callable[[int], bool], layers: int) -> bool:
    return any(map(has_experts, range(layers)))


def _places(fields: Fields, key: str) -> list[int]:
    """Return layers that a file names in a list or in text, such as 4,5,6."""
    return [int(each) for each in re.findall(r"\d{1,9}", str(fields.values[key]))]


def _named_experts(fields: Fields) -> Callable[[int], bool]:
    """Return a test whether a layer has experts, by the keys of different files."""
    values = fields.values
    first = _number(fields, _DENSE_FIRST, 0)
    marks = values.get("moe_layer_freq")
    dense_only = values.get("mlp_only_layers")
    named = next((key for key in _EXPERT_LAYERS if values.get(key)), None)
    places = set() if named is None else set(_places(fields, named))
    steps = ("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval", "expert_layer_period")
    step = max(_number(fields, (key,), 1) for key in steps)
    offset = _number(fields, ("expert_layer_offset",), -1)

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
"""Excess of the files over their config.json above which the plan counts the files."""

MORE_IN_FILES: Final = "weights"
"""Value of `ModelGeometry.estimated_because` for a model of a known class that `as_in_files` estimates."""

SCALE_TOLERANCE_PERCENT: Final = 25
"""Difference between the layers in the files and in the config.json above which a plan warns.

With only config.json, `estimated_geometry` finds the layers of 299 of the catalogue's 301 exact models within 3 %, and
of 300 within 7 %.
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
        Contents of the headers of its files; None if they were not read.
    tower
        Its encoder if sizing implements that; None to estimate it.

    Raises
    ------
    GeometryError
        If a size is missing, of the wrong type, out of range, or contradicts another.
    """
    text, doubts = _settled(_language_model(fields), _levels(fields))
    model = _decoder(text, architecture, stored, doubts)
    model = replace(model, tower=tower or _tower(fields, stored, model.dtype_bytes))
    if (stages := dspark_stages(model, text)) is not None:
        # They take the place of layers for multi-token prediction, which such checkpoints lack.
        return _estimated(replace(model, dspark=stages), because.field, stored)
    count = _number(text, _PREDICTS, 0)
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
    """Return a model with the encoders of a class of which sizing implements only the language model."""
    model = replace(model, tower=_tower(fields, stored, model.dtype_bytes))
    return _estimated(model, next((key for key, _ in _encoder_sections(fields)), "architectures"), stored)


def estimated_head(
    fields: Fields, architecture: str, method: str, because: UnmodelledError, stored: StoredWeights | None
) -> ModelGeometry:
    """Return the geometry of a draft head that sizing does not implement; parameters and errors as above."""
    text, doubts = _settled(_language_model(fields), _levels(fields))
    model = _decoder(text, architecture, stored, doubts)
    model = replace(model, head=_head_parts(text, model, method, stored))
    if method == Method.EAGLE3 and model.layers:
        # Its first layer reads the token beside the hidden state (vLLM, llama_eagle3.py).
        model = replace(model, layers=(replace(model.layers[0], input_multiple=2), *model.layers[1:]))
    return _estimated(model, because.field, stored)


def _estimated(model: ModelGeometry, because: str, stored: StoredWeights | None) -> ModelGeometry:
    return _scaled(replace(model, knowledge=Knowledge.ESTIMATED, estimated_because=because), stored)


def _language_model(fields: Fields) -> Fields:
    """Return the fields, overridden by the innermost language model."""
    for key in _INNER:
        section = fields.section(key)
        if section is None:
            continue
        outer = {name: value for name, value in fields.values.items() if name not in (*_INNER, *_TOWER_SECTIONS)}
        # Keep sections of encoders: they do not affect the language model.
        inner = {name: value for name, value in section.values.items() if value is not None or name not in outer}
        names = {name: section.path(name) for name in inner}
        return _language_model(fields.having({**outer, **inner}, names))
    return fields


def _decoder(fields: Fields, architecture: str, stored: StoredWeights | None, doubts: tuple[str, ...]) -> ModelGeometry:
    of_layers = _kinds(fields)
    hidden = _required(fields, _WIDTH)
    checkpoint, fields = _checkpoint(fields)
    found = {
        "hidden_size": hidden,
        "num_hidden_layers": len(of_layers),
        "vocab_size": _required(fields, _VOCABULARY),
        "max_position_embeddings": _number(fields, _LENGTH, MAX_TOKENS),
        "tie_word_embeddings": fields.flag("tie_word_embeddings") or (stored is not None and not stored.output_head),
        "dtype": "bfloat16",
    }
    fields = fields.having({**fields.values, **found})
    mixer, rope_dim = _mixers(fields, of_layers, architecture)
    feed_forward = _feed_forwards(fields, of_layers)
    ropes: tuple[RopeTable, ...] = ()
    if rope_dim and found["max_position_embeddings"] != MAX_TOKENS:
        # Its table is small, and covered by the margin.
        with suppress(GeometryError):
            ropes = (model_rope(fields, rope_dim),)
    decoder = Decoder(mixer, feed_forward, ropes, tables_on_every_stage=True, norm_on_every_stage=True)
    model = assemble(fields, architecture, decoder)
    doubts = (*doubts, *_attention_doubts(fields, of_layers, architecture), *_expert_doubts(fields, of_layers))
    stored_as = _with_experts(model.checkpoint if checkpoint is None else checkpoint, fields, architecture)
    return replace(model, checkpoint=stored_as, doubts=doubts)


def _with_experts(checkpoint: WeightFormat | None, fields: Fields, architecture: str) -> WeightFormat | None:
    """Return the format of a checkpoint and of its experts, if these have 4 bits and other layers are in FP8.

    vLLM, models/deepseek_v41/quant_config.py, DeepseekV4FP8Config: files of DeepSeek V4 that do not say are so.
    """
    if checkpoint is None or checkpoint.precision is not Precision.FP8:
        return checkpoint
    default = "fp4" if architecture.startswith("DeepseekV4") else ""
    if fields.text("expert_dtype", default=default) != "fp4":
        return checkpoint
    return replace(checkpoint, expert_format=DEFAULT_FORMATS[Precision.MXFP4])


def _checkpoint(fields: Fields) -> tuple[WeightFormat | None, Fields]:
    """Return the format of a checkpoint that sizing does not implement, and the fields without it.

    It is the format of most weights, by the words and bits in its quantization_config.
    """
    try:
        read_checkpoint(fields.having({"num_hidden_layers": 1, **fields.values}))
    except UnmodelledError:
        keys = ("quantization_config", "compression_config")
        section = fields.values.get(keys[0]) or fields.values.get(keys[1])
        words = str(section).lower()
        bits = [str(value) for key, value in _leaves(section) if key in ("bits", "num_bits", "w_bit", "weight_bits")]
        by_word = {"nvfp4": Precision.NVFP4, "mxfp4": Precision.MXFP4, "fp8": Precision.FP8, "nf4": Precision.INT4}
        of_bits = Precision.INT4 if "4" in bits or "load_in_4bit': true" in words else Precision.FP8
        precision = next((each for word, each in by_word.items() if word in words), of_bits)
        rest = {key: value for key, value in fields.values.items() if key not in keys}
        return DEFAULT_FORMATS[precision], fields.having(rest)
    return None, fields


def _leaves(value: object, key: str = "") -> Iterable[tuple[str, object]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _leaves(inner, str(name))
    else:
        yield key, value


def _tower(fields: Fields, stored: StoredWeights | None, dtype_bytes: int) -> Tower:
    """Return the encoders: their bytes in the files, or else by the sizes of their sections.

    They are divided over the ranks, as most classes of vLLM do; the margin holds them whole.
    """
    elements = 0
    sections = list(_encoder_sections(fields))
    for _, section in sections:
        width = _number(section, _TOWER_WIDTH, 0)
        inner = _number(section, _TOWER_INNER, _TOWER_WIDENS * width)
        elements += _number(section, _TOWER_LAYERS, 0) * width * (_TOWER_WIDENS * width + _TOWER_PROJECTIONS * inner)
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
    """Return the parts of a head in addition to its layers; an output head that its files lack is the target's."""
    size = model.hidden_size
    width = _number(fields, ("target_hidden_size",), size)
    rows = _number(fields, ("draft_vocab_size",), model.vocab_size)
    no_output = stored is not None and not stored.output_head
    blocks = method in (Method.DFLASH, Method.DSPARK)
    joins = blocks or method == Method.EAGLE3
    states = 0
    if joins:
        sections = (fields, *(_object(fields, key) for key in ("eagle_config", "dflash_config")))
        keys = ("eagle_aux_hidden_state_layer_ids", "target_layer_ids")
        lists = (section.values.get(key) for section in sections if section for key in keys)
        ids = next((each for each in lists if isinstance(each, list) and each), None)
        states = _AUXILIARY_STATES if ids is None else len(ids)
        if ids is None and blocks:
            states = fields.size("num_hidden_layers", default=_AUXILIARY_STATES)
    mapped = rows * TOKEN_ID_BYTES if rows != model.vocab_size else 0
    return HeadParts(
        output_rows=rows,
        shares_embedding=width == size,
        shares_output=method in (Method.EAGLE, Method.MTP) or blocks or no_output,
        whole_elements=(states * width if joins else 2 * size) * size + _NORMS * size,
        whole_bytes=mapped,
        token_map_bytes=mapped,
        auxiliary_states=states,
        copies_keys_and_values=blocks,
        reads_width=width,
    )


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
        embeds = model.head is None or (model.head.embeds and not model.head.shares_embedding)
        tables = (embeds + stored.output_head) * model.vocab_size * model.hidden_size * model.dtype_bytes
    beside = parts["encoder"] + parts.get("joining layers", 0)
    unused = stored.unused_bytes * loaded // stored.total_bytes
    in_files = loaded - tables - beside - unused
    model = replace(model, stored=stored, mtp_scale=_prediction_scale(model, stored))
    if by_shape <= 0 or in_files <= 0:
        return model
    return replace(model, layer_scale=(in_files, int(by_shape)))


def _prediction_scale(model: ModelGeometry, stored: StoredWeights) -> tuple[int, int]:
    """Return the bytes of MTP layers or stages of DSpark in the files, and as their shapes give them.

    Files often hold them in 16 bits next to quantized layers, and their experts may have other sizes.
    """
    predicting, others = model.mtp_block * model.mtp_layers, model.mtp_layers * 2 * model.hidden_size**2
    if model.dspark is not None:
        predicting, others = model.dspark.layers, model.dspark.parts.whole_elements
    in_files = stored.prediction_bytes - others * model.dtype_bytes
    if not predicting or in_files <= 0:
        return (1, 1)
    layers = replace(model, layers=predicting, final_norms=0, layer_scale=(1, 1))
    precision = model.checkpoint_precision or Precision.BF16
    return in_files, int(weight_parts(layers, precision, Split(1), whole_model(layers))["layers"])
