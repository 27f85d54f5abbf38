"""What a release says of itself, in release.json, and what its files are called."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from devcluster.host.errors import ClusterError

RECORD: Final = "release.json"
_PLACEHOLDER: Final = "https://github.com/OWNER/REPOSITORY"
BY_DIGEST: Final = re.compile(r"[^@]+@sha256:[0-9a-f]{64}")
"""Of an image that is named by what it is."""


@dataclass(frozen=True)
class Release:
    """What was made, for where, and on which base."""

    version: str
    registry: str
    """Where images and charts are to lie: registry.example.com/team."""
    digest: str
    """Of the image's manifest."""
    base: str
    source: str = ""
    """Address of the repository on GitHub, if it is known."""

    @property
    def source_or_placeholder(self) -> str:
        """Return the address of the repository, or one with OWNER and REPOSITORY to replace."""
        return self.source or _PLACEHOLDER

    @property
    def repository(self) -> str:
        """Return the image's name without tag and digest."""
        return f"{self.registry}/specdecode-operator"

    @property
    def image(self) -> str:
        """Return the image by its digest."""
        return f"{self.repository}@{self.digest}"

    @property
    def archive(self) -> str:
        """Return the name of the image's file in dist/."""
        return f"specdecode-operator-image-{self.version}.tar"

    @property
    def sbom(self) -> str:
        """Return the name of the file that says what the image is made of."""
        return f"specdecode-operator-image-{self.version}.cdx.json"

    def chart(self, name: str) -> str:
        """Return the name of a chart's file."""
        return f"{name}-{self.version}.tgz"

    @classmethod
    def of(cls, folder: Path) -> "Release":
        """Return what a folder says of the release in it."""
        try:
            return cls(**json.loads((folder / RECORD).read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise ClusterError(f"{folder / RECORD}: {error}: ./just release makes it") from None
