"""Version of the operator, the CLI and the images, kept in one place."""

import re

__version__ = "0.1.0"


def is_newer(version: str, than: str) -> bool:
    """Whether one version is later than another."""
    return _numbers(version) > _numbers(than)


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d{1,9}", version)[:3]]
