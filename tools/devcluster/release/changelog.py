"""CHANGELOG.md as releases read and write it: by section, in the format of Keep a Changelog."""

import re
from typing import Final

from devcluster.host.errors import ClusterError

_SECTION: Final = re.compile(
    r"^## \[(?P<name>[^\]]+)\](?: - \d{4}-\d{2}-\d{2})?\n(?P<text>.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL
)
_UNRELEASED: Final = "Unreleased"


def released(changelog: str) -> list[str]:
    """Return the versions that have a section, the newest first."""
    return [match["name"] for match in _SECTION.finditer(changelog) if match["name"] != _UNRELEASED]


def notes(changelog: str, version: str) -> str:
    """Return what changed with a version."""
    return _text(changelog, version)


def release(changelog: str, version: str, date: str) -> str:
    """Return the changelog in which what is not released yet is a version of this date (2026-11-23).

    Raises
    ------
    ClusterError
        The version has a section, or nothing has changed.
    """
    if version in released(changelog):
        raise ClusterError(f"CHANGELOG.md: {version} has a section already: choose the next version")
    if not _text(changelog, _UNRELEASED):
        raise ClusterError(f"CHANGELOG.md: nothing stands under [{_UNRELEASED}]: there is nothing to release")
    heading = f"## [{_UNRELEASED}]\n"
    return changelog.replace(heading, f"{heading}\n## [{version}] - {date}\n", 1)


def _text(changelog: str, name: str) -> str:
    for match in _SECTION.finditer(changelog):
        if match["name"] == name:
            return match["text"].strip()
    raise ClusterError(f"CHANGELOG.md: no section [{name}]: ./just version {name} writes that of a new version")
