"""Strict parser for untrusted YAML: the result is always valid JSON data, as in Kubernetes.

PyYAML composes recursively in C, so deep nesting kills the process with a signal, and a few aliases can expand
beyond the available memory. The parser therefore counts the events of each document first.
"""

import math
import re
from collections.abc import Iterable, Iterator
from typing import Any, Final

import yaml

from specdecode_operator.problems import shown
from specdecode_operator.redaction import clip
from specdecode_operator.untrusted import (
    BYTES_PER_VALUE,
    MANY_VALUES,
    MAX_DEPTH,
    MAX_DIGITS,
    UnreadableTextError,
    check_size,
    parse_json_values,
)

_TAG: Final = "tag:yaml.org,2002:"
_TEXT: Final = f"{_TAG}str"
_TAGS: Final = (None, "!", *(f"{_TAG}{name}" for name in ("str", "map", "seq")))
_MERGE_KEY: Final = "<<"
_FLOAT: Final = re.compile(
    r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9_]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
)
_INT: Final = re.compile(r"[-+]?(?:0b[01_]+|0o?[0-7_]+|0x[0-9a-fA-F_]+|0|[1-9][0-9_]*)")
_MAX_TAG_DIRECTIVES: Final = 8
"""No manifest has one, and PyYAML compares each with all before it."""
_VALUES_OF_DOCUMENT: Final = 3
"""Values that take as long to read as an empty document."""

# The safe loader in C where there is one: folders of GitOps repositories are large.
_SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def parse_yaml(text: str) -> Iterator[Any]:
    """Yield the documents of a text.

    Raises UnreadableTextError if one is not YAML, cannot be written as JSON, or is larger or deeper than allowed.
    """
    check_size(text)
    if len(re.findall(r"^%TAG", text, flags=re.MULTILINE)) > _MAX_TAG_DIRECTIVES:
        raise UnreadableTextError(f"has more than {_MAX_TAG_DIRECTIVES} lines with %TAG: leave them out")
    loader = _Loader(text)
    counts = _Counts(max(MANY_VALUES, len(text) // BYTES_PER_VALUE))
    try:
        for event in yaml.parse(text, Loader=_Loader):
            counts.add(event)
            # All events of a document are counted before its values are constructed.
            if isinstance(event, yaml.DocumentEndEvent):
                yield loader.get_data()
    except yaml.YAMLError as error:
        mark, position = getattr(error, "problem_mark", None), getattr(error, "position", None)
        place = f" at line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        place = place if position is None else f" at character {position + 1}"
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "it cannot be read"
        if mark is not None and mark.line < len(lines := text.splitlines()) and "\t" in _indent(lines[mark.line]):
            problem = "the line is indented with a tab: use spaces"
        unreadable = UnreadableTextError(f"is not valid YAML{place}: {problem}")
        unreadable.line = mark.line + 1 if mark is not None else None
        raise unreadable from error
    finally:
        loader.dispose()


def _indent(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]


class _Counts:
    """Number of values that the events of a text stand for."""

    def __init__(self, most_values: int) -> None:
        self._most_values = most_values
        self._values = 0
        self._open: list[tuple[str | None, int]] = []
        """Anchor of each open object and list, and the number of values before it."""
        self._sizes: dict[str, int] = {}
        """Values behind each anchor: an alias repeats all of them."""

    def add(self, event: yaml.Event) -> None:
        match event:
            case yaml.DocumentStartEvent():
                self._sizes = {}
                self._values += _VALUES_OF_DOCUMENT
            case yaml.ScalarEvent() | yaml.CollectionStartEvent():
                self._begin(event)
            case yaml.CollectionEndEvent():
                anchor, before = self._open.pop()
                if anchor is not None:
                    self._sizes[anchor] = self._values - before
            case yaml.AliasEvent():
                if event.anchor not in self._sizes:
                    raise _problem(event, f"the alias *{shown(event.anchor)} has no anchor that ends before it")
                self._values += self._sizes[event.anchor]
        if self._values > self._most_values:
            raise _problem(event, f"has more than {self._most_values:,} values, aliases counted in full: split it")

    def _begin(self, event: yaml.ScalarEvent | yaml.CollectionStartEvent) -> None:
        if event.tag not in _TAGS:
            raise _problem(event, f"the tag {shown(event.tag)} is nothing that Kubernetes knows: leave it out")
        if isinstance(event, yaml.CollectionStartEvent):
            self._open.append((event.anchor, self._values))
        elif event.anchor is not None:
            self._sizes[event.anchor] = 1
        if len(self._open) > MAX_DEPTH:
            raise _problem(event, f"is nested more than {MAX_DEPTH} deep, which no object is")
        self._values += 1


class _Loader(_SafeLoader):  # type: ignore[misc]
    """Makes values as Kubernetes does: dates stay text, 1e6 is a number, keys are text, and none is there twice."""

    def construct_document(self, node: yaml.Node) -> object:
        _reject_repeated_keys(node)
        return super().construct_document(node)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> object:
        # Most values are text, which needs none of the library's bookkeeping.
        if node.tag == _TEXT and isinstance(node, yaml.ScalarNode):
            return node.value
        return super().construct_object(node, deep)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[str, Any]:
        self.flatten_mapping(node)
        return {self._key(key): self.construct_object(value, deep=deep) for key, value in node.value}

    def _key(self, node: yaml.Node) -> str:
        key = self.construct_object(node) if isinstance(node, yaml.ScalarNode) else None
        if key is None:
            raise _problem(node, "a key must be text")
        return str(key).lower() if isinstance(key, bool) else str(key)

    def number(self, node: yaml.ScalarNode) -> float:
        if len(node.value) > MAX_DIGITS:
            raise _problem(
                node, f"the number {clip(node.value, 20)} has {len(node.value):,} digits: write one with fewer"
            )
        if node.tag == f"{_TAG}int":
            return int(self.construct_yaml_int(node))
        value = float(self.construct_yaml_float(node))
        if math.isinf(value) and node.value[-1].isdigit():
            raise _problem(node, f"the number {clip(node.value, 20)} is too large: write a smaller one")
        return value


_REPLACED: Final = [f"{_TAG}{name}" for name in ("int", "float", "timestamp", "value")]
_Loader.yaml_implicit_resolvers = {
    first: [each for each in known if each[0] not in _REPLACED]
    for first, known in _Loader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(f"{_TAG}int", re.compile(f"^(?:{_INT.pattern})$"), list("-+0123456789"))
_Loader.add_implicit_resolver(f"{_TAG}float", re.compile(f"^(?:{_FLOAT.pattern})$"), list("-+0123456789."))
for _name in ("int", "float"):
    _Loader.add_constructor(f"{_TAG}{_name}", _Loader.number)


def _reject_repeated_keys(document: yaml.Node) -> None:
    """Check keys before construction, because merging adds keys to mappings that override them."""
    pending, seen = [document], {id(document)}
    while pending:
        node = pending.pop()
        inside: Iterable[yaml.Node] = node.value if isinstance(node, yaml.CollectionNode) else []
        if isinstance(node, yaml.MappingNode):
            known = set()
            for key, _ in node.value:
                if not isinstance(key, yaml.ScalarNode) or key.value == _MERGE_KEY:
                    continue
                if key.value in known:
                    problem = f"the key {shown(key.value)} is there twice: remove one, or write --- between two objects"
                    raise _problem(key, problem)
                known.add(key.value)
            inside = [value for _, value in node.value]
        for child in inside:
            # Aliases make a node appear in many places.
            if isinstance(child, yaml.CollectionNode) and id(child) not in seen:
                seen.add(id(child))
                pending.append(child)


def _problem(at: Any, message: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=message, problem_mark=at.start_mark)


_LOOKS_LIKE_JSON: Final = re.compile(r'\s*(\{\s*"|\[\s*[\[{"])')


def parse_yaml_or_json(text: str, *, is_json: bool) -> Iterable[Any]:
    """Return the documents of a text that is JSON or YAML; raise UnreadableTextError as the two parsers.

    ``is_json`` is whether the file's name ends with .json, so that errors are those of JSON. YAML may begin like JSON.
    """
    named_json = is_json and "\n---" not in text
    if named_json or _LOOKS_LIKE_JSON.match(text):
        try:
            return list(parse_json_values(text))
        except UnreadableTextError:
            if named_json:
                raise
    return parse_yaml(text)
