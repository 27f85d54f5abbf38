"""Generate the CustomResourceDefinitions from the models; compare installed CRDs with this version.

A structural schema has no references, nulls or unions, so an optional field is omitted and never null. This module
translates pydantic's JSON schema into that dialect.
"""

import ast
import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

import yaml
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from specdecode_operator.api import capture, deployment, training
from specdecode_operator.api.base import GROUP, PART_OF, PART_OF_LABEL, VERSION, VERSION_LABEL, ApiModel, Body
from specdecode_operator.api.capture_rules import CAPTURE_RULES, JOB_NAME, SCHEDULE_RULES
from specdecode_operator.api.capture_status import SpecDecodeCaptureStatus
from specdecode_operator.api.deployment_rules import RULES, SERVICE_NAME, Rule
from specdecode_operator.api.deployment_status import SpecDecodeDeploymentStatus
from specdecode_operator.api.renamed_fields import RENAMED, renamed_in
from specdecode_operator.api.training_rules import REFRESH_RULES, TRAINING_RULES
from specdecode_operator.api.training_status import SpecDecodeTrainingStatus
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
    """Return the structural schema of a model, with CEL rules wherever one of their models appears."""
    source = model.model_json_schema(by_alias=True, schema_generator=_Described)
    definitions = {**source.get("$defs", {}), model.__name__: source}
    rules_by_name = {owner.__name__: list(owned) for owner, owned in rules.items()}
    for renamed in RENAMED if rules else ():
        rules_by_name.setdefault(renamed.owner.__name__, []).append(renamed.rule)
    return _in_reading_order(_Translation(definitions, rules_by_name).of_model(model.__name__))


class _Described(GenerateJsonSchema):
    """Pydantic's JSON schema, with the docstrings of fields as their descriptions.

    Pydantic itself would read them at each import of a model, which slows all commands down.
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
    """Yield the fields that a class itself has, each with its docstring."""
    statements = ast.walk(ast.parse(inspect.getsource(model)))
    body = next(each.body for each in statements if isinstance(each, ast.ClassDef))
    for field, below in pairwise(body):
        match field, below:
            case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                yield name, inspect.cleandoc(text)


class _Translation:
    """Translation of one model's JSON schema into a structural one."""

    def __init__(self, definitions: Mapping[str, Schema], rules: Mapping[str, Sequence[Rule]]) -> None:
        self._definitions = definitions
        self._rules = rules

    def of_model(self, name: str) -> Schema:
        """Return the schema of a model or an enum by its class name."""
        schema = self._of(self._definitions[name])
        if rules := self._rules.get(name):
            schema[_RULES_KEY] = [rule.as_validation() for rule in rules]
        for renamed in renamed_in(name):
            described = {"description": f"Rejected: renamed to {renamed.new}.", **renamed.schema}
            schema["properties"][renamed.name] = described
        return schema

    def _of(self, source: Schema) -> Schema:
        if "$ref" in source:
            return self._with_siblings(self.of_model(source["$ref"].rpartition("/")[2]), source)
        if "anyOf" in source:
            (alternative,) = (each for each in source["anyOf"] if each != {"type": "null"})
            return self._with_siblings(self._of(alternative), source)
        schema = {key: value for key, value in source.items() if key in _KEPT_AS_IS}
        match source["type"]:
            case "object":
                if source.get("additionalProperties") is True:
                    schema |= {"x-kubernetes-preserve-unknown-fields": True}
                else:
                    schema["properties"] = {name: self._of(child) for name, child in source["properties"].items()}
            case "array":
                # A list without a key belongs to one manager as a whole: its order means something.
                schema.setdefault("x-kubernetes-list-type", "atomic")
                items = self._of(source["items"])
                schema["items"] = _without_defaults(items) if schema["x-kubernetes-list-type"] == "atomic" else items
            case "integer":
                schema["format"] = "int64"
        return self._with_siblings(schema, source)

    @staticmethod
    def _with_siblings(schema: Schema, source: Schema) -> Schema:
        """Add the description and default of the field to the schema of its type."""
        if description := source.get("description"):
            schema["description"] = description
        if "default" in source:
            default = _default_worth_storing(schema, source["default"])
            if default is not None:
                schema["default"] = default
        return schema


def _in_reading_order(schema: Schema) -> Schema:
    """Return the schema with its type first, its fields next and its rules last."""
    first = ("description", "type", "format", "default", "required")
    ordered: Schema = {key: schema[key] for key in first if key in schema}
    ordered |= {key: value for key, value in schema.items() if key not in ("properties", "items", _RULES_KEY)}
    if "properties" in schema:
        ordered["properties"] = {name: _in_reading_order(child) for name, child in schema["properties"].items()}
    if "items" in schema:
        ordered["items"] = _in_reading_order(schema["items"])
    if _RULES_KEY in schema:
        ordered[_RULES_KEY] = schema[_RULES_KEY]
    return ordered


def _without_defaults(schema: Schema) -> Schema:
    """Return the schema of an atomic list's items, with defaults as text in their descriptions.

    Server-side apply compares such a list as a whole. If the API server filled in defaults, each apply of the same file
    would write the object again.
    """
    bare = {key: value for key, value in schema.items() if key != "default"}
    if "default" in schema and schema["type"] != "object":
        default = schema["default"] if isinstance(schema["default"], str) else json.dumps(schema["default"])
        bare["description"] = f"{schema.get('description', '')} Defaults to {default}.".lstrip()
    if "properties" in schema:
        bare["properties"] = {name: _without_defaults(child) for name, child in schema["properties"].items()}
    if "items" in schema:
        bare["items"] = _without_defaults(schema["items"])
    return bare


def _default_worth_storing(schema: Schema, default: Any) -> Any:
    """Return the default that the API server shall fill in, or None.

    Defaults show up in every ``kubectl get -o yaml``, so empty lists, texts and objects are left out. An object has the
    defaults of its fields, because those apply only inside an object that exists, and CEL rules see the default as is.
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
"""Annotations that keep Flux and Argo CD from deleting a CRD, and all objects with it."""


_Column = tuple[str, str, str, str] | tuple[str, str, str, str, int]
"""Name, type, path, description and priority of a column of ``kubectl get``; 1 shows it with -o wide only."""


def deployment_crd() -> dict[str, Any]:
    """Return the CRD of SpecDecodeDeployment."""
    schema = _object_schema(
        "A model served by vLLM with speculative decoding: sized, launched and watched.",
        structural_schema(deployment.SpecDecodeDeploymentSpec, {**RULES, **SCHEDULE_RULES, **REFRESH_RULES}),
        structural_schema(SpecDecodeDeploymentStatus, rules={}),
        SERVICE_NAME,
    )
    scale = {
        "specReplicasPath": ".spec.replicas",
        "statusReplicasPath": ".status.replicas",
        "labelSelectorPath": ".status.selector",
    }
    # `all` too: children would come back after `kubectl delete all --all`.
    names = {"kind": deployment.KIND, "plural": deployment.PLURAL, "short": "sdd", "categories": ["all", "specdecode"]}
    return _crd(names, {"status": {}, "scale": scale}, _DEPLOYMENT_COLUMNS, schema)


def capture_crd() -> dict[str, Any]:
    """Return the CRD of SpecDecodeCapture."""
    schema = _object_schema(
        "Traces and step statistics of a SpecDecodeDeployment under load, written to a volume.",
        structural_schema(capture.SpecDecodeCaptureSpec, CAPTURE_RULES),
        structural_schema(SpecDecodeCaptureStatus, rules={}),
        JOB_NAME,
    )
    # Not `all`: captures are evidence, which is not to be deleted in passing.
    names = {"kind": capture.KIND, "plural": capture.PLURAL, "short": "sdc", "categories": ["specdecode"]}
    return _crd(names, {"status": {}}, _CAPTURE_COLUMNS, schema)


def training_crd() -> dict[str, Any]:
    """Return the CRD of SpecDecodeTraining."""
    schema = _object_schema(
        "A draft head that is trained on captured answers, measured, and offered to its deployment.",
        structural_schema(training.SpecDecodeTrainingSpec, TRAINING_RULES),
        structural_schema(SpecDecodeTrainingStatus, rules={}),
        JOB_NAME,
    )
    names = {"kind": training.KIND, "plural": training.PLURAL, "short": "sdtr", "categories": ["specdecode"]}
    return _crd(names, {"status": {}}, _TRAINING_COLUMNS, schema)


def crds() -> list[dict[str, Any]]:
    """Return all CRDs."""
    return [deployment_crd(), capture_crd(), training_crd()]


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


def _crd(names: dict[str, Any], subresources: Schema, columns: Sequence[_Column], schema: Schema) -> dict[str, Any]:
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{names['plural']}.{GROUP}",
            "labels": {PART_OF_LABEL: PART_OF, VERSION_LABEL: __version__},
            "annotations": dict(_KEPT),
        },
        "spec": {
            "group": GROUP,
            "names": {
                "kind": names["kind"],
                "listKind": f"{names['kind']}List",
                "plural": names["plural"],
                "singular": names["kind"].lower(),
                "shortNames": [names["short"]],
                "categories": names["categories"],
            },
            "scope": "Namespaced",
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "subresources": subresources,
                    "additionalPrinterColumns": [_printer_column(*column) for column in columns],
                    "schema": {"openAPIV3Schema": schema},
                }
            ],
        },
    }


def _with_atomic_parts(status: Schema) -> Schema:
    """Return the schema of a status in which each part has one writer, so that `managedFields` lists no nested fields.

    Only the operator writes a status, and always all of it. Otherwise, names of status fields would be a third of each
    stored object, and the API server would need about 15 % more CPU time for a write of a status.
    """
    for part in status["properties"].values():
        item = part["items"] if part.get("x-kubernetes-list-type") == "map" else part
        if item["type"] == "object":
            item["x-kubernetes-map-type"] = "atomic"
    return status


def _object_schema(description: str, spec: Schema, status: Schema, name: Rule) -> Schema:
    status = _with_atomic_parts(status)
    # kopf keeps its state here; without a schema it would be pruned, and the object handled for ever.
    status["properties"]["kopf"] = {
        "description": "State of the operator's framework; of no interest to people.",
        "type": "object",
        "maxProperties": 64,
        "x-kubernetes-preserve-unknown-fields": True,
    }
    # kstatus takes an object without conditions for ready, even before an operator has seen it. No spec has this
    # generation.
    status["default"] = {"observedGeneration": -1}
    return {
        "description": description,
        "type": "object",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object", "properties": {"name": {"type": "string", "maxLength": 253}}},
            "spec": spec,
            "status": status,
        },
        _RULES_KEY: [name.as_validation()],
    }


def _printer_column(name: str, kind: str, path: str, description: str, priority: int = 0) -> dict[str, Any]:
    column = {"name": name, "type": kind, "jsonPath": path, "description": description}
    # The API server drops a priority of 0: with one, the stored CRD would never equal the applied one.
    return column | ({"priority": priority} if priority else {})


_STALE = "Time since engines last reported the acceptance; empty while they report it."
_VERDICT = "With several arms: whether the second pays, compared with the first."
_DEPLOYMENT_COLUMNS: Final[Sequence[_Column]] = (
    ("Ready", "string", ".status.ready", "Ready engines out of those wanted."),
    ("Status", "string", '.status.conditions[?(@.type=="Ready")].reason', "Reason of the condition Ready."),
    ("Model", "string", ".spec.target.model", "Target model."),
    ("Method", "string", ".spec.speculation.method", "Speculation method."),
    ("K", "integer", ".spec.speculation.numSpeculativeTokens", "Tokens proposed per step."),
    ("Acceptance", "string", ".status.acceptance.text", "Accepted share of the proposed tokens."),
    ("Age", "date", ".metadata.creationTimestamp", "Time since creation."),
    ("Plan", "string", ".status.plan.verdict", "Fits, Tight or DoesNotFit.", 1),
    ("TP", "integer", ".status.plan.tensor", "Tensor parallelism of the target.", 1),
    ("Trained", "string", ".status.trainedDraft.training", "Training whose head replaces the draft of the spec.", 1),
    ("Stale", "date", ".status.acceptance.saidUntil", _STALE, 1),
    ("Precision", "string", ".status.plan.targetQuantization", "Precision of the target's linear layers.", 1),
    ("Product", "string", ".status.plan.product", "GPU product, or CPU.", 1),
    ("Tokens", "integer", ".status.plan.kvCacheTokens", "Predicted KV cache tokens of each copy.", 1),
    ("Draft", "string", ".spec.speculation.draft.model", "Draft model.", 1),
)
_CAPTURE_COLUMNS: Final[Sequence[_Column]] = (
    ("Status", "string", ".status.phase", "Phase of the capture."),
    ("Reason", "string", '.status.conditions[?(@.type=="Succeeded")].reason', "Reason of the condition Succeeded."),
    ("Deployment", "string", ".spec.deployment", "SpecDecodeDeployment whose engine is captured."),
    ("Requests", "integer", ".status.summary.requests.completed", "Completed requests."),
    ("Acceptance", "string", ".status.summary.acceptance", "Accepted share of the proposed tokens."),
    ("Verdict", "string", '.status.conditions[?(@.type=="Pays")].reason', _VERDICT),
    ("Age", "date", ".metadata.creationTimestamp", "Time since creation."),
    ("Claim", "string", ".status.claim", "PersistentVolumeClaim with its files.", 1),
    ("Path", "string", ".status.path", "Folder of its files on the volume.", 1),
)
_TRAINING_COLUMNS: Final[Sequence[_Column]] = (
    ("Phase", "string", ".status.phase", "Current step of the training."),
    ("Deployment", "string", ".spec.deployment", "SpecDecodeDeployment for whose target the head is trained."),
    ("Method", "string", ".spec.method", "Kind of head."),
    ("Better", "string", '.status.conditions[?(@.type=="Better")].status', "Whether the head beats the current draft."),
    ("Age", "date", ".metadata.creationTimestamp", "Time since creation."),
    ("Reason", "string", '.status.conditions[?(@.type=="Ready")].reason', "Reason of the condition Ready.", 1),
    ("Rows", "integer", ".status.rows.training", "Rows to train on.", 1),
    ("Claim", "string", ".status.claim", "PersistentVolumeClaim with rows, checkpoints and the head.", 1),
    ("Head", "string", ".status.head.path", "Folder of the head on the volume.", 1),
)

INSTALL_CRD: Final = "specdecode crds | kubectl apply --server-side -f -"


def crd_skew(body: Body) -> str | None:
    """Return how the version of an installed CRD differs from this one; None if it does not."""
    name, said = body["metadata"]["name"], (body["metadata"].get("labels") or {}).get(VERSION_LABEL)
    if said == __version__:
        return None
    if said and is_newer(said, __version__):
        return f"{name} has version {said}, newer than this {__version__}, which does not support its new fields"
    older = f"has version {said}" if said else "has no version label"
    return f"{name} {older}, older than this {__version__}: the API server drops fields that it lacks"
