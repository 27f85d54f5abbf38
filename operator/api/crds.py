"""The CustomResourceDefinitions, made from the models."""

from dataclasses import dataclass
from typing import Any, Final

import yaml

from specdecode_operator.api import capture, deployment
from specdecode_operator.api.base import GROUP, PART_OF, PART_OF_LABEL, VERSION, VERSION_LABEL, ApiModel
from specdecode_operator.api.crd.capture_rules import CAPTURE_RULES, JOB_NAME, SCHEDULE_RULES
from specdecode_operator.api.crd.cel import Rule
from specdecode_operator.api.crd.deployment_rules import RULES, SERVICE_NAME
from specdecode_operator.api.crd.schema import RulesByModel, Schema, structural_schema
from specdecode_operator.api.status.capture import SpecDecodeCaptureStatus
from specdecode_operator.api.status.deployment import SpecDecodeDeploymentStatus
from specdecode_operator.version import __version__

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
