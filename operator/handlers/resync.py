"""Resync: full lists, detection of stalled watches, and the order of reconciles without an event.

`Relist` updates the cache with changes that watches missed. `WatchProgress` reports a watch that delivers
no events although the API server has newer objects. `ResyncOrder` picks the objects of a round, because engine
state does not trigger watches. With more objects, the interval grows and the work per round stays the same.
"""

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import nsmallest
from itertools import chain, islice
from operator import itemgetter
from typing import Final

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from specdecode_operator.api import deployment
from specdecode_operator.api.base import PART_OF, PART_OF_LABEL, Body
from specdecode_operator.api.crds import INSTALL_CRD, crd_skew
from specdecode_operator.api.deployment import Key
from specdecode_operator.cluster.cache import Cache
from specdecode_operator.cluster.client import Cluster, ClusterError, ForbiddenError, NotFoundError
from specdecode_operator.cluster.device_slices import UNKNOWN_DEVICES, read_inventory
from specdecode_operator.cluster.nodes import NodeFacts
from specdecode_operator.cluster.resources import (
    CUSTOM_RESOURCE_DEFINITION,
    DEVICE_CLASS,
    NODE,
    OPTIONAL,
    OUR_KINDS,
    OWNED_SELECTOR,
    RESOURCE_CLAIM_TEMPLATE,
    RESOURCE_SLICE,
    STORAGE_CLASS,
    WATCHED,
    Resource,
)
from specdecode_operator.cluster.storage_classes import StorageClasses
from specdecode_operator.deployment.requeue import Requeue
from specdecode_operator.untrusted import mapping

_OUR_KINDS: Final = tuple(OUR_KINDS.values())
_SEEN: Final = (NODE, *WATCHED, *_OUR_KINDS)
"""Cached kinds in the order in which they are listed, so that children are known before their owners."""

_ROUNDS_TO_RELIST = 20
_ROUNDS_TO_RETRY = 4

_logger = logging.getLogger(__name__)


class Relist:
    """Lists objects and queues those whose changes watches missed. Failed lists raise `ClusterError`.

    ``nodes`` are the configured nodes; None to list the nodes of the cluster.
    """

    def __init__(
        self, cache: Cache, namespaces: Sequence[str], nodes: Sequence[NodeFacts] | None, ask: Callable[[Key], None]
    ) -> None:
        self._cache, self._nodes, self._ask = cache, nodes, ask
        self._is_clusterwide = not namespaces
        self._lists = Lists(cache, namespaces, ask)
        self.has_listed = self._lists.has_listed
        self.watched: set[str] = set()
        """Kinds whose watch has delivered an object. Other kinds are listed: kopf may miss a CRD that is created after
        its start, if the API server announces the CRD before serving it."""
        self.due: set[str] = set()
        """Kinds to list in the next round, because a watch that restarts does not report deleted objects."""
        self._put_off: set[str] = set()
        """Kinds whose list failed. The other kinds are listed first, because a list may take 30 s to fail."""
        self._reported_skews: set[str] = set()
        self._listed_devices: tuple[str, ...] | None = None
        """Versions of the ResourceSlices and DeviceClasses that were read last."""
        self.storage_classes: StorageClasses | None = None
        """StorageClasses for warnings of the webhook; None while they are unknown."""

    async def everything(self, cluster: Cluster) -> None:
        """List all kinds at the start, and periodically, because a watch that restarts misses deletions.

        At the start, watches deliver kinds in any order, so a serving object might seem to lack nodes and engines.
        """
        self.due.update(resource.kind for resource in _SEEN)
        await self._list_due(cluster)
        if self._is_clusterwide:
            bodies, _ = await cluster.list(CUSTOM_RESOURCE_DEFINITION, f"{PART_OF_LABEL}={PART_OF}")
            skews = {skew for body in bodies if (skew := crd_skew(body))}
            for skew in sorted(skews - self._reported_skews):
                _logger.warning("%s: install the CRDs and the operator in the same version (%s)", skew, INSTALL_CRD)
            self._reported_skews = skews
        await self._list_storage_classes(cluster)
        await self._list_devices(cluster)

    async def in_round(self, number: int, cluster: Cluster) -> None:
        """List the kinds that are due in a round; all kinds in round 0, because watches start after the first lists."""
        if number % _ROUNDS_TO_RETRY == 0:
            self.due |= self._put_off
            self._put_off.clear()
            await self._list_storage_classes(cluster)
        if number % _ROUNDS_TO_RETRY == 0 or any(self._awaits_devices(key) for key in self._claiming()):
            await self._list_devices(cluster)
        if number % _ROUNDS_TO_RELIST == 0:
            await self.everything(cluster)
        else:
            await self._list_due(cluster)

    async def _list_due(self, cluster: Cluster) -> None:
        for resource in _SEEN:
            is_watched = resource.kind in self.watched if resource in _OUR_KINDS else resource not in OPTIONAL
            if is_watched and resource.kind not in self.due:
                continue
            self.due.discard(resource.kind)  # Before the list, because its watch may restart meanwhile.
            try:
                await self._list(cluster, resource)
            except ClusterError:
                self._put_off.add(resource.kind)
                raise

    async def _list(self, cluster: Cluster, resource: Resource) -> None:
        """List one kind, and queue the objects to reconcile."""
        if resource == NODE:
            await self._list_nodes(cluster)
            return
        try:
            await self._lists.update(cluster, resource)
        except (NotFoundError, ForbiddenError) as error:
            if resource in OPTIONAL:
                self._cache.optional_kinds -= {resource.kind}  # It may be installed at any time.
            elif resource not in _OUR_KINDS or not isinstance(error, NotFoundError):  # Not a missing CRD
                raise
        else:
            if resource in OPTIONAL:
                self._cache.optional_kinds |= {resource.kind}

    async def _list_nodes(self, cluster: Cluster) -> None:
        if self._nodes is not None:
            self._cache.give_nodes(self._nodes)
            return
        nodes, version = await cluster.list(NODE)
        before = self._cache.nodes()
        for node in nodes:
            self._cache.put_node(node)
        self._cache.retain_nodes(nodes, version)
        if self._cache.nodes() != before:
            for key in self._cache.parents(deployment.KIND):
                self._ask(key)

    async def _list_devices(self, cluster: Cluster) -> None:
        """List the devices that pods can claim, if an object claims some, and queue these objects if they changed."""
        claiming = self._claiming()
        if not claiming or RESOURCE_CLAIM_TEMPLATE.kind not in self._cache.optional_kinds:
            return
        try:
            found = [await cluster.list(resource) for resource in (RESOURCE_SLICE, DEVICE_CLASS)]
        except (NotFoundError, ForbiddenError):
            self._cache.devices, self._listed_devices = UNKNOWN_DEVICES, None
            return
        versions = tuple(each["metadata"]["resourceVersion"] for bodies, _ in found for each in bodies)
        if versions != self._listed_devices:
            (slices, _), (classes, _) = found
            self._cache.devices, self._listed_devices = read_inventory(slices, classes), versions
            for key in claiming:
                self._ask(key)

    def _claiming(self) -> list[Key]:
        """Return the objects that claim devices."""
        specs = ((key, mapping(self._cache.parent(key) or {}, "spec")) for key in self._cache.parents(deployment.KIND))
        return [key for key, spec in specs if mapping(mapping(spec, "accelerator"), "resourceClaim")]

    def _awaits_devices(self, key: Key) -> bool:
        return not mapping(mapping(self._cache.parent(key) or {}, "status"), "plan")

    async def _list_storage_classes(self, cluster: Cluster) -> None:
        if not self._is_clusterwide:  # If namespaces are named, the operator may not list them.
            return
        try:
            self.storage_classes = StorageClasses.of((await cluster.list(STORAGE_CLASS))[0])
        except ForbiddenError:
            self.storage_classes = None


class Lists:
    """Lists the whole cluster, or each namespace that is served.

    A namespace in which the operator may not list is skipped, and its cached objects stay. If this applies to all
    namespaces, the list fails.

    ``ask`` is called for each object to reconcile as soon as its page is cached. If a later page fails, the next list
    skips the versions that are already cached.
    """

    def __init__(self, cache: Cache, namespaces: Sequence[str], ask: Callable[[Key], None]) -> None:
        self._cache, self._ask = cache, ask
        self._places: tuple[str | None, ...] = tuple(namespaces) or (None,)
        self._skipped: set[tuple[Resource, str | None]] = set()
        self._listed: set[tuple[Resource, str | None]] = set()
        """Kinds and places that were listed before, so that most of their objects are known."""

    def has_listed(self, resource: Resource, namespace: str) -> bool:
        """Return whether the cache holds a complete list of a kind in a namespace."""
        return not self._listed.isdisjoint({(resource, namespace), (resource, None)})

    async def update(self, cluster: Cluster, resource: Resource) -> None:
        """List a kind and report changed or deleted parents, or the owners of changed or deleted children and pods.

        Raises
        ------
        ClusterError
            If a list failed. Earlier pages are already stored and reported.
        """
        cache, kind, is_ours = self._cache, resource.kind, resource in _OUR_KINDS
        knows, retain = (cache.knows_parent, cache.retain_parents) if is_ours else (cache.knows, cache.retain)
        selector = None if is_ours else OWNED_SELECTOR
        errors: dict[str | None, ForbiddenError] = {}
        for place in self._places:
            present, versions = [], []
            few_are_new = (resource, place) in self._listed
            pages = cluster.pages(
                resource, selector, namespace=place, is_known=partial(knows, kind), few_are_new=few_are_new
            )
            try:
                async for page in pages:
                    self._report(resource, chain.from_iterable(self._put(kind, body) for body in page.bodies))
                    present += [*page.known, *(body["metadata"]["uid"] for body in page.bodies)]
                    versions.append(page.version)
            except ForbiddenError as error:
                errors[place] = error
            else:
                self._report(resource, retain(kind, present, min(versions), place))
                self._skipped.discard((resource, place))
                self._listed.add((resource, place))
        if len(errors) == len(self._places):
            raise errors[self._places[0]]
        for place, denied in errors.items():
            if (resource, place) not in self._skipped:
                self._skipped.add((resource, place))
                _logger.warning("namespace %s is skipped: %s", place, denied)

    def _put(self, kind: str, body: Body) -> Sequence[Key]:
        """Cache an object, and return the objects that it affects. One that fails must not end the list."""
        try:
            return [self._cache.put_parent(kind, body)] if kind in OUR_KINDS else self._cache.put(kind, body)
        except Exception:
            metadata = body["metadata"]
            _logger.exception("failed to read %s %s/%s", kind, metadata.get("namespace"), metadata.get("name"))
            return ()

    def _report(self, resource: Resource, keys: Iterable[Key]) -> None:
        for key in dict.fromkeys(keys):
            if resource in _OUR_KINDS or self._cache.parent(key) is not None:
                self._ask(key)


STALLED_S: Final = 120.0
"""Minimum age of a stall. kopf reopens a watch that was silent for 70 s."""


@dataclass
class _Watch:
    delivered: int
    """Newest resourceVersion that the watch has delivered."""
    known: int
    """Newest resourceVersion from any source."""
    behind_since_s: float = 0.0


class WatchProgress:
    """Compares the versions that the watch of each kind has delivered with those in lists and responses.

    A watch has stalled if it has not delivered a known version, or any event, for `STALLED_S`. A watch that never
    delivered an event cannot stall, because its objects are listed.
    """

    def __init__(self, *, by_namespace: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        self._by_namespace, self._clock = by_namespace, clock
        self._watches: dict[tuple[str, str], _Watch] = {}

    def brings(self, kind: str, body: Body) -> None:
        """Record an object that a watch has delivered."""
        version = int(body["metadata"]["resourceVersion"])
        watch = self._watches.setdefault(self._place(kind, body), _Watch(version, version))
        watch.delivered = max(watch.delivered, version)
        watch.behind_since_s = self._clock()

    def knows(self, kind: str, body: Body) -> None:
        """Record an object from any source."""
        watch, version = self._watches.get(self._place(kind, body)), int(body["metadata"]["resourceVersion"])
        if watch is not None and version > watch.known:
            if watch.known <= watch.delivered:
                watch.behind_since_s = self._clock()
            watch.known = version

    def stalled(self) -> str | None:
        """Return which watch has stalled, if any; thread-safe."""
        for (kind, namespace), watch in [*self._watches.items()]:
            if watch.known > watch.delivered and self._clock() - watch.behind_since_s > STALLED_S:
                where = f" in {namespace}" if namespace else ""
                silent = f"has delivered no events for {STALLED_S:.0f} s"
                return f"the watch of {kind}{where} {silent}, although objects changed"
        return None

    def _place(self, kind: str, body: Body) -> tuple[str, str]:
        return kind, body["metadata"].get("namespace", "") if self._by_namespace else ""


_MOST_LOOKS: Final = 64
"""Maximum number of reconciles per round, each of which scrapes engines. With more objects, the interval grows, but not
the work. 64 reconciles take 1.5 % of a core on a slow machine."""

_LEAST_LOOKS: Final = 20
"""Minimum number of reconciles per round for objects without a policy, even if many objects have a policy."""

_ROUNDS_OF_POLICIES: Final = 3
"""Rounds within which each object with a policy is resynced. Samples expire after 60 s (stats/engine_window.py)."""

_ROUNDS_OF_ALL: Final = 20
"""Rounds within which each object at rest is resynced, in case a watch has missed an event."""


class ResyncOrder(Collector):
    """Order of resyncs in three lines. The first object of a line is the one that was reconciled longest ago.

    Objects in two of the lines change without an event, because their engines are scraped or they wait for a time.
    Objects with a policy are resynced often enough for its samples.
    """

    def __init__(self, round_s: float) -> None:
        self._round_s = round_s
        self._measured: dict[Key, None] = {}
        """Objects with a policy."""
        self._close: dict[Key, None] = {}
        self._quiet: dict[Key, None] = {}
        self._lines = (self._measured, self._close, self._quiet)
        self._due_at_s: dict[Key, float] = {}
        """Unix time at which an object is due, regardless of its line."""

    def looked(self, key: Key, asked: Requeue) -> None:
        """Record that an object was reconciled, and when to requeue it."""
        self.forget(key)
        line = self._quiet if not asked.is_close else self._measured if asked.has_policy else self._close
        line[key] = None
        if asked.due_at_s is not None:
            self._due_at_s[key] = asked.due_at_s

    def forget(self, key: Key) -> None:
        """Drop a deleted object."""
        for line in self._lines:
            line.pop(key, None)
        self._due_at_s.pop(key, None)

    def next(self, present: Collection[Key], now_s: float) -> list[Key]:
        """Return the objects of this round: new ones, those due at Unix time ``now_s``, and the first of each line."""
        there = set(present)
        for gone in {key for line in self._lines for key in line} - there:
            self.forget(gone)
        new = [key for key in present if not any(key in line for line in self._lines)]
        due = [key for key, at_s in self._due_at_s.items() if at_s <= now_s]
        scheduled = [key for key in due if key.kind == deployment.KIND]
        quiet = math.ceil(len(self._quiet) / _ROUNDS_OF_ALL)
        turns = (islice(self._measured, self._looks[0]), self._active(set(due)), islice(self._quiet, quiet))
        return list(dict.fromkeys(chain(new, scheduled, *turns)))

    def _active(self, due: Collection[Key]) -> Iterable[Key]:
        """Return objects without a policy. Captures that are due get up to half of the turns first.

        Due captures are limited, because one that waits for its deployment stays due. Schedules are not limited.
        """
        _, looks = self._looks
        if looks >= len(self._close):
            return self._close
        captures = _shared([key for key in self._close if key in due and key.kind != deployment.KIND], looks // 2)
        others = self._close.keys() - captures
        return chain(captures, _shared([key for key in self._close if key in others], looks - len(captures)))

    @property
    def _looks(self) -> tuple[int, int]:
        """Numbers of objects per round: with a policy, and others that change without an event."""
        if len(self._measured) + len(self._close) <= _MOST_LOOKS:
            return len(self._measured), len(self._close)
        measured = math.ceil(len(self._measured) / _ROUNDS_OF_POLICIES)
        return measured, max(_MOST_LOOKS - measured, _LEAST_LOOKS)

    @property
    def interval_s(self) -> float:
        """Mean resync interval of an object without a policy that changes without an event."""
        _, looks = self._looks
        return self._round_s * max(1, math.ceil(len(self._close) / max(1, looks)))

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the samples of one scrape."""
        yield GaugeMetricFamily(
            "specdecode_look_interval_seconds",
            "Interval at which engines are scraped: 15 s, and longer if more objects have engines than the operator"
            " scrapes per round. Objects with a policy: at most 45 s.",
            value=self.interval_s,
        )


def _shared(line: Collection[Key], looks: int) -> list[Key]:
    """Select objects of a queue: half by waiting time, half from each namespace in turn.

    With turns by namespace only, objects of a large namespace would wait for hours if there are many small namespaces.
    """
    if looks >= len(line):
        return [*line]
    oldest = [*islice(line, looks - looks // 2)]
    taken, before, ranked = set(oldest), Counter[str](), []
    for key in line:
        if key not in taken:
            ranked.append((before[key.namespace], key))
        before[key.namespace] += 1
    return [*oldest, *(key for _, key in nsmallest(looks // 2, ranked, key=itemgetter(0)))]
