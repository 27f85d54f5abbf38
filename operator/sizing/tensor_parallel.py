"""Tensor-parallel sizes a model can be split into, and kernel limits that forbid a split.

Quantized layers have blocks, groups and tiles that a split must not cut.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple

from specdecode_operator.enums import Knowledge, Precision
from specdecode_operator.problems import Problem
from specdecode_operator.sizing.geometry import (
    DeltaNet,
    DenseMlp,
    Experts,
    FeedForward,
    LatentAttention,
    Layer,
    ModelGeometry,
    QuantizationMethod,
    Scales,
    SelectiveScan,
    SelfAttention,
    SingleMixer,
    StateSpace,
    WeightFormat,
    padded_vocabulary,
)
from specdecode_operator.sizing.rank_layers import LinearLayer, Split, rank_layer
from specdecode_operator.sizing.result_cache import MEMO_SIZE
from specdecode_operator.sizing.version_rules import sizing_facts
from specdecode_operator.sizing.weights import common_group, linear_format, refined_block, takes_marlin
from specdecode_operator.vllm.versions import SIZED_VERSIONS, release

MARLIN_TILE_INPUTS: Final = 128
MARLIN_TILE_OUTPUTS: Final = 64
"""The 4-bit kernel works in tiles of this size (vLLM, marlin_utils.py)."""


@dataclass(frozen=True)
class KernelRules:
    """What the kernels of a vLLM version take; the table of versions names the sources."""

    pads_tiles: bool
    """Incomplete tiles of the 4-bit kernel are filled up."""
    cuts_expert_blocks: bool
    """Blocks of experts are cut to fit."""
    takes_activation_order: bool
    """GPTQ with desc_act is loaded."""
    packs_experts_in_bytes: bool
    """Experts of compressed-tensors may be packed in eight bits."""
    packs_experts_by_channel: bool
    """They may have a scale an output channel."""


def kernel_rules(version: str | None) -> KernelRules:
    """Return the rules of a vLLM version; without one what every version takes."""
    if version is None:
        return KernelRules(
            pads_tiles=False,
            cuts_expert_blocks=False,
            takes_activation_order=False,
            packs_experts_in_bytes=False,
            packs_experts_by_channel=False,
        )
    return KernelRules(**sizing_facts(version)["kernels"])


class RefusedFormat(NamedTuple):
    """A key of quantization_config whose value a version does not load, whatever the size of a layer is."""

    key: str
    value: str
    message: str


def refused_format(weight_format: WeightFormat, linear: LinearLayer, rules: KernelRules) -> RefusedFormat | None:
    """Return why a version loads no layer like this that is stored so; None where it does."""
    if weight_format.scales is not Scales.GROUP:
        return None
    if weight_format.ordered_by_activation and not rules.takes_activation_order:
        return RefusedFormat("desc_act", "true", "vLLM 0.30 and newer load GPTQ without desc_act only")
    if not linear.routed or weight_format.method is not QuantizationMethod.COMPRESSED_TENSORS:
        return None
    if weight_format.precision is Precision.INT8 and not rules.packs_experts_in_bytes:
        return RefusedFormat("num_bits", "8", "vLLM 0.28 loads packed experts of 4 bits only")
    if not weight_format.group_size and not rules.packs_experts_by_channel:
        return RefusedFormat("strategy", "channel", "vLLM 0.28 and 0.29 load packed experts with strategy group only")
    return None


def broken_limit(
    weight_format: WeightFormat, linear: LinearLayer, unsplit: LinearLayer, rules: KernelRules
) -> str | None:
    """Return the limit that one rank's part of a layer breaks, in words; None where it breaks none.

    ``linear`` is the layer on one of the ranks, ``unsplit`` on a single one.
    """
    match weight_format.scales:
        case Scales.BLOCK if linear.routed:
            return _broken_expert_block(weight_format, linear, rules)
        case Scales.BLOCK:
            return _broken_block(weight_format, linear, unsplit)
        case Scales.GROUP:
            return _broken_group(weight_format, linear) or _broken_tile(linear, rules)
        case Scales.MICROSCALE if weight_format.method is QuantizationMethod.MODELOPT and not linear.routed:
            # vLLM, modelopt.py, KNvfp4Static.create_weights.
            size = weight_format.group_size
            return f"groups of {size} inputs" if linear.inputs % size else None
        case _:
            return None


def _broken_block(weight_format: WeightFormat, linear: LinearLayer, unsplit: LinearLayer) -> str | None:
    """Apply fp8_utils.py, validate_fp8_block_shape: a split must not cut a block.

    A merged layer of the fp8 method may have incomplete blocks
    (linear.py, _maybe_allow_fp8_block_shape_mismatch), one of
    compressed-tensors in its last part, where it is not split.
    """
    edge, merged = weight_format.group_size, len(linear.parts) > 1
    by_outputs = linear.outputs != unsplit.outputs
    if merged and weight_format.method is QuantizationMethod.FP8:
        broken = False
    elif merged:
        broken = any(part % edge for part in (linear.parts if by_outputs else linear.parts[:-1]))
    else:
        broken = by_outputs and linear.outputs % edge != 0
    if linear.inputs != unsplit.inputs and linear.inputs % edge:
        broken = True
    return f"blocks of {edge} x {edge}" if broken else None


def _broken_expert_block(weight_format: WeightFormat, linear: LinearLayer, rules: KernelRules) -> str | None:
    edge = weight_format.group_size
    part = linear.parts[0] if linear.widens else linear.inputs
    if part % edge == 0:
        return None
    refines = weight_format.method is QuantizationMethod.FP8 and rules.cuts_expert_blocks
    return None if refines and refined_block(edge, linear) else f"blocks of {edge} x {edge}"


def _broken_group(weight_format: WeightFormat, linear: LinearLayer) -> str | None:
    size = weight_format.group_size
    if size == 0:
        return None
    if linear.routed and weight_format.method in (QuantizationMethod.AWQ, QuantizationMethod.GPTQ):
        taken = takes_marlin(size, linear) or common_group(size, linear) is not None
        return None if taken else f"groups of {size} inputs"
    return f"groups of {size} inputs" if linear.inputs % size else None


def _broken_tile(linear: LinearLayer, rules: KernelRules) -> str | None:
    if rules.pads_tiles:
        return None
    if linear.inputs % MARLIN_TILE_INPUTS or linear.outputs % MARLIN_TILE_OUTPUTS:
        return f"kernel tiles of {MARLIN_TILE_INPUTS} x {MARLIN_TILE_OUTPUTS}"
    return None


MAX_TENSOR: Final = 64
"""Largest tensor parallelism that is ever proposed."""

_EXPERT_SIZE: Final = "moe_intermediate_size"
"""The width inside one expert."""

_STATE_KEYS: Final = {
    "NemotronHForCausalLM": ("mamba_num_heads", "n_groups"),
    "Mamba2ForCausalLM": ("num_heads", "n_groups"),
}
"""What files call heads and groups of Mamba 2, where it is not mamba_n_heads and mamba_n_groups."""


@lru_cache(maxsize=MEMO_SIZE)
def tensor_problems(  # noqa: PLR0913 (the key of the cache)
    geometry: ModelGeometry,
    tensor: int,
    precision: Precision | None = None,
    engine_version: str | None = None,
    *,
    data: int = 1,
    expert: bool = False,
) -> tuple[Problem, ...]:
    """Return all problems of splitting a model over so many GPUs; empty where it can be split.

    The field of a problem is the key of config.json that does not divide. What would help says split_remedy.
    Without a precision it is the checkpoint's own; without a version, what every known version takes. Experts are split
    over the GPUs of all data-parallel copies too, or spread over them whole.
    """
    split = Split(tensor, tensor * data if expert else 1, data)
    problems = _shape_problems(geometry, split)
    if geometry.knowledge is not Knowledge.EXACT:
        # What the kernels take of a format that sizing does not implement is for the engine to say.
        return problems
    # Parts of layers are only whole numbers once the shape itself divides.
    return problems or _quantization_problems(
        geometry, split, geometry.weight_format(precision), kernel_rules(engine_version)
    )


def supported_tensors(  # noqa: PLR0913 (one fact each)
    target: ModelGeometry,
    draft: ModelGeometry | None = None,
    target_precision: Precision | None = None,
    draft_precision: Precision | None = None,
    engine_version: str | None = None,
    *,
    data: int = 1,
    expert: bool = False,
) -> tuple[int, ...]:
    """Return the powers of two over which target and draft can both be split; see tensor_problems."""
    powers = [2**exponent for exponent in range(MAX_TENSOR.bit_length())]
    return tuple(
        tensor
        for tensor in powers
        if not tensor_problems(target, tensor, target_precision, engine_version, data=data, expert=expert)
        and (
            draft is None
            or not tensor_problems(draft, tensor, draft_precision, engine_version, data=data, expert=expert)
        )
    )


def split_remedy(  # noqa: PLR0913 (one fact each)
    target: ModelGeometry,
    draft: ModelGeometry | None = None,
    target_precision: Precision | None = None,
    draft_precision: Precision | None = None,
    engine_version: str | None = None,
    *,
    data: int = 1,
    expert: bool = False,
) -> str:
    """Return what to write where a split has problems: how many GPUs do share the layers, or what else would help."""

    def tensors(version: str | None, *, expert: bool = expert) -> tuple[int, ...]:
        return supported_tensors(target, draft, target_precision, draft_precision, version, data=data, expert=expert)

    if found := tensors(engine_version):
        return f"use {_one_of(found)}"
    if data > 1 and not expert and tensors(engine_version, expert=True):
        return "set parallelism.expert, which spreads experts whole"
    others = [version for version in SIZED_VERSIONS if engine_version is not None and tensors(version)]
    if engine_version is not None and others:
        still = "still " if release(others[-1]) < release(engine_version) else ""
        return f"no tensor parallelism helps: name another checkpoint, or vLLM {others[-1]}, which {still}loads it"
    return "no tensor parallelism helps: name a checkpoint that is quantized otherwise, or not at all"


def _one_of(numbers: tuple[int, ...]) -> str:
    *first, last = map(str, numbers)
    return f"{', '.join(first)} or {last}" if first else last


def _shape_problems(geometry: ModelGeometry, split: Split) -> tuple[Problem, ...]:
    sizes, tensor = _shared_sizes(geometry), split.tensor
    problems = {
        key: Problem(key, str(value), _message(geometry, tensor, key, value))
        for key, value in sizes
        if key != _EXPERT_SIZE and value % tensor
    }
    for size in (value for key, value in sizes if key == _EXPERT_SIZE and split.experts == 1):
        if size % (tensor * split.data):
            problems.setdefault(_EXPERT_SIZE, Problem(_EXPERT_SIZE, str(size), _expert_message(geometry, split, size)))
    for mixer in geometry.attentions:
        if not isinstance(mixer, SelfAttention):
            continue
        kv_heads = mixer.num_kv_heads
        # Fewer KV heads than ranks are replicated, which takes a whole number of copies.
        if kv_heads % tensor and tensor % kv_heads:
            key = "num_key_value_heads"
            problems.setdefault(key, Problem(key, str(kv_heads), _message(geometry, tensor, key, kv_heads)))
    for states in _state_spaces(geometry):
        if states.num_groups % tensor and states.num_groups != 1:
            key = _state_keys(geometry)[1]
            message = (
                f"{key} {states.num_groups} of {geometry.name} does not divide over tensor {tensor}, "
                "and the engine copies a group only where it is the only one"
            )
            problems.setdefault(key, Problem(key, str(states.num_groups), message))
    return tuple(problems.values())


def _state_spaces(geometry: ModelGeometry) -> tuple[StateSpace, ...]:
    mixers = (mixer for layer, _ in geometry.distinct_layers for mixer in layer.mixers)
    return tuple(dict.fromkeys(mixer for mixer in mixers if isinstance(mixer, StateSpace)))


def _state_keys(geometry: ModelGeometry) -> tuple[str, str]:
    return _STATE_KEYS.get(geometry.architecture, ("mamba_n_heads", "mamba_n_groups"))


def _shared_sizes(geometry: ModelGeometry) -> tuple[tuple[str, int], ...]:
    """Return what is shared out over the ranks, by the key of config.json that says it."""
    sizes: list[tuple[str, int]] = []
    for layer, _ in geometry.distinct_layers:
        sizes += [size for mixer in layer.mixers for size in _mixer_sizes(mixer, geometry)]
        sizes += _feed_forward_sizes(layer.feed_forward)
    sizes.append(("vocab_size", padded_vocabulary(geometry.vocab_size)))
    return tuple(dict.fromkeys(sizes))


def _mixer_sizes(mixer: SingleMixer, geometry: ModelGeometry) -> list[tuple[str, int]]:
    match mixer:
        case SelfAttention() | LatentAttention():
            return [("num_attention_heads", mixer.num_heads)]
        case DeltaNet():
            return [
                ("linear_num_key_heads", mixer.num_key_heads),
                ("linear_num_value_heads", mixer.num_value_heads),
            ]
        case StateSpace():
            return [(_state_keys(geometry)[0], mixer.num_heads)]
        case SelectiveScan():
            return [("mamba_expand x hidden_size", mixer.width)]


def _feed_forward_sizes(feed_forward: FeedForward | None) -> list[tuple[str, int]]:
    match feed_forward:
        case DenseMlp():
            return [("intermediate_size", feed_forward.intermediate_size)]
        case Experts():
            return [(_EXPERT_SIZE, feed_forward.intermediate_size)]
        case None:
            return []


def _expert_message(geometry: ModelGeometry, split: Split, size: int) -> str:
    if split.data == 1:
        return _message(geometry, split.tensor, _EXPERT_SIZE, size)
    return (
        f"{_EXPERT_SIZE} {size} of {geometry.name} does not divide over tensor {split.tensor} x data {split.data}, "
        "which share each expert"
    )


def _message(geometry: ModelGeometry, tensor: int, key: str, value: int) -> str:
    padded = " (padded)" if key == "vocab_size" else ""
    return f"{key} {value}{padded} of {geometry.name} does not divide over tensor {tensor}"


def _quantization_problems(
    geometry: ModelGeometry, split: Split, weight_format: WeightFormat, rules: KernelRules
) -> tuple[Problem, ...]:
    if weight_format.scales not in (Scales.BLOCK, Scales.GROUP, Scales.MICROSCALE):
        return ()
    problems: dict[str, Problem] = {}
    for layer, _ in geometry.distinct_layers:
        on_rank = rank_layer(layer, geometry.hidden_size, split).linears
        on_one = rank_layer(layer, geometry.hidden_size, Split(1, split.experts)).linears
        for linear, unsplit in zip(on_rank, on_one, strict=True):
            stored_as = linear_format(linear, layer, weight_format)
            what = f"{weight_format.precision} weights of {geometry.name}"
            if refused := refused_format(stored_as, linear, rules):
                return (Problem(f"quantization_config.{refused.key}", refused.value, f"{what}: {refused.message}"),)
            limit = broken_limit(stored_as, linear, unsplit, rules)
            if limit is None or (stored_as.scales is Scales.GROUP and _is_compression(linear, layer)):
                continue
            key = _key_of(linear, geometry)
            message = (
                f"{what} at tensor {split.tensor}: a layer of {linear.inputs} x {linear.outputs} on each GPU breaks"
                f" {limit}"
            )
            problems.setdefault(key, Problem(key, str(_size_of(key, geometry)), message))
    return tuple(problems.values())


def _is_compression(linear: LinearLayer, layer: Layer) -> bool:
    """Whether a layer belongs to the compressions of latent attention or experts, which no split changes."""
    latent = any(isinstance(mixer, LatentAttention) for mixer in layer.mixers)
    return (latent and "self_attn" in linear.module) or "latent_proj" in linear.module


def _key_of(linear: LinearLayer, geometry: ModelGeometry) -> str:
    if linear.routed:
        return _EXPERT_SIZE
    if "mamba" in linear.module:
        return _state_keys(geometry)[0]
    return "num_attention_heads" if "attn" in linear.module else "intermediate_size"


def _size_of(key: str, geometry: ModelGeometry) -> int:
    return dict(reversed(_shared_sizes(geometry))).get(key, geometry.widest_dense)
