"""Kubernetes kinds that the operator reads or writes, and the labels and annotations it sets."""

from dataclasses import dataclass

from specdecode_operator.api import base, capture, deployment, training

MANAGER = "specdecode-operator"
MANAGED_BY_LABEL = "app.kubernetes.io/managed-by"
PART_OF_LABEL = "app.kubernetes.io/part-of"
DEPLOYMENT_LABEL = "specdecode.io/deployment"
APPLIED_HASH_ANNOTATION = "specdecode.io/applied-hash"
CAPTURE_LABEL = "specdecode.io/capture"
"""On children of a SpecDecodeCapture, its pods too: no engine's label, which Services and autoscalers select by."""

TRAINING_LABEL = "specdecode.io/training"
"""On children of a SpecDecodeTraining, its pods too."""

POOL_LABEL = "specdecode.io/pool"
CANARY_POOL = "canary"
"""On pods of a canary, which have the labels of engine pods too."""

CAPTURED_DEPLOYMENT_LABEL = "specdecode.io/captured-deployment"
SCHEDULE_LABEL = "specdecode.io/schedule"
"""On captures that a schedule of their deployment started, and on their claims."""

PUBLISHED_LABEL = "specdecode.io/published"
"""On claims that hold the published files of their capture, or the head of their training: they tell when the object
itself is gone."""

SCHEDULED_AT_ANNOTATION = "specdecode.io/scheduled-at"
OVER_AGE_ANNOTATION = "specdecode.io/over-age-since"
"""On a claim: when it was first found older than its schedule keeps claims."""

COUNTED_FROM_ANNOTATION = "specdecode.io/counted-from"
"""On captures and claims of schedules: when the operator found their creation time in the future."""

READS_FOR_LABEL = "specdecode.io/reads-model-for"
"""On pods that read a model: no engine's label, which Services and autoscalers select by."""

COMPUTES_FOR_LABEL = "specdecode.io/computes-for"
"""On pods of an engine on several nodes that answer no client: only their leader has an engine's label."""

ATTESTED_PODS_LABEL = "specdecode.io/attested-pods"
"""On namespaces: which pods must be attested there; the example of a webhook configuration selects by it."""

MODEL_FACTS_LABEL = "specdecode.io/model-facts"
MODEL_FACTS_NAME = "specdecode-model-facts"
RECORDER_LABEL = "specdecode.io/recorder"
RECORDER_NAME = "specdecode-recorder"
SHARED_CONFIG_MAPS = {MODEL_FACTS_NAME: MODEL_FACTS_LABEL, RECORDER_NAME: RECORDER_LABEL}
"""Names of the ConfigMaps that the objects of a namespace share, with the label of each. They have no owner."""

MODEL_KEY_ANNOTATION = "specdecode.io/model-key"
DOWNLOAD_KEY_ANNOTATION = "specdecode.io/download-key"
ENGINE_LOGGING_ANNOTATION = "specdecode.io/engine-logging"
"""On engine pods: the engine's logging configuration, which a volume shows it as a file."""

ENGINE_WATCH_ANNOTATION = "specdecode.io/engine-watch"
"""On engine pods: the script that the logging configuration runs, which the same volume shows."""

KEPT_MANAGERS_ANNOTATION = "specdecode.io/keep-fields-of"
"""On a SpecDecodeDeployment: field managers, separated by commas, whose changes of its children stay."""

QUEUE_PREFIX = "kueue.x-k8s.io/"
"""Prefix of all labels and annotations of Kueue."""

QUEUE_LABEL = f"{QUEUE_PREFIX}queue-name"
"""On objects that Kueue starts: the LocalQueue. https://kueue.sigs.k8s.io/docs/tasks/run/jobs/"""

QUEUE_PRIORITY_LABEL = f"{QUEUE_PREFIX}priority-class"
"""On the same objects: a WorkloadPriorityClass."""

CAPTURED_ENGINE_ANNOTATION = "specdecode.io/captured-engine"
ACCEPTED_ANNOTATION = "specdecode.io/accepted"
"""On the Job of a capture: engine hash and message of Accepted, in case the operator ends before it writes the
status."""

JUDGED_TARGET_ANNOTATION = "specdecode.io/judged-target"
"""On the capture that measures a head: digest of the target that it was measured with."""

RESOURCE_CLAIM_ANNOTATION = "specdecode.io/resource-claim"
"""On pods that claim GPUs: the request of their ResourceClaimTemplate as JSON, from which the operator renders it."""

TRAINED_DRAFT_ANNOTATION = "specdecode.io/trained-draft"
"""On pods: SHA-256 checksum of the trained head that replaces the draft of the spec."""

TEMPLATE_HASH_ANNOTATION = "specdecode.io/template-hash"
OWNED_SELECTOR = f"{MANAGED_BY_LABEL}={MANAGER}"


def worker_labels(name: str) -> dict[str, str]:
    """Return the labels of pods that only compute for the engines of one deployment."""
    return {MANAGED_BY_LABEL: MANAGER, COMPUTES_FOR_LABEL: name}


def plan_name(name: str) -> str:
    """Return the name of the ConfigMap with the plan of one deployment."""
    return f"{name}-plan"


def selector_labels(name: str) -> dict[str, str]:
    """Return the labels that select the engine pods of one deployment."""
    return {MANAGED_BY_LABEL: MANAGER, DEPLOYMENT_LABEL: name}


@dataclass(frozen=True)
class Resource:
    """One kind of the Kubernetes API."""

    api_version: str
    kind: str
    plural: str

    def path(self, namespace: str | None = None, name: str | None = None, subresource: str | None = None) -> str:
        """Return the URL path of one object, or of the collection of a namespace or the cluster."""
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
SPECDECODE_TRAINING = Resource(base.API_VERSION, training.KIND, training.PLURAL)
OUR_KINDS = {each.kind: each for each in (SPECDECODE_DEPLOYMENT, SPECDECODE_CAPTURE, SPECDECODE_TRAINING)}
DEPLOYMENT = Resource("apps/v1", "Deployment", "deployments")
LEADER_WORKER_SET = Resource("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", "leaderworkersets")
HTTP_ROUTE = Resource("gateway.networking.k8s.io/v1", "HTTPRoute", "httproutes")
RESOURCE_CLAIM_TEMPLATE = Resource("resource.k8s.io/v1", "ResourceClaimTemplate", "resourceclaimtemplates")
RESOURCE_SLICE = Resource("resource.k8s.io/v1", "ResourceSlice", "resourceslices")
DEVICE_CLASS = Resource("resource.k8s.io/v1", "DeviceClass", "deviceclasses")
HORIZONTAL_POD_AUTOSCALER = Resource("autoscaling/v2", "HorizontalPodAutoscaler", "horizontalpodautoscalers")
SCALED_OBJECT = Resource("keda.sh/v1alpha1", "ScaledObject", "scaledobjects")
INFERENCE_POOL = Resource("inference.networking.k8s.io/v1", "InferencePool", "inferencepools")
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

AUTOSCALERS = (HORIZONTAL_POD_AUTOSCALER, SCALED_OBJECT)
EXPOSING = (INFERENCE_POOL, HTTP_ROUTE)
BESIDE_ENGINES = (*EXPOSING, *AUTOSCALERS)
"""Kinds of the children that engines do not depend on."""

CHILDREN = (
    *(CONFIG_MAP, SERVICE, POD_DISRUPTION_BUDGET, RESOURCE_CLAIM_TEMPLATE, DEPLOYMENT, LEADER_WORKER_SET, JOB),
    *BESIDE_ENGINES,
)
"""Kinds of the objects that a SpecDecodeDeployment owns, in the order in which they are applied."""

OPTIONAL = (LEADER_WORKER_SET, INFERENCE_POOL, HTTP_ROUTE, RESOURCE_CLAIM_TEMPLATE, SCALED_OBJECT)
"""Kinds that a cluster may lack, or get while the operator runs."""

CAPTURE_CHILDREN = (PERSISTENT_VOLUME_CLAIM, JOB, CONFIG_MAP)
"""Kinds of the objects that a SpecDecodeCapture owns, or that were made for it."""

TRAINING_CHILDREN = (PERSISTENT_VOLUME_CLAIM, JOB)
"""Kinds of the objects that a SpecDecodeTraining owns, or that were made for it, besides its capture."""

WATCHED = (*CHILDREN, PERSISTENT_VOLUME_CLAIM, POD)
"""Kinds of children and pods; watched by our label."""

_BY_KIND = {each.kind: each for each in (*CHILDREN, *CAPTURE_CHILDREN, SPECDECODE_CAPTURE, SPECDECODE_TRAINING, LEASE)}


def written_resource(kind: str) -> Resource:
    """Return the resource of a kind that the operator writes."""
    return _BY_KIND[kind]


ENGINE_CONTAINER = "engine"
SIDECAR = "recorder"
"""Name of the engine pods' sidecar for live captures."""
