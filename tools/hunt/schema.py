"""What a CRD's schema lets people write, field by field: values on its bounds, and values just beyond them."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from specdecode_operator.api.renamed_fields import OLD_NAMES

Body = dict[str, Any]

ABSENT: Final = "<absent>"
"""A value that stands for a field that is not written."""

_WORDS: Final = ("a", "0.33", "0.5", "1", "8", "UTC", "0 3 * * 0", "some-name", "Some/Model")
_NO_WORDS: Final = ("", "-", "a b", "\u00e9\n", "../..")
_MOST: Final = {"replicas": 3, "data": 2, "pipeline": 2}
"""A thousand replicas are legal, and no machine for tests."""


@dataclass(frozen=True)
class Field:
    """One field of a spec: where it is, and what its schema says."""

    path: tuple[str, ...]
    schema: Body

    def legal(self) -> list[Any]:
        """Values that the schema takes, those on its bounds first."""
        found: list[Any] = [*self.schema.get("enum", [])] or _legal(self.schema, self.path[-1])
        return [*found, ABSENT]

    def illegal(self) -> list[Any]:
        """Values that the schema refuses."""
        return _illegal(self.schema)


def spec_schema(crd: Path) -> Body:
    """Return the schema of the spec in a CRD's file."""
    version = yaml.safe_load(crd.read_text())["spec"]["versions"][0]
    schema: Body = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
    return schema


def fields(schema: Body, path: tuple[str, ...] = ()) -> Iterator[Field]:
    """Yield the fields of an object and of what lies in it, but not of lists and of what is left open."""
    for name, below in schema.get("properties", {}).items():
        is_old = ".".join(("spec", *path, name)) in OLD_NAMES
        if not is_old and not below.get("x-kubernetes-preserve-unknown-fields"):
            yield Field((*path, name), below)
            yield from fields(below, (*path, name))


def _legal(schema: Body, name: str) -> list[Any]:
    match schema.get("type"):
        case "integer":
            low, high = schema.get("minimum", 0), schema.get("maximum", 2**31)
            high = min(high, _MOST.get(name, high))
            return list(dict.fromkeys([low, high, min(low + 1, high), (low + high) // 2]))
        case "boolean":
            return [True, False]
        case "string":
            longest = "a" * schema.get("maxLength", 64)
            return [word for word in (*_WORDS, longest) if _takes(schema, word)]
        case "array":
            items = _legal(schema["items"], name)
            return [[], items[:1], items[:1] * schema.get("maxItems", 2)] if items else [[]]
        case "object" if not schema.get("required"):
            return [{}]
    return []


def _illegal(schema: Body) -> list[Any]:
    match schema.get("type"):
        case "integer":
            bounds = [schema["minimum"] - 1] if "minimum" in schema else []
            bounds += [schema["maximum"] + 1] if "maximum" in schema else []
            return [*bounds, "many", 0.5]
        case "boolean":
            return ["yes", 1]
        case "string":
            longer = "a" * (schema["maxLength"] + 1) if "maxLength" in schema else 7
            return [*[word for word in _NO_WORDS if not _takes(schema, word)], longer, 7]
        case "array":
            return [{}, "one"]
        case "object":
            return [[], "one", {"noSuchField": 1}]
    return []


def _takes(schema: Body, word: str) -> bool:
    """Whether a text is legal."""
    if "enum" in schema:
        return word in schema["enum"]
    fits = schema.get("minLength", 0) <= len(word) <= schema.get("maxLength", len(word))
    return fits and re.search(schema.get("pattern", ""), word) is not None
