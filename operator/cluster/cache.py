"""What the watches have seen, so that a reconcile asks the API server for little."""

from collections import defaultdict
from dataclasses import dataclass

from specdecode_operator.cluster.client import Body
from specdecode_operator.cluster.fleet import NodeFacts, node_facts
from specdecode_operator.labels import DEPLOYMENT_LABEL


@dataclass(frozen=True)
class Key:
    """Names one SpecDecodeDeployment."""

    namespace: str
    name: str

    def __str__(self) -> str:
        """Namespace and name, as kubectl users write them."""
        return f"{self.namespace}/{self.name}"


class Cache:
    """Latest bodies of our objects, of what belongs to them, and facts of the nodes.

    A watch may lag behind a write of our own. That is harmless: server-side
    apply of what already stands changes nothing.
    """

    def __init__(self) -> None:
        self._deployments: dict[Key, Body] = {}
        self._belongings: defaultdict[Key, dict[tuple[str, str], Body]] = defaultdict(dict)
        self._nodes: dict[str, NodeFacts] = {}

    def put_deployment(self, body: Body) -> Key:
        """Remember a SpecDecodeDeployment; return its key."""
        key = Key(body["metadata"]["namespace"], body["metadata"]["name"])
        self._deployments[key] = _newer(self._deployments.get(key), body)
        return key

    def drop_deployment(self, key: Key) -> None:
        """Forget a SpecDecodeDeployment that is gone."""
        self._deployments.pop(key, None)

    def deployment(self, key: Key) -> Body | None:
        """Latest body of a SpecDecodeDeployment."""
        return self._deployments.get(key)

    def deployments(self) -> tuple[Key, ...]:
        """Keys of all SpecDecodeDeployments."""
        return tuple(self._deployments)

    def put(self, kind: str, body: Body, *, gone: bool = False) -> Key | None:
        """Remember (or forget) a labelled child or pod; return the key it belongs to."""
        metadata = body["metadata"]
        owner = (metadata.get("labels") or {}).get(DEPLOYMENT_LABEL)
        if owner is None:
            return None
        key = Key(metadata["namespace"], owner)
        identity = (kind, metadata["name"])
        if gone:
            self._belongings[key].pop(identity, None)
            if not self._belongings[key]:
                del self._belongings[key]
        else:
            known = self._belongings[key].get(identity)
            self._belongings[key][identity] = _newer(known, body)
        return key

    def belongings(self, key: Key, kind: str) -> list[Body]:
        """Bodies of one kind that carry the label of this SpecDecodeDeployment, by name."""
        found = self._belongings.get(key, {})
        names = sorted(name for found_kind, name in found if found_kind == kind)
        return [found[kind, name] for name in names]

    def put_node(self, body: Body, *, gone: bool = False) -> bool:
        """Remember a node; return whether anything changed that plans depend on."""
        name = body["metadata"]["name"]
        facts = None if gone else node_facts(body)
        if facts == self._nodes.get(name):
            return False
        if facts is None:
            del self._nodes[name]
        else:
            self._nodes[name] = facts
        return True

    def nodes(self) -> tuple[NodeFacts, ...]:
        """GPU nodes that can take pods, by name."""
        return tuple(self._nodes[name] for name in sorted(self._nodes))


def _newer(known: Body | None, seen: Body) -> Body:
    """The later of two versions: the answer to a write may overtake older watch events.

    Resource versions of one kind are ordered numbers:
    https://kubernetes.io/docs/reference/using-api/api-concepts/#resource-versions
    """
    if known is None or known["metadata"]["uid"] != seen["metadata"]["uid"]:
        return seen
    versions = (int(body["metadata"]["resourceVersion"]) for body in (known, seen))
    return known if next(versions) > next(versions) else seen
