"""On which line of a file a field of an object stands."""

import re
from functools import lru_cache
from typing import Any, Final

import yaml

from specdecode_operator.cli.input_files import Document
from specdecode_operator.cli.text_files import STANDARD_INPUT, DocumentError, read_text

_STEP: Final = re.compile(r"[^.\[\]]+|\[(\d+)\]")
# The safe loader in C where there is one: this composes the whole file once more.
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def line_of(document: Document, field: str) -> int | None:
    """Return the line, from 1, of a field of an object, or of what should hold it; None where nothing is known."""
    documents = _composed(document.file)
    if document.number is None or document.number > len(documents):
        return None
    node = documents[document.number - 1]
    steps: list[str | int] = [] if document.item is None else ["items", document.item - 1]
    steps += [each[0] if each[1] is None else int(each[1]) for each in _STEP.finditer(field)]
    line = None if node is None else node.start_mark.line + 1
    for step in steps:
        found = _inside(node, step)
        if found is None:
            break
        line, node = found
    return line


@lru_cache(maxsize=1)
def _composed(file: str) -> tuple[yaml.Node | None, ...]:
    """Return the documents of a file that has been read before, and so is neither too large nor too deep."""
    if file == STANDARD_INPUT:
        return ()
    try:
        return tuple(yaml.compose_all(read_text(file), Loader=_Loader))
    except (yaml.YAMLError, DocumentError):  # JSON with tabs is no YAML; and files come and go
        return ()


def _inside(node: yaml.Node | None, step: str | int) -> tuple[int, yaml.Node] | None:
    """Return the line and the node of a key or an entry."""
    if isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
        entry = node.value[step]
        return entry.start_mark.line + 1, entry
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if key.value == step:
                return key.start_mark.line + 1, value
    return None
