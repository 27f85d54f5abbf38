"""Pydantic models as structural schemas, the dialect that CRDs speak.

A structural schema has no references, no nulls and no unions: an optional
field is one that may be absent. Pydantic's JSON schema says the same things
in its own words; this module translates.
"""

import ast
import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from specdecode_operator.api.base import ApiModel
from specdecode_operator.api.crd.cel import Rule

Schema = dict[str, Any]
RulesByModel = Mapping[type[ApiModel], Sequence[Rule]]

_RULES_KEY = "x-kubernetes-validations"
_KEPT_AS_IS = frozenset(
    {
        "description",
        "type",
        "format",
        "enum",
        "pattern",
        "minimum",
        "maximum",
        "minLength",
        "maxLength",
        "minItems",
        "maxItems",
        "maxProperties",
        "required",
        "x-kubernetes-list-type",
        "x-kubernetes-list-map-keys",
    }
)


def structural_schema(model: type[ApiModel], rules: RulesByModel) -> Schema:
    """Return the structural schema of a model.

    Parameters
    ----------
    model
        What to describe; its docstrings become descriptions.
    rules
        CEL rules to attach wherever one of these models appears.
    """
    source = model.model_json_schema(by_alias=True, schema_generator=_Described)
    definitions = {**source.get("$defs", {}), model.__name__: source}
    rules_by_name = {owner.__name__: list(owned) for owner, owned in rules.items()}
    return _in_reading_order(_Translation(definitions, rules_by_name).of_model(model.__name__))


class _Described(GenerateJsonSchema):
    """Pydantic's JSON schema, with the docstrings of fields as their descriptions.

    Pydantic could read them itself, but whenever a model is imported, which most commands would pay for in vain.
    """

    def model_schema(self, schema: core_schema.ModelSchema) -> JsonSchemaValue:
        """Return the JSON schema of one model."""
        described = super().model_schema(schema)
        model = schema["cls"]
        properties = described.get("properties", {})
        for owner in reversed(model.__mro__):
            for name, text in _docstrings(owner) if issubclass(owner, ApiModel) else ():
                properties[model.model_fields[name].alias]["description"] = text
        return described


def _docstrings(model: type[ApiModel]) -> Iterator[tuple[str, str]]:
    """Return the fields that a class itself has, each with the text below it."""
    statements = ast.walk(ast.parse(inspect.getsource(model)))
    body = next(each.body for each in statements if isinstance(each, ast.ClassDef))
    for field, below in pairwise(body):
        match field, below:
            case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                yield name, inspect.cleandoc(text)


class _Translation:
    """One model's JSON schema, being turned into a structural one."""

    def __init__(self, definitions: Mapping[str, Schema], rules: Mapping[str, Sequence[Rule]]) -> None:
        self._definitions = definitions
        self._rules = rules

    def of_model(self, name: str) -> Schema:
        """Return the schema of a model or an enum by its class name."""
        schema = self._of(self._definitions[name])
        if rules := self._rules.get(name):
            schema[_RULES_KEY] = [rule.as_validation() for rule in rules]
        return schema

    def _of(self, source: Schema) -> Schema:
        if "$ref" in source:
            return self._with_siblings(self.of_model(source["$ref"].rpartition("/")[2]), source)
        if "anyOf" in source:
            return self._with_siblings(self._of(_the_one_that_is_not_null(source["anyOf"])), source)
        schema = {key: value for key, value in source.items() if key in _KEPT_AS_IS}
        match source["type"]:
            case "object":
                schema |= self._of_object(source)
            case "array":
                # A list without a key belongs to one manager as a whole: its order means something.
                schema.setdefault("x-kubernetes-list-type", "atomic")
                items = self._of(source["items"])
                schema["items"] = _without_defaults(items) if schema["x-kubernetes-list-type"] == "atomic" else items
            case "integer":
                schema["format"] = "int64"
        return self._with_siblings(schema, source)

    def _of_object(self, source: Schema) -> Schema:
        if source.get("additionalProperties") is True:
            return {"x-kubernetes-preserve-unknown-fields": True}
        return {"properties": {name: self._of(child) for name, child in source["properties"].items()}}

    @staticmethod
    def _with_siblings(schema: Schema, source: Schema) -> Schema:
        """Add what the field itself says to what its type says."""
        if description := source.get("description"):
            schema["description"] = description
        if "default" in source:
            default = _default_worth_storing(schema, source["default"])
            if default is not None:
                schema["default"] = default
        return schema


def _in_reading_order(schema: Schema) -> Schema:
    """Return the schema with what it is first, what it holds next and rules last."""
    ordered: Schema = {
        key: schema[key] for key in ("description", "type", "format", "default", "required") if key in schema
    }
    ordered |= {key: value for key, value in schema.items() if key not in ("properties", "items", _RULES_KEY)}
    if "properties" in schema:
        ordered["properties"] = {name: _in_reading_order(child) for name, child in schema["properties"].items()}
    if "items" in schema:
        ordered["items"] = _in_reading_order(schema["items"])
    if _RULES_KEY in schema:
        ordered[_RULES_KEY] = schema[_RULES_KEY]
    return ordered


def _the_one_that_is_not_null(alternatives: Sequence[Schema]) -> Schema:
    (schema,) = (alternative for alternative in alternatives if alternative != {"type": "null"})
    return schema


def _without_defaults(schema: Schema) -> Schema:
    """Return the schema of an atomic list's items, in which the API server fills in nothing: defaults are words there.

    Server-side apply compares such a list as a whole with what was applied: one with values filled in differs each
    time, so an apply of the same file writes the object again.
    """
    bare = {key: value for key, value in schema.items() if key != "default"}
    if "default" in schema and schema["type"] != "object":
        default = schema["default"] if isinstance(schema["default"], str) else json.dumps(schema["default"])
        bare["description"] = f"{schema.get('description', '')} Absent: {default}.".lstrip()
    if "properties" in schema:
        bare["properties"] = {name: _without_defaults(child) for name, child in schema["properties"].items()}
    if "items" in schema:
        bare["items"] = _without_defaults(schema["items"])
    return bare


def _default_worth_storing(schema: Schema, default: Any) -> Any:
    """Return the default that the API server shall fill in, or None for none.

    Filled-in values show up in every ``kubectl get -o yaml``, so only those
    that say something are: no empty lists, texts or objects. An object gets
    the defaults of its fields, for those apply only inside an object that
    exists; they are spelled out because CEL rules see a default as it stands.
    """
    if default in ("", [], None):
        return None
    if schema["type"] != "object":
        return default
    children = schema.get("properties", {}).items()
    return {name: child["default"] for name, child in children if "default" in child} or None
