"""Reconcile one SpecDecodeTraining: observe, decide, write, report."""

from dataclasses import replace

from pydantic import ValidationError

from specdecode_operator.api import base, capture, training
from specdecode_operator.api.base import Body
from specdecode_operator.api.deployment import Key, SpecDecodeDeploymentSpec
from specdecode_operator.api.deployment_status import ConditionStatus
from specdecode_operator.capture.gpu_sharing import serving_goes_first
from specdecode_operator.capture.job_status import is_to_start
from specdecode_operator.cluster.client import ClusterError, ForbiddenError
from specdecode_operator.cluster.drift import is_owned
from specdecode_operator.cluster.resources import CONFIG_MAP, JOB, PERSISTENT_VOLUME_CLAIM, POD, TRAINING_CHILDREN
from specdecode_operator.deployment.conditions import Blocked
from specdecode_operator.enums import Method
from specdecode_operator.handlers.apply_children import ChildNameTakenError, Children, what_blocks
from specdecode_operator.handlers.reconcile_job import JobReconciler, Shared, job_of
from specdecode_operator.training.decision import (
    blocked_by_cluster,
    decide,
    internal_error,
    not_observed,
    references_of,
)
from specdecode_operator.training.judge import judge_name
from specdecode_operator.training.observation import Training, TrainingObservation, read_training
from specdecode_operator.training.promotion import promoted_condition
from specdecode_operator.training.status import Decision, Writes, compose_status
from specdecode_operator.untrusted import mapping


class TrainingReconciler(JobReconciler):
    """Reconciles trainings for create, update, resume and resync."""

    def __init__(self, shared: Shared) -> None:
        super().__init__(shared)
        self._children: dict[Key, Children] = {}
        self._starting: dict[tuple[str, str], str] = {}
        """Trainings whose Job is being created, by namespace and claim."""

    async def reconcile(self, key: Key) -> None:
        """Reconcile one SpecDecodeTraining.

        Raises
        ------
        ClusterError
            If a request failed for a cause that the status cannot report; the queue retries.
        """
        body = self._cache.parent(key)
        if body is None or "deletionTimestamp" in body["metadata"]:
            self.forget(key)
            return
        now = self._cluster.clock.now()
        seen = read_training(body, now)
        try:
            decision = decide(seen, await self._observe(seen), now)
        except ForbiddenError as error:
            await self._report(seen, not_observed(seen, Blocked("Forbidden", str(error))))
            return
        except ClusterError:
            raise
        except Exception as error:
            await self._report(seen, internal_error(seen, error))
            raise
        status_is_current = seen.status.observed_generation == seen.generation
        readiness = await what_blocks(self._write(seen, decision.writes), status_is_current=status_is_current)
        if readiness is not None:
            decision = blocked_by_cluster(decision, readiness)
        await self._report(seen, decision)

    def forget(self, key: Key) -> None:
        """Drop the in-memory state of a training that was deleted, or that another operator serves."""
        self._children.pop(key, None)

    def _children_of(self, seen: Training) -> Children:
        known = self._children.get(seen.key)
        if known is None or known.uid != seen.uid:
            known = Children(self._cluster, self._cache, seen.key, seen.uid, TRAINING_CHILDREN)
            self._children[seen.key] = known
        return known

    async def _observe(self, seen: Training) -> TrainingObservation:
        """Observe the objects that a training depends on; objects without our labels are read only before it starts."""
        children = self._children_of(seen)
        job = job_of(children, seen.job_name)
        if job is None and seen.status.job is not None and seen.trained is None:
            job = await self._found_again(children, seen.job_name)
        claims = self._cache.children_of(seen.key, PERSISTENT_VOLUME_CLAIM.kind)
        pods = self._cache.children_of(seen.key, POD.kind)
        captures = self._cache.captures_of(seen.deployment_key)
        source = self._cache.parent(seen.deployment_key)
        trainings = self._cache.trainings_of(seen.deployment_key)
        is_better = (better := seen.condition("Better")) is not None and better.status is ConditionStatus.TRUE
        observed = TrainingObservation(
            job=job,
            pods=pods,
            claim=next((claim for claim in claims if claim["metadata"]["name"] == seen.job_name), None),
            judging=next((each for each in captures if _is_judge(each, seen)), None),
            operator_image=self._settings.operator_image,
            promoted=promoted_condition(seen, source, trainings) if is_better else None,
        )
        if observed.judging is None and source is not None and not seen.has_ended:
            written, in_force = (_parsed(each) for each in (source, self._deployments.in_force(source)))
            method = in_force.speculation.method if in_force and in_force.speculation else Method.NONE
            observed = replace(observed, written=written, served=method)
        if seen.trained is not None:
            return observed
        deployment = self._deployment(seen.deployment_key)
        if is_to_start(job, pods):
            goes_first = serving_goes_first(seen.deployment_key, self._servings.now(), self._cluster.clock.now())
            observed = replace(observed, goes_first=goes_first)
        if job is not None:
            return observed
        return await self._before_start(seen, replace(observed, deployment=deployment))

    async def _before_start(self, seen: Training, observed: TrainingObservation) -> TrainingObservation:
        """Add the objects that the checks before the start read."""
        sources, namespace = references_of(seen), seen.key.namespace
        captures = {
            name: self._cache.parent(Key(namespace, name, capture.KIND)) for name in dict.fromkeys(sources.captures)
        }
        claims = {mapping(each or {}, "status").get("claim") for each in captures.values()}
        observed = replace(
            observed,
            claim=await self._get(seen.key, PERSISTENT_VOLUME_CLAIM, sources.claim),
            captures=captures,
            capture_claims={
                str(name): await self._get(seen.key, PERSISTENT_VOLUME_CLAIM, str(name)) for name in claims if name
            },
            rows=await self._get(seen.key, CONFIG_MAP, sources.rows_config_map)
            or await self._get(seen.key, PERSISTENT_VOLUME_CLAIM, sources.rows_claim),
            starting_head=await self._get(seen.key, PERSISTENT_VOLUME_CLAIM, sources.head_claim),
        )
        # Last, because nothing is awaited between this and the start of the training.
        return replace(observed, rival=self._rival(seen, sources.claim))

    def _rival(self, seen: Training, claim: str | None) -> str | None:
        """Return another training that uses a claim; None without one."""
        starting = self._starting.get((seen.key.namespace, str(claim)))
        if starting not in (None, seen.key.name):
            return starting
        for key in self._cache.parents(training.KIND):
            if key.namespace != seen.key.namespace or key == seen.key or not self._cache.children_of(key, JOB.kind):
                continue
            other = read_training(self._cache.parent(key) or {})
            if other.trained is None and references_of(other).claim == claim:
                return key.name
        return None

    async def _write(self, seen: Training, writes: Writes) -> None:
        """Carry out the writes of a decision."""
        children = self._children_of(seen)
        if writes.job is not None:
            await self._start(seen, children, writes)
        else:
            await self._write_job(children, seen.job_name, writes)
        if writes.capture is not None:
            await self._judge(seen, writes.capture)
        if writes.resumed_capture is not None:
            live, suspend = writes.resumed_capture
            typed = {**live, "apiVersion": base.API_VERSION, "kind": capture.KIND}
            changed = await self._cluster.merge(typed, {"spec": {"suspend": suspend}})
            self._cache.put_parent(capture.KIND, changed)

    async def _start(self, seen: Training, children: Children, writes: Writes) -> None:
        """Create claim and Job. No other training starts on the claim meanwhile."""
        claim = str(references_of(seen).claim)
        self._starting[seen.key.namespace, claim] = seen.key.name
        try:
            await children.check_names([job for job in [writes.job] if job is not None])
            await self._write_job(children, seen.job_name, writes)
        finally:
            del self._starting[seen.key.namespace, claim]

    async def _judge(self, seen: Training, body: Body) -> None:
        """Create the capture that measures the head."""
        name = body["metadata"]["name"]
        live = self._cache.parent(Key(seen.key.namespace, name, capture.KIND))
        if live is not None:
            raise ChildNameTakenError(capture.KIND, name, leaving="deletionTimestamp" in live["metadata"])
        self._cache.put_parent(capture.KIND, await self._cluster.create(body))
        message = f"capture {name} measures the head on held-out prompts"
        self._children_of(seen).post_event("JudgementStarted", message)

    async def _report(self, seen: Training, decision: Decision) -> None:
        """Write the status if it changed, and post Events."""
        status = compose_status(seen, decision, self._cluster.clock.now())
        if status == seen.status and not seen.times_ahead:
            return
        children = self._children_of(seen)
        if await children.write_status(status):
            self._metrics.count_training(seen.status.phase, status.phase)
            children.post_times_ahead((*seen.times_ahead, *decision.times_ahead))
            children.post_changes(seen.status.conditions, status.conditions)


def _is_judge(capture: Body, training: Training) -> bool:
    return capture["metadata"]["name"] == judge_name(training) and is_owned(capture, training.uid)


def _parsed(deployment: Body) -> SpecDecodeDeploymentSpec | None:
    try:
        return SpecDecodeDeploymentSpec.parse(deployment["spec"], newer=True)
    except ValidationError:
        return None
