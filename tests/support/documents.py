"""Reading the documents: their blocks, tables and headings."""

import re
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
_PATTERNS: Final = ("*.md", "docs/**/*.md", "examples/*.md", "charts/*/*.md")
DOCUMENTS: Final = sorted(path for pattern in _PATTERNS for path in ROOT.glob(pattern))


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def fenced_blocks(document: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", document.read_text(), re.MULTILINE | re.DOTALL)


def prose(document: Path) -> str:
    """The document without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(document: Path) -> set[str]:
    """Anchors of the headings, as GitHub makes them, and those that are written as such."""
    text = prose(document)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    named = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return named | set(re.findall(r'<a id="([^"]+)"></a>', text))


def table(document: Path, first_column: str) -> list[list[str]]:
    """Rows of the table whose header begins with this column."""
    lines = iter(document.read_text().splitlines())
    assert any(line.startswith(f"| {first_column} |") for line in lines), f"no table {first_column}"
    next(lines)
    rows = []
    for line in lines:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def sections(document: Path) -> dict[str, str]:
    """Text of each section by its heading."""
    _, *parts = re.split(r"^## (.+)$", document.read_text(), flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def paths(text: str) -> set[str]:
    """Paths of the project, with * too, that stand in backticks: what has a slash or the ending of a file."""
    quoted = set(re.findall(r"`([\w.][\w./*-]*)`", text)) - {"__init__.py", "config.json"}
    return {each for each in quoted if re.search(r"/|\.(py|md|toml|json|ya?ml|txt|in)$", each)}
