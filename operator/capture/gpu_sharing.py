"""Whether a capture that keeps its deployment's engines has to wait: serving goes before it.

Its pod must not stand in the scheduler's line while a deployment has lent its GPUs or wants them back: it would have
stood there for longer than the engines, and take their place. Nothing is stored; all follows from the objects.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from specdecode_operator.api.base import Body
from specdecode_operator.api.key import Key
from specdecode_operator.capture.control.preemption import preempting_capture
from specdecode_operator.deployment.conditions import SUSPENDED_FOR_CAPTURE
from specdecode_operator.deployment.pods.readiness import place_word
from specdecode_operator.kube.nodes import gpus_of

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
