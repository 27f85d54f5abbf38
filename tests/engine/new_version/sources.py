"""Compare the vLLM source that the project cites between two versions, function by function."""

import ast
import difflib
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from tests.engine.new_version.citations import Citation

_MOST_OF_ONE_NAME = 4
"""A name that more definitions of a file share says nothing."""


@dataclass(frozen=True)
class Change:
    """A definition that is not what it was, or not where it was."""

    path: str  # below the package vllm
    name: str  # such as SpeculativeConfig.use_eagle
    places: tuple[str, ...]  # of ours, which name it
    found_in: str | None  # the file that has it now; None where none has
    diff: str  # comments and docstrings apart; empty where it is gone, or has only moved
    judged: bool = False  # the new version's own facts name it

    @property
    def what(self) -> str:
        """Return in a few words what became of it."""
        if self.found_in is None:
            return "**gone**"
        body = self.diff.splitlines()[2:]
        came, went = (sum(line.startswith(sign) for line in body) for sign in "+-")
        changed = f"+{came} -{went} lines" if body else "unchanged"
        return changed if self.found_in == self.path else f"moved to `{self.found_in}`, {changed}"


@dataclass(frozen=True)
class SourceChanges:
    """What changed in the source that the project names."""

    named: tuple[Change, ...]
    """Definitions that are named themselves, those first that most of ours names."""
    beside: Mapping[str, tuple[str, ...]]
    """Further definitions that changed, came (+) or went (-) in the files that are named, by file."""


def compare(before: Path, now: Path, named: Sequence[Citation], judging: str) -> SourceChanges:
    """Return what changed between the packages of two versions, of the source that is named.

    What the place called ``judging`` names was judged: it may be where it lies now.
    """
    places: dict[tuple[str, str], set[str]] = defaultdict(set)
    files = set()
    for citation in named:
        for path in _find(before, citation.path):
            if _is_same(before / path, now / path):
                continue
            files.add(path)
            for name in _definitions_named(before / path, citation.words):
                places[path, name].add(citation.place)
    homes = _homes(now, [name for path, name in places if name not in definitions(now / path)])
    changes = []
    for (path, name), cited_by in places.items():
        was, home, is_now = definitions(before / path)[name], path, definitions(now / path).get(name)
        if is_now is None:
            home, is_now = homes.get(name, (None, None))
        if home != path or not was.says(is_now):
            judged = any(_names(each, {path, home or path}, name) for each in named if each.place.startswith(judging))
            diff = _diff(was, is_now, f"{path} {name}")
            changes.append(Change(path, name, tuple(sorted(cited_by)), home, diff, judged))
    beside = {path: _others(before / path, now / path, {name for at, name in places if at == path}) for path in files}
    return SourceChanges(
        named=tuple(sorted(changes, key=lambda each: (-len(each.places), each.path, each.name))),
        beside={path: beside[path] for path in sorted(files) if beside[path]},
    )


class Definition:
    """A function, class, method or constant; comments and docstrings are no part of what it says."""

    def __init__(self, node: ast.stmt, lines: Sequence[str]) -> None:
        """Keep it as it is written: few differ, and to write all anew takes seconds."""
        self._node = node
        self._written = lines[node.lineno - 1 : node.end_lineno]

    @cached_property
    def text(self) -> str:
        """Return what it says."""
        _drop_docstrings(self._node)
        return ast.unparse(self._node)

    def says(self, other: "Definition | None") -> bool:
        """Decide whether another says the same."""
        return other is not None and (self._written == other._written or self.text == other.text)


@cache
def definitions(path: Path) -> Mapping[str, Definition]:
    """Return what a module defines, by name; nothing where it is not there."""
    if not path.is_file():
        return {}
    source = path.read_text(encoding="utf-8")
    found: dict[str, Definition] = {}
    _collect(ast.parse(source).body, "", source.splitlines(), found)
    return found


def _collect(body: Iterable[ast.stmt], prefix: str, lines: Sequence[str], found: dict[str, Definition]) -> None:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found[f"{prefix}{node.name}"] = Definition(node, lines)
            if isinstance(node, ast.ClassDef):
                _collect(node.body, f"{node.name}.", lines, found)
        elif isinstance(node, ast.Assign | ast.AnnAssign) and not prefix:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id: Definition(node, lines) for target in targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.If | ast.Try) and not prefix:
            _collect([*node.body, *node.orelse], prefix, lines, found)


def _drop_docstrings(node: ast.AST) -> None:
    for each in ast.walk(node):
        body = getattr(each, "body", None)
        if isinstance(body, list):
            kept = [one for one in body if not (isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant))]
            each.body = kept or [ast.Pass()]  # type: ignore[attr-defined]


@cache
def _is_same(before: Path, now: Path) -> bool:
    return now.is_file() and before.read_bytes() == now.read_bytes()


@cache
def _modules(package: Path) -> tuple[str, ...]:
    return tuple(sorted(path.relative_to(package).as_posix() for path in package.rglob("*.py")))


@cache
def _find(package: Path, cited: str) -> tuple[str, ...]:
    """Return the modules that a path means: that of the package, the only one that ends so, or all of a folder."""
    if not cited.endswith(".py"):
        return tuple(path for path in _modules(package) if path.startswith(f"{cited}/"))
    if (package / cited).is_file():
        return (cited,)
    ending = tuple(path for path in _modules(package) if path.endswith(f"/{cited}"))
    return ending if len(ending) == 1 else ()


def _definitions_named(path: Path, words: Iterable[str]) -> set[str]:
    known = definitions(path)
    found = set()
    for word in words:
        # One with its class is that one; one alone may be a method.
        same = {word} if word in known else {name for name in known if name.rpartition(".")[2] == word}
        found |= same if len(same) <= _MOST_OF_ONE_NAME else set()
    # A class is meant as a whole only where none of its methods is.
    return {name for name in found if not any(other.startswith(f"{name}.") for other in found)}


def _names(citation: Citation, paths: Iterable[str], name: str) -> bool:
    beside = any(path == citation.path or path.endswith(f"/{citation.path}") for path in paths)
    return beside and not citation.words.isdisjoint({name, name.rpartition(".")[2]})


def _homes(package: Path, gone: Sequence[str]) -> dict[str, tuple[str, Definition]]:
    """Return the module that has each definition now; without those that none or several have."""
    heads = {name: re.compile(rf"^(?:async )?(?:def|class) {name.partition('.')[0]}\b", re.MULTILINE) for name in gone}
    found: dict[str, list[tuple[str, Definition]]] = defaultdict(list)
    for path in _modules(package) if gone else ():
        source = (package / path).read_text(encoding="utf-8")
        for name, head in heads.items():
            if head.search(source) and name in definitions(package / path):
                found[name].append((path, definitions(package / path)[name]))
    return {name: homes[0] for name, homes in found.items() if len(homes) == 1}


def _others(before: Path, now: Path, named: set[str]) -> tuple[str, ...]:
    if not now.is_file():
        return ("the file is gone",)
    was, is_now = definitions(before), definitions(now)
    classes = {name.partition(".")[0] for name in {*was, *is_now} if "." in name}
    both = sorted({*was, *is_now} - classes - named)
    return tuple(
        f"{'+' if name not in was else '-' if name not in is_now else ''}{name}"
        for name in both
        if name not in was or not was[name].says(is_now.get(name))
    )


def _diff(before: Definition, now: Definition | None, title: str) -> str:
    if now is None:
        return ""
    lines = difflib.unified_diff(before.text.splitlines(), now.text.splitlines(), title, title, lineterm="", n=2)
    return "\n".join(lines)
