"""Tables of vLLM versions: changes of each version, and the version of an image or engine.

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

FLY_KEY = "fly_window_size"
"""Key of --speculative-config in versions with rejectionSampling fly.

The operator does not write it: vLLM takes min(6, K - 1) tokens, and an entropy of 0.3 or more over the 3 most likely.
"""

_TAG: Final = re.compile(r"v?(0\.\d+)(\.\d+)?([-+._].*|(post|rc)\d+)?")
"""vLLM's releases are 0.x so far; a tag of another form does not identify a version."""
_ENGINE_VERSION: Final = re.compile(r"v?(\d{1,4}\.\d{1,4})(?!\d)")
_UNTAGGED_BUILD: Final = "0.1"
"""Version of a build from a clone without tags, 0.1.dev1."""
_MAX_PAGE_CHARACTERS: Final = 4096
_VERSION: Final = re.compile(r"[0-9A-Za-z][0-9A-Za-z.+_-]{0,63}")


def release(version: str) -> tuple[int, int]:
    """Return major and minor of a version such as ``0.32`` or ``0.32.1``; raise ValueError for any other text."""
    major, _, rest = version.partition(".")
    minor = rest.partition(".")[0]
    if not (major.isdecimal() and minor.isdecimal()):
        raise ValueError(f"{version!r} is not a vLLM version: write it as 0.32.0")
    return int(major), int(minor)


def _versions_of(folder: str) -> tuple[str, ...]:
    return tuple(sorted((path.stem for path in (_FOLDER / folder).glob("*.json")), key=release))


SIZED_VERSIONS: Final = _versions_of("data")
"""Versions with known memory rules, oldest first."""
LAUNCHED_VERSIONS: Final = _versions_of("flags")
"""Sized versions with known flags, oldest first."""


@cache
def version_facts(version: str) -> Mapping[str, Any]:
    """Return the facts of a version; for an unknown one, those of the nearest known version.

    The result is shared: do not change it. Raises ValueError if ``version`` is not a version.
    """
    wanted = max(release(version), release(SIZED_VERSIONS[0]))
    *older, nearest = (known for known in SIZED_VERSIONS if release(known) <= wanted)
    facts: Any = version_facts(older[-1]) if older else {}
    for change in changes(nearest):
        facts = _merged(facts, {name: fact for name, fact in change.items() if name != "source"})
    return _merged(facts, _read(f"flags/{nearest}.json")) if nearest in LAUNCHED_VERSIONS else facts  # type: ignore[no-any-return]


def changes(version: str) -> list[dict[str, Any]]:
    """Return the changes in the file of a known version, each with its ``source``."""
    return _read(f"data/{version}.json")  # type: ignore[no-any-return]


def ended_method(method: str, version: str) -> tuple[str, str] | None:
    """Return the best replacement of a method that a version no longer has, and the last version that has the method.

    Return None if the method is not known to have ended.
    """
    instead = version_facts(version).get("ended_methods", {}).get(method)
    if instead is None:
        return None
    had = (known for known in SIZED_VERSIONS if method not in version_facts(known).get("ended_methods", {}))
    return instead, max(had, key=release)


def _merged(old: Any, patch: Any) -> Any:
    """Apply a JSON merge patch (RFC 7386) to a copy."""
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


def split_reference(image: str) -> tuple[str, str]:
    """Return repository and tag of an image reference; the tag is empty if there is only a digest."""
    name, _, digest = image.partition("@")
    repository, colon, tag = name.rpartition(":")
    if not colon or "/" in tag:
        return name, ""
    return repository, "" if digest and not tag else tag


def version_of_image(image: str) -> str | None:
    """Return the vLLM version, as major and minor, from the tag of an image; None if the tag has no version."""
    repository, tag = split_reference(image)
    found = _TAG.fullmatch(tag) if "vllm" in repository else None
    return found[1] if found else None


def version_of_engine(reported: str) -> str | None:
    """Return major and minor of the version that an engine reports; None if it does not know its version."""
    found = _ENGINE_VERSION.match(reported)
    return found[1] if found and found[1] != _UNTAGGED_BUILD else None


def read_version(page: str) -> str | None:
    """Return the version on an engine's page /version; None if it has no version.

    vllm/entrypoints/serve/instrumentator/basic.py of 0.28 to 0.33.
    """
    try:
        answer = parse_json(page) if len(page) <= _MAX_PAGE_CHARACTERS else None
    except ValueError:
        return None
    version = answer.get("version") if isinstance(answer, dict) else None
    return version if isinstance(version, str) and _VERSION.fullmatch(version) else None
