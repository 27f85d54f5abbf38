"""What `specdecode import` says beside the object: the difference, what is open, and the steps."""

from collections.abc import Iterator

from specdecode_operator.migration.builder import Outcome
from specdecode_operator.migration.convert import Migration

_ORDER = (Outcome.FIELD, Outcome.EXTRA, Outcome.POD, Outcome.OPERATOR, Outcome.DROPPED, Outcome.DEFAULT)


def report_lines(migration: Migration, place: str) -> list[str]:
    """Return the report on one import, line by line."""
    metadata = migration.body["metadata"]
    lines = [f"{place} -> SpecDecodeDeployment {metadata['name']}", ""]
    for outcome in _ORDER:
        lines += _section(migration, outcome)
    if migration.decisions:
        lines.append("to be decided before it is applied:")
        lines += [f"  {problem}" for problem in migration.decisions]
        lines.append("")
    lines.append("to adopt it without downtime, with the object in OBJECT.yaml:")
    for number, step in enumerate(migration.steps, start=1):
        lines += [f"  {number}. {step.purpose}", f"       {step.command}"]
    return lines


def _section(migration: Migration, outcome: Outcome) -> Iterator[str]:
    settings = [setting for setting in migration.settings if setting.outcome is outcome]
    if not settings:
        return
    yield f"{outcome.value}:"
    link = " ->" if outcome in {Outcome.FIELD, Outcome.EXTRA, Outcome.POD} else ":"
    for setting in settings:
        yield f"  {setting.name}{link} {setting.result}"
    yield ""
