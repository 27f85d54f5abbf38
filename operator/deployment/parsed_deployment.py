"""Parse a SpecDecodeDeployment as the API server returns it: spec, status, and the spec in force.

The spec in force is the written spec; a policy may replace its speculation. A hash of the fields
that change engines shows whether two specs start the same engines.
"""

import re
import zoneinfo
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

from cronsim import CronSim, CronSimError
from pydantic import ValidationError

from specdecode_operator.api.base import CRON_FIX, Body
from specdecode_operator.api.deployment import (
    CaptureSchedule,
    Key,
    Policy,
    PolicyStatus,
    SpecDecodeDeploymentSpec,
)
from specdecode_operator.api.deployment_status import PlanStatus, SpecDecodeDeploymentStatus
from specdecode_operator.api.spec_problems import parsed_spec
from specdecode_operator.api.speculation import Speculation
from specdecode_operator.cluster.clock import without_times_ahead
from specdecode_operator.cluster.drift import applied_replicas_managers, content_hash
from specdecode_operator.cluster.resources import KEPT_MANAGERS_ANNOTATION
from specdecode_operator.deployment.conditions import WRONG_ANSWERS
from specdecode_operator.enums import METHODS_WITH_LAYERS, Method, OnCrashLoop, PolicyMode
from specdecode_operator.problems import InvalidSpecError, Problem


def schedule_problems(schedules: Sequence[CaptureSchedule]) -> list[Problem]:
    """Return the invalid cron expressions and unknown time zones of schedules."""
    problems = []
    for index, schedule in enumerate(schedules):
        where = f"spec.captures[{index}]"
        try:
            next(CronSim(schedule.schedule, datetime.now(UTC)))
        except (CronSimError, StopIteration) as error:
            fix = f"{error or 'matches no date'}: {CRON_FIX}"
            problems.append(Problem(f"{where}.schedule", schedule.schedule, fix))
        try:
            zoneinfo.ZoneInfo(schedule.time_zone)
        except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
            fix = "unknown time zone; use a name from the IANA database, such as UTC or Europe/Berlin"
            problems.append(Problem(f"{where}.timeZone", schedule.time_zone, fix))
    return problems


_CHANGE_NO_ENGINE: Final = {"replicas", "suspend", "rollout", "captures", "workload", "policy", "expose", "autoscaling"}


def engine_fields(spec: SpecDecodeDeploymentSpec) -> dict[str, Any]:
    """Return the fields that change engines and do not have their default values."""
    fields = spec.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    return {field: value for field, value in fields.items() if field not in _CHANGE_NO_ENGINE}


def engine_spec_hash(spec: SpecDecodeDeploymentSpec, plan: PlanStatus | None = None) -> str:
    """Return a hash of the fields that change engines and, with a plan, of its placement."""
    place = (plan.product, plan.tensor, plan.gpus_per_replica, plan.nodes_per_replica) if plan else ()
    return content_hash([engine_fields(spec), *place])


def is_engine_spec_hash(text: object) -> bool:
    """Whether an untrusted value has the form of an `engine_spec_hash`."""
    return isinstance(text, str) and re.fullmatch(r"[0-9a-f]{16}", text) is not None


def with_policy(spec: SpecDecodeDeploymentSpec, status: PolicyStatus | None) -> SpecDecodeDeploymentSpec:
    """Return the spec in force: the written spec, or with the speculation that a policy chose."""
    if status is None or status.speculation is None or not is_by_policy(spec, status):
        return spec
    return speculating(spec, status.speculation)


def is_by_policy(spec: SpecDecodeDeploymentSpec, status: PolicyStatus | None) -> bool:
    """Whether a policy chose the speculation in force for this spec, even if it equals the written one."""
    if spec.policy is None or status is None or status.since is None or status.asked != engine_spec_hash(spec):
        return False
    is_enforced = spec.policy.mode is PolicyMode.ENFORCE
    return stays_off(spec.policy, status) if is_off_until_change(status) else is_enforced


WITHOUT_SPECULATION: Final = "without speculation"
"""In `status.policy.arm` after a crash loop or wrong answers turned speculation off; names of arms have no spaces."""


def is_off_until_change(status: PolicyStatus) -> bool:
    """Whether a crash loop or wrong answers turned speculation off."""
    is_off = status.speculation is not None and status.speculation.method is Method.NONE
    return is_off and status.arm == WITHOUT_SPECULATION


def stays_off(policy: Policy, status: PolicyStatus) -> bool:
    """Whether a policy keeps speculation off for the reason in a status."""
    return distrusts(policy) if status.reason == WRONG_ANSWERS else serves_without(policy)


def distrusts(policy: Policy) -> bool:
    """Whether a policy turns speculation off after wrong answers."""
    return policy.canaries is not None and policy.mode is PolicyMode.ENFORCE


def serves_without(policy: Policy) -> bool:
    """Whether a policy turns speculation off in a crash loop."""
    default = OnCrashLoop.SERVE_WITHOUT_SPECULATION if policy.mode is PolicyMode.ENFORCE else OnCrashLoop.REPORT
    return (policy.on_crash_loop or default) is OnCrashLoop.SERVE_WITHOUT_SPECULATION


def speculating(spec: SpecDecodeDeploymentSpec, speculation: Speculation) -> SpecDecodeDeploymentSpec:
    """Return a spec with another speculation; without `draftTensor` if its method has no draft layers."""
    parallelism = spec.parallelism
    if speculation.method not in METHODS_WITH_LAYERS:
        parallelism = parallelism.model_copy(update={"draft_tensor": None})
    return spec.model_copy(update={"speculation": speculation, "parallelism": parallelism})


@dataclass(frozen=True)
class ParsedDeployment:
    """One SpecDecodeDeployment, parsed."""

    key: Key
    uid: str
    generation: int
    raw_spec: Body
    # The parsed spec, or why it is invalid: an older CRD may be installed, because the current one rejects such specs.
    spec: SpecDecodeDeploymentSpec | InvalidSpecError
    status: SpecDecodeDeploymentStatus
    suspended_for: str | None = None  # The capture that uses its GPUs; the object counts as suspended meanwhile
    written_spec: SpecDecodeDeploymentSpec | None = None
    by_policy: bool = False
    trained_draft: str | None = None  # SHA-256 of the trained head that replaces the draft of the object's spec
    draft_in_place: str | None = None  # SHA-256 of the head that engines get after their start, without a restart
    object_spec: Body = field(default_factory=dict)  # spec of the object, if it differs from raw_spec
    kept_managers: frozenset[str] = frozenset()
    times_ahead: tuple[str, ...] = ()
    replicas_applied_by: tuple[str, ...] = ()  # Who applies manifests with replicas, while an autoscaler sets it

    @property
    def wants_no_engine(self) -> bool:
        """Whether the spec is suspended or has zero replicas, even if it is invalid otherwise."""
        return self.raw_spec.get("suspend") is True or self.raw_spec.get("replicas") == 0

    @property
    def schedules(self) -> list[CaptureSchedule] | None:
        """The schedules of captures; None if the spec or a schedule is invalid."""
        if isinstance(self.spec, InvalidSpecError) or schedule_problems(self.spec.captures):
            return None
        return self.spec.captures


def engine_spec_hash_of(parent: ParsedDeployment) -> str:
    """Return the hash of the written spec; empty if it is invalid."""
    written = parent.written_spec or parent.spec
    return "" if isinstance(written, InvalidSpecError) else engine_spec_hash(written)


def parse_deployment(
    body: Mapping[str, Any], *, preempted_by: str | None = None, as_written: bool = False, now: datetime | None = None
) -> ParsedDeployment:
    """Parse an object; an invalid status counts as empty.

    Parameters
    ----------
    preempted_by
        Capture that uses the GPUs of its engines.
    as_written
        Ignore the speculation that a policy chose.
    now
        Time of the API server, to drop times in the future from the status. If None, they stay.
    """
    metadata, spec = body["metadata"], body.get("spec") or {}
    if spec.get("suspend") or spec.get("replicas") == 0:
        preempted_by = None  # it has no GPUs to lend
    if preempted_by is not None:
        spec = {**spec, "suspend": True}
    raw_status, times_ahead = without_times_ahead(body.get("status") or {}, now)
    # Ignore unknown fields, as the API server does: spec and status may come from a newer CRD and operator, before
    # an upgrade was rolled back.
    parsed: SpecDecodeDeploymentSpec | InvalidSpecError
    try:
        parsed = parsed_spec(SpecDecodeDeploymentSpec, spec, newer=True)
    except InvalidSpecError as error:
        parsed = error
    try:
        status = SpecDecodeDeploymentStatus.parse(raw_status, newer=True)
    except ValidationError:
        status = SpecDecodeDeploymentStatus()
    if isinstance(parsed, SpecDecodeDeploymentSpec) and parsed.speculation is not None:
        # Whether trained heads are served does not change an engine by itself.
        own = parsed.speculation.model_copy(update={"trained_drafts": False})
        parsed = parsed.model_copy(update={"speculation": own}) if own != parsed.speculation else parsed
    in_force, by_policy = parsed, False
    if isinstance(parsed, SpecDecodeDeploymentSpec) and not as_written:
        in_force, by_policy = with_policy(parsed, status.policy), is_by_policy(parsed, status.policy)
    managers = (metadata.get("annotations") or {}).get(KEPT_MANAGERS_ANNOTATION, "")
    return ParsedDeployment(
        key=Key(metadata["namespace"], metadata["name"]),
        uid=metadata["uid"],
        generation=metadata["generation"],
        raw_spec=spec,
        spec=in_force,
        status=status,
        suspended_for=preempted_by,
        written_spec=None if in_force is parsed or isinstance(parsed, InvalidSpecError) else parsed,
        by_policy=by_policy,
        kept_managers=frozenset(filter(None, map(str.strip, managers.split(",")))),
        times_ahead=times_ahead,
        replicas_applied_by=tuple(applied_replicas_managers(metadata)) if "autoscaling" in spec else (),
    )
