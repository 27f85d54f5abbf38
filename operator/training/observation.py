"""Parse a SpecDecodeTraining, and describe the cluster objects that it depends on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from pydantic import ValidationError

from specdecode_operator.api import deployment
from specdecode_operator.api import training as api
from specdecode_operator.api.base import Body
from specdecode_operator.api.deployment import Key, SpecDecodeDeploymentSpec
from specdecode_operator.api.deployment_status import Condition, ConditionStatus
from specdecode_operator.api.training import SpecDecodeTrainingStatus, TrainingPhase
from specdecode_operator.capture.observation import ObservedDeployment
from specdecode_operator.cluster.clock import without_times_ahead
from specdecode_operator.cluster.resources import QUEUE_LABEL, QUEUE_PREFIX
from specdecode_operator.deployment.conditions import ConditionUpdate, full_message
from specdecode_operator.enums import Method

ENDED = frozenset({TrainingPhase.COMPLETE, TrainingPhase.FAILED})


@dataclass(frozen=True)
class Training:
    """A parsed SpecDecodeTraining."""

    key: Key
    uid: str
    generation: int
    spec: Body
    status: SpecDecodeTrainingStatus
    labels: Mapping[str, str] = field(default_factory=dict)
    times_ahead: tuple[str, ...] = ()  # messages about future times in the status, which are treated as now

    @property
    def job_name(self) -> str:
        """Name of its Job, and of its claim if one is created."""
        return f"{self.key.name}-training"

    @property
    def deployment_key(self) -> Key:
        """Key of its deployment."""
        return Key(self.key.namespace, str(self.spec.get("deployment")), deployment.KIND)

    @property
    def schedule_label(self) -> dict[str, str]:
        """Always empty, because schedules create no trainings; their retention ignores claims of trainings."""
        return {}

    @property
    def queue_labels(self) -> dict[str, str]:
        """Labels that put its Job into a queue of Kueue; empty without a queue."""
        if QUEUE_LABEL not in self.labels:
            return {}
        return {name: value for name, value in self.labels.items() if name.startswith(QUEUE_PREFIX)}

    def condition(self, type_: str) -> Condition | None:
        """Return a condition of its status."""
        return next((each for each in self.status.conditions if each.type == type_), None)

    def recorded(self, type_: str) -> ConditionUpdate | None:
        """Return a condition of its status with the full message, so that a decision can keep it."""
        found = self.condition(type_)
        if found is None:
            return None
        message = full_message(found, self.status.conditions)
        return ConditionUpdate(found.type, found.status, found.reason, message)

    @property
    def trained(self) -> Condition | None:
        """Condition Succeeded, if the Job has ended: the head was published, or the training failed."""
        found = self.condition("Succeeded")
        return found if found is not None and found.status is not ConditionStatus.UNKNOWN else None

    @property
    def has_ended(self) -> bool:
        """Whether the training and its measurement have ended."""
        return self.status.phase in ENDED


@dataclass(frozen=True)
class TrainingObservation:
    """Cluster objects that a training depends on."""

    deployment: ObservedDeployment | None = None
    job: Body | None = None
    pods: Sequence[Body] = ()  # all pods with the training's label
    claim: Body | None = None
    captures: Mapping[str, Body | None] = field(default_factory=dict)  # SpecDecodeCaptures by name; None if missing
    capture_claims: Mapping[str, Body | None] = field(default_factory=dict)  # claims of captures by name
    rows: Body | None = None  # ConfigMap or claim of spec.dataset
    starting_head: Body | None = None  # claim of spec.from
    rival: str | None = None  # another training that uses the same claim, and goes first
    goes_first: str | None = None  # message that names the deployment that the training waits for
    judging: Body | None = None  # the SpecDecodeCapture that measures the head
    written: SpecDecodeDeploymentSpec | None = None  # spec of the deployment, before its head is measured
    served: Method = Method.NONE  # method in force in the deployment, which a trained head may have replaced
    promoted: ConditionUpdate | None = None  # condition Promoted of a better head; None if its deployment was not read
    operator_image: str | None = None  # image of the Job; None if the operator does not know its image


def read_training(body: Mapping[str, Any], now: datetime | None = None) -> Training:
    """Parse an object. An unreadable status is treated as empty; without ``now``, future times are kept."""
    metadata = body["metadata"]
    raw_status, times_ahead = without_times_ahead(body.get("status") or {}, now)
    try:
        # Fields of a newer operator are ignored, so that an upgrade can be rolled back.
        status = SpecDecodeTrainingStatus.parse(raw_status, newer=True)
    except ValidationError:
        status = SpecDecodeTrainingStatus()
    return Training(
        key=Key(metadata["namespace"], metadata["name"], api.KIND),
        uid=metadata["uid"],
        generation=metadata["generation"],
        spec=body.get("spec") or {},
        status=status,
        labels=metadata.get("labels") or {},
        times_ahead=times_ahead,
    )
