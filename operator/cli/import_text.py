"""What `specdecode import` says beside the object: the difference, what is open, and the steps."""

from collections.abc import Iterator

from specdecode_operator.migration.convert import Adoption
from specdecode_operator.migration.ledger import Fate

_ORDER = (Fate.FIELD, Fate.EXTRA, Fate.POD, Fate.OPERATOR, Fate.LOST, Fate.DEFAULT)


def report_lines(adoption: Adoption, place: str) -> list[str]:
    """Return the report on one import, line by line."""
    metadata = adoption.body["metadata"]
    lines = [f"{place} -> SpecDecodeDeployment {metadata['name']}", ""]
    for fate in _ORDER:
        lines += _section(adoption, fate)
    if adoption.decisions:
        lines.append("to be decided before it is applied:")
        lines += [f"  {problem}" for problem in adoption.decisions]
        lines.append("")
    lines.append("to adopt it without downtime, with the object in OBJECT.yaml:")
    for number, step in enumerate(adoption.steps, start=1):
        lines += [f"  {number}. {step.purpose}", f"       {step.command}"]
    return lines


def _section(adoption: Adoption, fate: Fate) -> Iterator[str]:
    notes = [note for note in adoption.notes if note.fate is fate]
    if not notes:
        return
    yield f"{fate.value}:"
    for note in notes:
        arrow = "->" if fate in {Fate.FIELD, Fate.EXTRA, Fate.POD} else ":"
        yield f"  {note.what} -> {note.result}" if arrow == "->" else f"  {note.what}: {note.result}"
    yield ""
