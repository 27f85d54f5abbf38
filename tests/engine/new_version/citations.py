"""Find the vLLM files and functions that the project cites as sources of facts, rules and formulas.

The citations are in `operator/vllm/data/`, in `operator/sizing/data/`, and in docstrings, comments and texts of the
operator's modules. There is no separate list, so each new citation is found automatically.
"""

import ast
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from devcluster.host.paths import REPOSITORY

OPERATOR = REPOSITORY / "operator"

_PATH = re.compile(r"(?<![\w/.-])(?:vllm/)?((?:\w+/)*\w+\.py)\b|(?<![\w/.-])(?:vllm/)?(v1(?:/\w+)+)(?![\w/.])")
_COMMENT = re.compile(r"(?:^[ \t]*#.*\n)+|#.*$", re.MULTILINE)
_WORD = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")
_NEXT_WORD = re.compile(r"[, (]+([a-z]+)\b")


@dataclass(frozen=True)
class Citation:
    """A file or folder of vLLM that a place of ours names, with the words beside it that may be names in it."""

    path: str  # below the package vllm, or a file's name alone
    words: frozenset[str]
    place: str  # of ours: a module, or a fact of a version


def citations() -> Iterator[Citation]:
    """Yield what the operator names of vLLM's source."""
    for place, source in _modules().items():
        for text in _prose(source):
            yield from cited(text, place)
    for folder in ("vllm/data", "sizing/data"):
        for path in sorted((OPERATOR / folder).glob("*.json")):
            for entry in _sourced(json.loads(path.read_text(encoding="utf-8"))):
                facts = ", ".join(name for name in entry if name != "source")
                yield from cited(entry["source"], f"{path.relative_to(OPERATOR).as_posix()}: {facts[:60] or 'read'}")


def cited(text: str, place: str) -> Iterator[Citation]:
    """Yield what one text names."""
    found = list(_PATH.finditer(text))
    if not found:
        return
    words = {word for word in _WORD.findall(text) if "_" in word or not word.islower()}
    folder = ""
    for match in found:
        path: str = match[1] or match[2]
        if "/" in path:
            folder = path.rpartition("/")[0]
        elif folder:
            path = f"{folder}/{path}"  # "v1/core/a.py, b.py" are neighbours
        following = _NEXT_WORD.match(text, match.end())
        yield Citation(path, frozenset(words | ({following[1]} if following else set())), place)


def mentions(name: str) -> list[str]:
    """Return the modules of the operator that have a name in them, as a whole word."""
    whole = re.compile(rf"(?<![\w-]){re.escape(name)}(?![\w-])")
    return [place for place, text in _modules().items() if name in text and whole.search(text)]


@cache
def _modules() -> Mapping[str, str]:
    paths = sorted(OPERATOR.rglob("*.py"))
    return {path.relative_to(OPERATOR).as_posix(): path.read_text(encoding="utf-8") for path in paths}


def _prose(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
    yield from _COMMENT.findall(source)


def _sourced(value: Any) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSON value that state a source."""
    if isinstance(value, dict) and isinstance(value.get("source"), str):
        yield value
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _sourced(each)
