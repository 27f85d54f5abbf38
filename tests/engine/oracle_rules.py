"""Where sizing and vLLM's classes differ, and by exactly how much: no tolerances, only rules.

What is built on the meta device is what vLLM makes before a checkpoint is
loaded. Sizing counts what stays afterwards. docs/design/sizing-weights.md names the same rules.

The amounts here are our own arithmetic, not vLLM's: without a file nothing is
loaded, so that no function of vLLM can be asked what goes, and which layers
stay in 16 bits it reads from files alone. Both amounts come from the same
layers of sizing as the bytes that are compared; what they cannot hide is a layer
that is wrong, for that shows in every format without a rule. A rule holds for
the formats that it names and no other.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from specdecode_operator.enums import Precision
from specdecode_operator.sizing.geometry import LatentAttention, ModelGeometry, QuantizationMethod, Scales, WeightFormat
from specdecode_operator.sizing.rank_layers import ROUTER, LinearLayer, Split, Stage, rank_layer
from specdecode_operator.sizing.weights import linear_bytes, takes_marlin
from specdecode_operator.vllm.versions import release
from tests.engine.oracle_cases import Case

SIXTEEN_BITS = WeightFormat(Precision.BF16)


@dataclass(frozen=True)
class Rule:
    """A difference that is meant.

    Attributes
    ----------
    name, source
        What it is about, and where vLLM 0.32 says so.
    methods
        Formats of checkpoints that it holds for.
    difference_bytes
        What vLLM's class has more than sizing counts, by model, split and stage.
    """

    name: str
    source: str
    methods: tuple[QuantizationMethod, ...]
    difference_bytes: Callable[[ModelGeometry, Split, Stage], int]


def expert_biases(geometry: ModelGeometry, split: Split, stage: Stage) -> int:
    """Return the biases of experts, which go when the files turn out to have none."""
    group_size = geometry.weight_format().group_size
    return sum(
        count * linear.copies * linear.outputs * geometry.dtype_bytes
        for linear, count in linears(geometry, split, stage)
        if linear.routed and takes_marlin(group_size, linear)
    )


def quantized_routers(geometry: ModelGeometry, split: Split, stage: Stage) -> int:
    """Return what routers take less as quantized layers, which without files everything is."""
    stored_as = replace(geometry.weight_format(), method=QuantizationMethod.NONE)
    return sum(
        count * (linear_bytes(stored_as, linear) - linear_bytes(SIXTEEN_BITS, linear))
        for linear, count in linears(geometry, split, stage)
        if linear.module == ROUTER and linear.quantizable
    )


def linears(geometry: ModelGeometry, split: Split, stage: Stage) -> Iterator[tuple[LinearLayer, int]]:
    """Yield the linear layers of a stage, each with how often it occurs."""
    for layer, count in stage.distinct_layers:
        yield from ((linear, count) for linear in rank_layer(layer, geometry.hidden_size, split).linears)


WEIGHT_RULES = (
    Rule(
        "biases of GPTQ experts",
        "auto_gptq.py, AutoGPTQMoEMethod.create_weights makes them for every checkpoint; "
        "process_weights_after_loading drops those that no file filled",
        (QuantizationMethod.GPTQ,),
        expert_biases,
    ),
    Rule(
        "routers of AWQ and GPTQ",
        "auto_awq.py and auto_gptq.py, maybe_update_config: which layers are quantized is read from the files; "
        "here are none, so that the router of Qwen3-MoE is quantized, too",
        (QuantizationMethod.AWQ, QuantizationMethod.GPTQ),
        quantized_routers,
    ),
)


@dataclass(frozen=True)
class Apart:
    """Cases that older versions are not asked about.

    Attributes
    ----------
    last
        The newest version that the rule holds for.
    why
        What keeps the answer from being compared, and where vLLM says so.
    holds
        Whether a case is one of them.
    """

    last: str
    why: str
    holds: Callable[[Case], bool]


def is_gptq(case: Case) -> bool:
    """Whether the checkpoint is one of GPTQ."""
    return case.geometry.checkpoint is not None and case.geometry.checkpoint.method is QuantizationMethod.GPTQ


def packs_experts(case: Case) -> bool:
    """Whether compressed-tensors holds experts as packed integers, and it starts."""
    stored = case.geometry.checkpoint
    packs = (
        stored is not None and stored.method is QuantizationMethod.COMPRESSED_TENSORS and stored.scales is Scales.GROUP
    )
    return packs and case.geometry.has_experts and not case.refused_by_sizing()


def refines(case: Case) -> bool:
    """Whether the draft is an XPress head."""
    return (case.draft or "").startswith("XPress")


APART = (
    Apart("0.32", "config/speculative.py, is_xpress: from 0.33 on", refines),
    Apart(
        "0.31",
        "utils/gptq_utils.py: where no file says which layers are quantized, as here, none is; 0.32 takes all for it",
        is_gptq,
    ),
    Apart(
        "0.29",
        "compressed_tensors_moe_wna16.py, create_weights: orders of activation, which go once the files have none",
        packs_experts,
    ),
)


def set_apart(case: Case) -> bool:
    """Whether its version is not asked about it."""
    return any(release(case.version) <= release(f"{rule.last}.0") and rule.holds(case) for rule in APART)


def meant_difference_bytes(case: Case, stage: Stage) -> int:
    """Return what vLLM's class has more than sizing counts, by all rules together."""
    checkpoint = case.geometry.checkpoint
    if checkpoint is None:
        return 0
    split = case.split.layer_split
    return sum(
        rule.difference_bytes(case.geometry, split, stage) for rule in WEIGHT_RULES if checkpoint.method in rule.methods
    )


def groups_that_no_file_fills(case: Case) -> bool:
    """Whether GPTQ's groups do not divide an unsplit layer.

    vLLM's class rounds their number down and starts (auto_gptq.py, create_weights, under Machete); a file has a
    group more, which cannot be loaded. Sizing refuses such a model.
    """
    checkpoint = case.geometry.checkpoint
    if checkpoint is None or checkpoint.method is not QuantizationMethod.GPTQ or not checkpoint.group_size:
        return False
    whole = [linear for stage in case.stages for linear, _ in linears(case.geometry, Split(1), stage)]
    return any(linear.inputs % checkpoint.group_size for linear in whole if not linear.routed)


def cache_that_hopper_lacks(case: Case) -> bool:
    """Whether sparse latent attention is to keep the FP8 cache of a ModelOpt checkpoint.

    FlashMLA takes ``fp8``, which the user can ask for, but not ``fp8_e4m3``, which vLLM makes of the checkpoint
    (v1/attention/backends/mla/flashmla_sparse.py, supported_kv_cache_dtypes). FlashInfer's kernel for Hopper takes it
    from 0.30 on (flashinfer_mla_sparse_sm90.py), but FlashInfer is not installed here.
    """
    sparse = any(
        isinstance(mixer, LatentAttention) and mixer.indexer is not None
        for layer in case.geometry.layers
        for mixer in layer.mixers
    )
    return sparse and case.geometry.cache_element_bytes is not None


def refusal_differs(case: Case, refused: bool) -> str:
    """Return how sizing and vLLM disagree on whether a case starts; empty where they agree or a rule says why."""
    ours = case.refused_by_sizing()
    if ours == refused or (groups_that_no_file_fills(case) if ours else cache_that_hopper_lacks(case)):
        return ""
    return f"{case}: sizing {'refuses' if ours else 'accepts'} it, vLLM does not agree"
