"""Generate the definitions of the metrics of engines, for docs/reference/metrics.md."""

from collections.abc import Iterator

from specdecode_operator.stats.figures import FIGURES, Figure


def figure_table() -> str:
    """Return the overview, and a section for each figure."""
    return "\n".join([*_overview(), *(line for figure in FIGURES for line in _section(figure))])


def _overview() -> Iterator[str]:
    yield "| metric | unit | recorded as |"
    yield "| --- | --- | --- |"
    for figure in FIGURES:
        recorded = ", ".join(f"`{figure.recorded(level)}`" for level in figure.levels)
        recorded = recorded or "not recorded, because it needs a limit"
        yield f"| [{figure.title}](#{_anchor(figure)}) | {figure.unit or '1'} | {recorded} |"


def _section(figure: Figure) -> Iterator[str]:
    yield from ("", f"### {_heading(figure)}", "", figure.definition)
    yield from ("", "```promql", figure.promql(), "```")
    if figure.caveat:
        yield from ("", figure.caveat)


def _heading(figure: Figure) -> str:
    return figure.name.replace("_", " ")


def _anchor(figure: Figure) -> str:
    return figure.name.replace("_", "-")
