"""Tables of the Helm values of both charts, from the comments of `values.yaml` and the types of `values.schema.json`.

The comment above a key describes it. `# @section TITLE` starts a section. Indented lines of a comment, such as an
example of a list item, stay in `values.yaml` only.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

CHARTS: Final = Path(__file__).parents[3] / "charts"
_SECTION: Final = "# @section "
_DOCUMENT: Final = re.compile(r"(?<![\w/])docs/(?P<path>[\w/-]+/(?P<name>[\w-]+)\.md(?:#[\w-]+)?)")

Schema = Mapping[str, Any]


@dataclass(frozen=True)
class Value:
    """One value of a chart."""

    section: str
    """Empty if the file has no sections."""
    path: str
    type: str
    default: str
    """In YAML. Empty for an object, whose fields are values of their own."""
    description: str


def chart_values(chart: str) -> list[Value]:
    """Return the values of a chart of `charts/`, in the order of its `values.yaml`."""
    text = (CHARTS / chart / "values.yaml").read_text()
    schema = json.loads((CHARTS / chart / "values.schema.json").read_text())
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    return [] if root is None else list(_Reader(text.splitlines(), schema).read(root, schema, ""))


def value_tables(chart: str) -> str:
    """Return a section with a table for each section of `values.yaml`, for a page of docs/reference."""
    values = chart_values(chart)
    tables = []
    for section in dict.fromkeys(value.section for value in values):
        heading = f"### {section}\n\n" if section else ""
        rows = [_row(value, "../") for value in values if value.section == section]
        tables.append(f"{heading}| value | type | default | description |\n| --- | --- | --- | --- |\n{''.join(rows)}")
    return "\n".join(tables)


def value_list(chart: str) -> str:
    """Return one table of all values, for the README of a chart."""
    rows = [_short_row(value, "../../docs/") for value in chart_values(chart)]
    return f"| value | default | description |\n| --- | --- | --- |\n{''.join(rows)}"


class _Reader:
    """Reads the keys of a `values.yaml` with their comments."""

    def __init__(self, lines: list[str], schema: Schema) -> None:
        self._lines = lines
        self._schema = schema
        self._section = ""

    def read(self, node: yaml.Node, schema: Schema, prefix: str) -> Iterator[Value]:
        """Yield the values below a node, with the fields of objects that the schema knows."""
        for key, value in node.value:
            above = self._comment(key.start_mark.line)
            if sections := [line.removeprefix(_SECTION) for line in above if line.startswith(_SECTION)]:
                self._section = sections[-1]
            path, known = f"{prefix}{key.value}", _resolved(schema["properties"][key.value], self._schema)
            description = _description(above)
            if "properties" in known and value.value:
                if description:
                    yield Value(self._section, path, "object", "", description)
                yield from self.read(value, known, f"{path}.")
            else:
                default = yaml.safe_load(yaml.serialize(value, Dumper=yaml.SafeDumper))
                yield Value(self._section, path, _type(known, self._schema), _flow(default), description)

    def _comment(self, line: int) -> list[str]:
        """Return the comment above a line, without its indentation, and the section above that comment."""
        first = line
        while first and self._lines[first - 1].lstrip().startswith("#"):
            first -= 1
        section = first
        while section and not self._lines[section - 1].strip():
            section -= 1
        if section and self._lines[section - 1].startswith(_SECTION):
            first = section - 1
        return [each.strip() for each in self._lines[first:line] if each.strip()]


def _description(comment: list[str]) -> str:
    words = [line[1:] for line in comment if not line.startswith((_SECTION, "#  "))]
    return " ".join(" ".join(words).split())


def _resolved(schema: Schema, root: Schema) -> Schema:
    """Follow a reference such as `#/definitions/labels`."""
    found: Any = schema
    while "$ref" in found:
        reference, found = found["$ref"], root
        for step in reference.split("/")[1:]:
            found = found[step]
    resolved: Schema = found
    return resolved


def _type(schema: Schema, root: Schema) -> str:
    known = _resolved(schema, root)
    if "enum" in known:
        return ", ".join(f"`{each}`" for each in known["enum"])
    if "anyOf" in known:
        return " or ".join(str(each["type"]) for each in known["anyOf"])
    if known["type"] == "array":
        return f"list of {_resolved(known['items'], root)['type']}s"
    low, high = known.get("minimum"), known.get("maximum")
    if low is None:
        return str(known["type"])
    return f"{known['type']} ({f'at least {low}' if high is None else f'{low} to {high}'})"


def _flow(default: object) -> str:
    """Return a default as one line of YAML."""
    if default == "":
        return '""'
    return yaml.safe_dump(default, default_flow_style=True, width=10_000, sort_keys=False).removesuffix("...\n").strip()


def _row(value: Value, folder: str) -> str:
    return f"| `{value.path}` | {value.type} | {_code(value.default)} | {_linked(value.description, folder)} |\n"


def _short_row(value: Value, folder: str) -> str:
    return f"| `{value.path}` | {_code(value.default)} | {_linked(value.description, folder)} |\n"


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


def _linked(text: str, folder: str) -> str:
    """Turn paths of documents into links."""
    linked = _DOCUMENT.sub(lambda found: f"[{found['name'].replace('-', ' ')}]({folder}{found['path']})", text)
    return linked.replace("|", "\\|")
