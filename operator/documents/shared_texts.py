"""Texts that thousands of objects have in common, kept a few times: names of fields, annotations of ten kilobytes."""

from typing import Any, Final

_MOST_BYTES: Final = 4 * 2**20
"""Of the texts that are known: what only one object says goes again, and hostile ones fill no memory with it."""
_ENTRY_BYTES: Final = 150
"""What a short text takes in a table, beside its characters."""


class SharedTexts:
    """Texts that were seen before."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}
        self._bytes = 0

    @property
    def known_bytes(self) -> int:
        """What the texts that are known take, were each character a byte."""
        return self._bytes

    def share(self, value: Any) -> Any:
        """Return an equal value of which every text that is known is the known one."""
        if isinstance(value, str):
            return self._shared(value)
        if isinstance(value, dict):
            return {self._shared(name): self.share(each) for name, each in value.items()}
        if isinstance(value, list):
            return [self.share(each) for each in value]
        return value

    def _shared(self, text: str) -> str:
        known = self._known.get(text)
        if known is not None:
            return known
        size = _ENTRY_BYTES + len(text)
        if size > _MOST_BYTES:
            return text
        if self._bytes + size > _MOST_BYTES:  # those in use come back with the next object that has them
            self._known.clear()
            self._bytes = 0
        self._known[text] = text
        self._bytes += size
        return text
