"""Size one engine configuration given as JSON: `specdecode plan --batch`.

Keys are either ours or vLLM's. Settings that vLLM would reject raise CaseError; settings that vLLM might reject are
sized. `unmodelled` lists settings that are accepted and do not change the result. Batches call only this module.
"""

import math
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import lru_cache, partial
from operator import attrgetter
from typing import Any, Final, NamedTuple

from specdecode_operator.enums import (
    DTYPE_BYTES,
    ENGINE_DTYPES,
    FP8_ELEMENT_BYTES,
    KV_ELEMENT_BYTES,
    METHODS_IN_PARALLEL,
    METHODS_NEEDING_DRAFT,
    METHODS_TAKING_DRAFT,
    METHODS_WITH_TARGETS_HEAD,
    CudagraphMode,
    DraftHeadQuantization,
    DraftSampling,
    Dtype,
    KvCacheDtype,
    Method,
    Precision,
    RejectionSampling,
)
from specdecode_operator.sizing.arithmetic import GIB, gib_to_bytes
from specdecode_operator.sizing.calibration import UNCALIBRATED, Calibration
from specdecode_operator.sizing.catalogue import find_entry, find_geometry, known_models
from specdecode_operator.sizing.config_fields import overridden
from specdecode_operator.sizing.devices import Device
from specdecode_operator.sizing.errors import SizingError
from specdecode_operator.sizing.estimate_fields import (
    CASE_SPELLINGS,
    REMARKS,
    SPECULATIVE_REMARKS,
    SPECULATIVE_SPELLINGS,
    CaseError,
    CaseFields,
    find_named_gpu,
    our_name,
)
from specdecode_operator.sizing.families.architectures import geometry_from_config, head_from_config
from specdecode_operator.sizing.families.draft_heads import unregistered_model
from specdecode_operator.sizing.geometry import (
    DeltaNet,
    Layer,
    ModelGeometry,
    ParallelMixers,
    SelfAttention,
    StateSpace,
    Tower,
)
from specdecode_operator.sizing.kernel_support import (
    cache_dtype_problem,
    dtype_problem,
    pair_kernel_problem,
    served_precision,
)
from specdecode_operator.sizing.memory.budget import (
    Budget,
    Engine,
    Verdict,
    find_engine,
    reads_length,
    refuse_bad_split,
)
from specdecode_operator.sizing.memory.kv_cache import blocks_for, cache_layout, pool_blocks, pool_capacity
from specdecode_operator.sizing.other_drafts import matching_drafts
from specdecode_operator.sizing.pair import (
    NO_LENGTH,
    EngineLimits,
    Pair,
    Parallelism,
    longest_sequence,
    parallelism,
    says_no_length,
    vocabulary_mismatch,
)
from specdecode_operator.sizing.result_cache import MEMO_SIZE, ContentMemo, Memo
from specdecode_operator.sizing.version_rules import (
    NEWEST_VERSION,
    Runner,
    caches_prefixes,
    find_version_rules,
    sizing_facts,
)
from specdecode_operator.vllm.versions import FLY_KEY, ended_method

_MOST_GPUS: Final = 1024
_MOST_REQUESTS: Final = 65_536
_MOST_BLOCK_TOKENS: Final = 65_536
_MOST_GIB: Final = 65_536.0
_MOST_ITEMS: Final = 65_536
_MOST_SETTING: Final = 2**31 - 1
_MOST_TOKENS: Final = 2**31 - 1
_LARGEST_GRAPH: Final = 65_536

_GRAPH_KEY: Final = "max_cudagraph_capture_size"
_COMPILATION_KEY: Final = "compilation_config"
_LIMIT_KEY: Final = "limit_mm_per_prompt"
_CONTEXT_KEY: Final = "decode_context_parallel_size"
_REJECTION_KEY: Final = "rejection_sample_method"

_KERNEL_BLOCK_TOKENS: Final = 16
"""Block sizes of every attention backend on GPUs are multiples of it (v1/attention/backends, MultipleOf)."""

_MOST_VERIFIED_TOKENS: Final = 128
"""Maximum tokens that V1 verifies per request (v1/sample/rejection_sampler.py, MAX_SPEC_LEN)."""

_KV_ELEMENT_BYTES: Final[Mapping[str, int | None]] = {
    **KV_ELEMENT_BYTES,
    "float16": 2,
    "half": 2,
    "fp8_inc": FP8_ELEMENT_BYTES,
}

_OF_CHECKPOINTS: Final = (
    *("awq", "awq_marlin", "auto_awq", "gptq", "gptq_marlin", "auto_gptq", "compressed-tensors", "modelopt", "quark"),
    *("modelopt_fp4", "modelopt_mixed", "moe_wna16", "fbgemm_fp8", "gpt_oss_mxfp4"),
)
"""vLLM's names of schemes that the checkpoint determines: setting one has no effect."""

_KEY_OF: Final = {
    "parallelism.tensor": "tp",
    "parallelism.pipeline": "pp",
    "parallelism.data": "dp",
    "accelerator.products": "gpu",
    "serving.kvCacheDtype": "kv_cache_dtype",
    "target.model": "model",
    "speculation.draft.model": "speculative.model",
    "speculation.method": "speculative.method",
    "speculation.numSpeculativeTokens": "speculative.num_speculative_tokens",
    "speculation.adaptiveVerification": "speculative.enable_adaptive_verification",
}
"""Keys of a case by the fields that sizing names."""

_TERMS: Final = (
    *("total", "requested", "target_weights", "draft_weights", "state", "activation", "cuda_graphs", "non_torch"),
    "available_kv",
)
"""Keys of per_gpu; the attributes of the budget end with `_bytes`."""
_of_terms: Final = attrgetter(*(f"{term}_bytes" for term in _TERMS))


@dataclass(frozen=True)
class Case:
    """One configuration, with every default filled in."""

    pair: Pair
    device: Device | None  # None if the KV cache is given instead
    split: Parallelism
    available_kv_bytes: int | None  # KV cache of each GPU, if it is given and not estimated
    unmodelled: tuple[str, ...]  # A sentence for each key that has an effect that no term counts
    fields: CaseFields  # As given, by our names
    # Highest max_model_len and max_num_seqs that the other settings allow
    most_tokens: int
    most_sequences: int


SWEPT: Final = ("max_model_len", "max_num_seqs", "gpu_memory_utilization")
"""Keys of the numbers that differ between most cases of a batch."""


def size_case(values: object, calibration: Calibration = UNCALIBRATED) -> dict[str, Any]:
    """Return the result line of a case, without its id, or raise CaseError; measurements correct its estimates."""
    return Sizer(calibration).size(values)


class Sized(NamedTuple):
    """A case that was sized on a GPU."""

    budget: Budget
    unmodelled: tuple[str, ...]

    @property
    def line(self) -> dict[str, Any]:
        """The result line without the id."""
        budget = self.budget
        return {
            "verdict": budget.verdict.value,
            "per_gpu": dict(zip(_TERMS, _of_terms(budget), strict=True)),
            "margin_bytes": budget.margin_bytes,
            "kv_cache_tokens": budget.kv_cache_tokens,
            "max_concurrency": budget.max_concurrency,
            **({"uncalibrated": True} if budget.uncalibrated_gpu else {}),
            **({"calibration": budget.calibration} if budget.calibration else {}),
            "error": None,
            **({"unmodelled": list(self.unmodelled)} if self.unmodelled else {}),
        }


class Sizer:
    """Sizes the cases of a batch. What cases have in common that differ only in `SWEPT` keys is computed once."""

    def __init__(self, calibration: Calibration = UNCALIBRATED) -> None:
        self._calibration = calibration
        self._sweeps: Memo[_Sweep] = Memo()

    def size(self, values: object, others: Hashable = None) -> dict[str, Any]:
        """Return the result line of a case, without its id, or raise CaseError.

        ``others`` identifies the values of all keys but `SWEPT` for `size_swept`.
        """
        if not isinstance(values, dict):
            raise CaseError("case", values, "must be a JSON object")
        try:
            case = read_case(values, self._calibration)
            if case.available_kv_bytes is not None:
                return _kv_result(case, case.available_kv_bytes)
            sweep = _Sweep(case)
            result = sweep.size(case.fields.values).line
        except SizingError as error:
            raise CaseError(_KEY_OF.get(error.field, error.field), error.value, error.message) from error
        # A swept key in another spelling is one of the others.
        aliases = (key for key in values if key not in SWEPT and our_name(key, CASE_SPELLINGS) in SWEPT)
        if others is not None and not any(aliases):
            self._sweeps.get(others, lambda: sweep)
        return result

    def size_swept(self, others: Hashable, values: Mapping[str, Any]) -> Sized | None:
        """Size a case that differs from an earlier one only in these `SWEPT` values.

        Return None if there is no earlier case. Raise ValueError for invalid values; `size` has the message.
        """
        sweep = self._sweeps.find(others)
        return None if sweep is None else sweep.size(values)


class _Sweep:
    """Cases on a GPU that differ only in `SWEPT` keys. It keeps no values of the first one."""

    def __init__(self, case: Case) -> None:
        if case.device is None:
            raise CaseError("gpu", None, "is missing: name a GPU, or give gpu_total_gib or available_kv_gib")
        if (problem := pair_kernel_problem(case.device.product, case.pair, case.split)) is not None:
            raise problem
        self._pair, self._device, self._split, self._unmodelled = case.pair, case.device, case.split, case.unmodelled
        self._defaults = engine_defaults(case.pair.limits.engine_version, case.device)
        self._most_tokens, self._most_sequences = case.most_tokens, case.most_sequences
        self._reads_length = reads_length(case.pair)
        self._engines: Memo[Engine] = Memo()

    def size(self, values: Mapping[str, Any]) -> Sized:
        """Size the case with these values, or raise ValueError."""
        fields, limits = CaseFields(values), self._pair.limits
        length = _length(fields, self._pair.target, limits.engine_version)
        sequences = _sequences(fields, self._defaults, limits.max_num_batched_tokens)
        percent = _percent(fields, self._defaults)
        _reject_length(fields, self._pair, self._most_tokens)
        _reject_sequences(fields, sequences, self._most_sequences)

        # If no other term depends on the length, all lengths share one engine.
        key = sequences, length if self._reads_length else limits.max_model_len
        engine = self._engines.get(key, lambda: find_engine(self._pair.with_requests(*key), self._device, self._split))
        return Sized(engine.budget(length, percent), self._unmodelled)


def _kv_result(case: Case, available_bytes: int) -> dict[str, Any]:
    """Return only the KV arithmetic, with the given KV cache on each stage."""
    refuse_bad_split(case.pair, case.split)
    limits, layout = case.pair.limits, cache_layout(case.pair, case.split)
    blocks = pool_blocks(layout, [available_bytes] * len(layout))
    capacity = pool_capacity(layout[0], blocks, limits.max_model_len)
    enough = blocks >= blocks_for(layout[0], limits.max_model_len, limits.min_concurrency)
    return {
        "verdict": (Verdict.FITS if enough else Verdict.DOES_NOT_FIT).value,
        "per_gpu": {**dict.fromkeys(_TERMS), "available_kv": available_bytes},
        "margin_bytes": 0,
        "kv_cache_tokens": capacity.tokens,
        "max_concurrency": capacity.max_concurrency,
        "error": None,
        **({"unmodelled": list(case.unmodelled)} if case.unmodelled else {}),
    }


def read_case(values: Mapping[str, Any], calibration: Calibration = UNCALIBRATED) -> Case:
    """Return a case with its defaults filled in, or raise CaseError for the first key that is wrong."""
    fields = CaseFields(values).named(CASE_SPELLINGS, REMARKS)
    gpus = values.get("gpu_count")
    if isinstance(gpus, int) and gpus > 1 and not any(fields.values.get(key) for key in ("tp", "pp", "dp")):
        raise CaseError("gpu_count", gpus, "does not say how the engine uses them: add tp, pp or dp")
    version = NEWEST_VERSION
    if (text := fields.text("vllm_version")) is not None:
        if (match := re.match(r"v?(\d{1,4}\.\d{1,4})(?![0-9])", text)) is None:
            raise fields.error("vllm_version", "must be a version such as 0.32")
        version = match[1]
    available_gib = fields.number("available_kv_gib", _MOST_GIB)
    device = _device(fields)
    if device is None and available_gib is None:
        raise fields.error("gpu", "is missing: name a GPU, or give gpu_total_gib or available_kv_gib")
    target = _served_target(fields)
    speculative, speculation = None, _NO_SPECULATION
    if (section := fields.section("speculative")) is not None:
        speculative = section.named(SPECULATIVE_SPELLINGS, SPECULATIVE_REMARKS)
        speculation = _READ.get(section.values, (section.prefix,), partial(_speculation, speculative))
    pair = Pair(
        target=target,
        target_precision=_wanted_precision(fields, target),
        limits=_limits(fields, target, version, device),
        calibration=calibration,
        **speculation,
    )
    most_tokens, most_sequences = _most_tokens(fields, pair), _most_sequences(fields, pair)
    _reject_models(fields, speculative, pair)
    _reject_length(fields, pair, most_tokens)
    _reject_types(fields, pair, "" if device is None else device.product)
    _reject_sequences(fields, pair.limits.max_num_seqs, most_sequences)
    _reject_settings(fields, pair)
    if speculative is not None:
        _reject_speculation(speculative, pair)
    return Case(
        pair=pair,
        device=device,
        split=parallelism(
            *(fields.whole(key, _MOST_GPUS) or 1 for key in ("tp", "pp", "dp")), fields.flag("enable_expert_parallel")
        ),
        available_kv_bytes=None if available_gib is None else gib_to_bytes(available_gib),
        unmodelled=tuple(_unmodelled(fields)),
        fields=fields,
        most_tokens=most_tokens,
        most_sequences=most_sequences,
    )


def _choice(fields: CaseFields, key: str, known: Iterable[str], *more: str) -> str | None:
    """Return a value that is ``known``, or one of ``more`` that the message does not offer."""
    text = fields.text(key)
    if text is not None and text not in (*known, *more):
        raise fields.error(key, f"is not known: use one of {', '.join(known)}")
    return text


def _device(fields: CaseFields) -> Device | None:
    name, total_gib = fields.text("gpu"), fields.number("gpu_total_gib", _MOST_GIB)
    if total_gib is None:
        return None if name is None else find_named_gpu(name)
    total_bytes, source = gib_to_bytes(total_gib), "gpu_total_gib of the case"
    try:
        known = find_named_gpu(name) if name else None
    except CaseError:
        known = None
    if known is None:
        # The name still decides the engine's defaults.
        return Device(name or "unnamed", total_bytes, source, calibrated=False)
    return replace(known, total_bytes=total_bytes, source=source)


@dataclass(frozen=True)
class EngineDefaults:
    """Engine defaults."""

    utilization_percent: int  # Of the GPU's memory
    max_num_batched_tokens: int
    max_num_seqs: int
    block_size: int = 16  # Tokens in one KV cache block


def engine_defaults(vllm_version: str, device: Device | None) -> EngineDefaults:
    """Return the defaults of `vllm serve` by version and device (vllm/engine/arg_utils.py, get_batch_defaults).

    Devices of 70 GiB and more count as large, the A100 never does. Without a device, assume a large one.
    """
    percent = find_version_rules(vllm_version).default_memory_utilization_percent
    if device is not None and (device.total_bytes < 70 * GIB or "A100" in device.product.upper()):
        return EngineDefaults(percent, 2048, 256)
    very_large = device is not None and device.total_bytes >= 160 * GIB
    return EngineDefaults(percent, 16_384 if very_large else 8192, 1024)


def _limits(fields: CaseFields, target: ModelGeometry, version: str, device: Device | None) -> EngineLimits:
    defaults = engine_defaults(version, device)
    batched_tokens = fields.whole("max_num_batched_tokens", _MOST_TOKENS) or defaults.max_num_batched_tokens
    return EngineLimits(
        max_model_len=_length(fields, target, version),
        max_num_seqs=_sequences(fields, defaults, batched_tokens),
        max_num_batched_tokens=batched_tokens,
        dtype_bytes=DTYPE_BYTES[ENGINE_DTYPES[_choice(fields, "dtype", ENGINE_DTYPES) or Dtype.AUTO]],
        block_size=fields.whole("block_size", _MOST_BLOCK_TOKENS) or defaults.block_size,
        kv_cache_element_bytes=_KV_ELEMENT_BYTES[
            _choice(fields, "kv_cache_dtype", _KV_ELEMENT_BYTES) or KvCacheDtype.AUTO
        ],
        memory_utilization_percent=_percent(fields, defaults),
        enforce_eager=fields.flag("enforce_eager"),
        compiles_anew=not fields.flag("warm_compile_cache"),
        min_concurrency=fields.whole("min_concurrency", _MOST_REQUESTS) or 1,
        engine_version=version,
        prefix_caching=fields.flag("enable_prefix_caching", default=caches_prefixes(version)),
        **_graph_settings(fields),
    )


def _length(fields: CaseFields, target: ModelGeometry, version: str) -> int:
    if fields.values.get("max_model_len") is None and says_no_length(target):
        raise fields.error("max_model_len", NO_LENGTH)
    return fields.whole("max_model_len", _MOST_TOKENS) or longest_sequence(target, version)


def _sequences(fields: CaseFields, defaults: EngineDefaults, batched_tokens: int) -> int:
    # vLLM lowers its own default, never a value that was set.
    return fields.whole("max_num_seqs", _MOST_REQUESTS) or min(defaults.max_num_seqs, batched_tokens)


def _percent(fields: CaseFields, defaults: EngineDefaults) -> float:
    given = fields.number("gpu_memory_utilization", 1.0)
    return defaults.utilization_percent if given is None else _percent_of(given)


@lru_cache(maxsize=MEMO_SIZE)
def _percent_of(share: float) -> float:
    # 0.29 is 29 percent; the float product would be 28.999999999999996.
    return float(Decimal(str(share)) * 100)


def _graph_settings(fields: CaseFields) -> dict[str, Any]:
    """Return the settings of CUDA graphs, by the fields of EngineLimits."""
    found: dict[str, Any] = {}
    largest = fields.whole(_GRAPH_KEY, _LARGEST_GRAPH)
    section = fields.section(_COMPILATION_KEY)
    if section is not None:
        inner = section.whole(_GRAPH_KEY, _LARGEST_GRAPH)
        if largest is not None and inner is not None and inner != largest:
            raise section.error(_GRAPH_KEY, f"contradicts {_GRAPH_KEY}, {largest}: remove one of the two")
        largest = largest or inner
        _reject_sizes(section, largest)
        if mode := section.text("cudagraph_mode"):
            if mode.upper() not in tuple(CudagraphMode):
                raise section.error("cudagraph_mode", f"is not known: use one of {', '.join(CudagraphMode)}")
            found["graph_mode"] = mode.upper()
    return found if largest is None else {**found, "max_graph_tokens": largest}


def _reject_sizes(section: CaseFields, largest: int | None) -> None:
    """Reject numbers that no engine takes, and graph sizes that contradict the largest (vLLM, config/vllm.py)."""
    for key, value in section.values.items():
        for each in value if isinstance(value, list) else (value,):
            if isinstance(each, int | float) and not -_MOST_SETTING <= each <= _MOST_SETTING:
                raise section.error(key, f"must lie between -{_MOST_SETTING:,} and {_MOST_SETTING:,}")
    key = "cudagraph_capture_sizes"
    sizes = section.values.get(key)
    if sizes is None:
        return
    if not isinstance(sizes, list) or not sizes or not all(type(each) is int and each > 0 for each in sizes):
        raise section.error(key, "must be a list of whole numbers from 1, with at least one")
    if max(sizes) > _LARGEST_GRAPH:
        raise section.error(key, f"must lie between 1 and {_LARGEST_GRAPH:,}")
    if largest is not None and largest not in sizes:
        raise section.error(key, f"contradicts {_GRAPH_KEY}, {largest}: remove one of the two")


def _unmodelled(fields: CaseFields) -> Iterator[str]:
    """Yield a sentence for each accepted key that has an effect on memory that is not modelled."""
    ranks = fields.whole(_CONTEXT_KEY, _MOST_GPUS) or 1
    if ranks > 1:
        yield f"{_CONTEXT_KEY}: {ranks} ranks share each sequence, so the cache holds up to {ranks} times the tokens"
    limits = fields.section(_LIMIT_KEY)
    if limits is not None and limits.values and not _takes_no_items(fields):
        yield f"{_LIMIT_KEY}: the encoder is sized for its largest items, regardless of the limit"
    section = fields.section(_COMPILATION_KEY)
    for key, value in () if section is None else section.values.items():
        if key not in ("cudagraph_mode", _GRAPH_KEY) and value is not None:
            yield f"{_COMPILATION_KEY}.{key}: graphs and compilation are sized as if it were left out"


def _takes_no_items(fields: CaseFields) -> bool:
    """Return whether images and videos are both limited to 0; without a limit they are not (config/multimodal.py)."""
    section = fields.section(_LIMIT_KEY)
    if section is None:
        return False
    counts = {}
    for key, value in section.values.items():
        count = value.get("count") if isinstance(value, dict) else value
        if type(count) is not int or not 0 <= count <= _MOST_ITEMS:
            raise section.error(
                key, f"must be a whole number from 0 to {_MOST_ITEMS:,}, or an object with such a count"
            )
        counts[key] = count
    return {"image", "video"} <= counts.keys() and not any(counts.values())


def _served_target(fields: CaseFields) -> ModelGeometry:
    """Return the target as the engine serves it.

    vLLM builds no encoder if it takes no items (model_executor/models/interfaces.py, _mark_tower_model).
    """
    target = _model_geometry(fields)
    if fields.flag("language_model_only") or _takes_no_items(fields):
        target = replace(target, tower=Tower())
    dtype = _choice(fields, "mamba_ssm_cache_dtype", ENGINE_DTYPES)
    if dtype is None or dtype == Dtype.AUTO:
        return target
    width = DTYPE_BYTES[ENGINE_DTYPES[dtype]]

    def with_state_type(layer: Layer) -> Layer:
        match layer.mixer:
            case DeltaNet() | StateSpace() as mixer:
                return replace(layer, mixer=replace(mixer, state_element_bytes=width))
            case ParallelMixers() as both:
                inner = replace(both.state_space, state_element_bytes=width)
                return replace(layer, mixer=replace(both, state_space=inner))
            case _:
                return layer

    return replace(target, layers=tuple(map(with_state_type, target.layers)))


def _model_geometry(fields: CaseFields, method: Method = Method.NONE) -> ModelGeometry:
    """Return the model that a case, or its speculative section, names or describes, with the case's hf_overrides."""
    overrides, name, config = fields.section("hf_overrides"), fields.text("model"), fields.section("model_config")
    where, known = config, None if config is None else config.values
    if overrides is not None and overrides.values:
        if config is None and (entry := find_entry(name or "")) is not None:
            known = entry.config
        where, known = overrides, None if known is None else overridden(known, overrides.values)
    if where is not None and known is not None:
        try:
            if method in METHODS_TAKING_DRAFT:
                return head_from_config(name or "model_config", known, method)
            return geometry_from_config(name or "model_config", known)
        except SizingError as error:
            raise CaseError(f"{where.prefix}{error.field}", error.value, error.message) from error
    if name is None:
        raise fields.error("model", "is missing: name a model, or give model_config, the content of its config.json")
    geometry = find_geometry(name, method if method in METHODS_TAKING_DRAFT else None)
    if geometry is None:
        raise fields.error(
            "model",
            f"is not one of the {len(known_models())} models of specdecode models list: set model_config",
        )
    return geometry


def _wanted_precision(fields: CaseFields, geometry: ModelGeometry) -> Precision:
    """Return the requested precision, or the checkpoint's."""
    text, held = fields.text("quantization"), geometry.checkpoint_precision
    if text is None:
        return held or Precision.BF16
    if text in _OF_CHECKPOINTS:
        if held is None:
            message = f"{geometry.name} is not quantized: name the checkpoint that is, or give its model_config"
            raise fields.error("quantization", message)
        return held
    try:
        precision = Precision(text.upper())
    except ValueError:
        known = ", ".join(precision.value.lower() for precision in Precision)
        raise fields.error("quantization", f"is not known: use one of {known}, or null for the checkpoint's") from None
    if held is not None and precision is not held:
        raise fields.error("quantization", f"the config says {held.value.lower()}: use that or null")
    return precision


def _reject_models(fields: CaseFields, speculative: CaseFields | None, pair: Pair) -> None:
    target, version = pair.target, pair.limits.engine_version
    # model_executor/models/registry.py, _raise_for_unsupported.
    for where, model in ((fields, target), (speculative, pair.draft)):
        found = None if model is None else unregistered_model(model, version)
        if found is not None and found.refused and where is not None:
            key = "model" if where.section("model_config") is None else "model_config"
            raise where.error(key, f"its class {found.architecture} {found.why}: {found.fix}")


def _reject_types(fields: CaseFields, pair: Pair, product: str) -> None:
    dtype = ENGINE_DTYPES[fields.text("dtype") or Dtype.AUTO]
    for model, precision in pair.served:
        if message := dtype_problem(model, served_precision(model, precision), dtype):
            raise fields.error("dtype", message)
    cache_dtype = fields.text("kv_cache_dtype") or KvCacheDtype.AUTO
    products = (product,) if product else ()
    if message := cache_dtype_problem(pair.target, cache_dtype, pair.limits.engine_version, products):
        raise fields.error("kv_cache_dtype", message)


def _most_tokens(fields: CaseFields, pair: Pair) -> int:
    """Return the longest request that the engine takes (config/model.py, _get_and_verify_max_len)."""
    longest, config = longest_sequence(pair.target, pair.limits.engine_version), fields.section("model_config")
    if config is None:
        return longest
    if not any(_values(config.values, "max_position_embeddings")):
        return _MOST_TOKENS
    return max([longest, *_values(config.values, "model_max_length")])


def _reject_length(fields: CaseFields, pair: Pair, most_tokens: int) -> None:
    wanted, name, version = fields.values.get("max_model_len"), pair.target.name, pair.limits.engine_version
    if wanted is not None and wanted > most_tokens:
        longest = longest_sequence(pair.target, version)
        raise fields.error(
            "max_model_len",
            f"{name} was made for at most {longest} tokens: use that or less, or stretch it by hf_overrides",
        )


def _values(config: Mapping[str, Any], key: str) -> Iterator[int]:
    """Yield the numbers under a key, including nested configs."""
    for name, value in config.items():
        if name == key and isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            yield int(value)
        elif isinstance(value, Mapping):
            yield from _values(value, key)


def _reject_settings(fields: CaseFields, pair: Pair) -> None:
    target = pair.target
    if target.attentions and (fields.values.get("block_size") or 0) % _KERNEL_BLOCK_TOKENS:
        raise fields.error("block_size", f"must be a multiple of {_KERNEL_BLOCK_TOKENS}, as attention on GPUs needs it")
    # config/parallel.py, _validate_parallel_config, and config/model.py, verify_with_parallel_config: ranks of tensor
    # parallelism share sequences, without MLA those that would hold the same KV heads.
    tensor = fields.whole("tp", _MOST_GPUS) or 1
    ranks = fields.whole(_CONTEXT_KEY, _MOST_GPUS) or 1
    if tensor % ranks:
        raise fields.error(_CONTEXT_KEY, f"must divide tp, {tensor}: use such a number, or raise tp")
    heads = [mixer for mixer in target.attentions if isinstance(mixer, SelfAttention)]
    if ranks == 1 or not heads or len(heads) < len(target.attentions):
        return
    kv_heads = min(mixer.num_kv_heads for mixer in heads)
    if ranks > tensor // kv_heads:
        most = max(tensor // kv_heads, 1)
        raise fields.error(
            _CONTEXT_KEY, f"must be at most tp / KV heads, {tensor} / {kv_heads}: use {most} or less, or raise tp"
        )
    if all((mixer.num_heads // mixer.num_kv_heads) % ranks for mixer in heads):
        shared = heads[0].num_heads // heads[0].num_kv_heads
        raise fields.error(_CONTEXT_KEY, f"must divide the {shared} query heads of each KV head: use such a number")


def _most_sequences(fields: CaseFields, pair: Pair) -> int:
    # config/scheduler.py, verify_max_model_len: vLLM lowers its own default, never a value that was set.
    given = fields.values.get("max_num_batched_tokens") is not None
    return pair.limits.max_num_batched_tokens if given else _MOST_REQUESTS


def _reject_sequences(fields: CaseFields, sequences: int, most: int) -> None:
    if sequences > most:
        raise fields.error(
            "max_num_batched_tokens", f"must not be below max_num_seqs, {sequences}: raise it, or lower max_num_seqs"
        )


def _reject_speculation(speculative: CaseFields, pair: Pair) -> None:
    draft, version, tokens = pair.draft, pair.limits.engine_version, pair.num_speculative_tokens
    if ended := ended_method(pair.method, version):
        instead, last = ended
        raise speculative.error(
            "method", f"vLLM {version} no longer supports it: use {instead}, or vllm_version {last}, the last that does"
        )
    if pair.era.runner is Runner.V1 and tokens > _MOST_VERIFIED_TOKENS:
        raise speculative.error(
            "num_speculative_tokens", f"vLLM verifies at most {_MOST_VERIFIED_TOKENS} a request: use that or less"
        )
    # config/speculative.py, RejectionSampleMethod and _verify_args.
    if pair.checks_by_entropy and FLY_KEY not in sizing_facts(version).get("speculative_keys", {}):
        raise speculative.error(_REJECTION_KEY, f"vLLM {version} does not have it: use 0.33 or later")
    if pair.checks_by_entropy and tokens == 1:
        raise speculative.error("num_speculative_tokens", "fly compares tokens after a rejected one: use 2 or more")
    if draft is None or pair.method != Method.DRAFT_MODEL or pair.maps_vocabulary:
        return
    # config/speculative.py, verify_equal_vocab_size_if_draft_model.
    if reason := vocabulary_mismatch(pair.target, draft):
        other = next(iter(matching_drafts(pair.target, draft)), None)
        remedy = f"choose {other.name}" if other else f"choose a draft with {pair.target.vocab_size}"
        raise speculative.error("model", f"{reason}: {remedy}")


_READ: Final = ContentMemo[Mapping[str, Any]]()

_NO_SPECULATION: Final[Mapping[str, Any]] = {
    "draft": None,
    "draft_precision": None,
    "method": Method.NONE,
    "num_speculative_tokens": 0,
}


def _speculation(speculative: CaseFields) -> Mapping[str, Any]:
    """Return the fields of a Pair that a speculative section sets."""
    name, draft = speculative.text("method"), None
    if name is None:
        raise speculative.error("method", f"is missing: use one of {', '.join(Method)}")
    # vLLM has one MTP method for each family (config/speculative.py, MTPModelTypes).
    name = Method.MTP if name.endswith("_mtp") else name
    if name not in tuple(Method):
        raise speculative.error("method", f"cannot be sized: use one of {', '.join(Method)}")
    method = Method(name)
    named = any(speculative.values.get(key) is not None for key in ("model", "model_config"))
    # dspark and mtp may draft with the target's checkpoint.
    if method in METHODS_NEEDING_DRAFT or (named and method in METHODS_TAKING_DRAFT):
        draft = _model_geometry(speculative, method)
        # parallel_drafting overrides the draft's own setting.
        in_parallel = speculative.flag("parallel_drafting") and method in METHODS_IN_PARALLEL
        if draft.drafts_in_parallel != in_parallel:
            draft = replace(draft, drafts_in_parallel=in_parallel)
    tokens = 0 if method is Method.NONE else speculative.whole("num_speculative_tokens", _MOST_TOKENS)
    if tokens is None:
        raise speculative.error("num_speculative_tokens", "is missing: set the number of tokens proposed per step")
    precision = None if draft is None else _wanted_precision(speculative, draft)
    sampling = _choice(speculative, "draft_sample_method", DraftSampling)
    kind = speculative.text("draft_lm_head_quantization")
    if kind is not None and (kind not in tuple(DraftHeadQuantization) or method not in METHODS_WITH_TARGETS_HEAD):
        raise speculative.error("draft_lm_head_quantization", "use one of fp8, nvfp4, with method eagle or mtp")
    return {
        "draft": draft,
        "draft_precision": precision,
        "method": method,
        "num_speculative_tokens": tokens,
        "samples_drafts": sampling == DraftSampling.PROBABILISTIC,
        "draft_head_quantization": kind,
        "refined_candidates": _refined_candidates(speculative, draft),
        "maps_vocabulary": speculative.flag("use_heterogeneous_vocab"),
        "adaptive_verification": speculative.flag("enable_adaptive_verification"),
        # No spec may ask for synthetic; it takes the memory of standard.
        "checks_by_entropy": _choice(speculative, _REJECTION_KEY, RejectionSampling, "synthetic")
        == RejectionSampling.FLY,
        "other_draft_lengths": _other_draft_lengths(speculative, tokens),
    }


def _refined_candidates(speculative: CaseFields, draft: ModelGeometry | None) -> int | None:
    key = "xpress_topc"
    asked = speculative.values.get(key)
    if asked is None:
        return None
    if draft is None or draft.head is None or draft.head.refiner is None:
        raise speculative.error(key, "only applies to XPress heads: remove it")
    if type(asked) is not int or not 0 <= asked <= draft.vocab_size:
        raise speculative.error(key, f"must be a whole number from 0 to the vocabulary, {draft.vocab_size}")
    return asked


def _other_draft_lengths(speculative: CaseFields, tokens: int) -> frozenset[int]:
    """Return the tokens of other batch sizes, from rows of [first, last, tokens]."""
    key = "num_speculative_tokens_per_batch_size"
    ranges = speculative.values.get(key)
    if ranges is None:
        return frozenset()
    found = set()
    for each in ranges if isinstance(ranges, list) else [None]:
        match each:
            case [int(first), int(last), int(length)] if not any(type(part) is bool for part in (first, last, length)):
                if not 0 <= length <= tokens:
                    raise speculative.error(key, f"must name 0 to {tokens} tokens, as many as num_speculative_tokens")
                found.add(length)
            case _:
                raise speculative.error(key, "must be a list of [first, last, tokens]")
    return frozenset(found - {tokens})
