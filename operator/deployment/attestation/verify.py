"""Compare live objects with an attested rollout; return the compared parts and each difference."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from specdecode_operator.api import deployment
from specdecode_operator.api.base import Body
from specdecode_operator.cluster.resources import COMPUTES_FOR_LABEL, DEPLOYMENT_LABEL, POD
from specdecode_operator.deployment.attestation.statement import Container, Pods, Rollout, digest, pods_of
from specdecode_operator.deployment.rollout.engine_workload import WORKLOAD_KINDS, pod_templates
from specdecode_operator.problems import shown, shown_or_missing
from specdecode_operator.untrusted import mapping, objects

CHECKED: Final = (deployment.KIND, *sorted(WORKLOAD_KINDS), POD.kind)
"""Kinds of objects that can be compared with an attestation."""


_OF_CONTAINERS: Final = {
    "image": "image",
    "command": "command",
    "args": "args",
    "environment_sha256": "env (SHA-256)",
    "commands_sha256": "commands of hooks and probes (SHA-256)",
    "files_sha256": "volumes and workingDir (SHA-256)",
    "termination_message_path": "terminationMessagePath",
    "terminal": "stdin, stdinOnce, tty",
    "restart_policy": "restartPolicy",
}
"""Attested fields of a container, and their names in its manifest."""


class Difference(NamedTuple):
    """One field that is not as attested."""

    field: str
    attested: Any
    found: Any

    def __str__(self) -> str:
        """One line that names all three."""
        attested = "nothing" if self.attested is None else shown(self.attested)
        return f"{self.field}: {shown_or_missing(self.found)}: {attested} is attested"


@dataclass(frozen=True)
class Compared:
    """Comparison of one object with an attestation."""

    looked_at: str
    """Compared parts, for people."""

    differences: tuple[Difference, ...]


def compared(rollouts: Sequence[Rollout], body: Body) -> Compared:
    """Return how an object of `CHECKED` differs from the newest of some rollouts of one SpecDecodeDeployment.

    A pod may match any rollout, because pods of an earlier one run until its successor is ready.
    """
    newest = max(rollouts, key=lambda each: each.age)
    foreign = tuple(_foreign(newest, body))
    if body.get("kind") == deployment.KIND:
        return Compared("spec, plan, KV cache", foreign or tuple(_of_object(newest, body)))
    if body.get("kind") in WORKLOAD_KINDS:
        found = tuple(pods_of(template) for template in _templates(body))
        return Compared("containers", foreign or tuple(_of_pods(newest.pods, found)))
    own = pods_of(body)
    of_pod = next((each for each in rollouts if own in each.pods), None)
    if of_pod is None:
        return Compared("containers", foreign or pod_differences(newest, own))
    # The kubelet learns digests one by one; without a status none are compared.
    running = {each.name for each in (*own.init_containers, *own.containers)}
    by_digest = of_pod.served and running == {name for name, _ in images_of(body)}
    looked_at = "containers, images by digest" if by_digest else "containers"
    return Compared(looked_at, foreign or tuple(_of_images(of_pod, body)))


def pod_differences(rollout: Rollout, own: Pods) -> tuple[Difference, ...]:
    """Return how a pod differs from the most similar pods of a rollout; empty if it matches."""
    none = (Difference("templates of pods", 0, 1),)
    return min((tuple(_of_pods([each], [own])) for each in rollout.pods), key=len, default=none)


def _foreign(rollout: Rollout, body: Body) -> Iterator[Difference]:
    """Yield differences in namespace and deployment."""
    metadata = mapping(body, "metadata")
    yield from _differs("metadata.namespace", rollout.object.namespace, metadata.get("namespace"))
    if body.get("kind") == deployment.KIND:
        yield from _differs("metadata.name", rollout.object.name, metadata.get("name"))
        return
    labels = mapping(metadata, "labels")
    owner = labels.get(DEPLOYMENT_LABEL, labels.get(COMPUTES_FOR_LABEL))
    yield from _differs(f"metadata.labels[{DEPLOYMENT_LABEL}]", rollout.object.name, owner)


def _of_object(rollout: Rollout, body: Body) -> Iterator[Difference]:
    metadata, status = mapping(body, "metadata"), mapping(body, "status")
    yield from _differs("metadata.uid", rollout.object.uid, metadata.get("uid"))
    yield from _differs("metadata.generation", rollout.object.generation, metadata.get("generation"))
    yield from _differs("spec (SHA-256)", rollout.object.spec_sha256, digest(mapping(body, "spec")))
    draft = mapping(status, "trainedDraft").get("sha256")
    yield from _differs("status.trainedDraft.sha256", rollout.object.trained_draft_sha256, draft)
    plan = mapping(status, "plan")
    for name in sorted({*rollout.plan, *plan}):
        yield from _differs(f"status.plan.{name}", rollout.plan.get(name), plan.get(name))
    if rollout.served is not None:
        memory, observed = rollout.served.kv_cache, mapping(status, "observed")
        yield from _differs("status.observed.kvCacheTokens", memory.reported_tokens, observed.get("kvCacheTokens"))
        residual = observed.get("kvCacheResidualBytes")
        yield from _differs("status.observed.kvCacheResidualBytes", memory.residual_bytes, residual)


def _templates(workload: Body) -> list[Body]:
    try:
        return [each for each in pod_templates(workload) if isinstance(each, dict)]
    except (KeyError, TypeError, AttributeError):
        return []


def _of_pods(attested: Sequence[Pods], found: Sequence[Pods]) -> Iterator[Difference]:
    yield from _differs("templates of pods", len(attested), len(found))
    for pods, others in zip(attested, found, strict=False):
        told = [*_differs("enableServiceLinks", pods.service_links, others.service_links)]
        told += _of_containers(pods, others)
        # The order of the containers is also attested.
        yield from told or _differs("pods (SHA-256)", pods.sha256, others.sha256)


def _of_containers(pods: Pods, others: Pods) -> Iterator[Difference]:
    for field in ("init_containers", "containers"):
        wanted = {each.name: each for each in getattr(pods, field)}
        there = {each.name: each for each in getattr(others, field)}
        for name in dict.fromkeys([*wanted, *there]):
            yield from _of_container(name, wanted.get(name), there.get(name))


def _of_container(name: str, wanted: Container | None, there: Container | None) -> Iterator[Difference]:
    if wanted is None or there is None:
        yield from _differs(f"container {name}", wanted and "a container of this name", there and there.image)
        return
    for field, label in _OF_CONTAINERS.items():
        yield from _differs(f"container {name}: {label}", getattr(wanted, field), getattr(there, field))


def _of_images(rollout: Rollout, pod: Body) -> Iterator[Difference]:
    if rollout.served is None:
        return
    attested: dict[str, set[str]] = {}
    for image in rollout.served.images:
        attested.setdefault(image.container, set()).add(image.digest)
    for container, found in images_of(pod):
        if found not in attested.get(container, set()):
            wanted = " or ".join(sorted(attested.get(container, set()))) or None
            yield from _differs(f"container {container}: image's digest", wanted, found)


def images_of(pod: Body) -> Iterator[tuple[str, str]]:
    """Yield container and image digest as the kubelet reports them, without digests that it does not know yet."""
    status = mapping(pod, "status")
    for each in (*objects(status, "initContainerStatuses"), *objects(status, "containerStatuses")):
        _, _, value = str(each.get("imageID") or "").rpartition("sha256:")
        if value:
            yield str(each.get("name")), f"sha256:{value}"


def _differs(field: str, attested: Any, found: Any) -> Iterator[Difference]:
    if attested != found:
        yield Difference(field, attested, found)
