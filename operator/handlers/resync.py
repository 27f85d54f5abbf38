"""Full lists of what the cluster has: they bring the cache up to what watches have missed."""

import itertools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Final

from specdecode_operator.api import deployment
from specdecode_operator.api.base import PART_OF, PART_OF_LABEL, Body
from specdecode_operator.api.crd.skew import INSTALL_CRD, crd_skew
from specdecode_operator.api.key import Key
from specdecode_operator.cluster.cache import Cache
from specdecode_operator.cluster.client import Cluster, Page
from specdecode_operator.cluster.errors import ClusterError, ForbiddenError, NotFoundError
from specdecode_operator.kube.labels import OWNED_SELECTOR
from specdecode_operator.kube.nodes import NodeFacts
from specdecode_operator.kube.resources import (
    CUSTOM_RESOURCE_DEFINITION,
    LEADER_WORKER_SET,
    NODE,
    SPECDECODE_CAPTURE,
    SPECDECODE_DEPLOYMENT,
    STORAGE_CLASS,
    WATCHED,
    Resource,
)
from specdecode_operator.kube.storage_classes import StorageClasses

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
