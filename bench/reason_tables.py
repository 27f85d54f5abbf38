"""The reference of reasons, from the one table of them: operator/api/reasons.toml."""

import tomllib
from pathlib import Path
from typing import Final

Explained = dict[str, list[str]]
"""What each reason means, and what to do where there is something to do."""

FILE: Final = Path(__file__).parents[1] / "operator/api/reasons.toml"


def read_reasons() -> dict[str, dict[str, Explained]]:
    """Return the reasons of each kind, by what they are about."""
    return {kind: tables for kind, tables in tomllib.loads(FILE.read_text()).items() if kind != "conditions"}


def read_conditions(kind: str) -> dict[str, str]:
    """Return which conditions have each reason of a kind, in the words of the table."""
    groups: dict[str, list[str]] = tomllib.loads(FILE.read_text())["conditions"][kind]
    return {reason: conditions for conditions, reasons in groups.items() for reason in reasons}


def reason_tables(kind: str) -> str:
    """Return a table for each thing that the reasons of a kind are about."""
    parts, conditions = [], read_conditions(kind)
    for title, reasons in read_reasons()[kind].items():
        rows = [
            f"| `{name}` | {conditions[name]} | {' | '.join([*texts, ''][:2])} |" for name, texts in reasons.items()
        ]
        header = ("| reason | condition | what it means | what to do |", "| --- | --- | --- | --- |")
        parts.append("\n".join([f"### {title}", "", *header, *rows, ""]))
    return "\n".join(parts)
