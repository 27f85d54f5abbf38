"""Command output: its common fields, and how it is printed as JSON, YAML and Markdown.

Untrusted text keeps its value and cannot control the terminal.
"""

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any, Final, Literal, TypeVar

import typer
from pydantic import BaseModel, ConfigDict

from specdecode_operator.cli.options import TableOrData
from specdecode_operator.problems import Problem, printable

Verdict = Literal["Fits", "Tight", "DoesNotFit", "Unknown", "Invalid"]


class Output(BaseModel):
    """A part of what a command prints as JSON or YAML; later versions may have further keys."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)


_T = TypeVar("_T", bound=Output)


def filled(model: type[_T], source: object, **given: Any) -> _T:
    """Return a model with the values given, and for its other fields the attributes of the same name."""
    return model(**{name: getattr(source, name) for name in model.model_fields.keys() - given.keys()}, **given)


class ProblemOutput(Output):
    """One thing that is wrong with an object."""

    field: str
    """Path in the object, such as spec.parallelism.tensor."""
    value: str
    """What stands there."""
    message: str
    """What is wrong with it and what to write instead."""


def problems_data(problems: Iterable[Problem]) -> list[ProblemOutput]:
    """Return problems as data."""
    return [ProblemOutput(field=each.field, value=each.value, message=each.message) for each in problems]


class PerGpu(Output):
    """Memory of one GPU, on CPU of one rank, in bytes: requested less the six terms is available_kv."""

    total: int
    """Memory of the device, as CUDA reports it."""
    requested: int
    """What the engine claims of it; on CPU what it will take in all."""
    target_weights: int
    """Weights of the target."""
    draft_weights: int
    """Weights of the draft."""
    state: int
    """Buffers for the state of requests."""
    activation: int
    """Peak of one step."""
    cuda_graphs: int
    """CUDA graphs."""
    non_torch: int
    """Memory outside torch, corrections of a calibration among it."""
    available_kv: int
    """What is left for the KV cache, before the margin; negative where the rest is too much."""


def print_data(data: "BaseModel", output: TableOrData) -> None:
    """Print an answer for programs."""
    plain = data.model_dump(mode="json")
    if output is TableOrData.JSON:
        print_json(plain)
    else:
        typer.echo(yaml_text(plain), nl=False)


def print_json(value: Any) -> None:
    """Print a value as JSON that people can read, too."""
    typer.echo(json_text(value, indent=2))


def json_text(value: Any, indent: int | None = None) -> str:
    """Return a value as JSON, in which characters that are not printable stand as escapes."""
    return printable_json(json.dumps(value, indent=indent, ensure_ascii=False))


def printable_json(text: str) -> str:
    """Return JSON that means the same."""
    if _is_printable(text):
        return text
    # Between its texts JSON has no such characters but ends of lines.
    return "".join(each if each == "\n" or each.isprintable() else json.dumps(each)[1:-1] for each in text)


def yaml_text(value: Any, **options: Any) -> str:
    """Return a value as YAML, likewise; the options are those of ``yaml.dump``."""
    # Takes longer to load than the rest of the command line.
    import yaml  # noqa: PLC0415

    chosen = {"Dumper": yaml.SafeDumper, "sort_keys": False, **options}
    text: str = yaml.dump(value, allow_unicode=True, **chosen)
    return text if _is_printable(text) else str(yaml.dump(value, allow_unicode=False, **chosen))


def _is_printable(text: str) -> bool:
    return text.replace("\n", "").isprintable()


_MOST_ITEMS: Final = 100
"""GitHub accepts summaries of at most 1 MiB."""


def code(text: object) -> str:
    """Return a text as a code span: neither a link nor a mention, a picture or HTML comes of it."""
    plain = printable(str(text)).strip()
    fence = "`" * (max(map(len, re.findall("`+", plain)), default=0) + 1)
    # Spaces beside the fence are taken off again, and an empty span is none.
    return f"{fence} {plain or '-'} {fence}" if "`" in plain else f"{fence}{plain or '-'}{fence}"


def table(heading: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Return the lines of a table, its cells as code; none without rows."""
    # No escape of a bar holds in every reader after a backslash.
    lines = [f"| {' | '.join(code(str(each).replace('|', '¦')) for each in row)} |" for row in rows]
    return [f"| {' | '.join(heading)} |", f"|{' --- |' * len(heading)}", *limited(lines)] if lines else []


def limited(items: Sequence[str]) -> list[str]:
    """Return the first lines, and how many there are beside them."""
    left = len(items) - _MOST_ITEMS
    return [*items[:_MOST_ITEMS], *([f"\nand {left} more"] if left > 0 else [])]
