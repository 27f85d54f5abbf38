"""Count stilted constructions in pages, docstrings and messages, and compare them with a budget: part of `./just lint`.

The patterns are habits that an editor found in this project, about once per 1,000 words in the documentation of
CloudNativePG. A match is not always a mistake, so texts have a budget and not a ban. `python -m bench.documents.prose
PAGE...` lists the matches of pages.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from devcluster.host.paths import REPOSITORY

PAGE_BUDGET: Final = 3.0
"""Matches per 1,000 words of a page."""

PAGES: Final = {
    "docs/design/benchmarks.md": 4.5,
    "docs/reference/capture-fields.md": 4.5,  # "none" is a method, and "Defaults to …, for a …" is counted
    "docs/reference/deployment-fields.md": 4.5,
    "docs/reference/models.md": 25.0,  # sources in table cells, which name repositories and files
    "docs/reference/rights.md": 3.5,
}
"""Pages with another budget."""

ROOMS: Final = {
    "api": (3, 4), "attestation": (3, 3), "capture": (3, 3), "cli": (3, 3), "cluster": (3, 3),
    "deployment": (3, 3), "handlers": (3, 3), "importing": (3, 3), "replay": (3, 3), "sizing": (3, 3),
    "stats": (3, 3), "training": (3, 3), "vllm": (3, 3),
}  # fmt: skip
"""Budgets of docstrings, and of other texts of five words or more, by room. Lower them as texts are rewritten."""

_WRITTEN: Final = ("*.md", "docs/**/*.md", "examples/**/*.md", "charts/**/*.md", "operator/**/*.md")
"""Where pages are: the other folders of a checkout, such as .venv, have pages of others."""

PATTERNS: Final = {
    "a clause with what as a noun": r"\b[Ww]hat (?:is|was|are|were|it|they|you|a|an|the|that|this|no|has|have|had"
    r"|comes?|came|runs?|ran|serves?|served|makes?|made|fits?|does|did|can|cannot|may|must|would|should|others?|people"
    r"|somebody|nobody|each|differs?|lies|stands|needs?|takes?|took|goes|holds?|remains?|waits?|pays?|fails?|failed"
    r"|changes?|becomes?|keeps?)\b",
    "a clause with who as a noun": r"(?:(?<=[.;:,|(] )|(?<=\n)|(?<=\bby )|(?<=\bof )|(?<=\bto )|(?<=\bfor ))"
    r"[Ww]ho(?:ever)? (?!are you)[a-z]+",
    "Of at the start of a clause": r"(?:(?<=[.;:|] )|(?<=\n)|(?<=- ))Of (?!course)[a-z]",
    "is told, is said, is asked": r"\b(?:is|are|was|were|be|been) (?:told|said|asked|taken for"
    r"|held (?:to|against|by|back))\b",
    "says so": r"\b(?:says?|said|tells?|told) so\b",
    "things that say, know, want or ask": r"\b(?:says|tells|knows|believes|wants|asks|speaks|counts on|looks at)\b",
    "beside": r"\bbesides?\b",
    ", too": r", too\b",
    "else for otherwise": r"(?:[;,:] else\b|\bElse\b)",
    "anew": r"\banew\b",
    "at once": r"\bat once\b",
    "that of, those of": r"\b(?:that|those) of\b",
    "so many": r"\bso (?:many|long|often|few|much|large|small|old)\b",
    "of its own": r"\bof (?:its own|their own|your own|yours|theirs|ours|others)\b",
    "alone for only": r"\balone\b",
    ", for for because": r", for (?:it|they|the|these|those|a|an|all|there|nobody|no|what|whoever|each|only)\b",
    "nobody, nothing, none": r"\b(?:nobody|nothing|none|nor|neither)\b",
    "archaic words": r"\b(?:mend(?:s|ed)?|reckons?|lie(?:s)? (?:on|in|at|below|beside|there|with)"
    r"|stands? (?:in|on|at|beside|below|for|there|with|still|by)|goes on|go on|gives? way|in vain"
    r"|by itself|by themselves|taken back|comes? to"
    r"|as ever|all the same|ever more|whatever)\b",
    "as it is, as before": r"\bas (?:it is|they are|it was|they were|it has|they have|it does|before|there|ever)\b",
    "a for per": r"\b(?:tokens|requests|GPUs|GiB|events|writes|calls|lines?|KB|kB|MB|bytes|copies|cores|pods?|engines?"
    r"|steps?|drafts?) an? (?:step|second|replica|node|object|request|token|block|line|hour|minute|day|GPU|run|series"
    r"|field|rollout|draft|namespace|week|core)\b",
    "Absent:": r"\bAbsent[:,]",
}

_MESSAGE_WORDS: Final = 5
_WORD: Final = re.compile(r"[A-Za-z']+")


def prose(text: str) -> str:
    """Return the sentences of Markdown: without code, comments, addresses and anchors."""
    text = re.sub(r"^---\n.*?\n---\n", "", text, flags=re.DOTALL)
    text = re.sub(r"```.*?```|<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"`[^`]*`", "CODE", re.sub(r'<a id="[^"]*"></a>', "", text))


def matches(text: str) -> Iterator[tuple[str, str]]:
    """Yield each match with the name of its pattern."""
    for name, pattern in PATTERNS.items():
        yield from ((name, found[0]) for found in re.finditer(pattern, text))


def per_1000_words(texts: list[str]) -> float:
    """Return the matches per 1,000 words of texts."""
    words = sum(len(_WORD.findall(text)) for text in texts)
    return 1000 * sum(1 for text in texts for _ in matches(text)) / max(1, words)


def texts_in(source: str) -> tuple[list[str], list[str]]:
    """Return the docstrings of a module, and its other texts of five words or more."""
    tree = ast.parse(source)
    # A text that stands alone is a docstring, also below a constant or a field.
    documented = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    docstrings, messages = [], []
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if id(node) in documented:
                docstrings.append(prose(node.value))
            elif len(node.value.split()) >= _MESSAGE_WORDS:
                messages.append(prose(node.value))
    return docstrings, messages


def over_budget(root: Path) -> Iterator[str]:
    """Yield a line for each page and each room of the package with more matches than its budget."""
    for page in sorted(each for pattern in _WRITTEN for each in root.glob(pattern)):
        name = str(page.relative_to(root))
        found, budget = per_1000_words([prose(page.read_text())]), PAGES.get(name, PAGE_BUDGET)
        if found > budget:
            fix = f"python -m bench.documents.prose {name} lists them"
            yield f"{name}: {found:.1f} stilted phrases per 1,000 words, above {budget}: {fix}"
    for room, budgets in ROOMS.items():
        texts: tuple[list[str], list[str]] = ([], [])
        for module in sorted((root / "operator" / room).rglob("*.py")):
            for kept, found_here in zip(texts, texts_in(module.read_text()), strict=True):
                kept.extend(found_here)
        for kind, most, of_kind in zip(("docstrings", "messages"), budgets, texts, strict=True):
            if (found := per_1000_words(of_kind)) > most:
                yield f"operator/{room}: {kind}: {found:.1f} stilted phrases per 1,000 words, above {most}"


def main() -> int:
    """List the matches of the pages that are named, or compare all texts with their budgets."""
    for name in sys.argv[1:]:
        for pattern, found in matches(prose(Path(name).read_text())):
            print(f"{name}: {found} ({pattern})")
    lines = [] if sys.argv[1:] else [*over_budget(REPOSITORY)]
    print(*lines, sep="\n", end="\n" if lines else "")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
