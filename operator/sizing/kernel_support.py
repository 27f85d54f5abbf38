"""Reject precisions, KV cache types and adaptive verification that vLLM's kernels do not support.

The rules follow vLLM 0.32. It can quantize 16-bit weights to FP8 at load time
(layers/quantization/online/fp8.py). It cannot quantize dense layers to INT8 or INT4. A quantized checkpoint is
served unchanged: another precision fails with "does not match the quantization method specified" (config/model.py).
Rules that do not need layers or GPUs are in vllm/speculation_rules.py.
"""

from collections.abc import Collection, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from specdecode_operator.enums import FLOAT32_BYTES, FP8_ELEMENT_BYTES, Dtype, KvCacheDtype, Precision
from specdecode_operator.sizing.devices import PRODUCT_FIELD, generation_of
from specdecode_operator.sizing.errors import PlanError
from specdecode_operator.sizing.families.draft_heads import XPRESS
from specdecode_operator.sizing.geometry import (
    DeltaNet,
    Experts,
    LatentAttention,
    ModelGeometry,
    QuantizationMethod,
    Scales,
    SelectiveScan,
    SelfAttention,
    StateSpace,
)
from specdecode_operator.sizing.pair import TENSOR_FIELD, Pair, Parallelism
from specdecode_operator.sizing.result_cache import MEMO_SIZE
from specdecode_operator.sizing.version_rules import sizing_facts
from specdecode_operator.vllm.versions import release

ONLINE_PRECISIONS: Final = frozenset({Precision.FP8})
"""Precisions that a 16-bit checkpoint can be quantized to while loading."""

_WEIGHT_ONLY: Final = {
    "Hopper": frozenset({"INT4", "MXFP4", "NVFP4"}),
    "Ampere": frozenset({"FP8", "INT4", "MXFP4", "NVFP4"}),
    "Ada": frozenset({"INT4", "MXFP4", "NVFP4"}),
    "Blackwell": frozenset({"INT4"}),
    "Blackwell RTX": frozenset({"INT4"}),
}
"""Precisions whose weights are widened before the multiplication: memory is saved, arithmetic is not.

From vLLM 0.32, for Blackwell 0.33: 4-bit weights go through Marlin or Machete wherever the tensor cores know no 4-bit
type (kernels/linear/nvfp4/marlin.py, mxfp4/marlin.py, mixed_precision/machete.py); FP8 arithmetic needs compute
capability 8.9 (schemes/compressed_tensors_w8a8_fp8.py).
"""


@dataclass(frozen=True)
class Available:
    """Other checkpoints of the same models that the user has named, at most one for each precision."""

    target: tuple[ModelGeometry, ...] = ()
    draft: tuple[ModelGeometry, ...] = ()

    @property
    def target_precisions(self) -> frozenset[Precision]:
        """Precisions of the target's checkpoints."""
        return frozenset(served_precision(geometry, None) for geometry in self.target)

    @property
    def draft_precisions(self) -> frozenset[Precision]:
        """Precisions of the draft's checkpoints."""
        return frozenset(served_precision(geometry, None) for geometry in self.draft)


NOTHING_NAMED: Final = Available()


def checkpoint_at(geometry: ModelGeometry, named: Iterable[ModelGeometry], precision: Precision) -> ModelGeometry:
    """Return the checkpoint that is loaded to serve a model at a precision: a named one, or else the model's own."""
    if served_precision(geometry, None) == precision:
        return geometry
    return next((checkpoint for checkpoint in named if served_precision(checkpoint, None) == precision), geometry)


def served_precision(geometry: ModelGeometry, precision: Precision | None) -> Precision:
    """Return the precision that a model is served at; None selects the checkpoint's."""
    return precision or geometry.checkpoint_precision or Precision.BF16


def checkpoint_problem(
    role: str, geometry: ModelGeometry, precision: Precision, named: AbstractSet[Precision] = frozenset()
) -> str | None:
    """Return why a model with a role (target or draft) cannot be served at a precision; None if it can."""
    own = served_precision(geometry, None)
    if precision == own or precision in named:
        return None
    if own is not Precision.BF16:
        return (
            f"{role} {precision} needs a checkpoint: vLLM serves {geometry.name} in its own precision, {own}; "
            f"name a checkpoint in {precision}"
        )
    if geometry.dtype_bytes == FLOAT32_BYTES:
        return f"{role} {precision} is multiplied in 16 bits: use a serving.dtype other than float32"
    if precision in ONLINE_PRECISIONS:
        return None
    if precision is Precision.MXFP4 and not geometry.has_experts:
        return f"{role} {precision} only applies to experts, and {geometry.name} has none: use another precision"
    return (
        f"{role} {precision} needs a checkpoint: vLLM cannot quantize to {precision} while loading; "
        f"name a checkpoint of {geometry.name} in {precision}"
    )


_UNSTABLE_IN_FLOAT16: Final = ("Gemma2For", "Gemma3For", "Glm4ForC")
"""Prefixes of architectures that vLLM rejects with float16 (vllm/config/model.py, _FLOAT16_NOT_SUPPORTED_MODELS)."""


def dtype_problem(geometry: ModelGeometry, precision: Precision, dtype: str) -> str | None:
    """Return why a model cannot be served in an element type; None if it can.

    vLLM's kernels multiply quantized weights with 16 bits only (get_supported_act_dtypes; of compressed-tensors
    _custom_ops.py, cutlass_scaled_mm), MXFP4 with bfloat16 (mxfp4.py), and no backend of latent attention takes
    float32 (v1/attention/backends/mla).
    """
    if dtype == Dtype.FLOAT16:
        if geometry.architecture.startswith(_UNSTABLE_IN_FLOAT16):
            return f"{geometry.name} is not stable in it, and vLLM refuses it: use auto, bfloat16 or float32"
        if precision is Precision.MXFP4:
            return f"{geometry.name} is MXFP4, which vLLM multiplies only in bfloat16: use auto or bfloat16"
    if dtype == Dtype.FLOAT32:
        if precision is not Precision.BF16:
            return f"{geometry.name} is served in {precision}, which vLLM multiplies in 16 bits: use auto"
        if _is_latent(geometry):
            return f"{geometry.name} has latent attention, of which vLLM has no kernel in float32: use auto"
    return None


def _is_latent(geometry: ModelGeometry) -> bool:
    return any(isinstance(mixer, LatentAttention) for mixer in geometry.attentions)


_SCALES_A_CACHE: Final = frozenset({QuantizationMethod.FP8, QuantizationMethod.MODELOPT})
"""Checkpoint formats for which vLLM always makes scales of the cache (BaseKVCacheMethod)."""

_PLAIN_SPARSE_SINCE: Final = (0, 30)
"""First vLLM whose FLASHINFER_MLA_SPARSE_SM90 reads an fp8_e4m3 cache on Hopper; FlashMLA reads fp8 and bfloat16
(v1/attention/backends/mla/flashinfer_mla_sparse_sm90.py). It needs FlashInfer 0.6.18; vLLM 0.33 pins 0.7.2.

Sizing counts the cache as FlashMLA's, with 656 bytes per token and layer instead of 576."""

_PLAIN_SPARSE_KV_RANK: Final = 512
_PLAIN_SPARSE_ROPE_DIMS: Final = (0, 64)
"""Sizes of the latent vectors that it has kernels for (supports_combination)."""


def cache_dtype_problem(
    target: ModelGeometry, wanted: str, engine_version: str, products: Collection[str] = ()
) -> str | None:
    """Return why vllm/model_executor/layers/attention/attention.py or all latent attention backends reject a type.

    ``products`` are those that may be used; empty for any. On Hopper vllm/v1/attention/backends/mla/flashmla_sparse.py
    takes fp8 and bfloat16, but not fp8_e4m3, ModelOpt's; from 0.30 on flashinfer_mla_sparse_sm90.py takes it there. On
    Blackwell flashinfer_mla_sparse.py does.
    """
    checkpoint, own_fp8 = target.checkpoint, target.cache_element_bytes == FP8_ELEMENT_BYTES
    on_blackwell = bool(products) and all((generation_of(each) or "").startswith("Blackwell") for each in products)
    as_it_asks = own_fp8 and wanted in (KvCacheDtype.AUTO, KvCacheDtype.FP8_E4M3)
    on_hopper = release(engine_version) >= _PLAIN_SPARSE_SINCE and all(
        mixer.kv_rank == _PLAIN_SPARSE_KV_RANK and mixer.rope_head_dim in _PLAIN_SPARSE_ROPE_DIMS
        for mixer in target.attentions
        if isinstance(mixer, LatentAttention)
    )
    if target.has_sparse_attention and as_it_asks and not on_blackwell and not on_hopper:
        return (
            f"{target.name} requires fp8_e4m3, for which vLLM {engine_version} has no sparse attention on Hopper:"
            ' write fp8 or bfloat16, set engine.version: "0.30" or later, or name only Blackwell GPUs in'
            " accelerator.products"
        )
    if wanted != KvCacheDtype.FP8_E5M2:
        return None
    if _is_latent(target):
        return f"{target.name} has latent attention, of which vLLM has no kernel for it: write fp8"
    if checkpoint and (own_fp8 or checkpoint.method in _SCALES_A_CACHE):
        return f"vLLM refuses it with the checkpoint of {target.name}, whose format scales the cache: write fp8"
    return None


@lru_cache(maxsize=MEMO_SIZE)
def kernel_note(product: str, precision: Precision) -> str | None:
    """Return how a GPU product supports a precision if that is less than users expect, or None."""
    generation = generation_of(product)
    if generation is None or precision.value not in _WEIGHT_ONLY[generation]:
        return None
    return f"{precision} is weight-only on {generation}: it saves memory, the arithmetic stays 16-bit"


BACKEND_FIELD: Final = "engine.extraArgs"
"""Field of an attention backend (``--attention-backend``)."""

_WITHOUT_SINKS: Final = {
    "Ampere": frozenset({"FLASH_ATTN", "FLASHINFER"}),
    "Ada": frozenset({"FLASH_ATTN", "FLASHINFER"}),
}
_WITHOUT_FP8_CACHE: Final = {
    "Ampere": frozenset({"FLASH_ATTN", "TRITON_ATTN"}),
    "Ada": frozenset({"FLASH_ATTN"}),
    "Blackwell RTX": frozenset({"FLASH_ATTN"}),
}
"""Backends that lack these on a generation: FlashAttention 2 reads no FP8 cache, 3 is Hopper's and 4 Blackwell's
(v1/attention/backends/fa_utils.py, get_flash_attn_version)."""

_WITHOUT_SPARSE: Final = frozenset({"Ampere", "Ada"})
"""Generations without a kernel for sparse attention. Blackwell RTX has one in vLLM 0.33, for 2048 tokens a query
(mla/flashinfer_mla_sparse.py)."""

_FLASHINFER_HEAD_DIMS: Final = frozenset({64, 128, 256, 512})


def _has_sinks(geometry: ModelGeometry) -> bool:
    return any(isinstance(mixer, SelfAttention) and mixer.sinks for mixer in geometry.attentions)


def _kernel_problem(
    product: str, geometry: ModelGeometry, cache_element_bytes: int | None, backend: str | None = None
) -> PlanError | None:
    """Return why no attention kernel of vLLM serves a model on a GPU product; None if one does.

    ``backend`` is a backend requested by name; without it, vLLM takes any that fits.

    On Ampere, only FlashInfer reads an FP8 cache (v1/attention/backends/triton_attn.py and mla/triton_mla.py reject it
    below capability 8.9, flash_attn.py accepts it from Hopper on). It supports only heads of some widths, without
    sinks, latent attention or Gemma 3's bidirectional attention to images. Gemma 4 with heads of two widths uses Triton
    there (models/config.py). The kernels of sparse attention begin with Hopper (supports_compute_capability in mla/).
    Only Triton supports sinks there (flash_attn.py, supports_combination; flashinfer.py, supports_sink).
    """
    generation = generation_of(product) or ""
    if generation in _WITHOUT_SPARSE and geometry.has_sparse_attention:
        message = f"vLLM has no kernel on it for the sparse attention of {geometry.name}: use NVIDIA-H200"
        return PlanError(PRODUCT_FIELD, product, message)
    if _has_sinks(geometry) and backend in _WITHOUT_SINKS.get(generation, ()):
        message = f"this attention backend has no kernel on {product} for the sinks of {geometry.name}: leave it out"
        return PlanError(BACKEND_FIELD, backend, message)
    if backend in _WITHOUT_FP8_CACHE.get(generation, ()) and cache_element_bytes == FP8_ELEMENT_BYTES:
        message = f"this attention backend reads no FP8 cache on {product}: leave it out, or use kvCacheDtype: bfloat16"
        return PlanError(BACKEND_FIELD, backend, message)
    what = _needs_triton(geometry) if generation == "Ampere" else None
    if what is None or cache_element_bytes != FP8_ELEMENT_BYTES:
        return None
    message = f"on {product} vLLM has no kernel that reads an FP8 cache for {what} of {geometry.name}: use bfloat16"
    return PlanError("serving.kvCacheDtype", KvCacheDtype.FP8.value, message)


def _cut_experts_problem(product: str, geometry: ModelGeometry, gpus: int) -> str | None:
    """Return why a product has no kernel for experts whose blocks a split would cut; None if it has.

    Only Triton's kernel reads smaller blocks (fused_moe/oracle/fp8.py), without FP8 on Ampere.
    """
    checkpoint = geometry.checkpoint
    if generation_of(product) != "Ampere" or checkpoint is None or checkpoint.scales is not Scales.BLOCK:
        return None
    edge = checkpoint.group_size * gpus
    widths = {each.feed_forward.intermediate_size for each in geometry.layers if isinstance(each.feed_forward, Experts)}
    if not any(width % edge for width in widths):
        return None
    fix = "set parallelism.expert, or a smaller tensor"
    return f"on {product} vLLM has no kernel for FP8 experts of {geometry.name} cut within a block: {fix}"


def _needs_triton(geometry: ModelGeometry) -> str | None:
    """Return the part of a model that only Triton's attention serves."""
    if geometry.architecture.startswith("Gemma3ForConditionalGeneration"):
        return "the images"
    widths = [each.head_dim if isinstance(each, SelfAttention) else each.kv_rank for each in geometry.attentions]
    if geometry.architecture.startswith("Gemma4") and len(set(widths)) > 1:
        return "the heads of two widths"
    for mixer, width in zip(geometry.attentions, widths, strict=True):
        if isinstance(mixer, LatentAttention):
            return "the latent attention"
        if mixer.sinks:
            return "the attention sinks"
        if width not in _FLASHINFER_HEAD_DIMS:
            return f"the heads of width {width}"
    return None


ADAPTIVE_FIELD: Final = "speculation.adaptiveVerification"

_STATES: Final[Mapping[type, str]] = {SelectiveScan: "mamba1", StateSpace: "mamba2", DeltaNet: "gdn"}
"""vLLM's names of layers that keep states (vllm/v1/attention/backends)."""

_UNSURE_HEADS: Final = frozenset(XPRESS)
"""Heads of dflash without a confidence, which vLLM skips: it ranks by stale memory
(v1/worker/gpu/spec_decode/xpress/speculator.py, _jacobi_refine)."""


def pair_kernel_problem(product: str, pair: Pair, split: Parallelism) -> PlanError | None:
    """Return why vLLM has no kernel for a pair on a GPU product."""
    asked = pair.limits.kv_cache_element_bytes
    cache_bytes = asked or pair.target.cache_element_bytes
    for model in [pair.target, *([] if pair.draft is None else [pair.draft])]:
        # vLLM chooses another backend for the draft's attention (v1/spec_decode/llm_base_proposer.py).
        backend = pair.limits.attention_backend if model is pair.target else None
        if (problem := _kernel_problem(product, model, cache_bytes, backend)) is not None:
            if asked is not None or problem.field in {PRODUCT_FIELD, BACKEND_FIELD}:
                return problem
            why = f"the checkpoint requires an FP8 cache: {problem.message}"
            return PlanError(problem.field, KvCacheDtype.AUTO.value, why)
        if not split.expert and (message := _cut_experts_problem(product, model, split.tensor * split.data)):
            return PlanError(TENSOR_FIELD, split.tensor, message)
    return adaptive_problem(product, pair)


def adaptive_problem(product: str, pair: Pair) -> PlanError | None:
    """Return why vLLM would not start a pair with adaptive verification on a GPU product; None if it would.

    vllm/v1/worker/gpu/spec_decode/adaptive_verification.py raises after loading, and only for the target's layers.
    """
    if not pair.adaptive_verification:
        return None
    version, target, message = pair.limits.engine_version, pair.target, None
    rules = sizing_facts(version).get("adaptive_verification")
    mixers = set(map(type, target.mixers))
    if rules is None:
        message = f"needs vLLM 0.28 or later, and this is {version}: remove it"
    elif pair.draft is not None and pair.draft.architecture in _UNSURE_HEADS:
        message = f"vLLM {version} does not ask {pair.draft.name} how sure it is: remove it"
    elif {_STATES[kind] for kind in mixers & _STATES.keys()} - rules["states"].keys():
        message = f"vLLM {version} plans the states of {target.name} for whole drafts: remove it"
    elif target.attentions and (kernels := rules["attention"].get(generation_of(product))) is not None:
        return _adaptive_kernel_problem(product, pair, kernels)
    return None if message is None else PlanError(ADAPTIVE_FIELD, True, message)


def adaptive_doubt(product: str, pair: Pair) -> str | None:
    """Return a warning if it is not known whether a product has a kernel that takes parts of drafts."""
    rules = sizing_facts(pair.limits.engine_version).get("adaptive_verification")
    if not pair.adaptive_verification or rules is None or not pair.target.attentions:
        return None
    if generation_of(product) in rules["attention"]:
        return None
    return (
        f"which attention kernels take parts of drafts on {product} was not read: vLLM may refuse {ADAPTIVE_FIELD}"
        " when it starts"
    )


def _adaptive_kernel_problem(product: str, pair: Pair, kernels: Iterable[str]) -> PlanError | None:
    version, target, named = pair.limits.engine_version, pair.target, pair.limits.attention_backend
    # The name of every backend of latent attention contains MLA.
    fitting = sorted(name for name in kernels if ("MLA" in name) == _is_latent(target))
    if not fitting:
        message = f"vLLM {version} has no kernel on {product} that takes parts of drafts for {target.name}: remove it"
        return PlanError(ADAPTIVE_FIELD, True, message)
    if named is not None and named not in fitting:
        known = ", ".join(fitting)
        message = (
            f"with {ADAPTIVE_FIELD} vLLM {version} refuses this attention backend on {product}: use one of {known}"
        )
        return PlanError(BACKEND_FIELD, named, message)
    # vLLM prefers FLASH_ATTN but for sinks, which FlashAttention 2 lacks (vllm/platforms/cuda.py). TRITON_ATTN takes
    # parts of drafts on any GPU.
    if named is None and not _has_sinks(target) and "FLASH_ATTN" not in fitting:
        message = (
            f"on {product} vLLM {version} chooses FLASH_ATTN, which only verifies whole drafts: add"
            f" --attention-backend TRITON_ATTN to {BACKEND_FIELD}, or remove it"
        )
        return PlanError(ADAPTIVE_FIELD, True, message)
    return None
