"""Render the page of manual steps for a new vLLM version, the most important first."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from tests.engine.new_version.answers import UNASKED, Difference
from tests.engine.new_version.citations import mentions
from tests.engine.new_version.sources import Change, SourceChanges
from tests.engine.new_version.suites import Outcome

_LONGEST_TEXT = 160
_SHOWN_BESIDE = 8
_LISTED = re.compile(r"[\w.-]+")
_FACT = re.compile(r"vllm/data/([\d.]+)\.json: (.*)")

_ALWAYS_OURS = (UNASKED, "speculative methods", "configuration of an engine", "recorder", "targets")
"""Sections in which each difference touches what we say of the engine."""

_NAMED = ("flags", "environment variables", "metrics")
"""Sections whose names stand in our modules as they are."""


@dataclass(frozen=True)
class Findings:
    """All that was found out of a version."""

    version: str
    against: str
    differences: Sequence[Difference]
    sources: SourceChanges
    outcome: Outcome | None  # None: no tests were run
    written: Sequence[str]  # files of the checkout


def page(found: Findings) -> str:
    """Return the page, as Markdown."""
    ours = [each for each in found.differences if _is_ours(each)]
    rest = [each for each in found.differences if each not in ours]
    judged = [each for each in found.sources.named if each.judged]
    memory = [each for each in found.sources.named if _of_memory(each) and not each.judged]
    other = [each for each in found.sources.named if not _of_memory(each) and not each.judged]
    parts = [
        f"# vLLM {found.version}: what to look at, against {found.against}",
        "\n".join(_summary(found, len(ours))),
        *_outcome(found.outcome),
        "## Where it differs in what we say of it",
        _table(("what", "name", found.against, found.version, "ours"), _rows_of_differences(ours)),
        "## Source that our memory terms stand on",
        _table(("file and function", "change", "ours"), _rows_of_changes(memory)),
        "## Other source that we name",
        _table(("file and function", "change", "ours"), _rows_of_changes(other)),
        *_judged(found.version, judged),
        "## New, or changed where we do not look",
        *_new(rest, found),
        *_beside(found.sources),
        "## Then",
        "\n".join(_then(found)),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def diffs(sources: SourceChanges) -> str:
    """Return the differences of all functions that are named, one after the other."""
    return "\n".join(f"{each.diff}\n" for each in sources.named if each.diff)


def _summary(found: Findings, answers: int) -> Iterator[str]:
    if found.outcome:
        yield f"- Tests: {found.outcome.summary}."
    told = [each for each in found.differences if each.now]
    unasked = [each.name for each in told if each.section == UNASKED]
    if unasked:
        yield f"- **It cannot be asked** about {'; '.join(unasked)}: mend `tests/engine/engine_oracle.py` first."
    if problems := [each.name for each in told if each.section == "recorder"]:
        yield f"- The recorder **does not record**: {'; '.join(problems)}."
    elif not any("recorder" in name for name in unasked):
        yield "- The recorder records."
    changed, judged = len(found.sources.named), sum(each.judged for each in found.sources.named)
    yield f"- {answers} answers differ in what we say."
    yield f"- {changed} functions that we name have changed, {judged} are judged."
    yield "- Our own places, in the last columns, are below `operator/`."
    if found.written:
        yield f"- Written: {', '.join(f'`{path}`' for path in found.written)}."


def _outcome(outcome: Outcome | None) -> Iterator[str]:
    if outcome and outcome.failures:
        yield "## Tests that fail"
        yield _table(("test", "what it says"), ((_code(name), _code(said)) for name, said in outcome.failures))


def _is_ours(difference: Difference) -> bool:
    """Decide whether it touches what we say of the engine: what is told to it, read of it, or counted for it."""
    asked = difference.section in _ALWAYS_OURS or difference.name.startswith("SpeculativeConfig.")
    return asked or (difference.before is not None and bool(_ours(difference)))


def _ours(difference: Difference) -> list[str]:
    return mentions(difference.name) if difference.section in _NAMED else []


def _of_memory(change: Change) -> bool:
    return any(
        place.startswith("sizing/") or re.search(r": .*(memory|kv_cache|kernels)", place) for place in change.places
    )


def _rows_of_differences(found: Sequence[Difference]) -> Iterator[tuple[str, ...]]:
    for each in found:
        if not _only_spelled(each):
            yield each.section, f"`{each.name}`", *_told(each), ", ".join(_ours(each))
    if spelled := [each for each in found if _only_spelled(each)]:
        spellings = ", ".join(_told(each)[1] for each in spelled)
        yield (
            "flags",
            "further spellings",
            "",
            spellings,
            ", ".join(sorted({place for d in spelled for place in _ours(d)})),
        )


def _only_spelled(difference: Difference) -> bool:
    """Decide whether a flag takes what it took, and has got further spellings."""
    before, now = difference.before, difference.now
    return difference.section == "flags" and bool(before and now) and now.startswith(before)


def _told(difference: Difference) -> tuple[str, str]:
    """Return both texts; of two lists only what one has and the other lacks."""
    before, now = difference.before, difference.now
    if before and now:
        words, others = (set(_LISTED.findall(text)) for text in (before, now))
        lost, new = sorted(words - others), sorted(others - words)
        if len(words & others) > 1 and (lost or new):
            return ", ".join(f"-`{word}`" for word in lost), ", ".join(f"+`{word}`" for word in new)
    return _value(before), _value(now)


def _value(text: str | None) -> str:
    return "no such" if text is None else _code(text)


def _rows_of_changes(found: Iterable[Change]) -> Iterator[tuple[str, ...]]:
    # What only moved is read last.
    for each in sorted(found, key=lambda each: each.found_in is not None and not each.diff):
        yield f"`{each.path}` `{each.name}`", each.what, _places(each.places)


def _places(places: Iterable[str]) -> str:
    """Return our places, with the versions behind a fact that several of them state."""
    versions: dict[str, list[str]] = {}
    for place in places:
        of_version = _FACT.fullmatch(place)
        versions.setdefault(of_version[2] if of_version else place, []).extend([of_version[1]] if of_version else [])
    return ", ".join(f"{name} ({', '.join(known)})" if known else name for name, known in versions.items())


def _judged(version: str, changes: Sequence[Change]) -> Iterator[str]:
    if changes:
        yield f"## Judged: `vllm/data/{version}.json` names them"
        yield ", ".join(f"`{each.path}` `{each.name}`" for each in changes)


def _new(rest: Sequence[Difference], found: Findings) -> Iterator[str]:
    for section, each in groupby(rest, key=lambda difference: difference.section):
        rows = (row[1:4] for row in _rows_of_differences(list(each)))
        table = _table(("name", found.against, found.version), rows)
        yield f"### {section[0].upper()}{section[1:]}\n\n{table}"


def _beside(sources: SourceChanges) -> Iterator[str]:
    if not sources.beside:
        return
    yield "### Beside it in files that we name"
    lines = []
    for path, names in sorted(sources.beside.items(), key=lambda each: ("models/" in each[0], each[0])):
        more = f" and {len(names) - _SHOWN_BESIDE} more" if len(names) > _SHOWN_BESIDE else ""
        lines.append(f"- `{path}`: {', '.join(names[:_SHOWN_BESIDE])}{more}")
    yield "<details>\n\n" + "\n".join(lines) + "\n\n</details>"


def _then(found: Findings) -> Iterator[str]:
    data = f"operator/vllm/data/{found.version}.json"
    yield f"1. Read each function above in both versions; what it changes goes into `{data}`, with file and function."
    yield "   An entry that has a source alone names what was read and changes nothing: it is not shown again."
    yield "2. What a rule refuses or a formula counts otherwise from this version on: the place in the last column."
    yield f"3. `./just engine-new {found.version}` again, until no test fails and each line here is judged."
    yield "4. The rest of [Add a vLLM version](docs/design/new-vllm-version.md): memory, recorder, pages, changelog."


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [" | ".join(_cell(cell) for cell in row) for row in rows]
    if not lines:
        return "Nothing."
    return "\n".join(f"| {line} |" for line in (" | ".join(heads), " | ".join("---" for _ in heads), *lines))


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _code(text: str) -> str:
    """Return a stranger's words as they are: in an issue, @names call people and #numbers link."""
    shown = _short(text).replace("`", "'")
    return f"`{shown}`"


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}…"
