"""Prints data for programs: what others wrote in it keeps its value, and does nothing to a terminal."""

import json
from typing import TYPE_CHECKING, Any

import typer

from specdecode_operator.cli.options import TableOrData

if TYPE_CHECKING:
    from pydantic import BaseModel


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
