"""Decide whether a deployment's engines or a capture holds its GPUs.

A capture with ``deploymentDuringCapture: Suspend`` borrows the GPUs. The loan is recorded in ``status.borrow`` of
the capture, and the deployment frees the GPUs exactly while that record exists. One status write therefore both
borrows the GPUs and records the time. An operator that restarts after a crash at any step recovers the time from
it. The deployment gets its GPUs back when the capture ends, is suspended or is deleted, even if the operator was
down in the meantime.

A capture that keeps the engines running waits while a deployment has lent its GPUs or needs them back. Otherwise
its pod would be ahead of the engines in the scheduler's queue and take their place. This is not stored; it is
derived from the objects.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from specdecode_operator.api.base import Body
from specdecode_operator.api.capture import DuringCapture
from specdecode_operator.api.capture_status import BorrowStatus
from specdecode_operator.api.deployment import Key
from specdecode_operator.capture.observation import has_ended
from specdecode_operator.cluster.clock import rfc3339
from specdecode_operator.cluster.nodes import gpus_of
from specdecode_operator.deployment.conditions import SUSPENDED_FOR_CAPTURE, Blocked
from specdecode_operator.deployment.rollout.readiness import place_word
from specdecode_operator.problems import printable
from specdecode_operator.redaction import clip
from specdecode_operator.untrusted import mapping

# Kubernetes waits this long for an unresponsive node before it evicts its pods.
LATE_AT_MOST: Final = timedelta(minutes=5)
QUEUED: Final = "Queued"  # reason of a capture whose Job waits in a queue without a time limit
MOST_ATTEMPTS: Final = 5  # failed borrowings after which a capture fails, because each costs serving time
_LONGEST_BACK_OFF_S: Final = 3600


def preempting_capture(captures: Iterable[Body]) -> str | None:
    """Return the name of the capture that holds the GPUs of a deployment, the first to borrow them, if any."""
    # Statuses are not parsed, because all captures of the cluster are checked.
    holders = []
    for body in captures:
        metadata, spec, borrow = body["metadata"], body.get("spec") or {}, mapping(mapping(body, "status"), "borrow")
        is_active = "deletionTimestamp" not in metadata and borrows(spec) and not spec.get("suspend")
        if is_active and borrow.get("since") and not borrow.get("returnedAt") and not has_ended(body):
            holders.append((str(borrow["since"]), str(metadata["name"])))
    return min(holders)[1] if holders else None


def borrows(spec: Body) -> bool:
    """Return whether a capture's spec borrows the GPUs of its deployment instead of keeping the engines running."""
    return spec.get("deploymentDuringCapture") == DuringCapture.SUSPEND


def holds_gpus(pod: Body, now: datetime) -> bool:
    """Return whether a pod of a deployment keeps GPUs that a capture waits for; not on an unresponsive node."""
    if _has_ended(pod):  # the object may stay, as after an eviction
        return False
    # Kubernetes sets it to the end of the grace period.
    should_be_gone = pod["metadata"].get("deletionTimestamp")
    return should_be_gone is None or now < datetime.fromisoformat(should_be_gone) + LATE_AT_MOST


def is_held(record: BorrowStatus | None) -> bool:
    """Return whether a capture holds the GPUs of its deployment."""
    return record is not None and record.since is not None and record.returned_at is None


def borrowed(record: BorrowStatus, now: datetime) -> BorrowStatus:
    """Return the record of a capture that borrows the GPUs now."""
    without_s = record.seconds_without_serving
    if record.since is not None and record.served_at is None:
        without_s += _age_s(record.since, now)  # the deployment has not served in between
    cleared = dict.fromkeys(("idle_since", "returned_at", "served_at", "next_attempt_at"))
    update = {"since": rfc3339(now), "seconds_without_serving": without_s}
    return record.model_copy(update=cleared | update)


def watched(record: BorrowStatus, now: datetime, *, free: bool, in_use: bool) -> BorrowStatus:
    """Return the record with the start of the GPUs' idle time: ``free`` of engines, not ``in_use`` by the capture."""
    if record.since is not None and _is_ahead(record.since, now):
        record = record.model_copy(update={"since": rfc3339(now)})
    if in_use or not free:
        return record.model_copy(update={"idle_since": None})
    if record.idle_since is not None and not _is_ahead(record.idle_since, now):
        return record
    return record.model_copy(update={"idle_since": rfc3339(now)})


def overdue(record: BorrowStatus, now: datetime, *, timeout_s: int, ending_s: int) -> str | None:
    """Return the limit that has passed, if any: ``timeout_s`` of idle time, or ``ending_s`` for the engines to end."""
    if record.idle_since is not None:
        is_late = _age_s(record.idle_since, now) >= timeout_s
        return f"did not run within {timeout_s} s (spec.borrowTimeoutSeconds)" if is_late else None
    is_late = record.since is not None and _age_s(record.since, now) >= ending_s
    return f"did not get the GPUs within {ending_s} s" if is_late else None


def returned(record: BorrowStatus, now: datetime, failure: Blocked | None, timeout_s: int) -> BorrowStatus:
    """Return the record of a capture that returns the GPUs; ``failure`` is why it did not start, if it did not."""
    update = {"idle_since": None, "returned_at": rfc3339(now), "failed_attempts": 0}
    if failure is not None:
        attempts = record.failed_attempts + 1
        # At least twice as long as it may hold idle GPUs.
        back_off_s = min(timeout_s * 2.0 ** min(attempts, MOST_ATTEMPTS), _LONGEST_BACK_OFF_S)
        update |= {
            "failed_attempts": attempts,
            "last_failure": clip(printable(f"{failure.reason}: {failure.message}"), 1024),
            "next_attempt_at": rfc3339(now + timedelta(seconds=back_off_s)),
        }
    return record.model_copy(update=update)


def settled(record: BorrowStatus | None, now: datetime, *, serves: bool) -> BorrowStatus | None:
    """Return the record with the time without serving, once the deployment serves again."""
    if record is None or record.since is None or record.returned_at is None or record.served_at or not serves:
        return record
    without_s = record.seconds_without_serving + _age_s(record.since, now)
    return record.model_copy(update={"served_at": rfc3339(now), "seconds_without_serving": without_s})


def is_unsettled(record: BorrowStatus | None) -> bool:
    """Return whether the GPUs are returned and the deployment has not served since."""
    return record is not None and record.returned_at is not None and record.served_at is None


def backs_off(record: BorrowStatus, now: datetime) -> bool:
    """Return whether the next attempt is due later; a time beyond the longest back-off is a clock error."""
    at = None if record.next_attempt_at is None else _read(record.next_attempt_at)
    return at is not None and now < at <= now + timedelta(seconds=_LONGEST_BACK_OFF_S)


def due_at(record: BorrowStatus | None, timeout_s: int) -> datetime | None:
    """Return when to requeue a capture without an event; None if no time matters to it."""
    if record is None:
        return None
    if record.idle_since is not None and (idle := _read(record.idle_since)):
        return idle + timedelta(seconds=timeout_s)
    return None if record.next_attempt_at is None or is_held(record) else _read(record.next_attempt_at)


def _age_s(time: str, now: datetime) -> int:
    at = _read(time)
    return 0 if at is None else max(0, int((now - at).total_seconds()))


def _is_ahead(time: str, now: datetime) -> bool:
    at = _read(time)
    return at is None or at > now


def _read(time: str) -> datetime | None:
    try:
        found = datetime.fromisoformat(time)
    except ValueError:
        return None
    return found if found.tzinfo else None


# Grace period for engines of other deployments to find a place. After it they do not wait for returned GPUs, and must
# not block the captures of others.
_COMING_BACK: Final = timedelta(minutes=10)


@dataclass(frozen=True)
class Serving:
    """Engine pods of one deployment: wanted and placed."""

    key: Key
    product: str | None  # GPU product of its plan in force
    wanted: int
    placed: int
    lent_to: str | None = None  # the capture that holds its GPUs
    lent: bool = False  # its status still reports that its engines are suspended for a capture
    has_gpus: bool = False  # a pod of its engines or captures, also a terminating one, has GPUs of a node
    since: datetime | None = None  # start of being unready; None while it is ready or lends its GPUs

    @property
    def lacks(self) -> bool:
        """Whether a wanted engine has no node."""
        return self.placed < self.wanted


def read_serving(
    body: Body, pods: Sequence[Body], captures: Sequence[Body], capture_pods: Sequence[Body] = ()
) -> Serving:
    """Return the engines of a SpecDecodeDeployment, from its object, its engines' pods, its captures and their pods."""
    # The replicas of its Deployment do not count, because they lag between the end of a capture and a reconcile.
    metadata, spec, status = body["metadata"], body.get("spec") or {}, body.get("status") or {}
    # A replay needs no GPU.
    replays = bool((spec.get("engine") or {}).get("replay"))
    plan = {} if replays else status.get("plan") or {}
    ready: Body = next((each for each in status.get("conditions") or [] if each["type"] == "Ready"), {})
    # By the reason only, because older operators wrote the status True, and newer ones False.
    lent, changed = ready.get("reason") == SUSPENDED_FOR_CAPTURE, ready.get("lastTransitionTime")
    replicas = 0 if spec.get("suspend") else spec.get("replicas", 1)
    # One more than replicas while a rollout starts the new pod first.
    wanted = [pod for pod in pods if "deletionTimestamp" not in pod["metadata"] and not _has_ended(pod)]
    return Serving(
        key=Key(metadata["namespace"], metadata["name"]),
        product=plan.get("product"),
        wanted=max(replicas * plan.get("nodesPerReplica", 1), len(wanted)),
        placed=sum(map(_has_node, wanted)),
        lent_to=preempting_capture(captures) if replicas else None,
        lent=lent,
        has_gpus=any(_has_node(pod) and gpus_of(pod) for pod in [*pods, *capture_pods]),
        since=datetime.fromisoformat(changed) if changed and not lent and ready.get("status") != "True" else None,
    )


def serving_goes_first(own: Key, servings: Iterable[Serving], now: datetime) -> str | None:
    """Return which deployment a capture of the deployment ``own`` waits for, and until when; None if it need not."""
    by_key = {each.key: each for each in servings}
    captured = by_key.pop(own, None)
    if captured is None:
        return None
    first: Serving | None = captured
    if not captured.lacks:
        others = [each for each in by_key.values() if each.product == captured.product and _goes_first(each, own, now)]
        # Deployments of the own namespace come first, because the message may name them.
        first = min(others, key=lambda each: (each.key.namespace != own.namespace, each.key), default=None)
    if first is None:
        return None
    # Users who see this capture may not be allowed to see other namespaces.
    is_near = first.key.namespace == own.namespace
    who = f"deployment {first.key.name}" if is_near else "a deployment of another namespace"
    why = f"has {first.placed} of {first.wanted} engine pods on nodes"
    if first.lent_to is not None:
        to = f"capture {first.lent_to}" if is_near else "a capture"
        why = f"has lent its {place_word(first.product)} to {to}"
    return f"{who} {why}; its engines have priority: continues when all are placed"


def _goes_first(other: Serving, own: Key, now: datetime) -> bool:
    if not other.lacks:
        return False
    # In another namespace it must hold GPUs: otherwise a loan of GPUs that it lacks would block all other namespaces.
    is_near = other.key.namespace == own.namespace
    lends = (other.lent or other.lent_to is not None) and (is_near or other.has_gpus)
    return lends or (other.product is not None and other.since is not None and now < other.since + _COMING_BACK)


def in_line(pod: Body | None) -> bool:
    """Return whether a capture whose Job runs still waits for a node for its newest pod, which may not exist yet."""
    return pod is None or not (_has_ended(pod) or ("deletionTimestamp" not in pod["metadata"] and _has_node(pod)))


def _has_node(pod: Body) -> bool:
    status = pod.get("status") or {}
    conditions = status.get("conditions") or []
    scheduled = any(each["type"] == "PodScheduled" and each["status"] == "True" for each in conditions)
    return not _has_ended(pod) and (scheduled or status.get("phase") == "Running")


def _has_ended(pod: Body) -> bool:
    return (pod.get("status") or {}).get("phase") in {"Succeeded", "Failed"}
