"""Cache of the objects that watches and lists return; reconciles read it instead of the API server.

`SharedValues` keeps one copy of the texts and the parts of objects that thousands of objects repeat.
"""

import hashlib
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterable
from itertools import chain
from typing import Any, Final, Generic, TypeVar

from specdecode_operator.api import capture, training
from specdecode_operator.api.base import Body
from specdecode_operator.api.deployment import Key
from specdecode_operator.cluster.device_slices import UNKNOWN_DEVICES, DeviceInventory
from specdecode_operator.cluster.drift import applied_replicas_managers, foreign_entries
from specdecode_operator.cluster.nodes import GPU_RESOURCE, NodeFacts, node_facts
from specdecode_operator.cluster.packing import PackedTexts
from specdecode_operator.cluster.resources import (
    CAPTURE_LABEL,
    CAPTURED_DEPLOYMENT_LABEL,
    COMPUTES_FOR_LABEL,
    CONFIG_MAP,
    DEPLOYMENT_LABEL,
    MANAGED_BY_LABEL,
    MANAGER,
    MODEL_FACTS_NAME,
    NODE,
    PERSISTENT_VOLUME_CLAIM,
    POD,
    READS_FOR_LABEL,
    SHARED_CONFIG_MAPS,
    TRAINING_LABEL,
)

Member = TypeVar("Member", bound=Hashable)


class OwnerIndex(Generic[Member]):
    """Members by their owner; each has at most one."""

    def __init__(self) -> None:
        self._owners: dict[Member, Key] = {}
        self._members: defaultdict[Key, set[Member]] = defaultdict(set)

    def put(self, member: Member, owner: Key | None) -> None:
        """Set the owner of a member, or remove it for None."""
        if self._owners.get(member) == owner:
            return
        self.drop(member)
        if owner is not None:
            self._owners[member] = owner
            self._members[owner].add(member)

    def drop(self, member: Member) -> None:
        """Remove a member if it exists."""
        owner = self._owners.pop(member, None)
        if owner is None:
            return
        self._members[owner].discard(member)
        if not self._members[owner]:
            del self._members[owner]

    def owner(self, member: Member) -> Key | None:
        """Return the owner of a member, or None."""
        return self._owners.get(member)

    def members(self, owner: Key) -> frozenset[Member]:
        """Return the members of an owner."""
        return frozenset(self._members.get(owner, ()))


_MOST_BYTES: Final = 2**20
"""Limit of the shared texts and numbers, so that untrusted ones cannot fill the memory."""
_MOST_PARTS: Final = 10_000
"""Limit of the shared objects and lists. A thousand deployments of ten specs have a few thousand."""
_ENTRY_BYTES: Final = 150
"""Size of a short text in a table, without its characters."""


class SharedValues:
    """Interned JSON: equal texts, objects and lists of different objects share memory, so they are read-only."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}
        self._numbers: dict[type, dict[float, float]] = {int: {}, float: {}}
        self._parts: dict[int, Any] = {}
        """Objects and lists by the hash of the identities of their members."""
        self._bytes = 0

    @property
    def known_bytes(self) -> int:
        """Size of the interned texts and numbers, at one byte per character."""
        return self._bytes

    def share(self, value: Any, former: Any = None) -> Any:
        """Return an equal value with interned parts; ``former`` is the earlier version of the object."""
        if isinstance(value, str):
            return self._shared(self._texts, value, len(value))
        if isinstance(value, dict):
            if former == value:
                return former
            earlier, before = former if isinstance(former, dict) else {}, self._bytes
            own = {
                self._shared(self._texts, name, len(name)): self.share(each, earlier.get(name))
                for name, each in value.items()
            }
            return self._part(own, (*own, *own.values()), before)
        if isinstance(value, list):
            if former == value:
                return former
            before = self._bytes
            entries = [self.share(each) for each in value]
            return self._part(entries, entries, before)
        numbers = self._numbers.get(type(value))
        return value if numbers is None else self._shared(numbers, value, 0)

    def _part(self, part: Any, members: Iterable[Any], before: int) -> Any:
        """Return an equal part that is known; ``before`` is the size of the texts before its members were shared."""
        if self._bytes != before:  # A part with a new text or number is new.
            return part
        place = hash((type(part), *map(id, members)))
        known = self._parts.setdefault(place, part)
        if len(self._parts) > _MOST_PARTS:
            self._parts.clear()
        return known if known == part else part

    def _shared(self, known: dict[Any, Any], value: Any, length: int) -> Any:
        found = known.get(value)
        if found is not None:
            return found
        size = _ENTRY_BYTES + length
        if size > _MOST_BYTES:
            return value
        if self._bytes + size > _MOST_BYTES:  # those in use come back with the next object that has them
            self._texts.clear()
            self._parts.clear()
            for numbers in self._numbers.values():
                numbers.clear()
            self._bytes = 0
        known[value] = value
        self._bytes += size
        return value


_REMEMBERED_DELETIONS: Final = 2000
"""Deletions of which late events are dropped; one takes 180 bytes. The next full list drops an older one again."""
_RUNS: Final = frozenset({capture.KIND, training.KIND})

_COMPARED_DATA: Final = frozenset({"plan.json", "matrix.csv", "canaries.json"})
"""Entries of the ConfigMap with the plan: only changes matter, because they are never read back."""
_RARELY_READ: Final = frozenset({"engines.json"})
"""Entries of the ConfigMap with the last good workload, which are read after a start."""


class Cache:
    """Latest bodies of our objects and of their children and pods, and facts of the nodes.

    Events may come late, twice or not at all: an older version never replaces a newer one, a deleted object does not
    come back, and `retain` drops what a full list lacks.
    """

    def __init__(self) -> None:
        self._shared = SharedValues()
        self._parents: defaultdict[str, dict[Key, Body]] = defaultdict(dict)
        self._children: defaultdict[Key, dict[tuple[str, str], Body]] = defaultdict(dict)
        self._owners: dict[tuple[str, str, str], Key] = {}
        """Children as (kind, namespace, name). Clients that may write labels may change their owner."""
        self._runs: OwnerIndex[Key] = OwnerIndex()
        """Captures and trainings by the deployment that they name."""
        self._captured_claims: OwnerIndex[tuple[Key, str]] = OwnerIndex()
        """Claims as (capture, name), by the deployment of their label."""
        self._shared_config_maps: dict[tuple[str, str], Body] = {}
        """ConfigMaps that the objects of a namespace share, by namespace and name."""
        self._nodes: dict[str, tuple[NodeFacts, int]] = {}
        self._sorted_nodes: tuple[NodeFacts, ...] | None = None
        """The same tuple until a node changes, because it is part of the key of each cached decision."""
        self.optional_kinds: frozenset[str] = frozenset()
        """Kinds of `resources.OPTIONAL` that the cluster has and the operator may list."""
        self.devices: DeviceInventory = UNKNOWN_DEVICES
        """Devices that pods can claim; unknown until an object claims some."""
        self._removals: Counter[Key] = Counter()
        self._deleted: OrderedDict[str, int] = OrderedDict()
        """Version by which an object was gone, by UID. One that gets our label back comes in a later version."""
        self.on_change: Callable[[Key], None] = lambda _: None
        """Called with a deployment if the object, a child, a capture or a child of a capture changed."""
        self.on_seen: Callable[[str, Body], None] = lambda *_: None
        """Called with the kind and body of each object that is stored."""

    def put_parent(self, kind: str, body: Body) -> Key:
        """Store an object of one of our kinds; return its key."""
        self.on_seen(kind, body)
        key = _key(kind, body)
        known = self._parents[kind].get(key)
        newest = self._newest(known, _slim_parent(body))
        if newest is not None:
            before = self._about(key)
            self._parents[kind][key] = newest if newest is known else self._shared.share(newest, known)
            if kind in _RUNS:
                name = (newest.get("spec") or {}).get("deployment")
                self._runs.put(key, Key(key.namespace, str(name)) if name else None)
            for about in {before, self._about(key)}:
                self._tell(about)
        return key

    def drop_parent(self, kind: str, body: Body, version: int | None = None) -> Key:
        """Remove an object that is gone, but not a new one of its name; return its key."""
        key = _key(kind, body)
        self._remember_deletion(body, version)
        if _uid(self._parents[kind].get(key)) == _uid(body):
            about = self._about(key)
            self._count_removal(self._runs.owner(key))
            del self._parents[kind][key]
            self._runs.drop(key)
            self._removals.pop(key, None)
            self._tell(about)
        return key

    def parent(self, key: Key) -> Body | None:
        """Return the latest body of an object."""
        return self._parents[key.kind].get(key)

    def parents(self, kind: str | None = None) -> tuple[Key, ...]:
        """Return the keys of all objects, or of one kind."""
        # Each copy is one step of the interpreter: metrics are collected in a thread, while watches go on.
        kinds = tuple(self._parents) if kind is None else (kind,)
        return tuple(chain.from_iterable([tuple(self._parents[each]) for each in kinds]))

    def captures_of(self, deployment_key: Key) -> list[Body]:
        """Return the captures of a deployment, by name."""
        return self._runs_of(deployment_key, capture.KIND)

    def trainings_of(self, deployment_key: Key) -> list[Body]:
        """Return the trainings of a deployment, by name."""
        return self._runs_of(deployment_key, training.KIND)

    def runs_of(self, deployment_key: Key) -> list[Body]:
        """Return the captures and the trainings of a deployment, each by name."""
        return [*self.captures_of(deployment_key), *self.trainings_of(deployment_key)]

    def _runs_of(self, deployment_key: Key, kind: str) -> list[Body]:
        found = (key for key in self._runs.members(deployment_key) if key.kind == kind)
        return [self._parents[kind][key] for key in sorted(found, key=lambda key: key.name)]

    def claims_captured_from(self, deployment_key: Key) -> list[Body]:
        """Return the claims of captures of a deployment, even of deleted captures, by name."""
        found = sorted(self._captured_claims.members(deployment_key), key=lambda member: member[1])
        return [self._children[key][PERSISTENT_VOLUME_CLAIM.kind, name] for key, name in found]

    def put(self, kind: str, body: Body) -> list[Key]:
        """Store a labelled child or pod; return its owner, and the former one if labels changed."""
        if (body["metadata"].get("labels") or {}).get(MANAGED_BY_LABEL) == MANAGER:  # others are not watched
            self.on_seen(kind, body)
        slimmed, place = slim(kind, body), _place(body)
        if is_shared(kind, body) or (kind == CONFIG_MAP.kind and place in self._shared_config_maps):
            newest = self._newest(self._shared_config_maps.get(place), slimmed)
            if newest is slimmed and not is_shared(kind, body):  # It lost its label.
                del self._shared_config_maps[place]
            elif newest is not None:
                self._shared_config_maps[place] = newest
        member, owner = _member(kind, body), _owner(kind, body)
        former = self._owners.get(member)
        known = None if former is None else self._children[former][kind, member[2]]
        newest = self._newest(known, slimmed)
        if newest is None or newest is known:
            return [] if former is None else [former]
        if former is not None and former != owner:
            self._remove(member, former)
            if owner is None:
                self._remember_deletion(body)
        if owner is not None:
            self._children[owner][kind, member[2]] = self._shared.share(newest, known)
            self._owners[member] = owner
            if owner.kind == capture.KIND and kind == PERSISTENT_VOLUME_CLAIM.kind:
                name = newest["metadata"]["labels"].get(CAPTURED_DEPLOYMENT_LABEL)
                self._captured_claims.put((owner, member[2]), Key(owner.namespace, name) if name else None)
            self._tell(self._about(owner))
        return list(dict.fromkeys(key for key in (owner, former) if key is not None))

    def drop(self, kind: str, body: Body, version: int | None = None) -> Key | None:
        """Remove a labelled child or pod that was gone by a version; return its owner."""
        self._remember_deletion(body, version)
        member, place = _member(kind, body), _place(body)
        if kind == CONFIG_MAP.kind and _uid(self._shared_config_maps.get(place)) == _uid(body):
            del self._shared_config_maps[place]
        owner = self._owners.get(member)
        if owner is None:
            return _owner(kind, body)
        if _uid(self._children[owner][kind, member[2]]) == _uid(body):
            self._remove(member, owner)
        return owner

    def _remove(self, member: tuple[str, str, str], owner: Key) -> None:
        kind, _, name = member
        self._count_removal(owner)
        del self._children[owner][kind, name]
        if not self._children[owner]:
            del self._children[owner]
        del self._owners[member]
        if kind == PERSISTENT_VOLUME_CLAIM.kind:
            self._captured_claims.drop((owner, name))
        self._tell(self._about(owner))

    def children_of(self, key: Key, kind: str) -> list[Body]:
        """Return the objects of one kind that carry the label of this object, by name."""
        found = self._children.get(key, {})
        names = sorted(name for found_kind, name in found if found_kind == kind)
        return [found[kind, name] for name in names]

    def all_children(self, key: Key) -> dict[tuple[str, str], Body]:
        """Return the objects labelled as children of this object, by kind and name. Unchanged bodies stay identical."""
        return dict(self._children.get(key, {}))

    def removals(self, key: Key) -> int:
        """Return how many children, captures and trainings of an object have been removed so far.

        An object that comes and goes during a reconcile is in neither state, but the reconcile may have used it.
        """
        return self._removals[key]

    def _count_removal(self, key: Key | None) -> None:
        if key is not None and key in self._parents[key.kind]:
            self._removals[key] += 1

    def versions_about(self, key: Key) -> list[tuple[str, str, str]]:
        """Return kind, UID and version of a deployment, its children and runs, and what its namespace shares."""
        shared = [self.shared_config_map(key.namespace, name) for name in SHARED_CONFIG_MAPS]
        bodies = [("", body) for body in (self.parent(key), *self.runs_of(key), *shared)]
        bodies += [(kind, body) for (kind, _), body in self._children.get(key, {}).items()]
        return [(kind, str(_uid(body)), body["metadata"]["resourceVersion"]) for kind, body in bodies if body]

    def model_facts(self, namespace: str) -> dict[str, str]:
        """Return the data of the ConfigMap with facts about models of a namespace."""
        facts: dict[str, str] = (self.shared_config_map(namespace, MODEL_FACTS_NAME) or {}).get("data") or {}
        return facts

    def shared_config_map(self, namespace: str, name: str) -> Body | None:
        """Return a ConfigMap of `SHARED_CONFIG_MAPS`; the same object until it changes."""
        return self._shared_config_maps.get((namespace, name))

    def namespaces_with(self, name: str) -> frozenset[str]:
        """Return the namespaces that have this one of `SHARED_CONFIG_MAPS`."""
        return frozenset(namespace for namespace, found in self._shared_config_maps if found == name)

    def put_node(self, body: Body) -> bool:
        """Store a node; return whether plans may change."""
        self.on_seen(NODE.kind, body)
        name, facts = body["metadata"]["name"], node_facts(body)
        known, version = self._nodes.get(name), _version(body)
        told = max(self._deleted.get(str(_uid(body)), -1), -1 if known is None else known[1])
        if version < told:  # a list that is older than a watch event
            return False
        if facts is None:
            return self._remove_node(name)
        self._nodes[name] = (facts, version)
        is_news = known is None or known[0] != facts
        if is_news:
            self._sorted_nodes = None
        return is_news

    def drop_node(self, body: Body) -> bool:
        """Remove a node that is gone, but not a new one of its name; return whether plans may change."""
        self._remember_deletion(body)
        name = body["metadata"]["name"]
        known = self._nodes.get(name)
        return known is not None and known[1] <= _version(body) and self._remove_node(name)

    def _remove_node(self, name: str) -> bool:
        is_news = self._nodes.pop(name, None) is not None
        if is_news:
            self._sorted_nodes = None
        return is_news

    def nodes(self) -> tuple[NodeFacts, ...]:
        """Return the nodes with GPUs, by name."""
        if self._sorted_nodes is None:
            self._sorted_nodes = tuple(self._nodes[name][0] for name in sorted(self._nodes))
        return self._sorted_nodes

    def give_nodes(self, nodes: Iterable[NodeFacts]) -> None:
        """Set the nodes from the operator's configuration, if it may not list nodes."""
        self._nodes = {node.name: (node, 0) for node in nodes}
        self._sorted_nodes = None

    def knows_parent(self, kind: str, body: Body) -> bool:
        """Return whether a parent is stored in this version or a later one."""
        return _has_namespace(body) and _is_as_new(self._parents[kind].get(_key(kind, body)), body)

    def knows(self, kind: str, body: Body) -> bool:
        """Return whether a labelled child or pod is stored in this version or a later one."""
        if not _has_namespace(body):
            return False
        if is_shared(kind, body):
            return _is_as_new(self._shared_config_maps.get(_place(body)), body)
        owner = self._owners.get(_member(kind, body))
        return owner is not None and _is_as_new(self._children[owner][kind, body["metadata"]["name"]], body)

    def owner(self, kind: str, body: Body) -> Key | None:
        """Return the owner of a stored child or pod."""
        return self._owners.get(_member(kind, body))

    def retain_parents(
        self, kind: str, present: Iterable[str], version: int, namespace: str | None = None
    ) -> list[Key]:
        """Drop the objects of a kind that a full list of this version lacks, and return them.

        ``present`` are the UIDs in the list, which is of one namespace or of all.
        """
        missed = _missed([*self._parents[kind].values()], present, version, namespace)
        return [self.drop_parent(kind, body, version) for body in missed]

    def retain(self, kind: str, present: Iterable[str], version: int, namespace: str | None = None) -> list[Key]:
        """Drop the children or pods of a kind that such a list lacks; return their owners."""
        known = [
            body for bodies in self._children.values() for (found_kind, _), body in bodies.items() if found_kind == kind
        ]
        if kind == CONFIG_MAP.kind:
            known += self._shared_config_maps.values()
        owners = [self.drop(kind, body, version) for body in _missed(known, present, version, namespace)]
        return [owner for owner in owners if owner is not None]

    def retain_nodes(self, listed: Iterable[Body], version: int) -> None:
        """Drop the nodes that a full list of this version lacks."""
        present = {body["metadata"]["name"] for body in listed}
        for name, (_, seen) in [*self._nodes.items()]:
            if seen <= version and name not in present:
                self._remove_node(name)

    def _newest(self, known: Body | None, seen: Body) -> Body | None:
        """Return the later of two versions: the response to a write may overtake older watch events.

        Resource versions of one kind are ordered, even of different objects of one name.
        https://kubernetes.io/docs/reference/using-api/api-concepts/#resource-versions
        """
        if _version(seen) <= self._deleted.get(str(_uid(seen)), -1):
            return known
        return known if known is not None and _version(known) > _version(seen) else seen

    def _about(self, key: Key) -> Key | None:
        """Return the deployment that an object is, or is a capture of."""
        if key.kind == training.KIND:
            return None
        return self._runs.owner(key) if key.kind == capture.KIND else key

    def _tell(self, about: Key | None) -> None:
        if about is not None:
            self.on_change(about)

    def _remember_deletion(self, body: Body, version: int | None = None) -> None:
        if version is None and "resourceVersion" not in body["metadata"]:
            return  # A call failed with HTTP 404, which may come from a proxy: later events or a list bring it back.
        self._deleted[str(_uid(body))] = _version(body) if version is None else version
        while len(self._deleted) > _REMEMBERED_DELETIONS:
            self._deleted.popitem(last=False)


def _missed(known: Iterable[Body], present: Iterable[str], version: int, namespace: str | None) -> list[Body]:
    """Return the known objects that a full list of this version, of a namespace or of all, lacks."""
    uids = set(present)
    within = (body for body in known if namespace in (None, body["metadata"]["namespace"]))
    return [body for body in within if _version(body) <= version and _uid(body) not in uids]


def is_shared(kind: str, body: Body) -> bool:
    """Return whether this is a ConfigMap that the objects of a namespace share."""
    label = SHARED_CONFIG_MAPS.get(body["metadata"]["name"]) if kind == CONFIG_MAP.kind else None
    return label is not None and label in (body["metadata"].get("labels") or {})


def _has_namespace(body: Body) -> bool:
    """Return whether an object has a namespace. Only a faulty API server or proxy omits it."""
    return "namespace" in body["metadata"]


def _key(kind: str, body: Body) -> Key:
    return Key(body["metadata"]["namespace"], body["metadata"]["name"], kind)


def _place(body: Body) -> tuple[str, str]:
    return body["metadata"]["namespace"], body["metadata"]["name"]


def _member(kind: str, body: Body) -> tuple[str, str, str]:
    return kind, body["metadata"]["namespace"], body["metadata"]["name"]


def _owner(kind: str, body: Body) -> Key | None:
    if is_shared(kind, body):
        return None
    labels = body["metadata"].get("labels") or {}
    if name := labels.get(CAPTURE_LABEL):
        return Key(body["metadata"]["namespace"], name, capture.KIND)
    if name := labels.get(TRAINING_LABEL):
        return Key(body["metadata"]["namespace"], name, training.KIND)
    name = labels.get(DEPLOYMENT_LABEL) or labels.get(COMPUTES_FOR_LABEL) or labels.get(READS_FOR_LABEL)
    return Key(body["metadata"]["namespace"], name) if name else None


def without_managed_fields(body: Body) -> Body:
    """Return a body without `managedFields`, which are as long as the rest."""
    return {**body, "metadata": {name: value for name, value in body["metadata"].items() if name != "managedFields"}}


def _slim_parent(body: Body) -> Body:
    """Return an object of ours with only the managed fields that say who else sets the replicas of an autoscaler."""
    slimmed = without_managed_fields(body)
    if "autoscaling" in (body.get("spec") or {}):
        entries = body["metadata"].get("managedFields") or []
        slimmed["metadata"]["managedFields"] = [
            each for each in entries if applied_replicas_managers({"managedFields": [each]})
        ]
    return slimmed


def slim(kind: str, body: Body) -> Body:
    """Return what decisions read of an object; the rest would be most of the memory of thousands of objects."""
    kept = ("metadata", "status") if kind == POD.kind else tuple(body)
    slimmed = {field: body[field] for field in kept if field in body}
    slimmed |= without_managed_fields(slimmed)
    if foreign := foreign_entries(kind, body["metadata"]):
        slimmed["metadata"]["managedFields"] = foreign
    if kind == POD.kind and READS_FOR_LABEL in (body["metadata"].get("labels") or {}):
        slimmed["spec"] = body.get("spec") or {}  # Few pods read models; the status names their image and volume.
    elif kind == POD.kind:
        # Its node, variables from Secrets, and GPUs.
        spec = body.get("spec") or {}
        containers = map(_slim_container, [*(spec.get("initContainers") or []), *(spec.get("containers") or [])])
        node = {"nodeName": spec["nodeName"]} if spec.get("nodeName") else {}
        claims = {"resourceClaims": spec["resourceClaims"]} if spec.get("resourceClaims") else {}
        slimmed["spec"] = node | claims | {"containers": [each for each in containers if each]}
    if kind == CONFIG_MAP.kind:
        data = {key: _digest(text) if key in _COMPARED_DATA else text for key, text in (body.get("data") or {}).items()}
        slimmed["data"] = data if data.keys().isdisjoint(_RARELY_READ) else PackedTexts(data, _RARELY_READ)
        if binary := body.get("binaryData"):
            slimmed["binaryData"] = {key: _digest(text) for key, text in binary.items()}
    return slimmed


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _slim_container(container: Body) -> Body:
    env = [each for each in container.get("env") or [] if (each.get("valueFrom") or {}).get("secretKeyRef")]
    limits = (container.get("resources") or {}).get("limits") or {}
    gpus = {"resources": {"limits": {GPU_RESOURCE: limits[GPU_RESOURCE]}}} if GPU_RESOURCE in limits else {}
    return ({"env": env} if env else {}) | gpus


def _uid(body: Body | None) -> str | None:
    return None if body is None else str(body["metadata"]["uid"])


def _is_as_new(known: Body | None, seen: Body) -> bool:
    return known is not None and _version(known) >= _version(seen)


def _version(body: Body) -> int:
    return int(body["metadata"]["resourceVersion"])
