"""The kinds that the operator touches, and where the API server keeps them."""

from dataclasses import dataclass

from specdecode_operator.api import base, capture, deployment


@dataclass(frozen=True)
class Resource:
    """One kind of the Kubernetes API."""

    api_version: str
    kind: str
    plural: str

    def path(self, namespace: str | None = None, name: str | None = None, subresource: str | None = None) -> str:
        """URL path of one object, or of the whole collection of a namespace or of the cluster."""
        root = "/apis" if "/" in self.api_version else "/api"
        within = ("namespaces", namespace) if namespace else ()
        parts = (root, self.api_version, *within, self.plural, name, subresource)
        return "/".join(part for part in parts if part)

    @property
    def group(self) -> str:
        """API group; empty for the core group."""
        return self.api_version.rpartition("/")[0]

    @property
    def qualified_plural(self) -> str:
        """Name as RBAC and kubectl write it, such as deployments.apps."""
        return f"{self.plural}.{self.group}" if self.group else self.plural


SPECDECODE_DEPLOYMENT = Resource(base.API_VERSION, deployment.KIND, deployment.PLURAL)
SPECDECODE_CAPTURE = Resource(base.API_VERSION, capture.KIND, capture.PLURAL)
DEPLOYMENT = Resource("apps/v1", "Deployment", "deployments")
LEADER_WORKER_SET = Resource("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", "leaderworkersets")
SERVICE = Resource("v1", "Service", "services")
CONFIG_MAP = Resource("v1", "ConfigMap", "configmaps")
POD_DISRUPTION_BUDGET = Resource("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets")
JOB = Resource("batch/v1", "Job", "jobs")
POD = Resource("v1", "Pod", "pods")
PERSISTENT_VOLUME_CLAIM = Resource("v1", "PersistentVolumeClaim", "persistentvolumeclaims")
EVENT = Resource("v1", "Event", "events")
NODE = Resource("v1", "Node", "nodes")
CUSTOM_RESOURCE_DEFINITION = Resource(
    "apiextensions.k8s.io/v1", "CustomResourceDefinition", "customresourcedefinitions"
)
STORAGE_CLASS = Resource("storage.k8s.io/v1", "StorageClass", "storageclasses")
LEASE = Resource("coordination.k8s.io/v1", "Lease", "leases")

CHILDREN = (CONFIG_MAP, SERVICE, POD_DISRUPTION_BUDGET, DEPLOYMENT, LEADER_WORKER_SET, JOB)
"""Kinds of the objects that a SpecDecodeDeployment owns, in the order in which they are applied."""

CAPTURE_CHILDREN = (PERSISTENT_VOLUME_CLAIM, JOB, CONFIG_MAP)
"""Kinds of the objects that a SpecDecodeCapture owns, or that were made for it."""

WATCHED = (*CHILDREN, PERSISTENT_VOLUME_CLAIM, POD)
"""Kinds of children and pods; watched by our label."""

_BY_KIND = {resource.kind: resource for resource in (*CHILDREN, *CAPTURE_CHILDREN, SPECDECODE_CAPTURE, LEASE)}


def written_resource(kind: str) -> Resource:
    """Resource of a kind that the operator writes."""
    return _BY_KIND[kind]
