"""Reconcile one SpecDecodeCapture: observe, decide, write, report.

A capture may wait until engines of other deployments have their GPUs. It may also wait for a ResourceQuota that
will have room after the engines whose GPUs it borrows have stopped. The quota arithmetic reads the API server's message
(apiserver/pkg/admission/plugin/resourcequota/controller.go).
"""

import logging
import re
import secrets
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from decimal import Decimal
from functools import partial
from typing import Any, Final

from pydantic import ValidationError

from specdecode_operator.api import base
from specdecode_operator.api.base import Body
from specdecode_operator.api.capture import KIND, SpecDecodeCaptureSpec
from specdecode_operator.api.deployment import Key
from specdecode_operator.capture.arms import arm_states, asked_arms
from specdecode_operator.capture.decision import (
    References,
    blocked_by_cluster,
    decide,
    internal_error,
    not_observed,
    references_of,
)
from specdecode_operator.capture.gpu_sharing import (
    borrows,
    is_held,
    is_unsettled,
    serving_goes_first,
)
from specdecode_operator.capture.job_status import is_suspended, is_to_start
from specdecode_operator.capture.live_capture import ready_pods, recorded_first
from specdecode_operator.capture.observation import (
    Capture,
    CaptureObservation,
    MountedObjects,
    ObservedDeployment,
    read_capture,
)
from specdecode_operator.capture.status import Decision, Writes, compose_status, is_outlived
from specdecode_operator.capture.volumes import mounted_names
from specdecode_operator.cluster.client import (
    ClusterError,
    DeniedError,
    ForbiddenError,
    InvalidObjectError,
    RefusedForNowError,
    UntriableError,
)
from specdecode_operator.cluster.drift import is_owned
from specdecode_operator.cluster.quantities import quantity
from specdecode_operator.cluster.resources import (
    CAPTURE_CHILDREN,
    CONFIG_MAP,
    DEPLOYMENT,
    JOB,
    PERSISTENT_VOLUME_CLAIM,
    POD,
    STORAGE_CLASS,
    Resource,
)
from specdecode_operator.cluster.storage_classes import StorageClasses
from specdecode_operator.deployment.conditions import Blocked
from specdecode_operator.deployment.desired_state import DesiredState
from specdecode_operator.deployment.live_recorder import order_name
from specdecode_operator.handlers.apply_children import BlockedError, ChildNameTakenError, Children, what_blocks
from specdecode_operator.handlers.decision_cache import DecisionCache
from specdecode_operator.handlers.reconcile_job import JobReconciler, Shared, engine_pods, job_of
from specdecode_operator.untrusted import mapping, objects

_EXCEEDED: Final = re.compile(
    r"exceeded quota: [^,]*, requested: (?P<requested>[^ ]*), used: (?P<used>[^ ]*), limited: (?P<limited>[^ ]*)"
)
"""Message with which the API server rejects a pod (apiserver/pkg/admission/plugin/resourcequota/controller.go)."""

Amounts = Mapping[str, Decimal]
"""Amounts by their names in quotas, such as ``requests.nvidia.com/gpu``."""


def quota_usage(pod_spec: Mapping[str, Any]) -> dict[str, Decimal]:
    """Return the quota usage of a pod without init containers and overhead, a lower bound of what it frees."""
    found = {"pods": Decimal(1), "count/pods": Decimal(1)}
    for container in objects(pod_spec, "containers"):
        resources = mapping(container, "resources")
        limits = mapping(resources, "limits")
        for name, text in {**limits, **mapping(resources, "requests")}.items():
            for called in (name, f"requests.{name}"):
                found[called] = found.get(called, Decimal(0)) + (quantity(text) or Decimal(0))
        for name, text in limits.items():
            called = f"limits.{name}"
            found[called] = found.get(called, Decimal(0)) + (quantity(text) or Decimal(0))
    return found


def has_room_without(refusal: str, freed: Amounts) -> bool | None:
    """Return whether a quota would accept a rejected pod after others have ended; None if the message is unclear."""
    found = _EXCEEDED.search(refusal)
    if found is None:
        return None
    requested, used, limited = (_amounts(found[name]) for name in ("requested", "used", "limited"))
    if not requested or requested.keys() - used.keys() or requested.keys() - limited.keys():
        return None
    return all(used[name] - freed.get(name, Decimal(0)) + amount <= limited[name] for name, amount in requested.items())


def _amounts(text: str) -> dict[str, Decimal]:
    """Parse amounts of a rejection: ``pods=3,requests.nvidia.com/gpu=8``."""
    pairs = (each.partition("=") for each in text.split(","))
    read = {name: quantity(value) for name, _, value in pairs}
    return {name: value for name, value in read.items() if value is not None}


_logger = logging.getLogger(__name__)

_UNSEEN: Final[Body] = {}
"""Placeholder for an object that the operator may not read."""


@dataclass
class Record:
    """In-memory state of one capture between reconciles."""

    children: Children
    arms: defaultdict[int, DecisionCache] = field(default_factory=lambda: defaultdict(DecisionCache))
    """Decisions about each arm, by its number, before the capture starts."""
    token: str = field(default_factory=lambda: secrets.token_hex(32))
    """Token of the Job of a live capture. It stays the same if the Job's creation is retried."""


class CaptureReconciler(JobReconciler):
    """Reconciles captures for create, update, resume and resync."""

    def __init__(self, shared: Shared) -> None:
        super().__init__(shared)
        self._records: dict[Key, Record] = {}

    async def reconcile(self, key: Key) -> None:
        """Reconcile one SpecDecodeCapture.

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
        capture = read_capture(body, now)
        if is_outlived(capture, now, self._cluster.clock.agreed_s()):
            await self._cluster.delete({**body, "apiVersion": base.API_VERSION, "kind": key.kind})
            return
        try:
            decision = decide(capture, await self._observe(capture), now)
        except ForbiddenError as error:
            await self._report(capture, not_observed(capture, Blocked("Forbidden", str(error)), now))
            return
        except ClusterError:
            raise
        except Exception as error:
            await self._report(capture, internal_error(capture, error, now))
            raise
        status_is_current = capture.status.observed_generation == capture.generation
        readiness = await what_blocks(self._write(capture, decision.writes), status_is_current=status_is_current)
        if readiness is not None:
            decision = blocked_by_cluster(capture, decision, readiness)
        await self._report(capture, decision)

    def forget(self, key: Key) -> None:
        """Drop the in-memory state of a capture that was deleted, or that another operator serves."""
        self._records.pop(key, None)

    def _record(self, capture: Capture) -> Record:
        record = self._records.get(capture.key)
        if record is None or record.children.uid != capture.uid:
            children = Children(self._cluster, self._cache, capture.key, capture.uid, CAPTURE_CHILDREN)
            record = self._records[capture.key] = Record(children)
        return record

    async def _observe(self, capture: Capture) -> CaptureObservation:
        """Observe the objects that a capture depends on; objects without our labels are read only before it starts."""
        job = self._job(capture)
        if job is None and capture.status.job is not None and capture.ended is None:
            job = await self._found_again(self._record(capture).children, capture.job_name)
        claims = self._cache.children_of(capture.key, PERSISTENT_VOLUME_CLAIM.kind)
        pods = self._cache.children_of(capture.key, POD.kind)
        if job is not None or capture.ended is not None:
            self._record(capture).arms.clear()
        is_of_interest = capture.ended is None or is_unsettled(capture.status.borrow)
        goes_first = None
        if capture.is_live:
            goes_first = self._recorded_first(capture) if is_to_start(job, pods) and capture.ended is None else None
        elif is_to_start(job, pods) and not borrows(capture.spec) and capture.ended is None:
            goes_first = serving_goes_first(capture.deployment_key, self._servings.now(), self._cluster.clock.now())
        observed = CaptureObservation(
            deployment=self._captured(capture, starts=job is None) if is_of_interest else None,
            job=job,
            pods=pods,
            claim=next((claim for claim in claims if claim["metadata"]["name"] == capture.job_name), None),
            goes_first=goes_first,
            operator_image=self._settings.operator_image,
            token=self._record(capture).token,
            token_ids_allowed=self._settings.token_ids_allowed(capture.key.namespace),
        )
        if capture.ended is not None:
            return observed
        sources = references_of(capture)
        if borrows(capture.spec) and (is_suspended(job) or not is_held(capture.status.borrow)):
            observed = replace(observed, mounted=await self._mounted(capture, job, sources))
        if job is not None:
            return observed
        return replace(
            observed,
            claim=await self._get(capture.key, PERSISTENT_VOLUME_CLAIM, sources.claim),
            golden=self._cache.parent(Key(capture.key.namespace, sources.golden, KIND)) if sources.golden else None,
            dataset=await self._get(capture.key, CONFIG_MAP, sources.dataset_config_map)
            or await self._get(capture.key, PERSISTENT_VOLUME_CLAIM, sources.dataset_claim),
        )

    def _recorded_first(self, capture: Capture) -> str | None:
        captures = self._cache.captures_of(capture.deployment_key)
        keys = (Key(capture.key.namespace, each["metadata"]["name"], KIND) for each in captures)
        jobs = {key.name: self._cache.children_of(key, JOB.kind) for key in keys}
        begun = [name for name, owned in jobs.items() if any(not is_suspended(each) for each in owned)]
        return recorded_first(capture, captures, begun, ready_pods(engine_pods(self._cache, capture.deployment_key)))

    async def _mounted(self, capture: Capture, job: Body | None, sources: References) -> MountedObjects:
        """Return the mounts of a capture's pod; before the Job exists, the existing objects that the spec names."""
        claim_names, map_names = [each for each in (sources.claim, sources.dataset_claim) if each], list[str]()
        if job is not None:
            claim_names, map_names = mounted_names(mapping(mapping(job["spec"], "template"), "spec"))
        claims = {name: await self._seen(capture, PERSISTENT_VOLUME_CLAIM, name) for name in claim_names}
        config_maps = {name: await self._seen(capture, CONFIG_MAP, name) for name in map_names}
        classes = None  # If namespaces are named, the operator may not list them.
        if not self._settings.namespaces:
            with suppress(ForbiddenError):
                classes = StorageClasses.of((await self._cluster.list(STORAGE_CLASS))[0])
        return MountedObjects(
            {name: body for name, body in claims.items() if body is not _UNSEEN and (body or job is not None)},
            {name: body for name, body in config_maps.items() if body is not _UNSEEN},
            classes,
        )

    async def _seen(self, capture: Capture, resource: Resource, name: str) -> Body | None:
        try:
            return await self._get(capture.key, resource, name)
        except ForbiddenError:
            return _UNSEEN

    def _job(self, capture: Capture) -> Body | None:
        return job_of(self._record(capture).children, capture.job_name)

    def _captured(self, capture: Capture, *, starts: bool) -> ObservedDeployment | None:
        arms = partial(self._arm_states, capture) if starts else None
        return self._deployment(capture.deployment_key, capture.key.name, arms)

    def _arm_states(self, capture: Capture, body: Body, desired: DesiredState) -> list[DesiredState]:
        """Return the desired state of the deployment with each arm; empty without arms or if the spec is invalid."""
        try:
            spec = SpecDecodeCaptureSpec.parse(capture.spec, newer=True)
        except ValidationError:
            return []
        if not asked_arms(spec):
            return []
        decide_on, decisions = self._deployments.decider_of_arms(capture.key.namespace), self._record(capture).arms
        return arm_states(spec, body, desired.outcome, lambda arm, changed: decide_on(changed, decisions[arm]))

    async def _write(self, capture: Capture, writes: Writes) -> None:
        """Carry out the writes of a decision."""
        children = self._record(capture).children
        await self._check(capture, writes)
        await self._write_job(children, capture.job_name, writes)
        if capture.is_live:
            await self._write_order(capture, writes.live_order)
        if writes.image_id is not None:
            await self._write_image_id(capture, writes.image_id)

    async def _check(self, capture: Capture, writes: Writes) -> None:
        """Raise before the first write if the Job could not be created, so that no objects are left behind."""
        if writes.trial_pod is not None:
            await self._try(capture, writes.trial_pod)
        if writes.job is not None:
            await self._record(capture).children.check_names([writes.job])
        if writes.job is not None and capture.is_live:
            await self._check_order_name(capture)

    async def _write_image_id(self, capture: Capture, config_map: Body) -> None:
        try:
            await self._record(capture).children.apply([config_map])
        except (ClusterError, BlockedError) as error:
            _logger.warning("%s: the manifest may lack the digest of the engine image: %s", capture.key, error)

    async def _write_order(self, capture: Capture, order: Body | None) -> None:
        """Apply the order of a live capture, or delete it if there is none to give."""
        children = self._record(capture).children
        existing = children.owned().get((CONFIG_MAP.kind, order_name(capture.deployment_key)))
        if order is None:
            if existing is not None:
                await children.delete(existing)
            return
        if existing is None:
            await self._check_order_name(capture)
        await children.apply([order])

    async def _check_order_name(self, capture: Capture) -> None:
        """Raise BlockedError if the order of a live capture would replace an object of another owner."""
        name = order_name(capture.deployment_key)
        live = await self._get(capture.key, CONFIG_MAP, name)
        if live is None or is_owned(live, capture.uid):
            return
        owner = next(
            (each["name"] for each in live["metadata"].get("ownerReferences") or [] if each["kind"] == KIND), None
        )
        if owner is None:
            raise ChildNameTakenError(CONFIG_MAP.kind, name, leaving=False)
        message = f"ConfigMap {name} of live capture {owner} still exists; continues when it is deleted"
        raise BlockedError(Blocked("WaitingForCleanup", message))

    async def _try(self, capture: Capture, pod: Body) -> None:
        """Check by a dry run whether the policies and quotas of the cluster accept the pod of a capture.

        The timeout detects other causes. Quota that the engines use counts as free, because the engines end before
        the pod is created. Raises BlockedError if the pod would be rejected.
        """
        try:
            await self._cluster.try_create(POD, pod)
        except DeniedError as error:
            raise _refused("PodRefused", error.words) from error
        except (ForbiddenError, UntriableError) as error:
            _logger.info("%s: cannot check whether the pod would be accepted: %s", capture.key, error)
        except RefusedForNowError as error:
            freed = defaultdict[str, Decimal](Decimal)
            for engines in self._cache.children_of(capture.deployment_key, DEPLOYMENT.kind):
                engine_pod = mapping(mapping(mapping(engines, "spec"), "template"), "spec")
                for name, amount in quota_usage(engine_pod).items():
                    freed[name] += amount * mapping(engines, "status").get("replicas", 0)
            if has_room_without(str(error), freed) is False:
                raise _refused("RefusedForNow", str(error)) from error
        except InvalidObjectError as error:
            raise _refused("PodRefused", str(error)) from error

    async def _report(self, capture: Capture, decision: Decision) -> None:
        """Write the status if it changed, and post Events."""
        status = compose_status(capture, decision, self._cluster.clock.now())
        if status == capture.status and not capture.times_ahead:
            return
        children = self._record(capture).children
        if await children.write_status(status):
            self._metrics.count_capture(capture.status.phase, status.phase)
            children.post_times_ahead((*capture.times_ahead, *decision.times_ahead))
            children.post_changes(capture.status.conditions, status.conditions)


def _refused(reason: str, words: str) -> BlockedError:
    message = (
        f"the capture's pod would be rejected: {words}; the deployment keeps serving, and the capture starts when its"
        " pod is accepted"
    )
    return BlockedError(Blocked(reason, message))
