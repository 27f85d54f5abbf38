"""Detect tampering with ConfigMaps by the digests that the status holds.

Anyone who may write ConfigMaps in a namespace can forge one with the operator's labels, owner and name. Only the
operator writes the status, which holds the SHA-256 of each entry that is read back. The status also holds the SHA-256
of each child after the last apply, so that a new operator process applies only children that changed.
"""

import hashlib
from collections.abc import Iterable, Mapping

from specdecode_operator.api.base import Body
from specdecode_operator.api.deployment_status import KeptEntry
from specdecode_operator.cluster.drift import Identity


def digests(config_map: str, entries: Mapping[str, str]) -> dict[str, str]:
    """Return the SHA-256 of each entry of a ConfigMap, with keys ``ConfigMap/entry`` as in the status."""
    return {
        f"{config_map}/{entry}": hashlib.sha256(text.encode(errors="replace")).hexdigest()
        for entry, text in entries.items()
    }


def believed(config_map: str, entries: Mapping[str, str], proofs: Mapping[str, str]) -> dict[str, str]:
    """Return the entries that the operator wrote; ``proofs`` are their digests."""
    # Skip unknown entries before hashing: other clients may add up to 1 MiB of them.
    known = {entry: text for entry, text in entries.items() if f"{config_map}/{entry}" in proofs}
    own = dict(digests(config_map, known).items() & proofs.items())
    return {entry: text for entry, text in known.items() if f"{config_map}/{entry}" in own}


def proofs_in(body: Body) -> dict[str, str]:
    """Return the digests in the status of an unparsed object."""
    return {each["entry"]: each["sha256"] for each in (body.get("status") or {}).get("kept") or []}


def own_proofs(kept: Iterable[KeptEntry]) -> dict[str, str]:
    """Return the digests in a status that are of ConfigMap entries, not of children."""
    return {each.entry: each.sha256 for each in kept if not each.entry[:1].isupper()}


def child_entry(child: Identity) -> str:
    """Return the entry of a child. Its kind starts with a capital letter, which a ConfigMap's name cannot contain."""
    return "/".join(child)


def children_proofs(kept: Iterable[KeptEntry]) -> dict[Identity, str]:
    """Return the digests of children in a status."""
    split = [(each.entry.partition("/"), each.sha256) for each in kept]
    return {(kind, name): digest for (kind, _, name), digest in split if kind[:1].isupper()}


def kept_entries(proofs: Mapping[str, str]) -> list[KeptEntry]:
    """Return digests in the form of `status.kept`."""
    return [KeptEntry(entry=entry, sha256=digest) for entry, digest in sorted(proofs.items())]
