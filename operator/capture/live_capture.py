"""Record the requests of users in running engines: preconditions, turn, Job and order of a live capture.

The Job runs one container, the collector. While it runs, a ConfigMap of the deployment, the order, tells the recorders
in the engine pods where to connect and with which token. The engines are never restarted. The token is random per Job,
and is read back from the Job, so that an operator that restarts writes the same order.
"""

import ipaddress
import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from specdecode_operator.api.base import Body
from specdecode_operator.api.capture import Source, SpecDecodeCaptureSpec
from specdecode_operator.api.crd_validation import broken_rules
from specdecode_operator.capture.job.collect_settings import MOST_PODS, PORT
from specdecode_operator.capture.job_manifest import USER_ID, engine_context, wrap_up_s
from specdecode_operator.capture.job_status import is_running, is_suspended, newest_pod
from specdecode_operator.capture.load import run_settings
from specdecode_operator.capture.observation import COLLECT, Capture, CapturedDeployment, ObservedDeployment, has_ended
from specdecode_operator.capture.volumes import ROOT, claim_of
from specdecode_operator.cluster.manifests import child_labels, owned, render_template
from specdecode_operator.cluster.resources import CAPTURED_DEPLOYMENT_LABEL, CONFIG_MAP
from specdecode_operator.deployment.conditions import Blocked
from specdecode_operator.deployment.live_recorder import ORDER_ENTRY, live_recorder_blocked, order_name
from specdecode_operator.deployment.rollout.blocked_pods import condition_of
from specdecode_operator.deployment.rollout.engine_workload import serving_pods
from specdecode_operator.deployment.rollout.rollout_progress import serving_hash, template_hash
from specdecode_operator.enums import LiveTokenIds
from specdecode_operator.problems import some_of
from specdecode_operator.untrusted import mapping, objects, parse_json, texts

JOIN_S: Final = 150  # the kubelet may need 90 s to show the order to the recorders
DRAIN_S: Final = 60  # for requests that run when the recording ends
_CLOSE_S: Final = 30  # for recorders to send their last lines
_NAMED: Final = 4
_ANSWERS, _PROMPTS = "answers", "prompts"
_TOKEN_IDS_VALUE: Final = "liveCapture.tokenIds"  # noqa: S105  a value of the chart


def invalid(spec: SpecDecodeCaptureSpec) -> Blocked | None:
    """Return the rules of the CRD that a live capture breaks: an older CRD does not have them."""
    problems = "; ".join(map(str, broken_rules(spec, "spec")))
    return Blocked("Invalid", problems, permanent=True) if problems else None


def not_recordable(spec: SpecDecodeCaptureSpec, source: CapturedDeployment, allowed: LiveTokenIds) -> Blocked | None:
    """Return what rules out a live capture for good; ``allowed`` are the token ids that the namespace may record."""
    if why := live_recorder_blocked(source.launch.facts.spec):
        message = f"spec.source: Live: the engines of deployment {source.key.name} cannot record: {why}"
        return Blocked("RecorderNotInEngines", message, permanent=True)
    asked = {"tokenIds": (spec.record.token_ids, _ANSWERS), "promptTokenIds": (spec.record.prompt_token_ids, _PROMPTS)}
    refused = {
        field: kind for field, (is_set, kind) in asked.items() if is_set and kind not in allowed.value.split(",")
    }
    if refused:
        fields = " and ".join(f"spec.record.{field}" for field in refused)
        message = (
            f"{fields}: true: recording the token ids of users' {' and '.join(refused.values())} is not allowed in"
            f" namespace {source.key.namespace}: create another capture without it, or ask the administrator to allow"
            f" it ({_TOKEN_IDS_VALUE} in the values of the chart)"
        )
        return Blocked("TokenIdsNotAllowed", message, permanent=True)
    return None


def waits_for_engines(spec: SpecDecodeCaptureSpec, deployment: ObservedDeployment) -> str | None:
    """Return why the engines of a deployment cannot be recorded yet; None if they can."""
    name = spec.deployment
    if not deployment.wants_engines:
        return (
            f"deployment {name} is suspended or has replicas: 0, so no engine serves: set spec.suspend to false or"
            " raise spec.replicas; continues when an engine is ready"
        )
    pods, workload = _serving(deployment.pods), deployment.desired.workload
    if workload is None:
        return f"deployment {name} has no engines to run yet; continues when it has"
    if old := [pod["metadata"]["name"] for pod in pods if template_hash(pod) != serving_hash(workload)]:
        return (
            f"deployment {name} is rolling out: {len(old)} of {len(pods)} engine pods run an earlier spec"
            f" ({some_of(old, _NAMED)}); continues when the rollout is complete"
        )
    ready = ready_pods(deployment.pods)
    if not ready:
        return (
            f"none of the {len(pods)} engine pods of deployment {name} is ready: see its condition Ready (kubectl"
            f" describe sdd {name}); continues when one is ready"
        )
    if spec.live and (missing := [pod for pod in spec.live.pods if pod not in ready]):
        return (
            f"spec.live.pods: {some_of(missing, _NAMED)}: not a ready engine pod of deployment {name} (ready:"
            f" {some_of(ready, _NAMED)}): continues when it is ready; for other pods, create another capture"
        )
    return None


def pods_to_record(spec: SpecDecodeCaptureSpec, deployment: ObservedDeployment) -> list[str]:
    """Return the names of the engine pods to record: those that the spec names, or all that are ready."""
    named = list(dict.fromkeys(spec.live.pods)) if spec.live else []
    return named or sorted(ready_pods(deployment.pods))


def too_many(spec: SpecDecodeCaptureSpec, pods: Sequence[str]) -> Blocked | None:
    """Return that there are more engine pods than one collector records."""
    if len(pods) <= MOST_PODS:
        return None
    message = (
        f"spec.live.pods: not set: deployment {spec.deployment} has {len(pods)} ready engine pods, and one capture"
        f" records at most {MOST_PODS}: name at most {MOST_PODS} of them in another capture"
    )
    return Blocked("TooManyPods", message, permanent=True)


def _serving(pods: Iterable[Body]) -> list[Body]:
    """Return the pods that serve users, without terminating ones."""
    return [pod for pod in serving_pods(list(pods)) if "deletionTimestamp" not in pod["metadata"]]


def ready_pods(pods: Iterable[Body]) -> list[str]:
    """Return the names of the engine pods that can be recorded."""
    return [pod["metadata"]["name"] for pod in _serving(pods) if condition_of(pod, "Ready").get("status") == "True"]


def recorded_first(
    own: Capture, captures: Iterable[Body], begun: Collection[str], ready: Collection[str]
) -> str | None:
    """Return which live capture of the same deployment goes first; None if it is this one's turn.

    ``captures`` are all captures of the deployment, ``begun`` the names of those whose Job is not suspended, and
    ``ready`` the names of its ready engine pods. Captures that have begun go first, and older ones before younger ones.
    A capture that something else blocks is passed over, such as one that waits for a pod that may never come.
    """

    def place(body: Body) -> tuple[bool, str, str]:
        metadata = body["metadata"]
        return metadata["name"] not in begun, str(metadata.get("creationTimestamp", "")), metadata["name"]

    def can_start(body: Body) -> bool:
        named = texts(mapping(mapping(body, "spec"), "live"), "pods")
        return body["metadata"]["name"] in begun or all(pod in ready for pod in named)

    in_line = [
        body for body in captures if body["metadata"]["name"] == own.key.name or (_is_in_line(body) and can_start(body))
    ]
    first = min(in_line, key=place, default=None)
    if first is None or first["metadata"]["name"] == own.key.name:
        return None
    name = first["metadata"]["name"]
    return (
        f"live capture {name} of deployment {own.spec.get('deployment')} goes first: continues when it has ended, or is"
        " suspended or deleted"
    )


def _is_in_line(body: Body) -> bool:
    spec, conditions = mapping(body, "spec"), objects(mapping(body, "status"), "conditions")
    if spec.get("source") != Source.LIVE or spec.get("suspend") or "deletionTimestamp" in body["metadata"]:
        return False
    accepted = next((each.get("status") for each in conditions if each.get("type") == "Accepted"), "True")
    return not has_ended(body) and accepted == "True"


@dataclass(frozen=True)
class Collector:
    """Settings of the collector that the spec does not have."""

    pods: Sequence[str]  # engine pods to record
    engine_pod: Body  # their template
    token: str  # with which their recorders authenticate
    image: str  # of the operator


def longest_attempt_s(spec: SpecDecodeCaptureSpec) -> int:
    """Return the time limit of a live capture's pod: until recorders connect, recording, and publication."""
    return JOIN_S + spec.window_s + DRAIN_S + _CLOSE_S + wrap_up_s(spec.window_s)


def render_live_job(
    capture: Capture, spec: SpecDecodeCaptureSpec, source: CapturedDeployment, collector: Collector
) -> Body:
    """Return the Job of a live capture, whose only container collects the data of the recorders."""
    assert spec.live is not None  # noqa: S101  a rule of the CRD
    engine_pod = collector.engine_pod
    duration_s = spec.live.duration_seconds
    settings: dict[str, Any] = {
        "namespace": capture.key.namespace,
        "capture": capture.key.name,
        "capture_uid": capture.uid,
        "root": ROOT,
        "live": {
            "port": PORT,
            "token": collector.token,
            "pods": list(collector.pods),
            "join_seconds": JOIN_S,
            "duration_seconds": duration_s,
            "requests": spec.live.requests,
            "sample_percent": spec.live.sample_percent,
            "drain_seconds": DRAIN_S,
        },
        "record": spec.record.model_dump(mode="json", by_alias=True),
        "deadline_seconds": None if duration_s else spec.deadline_seconds,
        "slo": {},
        "context": engine_context(source, engine_pod),
    }
    # As in the engine's pod, so that the groups of spec.podTemplate may write to the volume too.
    security: Body = {"seccompProfile": {"type": "RuntimeDefault"}, **(engine_pod["spec"].get("securityContext") or {})}
    if spec.storage.existing_claim is None:
        security = {"fsGroup": USER_ID, "fsGroupChangePolicy": "OnRootMismatch", **security}
    values = {
        "name": capture.job_name,
        "backoff_limit": spec.backoff_limit,
        "pod_deadline_s": longest_attempt_s(spec),
        "labels": child_labels(capture.key) | {CAPTURED_DEPLOYMENT_LABEL: spec.deployment},
        "security_context": security,
        "pull_secrets": engine_pod["spec"].get("imagePullSecrets") or [],
        "user_id": USER_ID,
        "container": COLLECT,
        "port": PORT,
        "operator_image": collector.image,
        "settings_variable": run_settings.SETTINGS_VARIABLE,
        "attempt_variable": run_settings.ATTEMPT_VARIABLE,
        "node_variable": run_settings.NODE_VARIABLE,
        "settings": json.dumps(settings, sort_keys=True).replace("$", "$$"),
        "root": ROOT,
        "dataset": None,
        "claim": claim_of(capture, spec.storage),
    }
    job = owned(render_template("live-capture-job", values), capture.key, capture.uid)
    job["metadata"]["labels"] |= {CAPTURED_DEPLOYMENT_LABEL: spec.deployment}
    return job


def order_config_map(capture: Capture, job: Body, pods: Sequence[Body]) -> Body | None:
    """Return the order of a live capture; None while no collector runs that the recorders could connect to."""
    pod = newest_pod(job, pods)
    if pod is None or is_suspended(job) or "deletionTimestamp" in pod["metadata"] or not is_running(pod, COLLECT):
        return None
    address, until_s, token = _address(pod), _until_s(job, pod), _token(job)
    if address is None or until_s is None or token is None:
        return None
    order = {
        "capture": f"{capture.key.namespace}/{capture.key.name}",
        "uid": capture.uid,
        "address": address,
        "token": token,
        "until_wall_s": until_s,
    }
    config_map = {
        "apiVersion": CONFIG_MAP.api_version,
        "kind": CONFIG_MAP.kind,
        "metadata": {"name": order_name(capture.deployment_key)},
        "data": {ORDER_ENTRY: json.dumps(order, sort_keys=True)},
    }
    return owned(config_map, capture.key, capture.uid)


def _address(pod: Body) -> str | None:
    """Return address and port of the collector; None before its pod has an IP."""
    try:
        address = ipaddress.ip_address(str(mapping(pod, "status").get("podIP")))
    except ValueError:
        return None
    return f"[{address}]:{PORT}" if address.version == 6 else f"{address}:{PORT}"  # noqa: PLR2004  of IP


def _until_s(job: Body, pod: Body) -> float | None:
    """Return when the kubelet stops the collector, in seconds since 1970."""
    started = mapping(pod, "status").get("startTime")
    deadline_s = mapping(mapping(mapping(job, "spec"), "template"), "spec").get("activeDeadlineSeconds")
    if not started or not isinstance(deadline_s, int):
        return None
    return datetime.fromisoformat(str(started)).timestamp() + deadline_s


def _token(job: Body) -> str | None:
    """Return the token in the settings of a Job; None if it has none."""
    pod = mapping(mapping(mapping(job, "spec"), "template"), "spec")
    container = next((each for each in objects(pod, "containers") if each.get("name") == COLLECT), {})
    env = objects(container, "env")
    text = next((each.get("value") for each in env if each.get("name") == run_settings.SETTINGS_VARIABLE), None)
    try:
        settings = parse_json(str(text or "{}").replace("$$", "$"))
    except ValueError:
        return None
    token = mapping(settings if isinstance(settings, dict) else {}, "live").get("token")
    return token if isinstance(token, str) else None
