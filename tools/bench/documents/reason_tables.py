"""Generate the reference of reasons, docs/reference/reasons.md, from operator/api/reasons.toml."""

import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Any, Final

from specdecode_operator.api.deployment import KIND as DEPLOYMENT

Explained = dict[str, list[str]]
"""Meaning of each reason, and the fix if the reason needs one."""

FILE: Final = Path(__file__).parents[3] / "operator/api/reasons.toml"

_NAMED: Final = re.compile(r"\b(?P<before>as for|see) `(?P<reason>[A-Z]\w+)`")
_SUM: Final = "Ready"
_OF_THE_SUM_IF_FALSE: Final = "Available"
_WHILE_ENGINES_SERVE: Final = ("Serving", "SpeculationInactive")
"""Reasons of `Ready` when it is True. Engines serve then, so `Available` has a different reason."""


@cache
def _read() -> dict[str, Any]:
    return tomllib.loads(FILE.read_text())


def read_reasons() -> dict[str, dict[str, Explained]]:
    """Return the reasons of each kind by subject."""
    return {kind: tables for kind, tables in _read().items() if kind != "conditions"}


def read_conditions(kind: str) -> dict[str, str]:
    """Return the conditions that can have each reason of a kind, as the file writes them."""
    groups: dict[str, list[str]] = _read()["conditions"][kind]
    return {reason: conditions for conditions, reasons in groups.items() for reason in reasons}


def shown_conditions(kind: str, reason: str) -> str:
    """Return the conditions that have a reason, as the reference shows them.

    If no engine serves, `Available` has the reason of a `Ready` that is not True (deployment/rollout/readiness.py,
    available_condition).
    """
    conditions = read_conditions(kind)[reason]
    named = conditions.split(", ")
    own = kind == DEPLOYMENT and _SUM in named and _OF_THE_SUM_IF_FALSE not in named
    if not own or reason in _WHILE_ENGINES_SERVE:
        return conditions
    named.insert(named.index(_SUM) + 1, f"{_OF_THE_SUM_IF_FALSE} if no engine serves")
    return ", ".join(named)


def anchor(kind: str, reason: str) -> str:
    """Return the anchor of a reason in the reference. It includes the kind, because both kinds share some names."""
    return f"{kind.removeprefix('SpecDecode')}-{reason}".lower()


def reason_tables(kind: str) -> str:
    """Return one table for each subject of a kind's reasons, with an anchor for each reason."""
    parts = []
    for title, reasons in read_reasons()[kind].items():
        rows = [
            f'| <a id="{anchor(kind, name)}"></a>`{name}` | {shown_conditions(kind, name)} '
            f"| {' | '.join(_linked(kind, text) for text in [*texts, ''][:2])} |"
            for name, texts in reasons.items()
        ]
        header = ("| reason | condition | meaning | what to do |", "| --- | --- | --- | --- |")
        parts.append("\n".join([f"### {title}", "", *header, *rows, ""]))
    return "\n".join(parts)


def _linked(kind: str, text: str) -> str:
    """Return an explanation with links to the other reasons that it names."""
    known = read_conditions(kind)

    def link(match: re.Match[str]) -> str:
        reason = match["reason"]
        return f"{match['before']} [`{reason}`](#{anchor(kind, reason)})" if reason in known else match[0]

    return _NAMED.sub(link, text)
