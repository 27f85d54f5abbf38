"""The pages of the site, made of the documents: links that lead out of them go to the repository.

On a forge each document links to any file of the repository by its relative path. The site holds documents alone. So a
link to another document becomes one between pages, and a link to any other file one to the repository where its address
is given, else plain text.
"""

import os
import re
import shutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Final

ROOT: Final = Path(__file__).parents[3]
STYLE: Final = Path(__file__).with_name("style.css")

_ELSEWHERE: Final = {
    "docs/README.md": "contents.md",
    "examples/README.md": "examples.md",
    "operator/README.md": "rooms.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
"""Pages whose place on the site is not that in docs/. README.md is none: the start page is made for the site."""

_LINK: Final = re.compile(
    r"(?P<kept>^```.*?^```$|<!--.*?-->)"
    r"|(?P<image>!?)\[(?P<text>(?:`[^`]*`|[^\[\]`])*)\]\((?P<target>[^)\s]+)\)"
    r"|(?P<code>`[^`\n]+`)",
    re.MULTILINE | re.DOTALL,
)
_ABSOLUTE: Final = re.compile(r"[a-z]+:")


class LinkError(ValueError):
    """A link leads nowhere."""


@dataclass(frozen=True)
class Repository:
    """Where the files lie that are no pages."""

    url: str | None = None  # without it, links to them become text
    revision: str = "main"

    def link(self, path: Path) -> str | None:
        """Return the address of a file or folder, as GitHub, Gitea and Forgejo have it and GitLab redirects it."""
        if self.url is None:
            return None
        view = "tree" if path.is_dir() else "blob"
        return f"{self.url.rstrip('/')}/{view}/{self.revision}/{path.relative_to(ROOT).as_posix()}"


@cache
def pages() -> dict[Path, PurePosixPath]:
    """Return the documents that are pages of the site, each with its path there."""
    found = {path: PurePosixPath(path.relative_to(ROOT / "docs")) for path in sorted((ROOT / "docs").rglob("*.md"))}
    return found | {ROOT / name: PurePosixPath(page) for name, page in _ELSEWHERE.items()}


@cache
def assets() -> dict[Path, PurePosixPath]:
    """Return what lies beside the documents and is shown or linked as it is: pictures, schemas."""
    files = sorted(path for path in (ROOT / "docs").rglob("*") if path.is_file() and path.suffix != ".md")
    return {path: PurePosixPath(path.relative_to(ROOT / "docs")) for path in files}


def with_links(document: Path, text: str, repository: Repository) -> str:
    """Return the text of a document as that of its page.

    Raises
    ------
    LinkError
        When a link leads to no file.
    """
    known = pages() | assets()

    def moved(match: re.Match[str]) -> str:
        target = match["target"]
        if target is None or target.startswith("#") or _ABSOLUTE.match(target):
            return match[0]
        path, _, anchor = target.partition("#")
        linked = Path(os.path.normpath(document.parent / path))
        if not linked.exists():
            message = f"{document.relative_to(ROOT)}: {target}: leads to no file: correct it"
            raise LinkError(message)
        page = known.get(linked / "README.md" if linked.is_dir() else linked)
        if page is not None:
            address: str | None = os.path.relpath(page, known[document].parent)
        else:
            address = repository.link(linked)
        if address is None:
            return match["text"]
        return f"{match['image']}[{match['text']}]({address}{'#' if anchor else ''}{anchor})"

    return _LINK.sub(moved, text)


def write_pages(folder: Path, repository: Repository) -> None:
    """Write all pages, and what they show, into a folder of their own."""
    shutil.rmtree(folder, ignore_errors=True)
    for document, page in pages().items():
        _file(folder, page).write_text(with_links(document, document.read_text(), repository))
    for asset, place in assets().items():
        shutil.copy(asset, _file(folder, place))
    shutil.copy(STYLE, _file(folder, PurePosixPath("assets/style.css")))


def _file(folder: Path, path: PurePosixPath) -> Path:
    file = folder / path
    file.parent.mkdir(parents=True, exist_ok=True)
    return file
