"""kopf handlers: every event only says which object to look at.

None of them keeps state in kopf, so kopf writes neither annotations nor
finalizers: create, update, resume and child events all end in the same
reconcile.
"""

from collections.abc import Callable
from typing import Any

import kopf

from specdecode_operator.api import base, capture, deployment
from specdecode_operator.api.key import Key
from specdecode_operator.capture.control.preemption import borrows
from specdecode_operator.cluster.cache import is_model_facts
from specdecode_operator.handlers.state import OperatorState
from specdecode_operator.kube.labels import MANAGED_BY_LABEL, MANAGER
from specdecode_operator.kube.resources import NODE, WATCHED


async def on_deployment(event: kopf.RawEvent, memo: OperatorState, **_: Any) -> None:
    """Look at an object that appeared, changed or went away."""
    is_echo = memo.cache.knows_parent(deployment.KIND, dict(event["object"]))
    key = _seen(event, deployment.KIND, memo)
    if key is not None:
        ask = memo.queue.add_soon if is_echo else _asking(event, memo)
        ask(key)  # also for one that is gone, so that the reconciler forgets it
        memo.add_related(key, ask)


async def on_capture(event: kopf.RawEvent, memo: OperatorState, **_: Any) -> None:
    """Look at a capture that appeared, changed or went away, and at the deployment that may lend it its GPUs."""
    key = _seen(event, capture.KIND, memo)
    if key is None:
        return
    _asking(event, memo)(key)  # also for one that is gone
    name = (event["object"].get("spec") or {}).get("deployment")
    if name:
        memo.add_related(Key(key.namespace, name), _asking(event, memo))
    if borrows(event["object"].get("spec") or {}):
        memo.add_keeping_captures()  # they make room for engines that lend their GPUs, and for their coming back


def _seen(event: kopf.RawEvent, kind: str, memo: OperatorState) -> Key | None:
    """Remember an object of ours as it is now; return its key, or None where it was listed already as it is."""
    memo.relist.watched.add(kind)
    body = _brought(event, kind, memo)
    if event["type"] is None and memo.cache.knows_parent(kind, body):
        return None
    if event["type"] == "DELETED":
        key = memo.cache.drop_parent(kind, body)
        memo.queue.forget(key)
    else:
        key = memo.cache.put_parent(kind, body)
    return key


def _brought(event: kopf.RawEvent, kind: str, memo: OperatorState) -> dict[str, Any]:
    """Return what a watch has brought, and note that it did."""
    body: dict[str, Any] = dict(event["object"])
    memo.progress.brings(kind, body)
    if event["type"] is None:  # it began anew, and listed what there is
        memo.relist.due.add(kind)
    return body


def _asking(event: kopf.RawEvent, memo: OperatorState) -> Callable[[Key], None]:
    """Return how to ask for a look: of what is only listed, such as at the start, nothing need have changed."""
    return memo.queue.add_calmly if event["type"] is None else memo.queue.add


async def on_node(event: kopf.RawEvent, memo: OperatorState, **_: Any) -> None:
    """Plan anew when the GPUs of the cluster changed."""
    body = _brought(event, NODE.kind, memo)
    if memo.cache.drop_node(body) if event["type"] == "DELETED" else memo.cache.put_node(body):
        memo.add_all()


async def on_child(event: kopf.RawEvent, resource: kopf.Resource, memo: OperatorState, **_: Any) -> None:
    """Look at the object that a child or a pod belongs to, or at all that share what is known of models."""
    body = _brought(event, resource.kind or "", memo)
    if event["type"] is None and memo.cache.knows(resource.kind or "", body):
        return
    if event["type"] == "DELETED":
        owner = memo.cache.drop(resource.kind or "", body)
        owners = [] if owner is None else [owner]
    else:
        owners = memo.cache.put(resource.kind or "", body)
    for key in owners:
        if memo.cache.parent(key) is None:
            continue
        if key.kind == deployment.KIND:
            memo.add_related(key, memo.queue.add_calmly if event["type"] is None else memo.queue.add_soon)
        else:
            _asking(event, memo)(key)
    if is_model_facts(resource.kind or "", body):
        memo.add_all(body["metadata"]["namespace"])


def register(registry: kopf.OperatorRegistry, *, nodes: bool) -> None:
    """Have all of them called; of nodes where they may be looked at."""
    kopf.on.event(base.GROUP, base.VERSION, deployment.PLURAL, registry=registry)(on_deployment)
    kopf.on.event(base.GROUP, base.VERSION, capture.PLURAL, registry=registry)(on_capture)
    if nodes:
        kopf.on.event("nodes", registry=registry)(on_node)
    for resource in WATCHED:
        names = filter(None, [resource.group, resource.api_version.rpartition("/")[2], resource.plural])
        kopf.on.event(*names, labels={MANAGED_BY_LABEL: MANAGER}, registry=registry)(on_child)
