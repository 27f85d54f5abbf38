"""Carries one object from what is to what should be: look, decide, apply, report."""

import logging
import time
from datetime import UTC, datetime
from typing import Any

from specdecode_operator.api import base, deployment
from specdecode_operator.api.status import Condition, ConditionStatus, SpecDecodeDeploymentStatus
from specdecode_operator.cluster.cache import Cache, Key
from specdecode_operator.cluster.client import Cluster
from specdecode_operator.cluster.engine_probe import EngineProbe
from specdecode_operator.cluster.errors import ForbiddenError, InvalidObjectError, NotFoundError
from specdecode_operator.cluster.resources import CHILDREN, DEPLOYMENT, POD, SPECDECODE_DEPLOYMENT, child_resource
from specdecode_operator.services.decision import (
    Intent,
    Launch,
    Observation,
    Parent,
    blocked,
    compose_status,
    intend,
    news,
    read_parent,
)
from specdecode_operator.services.drift import is_owned, needs_apply
from specdecode_operator.services.readiness import stalled, working

Body = dict[str, Any]

_FIGURES_REST_S = 60.0
"""Observed figures are written at most this often."""

_logger = logging.getLogger(__name__)


class ChildNameTakenError(Exception):
    """An object that is not ours has the name of a child."""

    def __init__(self, kind: str, name: str, *, leaving: bool) -> None:
        self.leaving = leaving
        if leaving:
            message = f"{kind} {name} of an earlier object of this name is still being removed"
        else:
            message = (
                f"{kind} {name} exists and does not belong to this object; it is left untouched:"
                " delete or rename it, or rename this object"
            )
        super().__init__(message)


class Reconciler:
    """One reconcile for create, update, resume and resync."""

    def __init__(self, cluster: Cluster, cache: Cache, probe: EngineProbe) -> None:
        self._cluster = cluster
        self._cache = cache
        self._probe = probe
        self._figures_written_s: dict[Key, float] = {}

    async def reconcile(self, key: Key) -> None:
        """Bring one SpecDecodeDeployment and its children in line."""
        body = self._cache.deployment(key)
        if body is None or "deletionTimestamp" in body["metadata"]:
            self._figures_written_s.pop(key, None)
            return
        parent = read_parent(body)
        intent = intend(parent, self._cache.nodes())
        intent = await self._launch(parent, intent)
        status = compose_status(parent, intent, await self._observe(parent, intent), datetime.now(UTC))
        if status != parent.status:
            await self._report(parent, status)

    async def _launch(self, parent: Parent, intent: Intent) -> Intent:
        """Apply the children; what stands in the way becomes part of the intent."""
        try:
            await self._apply_children(parent, intent)
        except ChildNameTakenError as error:
            obstacle = (
                working("WaitingForCleanup", str(error)) if error.leaving else stalled("ChildNameConflict", str(error))
            )
            return blocked(intent, obstacle)
        except ForbiddenError as error:
            return blocked(intent, working("Forbidden", str(error)))
        except InvalidObjectError as error:
            return blocked(intent, stalled("ChildRefused", str(error)))
        return intent

    async def _apply_children(self, parent: Parent, intent: Intent) -> None:
        owned = self._owned_children(parent)
        missing = [child for child in intent.children if _identity(child) not in owned]
        for child in missing:
            # All names are checked before the first write, so that nothing is half-created.
            await self._check_name(parent, child)
        for child in intent.children:
            if needs_apply(child, owned.get(_identity(child))):
                self._cache.put(child["kind"], await self._cluster.apply(child))
        if not isinstance(intent.course, Launch):
            return  # engines of an earlier spec stay
        wanted = {_identity(child) for child in intent.children}
        for identity, child in owned.items():
            if identity not in wanted:
                await self._cluster.delete(child)

    def _owned_children(self, parent: Parent) -> dict[tuple[str, str], Body]:
        return {
            (resource.kind, child["metadata"]["name"]): {**child, "kind": resource.kind}
            for resource in CHILDREN
            for child in self._cache.belongings(parent.key, resource.kind)
            if is_owned(child, parent.uid)
        }

    async def _check_name(self, parent: Parent, child: Body) -> None:
        kind, name = _identity(child)
        live = await self._cluster.get(child_resource(kind), parent.key.namespace, name)
        if live is None or is_owned(live, parent.uid):
            return
        owners = live["metadata"].get("ownerReferences") or []
        leaving = any(
            owner["kind"] == deployment.KIND
            and owner["apiVersion"].startswith(f"{base.GROUP}/")
            and owner["name"] == parent.key.name
            for owner in owners
        )
        raise ChildNameTakenError(kind, name, leaving=leaving)

    async def _observe(self, parent: Parent, intent: Intent) -> Observation:
        pods = self._cache.belongings(parent.key, POD.kind)
        owned = self._owned_children(parent)
        engine = owned.get((DEPLOYMENT.kind, parent.key.name))
        readings = {}
        if isinstance(intent.course, Launch):
            facts = intent.course.facts
            readings = dict(await self._probe.read_all(pods, facts.spec.serving.port, facts.profile))
        written_s = self._figures_written_s.get(parent.key)
        rested = written_s is None or time.monotonic() - written_s >= _FIGURES_REST_S
        return Observation(engine, pods, readings, rested)

    async def _report(self, parent: Parent, status: SpecDecodeDeploymentStatus) -> None:
        """Write the status, and tell what changed in Events."""
        body = {
            "apiVersion": base.API_VERSION,
            "kind": deployment.KIND,
            "metadata": {"namespace": parent.key.namespace, "name": parent.key.name, "uid": parent.uid},
            "status": status.model_dump(by_alias=True, mode="json", exclude_none=True),
        }
        try:
            self._cache.put_deployment(await self._cluster.apply_status(SPECDECODE_DEPLOYMENT, body))
        except NotFoundError:
            return  # deleted meanwhile: the garbage collector removes what it owned
        if status.observed != parent.status.observed:
            self._figures_written_s[parent.key] = time.monotonic()
        for condition in news(parent.status.conditions, status.conditions):
            _logger.info(
                "%s: %s is %s: %s: %s",
                parent.key,
                condition.type,
                condition.status,
                condition.reason,
                condition.message,
            )
            await self._tell(parent, condition)

    async def _tell(self, parent: Parent, condition: Condition) -> None:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        event = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"generateName": f"{parent.key.name}-", "namespace": parent.key.namespace},
            "type": "Warning" if _is_bad(condition) else "Normal",
            "reason": condition.reason,
            "message": f"{condition.type} is {condition.status}: {condition.message}"[:1024],
            "involvedObject": {
                "apiVersion": base.API_VERSION,
                "kind": deployment.KIND,
                "namespace": parent.key.namespace,
                "name": parent.key.name,
                "uid": parent.uid,
            },
            "source": {"component": "specdecode-operator"},
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        await self._cluster.post_event(parent.key.namespace, event)


def _is_bad(condition: Condition) -> bool:
    """Whether a person should look: something is false that is not so on the way."""
    return condition.status is ConditionStatus.FALSE and condition.reason not in {"Starting", "Disabled", "NotAccepted"}


def _identity(body: Body) -> tuple[str, str]:
    return body["kind"], body["metadata"]["name"]
