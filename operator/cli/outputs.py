"""Common output models, and output as JSON, YAML and Markdown.

Control characters in untrusted text are escaped.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any, Final, Literal, TypeVar

import typer
from pydantic import BaseModel, ConfigDict

from specdecode_operator.cli.json_text import is_printable, json_text
from specdecode_operator.cli.options import TableOrData
from specdecode_operator.problems import Problem, printable

Verdict = Literal["Fits", "Tight", "DoesNotFit", "Unknown", "Invalid"]


class Output(BaseModel):
    """Base of models that commands print as JSON or YAML. Later versions may add keys."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)


_T = TypeVar("_T", bound=Output)


def filled(model: type[_T], source: object, **given: Any) -> _T:
    """Return a model with the given values; other fields are copied from the attributes of ``source``."""
    return model(**{name: getattr(source, name) for name in model.model_fields.keys() - given.keys()}, **given)


class ProblemOutput(Output):
    """A problem in an object."""

    field: str
    """Path in the object, such as spec.parallelism.tensor."""
    value: str
    """Value of the field."""
    message: str
    """Problem and fix."""


def problems_data(problems: Iterable[Problem]) -> list[ProblemOutput]:
    """Return problems as data."""
    return [ProblemOutput(field=each.field, value=each.value, message=each.message) for each in problems]


class PerGpu(Output):
    """Memory per GPU (on CPU: per rank) in bytes. available_kv is requested minus the seven terms in between."""

    total: int
    """Memory of the device, as CUDA reports it."""
    requested: int
    """Memory that the engine claims; on CPU, its total memory use."""
    target_weights: int
    """Weights of the target."""
    draft_weights: int
    """Weights of the draft."""
    adapters: int
    """LoRA adapters; 0 without any."""
    state: int
    """Buffers for request state."""
    activation: int
    """Peak activation memory of one step."""
    cuda_graphs: int
    """CUDA graphs."""
    non_torch: int
    """Memory outside torch, including corrections from a calibration."""
    available_kv: int
    """Memory left for the KV cache, before the margin. Negative if the other terms exceed the requested memory."""


def print_data(data: "BaseModel", output: TableOrData) -> None:
    """Print an answer as JSON or YAML."""
    plain = data.model_dump(mode="json")
    if output is TableOrData.JSON:
        print_json(plain)
    else:
        typer.echo(yaml_text(plain), nl=False)


def print_json(value: Any) -> None:
    """Print a value as indented JSON."""
    typer.echo(json_text(value, indent=2))


def yaml_text(value: Any, **options: Any) -> str:
    """Return a value as YAML, with non-printable characters escaped. ``options`` go to ``yaml.dump``."""
    # Importing yaml takes longer than the rest of the command line.
    import yaml  # noqa: PLC0415

    chosen = {"Dumper": yaml.SafeDumper, "sort_keys": False, **options}
    text: str = yaml.dump(value, allow_unicode=True, **chosen)
    return text if is_printable(text) else str(yaml.dump(value, allow_unicode=False, **chosen))


_MOST_ITEMS: Final = 100
"""GitHub accepts summaries of at most 1 MiB."""


def code(text: object) -> str:
    """Return a text as a Markdown code span, so that it cannot become a link, mention, image or HTML."""
    plain = printable(str(text)).strip()
    fence = "`" * (max(map(len, re.findall("`+", plain)), default=0) + 1)
    # Markdown strips the spaces next to the fence, and has no empty code spans.
    return f"{fence} {plain or '-'} {fence}" if "`" in plain else f"{fence}{plain or '-'}{fence}"


def table(heading: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Return the lines of a Markdown table with code spans as cells; empty without rows."""
    # After a backslash, an escaped bar does not work in every renderer.
    lines = [f"| {' | '.join(code(str(each).replace('|', '¦')) for each in row)} |" for row in rows]
    return [f"| {' | '.join(heading)} |", f"|{' --- |' * len(heading)}", *limited(lines)] if lines else []


def limited(items: Sequence[str]) -> list[str]:
    """Return the first 100 lines, and the number of omitted lines."""
    left = len(items) - _MOST_ITEMS
    return [*items[:_MOST_ITEMS], *([f"\nand {left} more"] if left > 0 else [])]
