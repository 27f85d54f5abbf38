"""Decide whether to roll back a rollout, and keep the last workload that served.

A ConfigMap stores the last good workload and the failed attempt, so both survive a restart of the operator. The
spec is not changed. A failed attempt is not retried until the spec or plan changes.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Final

from specdecode_operator.api.base import Body
from specdecode_operator.api.deployment import Key, SpecDecodeDeploymentSpec
from specdecode_operator.cluster.drift import content_hash
from specdecode_operator.cluster.manifests import indented_json, owned
from specdecode_operator.deployment.parsed_deployment import engine_fields
from specdecode_operator.deployment.rollout.engine_workload import (
    pack_object,
    serving_template,
    unpack_object,
    with_pods_of,
    workload_name,
)
from specdecode_operator.deployment.rollout.rollout_progress import (
    NO_GROUP_HISTORY,
    GroupHistory,
    Rollout,
    group_history_as_data,
    group_history_from_data,
    serving_hash,
    template_hash,
)
from specdecode_operator.sizing.placement import Row
from specdecode_operator.untrusted import parse_json

# Restarts of an engine before its rollout counts as failed, unless its error is permanent.
_MOST_CRASHES: Final = 3
_WORKLOAD, _FAILURE, _GROUPS, _PROMOTION = "engines.json", "failure.json", "groups.json", "promotion.json"


@dataclass(frozen=True)
class Failure:
    """An attempt whose engines never served."""

    attempt: str
    reason: str
    message: str

    def __str__(self) -> str:
        return f"{self.reason}: {self.message}"


@dataclass(frozen=True)
class Promotion:
    """Engines whose canary passed."""

    template: str  # Hash of their pod template
    message: str


@dataclass(frozen=True)
class LastGood:
    """Last good workload of an object, and the failed attempt or the promoted canary since then."""

    packed: bytes  # The workload, compressed: it is kept for each object, but rarely read
    failure: Failure | None = None
    groups: GroupHistory | None = None
    promotion: Promotion | None = None

    @classmethod
    def of(
        cls,
        workload: Body,
        failure: Failure | None = None,
        groups: GroupHistory | None = None,
        promotion: Promotion | None = None,
    ) -> "LastGood":
        """Return the record of a workload that is not compressed."""
        return cls(pack_object(workload), failure, groups, promotion)

    @property
    def workload(self) -> Body:
        """The last workload whose engines served."""
        return unpack_object(self.packed)


def last_good_name(key: Key) -> str:
    """Return the name of the ConfigMap that holds the last good workload of an object."""
    return f"{key.name}-last-good"


def read_last_good(config_map: Body | None) -> LastGood | None:
    """Parse the ConfigMap; return None if it is missing or invalid."""
    data = (config_map or {}).get("data") or {}
    try:
        workload, failure = parse_json(data[_WORKLOAD]), parse_json(data.get(_FAILURE, "null"))
        groups, promotion = parse_json(data.get(_GROUPS, "null")), parse_json(data.get(_PROMOTION, "null"))
        template = serving_template(workload)
        if not isinstance(template["spec"], dict) or template_hash(template) is None or not workload["apiVersion"]:
            return None
        return LastGood.of(
            workload,
            Failure(**failure) if failure else None,
            group_history_from_data(groups) if groups else None,
            Promotion(**promotion) if promotion else None,
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def render_last_good(key: Key, uid: str, last_good: LastGood) -> Body:
    """Return the ConfigMap that stores the last good workload."""
    data = {_WORKLOAD: indented_json(last_good.workload)}
    if last_good.failure is not None:
        data[_FAILURE] = indented_json(asdict(last_good.failure))
    if last_good.groups is not None:
        data[_GROUPS] = indented_json(group_history_as_data(last_good.groups))
    if last_good.promotion is not None:
        data[_PROMOTION] = indented_json(asdict(last_good.promotion))
    body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": last_good_name(key)}, "data": data}
    return owned(body, key, uid)


def served_before(last_good: LastGood | None) -> str:
    """Say why engines that roll out or serve are not compared with earlier ones."""
    return "no engine served before" if last_good is None else "these engines already serve"


def attempt_of(spec: SpecDecodeDeploymentSpec, chosen: Row) -> str:
    """Return the ID of an attempt: a hash of the fields that change engines, and of the plan's placement."""
    place = map(str, (chosen.product, chosen.tensor, chosen.gpus, chosen.nodes))
    return content_hash([engine_fields(spec), *place])


def put_back(key: Key, uid: str, workload: Body, earlier: Body) -> Body:
    """Return the workload with the pod templates of an earlier one and the current number of replicas."""
    body = with_pods_of(workload, earlier)
    return owned({**body, "metadata": {"name": workload_name(key, body["kind"])}}, key, uid)


def after_rollout(
    last_good: LastGood | None, wanted: Body, attempt: Callable[[], str], rollout: Rollout
) -> LastGood | None:
    """Return the record after observing a rollout; ``wanted`` is its workload, ``attempt`` returns its ID."""
    if rollout.wanted == 0:
        return last_good
    if rollout.complete:
        promotion = None if last_good is None else last_good.promotion
        if promotion is not None and promotion.template != serving_hash(wanted):
            promotion = None
        return LastGood.of({field: wanted[field] for field in ("apiVersion", "kind", "spec")}, promotion=promotion)
    if last_good is None or serving_hash(last_good.workload) == serving_hash(wanted):
        return last_good
    blocked = rollout.blocked
    if not has_failed(rollout) and not rollout.overdue:
        return last_good
    if blocked is not None:
        return replace(last_good, failure=Failure(attempt(), blocked.reason, blocked.message))
    message = f"no engine became ready within {rollout.deadline_s} s and no error was reported; the engine may hang"
    return replace(last_good, failure=Failure(attempt(), "EngineReadyTimeout", message))


def has_failed(rollout: Rollout) -> bool:
    """Whether engines failed: with a permanent error, too many crashes, or not ready in time although not waiting."""
    blocked = rollout.blocked
    if blocked is None:
        return rollout.overdue
    return blocked.permanent or (not blocked.waits and (rollout.overdue or rollout.crashes >= _MOST_CRASHES))


def with_crashes(last_good: LastGood | None, groups: GroupHistory) -> LastGood | None:
    """Return the record with the crashes of groups, up to the number that fails the rollout."""
    if last_good is None:
        return None
    if not groups.crashed:
        return replace(last_good, groups=None)
    kept = last_good.groups or NO_GROUP_HISTORY
    earlier = kept if kept.template == groups.template else NO_GROUP_HISTORY
    if earlier.crashed == groups.crashed or earlier.crashes >= _MOST_CRASHES:
        return last_good
    # The waiting time is not stored, because each reconcile computes it from `first_seen_s`.
    return replace(last_good, groups=replace(groups, waited_s=0.0))
