"""Check whether engine, workload and dataset allow a capture; return the blocking reason if not."""

from specdecode_operator.api.base import Body
from specdecode_operator.api.capture import SpecDecodeCaptureSpec
from specdecode_operator.api.crd_validation import broken_rules
from specdecode_operator.api.deployment import SpecDecodeDeploymentSpec
from specdecode_operator.capture.load.arrivals import expected_duration_s
from specdecode_operator.capture.load.datasets import parts_of
from specdecode_operator.capture.observation import CapturedDeployment, ObservedDeployment, dataset_claim
from specdecode_operator.cluster.resources import ENGINE_CONTAINER
from specdecode_operator.deployment.conditions import Blocked
from specdecode_operator.deployment.desired_state import Gated, Launch, Outcome, RolledBack
from specdecode_operator.deployment.spec_facts import Facts
from specdecode_operator.sizing.plan import Plan
from specdecode_operator.vllm.extra_args_parser import last_option

_STREAM_INTERVAL = "--stream-interval"
_RUST_FRONTEND = "VLLM_USE_RUST_FRONTEND"
_OFF = frozenset({"", "0", "false"})


def captured_deployment(
    name: str, observed: ObservedDeployment | None, *, gate_capture: str | None = None
) -> CapturedDeployment | Blocked:
    """Return the deployment that a capture names, or what blocks the capture while it has no plan in force.

    One that is not there may come in the same apply; one that only another spec helps is waited for in vain.
    ``gate_capture`` is the name of a capture that judges engines at a gate: it captures those that wait for it.
    """
    if observed is None:
        message = (
            f"spec.deployment: {name}: there is no SpecDecodeDeployment of this name in the namespace; goes on when"
            " it exists"
        )
        return Blocked("DeploymentNotFound", message)
    outcome = observed.desired.outcome
    if gate_capture is not None or isinstance(outcome, Gated):
        return _at_gate(observed, outcome, gate_capture)
    if isinstance(outcome, Launch):
        return CapturedDeployment(observed.key, observed.uid, observed.generation, outcome)
    if isinstance(outcome, RolledBack):
        message = f"deployment {name} was rolled back ({outcome.failure}); goes on when its spec serves"
        return Blocked("DeploymentRolledBack", message, permanent=True)
    why = f"{outcome.readiness.reason}: {outcome.readiness.message}"
    message = f"deployment {name} has no plan in force ({why}); goes on when it has one"
    return Blocked("DeploymentNotPlanned", message, permanent=outcome.readiness.stalled)


def _at_gate(observed: ObservedDeployment, outcome: Outcome, capture: str | None) -> CapturedDeployment | Blocked:
    """Return the engines that wait at a gate, for the capture that judges them and for no other."""
    name = observed.key.name
    if capture is not None and not (isinstance(outcome, Gated) and outcome.held.capture == capture):
        message = f"the gate of deployment {name} waits for no capture of this name: rename this one, or delete it"
        return Blocked("GateElsewhere", message)
    if capture is None or not isinstance(outcome, Gated):
        message = f"the engines of deployment {name} wait at its gate; goes on when they serve"
        return Blocked("DeploymentGated", message)
    return CapturedDeployment(observed.key, observed.uid, observed.generation, outcome.launch)


def engine_blocked(facts: Facts, plan: Plan) -> Blocked | None:
    """Return what blocks the recording of a deployment's engine.

    What it is refused for is a field of the deployment, so it is looked at again when that changes.
    """
    spec = facts.spec
    if facts.replay is not None:
        message = (
            "the deployment replays a recording (spec.engine.replay), and a capture of it would measure nothing:"
            " capture a deployment without it, or record a replay on your own machine: specdecode replay serve --record"
        )
        return Blocked("EngineReplayed", message, permanent=True)
    if plan.chosen.nodes > 1:
        message = (
            f"a replica of the deployment takes {plan.chosen.nodes} nodes, and captures are of one node for now:"
            " capture a deployment with fewer GPUs a replica (spec.parallelism)"
        )
        return Blocked("MultiNodeNotSupported", message, permanent=True)
    interval = last_option(_STREAM_INTERVAL, spec.engine.extra_args, facts.profile)
    if interval is not None and interval.value != "1":
        message = (
            f"the deployment's spec.engine.extraArgs say {_STREAM_INTERVAL} {interval.value}: the engine then holds"
            " tokens back, and what clients see is not when they were made: remove it"
        )
        return Blocked("StreamIntervalNotOne", message, permanent=True)
    if _uses_rust_frontend(spec):
        message = (
            f"the deployment sets {_RUST_FRONTEND}: that frontend loads no recorder: remove it"
            " (spec.engine.env, or spec.podTemplate)"
        )
        return Blocked("RustFrontend", message, permanent=True)
    return None


def _uses_rust_frontend(spec: SpecDecodeDeploymentSpec) -> bool:
    set_in_spec = [(variable.name, variable.value) for variable in spec.engine.env]
    containers = (spec.pod_template.spec or {}).get("containers") or [] if spec.pod_template else []
    overlaid = [
        (variable.get("name"), variable.get("value", "from elsewhere"))
        for container in containers
        if container.get("name") == ENGINE_CONTAINER
        for variable in container.get("env") or []
    ]
    return any(name == _RUST_FRONTEND and value.lower() not in _OFF for name, value in [*set_in_spec, *overlaid])


def workload_blocked(spec: SpecDecodeCaptureSpec) -> Blocked | None:
    """Return what the CRD's rules refuse in a workload, or that it is longer than its deadline."""
    if problems := "; ".join(map(str, broken_rules(spec.workload, "spec.workload"))):
        return Blocked("Invalid", problems, permanent=True)
    expected_s = expected_duration_s(spec.workload)
    if expected_s > spec.deadline_seconds:
        message = (
            f"spec.deadlineSeconds: {spec.deadline_seconds}: the phases of spec.workload take {expected_s:.0f} s:"
            " raise it, or shorten them"
        )
        return Blocked("WorkloadTooLong", message, permanent=True)
    return None


def dataset_blocked(spec: SpecDecodeCaptureSpec, source: Body | None) -> Blocked | None:
    """Return what blocks reading the prompts of a dataset.

    ``source`` is the ConfigMap or the claim that holds it, None where there is none.
    """
    dataset = spec.workload.prompts.dataset
    if dataset is None:
        return None
    if dataset.config_map is not None:
        field, name = "configMap.name", dataset.config_map.name
    else:
        field, name = "persistentVolumeClaim.claimName", str(dataset_claim(spec))
    if source is None:
        message = f"spec.workload.prompts.dataset.{field}: {name}: there is none of this name; goes on when it exists"
        return Blocked("DatasetNotFound", message)
    keys = {*(source.get("data") or {}), *(source.get("binaryData") or {})}
    paths = {part.path: None for part in parts_of(spec.workload).values()}
    missing = next((path for path in paths if path not in keys), None) if dataset.config_map is not None else None
    if missing is not None:
        field = "prompts.dataset.path" if missing == dataset.path else "phases.path"
        held = ", ".join(sorted(keys)[:8]) or "nothing"
        message = f"spec.workload.{field}: {missing}: ConfigMap {name} holds {held}; correct one of them"
        return Blocked("DatasetNotFound", message)
    return None
