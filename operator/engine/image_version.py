"""Which vLLM an image's name tells of, and an engine of itself."""

import re
from typing import Final

from specdecode_operator.documents.json_text import parse_json

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
