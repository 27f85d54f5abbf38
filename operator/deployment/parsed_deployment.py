"""One SpecDecodeDeployment as the API server has it, its spec parsed."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pydantic import ValidationError

from specdecode_operator.api.base import Body
from specdecode_operator.api.capture_schedule import CaptureSchedule
from specdecode_operator.api.deployment import SpecDecodeDeploymentSpec
from specdecode_operator.api.key import Key
from specdecode_operator.api.status.deployment import SpecDecodeDeploymentStatus
from specdecode_operator.deployment.spec.engine_fields import is_by_policy, with_policy
from specdecode_operator.deployment.spec.pydantic_problems import parsed_spec
from specdecode_operator.deployment.spec.rules.schedules import schedule_problems
from specdecode_operator.kube.future_times import without_times_ahead
from specdecode_operator.kube.labels import KEPT_MANAGERS_ANNOTATION
from specdecode_operator.problems import InvalidSpecError


@dataclass(frozen=True)
class Parent:
    """One SpecDecodeDeployment as the API server has it."""

    key: Key
    uid: str
    generation: int
    raw_spec: Body
    """As it is written, which may be invalid."""

    spec: SpecDecodeDeploymentSpec | InvalidSpecError
    """The spec with its types, or why it has none: then an older CRD is installed, for ours refuses such a spec."""

    status: SpecDecodeDeploymentStatus
    suspended_for: str | None = None
    """The capture that has its GPUs: meanwhile the object is as if it were suspended."""

    written_spec: SpecDecodeDeploymentSpec | None = None
    """The spec as it is written, where a policy has put another speculation in force."""

    by_policy: bool = False
    """Whether a policy chose what is in force: a capture with arms has measured it."""

    kept_managers: frozenset[str] = frozenset()
    """Field managers whose changes of its children stay."""

    times_ahead: tuple[str, ...] = ()
    """What to tell of times that lay in the future in its status, and that count as now."""

    @property
    def wants_no_engine(self) -> bool:
        """Whether the spec asks for no engine, whatever else is wrong with it."""
        return self.raw_spec.get("suspend") is True or self.raw_spec.get("replicas") == 0

    @property
    def schedules(self) -> list[CaptureSchedule] | None:
        """The schedules of captures; None where the spec is invalid."""
        if isinstance(self.spec, InvalidSpecError) or schedule_problems(self.spec.captures):
            return None
        return self.spec.captures


def read_parent(
    body: Mapping[str, Any],
    *,
    preempted_by: str | None = None,
    as_written: bool = False,
    now: datetime | None = None,
) -> Parent:
    """Return the object of a body; a status that cannot be read counts as none.

    Parameters
    ----------
    body
        The object.
    preempted_by
        The capture that has the GPUs of its engines, if one has.
    as_written
        Leave out what a policy has put in force.
    now
        The API server's time. Without it, times in the future stay as they are.
    """
    metadata, spec = body["metadata"], body.get("spec") or {}
    if spec.get("suspend") or spec.get("replicas") == 0:
        preempted_by = None  # it has no GPUs to give
    if preempted_by is not None:
        spec = {**spec, "suspend": True}
    raw_status, times_ahead = without_times_ahead(body.get("status") or {}, now)
    parsed, status = _parse_spec(spec), _parse_status(raw_status)
    in_force, by_policy = parsed, False
    if isinstance(parsed, SpecDecodeDeploymentSpec) and not as_written:
        in_force, by_policy = with_policy(parsed, status.policy), is_by_policy(parsed, status.policy)
    return Parent(
        key=Key(metadata["namespace"], metadata["name"]),
        uid=metadata["uid"],
        generation=metadata["generation"],
        raw_spec=spec,
        spec=in_force,
        status=status,
        suspended_for=preempted_by,
        written_spec=None if in_force is parsed or isinstance(parsed, InvalidSpecError) else parsed,
        by_policy=by_policy,
        kept_managers=_kept_managers(metadata.get("annotations") or {}),
        times_ahead=times_ahead,
    )


def _kept_managers(annotations: Mapping[str, str]) -> frozenset[str]:
    names = annotations.get(KEPT_MANAGERS_ANNOTATION, "").split(",")
    return frozenset(filter(None, map(str.strip, names)))


def _parse_spec(spec: Body) -> SpecDecodeDeploymentSpec | InvalidSpecError:
    """Fields of a newer CRD are passed over, as the API server passes over fields of no CRD."""
    try:
        return parsed_spec(SpecDecodeDeploymentSpec, spec, newer=True)
    except InvalidSpecError as error:
        return error


def _parse_status(status: Body) -> SpecDecodeDeploymentStatus:
    """Fields of a newer operator are passed over: an upgrade that is rolled back loses nothing."""
    try:
        return SpecDecodeDeploymentStatus.parse(status, newer=True)
    except ValidationError:
        return SpecDecodeDeploymentStatus()
