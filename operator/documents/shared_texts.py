"""Texts that thousands of objects have in common, each kept once: names of fields, and annotations of ten kilobytes."""

from typing import Any, Final

_MOST_CHARACTERS: Final = 4 * 2**20
"""Of the texts that are known: what only one object says goes again, and hostile ones fill no memory with it."""


class SharedTexts:
    """Texts that were seen before."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}
        self._characters = 0

    @property
    def characters(self) -> int:
        """How many characters the texts have that are known."""
        return self._characters

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
        if self._characters + len(text) > _MOST_CHARACTERS:  # those in use come back with the next object that has them
            self._known.clear()
            self._characters = 0
        if len(text) <= _MOST_CHARACTERS:
            self._known[text] = text
            self._characters += len(text)
        return text
