"""Compares what a started engine logged of its memory with what is predicted for it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Final

from pydantic import ValidationError

from specdecode_operator.api.base import Body
from specdecode_operator.api.deployment import SpecDecodeDeploymentSpec
from specdecode_operator.api.values import Quantization
from specdecode_operator.deployment.plan.planning import make_plan
from specdecode_operator.deployment.spec.validation import valid_facts
from specdecode_operator.engine.startup_log import LoggedMemory, LoggedSettings, StartupLog
from specdecode_operator.kube.nodes import NodeFacts
from specdecode_operator.problems import shown
from specdecode_operator.sizing.base.units import format_gib
from specdecode_operator.sizing.choice.plan import Plan
from specdecode_operator.sizing.memory.budget import Budget, engine_kind
from specdecode_operator.sizing.pair.calibration import CalibrationEntry, CalibrationError, EngineKind
from specdecode_operator.vocabulary import Dtype, KvCacheDtype, Method

_ONLINE_FP8: Final = ("fp8", "fp8_per_tensor", "fp8_per_channel", "online")
"""Values of --quantization that make FP8 while loading (vLLM, quantization/online)."""


class UnusableLogError(ValueError):
    """A log that cannot be compared: something is missing, or it is of an engine that is not sized."""


@dataclass(frozen=True)
class Given:
    """What the user adds to a log, because no log says it, or this one does not; it wins over the log."""

    product: str
    """GPU product as its node label says; no log names it."""

    engine_version: str | None = None
    tensor: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None

    configs: Mapping[str, Body] = field(default_factory=dict)
    """Content of config.json by model, as the log names the models."""


@dataclass(frozen=True)
class Term:
    """One term, predicted and as the engine reports it, in bytes of one GPU; None where its log does not say."""

    name: str
    predicted_bytes: int
    reported_bytes: int | None


@dataclass(frozen=True)
class Measurement:
    """What one engine shows: predicted against reported, and its line of the calibration file."""

    entry: CalibrationEntry
    terms: tuple[Term, ...]
    predicted_tokens: int
    reported_tokens: int | None


def measure(log: StartupLog, given: Given) -> Measurement:
    """Return what a log shows against the prediction for the same engine.

    Raises
    ------
    UnusableLogError
        With what is missing and how to give it, or what is not sized.
    InvalidSpecError
        When the engine is one that the operator would refuse.
    """
    settings, version = _completed(log, given)
    facts = valid_facts(_spec(settings, version, given))
    tensor = settings.tensor or 1
    plan = make_plan(facts, (NodeFacts("measured", given.product, tensor),), None)
    if not isinstance(plan, Plan):
        raise UnusableLogError(plan.message)
    available = log.memory.available_kv_bytes
    if available is None:
        raise UnusableLogError("it has no line 'Available KV cache memory': the engine did not come so far")
    budget = plan.chosen.budget
    kind = engine_kind(facts.pair, given.product, tensor)
    kind = replace(kind, engine_version=version, runner=log.runner or kind.runner)
    try:
        entry = measured_entry(kind, budget, available)
    except CalibrationError as error:
        raise UnusableLogError(str(error)) from error
    return Measurement(entry, _terms(budget, log.memory), budget.kv_cache_tokens, log.memory.kv_cache_tokens)


def measured_entry(kind: EngineKind, budget: Budget, reported_bytes: int) -> CalibrationEntry:
    """Return the entry of an engine that reported so much for the KV cache, against its budget without a calibration.

    Raises
    ------
    CalibrationError
        When it is more than the estimated terms could have given: then something else was predicted than what ran.
    """
    residual = budget.available_kv_bytes - reported_bytes
    if -residual > budget.estimated_bytes:
        raise CalibrationError(
            "residual_bytes",
            residual,
            f"the engine had {format_gib(-residual)} GiB more for the KV cache than predicted, but all that is "
            f"estimated takes {format_gib(budget.estimated_bytes)} GiB: it was not the engine that was predicted; "
            "check product, models, precisions and memory utilization",
        )
    return CalibrationEntry(**asdict(kind), residual_bytes=residual)


def _completed(log: StartupLog, given: Given) -> tuple[LoggedSettings, str]:
    """Return the settings with what the user adds, and the version; all that sizing needs is there."""
    logged = log.settings
    settings = replace(
        logged,
        tensor=given.tensor or logged.tensor or 1,
        max_model_len=given.max_model_len or logged.max_model_len,
        max_num_seqs=given.max_num_seqs or logged.max_num_seqs,
        max_num_batched_tokens=given.max_num_batched_tokens or logged.max_num_batched_tokens,
    )
    version = given.engine_version or log.version
    needed = {
        "--max-model-len": settings.max_model_len,
        "--max-num-seqs": settings.max_num_seqs,
        "--max-num-batched-tokens": settings.max_num_batched_tokens,
        "--engine-version": version,
    }
    missing = [option for option, value in needed.items() if value is None]
    if settings.model is None or version is None or missing:
        absent = [*missing, *(["the line 'Initializing a V1 LLM engine'"] if settings.model is None else [])]
        raise UnusableLogError(f"it does not say all that decides the memory: add {', '.join(absent)}")
    if (settings.pipeline or 1) > 1:
        raise UnusableLogError(f"pipeline_parallel_size {settings.pipeline}: only tensor parallelism is calibrated")
    if settings.dtype == f"torch.{Dtype.FLOAT32}":
        raise UnusableLogError(f"dtype {Dtype.FLOAT32}: only engines in 16 bits are calibrated")
    if settings.method is None:
        raise UnusableLogError("it does not say whether the engine speculates: give the log from its first line on")
    return settings, version


def _spec(settings: LoggedSettings, version: str, given: Given) -> SpecDecodeDeploymentSpec:
    """Return the spec that would start this engine."""
    utilization = settings.utilization or 0.92  # vLLM, config/cache.py CacheConfig
    serving = {
        "maxModelLen": settings.max_model_len,
        "maxNumSeqs": settings.max_num_seqs,
        "maxNumBatchedTokens": settings.max_num_batched_tokens,
        "memoryUtilizationPercent": _percent(utilization),
        "enforceEager": bool(settings.enforce_eager),
        "kvCacheDtype": settings.kv_cache_dtype or KvCacheDtype.AUTO.value,
        **({"blockSize": settings.block_size} if settings.block_size else {}),
    }
    body: Body = {
        "target": _model(settings.model or "", settings.quantization, given),
        "parallelism": {"tensor": settings.tensor},
        "accelerator": {"product": [given.product], "perNode": settings.tensor},
        "serving": serving,
        "engine": {"version": version},
    }
    if settings.method != Method.NONE.value:
        body["speculation"] = _speculation(settings, given)
    try:
        return SpecDecodeDeploymentSpec.parse(body)
    except ValidationError as error:
        detail = error.errors()[0]
        place = ".".join(map(str, detail["loc"]))
        message = f"{place}: {shown(detail['input'])}: {detail['msg']}; this engine cannot be sized"
        raise UnusableLogError(message) from error


def _speculation(settings: LoggedSettings, given: Given) -> Body:
    speculation: Body = {"method": settings.method, "numSpeculativeTokens": settings.num_speculative_tokens}
    if settings.draft_model:
        speculation["draft"] = _model(settings.draft_model, settings.draft_quantization, given)
    return speculation


def _model(name: str, quantization: str | None, given: Given) -> Body:
    made = Quantization.FP8 if quantization in _ONLINE_FP8 else Quantization.AS_CHECKPOINT
    model: Body = {"model": name.strip("/"), "quantization": made.value}
    config = given.configs.get(name)
    return model if config is None else {**model, "config": config}


def _percent(utilization: float) -> int:
    percent = round(100 * utilization)
    if abs(100 * utilization - percent) > 1e-6:  # noqa: PLR2004  what a float of two decimals may be off by
        raise UnusableLogError(f"gpu_memory_utilization {utilization}: only whole percents are sized")
    return percent


def _terms(budget: Budget, memory: LoggedMemory) -> tuple[Term, ...]:
    beside, available = memory.non_model_bytes, memory.available_kv_bytes
    peak = None
    if None not in (memory.requested_bytes, memory.model_load_bytes, beside, available):
        # What is printed as peak activation has the graph estimate in it or not, by version: the rest is exact.
        taken = (memory.model_load_bytes or 0) + (beside or 0) + (available or 0)
        peak = (memory.requested_bytes or 0) - taken
    return (
        Term("device total", budget.total_bytes, memory.total_bytes),
        Term("requested", budget.requested_bytes, memory.requested_bytes),
        Term("weights loaded", budget.weights_bytes, memory.model_load_bytes),
        Term("state and non-torch", budget.state_bytes + budget.non_torch_bytes, beside),
        Term("activation and graphs charged", budget.activation_bytes + budget.cuda_graphs_bytes, peak),
        Term("left for the KV cache", budget.available_kv_bytes, available),
    )
