"""Write the status of an object and post an Event for each condition that changed."""

import logging
from collections.abc import Sequence

from specdecode_operator.api import base, capture
from specdecode_operator.api.base import ApiModel
from specdecode_operator.api.deployment import Key
from specdecode_operator.api.deployment_status import Condition, ConditionStatus
from specdecode_operator.cluster.cache import Cache
from specdecode_operator.cluster.client import Cluster, ClusterError, NotFoundError
from specdecode_operator.cluster.clock import TIME_IN_FUTURE, ServerTime
from specdecode_operator.cluster.resources import SPECDECODE_CAPTURE, SPECDECODE_DEPLOYMENT
from specdecode_operator.deployment.conditions import SUSPENDED_FOR_CAPTURE, changed_conditions
from specdecode_operator.problems import printable
from specdecode_operator.redaction import clip

_MESSAGE_LIMIT = 1024
_NOTHING_WRONG = frozenset({"Starting", "Disabled", "NotAccepted", "DoesNotPay", SUSPENDED_FOR_CAPTURE})
"""Reasons of conditions that are False without anything being wrong, most of them for a while."""

_BAD_WHILE_TRUE = frozenset({"Decayed", "DriftContested", "EngineDiffers", "EngineUntested", "OutputsDiffer"})
"""Types of conditions that are there only while something is wrong, or not as people take for granted."""

_logger = logging.getLogger(__name__)


class Reporter:
    """Writes status and Events of SpecDecodeDeployments and SpecDecodeCaptures."""

    def __init__(self, cluster: Cluster, cache: Cache, clock: ServerTime | None = None) -> None:
        self._cluster = cluster
        self._cache = cache
        self._clock = clock or ServerTime()

    async def write(self, key: Key, uid: str, status: ApiModel) -> bool:
        """Write a status; return False where the object is gone.

        Raises
        ------
        ClusterError
            When the API server refuses or cannot be reached.
        """
        said = status.model_dump(by_alias=True, mode="json", exclude_none=True)
        body = {
            "apiVersion": base.API_VERSION,
            "kind": key.kind,
            "metadata": {"namespace": key.namespace, "name": key.name, "uid": uid},
            # The API server keeps an empty list, but may drop one that an apply empties: so none is ever written.
            "status": {name: value for name, value in said.items() if value != []},
        }
        resource = SPECDECODE_CAPTURE if key.kind == capture.KIND else SPECDECODE_DEPLOYMENT
        try:
            self._cache.put_parent(key.kind, await self._cluster.apply_status(resource, body))
        except NotFoundError:
            # Deleted meanwhile, though no event said so: the garbage collector removes what it owned.
            self._cache.drop_parent(key.kind, body)
            return False
        return True

    async def post_changes(self, key: Key, uid: str, old: list[Condition], new: list[Condition]) -> None:
        """Log the conditions that changed, and post an Event for each."""
        for condition in changed_conditions(old, new):
            _logger.info(
                "%s: %s is %s: %s: %s", key, condition.type, condition.status, condition.reason, condition.message
            )
            message = f"{condition.type} is {condition.status}: {condition.message}"
            await self.post_event(key, uid, condition.reason, message, warns=_is_bad(condition))

    async def post_times_ahead(self, key: Key, uid: str, told: Sequence[str]) -> None:
        """Post an Event for each time that lay in the future, once the status no longer has it."""
        for message in told:
            await self.post_event(key, uid, TIME_IN_FUTURE, message, warns=True)

    async def post_event(self, key: Key, uid: str, reason: str, message: str, *, warns: bool = False) -> None:
        """Post an Event; one that cannot be posted is only logged."""
        now = self._clock.now().strftime("%Y-%m-%dT%H:%M:%SZ")
        event = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"generateName": f"{key.name}-", "namespace": key.namespace},
            "type": "Warning" if warns else "Normal",
            "reason": reason,
            "message": clip(printable(message), _MESSAGE_LIMIT),
            "involvedObject": {
                "apiVersion": base.API_VERSION,
                "kind": key.kind,
                "namespace": key.namespace,
                "name": key.name,
                "uid": uid,
            },
            "source": {"component": "specdecode-operator"},
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        try:
            await self._cluster.post_event(key.namespace, event)
        except ClusterError as error:
            _logger.warning("%s: no Event could be posted: %s", key, error)


def _is_bad(condition: Condition) -> bool:
    """Whether a condition is worth a Warning."""
    if condition.type in _BAD_WHILE_TRUE:
        return condition.status is ConditionStatus.TRUE
    return condition.status is ConditionStatus.FALSE and condition.reason not in _NOTHING_WRONG
