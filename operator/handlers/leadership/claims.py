"""Which namespaces this operator serves where there are several: nobody's work is undone by another's.

An operator of named namespaces holds a Lease in each of them. One of the whole cluster leaves these alone, and of two
that name the same namespace the one works there that has its Lease.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Final

from specdecode_operator.cluster.client import Cluster
from specdecode_operator.cluster.errors import ClusterError
from specdecode_operator.handlers.leadership.lease import Candidate, LeaseName, Silence
from specdecode_operator.kube.resources import LEASE
from specdecode_operator.kube.rights import SERVES
from specdecode_operator.kube.untyped import mapping
from specdecode_operator.problems import printable

CLAIM_S: Final = 30
"""A namespace whose Lease nobody has renewed for so long is served by others; it is renewed each 15 s."""

_RELEASE_S: Final = 2.0

_NOBODY: Final = ""
_logger = logging.getLogger(__name__)


class Claims:
    """Leases of namespaces, as they are at the last look."""

    def __init__(
        self, cluster: Cluster, namespaces: Sequence[str], identity: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._cluster, self._identity, self._clock = cluster, identity, clock
        leases = {each: LeaseName(each, SERVES, identity, CLAIM_S) for each in namespaces}
        self._candidates = {each: Candidate(cluster, lease, clock) for each, lease in leases.items()}
        self._silences: dict[str, Silence] = {}
        """Of the Lease of each namespace that has one."""
        self._others: dict[str, str] = {}
        """Who serves namespaces that this one leaves alone."""

    def serves(self, namespace: str) -> bool:
        """Whether objects of a namespace are this operator's to carry out."""
        return namespace not in self._others

    async def look(self) -> None:
        """Renew the claims, or see those of others; what cannot be told stays as it was."""
        others = await (self._claim() if self._candidates else self._claimed_by_others())
        for namespace, holder in others.items():
            if self._others.get(namespace) != holder:
                _logger.warning("namespace %s is left alone: %s serves it (Lease %s)", namespace, holder, SERVES)
        for namespace in self._others.keys() - others.keys():
            _logger.info("namespace %s is served from now on", namespace)
        self._others = others

    async def release(self) -> None:
        """Give the claims back, so that another need not wait for their end; who waits for the Lease is not kept."""
        until_s = asyncio.get_running_loop().time() + _RELEASE_S
        for candidate in self._candidates.values():
            try:
                async with asyncio.timeout_at(until_s):
                    await candidate.release()
            except (ClusterError, TimeoutError) as error:
                _logger.warning("the claim of a namespace ends by itself: %s", error)

    async def _claim(self) -> dict[str, str]:
        """Return the namespaces whose Lease another has; each is asked for, whatever comes of the others."""
        found = {}
        for namespace, candidate in self._candidates.items():
            try:
                if not await candidate.take():
                    found[namespace] = candidate.holder
            except ClusterError as error:
                _logger.warning("whether another operator serves namespace %s cannot be told now: %s", namespace, error)
                if namespace in self._others:
                    found[namespace] = self._others[namespace]
        return found

    async def _claimed_by_others(self) -> dict[str, str]:
        """Return who renews the Lease of a namespace."""
        try:
            bodies, _ = await self._cluster.list(LEASE, name=SERVES)
        except ClusterError as error:
            _logger.warning("who serves single namespaces cannot be told now: %s", error)
            return self._others
        found, silences = {}, {}
        for body in bodies:
            namespace = body["metadata"]["namespace"]
            holder = printable(str(mapping(body, "spec").get("holderIdentity") or _NOBODY))
            silences[namespace] = self._silences.get(namespace, Silence(self._clock, CLAIM_S))
            if silences[namespace].lasts_s(body) < CLAIM_S and holder not in (_NOBODY, self._identity):
                found[namespace] = holder
        self._silences = silences
        return found
