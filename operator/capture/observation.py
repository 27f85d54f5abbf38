"""Parse a SpecDecodeCapture, and describe the cluster objects that it depends on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from pydantic import ValidationError

from specdecode_operator.api import capture as api
from specdecode_operator.api import deployment
from specdecode_operator.api.base import Body
from specdecode_operator.api.capture import RegressionStatus, SpecDecodeCaptureSpec
from specdecode_operator.api.capture_status import (
    CapturePhase,
    CaptureSummary,
    ComparisonStatus,
    SpecDecodeCaptureStatus,
)
from specdecode_operator.api.deployment import Key
from specdecode_operator.api.deployment_status import Condition, ConditionStatus
from specdecode_operator.cluster.clock import without_times_ahead
from specdecode_operator.cluster.resources import QUEUE_LABEL, QUEUE_PREFIX, SCHEDULE_LABEL
from specdecode_operator.cluster.storage_classes import StorageClasses
from specdecode_operator.deployment.conditions import Blocked
from specdecode_operator.deployment.desired_state import DesiredState, Launch
from specdecode_operator.untrusted import mapping, objects


@dataclass(frozen=True)
class Capture:
    """One SpecDecodeCapture."""

    key: Key
    uid: str
    generation: int
    spec: Body
    status: SpecDecodeCaptureStatus
    labels: Mapping[str, str]
    owners: frozenset[tuple[str, str]]
    """Kind and name of what it goes with."""

    times_ahead: tuple[str, ...] = ()
    """What to tell of times that lay in the future in its status, and that count as now."""

    @property
    def claim_name(self) -> str:
        """Name of the claim that is created for it; it outlives the object."""
        return created_claim(self.key.name)

    @property
    def job_name(self) -> str:
        """Name of its Job."""
        return f"{self.key.name}-capture"

    @property
    def schedule_label(self) -> dict[str, str]:
        """The label by which a schedule's retention counts its claim; empty where its deployment did not make it.

        Anybody may write the label, and claims that are counted push out others.
        """
        is_made = (deployment.KIND, self.spec.get("deployment")) in self.owners
        return {name: value for name, value in self.labels.items() if is_made and name == SCHEDULE_LABEL}

    @property
    def queue_labels(self) -> dict[str, str]:
        """Labels that put its Job into a queue of Kueue; empty where it is in none."""
        if QUEUE_LABEL not in self.labels:
            return {}
        return {name: value for name, value in self.labels.items() if name.startswith(QUEUE_PREFIX)}

    @property
    def compares(self) -> bool:
        """Whether it has several arms."""
        return len(self.spec.get("arms") or ()) > 1

    @property
    def switches(self) -> bool:
        """Whether its pod starts engines by turns, each with a folder of its own."""
        return bool(self.spec.get("arms")) or (self.spec.get("repetitions") or 1) > 1

    @property
    def accepted(self) -> Condition | None:
        """The condition by which it may start; None where it may not, or nobody said so yet."""
        condition = next((each for each in self.status.conditions if each.type == "Accepted"), None)
        return condition if condition is not None and condition.status is ConditionStatus.TRUE else None

    @property
    def ended(self) -> Condition | None:
        """How it ended, for good; None while it has not."""
        condition = next((each for each in self.status.conditions if each.type == "Succeeded"), None)
        return condition if condition is not None and condition.status is not ConditionStatus.UNKNOWN else None


def created_claim(name: str) -> str:
    """Return the name of the claim that is created for a capture of this name."""
    return f"{name}-capture"


def has_ended(body: Body) -> bool:
    """Whether a capture has ended for good, told without reading all of it: thousands of them are asked at a time."""
    conditions = objects(mapping(body, "status"), "conditions")
    return any(each.get("type") == "Succeeded" and each.get("status") != ConditionStatus.UNKNOWN for each in conditions)


def read_capture(body: Mapping[str, Any], now: datetime | None = None) -> Capture:
    """Take an object apart; a status that cannot be read counts as none.

    ``now`` is the API server's time. Without it, times in the future stay as they are.
    """
    metadata = body["metadata"]
    raw_status, times_ahead = without_times_ahead(body.get("status") or {}, now)
    try:
        # Fields of a newer operator are passed over: an upgrade that is rolled back loses nothing.
        status = SpecDecodeCaptureStatus.parse(raw_status, newer=True)
    except ValidationError:
        status = SpecDecodeCaptureStatus()
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
    arms: Sequence[DesiredState] = ()  # what it would come to with each arm of the capture; asked for before it starts
    engine: str | None = None  # what tells its engines from those of another spec or place
    engines_wanted: int = 0  # engines that its Deployment asks for now
    pods: Sequence[Body] = ()  # pods that hold its GPUs, also those that are ending
    wants_engines: bool = True  # its spec asks for engines
    serves: bool = False  # at least one engine is available
    lent_to: str | None = None  # another capture that has its GPUs

    @property
    def holds_gpus(self) -> bool:
        """Whether its engines are not all gone yet."""
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
    """What the pod of a capture mounts, as far as the operator may look at it."""

    claims: Mapping[str, Body | None] = field(default_factory=dict)
    """PersistentVolumeClaims by name; None for one that does not exist."""

    config_maps: Mapping[str, Body | None] = field(default_factory=dict)
    """ConfigMaps by name; None for one that does not exist."""

    classes: StorageClasses | None = None
    """None if the operator may not list them."""


@dataclass(frozen=True)
class CaptureObservation:
    """What a capture depends on, as it is now."""

    deployment: ObservedDeployment | None = None  # None where there is none of that name
    job: Body | None = None
    pods: Sequence[Body] = ()  # what carries the capture's label
    claim: Body | None = None  # whoever made it
    dataset: Body | None = None  # the ConfigMap or claim that holds the prompts, where a dataset is asked for
    golden: Body | None = None  # the SpecDecodeCapture that spec.against names
    # For whom a capture that keeps its deployment's engines waits, in a sentence; None where nobody goes before it.
    goes_first: str | None = None
    # Of a capture that borrows GPUs, while its pod does not run.
    mounted: MountedObjects = field(default_factory=MountedObjects)
    # Image that the load generator runs from; None where the operator does not know its own.
    operator_image: str | None = None


@dataclass(frozen=True)
class Progress:
    """How far a capture is."""

    phase: CapturePhase
    reason: str
    message: str
    waiting_for_gpus: bool = False  # the scheduler finds no place for it
    failure: Blocked | None = None  # why it failed, or will; what is hopeless need not go on
    summary: CaptureSummary | None = None
    comparison: ComparisonStatus | None = None
    regression: RegressionStatus | None = None

    started_at: str | None = None
    finished_at: str | None = None


def dataset_claim(spec: SpecDecodeCaptureSpec) -> str | None:
    """Return the claim that holds the dataset, if one does."""
    dataset = spec.workload.prompts.dataset
    claim = dataset.persistent_volume_claim if dataset else None
    return claim.claim_name if claim else None
