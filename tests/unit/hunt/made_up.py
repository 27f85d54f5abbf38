"""Lives as the hunt records them, made up: one in which all is well, and ways to spoil it."""

import copy
from typing import Any

from hunt.records import Life, Moment, OperatorLife, Record, contents, foreign
from hunt.states import State
from hunt.steps import Sequence, Step

Body = dict[str, Any]

OWNER = {"kind": "SpecDecodeDeployment", "name": "hunted", "uid": "parent"}


def body(kind: str, name: str, *, owner: Body | None = OWNER, **parts: Any) -> Body:
    owners = {"ownerReferences": [owner]} if owner else {}
    metadata = {"name": name, "namespace": "hunt-0", "uid": f"{kind}-{name}", "resourceVersion": "1", **owners}
    return {"kind": kind, "metadata": {**metadata, "generation": 1}, **copy.deepcopy(parts)}


def condition(type_: str, status: str, reason: str = "Serving", message: str = "") -> Body:
    return {"type": type_, "status": status, "reason": reason, "message": message, "observedGeneration": 1}


def summary(ready: str, reconciling: str, stalled: str, message: str = "") -> list[Body]:
    return [
        condition("Ready", ready, message=message),
        condition("Reconciling", reconciling),
        condition("Stalled", stalled),
    ]


def parent(conditions: list[Body] | None = None, ready: int = 1, **spec: Any) -> Body:
    conditions = conditions or summary("True", "False", "False")
    status = {"observedGeneration": 1, "readyReplicas": ready, "conditions": conditions}
    found = body("SpecDecodeDeployment", "hunted", owner=None, spec={"serving": {}, **spec}, status=status)
    found["metadata"]["uid"] = "parent"
    return found


def pod(ready: str = "True") -> Body:
    owner = {"kind": "ReplicaSet", "name": "hunted-1", "uid": "replicas"}
    return body("Pod", "hunted-1", owner=owner, status={"conditions": [condition("Ready", ready)]})


def workload(ready: int = 1) -> Body:
    return body("Deployment", "hunted", spec={"replicas": 1}, status={"readyReplicas": ready})


STRANGER = body("ConfigMap", "foreign", owner=None, data={"a": "b"})
GOOD = (parent(), workload(), pod(), body("Service", "hunted", spec={"clusterIP": "10.0.0.1"}), STRANGER)


def life(objects: tuple[Body, ...] = GOOD, **changes: Any) -> Life:
    """A life with one step, at whose end there are these objects."""
    step = changes.pop("step", Step("apply", State("llama-8b-ngram")))
    moment = Moment(0, step, objects, **changes.pop("moment", {}))
    given = {"end": objects, "later": objects, "fresh": GOOD, "left": (STRANGER,), "moments": [moment], **changes}
    return Life("hunt-0", Sequence((step,)), foreign=contents(foreign([STRANGER])), **given)


def record(*lives: Life, log: str = "", ended: tuple[str, ...] = (), memory: tuple[float, ...] = (100, 110)) -> Record:
    return Record(list(lives or [life()]), OperatorLife(log, list(ended), list(memory)))
