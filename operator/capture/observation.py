"""Parse a SpecDecodeCapture, and describe the cluster objects that it depends on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from pydantic import ValidationError

from specdecode_operator.api import capture as api
from specdecode_operator.api import capture_status, deployment
from specdecode_operator.api.base import Body
from specdecode_operator.api.capture import RegressionStatus, SpecDecodeCaptureSpec
from specdecode_operator.api.deployment import Key
from specdecode_operator.api.deployment_status import Condition, ConditionStatus
from specdecode_operator.cluster.clock import without_times_ahead
from specdecode_operator.cluster.resources import QUEUE_LABEL, QUEUE_PREFIX, SCHEDULE_LABEL
from specdecode_operator.cluster.storage_classes import StorageClasses
from specdecode_operator.deployment.conditions import Blocked, full_message
from specdecode_operator.deployment.desired_state import DesiredState, Launch
from specdecode_operator.enums import LiveTokenIds
from specdecode_operator.untrusted import mapping, objects

PREPARE, LOAD, COLLECT = "prepare", "load", "collect"
"""Names of the containers of a capture's pod, apart from the engine."""


@dataclass(frozen=True)
class Capture:
    """A parsed SpecDecodeCapture."""

    key: Key
    uid: str
    generation: int
    spec: Body
    status: capture_status.SpecDecodeCaptureStatus
    labels: Mapping[str, str]
    owners: frozenset[tuple[str, str]]  # kind and name
    times_ahead: tuple[str, ...] = ()  # messages about future times in the status, which count as now

    @property
    def job_name(self) -> str:
        """Name of its Job, its ConfigMap with the image ID, and its claim if one is created."""
        return created_claim(self.key.name)

    @property
    def deployment_key(self) -> Key:
        """Key of the deployment that it names."""
        return Key(self.key.namespace, str(self.spec.get("deployment")), deployment.KIND)

    @property
    def schedule_label(self) -> dict[str, str]:
        """Label by which a schedule's retention counts its claim; empty unless its deployment created it."""
        # Any user may set the label, and counted claims displace others.
        is_made = (deployment.KIND, self.spec.get("deployment")) in self.owners
        return {name: value for name, value in self.labels.items() if is_made and name == SCHEDULE_LABEL}

    @property
    def queue_labels(self) -> dict[str, str]:
        """Labels that put its Job into a queue of Kueue; empty without a queue, and without GPUs to wait for."""
        if QUEUE_LABEL not in self.labels or self.is_live:
            return {}
        return {name: value for name, value in self.labels.items() if name.startswith(QUEUE_PREFIX)}

    @property
    def is_live(self) -> bool:
        """Whether it records the requests of users in running engines."""
        return self.spec.get("source") == api.Source.LIVE

    @property
    def compares(self) -> bool:
        """Whether it has several arms."""
        return len(self.spec.get("arms") or ()) > 1

    @property
    def switches(self) -> bool:
        """Whether its pod starts engines by turns, each with its own folder."""
        return bool(self.spec.get("arms")) or (self.spec.get("repetitions") or 1) > 1

    @property
    def accepted(self) -> Condition | None:
        """Condition Accepted, if it is true."""
        condition = next((each for each in self.status.conditions if each.type == "Accepted"), None)
        return condition if condition is not None and condition.status is ConditionStatus.TRUE else None

    @property
    def ended(self) -> Condition | None:
        """Condition Succeeded with its full message, if the capture has ended."""
        condition = next((each for each in self.status.conditions if each.type == "Succeeded"), None)
        if condition is None or condition.status is ConditionStatus.UNKNOWN:
            return None
        return condition.model_copy(update={"message": full_message(condition, self.status.conditions)})


def created_claim(name: str) -> str:
    """Return the name of the claim that is created for a capture of this name."""
    return f"{name}-capture"


def has_ended(body: Body) -> bool:
    """Return whether a capture has ended, without parsing it: thousands are checked at a time."""
    conditions = objects(mapping(body, "status"), "conditions")
    return any(each.get("type") == "Succeeded" and each.get("status") != ConditionStatus.UNKNOWN for each in conditions)


def read_capture(body: Mapping[str, Any], now: datetime | None = None) -> Capture:
    """Parse an object. An unreadable status counts as empty; without ``now``, times in the future stay."""
    metadata = body["metadata"]
    raw_status, times_ahead = without_times_ahead(body.get("status") or {}, now)
    try:
        # Fields of a newer operator are ignored, so that an upgrade can be rolled back.
        status = capture_status.SpecDecodeCaptureStatus.parse(raw_status, newer=True)
    except ValidationError:
        status = capture_status.SpecDecodeCaptureStatus()
    return Capture(
        key=Key(metadata["namespace"], metadata["name"], api.KIND),
        uid=metadata["uid"],
        generation=metadata["generation"],
        spec=body.get("spec") or {},
        status=status,
        labels=metadata.get("labels") or {},
        owners=frozenset((each["kind"], each["name"]) for each in metadata.get("ownerReferences") or ()),
        times_ahead=times_ahead,
    )


@dataclass(frozen=True)
class ObservedDeployment:
    """The deployment that a capture names."""

    key: Key
    uid: str
    generation: int
    desired: DesiredState
    arms: Sequence[DesiredState] = ()  # desired state with each arm of a capture that has not started
    engine: str | None = None  # hash of the engines' spec and place
    engines_wanted: int = 0  # replicas of its Deployment
    pods: Sequence[Body] = ()  # pods that hold its GPUs, also terminating ones
    wants_engines: bool = True  # its spec asks for engines
    serves: bool = False  # at least one engine is available
    lent_to: str | None = None  # another capture that holds its GPUs

    @property
    def holds_gpus(self) -> bool:
        """Whether some of its engines still exist."""
        return bool(self.engines_wanted or self.pods)


@dataclass(frozen=True)
class CapturedDeployment:
    """The deployment that is captured, with its plan in force."""

    key: Key
    uid: str
    generation: int
    launch: Launch


@dataclass(frozen=True)
class MountedObjects:
    """Objects that the pod of a capture mounts, if the operator may read them."""

    claims: Mapping[str, Body | None] = field(default_factory=dict)  # by name; None if missing
    config_maps: Mapping[str, Body | None] = field(default_factory=dict)  # by name; None if missing
    classes: StorageClasses | None = None  # None if the operator may not list them


@dataclass(frozen=True)
class CaptureObservation:
    """Cluster objects that a capture depends on."""

    deployment: ObservedDeployment | None = None
    job: Body | None = None
    pods: Sequence[Body] = ()  # all pods with the capture's label
    claim: Body | None = None
    dataset: Body | None = None  # the ConfigMap or claim that holds the prompts
    golden: Body | None = None  # the SpecDecodeCapture that spec.against names
    goes_first: str | None = None  # message about a deployment or live capture that a capture waits for
    mounted: MountedObjects = field(default_factory=MountedObjects)  # for a borrowing capture without a running pod
    operator_image: str | None = None  # that the load generator runs; None if the operator does not know its own
    token: str = ""  # for a new Job of a live capture, with which recorders authenticate
    token_ids_allowed: LiveTokenIds = LiveTokenIds.NONE  # in live captures of the namespace


@dataclass(frozen=True)
class Progress:
    """Progress of a capture's Job and pod."""

    phase: capture_status.CapturePhase
    reason: str
    message: str
    waiting_for_gpus: bool = False  # unschedulable
    failure: Blocked | None = None  # why it failed, or certainly will
    summary: capture_status.CaptureSummary | None = None
    comparison: capture_status.ComparisonStatus | None = None
    regression: RegressionStatus | None = None
    started_at: str | None = None
    finished_at: str | None = None


def dataset_claim(spec: SpecDecodeCaptureSpec) -> str | None:
    """Return the claim that holds the dataset, if one does."""
    dataset = spec.workload.prompts.dataset
    claim = dataset.persistent_volume_claim if dataset else None
    return claim.claim_name if claim else None
