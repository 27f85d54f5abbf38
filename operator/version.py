"""Version of the operator, the CLI and the images, kept in one place."""

import re

__version__ = "0.1.0"


def is_newer(version: str, than: str) -> bool:
    """Test whether one version is later than another."""
    numbers, known = ([int(part) for part in re.findall(r"\d{1,9}", each)[:3]] for each in (version, than))
    return numbers > known
