"""What engines have of their places is the same as if all of it were read anew, but only what changed is read."""

from collections import Counter
from random import Random
from typing import Any

import pytest

from specdecode_operator.api import capture, deployment
from specdecode_operator.api.base import Body
from specdecode_operator.api.deployment import Key
from specdecode_operator.cluster.cache import Cache
from specdecode_operator.cluster.resources import CAPTURE_LABEL, DEPLOYMENT_LABEL, POD
from specdecode_operator.handlers import reconcile_capture as module
from specdecode_operator.handlers.reconcile_capture import Servings

RUNNING, ENDED = {"phase": "Running"}, {"phase": "Failed"}


def body(name: str, version: int, labels: dict[str, str] | None = None, **parts: Any) -> Body:
    metadata = {"namespace": "default", "name": name, "uid": name, "resourceVersion": str(version)}
    return {"metadata": metadata | {"labels": labels or {}}, **parts}


def made_anew(body: Body, times: int) -> Body:
    """Return an object as the one after so many of its name."""
    return {**body, "metadata": {**body["metadata"], "uid": f"{body['metadata']['name']}-{times}"}}


class World:
    """A cache in which objects come, change and go."""

    def __init__(self) -> None:
        self.cache = Cache()
        self._version = 0
        self._gone: Counter[str] = Counter()

    def step(self, draw: Random) -> None:
        """Do one thing at random."""
        self._version += 1
        name, other = (f"{draw.choice('abc')}" for _ in range(2))
        labels = draw.choice([{DEPLOYMENT_LABEL: name}, {CAPTURE_LABEL: f"capture-{name}"}])
        pod = body(f"pod-{name}-{other}", self._version, labels, status=draw.choice([RUNNING, ENDED]))
        lends = body(f"capture-{name}", self._version, spec={"deployment": other, "suspend": draw.random() < 0.5})
        serves = body(name, self._version, spec={"replicas": draw.randrange(3)})
        goes = draw.random() < 0.3
        put, drop = self.cache.put_parent, self.cache.drop_parent
        kind, seen = draw.choice([(POD.kind, pod), (capture.KIND, lends), (deployment.KIND, serves)])
        seen = made_anew(seen, self._gone[seen["metadata"]["name"]])
        if kind == POD.kind:
            put, drop = self.cache.put, self.cache.drop  # type: ignore[assignment]
        (drop if goes else put)(kind, seen)
        self._gone[seen["metadata"]["name"]] += goes


@pytest.mark.parametrize("seed", range(5))
def test_after_any_changes_it_is_what_all_of_it_read_anew_says(seed: int) -> None:
    draw, world = Random(seed), World()
    servings = Servings(world.cache)
    for _ in range(300):
        world.step(draw)
        note = world.cache.on_change
        anew = Servings(world.cache).now()
        world.cache.on_change = note
        assert sorted(servings.now(), key=lambda each: each.key) == sorted(anew, key=lambda each: each.key)


@pytest.mark.parametrize("gpus", [True, False])
def test_of_its_pods_in_the_cache_it_is_seen_whether_they_have_gpus(gpus: bool) -> None:
    cache = Cache()
    cache.put_parent(deployment.KIND, body("a", 1))
    spec = {"containers": [{"name": "engine", "resources": {"limits": {"nvidia.com/gpu": "8"} if gpus else {}}}]}
    cache.put(POD.kind, body("pod", 2, {DEPLOYMENT_LABEL: "a"}, status=RUNNING, spec=spec))
    assert [each.has_gpus for each in Servings(cache).now()] == [gpus]


def test_only_what_changed_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, read = Cache(), []
    whole = module.read_serving

    def noting(body: Body, *rest: Any) -> Any:
        read.append(body["metadata"]["name"])
        return whole(body, *rest)

    monkeypatch.setattr(module, "read_serving", noting)
    for name in "abc":
        cache.put_parent(deployment.KIND, body(name, 1))
    servings = Servings(cache)
    assert len(servings.now()) == 3
    read.clear()
    servings.now()
    cache.put(POD.kind, body("pod", 2, {DEPLOYMENT_LABEL: "b"}, status=RUNNING))
    servings.now()
    assert read == ["b"]
    cache.drop_parent(deployment.KIND, body("c", 3))
    cache.drop(POD.kind, body("pod", 4, {DEPLOYMENT_LABEL: "c"}))
    assert {each.key for each in servings.now()} == {Key("default", "a"), Key("default", "b")}
