"""The navigation of the site: the index of the documents, docs/README.md, section by section."""

import re
from typing import Any, Final

from bench.site.pages import ROOT, pages

INDEX: Final = ROOT / "docs/README.md"
START: Final = ROOT / "docs/index.md"

_HEADING: Final = re.compile(r"^(?P<depth>##+) (?P<title>.+)$")
_LINKED: Final = re.compile(r"\]\((?P<path>[^)#\s]+\.md)\)")

Tree = list[Any]
"""Paths of pages, and objects with the title of a section and its own tree: what MkDocs calls nav."""


def navigation() -> Tree:
    """Return the sections of the index, each with the pages that it names first, in its order.

    A page stands where the index first names it as a whole, not a place in it. Sections that name nothing new are left
    out.
    """
    known = pages()
    seen = {START}
    tree: Tree = [{"Start": [str(known[START]), str(known[INDEX])]}]
    open_sections: list[tuple[int, Tree]] = [(1, tree)]
    for line in INDEX.read_text().splitlines():
        if heading := _HEADING.match(line):
            depth = len(heading["depth"])
            while open_sections[-1][0] >= depth:
                open_sections.pop()
            section: Tree = []
            open_sections[-1][1].append({heading["title"]: section})
            open_sections.append((depth, section))
        for link in _LINKED.finditer(line):
            document = (INDEX.parent / link["path"]).resolve()
            if document in known and document not in seen:
                seen.add(document)
                open_sections[-1][1].append(str(known[document]))
    return _filled(tree)


def _filled(tree: Tree) -> Tree:
    """Without the sections that hold nothing."""
    kept: Tree = []
    for entry in tree:
        if isinstance(entry, dict):
            ((title, section),) = entry.items()
            if pages_below := _filled(section):
                kept.append({title: pages_below})
        else:
            kept.append(entry)
    return kept


def named_pages(tree: Tree) -> list[str]:
    """Return all pages of a navigation, in its order."""
    found: list[str] = []
    for entry in tree:
        if isinstance(entry, dict):
            for section in entry.values():
                found += named_pages(section)
        else:
            found.append(entry)
    return found
