"""The reference of fields: every field of a kind as the CRD has it, which is made from the models."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from specdecode_operator.api.crds import capture_crd, deployment_crd, training_crd
from specdecode_operator.api.renamed_fields import RENAMED

Schema = Mapping[str, Any]


def deployment_fields() -> str:
    """Return the tables of a SpecDecodeDeployment."""
    return _tables(deployment_crd())


def capture_fields() -> str:
    """Return the tables of a SpecDecodeCapture."""
    return _tables(capture_crd())


def training_fields() -> str:
    """Return the tables of a SpecDecodeTraining."""
    return _tables(training_crd())


def _tables(crd: Schema) -> str:
    (version,) = crd["spec"]["versions"]
    parts = version["schema"]["openAPIV3Schema"]["properties"]
    # The framework's own; of no interest to people.
    parts["status"]["properties"].pop("kopf")
    renamed = []
    for where, schema in list(_objects("spec", parts["spec"])):
        # Renamed fields have their own table.
        for each in [each for each in RENAMED if where in each.places and each.name in schema["properties"]]:
            renamed.append(f"| `{where}.{each.name}` | `{where}.{each.new}` | {each.hint} |")
            schema["properties"].pop(each.name)
            rules = schema["x-kubernetes-validations"]
            rules[:] = [rule for rule in rules if rule.get("fieldPath") != f".{each.name}"]
    sections = [_section(where, each) for part in ("spec", "status") for where, each in _objects(part, parts[part])]
    rules = [rule for where, each in _objects("spec", parts["spec"]) for rule in _rules(where, each)]
    old_names = [*_RENAMED_HEADER, *renamed, ""] if renamed else []
    return "\n".join([*sections, *_RULES_HEADER, *dict.fromkeys(rules), "", *old_names])


_RENAMED_HEADER: Final = (
    "## Renamed fields",
    "",
    "The API server, `lint` and `plan` reject the old names. Rename the fields in your files.",
    "",
    "| old name | new name | value |",
    "| --- | --- | --- |",
)
_RULES_HEADER: Final = (
    "## Rules between fields",
    "",
    "The API server rejects objects that break one of these rules, with this message. Dots (…) stand for values.",
    "",
    "| field | message |",
    "| --- | --- |",
)


def _objects(path: str, schema: Schema) -> Iterator[tuple[str, Schema]]:
    """Yield every object with its path; those in a list have a path with []."""
    yield path, schema
    for name, field in schema["properties"].items():
        inner, suffix = (field["items"], "[]") if field["type"] == "array" else (field, "")
        if inner.get("properties"):
            yield from _objects(f"{path}.{name}{suffix}", inner)


def _section(where: str, schema: Schema) -> str:
    required = schema.get("required", []) if where.startswith("spec") else []
    rows = [_row(where, name, field, name in required) for name, field in schema["properties"].items()]
    header = ("| field | type | default | bounds | meaning |", "| --- | --- | --- | --- | --- |")
    return "\n".join([f"## {where}", "", _text(schema["description"]), "", *header, *rows, ""])


def _row(where: str, name: str, field: Schema, required: bool) -> str:
    default = "required" if required else _default(field)
    cells = (f"`{name}`", _type(where, name, field), default, _bounds(field), _text(field.get("description", "")))
    return f"| {' | '.join(cells)} |"


def _default(field: Schema) -> str:
    if "default" not in field or field.get("properties"):
        return ""
    value = field["default"]
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"


def _type(where: str, name: str, field: Schema) -> str:
    """Return the type; that of an object is a link to its own table."""
    if field["type"] == "array":
        item = _type(where, f"{name}[]", field["items"])
        return f"list of {item}"
    if field.get("properties"):
        path = f"{where}.{name}"
        return f"[object](#{re.sub(r'[^a-z0-9-]', '', path.lower())})"
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if "additionalProperties" in field:
        return f"map of {_type(where, name, field['additionalProperties'])}"
    return str(field["type"])


def _bounds(field: Schema) -> str:
    items = field.get("items", {}) if field["type"] == "array" else {}
    parts = [
        _range(field, "minimum", "maximum", ""),
        _range(field, "minLength", "maxLength", " characters"),
        _range(field, "minItems", "maxItems", " items"),
        _pattern(field),
        _range(items, "minimum", "maximum", " each"),
        _pattern(items),
    ]
    return "; ".join(part for part in parts if part)


def _range(field: Schema, low: str, high: str, unit: str) -> str:
    least, most = field.get(low), field.get(high)
    if most is None:
        return "" if least is None else f"at least {least:,}{unit}"
    return f"at most {most:,}{unit}" if least is None else f"{least:,} to {most:,}{unit}"


def _pattern(field: Schema) -> str:
    # A bar would end the cell of the table.
    return f"`{field['pattern']}`".replace("|", "\\|") if "pattern" in field else ""


def _rules(where: str, schema: Schema) -> Iterator[str]:
    """Yield a row for each rule of an object and of its fields that are no objects."""
    own = [(where, rule) for rule in schema.get("x-kubernetes-validations", ())]
    for name, field in schema["properties"].items():
        if not field.get("properties"):
            own += [(f"{where}.{name}", rule) for rule in field.get("x-kubernetes-validations", ())]
    for path, rule in own:
        yield f"| `{path}{rule.get('fieldPath', '')}` | {_text(rule['message'])} |"


def _text(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
