"""Lays out how a budget is counted, for `explain`."""

from specdecode_operator.cli.explain.explained import explained
from specdecode_operator.cli.plan.answers import Answer
from specdecode_operator.cli.plan.tables import aligned
from specdecode_operator.cli.plan.text import gib, heading, plan_text
from specdecode_operator.cli.terminal import folded
from specdecode_operator.sizing.memory.explain import Term


def explain_text(answer: Answer, width: int | None = None) -> str:
    """Return what `explain` prints for one object: the budget of the chosen candidate, and what its KV cache holds."""
    told = explained(answer)
    if told is None:
        return plan_text(answer, matrix=False, width=width)
    results = [(figure.name, figure.formula, f"= {figure.result}") for figure in told.figures]
    return "\n".join(
        [
            *folded(heading(answer, told.facts), width),
            "",
            f"Memory {told.unit} on {told.chosen.label}:",
            *_table(told.counted, width),
            "",
            "What the KV cache holds:",
            *aligned(results, left=2, width=width, foldable=(1,)),
            "",
            "Verdict:",
            *_table(told.judged, width),
            *folded(f"  {answer.verdict}: {answer.explanation}", width),
            "",
            "Sources:",
            *_sources([*told.counted, *told.judged], width),
        ]
    )


def _table(terms: list[Term], width: int | None) -> list[str]:
    rows = [(term.name, term.formula, f"{term.size_bytes:,}", gib(term.size_bytes)) for term in terms]
    return aligned([("term", "formula", "= bytes", "GiB"), *rows], left=2, width=width, foldable=(0, 1))


def _sources(terms: list[Term], width: int | None) -> list[str]:
    """Return one line a source: where it is, and the terms that follow from it."""
    by_source: dict[str, list[str]] = {}
    for term in terms:
        if term.source:
            by_source.setdefault(term.source, []).append(term.name.lstrip("-+ "))
    return aligned(
        [(source, "; ".join(names)) for source, names in by_source.items()], left=2, width=width, foldable=(0, 1)
    )
