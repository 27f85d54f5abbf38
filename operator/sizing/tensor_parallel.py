"""Tensor-parallel sizes a model can be split into, and kernel limits that forbid a split.

Quantized layers have blocks, groups and tiles that a split must not cut.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Final

from specdecode_operator.enums import Knowledge, Precision
from specdecode_operator.problems import Problem
from specdecode_operator.sizing.geometry import (
    DeltaNet,
    DenseMlp,
    Experts,
    LatentAttention,
    ModelGeometry,
    QuantizationMethod,
    Scales,
    SelectiveScan,
    SelfAttention,
    StateSpace,
    WeightFormat,
    padded_vocabulary,
)
from specdecode_operator.sizing.rank_layers import LinearLayer, Split, rank_layer
from specdecode_operator.sizing.result_cache import MEMO_SIZE
from specdecode_operator.sizing.version_rules import sizing_facts
from specdecode_operator.sizing.weights import common_group, linear_format, refined_block, takes_marlin
from specdecode_operator.vllm.versions import SIZED_VERSIONS, release

_TILE_INPUTS: Final = 128
_TILE_OUTPUTS: Final = 64
"""The 4-bit kernel works in tiles of this size (vLLM, marlin_utils.py)."""

MAX_TENSOR: Final = 64
"""Largest tensor parallelism that is ever proposed."""

_EXPERT_SIZE: Final = "moe_intermediate_size"

_STATE_KEYS: Final = {
    "NemotronHForCausalLM": ("mamba_num_heads", "n_groups"),
    "Mamba2ForCausalLM": ("num_heads", "n_groups"),
}
"""Keys of heads and groups of Mamba 2 in files that do not call them mamba_n_heads and mamba_n_groups."""

Models = Sequence[tuple[ModelGeometry, Precision | None]]
"""Models of a pair with their precisions; None is the checkpoint's own."""

_Rules = Mapping[str, bool]
"""Support of the kernels of a vLLM version; the table of versions names the sources."""

_RULES_OF_ALL: Final[_Rules] = {
    "pads_tiles": False,  # Incomplete tiles of the 4-bit kernel are filled up
    "cuts_expert_blocks": False,  # Blocks of experts are cut to fit
    "takes_activation_order": False,  # GPTQ with desc_act is loaded
    "packs_experts_in_bytes": False,  # Experts of compressed-tensors may be packed in eight bits
    "packs_experts_by_channel": False,  # They may have a scale per output channel
}
"""Rules that hold in every version."""


def _rejected_format(weight_format: WeightFormat, linear: LinearLayer, rules: _Rules) -> tuple[str, str, str] | None:
    """Return the key of quantization_config, its value, and why a version loads no layer of any size stored so."""
    if weight_format.scales is not Scales.GROUP:
        return None
    if weight_format.ordered_by_activation and not rules["takes_activation_order"]:
        return "desc_act", "true", "vLLM 0.30 and newer load GPTQ without desc_act only"
    if not linear.routed or weight_format.method is not QuantizationMethod.COMPRESSED_TENSORS:
        return None
    if weight_format.precision is Precision.INT8 and not rules["packs_experts_in_bytes"]:
        return "num_bits", "8", "vLLM 0.28 loads packed experts of 4 bits only"
    if not weight_format.group_size and not rules["packs_experts_by_channel"]:
        return "strategy", "channel", "vLLM 0.28 and 0.29 load packed experts with strategy group only"
    return None


def _broken_limit(weight_format: WeightFormat, linear: LinearLayer, unsplit: LinearLayer, rules: _Rules) -> str | None:
    """Return the limit in words that one rank's part of a layer breaks; ``unsplit`` is the layer on a single rank."""
    size, method = weight_format.group_size, weight_format.method
    match weight_format.scales:
        case Scales.BLOCK if linear.routed:
            part = linear.parts[0] if linear.widens else linear.inputs
            refines = method is QuantizationMethod.FP8 and rules["cuts_expert_blocks"] and refined_block(size, linear)
            return f"blocks of {size} x {size}" if part % size and not refines else None
        case Scales.BLOCK:
            return f"blocks of {size} x {size}" if _cuts_block(weight_format, linear, unsplit) else None
        case Scales.GROUP:
            by_experts = linear.routed and method in (QuantizationMethod.AWQ, QuantizationMethod.GPTQ)
            cuts = size > 0 and linear.inputs % size != 0
            if by_experts:
                cuts = size > 0 and not takes_marlin(size, linear) and common_group(size, linear) is None
            if cuts:
                return f"groups of {size} inputs"
            if not rules["pads_tiles"] and (linear.inputs % _TILE_INPUTS or linear.outputs % _TILE_OUTPUTS):
                return f"kernel tiles of {_TILE_INPUTS} x {_TILE_OUTPUTS}"
        case Scales.MICROSCALE if method is QuantizationMethod.MODELOPT and not linear.routed and linear.inputs % size:
            # vLLM, modelopt.py, KNvfp4Static.create_weights.
            return f"groups of {size} inputs"
    return None


def _cuts_block(weight_format: WeightFormat, linear: LinearLayer, unsplit: LinearLayer) -> bool:
    """Apply fp8_utils.py, validate_fp8_block_shape: a split must not cut a block.

    A merged layer of the fp8 method may have incomplete blocks (linear.py, _maybe_allow_fp8_block_shape_mismatch), one
    of compressed-tensors in its last part, if it is not split.
    """
    edge, by_outputs = weight_format.group_size, linear.outputs != unsplit.outputs
    if linear.inputs != unsplit.inputs and linear.inputs % edge:
        return True
    if len(linear.parts) == 1:
        return by_outputs and linear.outputs % edge != 0
    if weight_format.method is QuantizationMethod.FP8:
        return False
    return any(part % edge for part in (linear.parts if by_outputs else linear.parts[:-1]))


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
    """Return all problems of splitting a model over ``tensor`` GPUs; empty if it can be split.

    The field of a problem is the key of config.json that does not divide. `split_remedy` returns the fix. Without a
    precision it is the checkpoint's own; without a version, the rules of every known version apply. Experts are split
    over the GPUs of all data-parallel copies too, or spread over them whole.
    """
    split = Split(tensor, tensor * data if expert else 1, data)
    problems = _shape_problems(geometry, split)
    # Sizing does not know the kernels of a format that it does not implement. Parts of layers are only whole numbers
    # once the shape itself divides.
    if problems or geometry.knowledge is not Knowledge.EXACT:
        return problems
    rules = _RULES_OF_ALL if engine_version is None else sizing_facts(engine_version)["kernels"]
    return _quantization_problems(geometry, split, geometry.weight_format(precision), rules)


def supported_tensors(
    models: Models, engine_version: str | None = None, *, data: int = 1, expert: bool = False
) -> tuple[int, ...]:
    """Return the powers of two over which all models can be split; see tensor_problems."""
    return tuple(
        tensor
        for tensor in (2**exponent for exponent in range(MAX_TENSOR.bit_length()))
        if not any(
            tensor_problems(model, tensor, precision, engine_version, data=data, expert=expert)
            for model, precision in models
        )
    )


def split_remedy(models: Models, engine_version: str | None = None, *, data: int = 1, expert: bool = False) -> str:
    """Return the fix of a split that has problems: the numbers of GPUs that can share the layers, or another change."""

    def tensors(version: str | None, *, expert: bool = expert) -> tuple[int, ...]:
        return supported_tensors(models, version, data=data, expert=expert)

    if found := tensors(engine_version):
        *first, last = map(str, found)
        return f"use {', '.join(first)} or {last}" if first else f"use {last}"
    if data > 1 and not expert and tensors(engine_version, expert=True):
        return "set parallelism.expert, which spreads experts whole"
    others = [version for version in SIZED_VERSIONS if engine_version is not None and tensors(version)]
    if engine_version is not None and others:
        still = "still " if release(others[-1]) < release(engine_version) else ""
        return f"no tensor parallelism helps: name another checkpoint, or vLLM {others[-1]}, which {still}loads it"
    return "no tensor parallelism helps: name a checkpoint that is quantized otherwise, or not at all"


def _shape_problems(geometry: ModelGeometry, split: Split) -> tuple[Problem, ...]:
    """Return a problem for each key whose size does not divide."""
    name, tensor, problems = geometry.name, split.tensor, dict[str, Problem]()

    def problem(key: str, value: int) -> Problem:
        padded = " (padded)" if key == "vocab_size" else ""
        return Problem(key, str(value), f"{key} {value}{padded} of {name} does not divide over tensor {tensor}")

    sizes = _shared_sizes(geometry)
    for key, value in sizes:
        if key != _EXPERT_SIZE and value % tensor:
            problems[key] = problem(key, value)
    for size in (value for key, value in sizes if key == _EXPERT_SIZE and split.experts == 1):
        if size % (tensor * split.data):
            found = problem(_EXPERT_SIZE, size)
            if split.data > 1:
                found = replace(found, message=f"{found.message} x data {split.data}, which share each expert")
            problems.setdefault(_EXPERT_SIZE, found)
    # Fewer KV heads than ranks are replicated, which takes a whole number of copies.
    kv_heads = (mixer.num_kv_heads for mixer in geometry.mixers if isinstance(mixer, SelfAttention))
    if uneven := next((heads for heads in kv_heads if heads % tensor and tensor % heads), None):
        problems["num_key_value_heads"] = problem("num_key_value_heads", uneven)
    groups = (mixer.num_groups for mixer in geometry.mixers if isinstance(mixer, StateSpace))
    if uneven := next((number for number in groups if number % tensor and number != 1), None):
        found = problem(_state_keys(geometry)[1], uneven)
        message = f"{found.message}, and the engine copies a group only where it is the only one"
        problems[found.field] = replace(found, message=message)
    return tuple(problems.values())


def _state_keys(geometry: ModelGeometry) -> tuple[str, str]:
    return _STATE_KEYS.get(geometry.architecture, ("mamba_n_heads", "mamba_n_groups"))


def _shared_sizes(geometry: ModelGeometry) -> tuple[tuple[str, int], ...]:
    """Return the sizes that are split over the ranks, by their keys of config.json."""
    sizes: list[tuple[str, int]] = []
    for layer, _ in geometry.distinct_layers:
        for part in (*layer.mixers, layer.feed_forward):
            match part:
                case SelfAttention() | LatentAttention():
                    sizes.append(("num_attention_heads", part.num_heads))
                case DeltaNet():
                    sizes.append(("linear_num_key_heads", part.num_key_heads))
                    sizes.append(("linear_num_value_heads", part.num_value_heads))
                case StateSpace():
                    sizes.append((_state_keys(geometry)[0], part.num_heads))
                case SelectiveScan():
                    sizes.append(("mamba_expand x hidden_size", part.width))
                case DenseMlp():
                    sizes.append(("intermediate_size", part.intermediate_size))
                case Experts():
                    sizes.append((_EXPERT_SIZE, part.intermediate_size))
    sizes.append(("vocab_size", padded_vocabulary(geometry.vocab_size)))
    return tuple(dict.fromkeys(sizes))


def _quantization_problems(
    geometry: ModelGeometry, split: Split, weight_format: WeightFormat, rules: _Rules
) -> tuple[Problem, ...]:
    if weight_format.scales not in (Scales.BLOCK, Scales.GROUP, Scales.MICROSCALE):
        return ()
    problems: dict[str, Problem] = {}
    what = f"{weight_format.precision} weights of {geometry.name}"
    for layer, _ in geometry.distinct_layers:
        on_rank = rank_layer(layer, geometry.hidden_size, split).linears
        on_one = rank_layer(layer, geometry.hidden_size, Split(1, split.experts)).linears
        latent = any(isinstance(mixer, LatentAttention) for mixer in layer.mixers)
        for linear, unsplit in zip(on_rank, on_one, strict=True):
            stored_as = linear_format(linear, layer, weight_format)
            if rejected := _rejected_format(stored_as, linear, rules):
                key, value, message = rejected
                return (Problem(f"quantization_config.{key}", value, f"{what}: {message}"),)
            limit = _broken_limit(stored_as, linear, unsplit, rules)
            # No split changes the compressions of latent attention and of experts.
            compresses = (latent and "self_attn" in linear.module) or "latent_proj" in linear.module
            if limit is not None and not (stored_as.scales is Scales.GROUP and compresses):
                key, value = _key_of(linear, geometry)
                message = (
                    f"{what} at tensor {split.tensor}: a layer of {linear.inputs} x {linear.outputs} on each GPU breaks"
                    f" {limit}"
                )
                problems.setdefault(key, Problem(key, value, message))
    return tuple(problems.values())


def _key_of(linear: LinearLayer, geometry: ModelGeometry) -> tuple[str, str]:
    """Return the key of config.json that decides the size of a layer, and its value."""
    if linear.routed:
        key = _EXPERT_SIZE
    elif "mamba" in linear.module:
        key = _state_keys(geometry)[0]
    else:
        key = "num_attention_heads" if "attn" in linear.module else "intermediate_size"
    # The first size of a key is reported.
    return key, str(dict(reversed(_shared_sizes(geometry))).get(key, geometry.widest_dense))
