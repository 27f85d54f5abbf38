"""Typed access to a config.json: each invalid value raises one clear error."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from specdecode_operator.sizing.errors import GeometryError, UnmodelledError
from specdecode_operator.vllm.versions import ROPE_KEYS

MAX_TOKENS: Final = 2**31 - 1
"""No position index of vLLM (int32 on the GPU) goes beyond it."""

UPPER_BOUNDS: Final = {
    "num_hidden_layers": 1024,
    "num_attention_heads": 65_536,
    "num_key_value_heads": 65_536,
    "head_dim": 65_536,
    "hidden_size": 1_048_576,
    "intermediate_size": 8_388_608,
    "vocab_size": 16_777_216,
    "max_position_embeddings": MAX_TOKENS,
}
"""Far above every published model: what is larger is a slip of the pen."""


@dataclass(frozen=True)
class Fields:
    """The values of one config.json, read with their types checked."""

    model: str
    values: Mapping[str, object]
    prefix: str = ""
    """What stands before a key in messages, such as ``quantization_config.``."""

    names: Mapping[str, str] = field(default_factory=dict)
    """Where in the file a value stands, of those that stand elsewhere than prefix and key say."""

    def path(self, key: str) -> str:
        """Return where in the file a value stands."""
        return self.names.get(key, f"{self.prefix}{key}")

    def having(self, values: Mapping[str, object], names: Mapping[str, str] | None = None) -> "Fields":
        """Return other values of the same place."""
        return replace(self, values=values, names={**self.names, **(names or {})})

    def is_set(self, key: str) -> bool:
        """Whether the key holds anything but null."""
        return self.values.get(key) is not None

    def size(self, key: str, default: int | None = None) -> int:
        """Return a positive integer, or the default where the key is absent or null."""
        value = self.values.get(key)
        if value is None:
            if default is None:
                raise self.error(key, "is missing; copy it from the model's config.json")
            return default
        # JSON's true is an int to Python; as a size it is a mistake.
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(key, "must be a whole number")
        upper = UPPER_BOUNDS.get(key, MAX_TOKENS)
        if not 1 <= value <= upper:
            raise self.error(key, f"must lie between 1 and {upper:,}")
        return value

    def flag(self, key: str, *, default: bool = False) -> bool:
        """Return a boolean, or the default where the key is absent or null."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(key, "must be true or false")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a positive finite number, or the default where the key is absent or null."""
        value = self.values.get(key)
        if value is None:
            if default is None:
                raise self.error(key, "is missing; copy it from the model's config.json")
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MAX_TOKENS:
            raise self.error(key, f"must be a number above 0 and at most {MAX_TOKENS:,}")
        return float(value)

    def text(self, key: str, default: str) -> str:
        """Return a string, or the default where the key is absent or null."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.error(key, "must be a string")
        return value

    def strings(self, key: str) -> tuple[str, ...]:
        """Return a list of strings; empty where the key is absent or null."""
        value = self.values.get(key)
        if value is None:
            return ()
        if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
            raise self.error(key, "must be a list of strings")
        return tuple(value)

    def section(self, key: str) -> "Fields | None":
        """Return a nested object, or None where the key is absent or null."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.error(key, "must be an object")
        return Fields(self.model, value, f"{self.path(key)}.")

    def error(self, key: str, message: str) -> GeometryError:
        """Return an error about the key that names the model."""
        return GeometryError(self.path(key), self.values.get(key), f"{message} (config.json of {self.model})")

    def unmodelled(self, key: str, message: str) -> UnmodelledError:
        """Return an error about something that sizing does not implement; such a model is estimated."""
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
