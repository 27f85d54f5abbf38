"""Memory of LoRA adapters on one GPU and on the host, and whether a class of models supports them.

vLLM allocates the matrices A and B of all slots for each linear layer when it loads the model. Their size depends on
the largest rank, not on the adapters that it loads later (vllm/lora/model_manager.py, _create_lora_modules). The draft
gets no adapters.
"""

from dataclasses import dataclass, fields, replace
from enum import Enum, auto
from functools import lru_cache
from typing import Final

from specdecode_operator.enums import Knowledge, Precision
from specdecode_operator.sizing.arithmetic import described, named
from specdecode_operator.sizing.data_files import read_data
from specdecode_operator.sizing.geometry import (
    DeltaNet,
    Experts,
    LatentAttention,
    Layer,
    ModelGeometry,
    SelfAttention,
    SingleMixer,
    StateSpace,
    WeightFormat,
    padded_vocabulary,
)
from specdecode_operator.sizing.pair import AdapterSlots
from specdecode_operator.sizing.rank_layers import (
    ROUTER,
    LinearLayer,
    Split,
    Stage,
    groups_per_rank,
    rank_layer,
    whole_model,
)
from specdecode_operator.sizing.registered_classes import is_registered
from specdecode_operator.sizing.result_cache import MEMO_SIZE
from specdecode_operator.sizing.weights import linear_format, padded_experts
from specdecode_operator.vllm.versions import release

RANKS: Final = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of --max-lora-rank (vllm/config/lora.py, MaxLoRARanks; the same in 0.28 to 0.33)."""

LARGEST_VOCABULARY: Final = 258_048
"""Largest vocabulary of a model whose output head takes adapters (vllm/lora/layers/logits_processor.py)."""

EMBEDDING, OUTPUT_HEAD, EXPERTS = "embed_tokens", "lm_head", "experts"

_ADAPTED_AS: Final = {
    "q_proj": ("q_proj", "k_proj", "v_proj", "qkv_proj"),
    "gate_proj": ("gate_proj", "up_proj", "gate_up_proj"),
    "o_proj": ("o_proj",),
    "down_proj": ("down_proj",),
    "gate": ("gate",),
    "shared_expert_gate": ("shared_expert_gate",),
}
"""Names that adapters use for a layer, by our name (packed_modules_mapping of vLLM's models)."""

_COLUMN_PARALLEL: Final = ("q_proj", "gate_proj")
_ROW_PARALLEL: Final = ("o_proj", "down_proj", "out_proj")
_SLICES: Final = {"linear_attn.in_proj_qkvz": 4, "linear_attn.in_proj_ba": 2}
"""Number of matrices A of layers without parts in `rank_layer` (model_executor/layers/mamba/gdn_linear_attn.py)."""

_WITHOUT_SLICES: Final = "Qwen3Next"
"""Prefix of classes that do not pack these layers (packed_modules_mapping)."""

_INT32_BYTES: Final = 4
_INT64_BYTES: Final = 8

_INDICES_PER_TOKEN: Final = 4 * _INT64_BYTES
_INDICES_PER_REQUEST: Final = 3 * _INT64_BYTES
"""Tables of PunicaWrapperBase (vllm/lora/punica_wrapper/punica_base.py)."""

_KERNEL_TABLES: Final = 2
"""LoRAKernelMeta for tokens and for prompts (vllm/lora/punica_wrapper/punica_gpu.py, lora_kernel_metadata.py)."""

_MARGIN_PERCENT: Final = 50
"""Share of the buffers that is kept free if sizing does not know which layers the class wraps. Our own choice."""


class LoraSupport(Enum):
    """Whether vLLM's class of a model supports LoRA adapters."""

    YES = auto()
    NO = auto()
    UNKNOWN = auto()
    """The class is not in the registry that we read, or runs through the Transformers backend."""


def allowed_rank(rank: int) -> int:
    """Return the smallest value of --max-lora-rank for adapters of a rank of at most 512."""
    return next(each for each in RANKS if each >= rank)


def lora_support(architecture: str, version: str) -> LoraSupport:
    """Return whether a vLLM version such as ``0.32`` serves adapters with a class of models."""
    data = _classes_with_lora()
    if architecture in data.classes:
        since, until = data.since.get(architecture, version), data.until.get(architecture, version)
        return LoraSupport.YES if release(since) <= release(version) <= release(until) else LoraSupport.NO
    is_known = is_registered(architecture) and release(version) <= release(data.newest)
    return LoraSupport.NO if is_known else LoraSupport.UNKNOWN


def first_version(architecture: str) -> str | None:
    """Return the version that added adapters to a class which earlier versions serve without them, or None."""
    return _classes_with_lora().since.get(architecture)


@dataclass(frozen=True)
class _Classes:
    newest: str
    classes: frozenset[str]
    since: dict[str, str]
    until: dict[str, str]
    embedding: frozenset[str]
    output_head: frozenset[str]
    wrappers: frozenset[str]
    stacked_experts: frozenset[str]
    whole_qkv: frozenset[str]
    whole_gate_up: frozenset[str]
    unusual: frozenset[str]


@lru_cache(maxsize=1)
def _classes_with_lora() -> _Classes:
    """Return the model classes of vLLM that support adapters, and the tables that they name."""
    data = read_data("lora.json")

    def by_class(key: str) -> dict[str, str]:
        return {name: version for version, names in data[key].items() for name in names}

    sets = {each.name: frozenset(data[each.name]) for each in fields(_Classes) if isinstance(data[each.name], list)}
    return _Classes(newest=data["newest"], since=by_class("since"), until=by_class("until"), **sets)


def adapts_output_head(geometry: ModelGeometry, slots: AdapterSlots) -> bool:
    """Return whether vLLM wraps the output head of a model, which limits its vocabulary."""
    return geometry.architecture in _classes_with_lora().output_head and _is_adapted(OUTPUT_HEAD, slots)


def adapter_bytes(  # noqa: PLR0913 (all that it depends on)
    geometry: ModelGeometry,
    slots: AdapterSlots,
    split: Split,
    *,
    precision: Precision | None = None,
    stage: Stage | None = None,
    tokens: int,
    requests: int,
    on_gpu: bool = True,
) -> int:
    """Return the bytes that vLLM reserves for adapters on one rank; ``tokens`` and ``requests`` are those of a step.

    ``precision`` is that of the served model; None means that of the checkpoint. The result equals the buffers of
    vLLM's own classes for self-attention, feed-forward layers and experts (a test compares them).
    """
    where = stage or whole_model(geometry)
    size_bytes = _matrix_bytes(geometry, slots, split, where, precision)
    if experts := sum(count for layer, count in where.distinct_layers if isinstance(layer.feed_forward, Experts)):
        # adapter_enabled of each (vllm/lora/layers/fused_moe.py, create_lora_weights).
        size_bytes += experts * (slots.gpu + 1) * _INT32_BYTES
    tables = _INDICES_PER_TOKEN * tokens + _INDICES_PER_REQUEST * requests
    if on_gpu:
        tables += _KERNEL_TABLES * _INT32_BYTES * (2 * tokens + 3 * slots.gpu + 4)
    return size_bytes + described(tables, "of indices")


def _matrix_bytes(
    geometry: ModelGeometry, slots: AdapterSlots, split: Split, stage: Stage, precision: Precision | None = None
) -> int:
    """Return the bytes of the matrices A and B of all slots."""
    stored = geometry.weight_format(precision)
    rows = sum(count * _layer_rows(geometry, slots, split, layer, stored) for layer, count in stage.distinct_layers)
    rows += _table_rows(geometry, slots, stage)
    size_bytes = slots.gpu * slots.rank * named(rows, "rows and columns", like=slots.rank) * geometry.dtype_bytes
    tensor = split.tensor
    if stage.is_last and tensor > 1 and _wraps(geometry, OUTPUT_HEAD) and _is_adapted(OUTPUT_HEAD, slots):
        # sharded_to_full_mapping_gpu (vllm/lora/layers/logits_processor.py).
        size_bytes += padded_vocabulary(geometry.vocab_size) * _INT64_BYTES
    return size_bytes


def _layer_rows(geometry: ModelGeometry, slots: AdapterSlots, split: Split, layer: Layer, stored: WeightFormat) -> int:
    """Return the columns of A and the rows of B of one decoder layer on one rank, all its linear layers together."""
    on_rank = rank_layer(layer, geometry.hidden_size, split)
    rows = 0
    for linear in on_rank.linears:
        stored_as = linear_format(linear, layer, stored)
        # Experts in MXFP4 are padded before their adapters are made (fused_moe/config.py, hidden_dim).
        padded = padded_experts(linear, stored_as)[0] if stored_as.precision is Precision.MXFP4 else linear
        rows += _linear_rows(geometry, slots, split, padded)
    for mixer in layer.mixers:
        # Their convolutions are linear layers, too (model_executor/layers/mamba).
        if isinstance(mixer, DeltaNet):
            rows += mixer.conv_kernel + mixer.conv_width // split.tensor
        elif isinstance(mixer, StateSpace):
            grouped = groups_per_rank(mixer.num_groups, split.tensor) * mixer.state_size
            rows += 3 * mixer.conv_kernel + mixer.width // split.tensor + 2 * grouped
    experts = layer.feed_forward if isinstance(layer.feed_forward, Experts) else None
    if experts is None:
        return rows
    if experts.router_in_float32 and _is_adapted("gate", slots):
        rows += geometry.hidden_size + experts.num_experts
    if experts.shared_gate and _is_adapted("shared_expert_gate", slots):
        rows += geometry.hidden_size + 1
    return rows


def _linear_rows(geometry: ModelGeometry, slots: AdapterSlots, split: Split, linear: LinearLayer) -> int:
    """Return the columns of A and the rows of B of one linear layer on one rank.

    vllm/lora/layers/base_linear.py, column_parallel_linear.py and fused_moe.py, create_lora_weights. By default,
    each rank has the whole A of a column-parallel layer, and the whole B of a row-parallel one. Fully sharded adapters
    split these over the ranks, too.
    """
    if linear.module == ROUTER and _has_ungated_experts(geometry):
        return 0
    own = EXPERTS if linear.routed else linear.module.rpartition(".")[2]
    if not _is_adapted(own, slots):
        return 0
    columns, rows = _slices(geometry, linear) * linear.inputs, linear.outputs
    if slots.fully_sharded and split.tensor > 1:
        narrows = linear.widens if linear.routed else own in _COLUMN_PARALLEL
        if narrows and not _is_replicated(geometry, linear):
            columns //= split.tensor
        elif linear.routed or own in _ROW_PARALLEL:
            rows //= split.tensor
    return linear.copies * (columns + rows)


def _slices(geometry: ModelGeometry, linear: LinearLayer) -> int:
    """Return the number of matrices A of a layer: one for each layer that vLLM merges into it."""
    data, architecture = _classes_with_lora(), geometry.architecture
    if linear.module in _SLICES:
        return 1 if architecture.startswith(_WITHOUT_SLICES) else _SLICES[linear.module]
    own = linear.module.rpartition(".")[2]
    whole = data.stacked_experts if linear.routed else _whole(data).get(own, frozenset())
    return 1 if architecture in whole else len(linear.parts)


def _whole(data: "_Classes") -> dict[str, frozenset[str]]:
    return {"q_proj": data.whole_qkv, "gate_proj": data.whole_gate_up}


def _has_ungated_experts(geometry: ModelGeometry) -> bool:
    """Return whether the experts have no gate; vLLM then leaves out their router (model_manager.py, mixer.gate)."""
    parts = [layer.feed_forward for layer, _ in geometry.distinct_layers]
    return any(isinstance(part, Experts) and not part.gated for part in parts)


def _is_replicated(geometry: ModelGeometry, linear: LinearLayer) -> bool:
    """Return whether a layer may be whole on each rank: the compressions of latent attention share a name."""
    return linear.module.startswith("self_attn") and any(
        not isinstance(mixer, SelfAttention) for mixer in geometry.attentions
    )


def _table_rows(geometry: ModelGeometry, slots: AdapterSlots, stage: Stage) -> int:
    """Return the columns of A and the rows of B of embedding and output head, which are not split over ranks.

    vllm/lora/layers/vocab_parallel_embedding.py and logits_processor.py, create_lora_weights.
    """
    own = geometry.vocab_size + geometry.hidden_size
    embeds = stage.is_first and _wraps(geometry, EMBEDDING) and _is_adapted(EMBEDDING, slots)
    answers = stage.is_last and _wraps(geometry, OUTPUT_HEAD) and _is_adapted(OUTPUT_HEAD, slots)
    return (embeds + answers) * own


def _wraps(geometry: ModelGeometry, table: str) -> bool:
    data = _classes_with_lora()
    own = data.embedding if table == EMBEDDING else data.output_head
    return geometry.architecture in own or not _is_described(geometry)


def _is_described(geometry: ModelGeometry) -> bool:
    """Return whether the class itself says which tables take adapters."""
    data = _classes_with_lora()
    return geometry.architecture in data.classes and geometry.architecture not in data.wrappers


def _is_adapted(module: str, slots: AdapterSlots) -> bool:
    """Return whether --lora-target-modules keeps a layer (vllm/lora/utils.py, is_in_target_modules).

    Layers without a known name in adapters count as kept. If a target is unknown, all layers do.
    """
    known = {name for names in _ADAPTED_AS.values() for name in names} | {EMBEDDING, OUTPUT_HEAD, EXPERTS}
    if not slots.modules or not slots.modules <= known:
        return True
    if module in {EMBEDDING, OUTPUT_HEAD, EXPERTS}:
        return module in slots.modules
    names = _ADAPTED_AS.get(module)
    return names is None or not slots.modules.isdisjoint(names)


def adapters_are_exact(geometry: ModelGeometry) -> bool:
    """Return whether sizing knows all layers that vLLM wraps for adapters."""
    usual = geometry.architecture not in _classes_with_lora().unusual and _is_described(geometry)
    layers = all(not layer.own_input_size for layer, _ in geometry.distinct_layers)
    return geometry.knowledge is Knowledge.EXACT and usual and layers and all(map(_is_compared, geometry.mixers))


def _is_compared(mixer: SingleMixer) -> bool:
    """Return whether a test compares layers of this kind with vLLM's."""
    if isinstance(mixer, LatentAttention):
        return mixer.indexer is None and not mixer.sparse_tokens
    return isinstance(mixer, SelfAttention | DeltaNet)


def adapter_margin_bytes(geometry: ModelGeometry, slots: AdapterSlots, size_bytes: int, tokens: int) -> int:
    """Return the margin of one GPU for adapters: intermediate results of one layer, and more for inexact classes.

    The results of A are float32 values per token and slice (vllm/lora/punica_wrapper/punica_gpu.py, add_lora_linear),
    and for experts per token and chosen expert.
    """
    top_k = max([1, *(part.top_k for part in _experts_of(geometry))])
    step = tokens * slots.rank * 3 * top_k * 4
    return step + (0 if adapters_are_exact(geometry) else size_bytes * _MARGIN_PERCENT // 100)


def _experts_of(geometry: ModelGeometry) -> list[Experts]:
    parts = [layer.feed_forward for layer, _ in geometry.distinct_layers]
    return [part for part in parts if isinstance(part, Experts)]


@lru_cache(maxsize=MEMO_SIZE)
def host_bytes(geometry: ModelGeometry, slots: AdapterSlots) -> int:
    """Return the most bytes of host memory for adapters, per rank: each process keeps --max-cpu-loras whole ones.

    vllm/lora/worker_manager.py, LRUCacheWorkerLoRAManager. Adapters are not split over ranks, and
    their size at the largest rank is an upper bound.
    """
    one = replace(slots, gpu=1, fully_sharded=False)
    return slots.host * int(_matrix_bytes(geometry, one, Split(1), whole_model(geometry)))
