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
_MOST_SHOWN = 8
_LISTED = re.compile(r"[\w.-]+")
_FACT = re.compile(r"vllm/data/([\d.]+)\.json: (.*)")

_ALWAYS_OURS = (UNASKED, "speculative methods", "configuration of an engine", "recorder", "targets")
"""Sections of which the operator depends on every entry."""

_NAMED = ("flags", "environment variables", "metrics")
"""Sections whose names appear literally in the operator."""


@dataclass(frozen=True)
class Findings:
    """Everything that is known about a version."""

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
        f"# vLLM {found.version}: changes to review since {found.against}",
        "\n".join(_summary(found, len(ours))),
        *_outcome(found.outcome),
        "## Changes in behavior that the operator depends on",
        _table(("kind", "name", found.against, found.version, "used in"), _rows_of_differences(ours)),
        "## Changed source of memory terms",
        _table(("file and function", "change", "used in"), _rows_of_changes(memory)),
        "## Other changed source that the operator cites",
        _table(("file and function", "change", "used in"), _rows_of_changes(other)),
        *_reviewed(found.version, judged),
        "## Other changes",
        *_new(rest, found),
        *_others(found.sources),
        "## Next steps",
        "\n".join(_next_steps(found)),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def diffs(sources: SourceChanges) -> str:
    """Return the diffs of all cited functions."""
    return "\n".join(f"{each.diff}\n" for each in sources.named if each.diff)


def _summary(found: Findings, answers: int) -> Iterator[str]:
    if found.outcome:
        yield f"- Tests: {found.outcome.summary}."
    told = [each for each in found.differences if each.now]
    unasked = [each.name for each in told if each.section == UNASKED]
    if unasked:
        yield f"- **Not readable from this version**: {'; '.join(unasked)}. Fix `tests/engine/engine_oracle.py` first."
    if problems := [each.name for each in told if each.section == "recorder"]:
        yield f"- The recorder **does not work**: {'; '.join(problems)}."
    elif not any("recorder" in name for name in unasked):
        yield "- The recorder works."
    changed, judged = len(found.sources.named), sum(each.judged for each in found.sources.named)
    yield f"- Behavior that the operator depends on: {answers} changes."
    yield f"- Cited functions: {changed} changed, {judged} of them reviewed."
    yield "- Paths in the last columns are relative to `operator/`."
    if found.written:
        yield f"- Files written: {', '.join(f'`{path}`' for path in found.written)}."


def _outcome(outcome: Outcome | None) -> Iterator[str]:
    if outcome and outcome.failures:
        yield "## Failed tests"
        yield _table(("test", "message"), ((_code(name), _code(said)) for name, said in outcome.failures))


def _is_ours(difference: Difference) -> bool:
    """Return whether the operator depends on it: passes it to the engine, reads it, or counts it."""
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
        if not _only_respelled(each):
            yield each.section, f"`{each.name}`", *_texts(each), ", ".join(_ours(each))
    if spelled := [each for each in found if _only_respelled(each)]:
        spellings = ", ".join(_texts(each)[1] for each in spelled)
        yield (
            "flags",
            "additional spellings",
            "",
            spellings,
            ", ".join(sorted({place for d in spelled for place in _ours(d)})),
        )


def _only_respelled(difference: Difference) -> bool:
    """Return whether a flag accepts the same values and only has additional spellings."""
    before, now = difference.before, difference.now
    return difference.section == "flags" and bool(before and now) and now.startswith(before)


def _texts(difference: Difference) -> tuple[str, str]:
    """Return both texts; of two lists only the items that differ."""
    before, now = difference.before, difference.now
    if before and now:
        words, others = (set(_LISTED.findall(text)) for text in (before, now))
        lost, new = sorted(words - others), sorted(others - words)
        if len(words & others) > 1 and (lost or new):
            return ", ".join(f"-`{word}`" for word in lost), ", ".join(f"+`{word}`" for word in new)
    return _value(before), _value(now)


def _value(text: str | None) -> str:
    return "none" if text is None else _code(text)


def _rows_of_changes(found: Iterable[Change]) -> Iterator[tuple[str, ...]]:
    # Functions that only moved come last.
    for each in sorted(found, key=lambda each: each.found_in is not None and not each.diff):
        yield f"`{each.path}` `{each.name}`", each.what, _places(each.places)


def _places(places: Iterable[str]) -> str:
    """Return the places, and the versions of a fact that several data files state."""
    versions: dict[str, list[str]] = {}
    for place in places:
        of_version = _FACT.fullmatch(place)
        versions.setdefault(of_version[2] if of_version else place, []).extend([of_version[1]] if of_version else [])
    return ", ".join(f"{name} ({', '.join(known)})" if known else name for name, known in versions.items())


def _reviewed(version: str, changes: Sequence[Change]) -> Iterator[str]:
    if changes:
        yield f"## Reviewed: listed in `vllm/data/{version}.json`"
        yield ", ".join(f"`{each.path}` `{each.name}`" for each in changes)


def _new(rest: Sequence[Difference], found: Findings) -> Iterator[str]:
    for section, each in groupby(rest, key=lambda difference: difference.section):
        rows = (row[1:4] for row in _rows_of_differences(list(each)))
        table = _table(("name", found.against, found.version), rows)
        yield f"### {section[0].upper()}{section[1:]}\n\n{table}"


def _others(sources: SourceChanges) -> Iterator[str]:
    if not sources.beside:
        return
    yield "### Other changed functions in cited files"
    lines = []
    for path, names in sorted(sources.beside.items(), key=lambda each: ("models/" in each[0], each[0])):
        more = f" and {len(names) - _MOST_SHOWN} more" if len(names) > _MOST_SHOWN else ""
        lines.append(f"- `{path}`: {', '.join(names[:_MOST_SHOWN])}{more}")
    yield "<details>\n\n" + "\n".join(lines) + "\n\n</details>"


def _next_steps(found: Findings) -> Iterator[str]:
    data = f"operator/vllm/data/{found.version}.json"
    yield f"1. Compare each function above in both versions. Add what changed to `{data}`, with file and function."
    yield "   An entry with only a source marks the function as reviewed without a change, so it is not shown again."
    yield "2. Where a rule or a formula differs from this version on, change the module in the last column."
    yield f"3. Repeat `./just engine-new {found.version}` until no test fails and each function is reviewed."
    yield "4. Continue with [Add a vLLM version](docs/design/new-vllm-version.md): memory, recorder, pages, changelog."


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [" | ".join(_cell(cell) for cell in row) for row in rows]
    if not lines:
        return "None."
    return "\n".join(f"| {line} |" for line in (" | ".join(heads), " | ".join("---" for _ in heads), *lines))


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _code(text: str) -> str:
    """Return text as code, because in an issue @names notify people and #numbers are links."""
    shown = _short(text).replace("`", "'")
    return f"`{shown}`"


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}…"
