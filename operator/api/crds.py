"""Generate the CustomResourceDefinitions from the models; compare installed CRDs with this version.

A structural schema has no references, nulls or unions, so an optional field is omitted and never null. This module
translates pydantic's JSON schema into that dialect.
"""

import ast
import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import yaml
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from specdecode_operator.api import capture, deployment
from specdecode_operator.api.base import GROUP, PART_OF, PART_OF_LABEL, VERSION, VERSION_LABEL, ApiModel, Body
from specdecode_operator.api.capture_rules import CAPTURE_RULES, JOB_NAME, SCHEDULE_RULES
from specdecode_operator.api.capture_status import SpecDecodeCaptureStatus
from specdecode_operator.api.deployment_rules import RULES, SERVICE_NAME, Rule
from specdecode_operator.api.deployment_status import SpecDecodeDeploymentStatus
from specdecode_operator.version import __version__, is_newer

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


_LINE_WIDTH = 120
_KEPT: Final = {
    "kustomize.toolkit.fluxcd.io/prune": "disabled",
    "argocd.argoproj.io/sync-options": "Prune=false,Delete=false",
}
"""Annotations by which Flux and Argo CD leave a CRD where it goes from their files: its objects would go with it."""


@dataclass(frozen=True)
class _Kind:
    """What a CRD needs to know of a kind beside its fields."""

    kind: str
    plural: str
    short_name: str
    categories: tuple[str, ...]
    description: str
    spec: type[ApiModel]
    status: type[ApiModel]
    rules: RulesByModel
    name: Rule
    columns: list[dict[str, Any]]
    scale: dict[str, str] | None = None


def deployment_crd() -> dict[str, Any]:
    """Return the CRD of SpecDecodeDeployment as a Kubernetes object."""
    return _crd(
        _Kind(
            kind=deployment.KIND,
            plural=deployment.PLURAL,
            short_name="sdd",
            # `all` too: who cleans up with `kubectl delete all --all` must not see the children come back.
            categories=("all", "specdecode"),
            description="A model served by vLLM with speculative decoding: sized, launched and watched.",
            spec=deployment.SpecDecodeDeploymentSpec,
            status=SpecDecodeDeploymentStatus,
            rules={**RULES, **SCHEDULE_RULES},
            name=SERVICE_NAME,
            columns=_deployment_columns(),
            scale={
                "specReplicasPath": ".spec.replicas",
                "statusReplicasPath": ".status.replicas",
                "labelSelectorPath": ".status.selector",
            },
        )
    )


def capture_crd() -> dict[str, Any]:
    """Return the CRD of SpecDecodeCapture as a Kubernetes object."""
    return _crd(
        _Kind(
            kind=capture.KIND,
            plural=capture.PLURAL,
            short_name="sdc",
            # Not `all`: what was captured is evidence, which nobody deletes in passing.
            categories=("specdecode",),
            description="Traces and step statistics of a SpecDecodeDeployment under load, written to a volume.",
            spec=capture.SpecDecodeCaptureSpec,
            status=SpecDecodeCaptureStatus,
            rules=CAPTURE_RULES,
            name=JOB_NAME,
            columns=_capture_columns(),
        )
    )


def crds() -> list[dict[str, Any]]:
    """Return all CRDs."""
    return [deployment_crd(), capture_crd()]


def crd_file_name(crd: dict[str, Any]) -> str:
    """Return the name of the file that a CRD is checked in as."""
    return f"{GROUP}_{crd['spec']['names']['plural']}.yaml"


def crd_yaml(crd: dict[str, Any]) -> str:
    """Return a CRD as the YAML that is checked in under crds/."""
    header = "# Generated from operator/api by `specdecode crds`. Do not edit.\n"
    return header + yaml.dump(crd, Dumper=_NoAliases, sort_keys=False, allow_unicode=True, width=_LINE_WIDTH)


class _NoAliases(yaml.SafeDumper):
    """Writes equal values out each time: `&id001` helps no reader."""

    def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002
        return True


def _crd(kind: _Kind) -> dict[str, Any]:
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{kind.plural}.{GROUP}",
            "labels": {PART_OF_LABEL: PART_OF, VERSION_LABEL: __version__},
            "annotations": dict(_KEPT),
        },
        "spec": {
            "group": GROUP,
            "names": {
                "kind": kind.kind,
                "listKind": f"{kind.kind}List",
                "plural": kind.plural,
                "singular": kind.kind.lower(),
                "shortNames": [kind.short_name],
                "categories": list(kind.categories),
            },
            "scope": "Namespaced",
            "versions": [_version(kind)],
        },
    }


def _version(kind: _Kind) -> dict[str, Any]:
    return {
        "name": VERSION,
        "served": True,
        "storage": True,
        "subresources": {"status": {}} | ({"scale": kind.scale} if kind.scale else {}),
        "additionalPrinterColumns": kind.columns,
        "schema": {"openAPIV3Schema": _object_schema(kind)},
    }


def _object_schema(kind: _Kind) -> Schema:
    status = structural_schema(kind.status, rules={})
    # kopf keeps what it handled last here; without a place of its own it would be pruned and handled for ever.
    status["properties"]["kopf"] = {
        "description": "State of the operator's framework; of no interest to people.",
        "type": "object",
        "maxProperties": 64,
        "x-kubernetes-preserve-unknown-fields": True,
    }
    # An object that no operator has looked at would be in order to whoever waits for it: kstatus asks for no more
    # than that nothing is said against it. No spec has this generation.
    status["default"] = {"observedGeneration": -1}
    return {
        "description": kind.description,
        "type": "object",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object", "properties": {"name": {"type": "string", "maxLength": 253}}},
            "spec": structural_schema(kind.spec, kind.rules),
            "status": status,
        },
        "x-kubernetes-validations": [kind.name.as_validation()],
    }


def _deployment_columns() -> list[dict[str, Any]]:
    return [
        _column(
            "Ready",
            "string",
            '.status.conditions[?(@.type=="Ready")].status',
            "Whether all wanted engines serve.",
        ),
        _column("Plan", "string", ".status.plan.verdict", "Fits, Tight or DoesNotFit."),
        _column("Method", "string", ".spec.speculation.method", "Who proposes tokens."),
        _column("K", "integer", ".spec.speculation.numSpeculativeTokens", "Tokens proposed a step."),
        _column("TP", "integer", ".status.plan.tensor", "GPUs over which a replica is spread."),
        _column("Acceptance", "string", ".status.acceptance.text", "Accepted share of the proposed tokens."),
        _column("Age", "date", ".metadata.creationTimestamp", "Time since creation."),
        _column(
            "Reason", "string", '.status.conditions[?(@.type=="Ready")].reason', "Why it is ready or not.", priority=1
        ),
        _column(
            "Stale",
            "date",
            ".status.acceptance.saidUntil",
            "Time since engines last said the acceptance; empty while they do.",
            priority=1,
        ),
        _column(
            "Precision",
            "string",
            ".status.plan.targetQuantization",
            "Precision that the target is served at.",
            priority=1,
        ),
        _column("Product", "string", ".status.plan.product", "What GPUs they are.", priority=1),
        _column(
            "Tokens",
            "integer",
            ".status.plan.kvCacheTokens",
            "Tokens that the KV cache of each copy should hold.",
            priority=1,
        ),
        _column("Target", "string", ".spec.target.model", "The model that is served.", priority=1),
        _column("Draft", "string", ".spec.speculation.draft.model", "The model that proposes tokens.", priority=1),
    ]


def _capture_columns() -> list[dict[str, Any]]:
    return [
        _column("Phase", "string", ".status.phase", "How far it is."),
        _column("Deployment", "string", ".spec.deployment", "Whose engine is captured."),
        _column("Requests", "integer", ".status.summary.requests.completed", "Requests that were answered."),
        _column("Acceptance", "string", ".status.summary.acceptance", "Accepted share of the proposed tokens."),
        _column(
            "Verdict",
            "string",
            '.status.conditions[?(@.type=="Pays")].reason',
            "Of several arms: whether the second pays, compared with the first.",
        ),
        _column("Age", "date", ".metadata.creationTimestamp", "Time since creation."),
        _column(
            "Reason",
            "string",
            '.status.conditions[?(@.type=="Succeeded")].reason',
            "Why it is where it is.",
            priority=1,
        ),
        _column("Claim", "string", ".status.claim", "The claim that holds its files.", priority=1),
        _column("Path", "string", ".status.path", "Their folder on it.", priority=1),
    ]


def _column(name: str, kind: str, path: str, description: str, priority: int = 0) -> dict[str, Any]:
    """Return a column of ``kubectl get``; priority 1 shows it with -o wide only.

    The API server stores no 0: with one, a CRD that somebody else applies again never equals what is stored.
    """
    column = {"name": name, "type": kind, "jsonPath": path, "description": description}
    return column | ({"priority": priority} if priority else {})


INSTALL_CRD: Final = "specdecode crds | kubectl apply --server-side -f -"


def crd_skew(body: Body) -> str | None:
    """Say how an installed CRD and this version go together; None where they are of one version."""
    name, said = body["metadata"]["name"], (body["metadata"].get("labels") or {}).get(VERSION_LABEL)
    if said == __version__:
        return None
    if said and is_newer(said, __version__):
        return f"{name} is of {said}, newer than this {__version__}, which knows none of the fields that came since"
    older = f"is of {said}" if said else "does not say its version"
    return f"{name} {older}, older than this {__version__}: the API server drops fields that it lacks"
