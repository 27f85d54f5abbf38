"""What is known of each vLLM version: one table for what is launched and for what is sized.

``data/`` has a file for each minor version, written by hand: a list of changes against the version before it, each with
the source that it was read in. ``flags/`` has one for each version that can be launched, written by
``tests/engine/flag_table.py`` from the version's own parsers. A change is a JSON merge patch (RFC 7386): null removes.
"""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

_FOLDER: Final = Path(__file__).parent


def release(version: str) -> tuple[int, int]:
    """Return major and minor of a version such as ``0.32`` or ``0.32.1``.

    Raises
    ------
    ValueError
        When it is no version.
    """
    major, _, rest = version.partition(".")
    minor = rest.partition(".")[0]
    if not (major.isdecimal() and minor.isdecimal()):
        raise ValueError(f"{version!r} is no vLLM version: write it as 0.32.0")
    return int(major), int(minor)


def _versions_of(folder: str) -> tuple[str, ...]:
    return tuple(sorted((path.stem for path in (_FOLDER / folder).glob("*.json")), key=release))


SIZED_VERSIONS: Final = _versions_of("data")
"""Versions whose rules of memory are known, oldest first."""

LAUNCHED_VERSIONS: Final = _versions_of("flags")
"""Those of them whose flags are known, too."""


@cache
def version_facts(version: str) -> Mapping[str, Any]:
    """Return what holds for a version; one beyond those known has the facts of the oldest, or of the newest.

    The result is shared: nobody may change it.

    Raises
    ------
    ValueError
        When it is no version.
    """
    wanted = max(release(version), release(SIZED_VERSIONS[0]))
    facts: Any = {}
    for known in SIZED_VERSIONS:
        if release(known) <= wanted:
            for change in changes(known):
                facts = _merged(facts, {name: fact for name, fact in change.items() if name != "source"})
    for known in LAUNCHED_VERSIONS:
        if release(known) <= wanted:
            facts = _merged(facts, _read(f"flags/{known}.json"))
    return facts  # type: ignore[no-any-return]


def changes(version: str) -> list[dict[str, Any]]:
    """Return what the file of a known version says: changes, each with its ``source``."""
    return _read(f"data/{version}.json")  # type: ignore[no-any-return]


def ended_method(method: str, version: str) -> tuple[str, str] | None:
    """Return what does best in the place of a method that a version has no more, and the last version that has it.

    None where it is not known to have ended.
    """
    instead = version_facts(version).get("ended_methods", {}).get(method)
    if instead is None:
        return None
    had = (known for known in SIZED_VERSIONS if method not in version_facts(known).get("ended_methods", {}))
    return instead, max(had, key=release)


def _merged(old: Any, patch: Any) -> Any:
    """Return a value with a JSON merge patch on top (RFC 7386); neither of them is changed."""
    if not isinstance(patch, dict):
        return patch
    merged = dict(old) if isinstance(old, dict) else {}
    for name, value in patch.items():
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = _merged(merged.get(name), value)
    return merged


def _read(name: str) -> Any:
    return json.loads((_FOLDER / name).read_text(encoding="utf-8"))
