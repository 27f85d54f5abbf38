"""Turns what the operator saw of a running SpecDecodeDeployment into an entry of the calibration file."""

from pydantic import ValidationError

from specdecode_operator.api.base import Body
from specdecode_operator.api.deployment import SpecDecodeDeploymentSpec
from specdecode_operator.api.status.deployment import ObservedStatus, PlanStatus, SpecDecodeDeploymentStatus
from specdecode_operator.calibration.engine_log import Measurement, Term, measured_entry
from specdecode_operator.deployment.proof.residual import share
from specdecode_operator.deployment.spec.facts import Facts
from specdecode_operator.deployment.spec.validation import valid_facts
from specdecode_operator.sizing.base.devices import find_device
from specdecode_operator.sizing.choice.plan import CPU_PRODUCT
from specdecode_operator.sizing.choice.precision_rules import checkpoint_problem
from specdecode_operator.sizing.memory.budget import engine_kind, estimate
from specdecode_operator.sizing.pair.calibration import CalibrationError
from specdecode_operator.sizing.pair.pair import TENSOR_ONLY
from specdecode_operator.vocabulary import SIXTEEN_BIT_BYTES, Precision


class UnusableObjectError(ValueError):
    """An object that shows no residual, or one that cannot be used; the text says what to do."""


def measure_deployment(body: Body) -> Measurement:
    """Return what an object as ``kubectl get -o yaml`` prints it shows of the estimates.

    The operator may have planned with a calibration already, or be of another
    version than this: so the residual is counted anew against the estimate
    of today without one.

    Raises
    ------
    UnusableObjectError
        When the object lacks what it takes, with what to do.
    InvalidSpecError
        When the spec is one that the operator would refuse.
    """
    spec, plan, observed = _parts(body)
    device = find_device(plan.product, spec.accelerator.memory_gib_per_gpu)
    if plan.product == CPU_PRODUCT or device is None:
        raise UnusableObjectError(f"status.plan.product: {plan.product}: only GPUs whose memory is known are estimated")
    facts = valid_facts(spec)
    if facts.options.spread != TENSOR_ONLY:
        raise UnusableObjectError("spec.parallelism: only engines with tensor parallelism alone are calibrated")
    if facts.pair.limits.dtype_bytes != SIXTEEN_BIT_BYTES:
        raise UnusableObjectError(f"spec.serving.dtype: {spec.serving.dtype}: only engines in 16 bits are calibrated")
    if not facts.pair.limits.has_own_graphs:
        message = "only engines with vLLM's own CUDA graphs are calibrated"
        raise UnusableObjectError(f"spec.serving.cudagraphMode, maxCudagraphCaptureSize: {message}")
    try:
        facts = _as_planned(facts, plan)
        budget = estimate(facts.pair, device, plan.tensor)
        facts = facts.at(facts.pair.target_precision, facts.pair.draft_precision, budget.fewer_seqs)
    except ValueError as error:
        raise UnusableObjectError(f"status.plan: {error}") from error
    reported_bytes = plan.per_gpu.available_kv_bytes - (observed.kv_cache_residual_bytes or 0)
    try:
        entry = measured_entry(engine_kind(facts.pair, plan.product, plan.tensor), budget, reported_bytes)
    except CalibrationError as error:
        raise UnusableObjectError(f"status.observed: {error}") from error
    terms = (Term("left for the KV cache", budget.available_kv_bytes, reported_bytes),)
    return Measurement(entry, terms, budget.kv_cache_tokens, observed.kv_cache_tokens)


def _as_planned(facts: Facts, plan: PlanStatus) -> Facts:
    """Return the facts at the precisions of the plan. Raises ValueError where the spec has no checkpoint for one."""
    target = Precision(plan.target_quantization)
    draft = Precision(plan.draft_quantization) if plan.draft_quantization else None
    pair, available = facts.pair, facts.options.available
    problems = [checkpoint_problem("target", pair.target, target, available.target_precisions)]
    if pair.draft is not None and draft is not None:
        problems.append(checkpoint_problem("draft", pair.draft, draft, available.draft_precisions))
    for problem in filter(None, problems):
        raise ValueError(f"{problem}; or get the object again: its plan is of another spec")
    return facts.at(target, draft)


def _parts(body: Body) -> tuple[SpecDecodeDeploymentSpec, PlanStatus, ObservedStatus]:
    """Return the spec, and of the status what belongs to this very spec."""
    try:
        spec = SpecDecodeDeploymentSpec.parse(body.get("spec"), newer=True)
        status = SpecDecodeDeploymentStatus.parse(body.get("status") or {}, newer=True)
    except ValidationError as error:
        detail = error.errors()[0]
        place = ".".join(map(str, detail["loc"]))
        raise UnusableObjectError(f"{place}: {detail['msg']}: write it with kubectl get sdd NAME -o yaml") from error
    if spec.engine.replay is not None:
        raise UnusableObjectError("spec.engine.replay: only engines that run a model show what memory it takes")
    plan, observed = status.plan, status.observed
    if plan is None or observed is None or observed.kv_cache_residual_bytes is None:
        raise UnusableObjectError("has no status.observed.kvCacheResidualBytes: wait until an engine of it serves")
    metadata = body.get("metadata")
    generation = metadata.get("generation") if isinstance(metadata, dict) else None
    # The share is written with the residual: where it is not that of the plan, one of the two is older.
    current = observed.kv_cache_residual == share(plan.kv_cache_tokens, observed.kv_cache_tokens or 0)
    if generation != status.observed_generation or not current:
        raise UnusableObjectError("its status is older than its spec or its plan: get it again in a minute")
    return spec, plan, observed
