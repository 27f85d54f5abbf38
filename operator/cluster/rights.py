"""RBAC rights of the operator with their purpose; the source of the roles in chart and manifests.

Tests compare this list with the roles and with the requests that the operator sends, in both directions.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

SERVES: Final = "specdecode-serves"
"""Lease in a namespace that is listed in an operator's configuration; the chart creates it."""


class Scope(StrEnum):
    """Scope of a right."""

    SERVED = "all served namespaces"
    OWN = "its own namespace"
    NAMED = "served namespaces that are listed by name"
    CLUSTER = "the cluster"


@dataclass(frozen=True)
class Right:
    """Verbs on one resource."""

    resource: str
    """Name as in kubectl, with the subresource: ``deployments.apps``, ``pods/eviction``."""

    verbs: tuple[str, ...]
    why: str
    scope: Scope = Scope.SERVED
    names: tuple[str, ...] = ()
    """Names of the objects that the right is limited to; if empty, it covers all objects."""


_CHILD: Final = ("get", "list", "watch", "create", "patch", "delete")
"""The operator gets an object by name before it creates it, so that it does not take over an object of another owner.
Server-side apply needs create and patch. Objects that a changed spec no longer needs are deleted."""

RELEASE: Final = "specdecode-operator"
"""Default name of the installation; the chart replaces it with the name of its release."""

SNAPSHOT_SUFFIX: Final = "-snapshot"
"""Suffix of the ConfigMap with the snapshot, after the name of the Lease."""

OPERATOR_RIGHTS: Final = (
    Right("specdecodedeployments.specdecode.io", ("list", "watch"), "read SpecDecodeDeployments"),
    Right("specdecodedeployments.specdecode.io/status", ("patch",), "write conditions, the plan and observations"),
    Right(
        "specdecodecaptures.specdecode.io",
        ("list", "watch", "create", "patch", "delete"),
        "read captures; create, cancel (`spec.suspend`) and delete captures of schedules, gates and trainings; delete"
        " captures after `ttlSecondsAfterFinished`",
    ),
    Right("specdecodecaptures.specdecode.io/status", ("patch",), "write phase, results and conditions of captures"),
    Right(
        "specdecodetrainings.specdecode.io",
        ("list", "watch", "create", "delete"),
        "read trainings; create and delete trainings of schedules",
    ),
    Right("specdecodetrainings.specdecode.io/status", ("patch",), "write phase, results and conditions of trainings"),
    Right(
        "configmaps",
        _CHILD,
        "store plans, last good templates, model facts, the recorder and the input of captures; read the dataset of a"
        " capture or a training",
    ),
    Right("services", _CHILD[:-1], "create the Service of the engines; Kubernetes deletes it with its owner"),
    Right("deployments.apps", _CHILD, "run engines"),
    Right(
        "leaderworkersets.leaderworkerset.x-k8s.io",
        _CHILD,
        "run engines on several nodes, if LeaderWorkerSet is installed",
    ),
    Right(
        "httproutes.gateway.networking.k8s.io",
        _CHILD,
        "route requests from a Gateway to the engines, if the Gateway API is installed and `expose.httpRoute` is set",
    ),
    Right(
        "resourceclaimtemplates.resource.k8s.io",
        _CHILD,
        "claim the GPUs of engines, captures and trainings, if `accelerator.resourceClaim` is set",
    ),
    Right(
        "horizontalpodautoscalers.autoscaling",
        _CHILD,
        "let the number of engines follow the load, if `autoscaling` is set",
    ),
    Right(
        "scaledobjects.keda.sh",
        _CHILD,
        "let KEDA do so, if KEDA is installed and `autoscaling.keda` is set",
    ),
    Right(
        "inferencepools.inference.networking.k8s.io",
        _CHILD,
        "let an endpoint picker choose the engine of a request, if the Gateway API Inference Extension is installed and"
        " `expose.inferencePool` is set",
    ),
    Right("jobs.batch", _CHILD, "run captures and trainings; read and download models"),
    Right(
        "persistentvolumeclaims",
        _CHILD,
        "create claims for the files of captures and trainings; delete kept claims only by the retention of their"
        " schedule",
    ),
    Right("poddisruptionbudgets.policy", _CHILD, "limit how many engines are evicted at the same time"),
    Right("pods", ("list", "watch"), "read the state of engines and Jobs"),
    Right(
        "pods",
        ("create",),
        "check with a dry run that the pod of a capture is accepted before the capture borrows GPUs; detect with a"
        " dry run whether image volumes are supported; no pod is created",
    ),
    Right("pods/eviction", ("create",), "restart an engine whose acceptance has decayed, if a policy allows it"),
    Right("events", ("create",), "report changes and problems as Events"),
    Right("pods", ("get",), "read the image of its own pod, to use it for Jobs", Scope.OWN),
    Right("leases.coordination.k8s.io", ("create",), "create the Lease for leader election", Scope.OWN),
    Right(
        "leases.coordination.k8s.io",
        ("get", "patch"),
        "take and renew the Lease for leader election",
        Scope.OWN,
        (RELEASE,),
    ),
    Right(
        "configmaps",
        ("get", "create", "patch"),
        "store a snapshot for the next start; server-side apply sends the name, so `create` is limited to it",
        Scope.OWN,
        (f"{RELEASE}{SNAPSHOT_SUFFIX}",),
    ),
    Right(
        "leases.coordination.k8s.io", ("get", "patch"), "claim the namespace for this operator", Scope.NAMED, (SERVES,)
    ),
    Right(
        "leases.coordination.k8s.io",
        ("list",),
        "find namespaces that other operators have claimed",
        Scope.CLUSTER,
        (SERVES,),
    ),
    Right("nodes", ("list", "watch"), "read the GPUs of the nodes", Scope.CLUSTER),
    Right(
        "resourceslices.resource.k8s.io",
        ("list",),
        "read product and memory of the GPUs that engines may claim, if an object sets `accelerator.resourceClaim`",
        Scope.CLUSTER,
    ),
    Right(
        "deviceclasses.resource.k8s.io",
        ("list",),
        "read which GPUs belong to the class in `accelerator.resourceClaim`",
        Scope.CLUSTER,
    ),
    Right(
        "storageclasses.storage.k8s.io",
        ("list",),
        "check that the volume of a capture can be created before the capture borrows GPUs",
        Scope.CLUSTER,
    ),
    Right(
        "customresourcedefinitions.apiextensions.k8s.io",
        ("list", "watch"),
        "detect kinds that are installed later; read the version of its own CRDs",
        Scope.CLUSTER,
    ),
)


def permissions(*scopes: Scope) -> tuple[str, ...]:
    """Return the permissions of the given scopes, such as ``patch deployments.apps``; without scopes, of all.

    A permission for a named object ends with its name: ``list leases.coordination.k8s.io specdecode-serves``.
    """
    return tuple(
        f"{verb} {right.resource} {name}".rstrip()
        for right in rights_in(*scopes)
        for verb in right.verbs
        for name in right.names or ("",)
    )


def rights_in(*scopes: Scope) -> tuple[Right, ...]:
    """Return the rights of the given scopes; without scopes, all rights."""
    return tuple(right for right in OPERATOR_RIGHTS if right.scope in (scopes or tuple(Scope)))
