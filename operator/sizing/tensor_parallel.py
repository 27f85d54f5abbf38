"""Which tensor parallelism a model can be split into."""

from functools import lru_cache
from typing import Final

from specdecode_operator.problems import Problem
from specdecode_operator.sizing.base.remembered import MOST_REMEMBERED
from specdecode_operator.sizing.model.geometry import ModelGeometry
from specdecode_operator.sizing.model.layers import (
    DeltaNet,
    DenseMlp,
    Experts,
    FeedForward,
    LatentAttention,
    Layer,
    SelectiveScan,
    SelfAttention,
    SingleMixer,
    StateSpace,
)
from specdecode_operator.sizing.model.precision import Scales, WeightFormat
from specdecode_operator.sizing.weights.kernel_limits import KernelRules, broken_limit, kernel_rules, refused_format
from specdecode_operator.sizing.weights.rank_layers import LinearLayer, Split, rank_layer
from specdecode_operator.sizing.weights.weights import linear_format, padded_vocabulary
from specdecode_operator.versions.table import SIZED_VERSIONS, release
from specdecode_operator.vocabulary import Knowledge, Precision

MAX_TENSOR: Final = 64
"""Largest tensor parallelism that is ever proposed."""

_EXPERT_SIZE: Final = "moe_intermediate_size"
"""The width inside one expert."""

_STATE_KEYS: Final = {
    "NemotronHForCausalLM": ("mamba_num_heads", "n_groups"),
    "Mamba2ForCausalLM": ("num_heads", "n_groups"),
}
"""What files call heads and groups of Mamba 2, where it is not mamba_n_heads and mamba_n_groups."""


@lru_cache(maxsize=MOST_REMEMBERED)
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
