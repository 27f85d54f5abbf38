"""Decide whether a deployment's engines or a capture holds its GPUs.

A capture with ``deploymentDuringCapture: Suspend`` borrows the GPUs. The loan is recorded in ``status.borrow`` of
the capture, and the deployment frees the GPUs exactly while that record exists. One status write therefore both
borrows the GPUs and records the time. An operator that restarts after a crash at any step recovers the time from
it. The deployment gets its GPUs back when the capture ends, is suspended or is deleted, even if the operator was
down in the meantime.

A capture that keeps the engines running waits while a deployment has lent its GPUs or wants them back. Otherwise
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
from specdecode_operator.cluster.nodes import gpus_of
from specdecode_operator.deployment.conditions import SUSPENDED_FOR_CAPTURE, Blocked
from specdecode_operator.deployment.rollout.readiness import place_word
from specdecode_operator.problems import printable
from specdecode_operator.redaction import clip
from specdecode_operator.untrusted import mapping

_ENDED: Final = frozenset({"Succeeded", "Failed"})
LATE_AT_MOST: Final = timedelta(minutes=5)
"""As long as Kubernetes waits for a node that does not answer before it takes its pods away."""

QUEUED: Final = "Queued"
"""Reason of a capture whose Job waits in a queue, which may take for ever."""


def preempting_capture(captures: Iterable[Body]) -> str | None:
    """Return the name of the capture that has the GPUs of a deployment, the first to borrow them; None if none has.

    ``captures`` are those of one deployment. Their statuses are not parsed: all captures of the cluster are asked.
    """
    holders = [(str(_borrow(body)["since"]), str(body["metadata"]["name"])) for body in captures if _holds(body)]
    return min(holders)[1] if holders else None


def borrows(spec: Body) -> bool:
    """Whether a capture's spec asks for the GPUs of its deployment's engines; otherwise it keeps them running."""
    return spec.get("deploymentDuringCapture") == DuringCapture.SUSPEND


def holds_gpus(pod: Body, now: datetime) -> bool:
    """Whether a pod of a deployment keeps GPUs that a capture waits for.

    One that ended holds none, though it may stay as an object: an evicted pod does. One that should long be gone is on
    a node that does not answer, and the deployment would wait for its engines as long as the capture for the pod.
    """
    if pod.get("status", {}).get("phase") in _ENDED:
        return False
    # Kubernetes sets it to the end of the time that the pod has to end.
    should_be_gone = pod["metadata"].get("deletionTimestamp")
    return should_be_gone is None or now < datetime.fromisoformat(should_be_gone) + LATE_AT_MOST


def _holds(body: Body) -> bool:
    spec, borrow = body.get("spec") or {}, _borrow(body)
    if "deletionTimestamp" in body["metadata"] or not borrows(spec) or spec.get("suspend"):
        return False
    return bool(borrow.get("since")) and not borrow.get("returnedAt") and not has_ended(body)


def _borrow(body: Body) -> Body:
    return mapping(mapping(body, "status"), "borrow")


MOST_ATTEMPTS: Final = 5
"""Borrowings in vain after which a capture fails: each one costs serving time."""

_LONGEST_BACK_OFF_S: Final = 3600
_LONGEST_FAILURE: Final = 1024
_TIME: Final = "%Y-%m-%dT%H:%M:%SZ"


def is_held(record: BorrowStatus | None) -> bool:
    """Whether a capture has the GPUs of its deployment."""
    return record is not None and record.since is not None and record.returned_at is None


def borrowed(record: BorrowStatus | None, now: datetime) -> BorrowStatus:
    """Return the record of a capture that borrows the GPUs now."""
    record = record or BorrowStatus()
    without_s = record.seconds_without_serving
    if record.since is not None and record.served_at is None:
        without_s += _age_s(record.since, now)  # the deployment has not served in between
    return record.model_copy(
        update={
            "since": now.strftime(_TIME),
            "idle_since": None,
            "returned_at": None,
            "served_at": None,
            "next_attempt_at": None,
            "seconds_without_serving": without_s,
        }
    )


def watched(record: BorrowStatus, now: datetime, *, free: bool, in_use: bool) -> BorrowStatus:
    """Return the record with the time since when the GPUs are idle.

    ``free`` says that the deployment's engines are gone, ``in_use`` that the capture's engine runs.
    """
    if record.since is not None and _is_ahead(record.since, now):
        record = record.model_copy(update={"since": now.strftime(_TIME)})
    if in_use or not free:
        return record.model_copy(update={"idle_since": None})
    if record.idle_since is not None and not _is_ahead(record.idle_since, now):
        return record
    return record.model_copy(update={"idle_since": now.strftime(_TIME)})


def overdue(record: BorrowStatus, now: datetime, *, timeout_s: int, ending_s: int) -> str | None:
    """Return which time has passed so that the GPUs go back to the engines; None while there is time left.

    ``timeout_s`` is how long they may be idle, ``ending_s`` how long the engines may take to end.
    """
    if record.idle_since is not None:
        is_late = _age_s(record.idle_since, now) >= timeout_s
        return f"did not run within {timeout_s} s (spec.borrowTimeoutSeconds)" if is_late else None
    is_late = record.since is not None and _age_s(record.since, now) >= ending_s
    return f"did not get the GPUs within {ending_s} s" if is_late else None


def returned(record: BorrowStatus, now: datetime, failure: Blocked | None, timeout_s: int) -> BorrowStatus:
    """Return the record of a capture that gives the GPUs back.

    ``failure`` is why it had not started; None for one that ended or was suspended.
    """
    changes = {"idle_since": None, "returned_at": now.strftime(_TIME)}
    if failure is None:
        return record.model_copy(update={**changes, "failed_attempts": 0})
    attempts = record.failed_attempts + 1
    # It stays away for at least twice as long as it may hold GPUs that do nothing.
    back_off_s = min(timeout_s * 2.0 ** min(attempts, MOST_ATTEMPTS), _LONGEST_BACK_OFF_S)
    return record.model_copy(
        update={
            **changes,
            "failed_attempts": attempts,
            "last_failure": clip(printable(f"{failure.reason}: {failure.message}"), _LONGEST_FAILURE),
            "next_attempt_at": (now + timedelta(seconds=back_off_s)).strftime(_TIME),
        }
    )


def settled(record: BorrowStatus | None, now: datetime, *, serves: bool) -> BorrowStatus | None:
    """Return the record with the time without serving, once the deployment has engines that serve again."""
    if record is None or record.since is None or record.returned_at is None or record.served_at or not serves:
        return record
    without_s = record.seconds_without_serving + _age_s(record.since, now)
    return record.model_copy(update={"served_at": now.strftime(_TIME), "seconds_without_serving": without_s})


def is_unsettled(record: BorrowStatus | None) -> bool:
    """Whether the GPUs are back and the deployment has not been seen to serve since."""
    return record is not None and record.returned_at is not None and record.served_at is None


def backs_off(record: BorrowStatus | None, now: datetime) -> bool:
    """Whether the time of the next attempt is still to come.

    A time that is further ahead than the longest back-off comes from a clock that was wrong, and does not count.
    """
    at = None if record is None or record.next_attempt_at is None else _read(record.next_attempt_at)
    return at is not None and now < at <= now + timedelta(seconds=_LONGEST_BACK_OFF_S)


def due_at(record: BorrowStatus | None, timeout_s: int) -> datetime | None:
    """Return when a capture is to be looked at again without an event; None if no time matters to it."""
    if record is None:
        return None
    if record.idle_since is not None and (idle := _read(record.idle_since)):
        return idle + timedelta(seconds=timeout_s)
    return None if record.next_attempt_at is None or is_held(record) else _read(record.next_attempt_at)


def _age_s(time: str, now: datetime) -> int:
    """Return how long ago a time was; a time in the future counts as now."""
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


_COMING_BACK: Final = timedelta(minutes=10)
"""How long engines of other deployments are given for a place. One that has found none by then does not wait for GPUs
that a capture gave back, and might block the captures of everybody else for ever."""


@dataclass(frozen=True)
class Serving:
    """What the engines of one deployment have of the places that they want."""

    key: Key
    product: str | None  # of its plan in force
    wanted: int  # pods
    placed: int
    lent_to: str | None = None
    """The capture that has its GPUs."""

    lent: bool = False
    """Whether its status still says that it has no engines for a capture."""

    has_gpus: bool = False
    """Whether any pod of its engines or captures has GPUs of a node, also one that is about to end."""

    since: datetime | None = None
    """Since when it is not ready; None while it is ready or lends its GPUs."""

    @property
    def lacks(self) -> bool:
        """Whether an engine that is wanted is on no node."""
        return self.placed < self.wanted


def read_serving(
    body: Body, pods: Sequence[Body], captures: Sequence[Body], capture_pods: Sequence[Body] = ()
) -> Serving:
    """Return what a SpecDecodeDeployment has, from its object, its engines' pods, its captures and theirs.

    What its Deployment asks for does not count: it lags behind between the end of a capture and the next reconcile.
    """
    metadata, spec, status = body["metadata"], body.get("spec") or {}, body.get("status") or {}
    # A replay takes no place from anybody.
    replays = bool((spec.get("engine") or {}).get("replay"))
    plan = {} if replays else status.get("plan") or {}
    ready: Body = next((each for each in status.get("conditions") or [] if each["type"] == "Ready"), {})
    # By the reason alone: the status is False now, and older operators wrote True.
    lent, changed = ready.get("reason") == SUSPENDED_FOR_CAPTURE, ready.get("lastTransitionTime")
    replicas = 0 if spec.get("suspend") else spec.get("replicas", 1)
    return Serving(
        key=Key(metadata["namespace"], metadata["name"]),
        product=plan.get("product"),
        wanted=max(replicas * plan.get("nodesPerReplica", 1), sum(map(_is_wanted, pods))),
        placed=sum(map(_is_placed, pods)),
        lent_to=preempting_capture(captures) if replicas else None,
        lent=lent,
        has_gpus=any(_has_node(pod) and gpus_of(pod) for pod in [*pods, *capture_pods]),
        since=datetime.fromisoformat(changed) if changed and not lent and ready.get("status") != "True" else None,
    )


def serving_goes_first(own: Key, servings: Iterable[Serving], now: datetime) -> str | None:
    """Return for whom a capture of the deployment ``own`` waits, and until when; None where nobody goes before it."""
    by_key = {each.key: each for each in servings}
    captured = by_key.pop(own, None)
    if captured is None:
        return None
    if captured.lacks:
        return _waits_for(captured, own)
    rivals = (each for each in by_key.values() if each.product == captured.product)
    others = (each for each in rivals if _goes_first(each, now, near=each.key.namespace == own.namespace))
    # Its own namespace's before others: their names can be told.
    first = min(others, key=lambda each: (each.key.namespace != own.namespace, each.key), default=None)
    return None if first is None else _waits_for(first, own)


def in_line(pod: Body | None) -> bool:
    """Whether a capture whose Job runs is still to get a place for its newest pod, which may not be there yet."""
    return pod is None or not (_is_placed(pod) or _has_ended(pod))


def _goes_first(other: Serving, now: datetime, *, near: bool) -> bool:
    if not other.lacks:
        return False
    # Of another namespace something has to have GPUs: whoever lends what is nowhere would hold up everybody, for weeks.
    lends = (other.lent or other.lent_to is not None) and (near or other.has_gpus)
    return lends or (other.product is not None and other.since is not None and now < other.since + _COMING_BACK)


def _waits_for(other: Serving, own: Key) -> str:
    is_near = other.key.namespace == own.namespace
    # Who may see this capture need not see what runs in other namespaces.
    who = f"deployment {other.key.name}" if is_near else "a deployment of another namespace"
    if other.lent_to is not None:
        what, to = place_word(other.product), f"capture {other.lent_to}" if is_near else "a capture"
        why = f"has lent its {what} to {to}"
    else:
        why = f"has {other.placed} of {other.wanted} engine pods on nodes"
    return f"{who} {why}; its engines go before a capture that keeps them: goes on when all have their place"


def _is_placed(pod: Body) -> bool:
    """Whether a pod that is wanted has a node."""
    return _is_wanted(pod) and _has_node(pod)


def _has_node(pod: Body) -> bool:
    status = pod.get("status") or {}
    conditions = status.get("conditions") or []
    scheduled = any(each["type"] == "PodScheduled" and each["status"] == "True" for each in conditions)
    return not _has_ended(pod) and (scheduled or status.get("phase") == "Running")


def _is_wanted(pod: Body) -> bool:
    """Whether a pod is to run: one more than replicas while a rollout starts the new one first."""
    return "deletionTimestamp" not in pod["metadata"] and not _has_ended(pod)


def _has_ended(pod: Body) -> bool:
    return (pod.get("status") or {}).get("phase") in {"Succeeded", "Failed"}
