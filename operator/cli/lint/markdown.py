"""Findings as Markdown, for the summary of a CI job."""

from collections.abc import Sequence

from specdecode_operator.admission.judgement import Level
from specdecode_operator.cli.lint.findings import Finding
from specdecode_operator.cli.outputs.markdown import code, limited


def lint_markdown(findings: Sequence[Finding], counts: str) -> str:
    """Return a heading, how many findings there are, and each in a line: what is refused first."""
    levels = list(Level)
    lines = [_line(each) for each in sorted(findings, key=lambda each: levels.index(each.level))]
    return "\n".join(["### specdecode lint", "", counts, *([""] if lines else []), *limited(lines)])


def _line(finding: Finding) -> str:
    place = f"{finding.file}:{finding.line}" if finding.line is not None else finding.file
    where = f"{code(place)} " if place else ""
    return f"- **{finding.level}** {where}{code(finding.message)} ({finding.rule})"
