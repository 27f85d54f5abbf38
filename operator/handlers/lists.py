"""Full lists of what the cluster has: they bring the cache up to what watches have missed."""

import itertools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from functools import partial

from specdecode_operator.api.base import Body
from specdecode_operator.api.key import Key
from specdecode_operator.cluster.cache import Cache
from specdecode_operator.cluster.client import Cluster, Page
from specdecode_operator.cluster.errors import ForbiddenError
from specdecode_operator.kube.labels import OWNED_SELECTOR
from specdecode_operator.kube.resources import Resource

_logger = logging.getLogger(__name__)


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
