"""Tables of vLLM versions: what changed in each, and which version an image or engine has.

`data/` has one hand-written file for each minor version: changes from the previous version, each with its source.
`flags/` has one file for each version that can be launched, written by `tests/engine/flag_table.py` from the
version's own parsers. A change is a JSON merge patch (RFC 7386): null removes a key. Sizing imports this module, so
it may import only the parsers of `untrusted.py`.
"""

import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

from specdecode_operator.untrusted import parse_json

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


ROPE_KEYS: Final = ("rope_parameters", "rope_scaling")
"""One thing by its name today and that of older files; transformers takes both."""


FLY_KEY = "fly_window_size"
"""Versions with it have rejectionSampling fly. Not written: vLLM takes min(6, K - 1) tokens, and entropies from
0.3 on, of the 3 likeliest."""


_TAG: Final = re.compile(r"v?(0\.\d+)(\.\d+)?([-+._].*|(post|rc)\d+)?")
"""vLLM's releases are 0.x so far; a tag of another form says nothing of vLLM."""

_SAID: Final = re.compile(r"v?(\d{1,4}\.\d{1,4})(?!\d)")
_UNTOLD: Final = "0.1"
"""What a build from a clone without tags calls itself: 0.1.dev1."""

_MOST_CHARACTERS: Final = 4096
_VERSION: Final = re.compile(r"[0-9A-Za-z][0-9A-Za-z.+_-]{0,63}")


def split_reference(image: str) -> tuple[str, str]:
    """Return repository and tag of a reference; a digest is no tag."""
    name, _, digest = image.partition("@")
    repository, colon, tag = name.rpartition(":")
    if not colon or "/" in tag:
        return name, ""
    return repository, "" if digest and not tag else tag


def version_of_image(image: str) -> str | None:
    """Return the version of vLLM, as major and minor, that an image's name tells; None where it tells none."""
    repository, tag = split_reference(image)
    found = _TAG.fullmatch(tag) if "vllm" in repository else None
    return found[1] if found else None


def version_of_engine(said: str) -> str | None:
    """Return the version, as major and minor, that an engine says of itself; None where it says none."""
    found = _SAID.match(said)
    return found[1] if found and found[1] != _UNTOLD else None


def read_version(page: str) -> str | None:
    """Return what an engine's page /version says; None where that is no version.

    vllm/entrypoints/serve/instrumentator/basic.py of 0.28 to 0.33.
    """
    try:
        said = parse_json(page) if len(page) <= _MOST_CHARACTERS else None
    except ValueError:
        return None
    version = said.get("version") if isinstance(said, dict) else None
    return version if isinstance(version, str) and _VERSION.fullmatch(version) else None
