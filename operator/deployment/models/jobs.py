"""What the Jobs that read and download models have in common: how they are rendered, and how their pods are read.

A Job answers in the termination message of its pod. It is there only until the operator has kept the answer.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from specdecode_operator.api.base import Body
from specdecode_operator.api.deployment import SpecDecodeDeploymentSpec
from specdecode_operator.api.key import Key
from specdecode_operator.deployment.blocked import Blocked
from specdecode_operator.deployment.pods.blocked_pods import blocked_pod
from specdecode_operator.deployment.pods.engine_errors import telling_line
from specdecode_operator.deployment.spec.facts import platform_of
from specdecode_operator.deployment.spec.model_sources import ModelSource
from specdecode_operator.deployment.spec.model_storage import hub_environment
from specdecode_operator.deployment.spec.pod_template_merge import merge
from specdecode_operator.engine.settings import Platform
from specdecode_operator.kube.labels import MANAGED_BY_LABEL, MANAGER, READS_FOR_LABEL
from specdecode_operator.kube.manifests import content_hash, owned, render_template
from specdecode_operator.kube.nodes import GPU_RESOURCE

RESOLVING, DOWNLOADING = "ResolvingModel", "DownloadingModels"
"""Reasons of an object that waits for them."""

WITHOUT_POD: Final = "where a quota or a policy refuses its pod, kubectl describe job tells"
"""What is to be known of a Job of which no pod comes: its controller says so in Events alone."""

_NAME_DIGITS: Final = 4

_Answer = TypeVar("_Answer")


@dataclass(frozen=True)
class ModelJob(Generic[_Answer]):
    """One kind of Job for models; ``_Answer`` is what its script finds."""

    template: str
    container: str
    name_suffix: str

    command: Sequence[str]
    """What runs in its image."""

    key_annotation: str
    """Annotation of its pods with the key of the model."""

    patch: Callable[[Body], Body]
    """Returns what of a podTemplate's spec holds for its pods too."""

    values: Callable[[SpecDecodeDeploymentSpec, ModelSource], dict[str, Any]]
    """Returns what its template takes beside the common values."""

    remedies: Mapping[str, str]
    """What to do, by the reason that the script gives."""

    read: Callable[[Body], _Answer | Blocked]
    """Reads the answer of a container that has terminated."""

    place: Callable[[ModelSource], str] = str
    """How a model is named in messages."""

    def answers(self, pods: Sequence[Body], sources: Mapping[str, ModelSource]) -> dict[ModelSource, _Answer]:
        """Return what the pods have found."""
        found = {}
        for source in sources.values():
            terminated = self._terminated(self._pod(pods, source))
            if terminated is not None and terminated.get("exitCode") == 0:
                answer = self.read(terminated)
                if not isinstance(answer, Blocked):
                    found[source] = answer
        return found

    def blocked(self, pods: Sequence[Body], sources: Mapping[str, ModelSource]) -> Blocked | None:
        """Return why there is no answer for the first of these models that fails, with its field and what to do."""
        for field, source in sources.items():
            pod = self._pod(pods, source)
            if pod is None:
                continue
            terminated = self._terminated(pod)
            answer = blocked_pod(pod) if terminated is None else self.read(terminated)
            if isinstance(answer, Blocked):
                what = f"{field}.model: {self.place(source)}: {answer.message}"
                remedy = self.remedies.get(answer.reason, "").format(field=field, claim=source.claim)
                again = "" if answer.permanent else "it is tried again by itself"
                message = "; ".join(filter(None, [what, remedy, again]))
                return Blocked(answer.reason, message, answer.permanent)
        return None

    def render(self, key: Key, uid: str, spec: SpecDecodeDeploymentSpec, image: str, source: ModelSource) -> Body:
        """Return the Job for one model."""
        common = {
            "name": "",
            "labels": {MANAGED_BY_LABEL: MANAGER, READS_FOR_LABEL: key.name},
            "annotations": {self.key_annotation: source.key},
            "container": self.container,
            "image": image,
            "command": [*self.command],
            "hub_env": hub_environment(spec),
            "gpu_resource": None if platform_of(spec) is Platform.CPU else GPU_RESOURCE,
        }
        job = render_template(self.template, {**common, **self.values(spec, source)})
        template = job["spec"]["template"]
        given = (spec.pod_template.spec if spec.pod_template else None) or {}
        template["spec"] = merge(template["spec"], self.patch(given))
        # A Job's template cannot be changed: another one needs another name.
        job["metadata"]["name"] = f"{key.name}-{self.name_suffix}-{content_hash(template)[:_NAME_DIGITS]}"
        return owned(job, key, uid)

    def progress(self, pods: Sequence[Body], sources: Mapping[str, ModelSource]) -> str:
        """Return what the first of these Jobs that has no answer waits for, or that it runs."""
        for source in sources.values():
            pod = self._pod(pods, source)
            if pod is None:
                return WITHOUT_POD
            if self._terminated(pod) is None:
                return self._stage(pod)
        return "its answer is read next"

    def _stage(self, pod: Body) -> str:
        """Return what a pod waits for that nothing blocks, or that its container runs."""
        status = pod.get("status") or {}
        conditions = {each["type"]: each["status"] for each in status.get("conditions") or []}
        for container in status.get("containerStatuses") or []:
            if container["name"] == self.container and "running" in (container.get("state") or {}):
                return "its container runs"
        if conditions.get("PodScheduled") != "True":
            return "its pod waits for a node"
        spec = pod.get("spec") or {}
        image = next((each["image"] for each in spec.get("containers") or [] if each["name"] == self.container), "")
        volumes = [volume for volume in spec.get("volumes") or [] if "emptyDir" not in volume]
        return f"its node pulls image {image}{' and mounts the volume of the models' if volumes else ''}"

    def _pod(self, pods: Sequence[Body], source: ModelSource) -> Body | None:
        """Return the newest pod for a model; of those of one second the last."""
        mine = [
            pod for pod in pods if (pod["metadata"].get("annotations") or {}).get(self.key_annotation) == source.key
        ]
        ordered = sorted(mine, key=lambda pod: str(pod["metadata"].get("creationTimestamp", "")))
        return ordered[-1] if ordered else None

    def _terminated(self, pod: Body | None) -> Body | None:
        """Return how the container terminated last, this time or the time before."""
        for status in (pod or {}).get("status", {}).get("containerStatuses") or []:
            if status["name"] == self.container:
                now, before = status.get("state") or {}, status.get("lastState") or {}
                terminated: Body | None = now.get("terminated") or before.get("terminated")
                return terminated
        return None


def last_words(terminated: Body) -> str:
    """Return how a container ended that gave no answer: its exit code, and the line of its log that says most."""
    return f"ended with exit code {terminated.get('exitCode')}: {telling_line(str(terminated.get('message') or ''))}"


def is_model_pod(pod: Body) -> bool:
    """Whether a pod reads or downloads a model, as opposed to an engine's."""
    return READS_FOR_LABEL in (pod["metadata"].get("labels") or {})
