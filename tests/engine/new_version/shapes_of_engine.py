"""Write the shapes of the installed vLLM's configuration, messages and interfaces; runs in the engine's Python.

    python shapes_of_engine.py ANSWERS.json

The file has sections of names with their shapes as text. A contributor checks the differences between two versions.
"""

import dataclasses
import enum
import inspect
import json
import sys
import typing
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
from vllm.config import SpeculativeConfig
from vllm.v1.engine.core_client import AsyncMPClient
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.metrics.loggers import AggregateStatLoggerBase

CONFIGS = "vllm.config"
MESSAGES = ("vllm.v1.engine", "vllm.v1.engine.output_processor", "vllm.v1.metrics.stats", "vllm.v1.spec_decode.metrics")
DEFINED_IN = ("vllm.config", "vllm.v1.")
"""What is meant of all that these modules hold: the rest they import."""

HOOKED = (OutputProcessor, AsyncMPClient, AggregateStatLoggerBase)
"""What the recorder wraps, or is."""


def shape(kind: Any) -> str:
    """Return a type as text, the same in every process."""
    return kind.__qualname__ if isinstance(kind, type) and not typing.get_args(kind) else str(kind)


def default(field: Any) -> str:
    """Return a field's default as text; nothing where it has none."""
    if field.default in (dataclasses.MISSING, msgspec.NODEFAULT):
        made = field.default_factory
        return "" if made in (dataclasses.MISSING, msgspec.NODEFAULT) else f" = {getattr(made, '__name__', '…')}()"
    value = getattr(field.default, "default", field.default)  # pydantic's Field
    return f" = {value!r}" if isinstance(value, bool | int | float | str | tuple | None) else " = …"


def fields(module: str) -> Iterator[tuple[str, str]]:
    """Yield the fields of all dataclasses and messages of a module, and the members of its enumerations."""
    for name, kind in sorted(vars(import_module(module)).items()):
        if not isinstance(kind, type) or not kind.__module__.startswith(DEFINED_IN):
            continue
        if dataclasses.is_dataclass(kind):
            yield from (
                (f"{name}.{field.name}", shape(field.type) + default(field)) for field in dataclasses.fields(kind)
            )
        elif issubclass(kind, msgspec.Struct):
            found = msgspec.structs.fields(kind)
            yield from ((f"{name}.{field.name}", shape(field.type) + default(field)) for field in found)
        elif issubclass(kind, enum.Enum):
            yield from ((f"{name}.{member.name}", repr(member.value)) for member in kind)


def signatures() -> Iterator[tuple[str, str]]:
    """Yield what the methods take that the recorder wraps or overrides."""
    for kind in HOOKED:
        for name, function in inspect.getmembers(kind, inspect.isfunction):
            if not name.startswith("_"):
                waits = "async " if inspect.iscoroutinefunction(function) else ""
                yield f"{kind.__name__}.{name}", f"{waits}({', '.join(inspect.signature(function).parameters)})"


def methods() -> list[str]:
    """Return the speculative methods that a user may name."""
    (field,) = (each for each in dataclasses.fields(SpeculativeConfig) if each.name == "method")
    return sorted(_literals(field.type))


def _literals(kind: Any) -> set[str]:
    found = set()
    for each in typing.get_args(kind):
        found |= {each} if isinstance(each, str) else _literals(each)
    return found


def recorder() -> dict[str, str]:
    """Return what the recorder on the path makes of this engine."""
    internals = import_module("specdecode_recorder.vllm_internals")
    try:
        classes = internals.find_classes()
        return dict.fromkeys(internals.unknown_shapes(classes) + internals.live_problems(classes), "does not work")
    except (ImportError, AttributeError, KeyError) as error:
        return {f"{type(error).__name__}: {error}": "does not work"}


def main() -> None:
    """Write everything down."""
    configurations = dict(fields(CONFIGS))
    sections = {
        "speculative methods": dict.fromkeys(methods(), "known"),
        "fields of configurations": configurations,
        "messages": {name: text for each in MESSAGES for name, text in fields(each) if name not in configurations},
        "signatures": dict(signatures()),
        "recorder": recorder(),
    }
    Path(sys.argv[1]).write_text(json.dumps(sections), encoding="utf-8")


if __name__ == "__main__":
    main()
