"""The Job that reads a model's config.json and safetensors headers, and what its pod tells."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from specdecode_operator.api.base import Body
from specdecode_operator.api.deployment import SpecDecodeDeploymentSpec
from specdecode_operator.api.key import Key
from specdecode_operator.api.values import AcceleratorType
from specdecode_operator.deployment.blocked import Blocked
from specdecode_operator.deployment.pods.rollout import blocked_pod
from specdecode_operator.deployment.spec.model_sources import ModelSource
from specdecode_operator.deployment.spec.model_storage import hub_environment, model_path, models_volume
from specdecode_operator.deployment.spec.pod_template import merge
from specdecode_operator.engine.profiles import EngineProfile
from specdecode_operator.engine.settings import Platform
from specdecode_operator.kube.labels import MANAGED_BY_LABEL, MANAGER, MODEL_KEY_ANNOTATION, READS_FOR_LABEL
from specdecode_operator.kube.manifests import owned, render_template, secret_key
from specdecode_operator.kube.nodes import GPU_RESOURCE
from specdecode_operator.resolver import read_model_facts
from specdecode_operator.resolver.answer import unpack
from specdecode_operator.resolver.read_model_facts import Checkpoint, CheckpointError

CONTAINER: Final = "read-model"
_SCRIPT: Final = Path(read_model_facts.__file__).read_text(encoding="utf-8")
_NAME_DIGITS: Final = 4
_TAKEN_FROM_OVERLAY: Final = ("imagePullSecrets", "nodeSelector", "tolerations", "affinity", "priorityClassName")
"""What decides where an engine may run, and whether its image can be had, holds for the reader too."""

_USER_FROM_OVERLAY: Final = ("runAsUser", "runAsGroup", "fsGroup", "supplementalGroups", "seLinuxOptions")

_REMEDIES: Final = {
    "ModelNotFound": "correct the path, or put the model there",
    "ModelNotReadable": "make it readable, or set runAsUser or fsGroup in spec.podTemplate.spec.securityContext",
    "ConfigUnreadable": "mend the file, or put its content into {field}.config",
    "ConfigTooLong": "put what describes the model's shape into {field}.config",
    "WeightsNotFound": "complete the model; pickles (.bin, .pt) are never opened, convert them to safetensors",
    "WeightsUnreadable": "copy or download the file anew",
    "HubRefused": "check the name, the model's licence and spec.models.hubTokenSecret",
    "HubUnreachable": "let pods reach the hub, name a volume in spec.models, or put config.json into {field}.config",
    "ReaderTimedOut": "look whether the volume or the hub answers, or put config.json into {field}.config",
    "ReaderFailed": "kubectl logs of its pod tells more; or put the content of config.json into {field}.config",
}
"""What to do, by the reason that the reader gives."""

_ONLY_THE_USER: Final = frozenset({"ConfigUnreadable", "ConfigTooLong"})
"""The others may pass: a volume that is being filled, a hub that does not answer, a licence that is granted."""


def reading_jobs(
    key: Key, uid: str, spec: SpecDecodeDeploymentSpec, profile: EngineProfile, sources: Mapping[str, ModelSource]
) -> list[Body]:
    """Return a Job for each model; one that is target and draft is read once."""
    return [_job(key, uid, spec, profile, source) for source in dict.fromkeys(sources.values())]


def what_was_read(pods: Sequence[Body], sources: Mapping[str, ModelSource]) -> dict[ModelSource, Checkpoint]:
    """Return what the pods have found out of these models."""
    found = {}
    for source in sources.values():
        for pod in pods_of(pods, source):
            ended = _ended(pod)
            if ended is not None and ended.get("exitCode") == 0 and not isinstance(answer := _answer(ended), Blocked):
                found[source] = answer
    return found


def reading_trouble(pods: Sequence[Body], sources: Mapping[str, ModelSource]) -> Blocked | None:
    """Return why a model is not read yet, or None while nothing is wrong."""
    for field, source in sources.items():
        for pod in pods_of(pods, source):
            ended = _ended(pod)
            blocked = blocked_pod(pod) if ended is None else _answer(ended)
            if isinstance(blocked, Blocked):
                return _told(blocked, field, source)
    return None


def is_reader(pod: Body) -> bool:
    """Whether a pod reads a model, as opposed to an engine's."""
    return READS_FOR_LABEL in (pod["metadata"].get("labels") or {})


def pods_of(pods: Sequence[Body], source: ModelSource) -> list[Body]:
    """Return the newest pod that reads this model; none while there is none."""
    mine = [pod for pod in pods if (pod["metadata"].get("annotations") or {}).get(MODEL_KEY_ANNOTATION) == source.key]
    return sorted(mine, key=lambda pod: str(pod["metadata"].get("creationTimestamp", "")))[-1:]


def _ended(pod: Body) -> Body | None:
    """How the reader ended last, this time or the time before."""
    for container in pod.get("status", {}).get("containerStatuses") or []:
        if container["name"] == CONTAINER:
            ended: Body | None = (container.get("state") or {}).get("terminated") or (
                container.get("lastState") or {}
            ).get("terminated")
            return ended
    return None


def _answer(ended: Body) -> Checkpoint | Blocked:
    """What the reader found, or why it found nothing."""
    message = str(ended.get("message") or "")
    if ended.get("reason") == "OOMKilled":
        return Blocked("OutOfMemory", "the reader needed more memory than its limit and was killed")
    try:
        return unpack(message)
    except CheckpointError as error:
        if message.startswith("{"):
            reason = error.reason if error.reason in _REMEDIES else "ReaderFailed"
            return Blocked(reason, error.message, permanent=reason in _ONLY_THE_USER)
        last_line = (message.strip() or "it said nothing").splitlines()[-1][:300]
        return Blocked("ReaderFailed", f"the reader ended with exit code {ended.get('exitCode')}: {last_line}")


def _told(blocked: Blocked, field: str, source: ModelSource) -> Blocked:
    """The blocked with the field, its value and the fix."""
    remedy = _REMEDIES.get(blocked.reason, "").format(field=field)
    parts = [f"{field}.model: {source}: {blocked.message}", *filter(None, [remedy])]
    if not blocked.permanent:
        parts.append("it is tried again by itself")
    return Blocked(blocked.reason, "; ".join(parts), blocked.permanent)


def _job(key: Key, uid: str, spec: SpecDecodeDeploymentSpec, profile: EngineProfile, source: ModelSource) -> Body:
    platform = Platform.CPU if spec.accelerator.type is AcceleratorType.CPU else Platform.GPU
    token = spec.models.hub_token_secret
    values: dict[str, Any] = {
        "labels": {MANAGED_BY_LABEL: MANAGER, READS_FOR_LABEL: key.name},
        "annotations": {MODEL_KEY_ANNOTATION: source.key},
        "container": CONTAINER,
        "image": spec.engine.image or profile.images[platform],
        # As an argument it needs no object of its own, and is always the one of this operator.
        "command": ["python3", "-c", _SCRIPT],
        "arguments": _arguments(source),
        "volume": {"name": "models", **models_volume(spec)} if source.on_volume else None,
        "hub_env": hub_environment(spec),
        "hub_token": secret_key(token) if token and not source.on_volume else None,
        "gpu_resource": None if platform is Platform.CPU else GPU_RESOURCE,
    }
    job = render_template("model-job", {"name": "", **values})
    template = job["spec"]["template"]
    template["spec"] = merge(template["spec"], _overlay(spec))
    # A Job's template cannot be changed: another one needs another name.
    digest = hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()
    job["metadata"]["name"] = f"{key.name}-facts-{digest[:_NAME_DIGITS]}"
    return owned(job, key, uid)


def _arguments(source: ModelSource) -> list[str]:
    if source.on_volume:
        return [f"--folder={model_path(source.model)}"]
    return [f"--hub={source.model}", *([f"--revision={source.revision}"] if source.revision else [])]


def _overlay(spec: SpecDecodeDeploymentSpec) -> Body:
    """What of the engines' podTemplate is for the reader too. It never is root: what root alone may read, it cannot."""
    given = (spec.pod_template.spec if spec.pod_template else None) or {}
    overlay: Body = {name: given[name] for name in _TAKEN_FROM_OVERLAY if name in given}
    security = given.get("securityContext")
    if isinstance(security, dict):
        user = {name: security[name] for name in _USER_FROM_OVERLAY if security.get(name)}
        overlay["securityContext"] = user
    return overlay
