"""One SpecDecodeDeployment as the API server has it, and the reading of its spec."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from specdecode_operator.api.base import Body
from specdecode_operator.api.capture_schedule import CaptureSchedule
from specdecode_operator.api.deployment import SpecDecodeDeploymentSpec
from specdecode_operator.api.key import Key
from specdecode_operator.api.status import SpecDecodeDeploymentStatus
from specdecode_operator.deployment.spec.parsing import spec_problems
from specdecode_operator.deployment.spec.schedule_rules import schedule_problems
from specdecode_operator.problems import InvalidSpecError


@dataclass(frozen=True)
class Parent:
    """One SpecDecodeDeployment as the API server has it."""

    key: Key
    uid: str
    generation: int
    spec: Body
    status: SpecDecodeDeploymentStatus
    suspended_for: str | None = None
    """The capture that has its GPUs."""


def read_parent(body: Mapping[str, Any]) -> Parent:
    """Take an object apart; a status that cannot be read counts as none."""
    metadata = body["metadata"]
    try:
        # Fields of a newer operator are passed over: an upgrade that is rolled back loses nothing.
        status = SpecDecodeDeploymentStatus.model_validate(body.get("status") or {}, extra="ignore")
    except ValidationError:
        status = SpecDecodeDeploymentStatus()
    return Parent(
        key=Key(metadata["namespace"], metadata["name"]),
        uid=metadata["uid"],
        generation=metadata["generation"],
        spec=body.get("spec") or {},
        status=status,
    )


def lend(parent: Parent, capture: str | None) -> Parent:
    """Return the object as it holds while a capture has its GPUs: as if it were suspended."""
    if capture is None or parent.spec.get("suspend") or parent.spec.get("replicas") == 0:
        return parent
    return replace(parent, spec={**parent.spec, "suspend": True}, suspended_for=capture)


def parse_spec(spec: Body) -> SpecDecodeDeploymentSpec:
    """Return the spec with its types; the CRD refuses what fails here, unless an older one is installed.

    Fields of a newer CRD are passed over, as the API server passes over fields of no CRD.

    Raises
    ------
    InvalidSpecError
        When it does not hold together.
    """
    try:
        return SpecDecodeDeploymentSpec.model_validate(spec, extra="ignore")
    except ValidationError as error:
        raise InvalidSpecError(spec_problems(error)) from error


def schedules_of(parent: Parent) -> list[CaptureSchedule] | None:
    """Return the schedules of captures; None where the spec does not hold together."""
    try:
        schedules = parse_spec(parent.spec).captures
    except InvalidSpecError:
        return None
    return None if schedule_problems(schedules) else schedules
