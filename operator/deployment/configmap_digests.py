"""Detect tampering with ConfigMaps by the digests that the status holds.

Anyone who may write ConfigMaps in a namespace can forge one with the operator's labels, owner and name. Only the
operator writes the status, which holds the SHA-256 of each entry that is read back, and that of each child after the
last apply, so that a new operator process applies only children that changed.
"""

import hashlib
from collections.abc import Iterable, Mapping

from specdecode_operator.api.base import Body
from specdecode_operator.api.deployment_status import KeptEntry
from specdecode_operator.cluster.drift import Identity


def digests(config_map: str, entries: Mapping[str, str]) -> dict[str, str]:
    """Return the SHA-256 of the entries of a ConfigMap, by ConfigMap/entry, as the status holds them."""
    return {
        f"{config_map}/{entry}": hashlib.sha256(text.encode(errors="replace")).hexdigest()
        for entry, text in entries.items()
    }


def believed(config_map: str, entries: Mapping[str, str], proofs: Mapping[str, str]) -> dict[str, str]:
    """Return the entries that the operator wrote; ``proofs`` are their digests."""
    # Only these are read: others may write a megabyte beside them.
    known = {entry: text for entry, text in entries.items() if f"{config_map}/{entry}" in proofs}
    own = dict(digests(config_map, known).items() & proofs.items())
    return {entry: text for entry, text in known.items() if f"{config_map}/{entry}" in own}


def proofs_in(body: Body) -> dict[str, str]:
    """Return the digests in the status of an object as the API server has it."""
    return {each["entry"]: each["sha256"] for each in (body.get("status") or {}).get("kept") or []}


def own_proofs(kept: Iterable[KeptEntry]) -> dict[str, str]:
    """Return the digests of entries in a status, without those of children."""
    return {each.entry: each.sha256 for each in kept if not each.entry[:1].isupper()}


def child_entry(child: Identity) -> str:
    """Return the entry of a child; kinds have capitals, which names of ConfigMaps have not."""
    return "/".join(child)


def children_proofs(kept: Iterable[KeptEntry]) -> dict[Identity, str]:
    """Return the digests of children in a status."""
    split = [(each.entry.partition("/"), each.sha256) for each in kept]
    return {(kind, name): digest for (kind, _, name), digest in split if kind[:1].isupper()}


def kept_entries(proofs: Mapping[str, str]) -> list[KeptEntry]:
    """Return digests as a status holds them."""
    return [KeptEntry(entry=entry, sha256=digest) for entry, digest in sorted(proofs.items())]
