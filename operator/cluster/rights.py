"""RBAC rights of the operator, each with its reason; the source of the roles in chart and manifests.

Tests compare this list with the roles and with the requests that the operator sends, in both directions.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

SERVES: Final = "specdecode-serves"
"""Lease of a namespace that an operator serves by its name; the chart makes it."""


class Scope(StrEnum):
    """Where a right is held."""

    SERVED = "namespaces that it serves"
    OWN = "its own namespace"
    NAMED = "namespaces that it is told to serve"
    CLUSTER = "the cluster"


@dataclass(frozen=True)
class Right:
    """Calls of one kind."""

    resource: str
    """As kubectl writes it, with the subresource: ``deployments.apps``, ``pods/eviction``."""

    verbs: tuple[str, ...]
    why: str
    scope: Scope = Scope.SERVED
    names: tuple[str, ...] = ()
    """Objects of which alone it is asked; of all where there are none."""


_CHILD: Final = ("get", "list", "watch", "create", "patch", "delete")
"""One is asked for by its name before it is made, so that nobody else's is taken over; server-side apply is create or
patch; those that a changed spec no longer wants are deleted."""

RELEASE: Final = "specdecode-operator"
"""Name of what is installed; the chart puts that of its release in its place."""

OPERATOR_RIGHTS: Final = (
    Right("specdecodedeployments.specdecode.io", ("list", "watch"), "read SpecDecodeDeployments"),
    Right("specdecodedeployments.specdecode.io/status", ("patch",), "write conditions, plan and what was observed"),
    Right(
        "specdecodecaptures.specdecode.io",
        ("list", "watch", "create", "patch", "delete"),
        "read captures; create, cancel (`spec.suspend`) and delete those of schedules and gates; delete those whose"
        " `ttlSecondsAfterFinished` is over",
    ),
    Right("specdecodecaptures.specdecode.io/status", ("patch",), "write phase, results and conditions of captures"),
    Right(
        "configmaps",
        _CHILD,
        "keep plans, last good templates, facts about models and input of captures; read the dataset of a capture",
    ),
    Right("services", _CHILD[:-1], "create the Service in front of engines; it is deleted with its owner"),
    Right("deployments.apps", _CHILD, "run engines"),
    Right(
        "leaderworkersets.leaderworkerset.x-k8s.io", _CHILD, "run engines over several nodes, if this kind is installed"
    ),
    Right("jobs.batch", _CHILD, "run captures, and read and download models"),
    Right(
        "persistentvolumeclaims",
        _CHILD,
        "create the claims that captures write to; delete kept ones only by the retention of their schedule",
    ),
    Right("poddisruptionbudgets.policy", _CHILD, "keep several engines from being evicted at once"),
    Right("pods", ("list", "watch"), "read the state of engines and Jobs"),
    Right(
        "pods",
        ("create",),
        "check by a dry run that the pod of a capture would be accepted before the capture borrows GPUs; no pod is"
        " created",
    ),
    Right("pods/eviction", ("create",), "restart an engine whose drafter decayed, if a policy asks for it"),
    Right("events", ("create",), "report changes and problems as Events"),
    Right("pods", ("get",), "read the image of its own pod, which Jobs run", Scope.OWN),
    Right("leases.coordination.k8s.io", ("create",), "create the Lease for leader election", Scope.OWN),
    Right(
        "leases.coordination.k8s.io",
        ("get", "patch"),
        "take and renew the Lease for leader election",
        Scope.OWN,
        (RELEASE,),
    ),
    Right(
        "leases.coordination.k8s.io", ("get", "patch"), "claim the namespace for this operator", Scope.NAMED, (SERVES,)
    ),
    Right(
        "leases.coordination.k8s.io",
        ("list",),
        "find namespaces that another operator has claimed",
        Scope.CLUSTER,
        (SERVES,),
    ),
    Right("nodes", ("list", "watch"), "read which GPUs the nodes have", Scope.CLUSTER),
    Right(
        "storageclasses.storage.k8s.io",
        ("list",),
        "check that the volume of a capture can be created before the capture borrows GPUs",
        Scope.CLUSTER,
    ),
    Right(
        "customresourcedefinitions.apiextensions.k8s.io",
        ("list", "watch"),
        "notice kinds that are installed while it runs, and the version of its own CRDs",
        Scope.CLUSTER,
    ),
)


def permissions(*scopes: Scope) -> tuple[str, ...]:
    """Return what is asked for there, such as ``patch deployments.apps``; of all scopes where none is named.

    What is asked of single objects alone carries their names: ``list leases.coordination.k8s.io specdecode-serves``.
    """
    return tuple(
        f"{verb} {right.resource} {name}".rstrip()
        for right in rights_in(*scopes)
        for verb in right.verbs
        for name in right.names or ("",)
    )


def rights_in(*scopes: Scope) -> tuple[Right, ...]:
    """Return the rights that are held there; all where no scope is named."""
    return tuple(right for right in OPERATOR_RIGHTS if right.scope in (scopes or tuple(Scope)))
