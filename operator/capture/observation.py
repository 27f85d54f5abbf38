"""A SpecDecodeCapture as the API server has it, taken apart."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pydantic import ValidationError

from specdecode_operator.api import capture as api
from specdecode_operator.api import deployment
from specdecode_operator.api.base import Body
from specdecode_operator.api.key import Key
from specdecode_operator.api.status.capture import SpecDecodeCaptureStatus
from specdecode_operator.api.status.deployment import Condition, ConditionStatus
from specdecode_operator.kube.future_times import without_times_ahead
from specdecode_operator.kube.labels import QUEUE_LABEL, QUEUE_PREFIX, SCHEDULE_LABEL
from specdecode_operator.kube.untyped import mapping, objects


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
