"""Check whether engine, workload and dataset allow a capture; return the blocking reason if not."""

from specdecode_operator.api.base import Body
from specdecode_operator.api.capture import Source, SpecDecodeCaptureSpec
from specdecode_operator.api.crd_validation import broken_rules
from specdecode_operator.capture.load.arrivals import expected_duration_s
from specdecode_operator.capture.load.datasets import parts_of
from specdecode_operator.capture.observation import CapturedDeployment, ObservedDeployment, dataset_claim
from specdecode_operator.deployment.conditions import Blocked
from specdecode_operator.deployment.desired_state import Gated, InCanary, NotLaunched, RolledBack
from specdecode_operator.deployment.live_recorder import RUST_FRONTEND_VARIABLE, uses_rust_frontend
from specdecode_operator.deployment.request_lengths import too_long_requests
from specdecode_operator.deployment.spec_facts import Facts
from specdecode_operator.sizing.plan import Plan
from specdecode_operator.vllm.extra_args_parser import last_option

_STREAM_INTERVAL = "--stream-interval"


def captured_deployment(
    name: str, observed: ObservedDeployment | None, *, gate_capture: str | None = None
) -> CapturedDeployment | Blocked:
    """Return the deployment that a capture names, or what blocks the capture while it has no plan in force."""
    # ``gate_capture`` is the name of a capture that judges engines at a gate: it captures the engines that wait there.
    if observed is None:
        message = (
            f"spec.deployment: {name}: there is no SpecDecodeDeployment of this name in the namespace; continues when"
            " it exists"
        )
        return Blocked("DeploymentNotFound", message)
    outcome = observed.desired.outcome
    if gate_capture is not None or isinstance(outcome, Gated | InCanary):
        # The engines that wait at a gate are for the capture that judges them, and for no other.
        held = outcome if isinstance(outcome, Gated) and outcome.held.capture == gate_capture else None
        if held is None and gate_capture is not None:
            message = (
                f"the gate of deployment {name} does not use a capture of this name: rename this one, or delete it"
            )
            return Blocked("GateElsewhere", message)
        if held is None:
            where = "wait at its gate" if isinstance(outcome, Gated) else "are compared in a canary"
            message = f"the engines of deployment {name} {where}; continues when they serve"
            return Blocked("DeploymentGated", message)
    if isinstance(outcome, RolledBack):
        message = f"deployment {name} was rolled back ({outcome.failure}); continues when its spec serves"
        return Blocked("DeploymentRolledBack", message, permanent=True)
    if isinstance(outcome, NotLaunched):
        why = f"{outcome.readiness.reason}: {outcome.readiness.message}"
        message = f"deployment {name} has no plan in force ({why}); continues when it has one"
        return Blocked("DeploymentNotPlanned", message, permanent=outcome.readiness.stalled)
    launch = outcome.launch if isinstance(outcome, Gated | InCanary) else outcome
    return CapturedDeployment(observed.key, observed.uid, observed.generation, launch)


def engine_blocked(facts: Facts, plan: Plan) -> Blocked | None:
    """Return what blocks the recording of a deployment's engine: always a field of the deployment."""
    spec, interval = facts.spec, last_option(_STREAM_INTERVAL, facts.spec.engine.extra_args, facts.profile)
    if facts.replay is not None:
        reason = "EngineReplayed"
        message = (
            "the deployment replays a recording (spec.engine.replay), so no model would be measured: capture a"
            " deployment without it, or record a replay on your own machine: specdecode replay serve --record"
        )
    elif plan.chosen.nodes > 1:
        reason = "MultiNodeNotSupported"
        message = (
            f"a replica of the deployment takes {plan.chosen.nodes} nodes, and captures support only one: capture a"
            " deployment with fewer GPUs per replica (spec.parallelism)"
        )
    elif interval is not None and interval.value != "1":
        reason = "StreamIntervalNotOne"
        message = (
            f"the deployment's spec.engine.extraArgs have {_STREAM_INTERVAL} {interval.value}, which delays tokens, so"
            " clients cannot measure when they were generated: remove it"
        )
    elif uses_rust_frontend(spec):
        reason = "RustFrontend"
        message = (
            f"the deployment sets {RUST_FRONTEND_VARIABLE}, and that frontend cannot load the recorder: remove it"
            " (spec.engine.env, or spec.podTemplate)"
        )
    else:
        return None
    return Blocked(reason, message, permanent=True)


def workload_blocked(spec: SpecDecodeCaptureSpec) -> Blocked | None:
    """Return the CRD rules that a workload breaks, or that it exceeds its deadline; a live capture has none."""
    if spec.source is Source.LIVE:
        return None
    if problems := "; ".join(map(str, broken_rules(spec.workload, "spec.workload"))):
        return Blocked("Invalid", problems, permanent=True)
    expected_s = expected_duration_s(spec.workload)
    if expected_s > spec.deadline_seconds:
        message = (
            f"spec.deadlineSeconds: {spec.deadline_seconds}: is less than the {expected_s:.0f} s that the phases of"
            " spec.workload take: raise it, or shorten them"
        )
        return Blocked("WorkloadTooLong", message, permanent=True)
    return None


def lengths_blocked(spec: SpecDecodeCaptureSpec, facts: Facts) -> Blocked | None:
    """Return why requests of a load are too long for the deployment's engines; None if they fit."""
    problems = too_long_requests(spec.workload, facts, "spec.workload")
    return Blocked("RequestsTooLong", "; ".join(map(str, problems)), permanent=True) if problems else None


def dataset_blocked(spec: SpecDecodeCaptureSpec, source: Body | None) -> Blocked | None:
    """Return what blocks reading the prompts of a dataset; ``source`` is its ConfigMap or claim, if it exists."""
    dataset = spec.workload.prompts.dataset
    if dataset is None:
        return None
    if dataset.config_map is not None:
        field, name = "configMap.name", dataset.config_map.name
    else:
        field, name = "persistentVolumeClaim.claimName", str(dataset_claim(spec))
    if source is None:
        message = f"spec.workload.prompts.dataset.{field}: {name}: not found; continues when it exists"
        return Blocked("DatasetNotFound", message)
    keys = {*(source.get("data") or {}), *(source.get("binaryData") or {})}
    paths = [part.path for part in parts_of(spec.workload).values()]
    missing = next((path for path in paths if path not in keys), None) if dataset.config_map is not None else None
    if missing is not None:
        field = "prompts.dataset.path" if missing == dataset.path else "phases.path"
        held = ", ".join(sorted(keys)[:8]) or "nothing"
        message = f"spec.workload.{field}: {missing}: ConfigMap {name} holds {held}; correct one of them"
        return Blocked("DatasetNotFound", message)
    return None
