"""Snapshot of settled objects, which a process writes when it ends and the next leader reads.

A ConfigMap in the namespace of the Lease has a digest for each settled object: of the versions of the object, its
children and its runs, and of everything else that decisions read. If the next leader finds the same digest, a reconcile
would have the same result and make no writes, so it is skipped until the object's engines are polled. If the snapshot
is missing or old, objects are reconciled at the start; if it is forged, when they are polled.
"""

import asyncio
import base64
import hashlib
import logging
import struct
from collections.abc import Collection, Iterable
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Final

from specdecode_operator.api.base import PART_OF, PART_OF_LABEL
from specdecode_operator.api.deployment import Key
from specdecode_operator.cluster.cache import Cache
from specdecode_operator.cluster.client import Cluster, ClusterError
from specdecode_operator.cluster.resources import CONFIG_MAP, MANAGED_BY_LABEL, MANAGER
from specdecode_operator.cluster.rights import SNAPSHOT_SUFFIX
from specdecode_operator.handlers.leadership import LeaseName
from specdecode_operator.handlers.settings import Settings
from specdecode_operator.untrusted import mapping

_ENTRY: Final = "settled"
_DIGEST_BYTES: Final = 8
_MOST: Final = 50_000
"""Maximum number of digests: they fill half of a ConfigMap."""
_WRITE_S: Final = 2.0
"""The next leader waits meanwhile."""

_logger = logging.getLogger(__name__)


class Snapshot:
    """The snapshot of an installation."""

    def __init__(self, cluster: Cluster, lease: LeaseName, cache_: Cache, settings: Settings) -> None:
        self._cluster, self._lease, self._cache, self._settings = cluster, lease, cache_, settings

    async def settled(self, keys: Iterable[Key]) -> set[Key]:
        """Return the objects that are as an earlier process has settled them."""
        await self._settings.read_files()
        try:
            body = await self._cluster.get(CONFIG_MAP, self._lease.namespace, self._name)
        except ClusterError as error:
            _logger.info("no snapshot of an earlier process: %s", error)
            return set()
        found = _digests(mapping(body or {}, "binaryData").get(_ENTRY))
        inputs = self._inputs()
        return {key for key in keys if self._digest(key, inputs) in found} if found else set()

    async def keep(self, keys: Collection[Key]) -> None:
        """Write the digests of settled objects."""
        inputs = self._inputs()
        digests = b"".join(self._digest(key, inputs) for key in islice(keys, _MOST))
        # The policy `operatorGuard` rejects objects without this label. The cache ignores ConfigMaps without an owner.
        labels = {PART_OF_LABEL: PART_OF, MANAGED_BY_LABEL: MANAGER}
        metadata = {"namespace": self._lease.namespace, "name": self._name, "labels": labels}
        data = {_ENTRY: base64.b64encode(digests).decode()}
        try:
            async with asyncio.timeout(_WRITE_S):
                await self._cluster.apply(
                    {"apiVersion": "v1", "kind": CONFIG_MAP.kind, "metadata": metadata, "binaryData": data}
                )
        except (ClusterError, TimeoutError) as error:
            _logger.info("no snapshot for the next process: %s", error or "the API server did not answer in time")

    @property
    def _name(self) -> str:
        return f"{self._lease.name}{SNAPSHOT_SUFFIX}"

    def _inputs(self) -> bytes:
        """Return a digest of the inputs that all objects share; files as last read."""
        settings, cache_ = self._settings, self._cache
        signed_by = settings.signing_key and settings.signing_key.public.id
        read = (
            *(_program(), settings.operator_image, settings.calibration.known, [*settings.facts.known.items()]),
            *(signed_by, settings.prometheus),
            *(settings.host_paths, sorted(settings.pod_template), sorted(settings.token_ids.items())),
            *(settings.nodes_from, cache_.nodes(), sorted(cache_.optional_kinds), cache_.devices),
        )
        return hashlib.blake2b(repr(read).encode()).digest()

    def _digest(self, key: Key, inputs: bytes) -> bytes:
        versions = sorted(self._cache.versions_about(key))
        return hashlib.blake2b(repr(versions).encode(), key=inputs, digest_size=_DIGEST_BYTES).digest()


def _digests(text: object) -> set[bytes]:
    """Return the digests in untrusted text; none if it is invalid."""
    try:
        found = base64.b64decode(text, validate=True) if isinstance(text, str) else b""
        return {digest for (digest,) in struct.iter_unpack(f"{_DIGEST_BYTES}s", found)}
    except (ValueError, struct.error):
        return set()


@cache
def _program() -> str:
    """Return a digest of the operator's files, because another version may decide differently."""
    root, digest = Path(__file__).parents[1], hashlib.blake2b()
    for file in sorted(each for each in root.rglob("*") if each.is_file() and each.suffix != ".pyc"):
        content = file.read_bytes()
        digest.update(f"{file.relative_to(root)} {len(content)}\n".encode() + content)
    return digest.hexdigest()
