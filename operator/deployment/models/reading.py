"""The Job that reads a model's config.json and safetensors headers, and what its pod found."""

from collections.abc import Mapping
from typing import Any, Final

from specdecode_operator.api.base import Body
from specdecode_operator.api.deployment import SpecDecodeDeploymentSpec
from specdecode_operator.api.key import Key
from specdecode_operator.deployment.blocked import Blocked
from specdecode_operator.deployment.models.jobs import ModelJob, last_words
from specdecode_operator.deployment.spec.model_sources import ModelSource
from specdecode_operator.deployment.spec.model_storage import model_path, models_volume
from specdecode_operator.kube.labels import MODEL_KEY_ANNOTATION
from specdecode_operator.kube.manifests import secret_key
from specdecode_operator.resolver.answer import unpack
from specdecode_operator.resolver.read_model_facts import Checkpoint, CheckpointError

_FROM_POD_TEMPLATE: Final = ("imagePullSecrets", "nodeSelector", "tolerations", "affinity", "priorityClassName")
"""What decides where an engine may run, and whether its image can be had."""

_USER_FIELDS: Final = ("runAsUser", "runAsGroup", "fsGroup", "supplementalGroups", "seLinuxOptions")

_REMEDIES: Final = {
    "ModelNotFound": "correct the path, or put the model there",
    "ModelNotReadable": "make it readable, or set runAsUser or fsGroup in spec.podTemplate.spec.securityContext",
    "ConfigUnreadable": "mend the file, or put its content into {field}.config",
    "ConfigTooLong": "put what describes the model's shape into {field}.config",
    "WeightsNotFound": "complete the model: put its safetensors files there",
    "WeightsUnreadable": "copy or download the file anew",
    "HubRefused": "check the name, the model's licence and spec.models.hubTokenSecret",
    "HubUnreachable": "let pods reach the hub, name a volume in spec.models, or put config.json into {field}.config",
    "ImagePullFailed": "it is the operator's own image: name its pull secret in spec.podTemplate.spec.imagePullSecrets",
    "ReaderTimedOut": "look whether the volume or the hub answers, or put config.json into {field}.config",
    "ReaderFailed": "kubectl logs of its pod tells more; or put the content of config.json into {field}.config",
}
"""What to do, by the reason that the reader gives."""

_ONLY_THE_USER: Final = frozenset({"ConfigUnreadable", "ConfigTooLong"})
"""The others may pass: a volume that is being filled, a hub that does not answer, a licence that is granted."""


def reading_jobs(
    key: Key, uid: str, spec: SpecDecodeDeploymentSpec, operator_image: str, sources: Mapping[str, ModelSource]
) -> list[Body]:
    """Return a Job for each model; one that is target and draft is read once."""
    return [READER.render(key, uid, spec, operator_image, source) for source in dict.fromkeys(sources.values())]


def _values(spec: SpecDecodeDeploymentSpec, source: ModelSource) -> dict[str, Any]:
    if source.on_volume:
        return {
            "arguments": ["folder", "--", model_path(source.model)],
            "volume": {"name": "models", **models_volume(spec)},
            "hub_token": None,
        }
    return {
        "arguments": ["hub", *([f"--revision={source.revision}"] if source.revision else []), "--", source.model],
        "volume": None,
        "hub_token": secret_key(spec.models.hub_token_secret),
    }


def _patch(given: Body) -> Body:
    """It never is root: what root alone may read, it cannot."""
    patch: Body = {name: given[name] for name in _FROM_POD_TEMPLATE if name in given}
    security = given.get("securityContext")
    if isinstance(security, dict):
        patch["securityContext"] = {name: security[name] for name in _USER_FIELDS if security.get(name)}
    return patch


def _checkpoint(terminated: Body) -> Checkpoint | Blocked:
    message = str(terminated.get("message") or "")
    if terminated.get("reason") == "OOMKilled":
        return Blocked("OutOfMemory", "the reader needed more memory than its limit and was killed")
    try:
        return unpack(message)
    except CheckpointError as error:
        if message.startswith("{"):
            reason = error.reason if error.reason in _REMEDIES else "ReaderFailed"
            return Blocked(reason, error.message, permanent=reason in _ONLY_THE_USER)
        return Blocked("ReaderFailed", f"the reader {last_words(terminated)}")


READER: Final = ModelJob(
    template="model-job",
    container="read-model",
    name_suffix="facts",
    command=("specdecode", "read-model"),
    key_annotation=MODEL_KEY_ANNOTATION,
    patch=_patch,
    values=_values,
    remedies=_REMEDIES,
    read=_checkpoint,
)
