"""The reference of reasons, and where each condition's lie in it, from the one table: operator/api/reasons.toml."""

import re
import tomllib
from pathlib import Path
from typing import Final

from specdecode_operator.api.deployment import KIND as DEPLOYMENT

Explained = dict[str, list[str]]
"""What each reason means, and what to do where there is something to do."""

FILE: Final = Path(__file__).parents[3] / "operator/api/reasons.toml"

_REFERENCE: Final = "../reference/reasons.md"
"""The page of the reasons, from that of the conditions: docs/operate/troubleshoot.md."""

_NAMED: Final = re.compile(r"\b(?P<before>as for|see) `(?P<reason>[A-Z]\w+)`")
_AT_TIMES: Final = "at times "
_SUM: Final = "Ready"
_OF_THE_SUM: Final = ("Reconciling", "Stalled")
_OF_THE_SUM_IF_FALSE: Final = "Available"
_WHILE_ENGINES_SERVE: Final = ("Serving", "SpeculationInactive")
"""Reasons of a Ready that is True: engines serve, and Available has a reason of its own."""

_WORDS: Final = {"an Event": "an Event", "none": "no condition"}
"""Where a reason stands that is no condition's."""


def read_reasons() -> dict[str, dict[str, Explained]]:
    """Return the reasons of each kind, by what they are about."""
    return {kind: tables for kind, tables in tomllib.loads(FILE.read_text()).items() if kind != "conditions"}


def read_conditions(kind: str) -> dict[str, str]:
    """Return which conditions have each reason of a kind, in the words of the table."""
    groups: dict[str, list[str]] = tomllib.loads(FILE.read_text())["conditions"][kind]
    return {reason: conditions for conditions, reasons in groups.items() for reason in reasons}


def shown_conditions(kind: str, reason: str) -> str:
    """Return the conditions that have a reason, as the reference shows them.

    Available has the reason of a Ready that is not True if no engine serves (deployment/rollout/readiness.py,
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
    """Return the anchor of a reason in the reference: both kinds have some of the same name."""
    return f"{kind.removeprefix('SpecDecode')}-{reason}".lower()


def reason_tables(kind: str) -> str:
    """Return a table for each thing that the reasons of a kind are about; every reason can be linked to."""
    parts = []
    for title, reasons in read_reasons()[kind].items():
        rows = [
            f'| <a id="{anchor(kind, name)}"></a>`{name}` | {shown_conditions(kind, name)} '
            f"| {' | '.join(_linked(kind, text) for text in [*texts, ''][:2])} |"
            for name, texts in reasons.items()
        ]
        header = ("| reason | condition | what it means | what to do |", "| --- | --- | --- | --- |")
        parts.append("\n".join([f"### {title}", "", *header, *rows, ""]))
    return "\n".join(parts)


def _linked(kind: str, text: str) -> str:
    """Return an explanation in which other reasons that it points to are links."""
    known = read_conditions(kind)

    def link(match: re.Match[str]) -> str:
        reason = match["reason"]
        return f"{match['before']} [`{reason}`](#{anchor(kind, reason)})" if reason in known else match[0]

    return _NAMED.sub(link, text)


def condition_table(kind: str) -> str:
    """Return the reasons that each condition of a kind may have, by what they are about, each a link to its line."""
    alike: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for condition in _conditions(kind):
        alike.setdefault(_cells(kind, condition), []).append(condition)
    lines = ["| condition | about | reasons |", "| --- | --- | --- |"]
    for cells, conditions in alike.items():
        name = ", ".join(_WORDS.get(each, f"`{each}`") for each in conditions)
        lines += [f"| {name} | {about} | {reasons} |" for about, reasons in cells]
        if _SUM in conditions:
            lines.append(f"| {', '.join(f'`{each}`' for each in _OF_THE_SUM)} |  | that of `{_SUM}` |")
        if _OF_THE_SUM_IF_FALSE in conditions:
            lines.append(f"| `{_OF_THE_SUM_IF_FALSE}` | if it is False | that of the pods, or that of `{_SUM}` |")
    return "\n".join([*lines, ""])


def _conditions(kind: str) -> list[str]:
    """Return what may have a reason of its own, the one that sums up first."""
    named = (each for conditions in read_conditions(kind).values() for each in conditions.split(", "))
    own = dict.fromkeys(each for each in named if each.removeprefix(_AT_TIMES) not in _OF_THE_SUM)
    return sorted(own, key=lambda each: (each != _SUM, each in _WORDS))


def _cells(kind: str, condition: str) -> tuple[tuple[str, str], ...]:
    conditions = read_conditions(kind)
    cells = []
    for title, reasons in read_reasons()[kind].items():
        has = [each for each in reasons if condition in conditions[each].split(", ")]
        links = ", ".join(f"[`{each}`]({_REFERENCE}#{anchor(kind, each)})" for each in has)
        cells += [(title[0].lower() + title[1:], links)] if has else []
    return tuple(cells)
