"""Resync: full lists, detection of stalled watches, and the order of reconciles without an event.

`Relist` brings the cache up to date with changes that watches missed. `WatchProgress` reports a watch that delivers
no events although the API server has newer objects. `ResyncOrder` picks the objects of a round, because engine
state does not trigger watches. With more objects, the interval grows, and the work of a round stays the same.
"""

import itertools
import logging
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
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
from specdecode_operator.cluster.client import Cluster, ClusterError, ForbiddenError, NotFoundError, Page
from specdecode_operator.cluster.nodes import NodeFacts
from specdecode_operator.cluster.resources import (
    CUSTOM_RESOURCE_DEFINITION,
    LEADER_WORKER_SET,
    NODE,
    OWNED_SELECTOR,
    SPECDECODE_CAPTURE,
    SPECDECODE_DEPLOYMENT,
    STORAGE_CLASS,
    WATCHED,
    Resource,
)
from specdecode_operator.cluster.storage_classes import StorageClasses
from specdecode_operator.deployment.requeue import Requeue

_OUR_KINDS: Final = (SPECDECODE_DEPLOYMENT, SPECDECODE_CAPTURE)
_SEEN: Final = (NODE, *WATCHED, *_OUR_KINDS)
"""All of which the cache knows, in the order in which they are listed: an object is read when what it owns is known."""

_ROUNDS_TO_RELIST = 20
_ROUNDS_TO_RETRY = 4

_logger = logging.getLogger(__name__)


class Relist:
    """Lists what watches may have missed, and asks for a look at what is new or gone.

    ``nodes`` are those that are given; None where they are the cluster's.
    """

    def __init__(
        self, cache: Cache, namespaces: Sequence[str], nodes: Sequence[NodeFacts] | None, ask: Callable[[Key], None]
    ) -> None:
        self._cache, self._nodes, self._ask = cache, nodes, ask
        self._is_clusterwide = not namespaces
        self._lists = Lists(cache, namespaces)
        self.watched: set[str] = set()
        """Kinds of which a watch has brought an object. kopf may miss a CRD that is made after its
        start, when the API server serves it later than it says so: until then objects are listed."""
        self.due: set[str] = set()
        """Kinds to list in the next round: a watch that begins anew lists what there is, and not what went before."""
        self._put_off: set[str] = set()
        """Kinds whose list failed, which may have taken half a minute: in the next round the others have their turn."""
        self._said_of_crds: set[str] = set()
        self.storage_classes: StorageClasses | None = None
        """Those of the cluster, for warnings of the webhook; None while they are unknown."""

    async def everything(self, cluster: Cluster) -> None:
        """See nodes, children, pods and objects in full.

        At the start, because watches bring them in any order, and a serving
        object would look like one whose nodes and engines are gone. Later,
        because a watch that starts anew does not tell what was deleted
        meanwhile.

        Raises
        ------
        ClusterError
            When the API server refuses or cannot be reached.
        """
        self.due.update(resource.kind for resource in _SEEN)
        await self._what_is_due(cluster)
        await self._look_at_crds(cluster)
        await self._see_storage_classes(cluster)

    async def in_round(self, number: int, cluster: Cluster) -> None:
        """See what is due in a round; in the first that is all, for watches began after the start's own lists.

        Raises
        ------
        ClusterError
            When the API server refuses or cannot be reached: what is left is due in the next round.
        """
        if number % _ROUNDS_TO_RETRY == 0:
            self.due |= self._put_off
            self._put_off.clear()
            await self._see_storage_classes(cluster)
        if number % _ROUNDS_TO_RELIST == 0:
            await self.everything(cluster)
        else:
            await self._what_is_due(cluster)

    async def _what_is_due(self, cluster: Cluster) -> None:
        for resource in _SEEN:
            is_watched = resource.kind in self.watched if resource in _OUR_KINDS else resource != LEADER_WORKER_SET
            if is_watched and resource.kind not in self.due:
                continue
            self.due.discard(resource.kind)  # before, for its watch may begin anew meanwhile
            try:
                await self._see(cluster, resource)
            except ClusterError:
                self._put_off.add(resource.kind)
                raise

    async def _see(self, cluster: Cluster, resource: Resource) -> None:
        """See all of one kind."""
        if resource == NODE:
            await self._see_nodes(cluster)
        elif resource == LEADER_WORKER_SET:
            await self._see_groups(cluster)
        elif resource in _OUR_KINDS:
            with suppress(NotFoundError):  # without its CRD there is no such kind
                for key in await self._lists.objects(cluster, resource):
                    self._ask(key)
        else:
            await self._see_children(cluster, resource)

    async def _see_nodes(self, cluster: Cluster) -> None:
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

    async def _see_children(self, cluster: Cluster, resource: Resource) -> None:
        for key in await self._lists.children(cluster, resource):
            if self._cache.parent(key) is not None:
                self._ask(key)

    async def _see_groups(self, cluster: Cluster) -> None:
        """See the LeaderWorkerSets, where the cluster has them; they may come at any time."""
        try:
            await self._see_children(cluster, LEADER_WORKER_SET)
            self._cache.has_groups = True
        except (NotFoundError, ForbiddenError):
            self._cache.has_groups = False

    async def _see_storage_classes(self, cluster: Cluster) -> None:
        """See the StorageClasses, which an operator of named namespaces may not list."""
        if not self._is_clusterwide:
            return
        try:
            bodies, _ = await cluster.list(STORAGE_CLASS)
        except ForbiddenError:
            self.storage_classes = None
        else:
            self.storage_classes = StorageClasses.of(bodies)

    async def _look_at_crds(self, cluster: Cluster) -> None:
        """Say what of our CRDs is of another version; an operator of named namespaces may not look."""
        if not self._is_clusterwide:
            return
        bodies, _ = await cluster.list(CUSTOM_RESOURCE_DEFINITION, f"{PART_OF_LABEL}={PART_OF}")
        said = {skew for body in bodies if (skew := crd_skew(body))}
        for skew in sorted(said - self._said_of_crds):
            _logger.warning("%s: install CRDs and operator of one version (%s)", skew, INSTALL_CRD)
        self._said_of_crds = said


class Lists:
    """Lists of the whole cluster, or of each namespace that is served.

    A namespace in which the operator may not list is passed over, and what is known of it stays: whoever has the say
    there stops the work in no other. Where it may list in none, that is an error.
    """

    def __init__(self, cache: Cache, namespaces: Sequence[str]) -> None:
        self._cache = cache
        self._places: tuple[str | None, ...] = tuple(namespaces) or (None,)
        self._passed_over: set[tuple[Resource, str | None]] = set()

    async def children(self, cluster: Cluster, resource: Resource) -> set[Key]:
        """See all children or pods of a kind; return whose are new or gone.

        Raises
        ------
        ClusterError
            When the API server refuses or cannot be reached.
        """
        cache, kind = self._cache, resource.kind

        async def look(place: str | None) -> set[Key]:
            pages = cluster.pages(resource, OWNED_SELECTOR, namespace=place, is_known=partial(cache.knows, kind))
            return await _news(pages, partial(cache.put, kind), partial(cache.retain, kind, namespace=place))

        return await self._in_each_place(resource, look)

    async def objects(self, cluster: Cluster, resource: Resource) -> set[Key]:
        """See all objects of one of our kinds; return which are new or gone.

        Raises
        ------
        ClusterError
            When the API server refuses or cannot be reached.
        """
        cache, kind = self._cache, resource.kind

        def put(body: Body) -> list[Key]:
            return [cache.put_parent(kind, body)]

        async def look(place: str | None) -> set[Key]:
            pages = cluster.pages(resource, namespace=place, is_known=partial(cache.knows_parent, kind))
            return await _news(pages, put, partial(cache.retain_parents, kind, namespace=place))

        return await self._in_each_place(resource, look)

    async def _in_each_place(self, resource: Resource, look: Callable[[str | None], Awaitable[set[Key]]]) -> set[Key]:
        news: set[Key] = set()
        refusals: dict[str | None, ForbiddenError] = {}
        for place in self._places:
            try:
                news |= await look(place)
            except ForbiddenError as error:
                refusals[place] = error
        if len(refusals) == len(self._places):
            raise refusals[self._places[0]]
        for place in self._places:
            at = (resource, place)
            if place in refusals and at not in self._passed_over:
                _logger.warning("namespace %s is passed over: %s", place, refusals[place])
            (self._passed_over.add if place in refusals else self._passed_over.discard)(at)
        return news


async def _news(
    pages: AsyncIterator[Page],
    put: Callable[[Body], Iterable[Key]],
    retain: Callable[[Iterable[str], int], Iterable[Key]],
) -> set[Key]:
    """Bring the cache up to a full list; return the keys of what it did not know, and of what is gone."""
    present, versions = [], []
    news: set[Key] = set()
    async for page in pages:
        news.update(itertools.chain.from_iterable(put(body) for body in page.bodies))
        present += [*page.known, *(body["metadata"]["uid"] for body in page.bodies)]
        versions.append(page.version)
    return news | set(retain(present, min(versions)))


STALLED_S: Final = 120.0
"""kopf opens a watch anew that was silent for 70 s."""


@dataclass
class _Watch:
    """One watch: the newest version that it has brought, the newest that is known, and since when it is behind."""

    brought: int
    known: int
    behind_since_s: float = 0.0


class WatchProgress:
    """What the watch of each kind has brought, beside what lists and answers to writes have shown of it.

    A watch has stalled where a version that is known does not come for long, and nothing else of it either: one that
    brings much, slowly, is at work. Of a watch that has never brought anything nothing is said: what it would bring is
    listed.
    """

    def __init__(self, *, by_namespace: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        self._by_namespace, self._clock = by_namespace, clock
        self._watches: dict[tuple[str, str], _Watch] = {}

    def brings(self, kind: str, body: Body) -> None:
        """Note an object that a watch has brought."""
        version = int(body["metadata"]["resourceVersion"])
        watch = self._watches.setdefault(self._place(kind, body), _Watch(version, version))
        watch.brought = max(watch.brought, version)
        watch.behind_since_s = self._clock()

    def knows(self, kind: str, body: Body) -> None:
        """Note an object that was seen, wherever."""
        watch, version = self._watches.get(self._place(kind, body)), int(body["metadata"]["resourceVersion"])
        if watch is not None and version > watch.known:
            if watch.known <= watch.brought:
                watch.behind_since_s = self._clock()
            watch.known = version

    def stalled(self) -> str | None:
        """Return which watch has stalled, if any has; any thread may ask."""
        for (kind, namespace), watch in [*self._watches.items()]:
            if watch.known > watch.brought and self._clock() - watch.behind_since_s > STALLED_S:
                where = f" in {namespace}" if namespace else ""
                return f"the watch of {kind}{where} has brought nothing for {STALLED_S:.0f} s, though there is news"
        return None

    def _place(self, kind: str, body: Body) -> tuple[str, str]:
        """Return which watch an object comes by: in named namespaces each has its own."""
        return kind, body["metadata"].get("namespace", "") if self._by_namespace else ""


_MOST_LOOKS: Final = 64
"""In one round: a look asks engines, so that the interval grows with the objects, and not the work. So many take 1.5 %
of a core on a slow machine."""

_LEAST_LOOKS: Final = 20
"""Of those in one round for objects without a policy, however many there are with one."""

_ROUNDS_OF_POLICIES: Final = 3
"""Rounds in which each object with a policy is resynced: a sample expires after a minute (stats/engine_window.py)."""

_ROUNDS_OF_ALL: Final = 20
"""So many rounds after the last look at it, an object that waits for nothing is looked at all the same."""


class ResyncOrder(Collector):
    """All objects in three lines, in each the one first that was looked at longest ago.

    In two are those that change by themselves: their engines are asked, or they wait for a time. With a policy they are
    asked often enough for it, as many as there are. Of the others watches tell all there is to know, and a look that is
    due only finds what a watch has missed.
    """

    def __init__(self, round_s: float) -> None:
        self._round_s = round_s
        self._measured: dict[Key, None] = {}
        """Those with a policy."""
        self._close: dict[Key, None] = {}
        self._quiet: dict[Key, None] = {}
        self._due_at_s: dict[Key, float] = {}
        """When an object is due in any case, in Unix time."""

    def looked(self, key: Key, asked: Requeue) -> None:
        """Take down that an object was looked at, and what it asks for."""
        self.forget(key)
        line = self._quiet if not asked.is_close else self._measured if asked.has_policy else self._close
        line[key] = None
        if asked.due_at_s is not None:
            self._due_at_s[key] = asked.due_at_s

    def forget(self, key: Key) -> None:
        """Drop an object that is gone."""
        for line in self._lines:
            line.pop(key, None)
        self._due_at_s.pop(key, None)

    def next(self, present: Collection[Key], now_s: float) -> list[Key]:
        """Return what is to be looked at in this round of all that there are.

        These are new objects, objects that are due at ``now_s`` (Unix time), and those whose turn it is.
        """
        there = set(present)
        for gone in {key for line in self._lines for key in line} - there:
            self.forget(gone)
        new = [key for key in present if not any(key in line for line in self._lines)]
        due = [key for key, at_s in self._due_at_s.items() if at_s <= now_s]
        measured, close = self._looks
        quiet = math.ceil(len(self._quiet) / _ROUNDS_OF_ALL)
        turns = (islice(self._measured, measured), self._shared(close), islice(self._quiet, quiet))
        return list(dict.fromkeys(chain(new, due, *turns)))

    def _shared(self, looks: int) -> Iterable[Key]:
        """Return so many objects without a policy, one half by time alone, the other for each namespace in turn.

        By turns of namespaces alone, the objects of a large one would wait for hours where there are many small ones.
        """
        if looks >= len(self._close):
            return self._close
        oldest = [*islice(self._close, looks - looks // 2)]
        taken, before, ranked = set(oldest), Counter[str](), []
        for key in self._close:
            if key not in taken:
                ranked.append((before[key.namespace], key))
            before[key.namespace] += 1
        return chain(oldest, (key for _, key in nsmallest(looks // 2, ranked, key=itemgetter(0))))

    @property
    def _lines(self) -> tuple[dict[Key, None], ...]:
        return self._measured, self._close, self._quiet

    @property
    def _looks(self) -> tuple[int, int]:
        """How many objects with a policy, and of the others that change by themselves, are looked at in one round."""
        if len(self._measured) + len(self._close) <= _MOST_LOOKS:
            return len(self._measured), len(self._close)
        measured = math.ceil(len(self._measured) / _ROUNDS_OF_POLICIES)
        return measured, max(_MOST_LOOKS - measured, _LEAST_LOOKS)

    @property
    def interval_s(self) -> float:
        """How often an object without a policy that changes by itself is looked at, on average of all."""
        _, looks = self._looks
        return self._round_s * max(1, math.ceil(len(self._close) / max(1, looks)))

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the samples of one scrape."""
        yield GaugeMetricFamily(
            "specdecode_look_interval_seconds",
            "How often engines are asked: 15 s, and longer where more objects have engines than the operator may ask."
            " Those with a policy: every 45 s at least.",
            value=self.interval_s,
        )
