"""Sizes one engine configuration that is given as JSON: `specdecode estimate`.

All that batches need of sizing passes through here.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any, Final

from specdecode_operator.estimate.engine_keys import graph_settings, served_target, unmodelled
from specdecode_operator.estimate.fields import CaseError, CaseFields
from specdecode_operator.estimate.gpu_names import find_named_gpu
from specdecode_operator.estimate.limits import refuse_unstartable
from specdecode_operator.estimate.models import target_geometry, wanted_precision
from specdecode_operator.estimate.names import CASE_SPELLINGS, REMARKS
from specdecode_operator.estimate.speculation import MOST_TOKENS, NO_SPECULATION, read_speculation
from specdecode_operator.sizing.base.devices import Device
from specdecode_operator.sizing.base.eras import NEWEST_VERSION, caches_prefixes, find_era
from specdecode_operator.sizing.base.errors import SizingError
from specdecode_operator.sizing.base.units import GIB, gib_to_bytes
from specdecode_operator.sizing.choice.quantization_matrix import pair_kernel_problem
from specdecode_operator.sizing.kv.capacity import blocks_for, pool_blocks, pool_capacity
from specdecode_operator.sizing.kv.layout import cache_layout
from specdecode_operator.sizing.memory.budget import Budget, Verdict, estimate
from specdecode_operator.sizing.memory.footprint import refuse_bad_split
from specdecode_operator.sizing.model.geometry import ModelGeometry
from specdecode_operator.sizing.pair.calibration import UNCALIBRATED, Calibration
from specdecode_operator.sizing.pair.pair import (
    NO_LENGTH,
    EngineLimits,
    Pair,
    Parallelism,
    longest_sequence,
    parallelism,
    says_no_length,
)
from specdecode_operator.vocabulary import (
    DTYPE_BYTES,
    ENGINE_DTYPES,
    FP8_ELEMENT_BYTES,
    KV_ELEMENT_BYTES,
    Dtype,
)

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
    percent = find_era(vllm_version).default_memory_utilization_percent
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
