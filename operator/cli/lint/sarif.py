"""Findings as SARIF 2.1.0, which GitHub, GitLab and editors show beside the lines.

https://docs.oasis-open.org/sarif/sarif/v2.1.0/sarif-v2.1.0.html
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from specdecode_operator.cli.lint.findings import Finding
from specdecode_operator.cli.text_files import STANDARD_INPUT
from specdecode_operator.version import __version__

_SCHEMA: Final = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
_STANDARD_INPUT: Final = "stdin"


def sarif(findings: Sequence[Finding]) -> dict[str, Any]:
    """Return a log with one run."""
    rules = list(dict.fromkeys(each.rule for each in findings))
    driver = {"name": "specdecode", "version": __version__, "rules": [{"id": rule} for rule in rules]}
    results = [_result(each, rules.index(each.rule)) for each in findings]
    return {"$schema": _SCHEMA, "version": "2.1.0", "runs": [{"tool": {"driver": driver}, "results": results}]}


def _result(finding: Finding, rule: int) -> dict[str, Any]:
    place: dict[str, Any] = {"artifactLocation": {"uri": _uri(finding.file)}}
    if finding.line is not None:
        place["region"] = {"startLine": finding.line}
    location: dict[str, Any] = {"physicalLocation": place}
    if finding.document is not None:
        name = f"{finding.document.kind} {finding.document.qualified_name}"
        location["logicalLocations"] = [{"fullyQualifiedName": f"{name} {finding.field}".strip(), "kind": "object"}]
    return {
        "ruleId": finding.rule,
        "ruleIndex": rule,
        "level": finding.level.value,
        "message": {"text": finding.message},
        "locations": [location],
    }


def _uri(file: str) -> str:
    """Return a file as a URI: below the working directory relative to it, as GitHub wants it."""
    if file == STANDARD_INPUT:
        return _STANDARD_INPUT
    path, here = Path(file).absolute(), Path.cwd()
    return quote(path.relative_to(here).as_posix()) if path.is_relative_to(here) else path.as_uri()
