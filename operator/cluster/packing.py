"""Compress what is kept for each object and rarely read, with a dictionary of the texts that all engines have."""

import zlib
from collections.abc import Iterator, Mapping
from typing import Final

import msgspec

from specdecode_operator.vllm.logging_config import WATCH, logging_config

_COMMON: Final = msgspec.json.encode([WATCH, logging_config("INFO")])


def pack(text: bytes) -> bytes:
    """Return a compressed text; equal texts give equal bytes."""
    packer = zlib.compressobj(zdict=_COMMON)
    return packer.compress(text) + packer.flush()


def unpack(packed: bytes) -> bytes:
    """Return a text that `pack` compressed."""
    return zlib.decompressobj(zdict=_COMMON).decompress(packed)


class PackedTexts(Mapping[str, str]):
    """Read-only entries of a ConfigMap, each unpacked when it is read."""

    def __init__(self, entries: Mapping[str, str]) -> None:
        # Clients may write half of a surrogate pair.
        self._packed = {name: pack(text.encode(errors="surrogatepass")) for name, text in entries.items()}

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
