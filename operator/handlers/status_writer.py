"""Write the status of an object and post an Event for each condition that changed."""

import logging
from collections.abc import Sequence

from specdecode_operator.api import base
from specdecode_operator.api.base import ApiModel
from specdecode_operator.api.deployment import Key
from specdecode_operator.api.deployment_status import Condition, ConditionStatus
from specdecode_operator.cluster.cache import Cache
from specdecode_operator.cluster.client import Cluster, ClusterError, NotFoundError
from specdecode_operator.cluster.clock import TIME_IN_FUTURE, rfc3339
from specdecode_operator.cluster.resources import OUR_KINDS
from specdecode_operator.deployment.conditions import CAVEATS, SUSPENDED_FOR_CAPTURE, changed_conditions
from specdecode_operator.problems import printable
from specdecode_operator.redaction import clip

_MESSAGE_LIMIT = 1024
_NOTHING_WRONG = frozenset(
    {"Starting", "Disabled", "NotAccepted", "DoesNotPay", "NotBetter", "Manual", SUSPENDED_FOR_CAPTURE}
)
"""Reasons for which a condition is False without a problem."""

_logger = logging.getLogger(__name__)


class Reporter:
    """Writes the status and Events of one object of our kinds."""

    def __init__(self, cluster: Cluster, cache: Cache, key: Key, uid: str) -> None:
        self.cluster, self.cache = cluster, cache
        self.key, self.uid = key, uid

    async def write_status(self, status: ApiModel) -> bool:
        """Write a status; return False if the object does not exist any more."""
        fields = status.model_dump(by_alias=True, mode="json", exclude_none=True)
        body = {
            "apiVersion": base.API_VERSION,
            "kind": self.key.kind,
            "metadata": {"namespace": self.key.namespace, "name": self.key.name, "uid": self.uid},
            # Empty lists are never written: if an apply empties a list, the API server may remove the field.
            "status": {name: value for name, value in fields.items() if value != []},
        }
        resource = OUR_KINDS[self.key.kind]
        try:
            self.cache.put_parent(self.key.kind, await self.cluster.apply_status(resource, body))
        except NotFoundError:
            # It was deleted, but no event has arrived yet. The garbage collector removes its children.
            self.cache.drop_parent(self.key.kind, body)
            return False
        return True

    def post_changes(self, old: list[Condition], new: list[Condition]) -> None:
        """Log the conditions that changed, and post an Event for each."""
        for each in changed_conditions(old, new):
            _logger.info("%s: %s is %s: %s: %s", self.key, each.type, each.status, each.reason, each.message)
            is_wrong = each.status is ConditionStatus.FALSE and each.reason not in _NOTHING_WRONG
            warns = is_wrong or each.reason in CAVEATS
            self.post_event(each.reason, f"{each.type} is {each.status}: {each.message}", warns=warns)

    def post_times_ahead(self, messages: Sequence[str]) -> None:
        """Post an Event for each future time in the status, after the status no longer contains it."""
        for message in messages:
            self.post_event(TIME_IN_FUTURE, message, warns=True)

    def post_event(self, reason: str, message: str, *, warns: bool = False) -> None:
        """Post an Event in the background; log a failure."""
        now = rfc3339(self.cluster.clock.now())
        event = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"generateName": f"{self.key.name}-", "namespace": self.key.namespace},
            "type": "Warning" if warns else "Normal",
            "reason": reason,
            "message": clip(printable(message), _MESSAGE_LIMIT),
            "involvedObject": {
                "apiVersion": base.API_VERSION,
                "kind": self.key.kind,
                "namespace": self.key.namespace,
                "name": self.key.name,
                "uid": self.uid,
            },
            "source": {"component": "specdecode-operator"},
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        try:
            self.cluster.post_event(event)
        except ClusterError as error:
            _logger.warning("%s: failed to post an Event: %s", self.key, error)
