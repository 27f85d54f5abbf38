"""Rendered objects as packed text: thousands of them are kept for a long time and read rarely.

They are the children of the latest decision of each object (`handlers/reconcile/decision_cache.py`), and the workload
whose engines served last (`deployment/pods/rollback.py`).
"""

import zlib
from typing import Any, Final

import msgspec

from specdecode_operator.engine.logging_config import WATCH, logging_config

_COMMON: Final = msgspec.json.encode([WATCH, logging_config("INFO")])
"""What nearly every workload has in it, two thirds of its text: packed it is a reference to this one."""


def pack(body: dict[str, Any]) -> bytes:
    """Return an object as compressed JSON; equal objects are equal packed."""
    packer = zlib.compressobj(zdict=_COMMON)
    return packer.compress(msgspec.json.encode(body, order="sorted")) + packer.flush()


def unpack(packed: bytes) -> dict[str, Any]:
    """Return what `pack` was given, as an object of its own."""
    body: dict[str, Any] = msgspec.json.decode(zlib.decompressobj(zdict=_COMMON).decompress(packed))
    return body
