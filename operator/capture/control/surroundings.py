"""What a capture depends on as it was seen, and what is decided upon that."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from specdecode_operator.api.base import Body
from specdecode_operator.api.capture_status import CapturePhase, CaptureSummary
from specdecode_operator.api.key import Key
from specdecode_operator.deployment.conditions import ConditionUpdate
from specdecode_operator.deployment.desired_state import DesiredState
from specdecode_operator.deployment.pods.readiness import Readiness


@dataclass(frozen=True)
class DeploymentSeen:
    """The deployment that a capture names."""

    key: Key
    uid: str
    generation: int
    desired: DesiredState
    engines_wanted: int = 0  # engines that its Deployment asks for now
    pods: Sequence[Body] = ()  # pods that hold its GPUs, also those that are ending

    @property
    def holds_gpus(self) -> bool:
        """Whether its engines are not all gone yet."""
        return bool(self.engines_wanted or self.pods)


@dataclass(frozen=True)
class Surroundings:
    """What a capture depends on, as it is now."""

    deployment: DeploymentSeen | None = None  # None where there is none of that name
    job: Body | None = None
    pods: Sequence[Body] = ()  # what carries the capture's label
    claim: Body | None = None  # whoever made it
    dataset: Body | None = None  # the ConfigMap or claim that holds the prompts, where a dataset is asked for
    # Image that the load generator runs from; None where the operator does not know its own.
    operator_image: str | None = None


@dataclass(frozen=True)
class Writes:
    """What is to be written for a capture."""

    claim: Body | None = None  # to create
    # What is to change in the metadata of the claim that was created; empty where nothing is.
    claim_metadata: Body = field(default_factory=dict)
    job: Body | None = None  # to create; never changed: a capture that runs is what it was started as
    # Whether the Job shall be suspended; None where that is somebody else's affair, or so already.
    job_suspended: bool | None = None
    remove_job: bool = False
    # A ConfigMap to create or change, which tells the load generator what image the engine runs.
    image_note: Body | None = None


@dataclass(frozen=True)
class Decision:
    """What a capture comes to."""

    phase: CapturePhase
    summary: Readiness
    accepted: ConditionUpdate
    succeeded: ConditionUpdate
    writes: Writes = field(default_factory=Writes)
    waiting_for_gpus: str | None = None
    """In the scheduler's words; None while it does not."""

    result: CaptureSummary | None = None
    started_at: str | None = None
    finished_at: str | None = None
    claim: str | None = None
