"""What the engines of all deployments have of their places, for captures that wait behind them."""

from collections.abc import Sequence

from specdecode_operator.api import capture, deployment
from specdecode_operator.api.base import Body
from specdecode_operator.api.key import Key
from specdecode_operator.capture.control.serving_first import Serving, read_serving
from specdecode_operator.cluster.cache import Cache
from specdecode_operator.deployment.models.jobs import is_model_pod
from specdecode_operator.kube.resources import POD


class Servings:
    """Read anew only of what changed: each of a thousand captures that wait would else read a thousand deployments."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._servings: dict[Key, Serving] = {}
        self._changed = set(cache.parents(deployment.KIND))
        cache.on_change = self._note

    def now(self) -> Sequence[Serving]:
        """Return what each deployment has, of those that are not being removed."""
        while self._changed:
            key = self._changed.pop()
            body = self._cache.parent(key)
            if body is None or "deletionTimestamp" in body["metadata"]:
                self._servings.pop(key, None)
            else:
                self._servings[key] = self._read(key, body)
        return tuple(self._servings.values())

    def _note(self, key: Key) -> None:
        if self._cache.parent(key) is not None:
            self._changed.add(key)
        else:  # of what is gone, nothing is kept, although its pods end later
            self._changed.discard(key)
            self._servings.pop(key, None)

    def _read(self, key: Key, body: Body) -> Serving:
        captures = self._cache.captures_of(key)
        owners = [Key(key.namespace, each["metadata"]["name"], capture.KIND) for each in captures]
        capture_pods = [pod for owner in owners for pod in self._cache.children_of(owner, POD.kind)]
        return read_serving(body, engine_pods(self._cache, key), captures, capture_pods)


def engine_pods(cache: Cache, key: Key) -> list[Body]:
    """Return the pods of a deployment's engines."""
    return [pod for pod in cache.children_of(key, POD.kind) if not is_model_pod(pod)]
