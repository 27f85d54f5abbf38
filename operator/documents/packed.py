"""Objects as packed text: thousands of them are kept for a long time and read rarely."""

import zlib
from typing import Any

import msgspec


def pack(body: dict[str, Any]) -> bytes:
    """Return an object as compressed JSON; equal objects are equal packed."""
    return zlib.compress(msgspec.json.encode(body, order="sorted"))


def unpack(packed: bytes) -> dict[str, Any]:
    """Return what `pack` was given, as an object of its own."""
    body: dict[str, Any] = msgspec.json.decode(zlib.decompress(packed))
    return body
