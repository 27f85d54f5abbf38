"""Compress texts that are kept for each object and rarely read.

Objects of one kind differ in little but names. The first text of a group is the dictionary of the later ones. They
take a tenth of the memory that they would take with the dictionary of common text.
"""

import zlib
from collections.abc import Collection, Iterator, Mapping
from typing import Final

import msgspec

from specdecode_operator.vllm.logging_config import WATCH, logging_config

_COMMON: Final = msgspec.json.encode([WATCH, logging_config("INFO")])
"""Text that the objects of all engines contain."""
_WINDOW_BYTES: Final = 2**15
"""zlib uses only the end of a longer dictionary."""
_MOST_GROUPS: Final = 32
"""Maximum number of dictionaries, without the common one. Each takes up to 32 KiB and is never freed."""
_CHECKSUM: Final = slice(2, 6)
"""Place of the dictionary's Adler-32 in a compressed text (DICTID in RFC 1950, section 2.2)."""

_DICTIONARIES: Final[dict[str, bytes]] = {"": _COMMON}
"""Dictionaries by group."""
_BY_CHECKSUM: Final = {zlib.adler32(_COMMON): _COMMON}


def pack(text: bytes, group: str = "") -> bytes:
    """Return a compressed text; equal texts of a group give equal bytes."""
    dictionary = _DICTIONARIES.get(group) or _new_dictionary(group, text)
    packer = zlib.compressobj(zdict=dictionary)
    return packer.compress(text) + packer.flush()


def _new_dictionary(group: str, text: bytes) -> bytes:
    if len(_DICTIONARIES) > _MOST_GROUPS:
        return _COMMON
    dictionary = (_COMMON + text)[-_WINDOW_BYTES:]
    # A user can craft a text whose dictionary has the same Adler-32. The new group then shares that dictionary.
    dictionary = _DICTIONARIES[group] = _BY_CHECKSUM.setdefault(zlib.adler32(dictionary), dictionary)
    return dictionary


def unpack(packed: bytes) -> bytes:
    """Return a text that `pack` compressed in this process."""
    dictionary = _BY_CHECKSUM[int.from_bytes(packed[_CHECKSUM])]
    return zlib.decompressobj(zdict=dictionary).decompress(packed)


class PackedTexts(Mapping[str, str]):
    """Read-only entries of a ConfigMap, each unpacked when it is read.

    ``similar`` are the names of entries whose texts are similar in all ConfigMaps. Each is a group.
    """

    def __init__(self, entries: Mapping[str, str], similar: Collection[str]) -> None:
        # Clients may write half of a surrogate pair.
        self._packed = {
            name: pack(text.encode(errors="surrogatepass"), name if name in similar else "")
            for name, text in entries.items()
        }

    def __getitem__(self, name: str) -> str:
        """Return an entry."""
        return unpack(self._packed[name]).decode(errors="surrogatepass")

    def __iter__(self) -> Iterator[str]:
        """Return an iterator over the names."""
        return iter(self._packed)

    def __len__(self) -> int:
        """Return the number of entries."""
        return len(self._packed)

    def __eq__(self, other: object) -> bool:
        """Return whether the entries are equal."""
        return self._packed == other._packed if isinstance(other, PackedTexts) else super().__eq__(other)

    __hash__ = None  # type: ignore[assignment]
