"""The observed state: what a capture depends on, as the cluster has it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from specdecode_operator.api.base import Body
from specdecode_operator.api.key import Key
from specdecode_operator.deployment.desired_state import DesiredState, Launch
from specdecode_operator.kube.storage_classes import StorageClasses


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
