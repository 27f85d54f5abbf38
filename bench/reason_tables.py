"""The reference of reasons, from the one table of them: operator/api/reasons.toml."""

import tomllib
from pathlib import Path
from typing import Final

Explained = dict[str, list[str]]
"""What each reason means, and what to do where there is something to do."""

FILE: Final = Path(__file__).parents[1] / "operator/api/reasons.toml"


def read_reasons() -> dict[str, dict[str, Explained]]:
    """Return the reasons of each kind, by what they are about."""
    return tomllib.loads(FILE.read_text())


def reason_tables(kind: str) -> str:
    """Return a table for each thing that the reasons of a kind are about."""
    parts = []
    for title, reasons in read_reasons()[kind].items():
        rows = [f"| `{name}` | {' | '.join([*texts, ''][:2])} |" for name, texts in reasons.items()]
        header = ("| reason | what it means | what to do |", "| --- | --- | --- |")
        parts.append("\n".join([f"### {title}", "", *header, *rows, ""]))
    return "\n".join(parts)
