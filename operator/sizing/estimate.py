"""Size one engine configuration given as JSON: `specdecode estimate`.

Keys are either ours or vLLM's. Settings that vLLM would reject raise CaseError; settings that vLLM might reject are
sized. `unmodelled` lists settings that are accepted and do not change the result. Batches call only this module.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
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
from specdecode_operator.sizing.kernel_support import cache_dtype_problem, dtype_problem, served_precision
from specdecode_operator.sizing.memory.budget import Budget, Verdict, estimate, refuse_bad_split
from specdecode_operator.sizing.memory.kv_cache import blocks_for, cache_layout, pool_blocks, pool_capacity
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
from specdecode_operator.sizing.plan import matching_drafts
from specdecode_operator.sizing.quantization_matrix import pair_kernel_problem
from specdecode_operator.sizing.result_cache import ContentMemo
from specdecode_operator.sizing.version_rules import (
    NEWEST_VERSION,
    Runner,
    caches_prefixes,
    find_version_rules,
    sizing_facts,
)
from specdecode_operator.vllm.versions import FLY_KEY, ended_method

_LARGEST_GRAPH: Final = 65_536
MOST_RANKS: Final = 1024

_MOST_ITEMS: Final = 65_536
_MOST_SETTING: Final = 2**31 - 1

_SIZES_KEY: Final = "cudagraph_capture_sizes"
_GRAPH_KEY: Final = "max_cudagraph_capture_size"
_COMPILATION_KEY: Final = "compilation_config"
_LIMIT_KEY: Final = "limit_mm_per_prompt"
_STATE_KEY: Final = "mamba_ssm_cache_dtype"
CONTEXT_KEY: Final = "decode_context_parallel_size"

_MODELLED_OF_COMPILATION: Final = frozenset({"cudagraph_mode", _GRAPH_KEY})

_PICTURES: Final = ("image", "video")


def served_target(fields: CaseFields, target: ModelGeometry) -> ModelGeometry:
    """Return the target as it is served: without its encoder if no item may be asked, states in the asked type.

    vLLM builds no encoder then (model_executor/models/interfaces.py, _mark_tower_model).

    Raises
    ------
    CaseError
        For a value that vLLM does not take.
    """
    if fields.flag("language_model_only") or _takes_no_items(fields):
        target = replace(target, tower=Tower())
    dtype = fields.text(_STATE_KEY)
    if dtype is None or dtype == Dtype.AUTO:
        return target
    if dtype not in ENGINE_DTYPES:
        raise fields.error(_STATE_KEY, f"is not known: use one of {', '.join(ENGINE_DTYPES)}")
    width = DTYPE_BYTES[ENGINE_DTYPES[dtype]]
    return replace(target, layers=tuple(_with_state_type(layer, width) for layer in target.layers))


def graph_settings(fields: CaseFields) -> dict[str, Any]:
    """Return which CUDA graphs are captured, by the fields of EngineLimits; what the case leaves out is left out.

    Raises
    ------
    CaseError
        For a value that vLLM does not take.
    """
    found: dict[str, Any] = {}
    largest = fields.whole(_GRAPH_KEY, _LARGEST_GRAPH)
    section = fields.section(_COMPILATION_KEY)
    if section is not None:
        inner = section.whole(_GRAPH_KEY, _LARGEST_GRAPH)
        if largest is not None and inner is not None and inner != largest:
            raise section.error(_GRAPH_KEY, f"contradicts {_GRAPH_KEY}, {largest}: remove one of the two")
        largest = largest or inner
        _refuse_sizes(section, largest)
        if mode := section.text("cudagraph_mode"):
            if mode.upper() not in tuple(CudagraphMode):
                raise section.error("cudagraph_mode", f"is not known: use one of {', '.join(CudagraphMode)}")
            found["graph_mode"] = mode.upper()
    if largest is not None:
        found["max_graph_tokens"] = largest
    return found


def _refuse_sizes(section: CaseFields, largest: int | None) -> None:
    """Refuse numbers that no engine takes, and sizes of graphs that contradict the largest (vLLM, config/vllm.py)."""
    for key, value in section.values.items():
        for each in value if isinstance(value, list) else (value,):
            if isinstance(each, int | float) and not -_MOST_SETTING <= each <= _MOST_SETTING:
                raise section.error(key, f"must lie between -{_MOST_SETTING:,} and {_MOST_SETTING:,}")
    sizes = section.values.get(_SIZES_KEY)
    if sizes is None:
        return
    if not isinstance(sizes, list) or not sizes or not all(type(each) is int and each > 0 for each in sizes):
        raise section.error(_SIZES_KEY, "must be a list of whole numbers from 1, with at least one")
    if max(sizes) > _LARGEST_GRAPH:
        raise section.error(_SIZES_KEY, f"must lie between 1 and {_LARGEST_GRAPH:,}")
    if largest is not None and largest not in sizes:
        raise section.error(_SIZES_KEY, f"contradicts {_GRAPH_KEY}, {largest}: remove one of the two")


def unmodelled(fields: CaseFields) -> list[str]:
    """Return a sentence for each key of a case that is accepted, and whose effect on memory is not modelled.

    Raises
    ------
    CaseError
        For a value that vLLM does not take.
    """
    return list(_unmodelled(fields))


def _unmodelled(fields: CaseFields) -> Iterator[str]:
    ranks = fields.whole(CONTEXT_KEY, MOST_RANKS) or 1
    if ranks > 1:
        yield (f"{CONTEXT_KEY}: {ranks} ranks share each sequence, so the cache holds up to {ranks} times the tokens")
    limits = fields.section(_LIMIT_KEY)
    if limits is not None and limits.values and not _takes_no_items(fields):
        yield f"{_LIMIT_KEY}: the encoder is sized for its largest items, whatever a request may have of them"
    section = fields.section(_COMPILATION_KEY)
    for key in () if section is None else section.values:
        if key not in _MODELLED_OF_COMPILATION and section is not None and section.values[key] is not None:
            yield f"{_COMPILATION_KEY}.{key}: graphs and compilation are sized as if it were left out"


def _takes_no_items(fields: CaseFields) -> bool:
    """Whether neither images nor videos may be asked; what is left out may (vLLM, config/multimodal.py)."""
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
    return all(counts.get(kind) == 0 for kind in _PICTURES) and not any(counts.values())


def _with_state_type(layer: Layer, width: int) -> Layer:
    match layer.mixer:
        case DeltaNet() | StateSpace() as mixer:
            return replace(layer, mixer=replace(mixer, state_element_bytes=width))
        case ParallelMixers() as both:
            inner = replace(both.state_space, state_element_bytes=width)
            return replace(layer, mixer=replace(both, state_space=inner))
        case _:
            return layer


def model_geometry(fields: CaseFields, method: str = Method.NONE) -> ModelGeometry:
    """Return the model that a case, or its speculative section, names or describes."""
    name, config = fields.text("model"), fields.section("model_config")
    if config is not None:
        try:
            if method in METHODS_TAKING_DRAFT:
                return head_from_config(name or "model_config", config.values, method)
            return geometry_from_config(name or "model_config", config.values)
        except SizingError as error:
            raise CaseError(f"{config.prefix}{error.field}", error.value, error.message) from error
    if name is None:
        raise fields.error("model", "is missing: name a model, or give model_config, the content of its config.json")
    geometry = find_geometry(name, method if method in METHODS_TAKING_DRAFT else None)
    if geometry is None:
        count = len(known_models())
        raise fields.error(
            "model",
            f"no facts about this model: give model_config (docs/reference/models.md lists the {count} known ones)",
        )
    return geometry


def target_geometry(fields: CaseFields) -> ModelGeometry:
    """Return the target as its config.json and what the engine is told of that make it."""
    overrides = fields.section("hf_overrides")
    if overrides is None or not overrides.values:
        return model_geometry(fields)
    config, name = fields.section("model_config"), fields.text("model")
    entry = find_entry(name) if name is not None and config is None else None
    known = config.values if config is not None else entry.config if entry is not None else None
    if known is None:
        return model_geometry(fields)
    try:
        return geometry_from_config(name or "model_config", overridden(known, overrides.values))
    except SizingError as error:
        raise CaseError(f"{overrides.prefix}{error.field}", error.value, error.message) from error


_OF_CHECKPOINTS: Final = (
    *("awq", "awq_marlin", "auto_awq", "gptq", "gptq_marlin", "auto_gptq", "compressed-tensors", "modelopt", "quark"),
    *("modelopt_fp4", "modelopt_mixed", "moe_wna16", "fbgemm_fp8", "gpt_oss_mxfp4"),
)
"""Schemes that a checkpoint has or has not, by vLLM's names: to name one asks for nothing."""


def wanted_precision(fields: CaseFields, geometry: ModelGeometry) -> Precision:
    """Precision that is asked for, or else that of the checkpoint."""
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


_KERNEL_BLOCK_TOKENS: Final = 16
"""Blocks of every attention backend on GPUs are multiples of it (v1/attention/backends, MultipleOf)."""

_MOST_VERIFIED_TOKENS: Final = 128
"""V1 verifies at most so many tokens a request (v1/sample/rejection_sampler.py, MAX_SPEC_LEN)."""

REJECTION_KEY: Final = "rejection_sample_method"

_LONGEST: Final = "max_position_embeddings"
_TOLD_LONGEST: Final = "model_max_length"


def refuse_unstartable(fields: CaseFields, speculative: CaseFields | None, pair: Pair, product: str) -> None:
    """Raise CaseError with the first setting of a case that vLLM raises an error for on a GPU product."""
    _refuse_class(fields, speculative, pair)
    _refuse_length(fields, pair)
    _refuse_dtype(fields, pair)
    _refuse_cache_dtype(fields, pair, product)
    _refuse_requests(fields, pair)
    _refuse_blocks(fields, pair.target)
    _refuse_context_ranks(fields, pair.target)
    if speculative is not None:
        _refuse_speculation(speculative, pair)


def _refuse_class(fields: CaseFields, speculative: CaseFields | None, pair: Pair) -> None:
    """model_executor/models/registry.py, _raise_for_unsupported."""
    for where, model in ((fields, pair.target), (speculative, pair.draft)):
        found = None if model is None else unregistered_model(model, pair.limits.engine_version)
        if found is not None and found.refused and where is not None:
            key = "model" if where.section("model_config") is None else "model_config"
            raise where.error(key, f"its class {found.architecture} {found.why}: {found.fix}")


def _refuse_length(fields: CaseFields, pair: Pair) -> None:
    """config/model.py, _get_and_verify_max_len."""
    wanted, longest = fields.values.get("max_model_len"), longest_sequence(pair.target, pair.limits.engine_version)
    if wanted is None or wanted <= longest:
        return
    config = fields.section("model_config")
    if config is not None:
        told = max(_values(config.values, _TOLD_LONGEST), default=0)
        if wanted <= told or not any(_values(config.values, _LONGEST)):
            return
    raise fields.error(
        "max_model_len",
        f"{pair.target.name} was made for at most {longest} tokens: use that or less, or stretch it by hf_overrides",
    )


def _refuse_dtype(fields: CaseFields, pair: Pair) -> None:
    dtype = ENGINE_DTYPES.get(fields.text("dtype") or Dtype.AUTO, Dtype.AUTO)
    for model, precision in ((pair.target, pair.target_precision), (pair.draft, pair.draft_precision)):
        if model is not None and (message := dtype_problem(model, served_precision(model, precision), dtype)):
            raise fields.error("dtype", message)


def _refuse_cache_dtype(fields: CaseFields, pair: Pair, product: str) -> None:
    products = (product,) if product else ()
    wanted = fields.text("kv_cache_dtype") or KvCacheDtype.AUTO
    if message := cache_dtype_problem(pair.target, wanted, pair.limits.engine_version, products):
        raise fields.error("kv_cache_dtype", message)


def _values(config: Mapping[str, Any], key: str) -> Iterator[int]:
    """Yield the numbers under a key, those of the text model's own config too."""
    for name, value in config.items():
        if name == key and isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            yield int(value)
        elif isinstance(value, Mapping):
            yield from _values(value, key)


def _refuse_requests(fields: CaseFields, pair: Pair) -> None:
    """config/scheduler.py, verify_max_model_len: vLLM lowers its own default, never what it was told."""
    sequences, tokens = pair.limits.max_num_seqs, pair.limits.max_num_batched_tokens
    told = fields.values.get("max_num_batched_tokens") is not None
    if told and tokens < sequences:
        raise fields.error(
            "max_num_batched_tokens", f"must not be below max_num_seqs, {sequences}: raise it, or lower max_num_seqs"
        )


def _refuse_blocks(fields: CaseFields, target: ModelGeometry) -> None:
    if target.attentions and (fields.values.get("block_size") or 0) % _KERNEL_BLOCK_TOKENS:
        raise fields.error("block_size", f"must be a multiple of {_KERNEL_BLOCK_TOKENS}, as attention on GPUs needs it")


def _refuse_context_ranks(fields: CaseFields, target: ModelGeometry) -> None:
    """config/parallel.py, _validate_parallel_config, and config/model.py, verify_with_parallel_config.

    Ranks of tensor parallelism share sequences: without MLA those that would hold the same KV heads.
    """
    tensor = fields.whole("tp", MOST_RANKS) or 1
    ranks = fields.whole(CONTEXT_KEY, MOST_RANKS) or 1
    if tensor % ranks:
        raise fields.error(CONTEXT_KEY, f"must divide tp, {tensor}: use such a number, or raise tp")
    heads = [mixer for mixer in target.attentions if isinstance(mixer, SelfAttention)]
    if ranks == 1 or not heads or len(heads) < len(target.attentions):
        return
    kv_heads = min(mixer.num_kv_heads for mixer in heads)
    if ranks > tensor // kv_heads:
        most = max(tensor // kv_heads, 1)
        raise fields.error(
            CONTEXT_KEY, f"must be at most tp / KV heads, {tensor} / {kv_heads}: use {most} or less, or raise tp"
        )
    if all((mixer.num_heads // mixer.num_kv_heads) % ranks for mixer in heads):
        shared = heads[0].num_heads // heads[0].num_kv_heads
        raise fields.error(CONTEXT_KEY, f"must divide the {shared} query heads of each KV head: use such a number")


def _refuse_speculation(speculative: CaseFields, pair: Pair) -> None:
    target, draft = pair.target, pair.draft
    if ended := ended_method(pair.method, version := pair.limits.engine_version):
        instead, last = ended
        raise speculative.error(
            "method", f"vLLM {version} has it no more: use {instead}, or vllm_version {last}, the last that has it"
        )
    if pair.era.runner is Runner.V1 and pair.num_speculative_tokens > _MOST_VERIFIED_TOKENS:
        raise speculative.error(
            "num_speculative_tokens", f"vLLM verifies at most {_MOST_VERIFIED_TOKENS} a request: use that or less"
        )
    if pair.checks_by_entropy:
        _refuse_entropy(speculative, pair)
    if draft is None or pair.method != Method.DRAFT_MODEL or pair.maps_vocabulary:
        return
    # config/speculative.py, verify_equal_vocab_size_if_draft_model.
    if reason := vocabulary_mismatch(target, draft):
        other = next(iter(matching_drafts(target, draft)), None)
        remedy = f"choose {other.name}" if other else f"choose a draft with {target.vocab_size}"
        raise speculative.error("model", f"{reason}: {remedy}")


def _refuse_entropy(speculative: CaseFields, pair: Pair) -> None:
    """config/speculative.py, RejectionSampleMethod and _verify_args."""
    version = pair.limits.engine_version
    if FLY_KEY not in sizing_facts(version).get("speculative_keys", {}):
        raise speculative.error(REJECTION_KEY, f"vLLM {version} does not have it: use 0.33 or later")
    if pair.num_speculative_tokens == 1:
        raise speculative.error("num_speculative_tokens", "fly looks at tokens after a rejected one: use 2 or more")


MOST_TOKENS: Final = 2**31 - 1
_RANGE_NUMBERS: Final = 3
_MTP: Final = "_mtp"

_MADE_UP: Final = "synthetic"
"""A check of drafted tokens that no spec may ask for; it takes what standard takes."""


class Speculation(NamedTuple):
    """What a case says of speculation."""

    fields: CaseFields | None  # As the case says it, by our names; None where it says nothing
    of_pair: Mapping[str, Any]  # What a pair has of it, by its fields


_READ: Final = ContentMemo[Mapping[str, Any]]()


def read_speculation(section: CaseFields) -> Speculation:
    """Return what a case says of speculation in its section.

    Raises
    ------
    CaseError
        Naming the first key that is wrong.
    """
    speculative = section.named(SPECULATIVE_SPELLINGS, SPECULATIVE_REMARKS)
    return Speculation(speculative, _READ.get(section.values, (section.prefix,), lambda: _of_pair(speculative)))


def _of_pair(speculative: CaseFields) -> Mapping[str, Any]:
    method = _method(speculative)
    draft = _draft(speculative, method) if _has_draft(speculative, method) else None
    tokens = 0 if method is Method.NONE else _num_speculative_tokens(speculative)
    return {
        "draft": draft,
        "draft_precision": None if draft is None else wanted_precision(speculative, draft),
        "method": method,
        "num_speculative_tokens": tokens,
        "samples_drafts": _samples_drafts(speculative),
        "draft_head_quantization": _draft_head_quantization(speculative, method),
        "refined_candidates": _refined_candidates(speculative, draft),
        "maps_vocabulary": speculative.flag("use_heterogeneous_vocab"),
        "adaptive_verification": speculative.flag("enable_adaptive_verification"),
        "checks_by_entropy": _checks_by_entropy(speculative),
        "other_draft_lengths": _other_draft_lengths(speculative, tokens),
    }


NO_SPECULATION: Final = Speculation(
    None, {"draft": None, "draft_precision": None, "method": Method.NONE, "num_speculative_tokens": 0}
)
"""What holds where a case says nothing of it."""


def _method(speculative: CaseFields) -> Method:
    method = speculative.text("method")
    if method is None:
        raise speculative.error("method", f"is missing: use one of {', '.join(Method)}")
    if method.endswith(_MTP):
        # One for each family in vLLM (config/speculative.py, MTPModelTypes).
        return Method.MTP
    if method not in tuple(Method):
        raise speculative.error("method", f"cannot be sized: use one of {', '.join(Method)}")
    return Method(method)


def _has_draft(speculative: CaseFields, method: Method) -> bool:
    """Whether it drafts with a checkpoint of its own: dspark and mtp may draft with the target's."""
    named = speculative.values.get("model") is not None or speculative.values.get("model_config") is not None
    return method in METHODS_NEEDING_DRAFT or (named and method in METHODS_TAKING_DRAFT)


def _draft(speculative: CaseFields, method: Method) -> ModelGeometry:
    """Return the draft; the engine drafts in one pass where it is told to, whatever the draft was trained for."""
    draft = model_geometry(speculative, method)
    in_parallel = speculative.flag("parallel_drafting") and method in METHODS_IN_PARALLEL
    return draft if draft.drafts_in_parallel == in_parallel else replace(draft, drafts_in_parallel=in_parallel)


def _num_speculative_tokens(speculative: CaseFields) -> int:
    tokens = speculative.whole("num_speculative_tokens", MOST_TOKENS)
    if tokens is None:
        raise speculative.error("num_speculative_tokens", "is missing: say how many tokens are proposed a step")
    return tokens


def _samples_drafts(speculative: CaseFields) -> bool:
    way = speculative.text("draft_sample_method")
    if way not in (None, *DraftSampling):
        raise speculative.error("draft_sample_method", f"is not known: use one of {', '.join(DraftSampling)}")
    return way == DraftSampling.PROBABILISTIC


def _checks_by_entropy(speculative: CaseFields) -> bool:
    way = speculative.text(REJECTION_KEY)
    if way not in (None, _MADE_UP, *RejectionSampling):
        raise speculative.error(REJECTION_KEY, f"is not known: use one of {', '.join(RejectionSampling)}")
    return way == RejectionSampling.FLY


def _draft_head_quantization(speculative: CaseFields, method: Method) -> str | None:
    key = "draft_lm_head_quantization"
    kind = speculative.text(key)
    if kind is not None and (kind not in tuple(DraftHeadQuantization) or method not in METHODS_WITH_TARGETS_HEAD):
        raise speculative.error(key, "use one of fp8, nvfp4, with method eagle or mtp")
    return kind


def _refined_candidates(speculative: CaseFields, draft: ModelGeometry | None) -> int | None:
    key = "xpress_topc"
    asked = speculative.values.get(key)
    if asked is None:
        return None
    if draft is None or draft.head is None or draft.head.refiner is None:
        raise speculative.error(key, "is of XPress heads alone: remove it")
    if type(asked) is not int or not 0 <= asked <= draft.vocab_size:
        raise speculative.error(key, f"must be a whole number from 0 to the vocabulary, {draft.vocab_size}")
    return asked


def _other_draft_lengths(speculative: CaseFields, tokens: int) -> frozenset[int]:
    """Return the tokens of other numbers of requests: [[first, last, tokens], …]."""
    key = "num_speculative_tokens_per_batch_size"
    ranges = speculative.values.get(key)
    if ranges is None:
        return frozenset()
    found = set()
    for each in ranges if isinstance(ranges, list) else [None]:
        if not isinstance(each, list) or len(each) != _RANGE_NUMBERS or not all(type(number) is int for number in each):
            raise speculative.error(key, "must be a list of [first, last, tokens]")
        if not 0 <= each[-1] <= tokens:
            raise speculative.error(key, f"must name 0 to {tokens} tokens, as many as num_speculative_tokens")
        found.add(each[-1])
    return frozenset(found - {tokens})


_MOST_GPUS: Final = 1024
_MOST_REQUESTS: Final = 65_536
_MOST_BLOCK_TOKENS: Final = 65_536
_MOST_GIB: Final = 65_536.0

_KV_ELEMENT_BYTES: Final[Mapping[str, int | None]] = {
    **KV_ELEMENT_BYTES,
    "float16": 2,
    "half": 2,
    "fp8_inc": FP8_ELEMENT_BYTES,
}


@dataclass(frozen=True)
class EngineDefaults:
    """What an engine does where nobody says."""

    utilization_percent: int  # Share of the GPU's memory that it may use
    # Tokens in one step, and requests at once
    max_num_batched_tokens: int
    max_num_seqs: int
    block_size: int  # Tokens in one KV cache block


def engine_defaults(vllm_version: str, device: Device | None) -> EngineDefaults:
    """Return the defaults of `vllm serve` by version and device (vllm/engine/arg_utils.py, get_batch_defaults).

    Devices of 70 GiB and more count as large, the A100 never; without a device they are those of a large one.
    """
    percent = find_version_rules(vllm_version).default_memory_utilization_percent
    large = device is None or (device.total_bytes >= 70 * GIB and "A100" not in device.product.upper())
    if not large:
        return EngineDefaults(percent, 2048, 256, 16)
    very_large = device is not None and device.total_bytes >= 160 * GIB
    return EngineDefaults(percent, 16_384 if very_large else 8192, 1024, 16)


@dataclass(frozen=True)
class Case:
    """One configuration, with every default filled in."""

    pair: Pair  # The models and the limits of the engine
    device: Device | None  # The GPU; None where the KV cache is given instead
    split: Parallelism  # Over how many GPUs it is spread, in each way
    available_kv_bytes: int | None  # KV cache of each GPU, where it is given and not to be estimated
    unmodelled: tuple[str, ...] = ()  # What its settings change and no term counts, a sentence for each key


def size_case(values: object, calibration: Calibration = UNCALIBRATED) -> dict[str, Any]:
    """Return the result line of a case, without its id; measurements correct its estimates.

    Raises
    ------
    CaseError
        When the case is malformed, or cannot be sized.
    """
    if not isinstance(values, dict):
        raise CaseError("case", values, "must be a JSON object")
    try:
        case = read_case(values, calibration)
        result = _kv_result(case) if case.available_kv_bytes is not None else _result(_budget(case))
        return {**result, "unmodelled": list(case.unmodelled)} if case.unmodelled else result
    except SizingError as error:
        raise CaseError(_KEY_OF.get(error.field, error.field), error.value, error.message) from error


_KEY_OF: Final = {
    "parallelism.tensor": "tp",
    "parallelism.pipeline": "pp",
    "parallelism.data": "dp",
    "accelerator.product": "gpu",
    "serving.kvCacheDtype": "kv_cache_dtype",
    "target.model": "model",
    "speculation.draft.model": "speculative.model",
    "speculation.method": "speculative.method",
    "speculation.numSpeculativeTokens": "speculative.num_speculative_tokens",
    "speculation.adaptiveVerification": "speculative.enable_adaptive_verification",
}
"""Keys of a case by the fields that sizing names."""


def read_case(values: Mapping[str, Any], calibration: Calibration = UNCALIBRATED) -> Case:
    """Return a case with its defaults filled in, whose estimates measurements correct.

    Raises
    ------
    CaseError
        Naming the first key that is wrong.
    """
    fields = CaseFields(values).named(CASE_SPELLINGS, REMARKS)
    _refuse_uncounted_gpus(values, fields)
    version = _version(fields)
    available_gib = fields.number("available_kv_gib", _MOST_GIB)
    device = _device(fields, required=available_gib is None)
    target = served_target(fields, target_geometry(fields))
    section = fields.section("speculative")
    speculation = NO_SPECULATION if section is None else read_speculation(section)
    pair = Pair(
        target=target,
        target_precision=wanted_precision(fields, target),
        limits=_limits(fields, target, version, engine_defaults(version, device)),
        calibration=calibration,
        **speculation.of_pair,
    )
    refuse_unstartable(fields, speculation.fields, pair, "" if device is None else device.product)
    return Case(
        pair=pair,
        device=device,
        split=parallelism(
            fields.whole("tp", _MOST_GPUS) or 1,
            fields.whole("pp", _MOST_GPUS) or 1,
            fields.whole("dp", _MOST_GPUS) or 1,
            fields.flag("enable_expert_parallel"),
        ),
        available_kv_bytes=None if available_gib is None else gib_to_bytes(available_gib),
        unmodelled=tuple(unmodelled(fields)),
    )


def _budget(case: Case) -> Budget:
    if case.device is None:
        raise CaseError("gpu", None, "is missing: name a GPU, or give gpu_total_gib or available_kv_gib")
    if (unread := pair_kernel_problem(case.device.product, case.pair, case.split)) is not None:
        raise unread
    return estimate(case.pair, case.device, case.split)


def _kv_result(case: Case) -> dict[str, Any]:
    """The KV arithmetic alone: what the given KV cache holds, on each stage as much."""
    refuse_bad_split(case.pair, case.split)
    limits, available = case.pair.limits, case.available_kv_bytes or 0
    layout = cache_layout(case.pair, case.split)
    blocks = pool_blocks(layout, [available] * len(layout))
    capacity = pool_capacity(layout[0], blocks, limits.max_model_len)
    enough = blocks >= blocks_for(layout[0], limits.max_model_len, limits.min_concurrency)
    return {
        "verdict": (Verdict.FITS if enough else Verdict.DOES_NOT_FIT).value,
        "per_gpu": {**dict.fromkeys(_TERMS), "available_kv": available},
        "margin_bytes": 0,
        "kv_cache_tokens": capacity.tokens,
        "max_concurrency": capacity.max_concurrency,
        "error": None,
    }


_TERMS: Final = {
    "total": "total_bytes",
    "requested": "requested_bytes",
    "target_weights": "target_weights_bytes",
    "draft_weights": "draft_weights_bytes",
    "state": "state_bytes",
    "activation": "activation_bytes",
    "cuda_graphs": "cuda_graphs_bytes",
    "non_torch": "non_torch_bytes",
    "available_kv": "available_kv_bytes",
}
"""Keys of per_gpu, each with the term of the budget that it holds."""


def _result(budget: Budget) -> dict[str, Any]:
    return {
        "verdict": budget.verdict.value,
        "per_gpu": {key: getattr(budget, term) for key, term in _TERMS.items()},
        "margin_bytes": budget.margin_bytes,
        "kv_cache_tokens": budget.kv_cache_tokens,
        "max_concurrency": budget.max_concurrency,
        **({"uncalibrated": True} if budget.uncalibrated_gpu else {}),
        **({"calibration": budget.calibration} if budget.calibration else {}),
        "error": None,
    }


def _version(fields: CaseFields) -> str:
    """Return major and minor."""
    text = fields.text("vllm_version")
    if text is None:
        return NEWEST_VERSION
    match = re.match(r"v?(\d{1,4}\.\d{1,4})(?![0-9])", text)
    if match is None:
        raise fields.error("vllm_version", "must be a version such as 0.32")
    return match[1]


def _device(fields: CaseFields, *, required: bool) -> Device | None:
    name, total_gib = fields.text("gpu"), fields.number("gpu_total_gib", _MOST_GIB)
    if total_gib is not None:
        return _measured_device(name, gib_to_bytes(total_gib))
    if name is not None:
        return find_named_gpu(name)
    if required:
        raise fields.error("gpu", "is missing: name a GPU, or give gpu_total_gib or available_kv_gib")
    return None


def _measured_device(name: str | None, total_bytes: int) -> Device:
    """Return the named GPU with the memory that a log prints; one without a known name is uncalibrated."""
    source = "gpu_total_gib of the case"
    try:
        known = find_named_gpu(name) if name else None
    except CaseError:
        known = None
    if known is None:
        # The name still decides the engine's defaults.
        return Device(name or "unnamed", total_bytes, source, calibrated=False)
    return replace(known, total_bytes=total_bytes, source=source)


def _limits(fields: CaseFields, target: ModelGeometry, version: str, defaults: EngineDefaults) -> EngineLimits:
    batched_tokens = fields.whole("max_num_batched_tokens", MOST_TOKENS) or defaults.max_num_batched_tokens
    if fields.values.get("max_model_len") is None and says_no_length(target):
        raise fields.error("max_model_len", NO_LENGTH)
    return EngineLimits(
        max_model_len=fields.whole("max_model_len", MOST_TOKENS) or longest_sequence(target, version),
        # vLLM lowers its own default, never what it was told.
        max_num_seqs=fields.whole("max_num_seqs", _MOST_REQUESTS) or min(defaults.max_num_seqs, batched_tokens),
        max_num_batched_tokens=batched_tokens,
        dtype_bytes=DTYPE_BYTES[_dtype(fields)],
        block_size=fields.whole("block_size", _MOST_BLOCK_TOKENS) or defaults.block_size,
        kv_cache_element_bytes=_kv_element_bytes(fields),
        memory_utilization_percent=_utilization_percent(fields, defaults),
        enforce_eager=fields.flag("enforce_eager"),
        compiles_anew=not fields.flag("warm_compile_cache"),
        min_concurrency=fields.whole("min_concurrency", _MOST_REQUESTS) or 1,
        engine_version=version,
        prefix_caching=fields.flag("enable_prefix_caching", default=caches_prefixes(version)),
        **graph_settings(fields),
    )


def _dtype(fields: CaseFields) -> Dtype:
    dtype = fields.text("dtype") or Dtype.AUTO
    if dtype not in ENGINE_DTYPES:
        raise fields.error("dtype", f"is not known: use one of {', '.join(ENGINE_DTYPES)}")
    return ENGINE_DTYPES[dtype]


def _kv_element_bytes(fields: CaseFields) -> int | None:
    dtype = fields.text("kv_cache_dtype") or "auto"
    if dtype not in _KV_ELEMENT_BYTES:
        raise fields.error("kv_cache_dtype", f"is not known: use one of {', '.join(_KV_ELEMENT_BYTES)}")
    return _KV_ELEMENT_BYTES[dtype]


def _utilization_percent(fields: CaseFields, defaults: EngineDefaults) -> float:
    given = fields.number("gpu_memory_utilization", 1.0)
    # 0.29 is 29 percent, and not 28.999999999999996 as floats have it.
    return defaults.utilization_percent if given is None else float(Decimal(str(given)) * 100)


def _refuse_uncounted_gpus(values: Mapping[str, Any], fields: CaseFields) -> None:
    """GPUs that are counted and not used would be sized as one."""
    gpus = values.get("gpu_count")
    spread = [fields.values.get(key) for key in ("tp", "pp", "dp")]
    if isinstance(gpus, int) and gpus > 1 and not any(spread):
        raise CaseError("gpu_count", gpus, "does not say how the engine uses them: add tp, pp or dp")
