"""Reads and writes that captures and trainings share: of a deployment, a claim and a Job."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specdecode_operator.api.base import Body
from specdecode_operator.api.deployment import Key
from specdecode_operator.capture.gpu_sharing import holds_gpus, preempting_capture
from specdecode_operator.capture.observation import ObservedDeployment
from specdecode_operator.capture.status import JobWrites
from specdecode_operator.cluster.cache import Cache
from specdecode_operator.cluster.client import Cluster
from specdecode_operator.cluster.drift import is_owned
from specdecode_operator.cluster.manifests import child_labels
from specdecode_operator.cluster.resources import DEPLOYMENT, JOB, PERSISTENT_VOLUME_CLAIM, POD, Resource
from specdecode_operator.deployment.desired_state import DesiredState
from specdecode_operator.deployment.models.model_jobs import is_model_pod
from specdecode_operator.deployment.parsed_deployment import engine_spec_hash
from specdecode_operator.handlers.apply_children import Children
from specdecode_operator.handlers.metrics import OperatorMetrics
from specdecode_operator.handlers.reconcile_deployment import Reconciler
from specdecode_operator.handlers.settings import Settings
from specdecode_operator.problems import InvalidSpecError
from specdecode_operator.untrusted import mapping

Arms = Callable[[Body, DesiredState], Sequence[DesiredState]]
"""Returns the desired state of a deployment with each arm of a capture."""


def engine_pods(cache: Cache, key: Key) -> list[Body]:
    """Return the pods of a deployment's engines."""
    return [pod for pod in cache.children_of(key, POD.kind) if not is_model_pod(pod)]


@dataclass(frozen=True)
class Shared:
    """Parts of the operator that both reconcilers use."""

    cluster: Cluster
    cache: Cache
    deployments: Reconciler
    metrics: OperatorMetrics
    settings: Settings


class JobReconciler:
    """Reads and writes for an object with a Job; its subclasses reconcile captures and trainings."""

    def __init__(self, shared: Shared) -> None:
        self.shared = shared
        self._cluster, self._cache, self._deployments = shared.cluster, shared.cache, shared.deployments
        self._metrics, self._settings = shared.metrics, shared.settings

    async def _get(self, key: Key, resource: Resource, name: str | None) -> Body | None:
        """Return an object in the namespace of a parent; None if it does not exist."""
        return await self._cluster.get(resource, key.namespace, name) if name else None

    async def _found_again(self, children: Children, name: str) -> Body | None:
        """Return the Job that the status names if no watch reports it because its labels were removed; None without it.

        Its labels are restored, and the Job continues unchanged.
        """
        live = await self._get(children.key, JOB, name)
        if live is None or not is_owned(live, children.uid):
            return None
        labels = child_labels(children.key)
        self._cache.put(JOB.kind, await self._cluster.merge(live, {"metadata": {"labels": labels}}))
        return job_of(children, name)

    def _deployment(self, key: Key, besides: str | None = None, arms: Arms | None = None) -> ObservedDeployment | None:
        """Return a deployment as captures and trainings see it; None if it is missing or being deleted.

        Parameters
        ----------
        key
            Key of the deployment.
        besides
            Name of the observing capture, which may itself hold the deployment's GPUs.
        arms
            Arms of the observing capture, if they are needed.
        """
        body = self._cache.parent(key)
        if body is None or "deletionTimestamp" in body["metadata"]:
            return None
        parent, desired = self._deployments.desired_state_of(body)
        now, spec = self._cluster.clock.now(), mapping(body, "spec")
        holder = preempting_capture(self._cache.captures_of(key))
        engines = [each for each in self._cache.children_of(key, DEPLOYMENT.kind) if is_owned(each, parent.uid)]
        plan, own = desired.outcome.plan_status, parent.spec
        return ObservedDeployment(
            key=key,
            uid=parent.uid,
            generation=parent.generation,
            desired=desired,
            arms=arms(body, desired) if arms else (),
            engine=None if isinstance(own, InvalidSpecError) else engine_spec_hash(own, plan),
            engines_wanted=sum(each["spec"].get("replicas", 1) for each in engines),
            pods=[pod for pod in engine_pods(self._cache, key) if holds_gpus(pod, now)],
            wants_engines=not spec.get("suspend") and spec.get("replicas", 1) != 0,
            serves=any(map(_serves, engines)),
            lent_to=holder if holder != besides else None,
        )

    async def _write_job(self, children: Children, name: str, writes: JobWrites) -> None:
        """Write the claim and the Job of an object, which have the same name."""
        if writes.claim is not None:
            self._cache.put(PERSISTENT_VOLUME_CLAIM.kind, await self._cluster.apply_new(writes.claim))
        if writes.claim_metadata:
            metadata = {"namespace": children.key.namespace, "name": name}
            claim = {"kind": PERSISTENT_VOLUME_CLAIM.kind, "metadata": metadata}
            changed = await self._cluster.merge(claim, {"metadata": writes.claim_metadata})
            self._cache.put(PERSISTENT_VOLUME_CLAIM.kind, changed)
        if writes.job is not None:
            await children.create(writes.job)
        live = job_of(children, name)
        if live is not None and writes.job_suspended is not None:
            self._cache.put(JOB.kind, await self._cluster.merge(live, {"spec": {"suspend": writes.job_suspended}}))
        if live is not None and writes.remove_job:
            await children.delete(live)


def job_of(children: Children, name: str) -> Body | None:
    """Return the Job of an object; None without it."""
    return children.owned().get((JOB.kind, name))


def _serves(engines: Body) -> bool:
    """Whether engines of a Deployment serve, according to its controller and its current generation."""
    status = mapping(engines, "status")
    is_current = status.get("observedGeneration", 0) >= engines["metadata"].get("generation", 0)
    return bool(is_current and engines["spec"].get("replicas", 1) and status.get("availableReplicas"))
