"""What the operator asks of the API server, and why: the list that its roles are made by.

Nothing more is granted than stands here, and nothing stands here that is never asked for: tests compare it with the
roles of chart and manifests, and with what the operator asks for.
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
    Right("specdecodedeployments.specdecode.io", ("list", "watch"), "what people ask for"),
    Right("specdecodedeployments.specdecode.io/status", ("patch",), "what came of it"),
    Right(
        "specdecodecaptures.specdecode.io",
        ("list", "watch", "create", "patch", "delete"),
        "captures; those of schedules and gates are made, cancelled (`spec.suspend`) and deleted, and those whose"
        " `ttlSecondsAfterFinished` is over",
    ),
    Right("specdecodecaptures.specdecode.io/status", ("patch",), "what came of them"),
    Right("configmaps", _CHILD, "plan, last good template, facts of models, what captures need; a capture's dataset"),
    Right("services", _CHILD[:-1], "how engines are reached; each goes with its object"),
    Right("deployments.apps", _CHILD, "engines"),
    Right("leaderworkersets.leaderworkerset.x-k8s.io", _CHILD, "engines over several nodes, where this kind exists"),
    Right("jobs.batch", _CHILD, "captures, and reading and downloading of models"),
    Right(
        "persistentvolumeclaims",
        _CHILD,
        "what captures write to; a kept one is deleted by the retention of its schedule alone",
    ),
    Right("poddisruptionbudgets.policy", _CHILD, "of several engines not all are evicted at once"),
    Right("pods", ("list", "watch"), "how engines and Jobs are"),
    Right(
        "pods",
        ("create",),
        "whether the pod of a capture would be accepted, asked as a dry run before the capture borrows GPUs; it makes"
        " none",
    ),
    Right("pods/eviction", ("create",), "a policy may start an engine anew whose drafter decayed"),
    Right("events", ("create",), "what it tells people"),
    Right("pods", ("get",), "its own pod names the image that captures run", Scope.OWN),
    Right("leases.coordination.k8s.io", ("create",), "the Lease of the replica that works, once", Scope.OWN),
    Right("leases.coordination.k8s.io", ("get", "patch"), "who works, and that it does", Scope.OWN, (RELEASE,)),
    Right("leases.coordination.k8s.io", ("get", "patch"), "that it serves this namespace", Scope.NAMED, (SERVES,)),
    Right("leases.coordination.k8s.io", ("list",), "who serves single namespaces", Scope.CLUSTER, (SERVES,)),
    Right("nodes", ("list", "watch"), "which GPUs there are", Scope.CLUSTER),
    Right(
        "storageclasses.storage.k8s.io",
        ("list",),
        "whether the volume of a capture would be there before the capture borrows GPUs",
        Scope.CLUSTER,
    ),
    Right(
        "customresourcedefinitions.apiextensions.k8s.io",
        ("list", "watch"),
        "kinds that are installed while it runs, and of which version ours are",
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
