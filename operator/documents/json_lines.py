"""Reads lines of JSON objects that say the same again and again: a value that an earlier line had is not read anew."""

from typing import Any, Final

import msgspec

from specdecode_operator.documents.json_text import parse_json

_MOST_REMEMBERED_BYTES: Final = 8 * 2**20
"""Of text: as objects of Python it is ten times as large."""

_EACH_BYTES: Final = 100
"""What a value takes beside its text."""

_WITH_BLANKS: Final = (b", ", b'"%b": %b')
_WITHOUT: Final = (b",", b'"%b":%b')
"""How programs write an object: as Python does, and the shortest way."""


class SharedObject(dict[str, Any]):
    """An object that many lines hold and nobody changes: the digest of its content is worked out once."""

    digest: bytes | None = None


class JsonLines:
    """Reads line after line. What lies in an object is one object for lines that say the same: do not change it."""

    def __init__(self, most_line_bytes: int) -> None:
        """Remember nothing yet."""
        self._most_line_bytes = most_line_bytes
        self._split: msgspec.json.Decoder[dict[str, msgspec.Raw]] = msgspec.json.Decoder(dict[str, msgspec.Raw])
        self._known: dict[bytes, Any] = {}
        self._known_bytes = 0

    def parse(self, line: str | bytes) -> Any:
        """Return the value of a line.

        Raises
        ------
        UnreadableTextError
            As `parse_json` does.
        """
        parts = self._parts(line.strip()) if isinstance(line, bytes) else None
        if parts is None:
            return parse_json(line, self._most_line_bytes)
        return {key: self._value(text) for key, text in parts}

    def _parts(self, line: bytes) -> list[tuple[str, bytes]] | None:
        """Return keys and texts of an object; None where a line is anything else, has a key twice, or looks unusual."""
        if len(line) > self._most_line_bytes:
            return None
        try:
            found = self._split.decode(line)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            return None
        parts = [(key, bytes(text)) for key, text in found.items()]
        once = line == _joined(parts, *_WITH_BLANKS) or line == _joined(parts, *_WITHOUT)
        return parts if once and "".join(found).isprintable() else None

    def _value(self, text: bytes) -> Any:
        if text in self._known:
            return self._known[text]
        value = parse_json(text, self._most_line_bytes)
        if isinstance(value, dict):
            value = SharedObject(value)
        self._known_bytes += len(text) + _EACH_BYTES
        if self._known_bytes > _MOST_REMEMBERED_BYTES:
            self._known.clear()
            self._known_bytes = len(text) + _EACH_BYTES
        self._known[text] = value
        return value


def _joined(parts: list[tuple[str, bytes]], separator: bytes, form: bytes) -> bytes:
    """Return the line that has each part once."""
    return b"{%b}" % separator.join([form % (key.encode(), text) for key, text in parts])
