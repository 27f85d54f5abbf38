"""Prints data for programs."""

import json
from typing import TYPE_CHECKING

import typer

from specdecode_operator.cli.options import TableOrData

if TYPE_CHECKING:
    from pydantic import BaseModel


def print_data(data: "BaseModel", output: TableOrData) -> None:
    """Print an answer for programs."""
    plain = data.model_dump(mode="json")
    if output is TableOrData.JSON:
        typer.echo(json.dumps(plain, indent=2, ensure_ascii=False))
    else:
        import yaml  # noqa: PLC0415

        typer.echo(yaml.safe_dump(plain, sort_keys=False, allow_unicode=True), nl=False)
