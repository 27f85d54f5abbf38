"""Typed access to a config.json: each invalid value raises one clear error."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar

from specdecode_operator.enums import ROPE_KEYS
from specdecode_operator.sizing.errors import GeometryError, UnmodelledError

MAX_TOKENS: Final = 2**31 - 1
"""Largest position index of vLLM (int32 on the GPU)."""

_UPPER_BOUNDS: Final = {
    "num_attention_heads": 65_536,
    "num_key_value_heads": 65_536,
    "head_dim": 65_536,
    "hidden_size": 1_048_576,
    "intermediate_size": 8_388_608,
    "vocab_size": 16_777_216,
    "max_position_embeddings": MAX_TOKENS,
}
"""Far above every published model: larger values are typing errors."""

_COUNT_OF_LAYERS: Final = re.compile(r"(?:.*_)?(?:layers?|modules|depth)")
_MOST_LAYERS: Final = 1024
"""Upper bound of every number of layers. Sizing keeps one entry per layer, so 2**31 layers would take 16 GiB."""


_Default = TypeVar("_Default")


def typed(source: Any, key: str, kinds: type | tuple[type, ...], message: str) -> Any:
    """Return a value of one of these types from Fields or CaseFields, or None if the key is absent or null."""
    value = source.values.get(key)
    # JSON's true is an int to Python.
    if value is None or (isinstance(value, kinds) and (kinds is bool or not isinstance(value, bool))):
        return value
    error: ValueError = source.error(key, message)
    raise error


@dataclass(frozen=True)
class Fields:
    """The values of one config.json, read with their types checked.

    The accessors return the default if the key is absent or null.
    """

    model: str
    values: Mapping[str, object]
    prefix: str = ""  # Prepended to a key in messages, such as ``quantization_config.``
    names: Mapping[str, str] = field(default_factory=dict)  # Paths of values that are not at prefix and key

    def path(self, key: str) -> str:
        """Return the path of a value in the file."""
        return self.names.get(key, f"{self.prefix}{key}")

    def having(self, values: Mapping[str, object], names: Mapping[str, str] | None = None) -> "Fields":
        """Return other values of the same place."""
        return replace(self, values=values, names={**self.names, **(names or {})})

    def is_set(self, key: str) -> bool:
        """Return whether the key holds anything but null."""
        return self.values.get(key) is not None

    def size(self, key: str, default: int | None = None) -> int:
        """Return a positive integer."""
        value: int | None = typed(self, key, int, "must be a whole number")
        if value is None:
            return self._given(key, default)
        upper = _MOST_LAYERS if _COUNT_OF_LAYERS.fullmatch(key) else _UPPER_BOUNDS.get(key, MAX_TOKENS)
        if not 1 <= value <= upper:
            raise self.error(key, f"must lie between 1 and {upper:,}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a positive finite number."""
        message = f"must be a number above 0 and at most {MAX_TOKENS:,}"
        value: float | None = typed(self, key, (int, float), message)
        if value is None:
            return self._given(key, default)
        if not 0 < value <= MAX_TOKENS:
            raise self.error(key, message)
        return float(value)

    def _given(self, key: str, default: _Default | None) -> _Default:
        if default is None:
            raise self.error(key, "is missing; copy it from the model's config.json")
        return default

    def flag(self, key: str, *, default: bool = False) -> bool:
        """Return a boolean."""
        value: bool | None = typed(self, key, bool, "must be true or false")
        return default if value is None else value

    def text(self, key: str, default: str) -> str:
        """Return a string."""
        value: str | None = typed(self, key, str, "must be a string")
        return default if value is None else value

    def strings(self, key: str) -> tuple[str, ...]:
        """Return a list of strings, empty by default."""
        value: Sequence[object] = typed(self, key, (list, tuple), "must be a list of strings") or ()
        if not all(isinstance(item, str) for item in value):
            raise self.error(key, "must be a list of strings")
        return tuple(map(str, value))

    def section(self, key: str) -> "Fields | None":
        """Return a nested object, None by default."""
        value: Mapping[str, object] | None = typed(self, key, Mapping, "must be an object")
        return None if value is None else Fields(self.model, value, f"{self.path(key)}.")

    def error(self, key: str, message: str) -> GeometryError:
        """Return an error about the key that names the model."""
        return GeometryError(self.path(key), self.values.get(key), f"{message} (config.json of {self.model})")

    def unmodelled(self, key: str, message: str) -> UnmodelledError:
        """Return an error about a feature that sizing does not implement; such a model is estimated."""
        return UnmodelledError(self.path(key), self.values.get(key), f"{message} (config.json of {self.model})")


def overridden(config: Mapping[str, Any], keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json as the engine reads it: sections key by key, all else as a whole."""
    changed = dict(config)
    for key, value in keys.items():
        inner = config.get(key)
        if key.endswith("_config") and isinstance(inner, Mapping) and isinstance(value, Mapping):
            changed[key] = overridden(inner, value)
        elif key in ROPE_KEYS:
            changed[ROPE_KEYS[0]] = value
            changed.pop(ROPE_KEYS[1], None)
        else:
            changed[key] = value
    return changed
