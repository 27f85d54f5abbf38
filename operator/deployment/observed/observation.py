"""Observed engine state after an apply, and the part kept for later: last good workload and group crashes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from specdecode_operator.api.base import Body
from specdecode_operator.api.deployment_status import FiguresStatus
from specdecode_operator.cluster.resources import LEADER_WORKER_SET, Resource
from specdecode_operator.deployment.children import wanted_replicas
from specdecode_operator.deployment.conditions import Blocked
from specdecode_operator.deployment.desired_state import (
    DesiredState,
    Gated,
    InCanary,
    Launch,
    NotLaunched,
    RolledBack,
)
from specdecode_operator.deployment.engine_pod import engine_timeouts
from specdecode_operator.deployment.observed.crash_loop import CrashLoop
from specdecode_operator.deployment.observed.decay import NOTHING_DECAYED, Decay
from specdecode_operator.deployment.observed.engine_reports import BudgetResidual, budget_residual
from specdecode_operator.deployment.observed.replica_load import ReplicaLoad
from specdecode_operator.deployment.observed.wrong_answers import Answers, WrongAnswers
from specdecode_operator.deployment.rollout.canary import CanaryDecision, waiting_decision
from specdecode_operator.deployment.rollout.readiness import Lending, Readiness
from specdecode_operator.deployment.rollout.rollback import LastGood, after_rollout, attempt_of, with_crashes
from specdecode_operator.deployment.rollout.rollout_progress import (
    NO_GROUP_HISTORY,
    GroupHistory,
    Rollout,
    observe_groups,
    read_group_rollout,
    read_rollout,
    serving_hash,
    with_replaced,
)
from specdecode_operator.stats.engine_window import NOTHING_RECENT, Recent
from specdecode_operator.vllm.engine_metrics import Reading

# Time without an answer after which engines count as silent: 3 scrapes in a row with an interval of 15 s.
_SILENCE_S = 25.0

_CREATED = Blocked("CanaryStarting", "The canary is being created", waits=True)


@dataclass(frozen=True)
class Observation:
    """Observed state of one object's engines."""

    workload: Body | None = None
    pods: list[Body] = field(default_factory=list)
    readings: Mapping[str, Reading] = field(default_factory=dict)
    figures_due: bool = True
    silent_s: float | None = None  # Time without an answer; None if an engine answers, or no engine was scraped
    lending: Lending | None = None  # The capture that uses the engines' GPUs, if any
    claim_users: tuple[str, ...] = ()
    recent: Recent = NOTHING_RECENT
    decay: Decay = NOTHING_DECAYED
    crash_loop: CrashLoop | None = None
    wrong_answers: WrongAnswers | None = None
    answers: Answers = field(default_factory=dict)
    figures: FiguresStatus | None = None
    groups: GroupHistory = NO_GROUP_HISTORY
    replaced_workload: Body | None = None
    canary: CanaryDecision | None = None
    blocked: Readiness | None = None  # Why the API server rejected the desired objects
    route: Body | None = None
    pool: Body | None = None
    autoscaler: Body | None = None
    blocked_beside: Mapping[str, Readiness] = field(default_factory=dict)
    """Why children that engines do not depend on could not be written or deleted, by kind."""
    load: ReplicaLoad | None = None  # For an autoscaler with PredictedUtilization
    contested: tuple[str, ...] = ()  # Children and fields that another writer changes again after each repair
    repeats: bool = False  # Whether the engines report the same values as at the last scrape

    @property
    def missed(self) -> bool:
        """Whether the engines did not answer only for a short time; earlier results stay valid then."""
        return self.silent_s is not None and self.silent_s < _SILENCE_S

    def why_blocked(self, *resources: Resource) -> Readiness | None:
        """Return why the first of these kinds that is blocked could not be written; None if none is blocked."""
        found = (self.blocked_beside.get(resource.kind) for resource in resources)
        return next((blocked for blocked in found if blocked is not None), None)


def observed_residual(desired: DesiredState, observation: Observation) -> BudgetResidual | None:
    """Return the difference between the KV cache of the plan and of the engines; None if either is missing."""
    outcome = desired.outcome
    if observation.blocked:
        return None
    return budget_residual(outcome.facts, outcome.plan, observation.readings) if isinstance(outcome, Launch) else None


def canary_decision(outcome: InCanary, observation: Observation) -> CanaryDecision:
    """Return what to do with the canary."""
    if outcome.waits is not None:
        return waiting_decision(outcome.waits)
    return observation.canary or waiting_decision(_CREATED)


def rollout_of(outcome: Launch | RolledBack | Gated | InCanary, observation: Observation) -> Rollout:
    """Return the rollout of the workload, including the engines of a replaced workload."""
    workload, wanted = observation.workload, wanted_replicas(outcome.facts)
    if workload is None or workload.get("kind") != LEADER_WORKER_SET.kind:
        return with_replaced(read_rollout(workload, observation.pods, wanted), observation.replaced_workload)
    deadline_s = None
    if isinstance(outcome, Launch):
        deadline_s = engine_timeouts(outcome.facts, outcome.plan).progress_deadline_s
    rollout = read_group_rollout(workload, observation.pods, wanted, observation.groups, deadline_s)
    return with_replaced(rollout, observation.replaced_workload)


def update_last_good(desired: DesiredState, observation: Observation, last_good: LastGood | None) -> LastGood | None:
    """Return the last good workload: the current one once it serves; otherwise the kept one with any new failure."""
    outcome, workload = desired.outcome, desired.workload
    if observation.blocked or not isinstance(outcome, Launch) or workload is None or observation.workload is None:
        return last_good
    if serving_hash(observation.workload) != serving_hash(workload):
        return last_good
    if outcome.facts.spec.rollout.paused:
        return last_good
    attempt = partial(attempt_of, outcome.facts.spec, outcome.plan.chosen)
    known = after_rollout(last_good, workload, attempt, rollout_of(outcome, observation))
    return with_crashes(known, observation.groups)


def update_group_history(
    before: GroupHistory | None,
    desired: DesiredState,
    observation: Observation,
    last_good: LastGood | None,
    now_s: float,
) -> GroupHistory:
    """Add the current state of engines on several nodes; after an operator restart, begin with ``last_good``."""
    outcome, workload = desired.outcome, observation.workload
    if before is None and last_good is not None:
        before = last_good.groups or GroupHistory(serving_hash(last_good.workload), served=True)
    before = before or NO_GROUP_HISTORY
    if observation.blocked or workload is None or isinstance(outcome, NotLaunched):
        return before
    if workload.get("kind") != LEADER_WORKER_SET.kind:
        return NO_GROUP_HISTORY  # pods of a Deployment count restarts, and it has its own deadline
    serve = rollout_of(outcome, observation).complete
    awaited = wanted_replicas(outcome.facts) > 0 and not outcome.facts.spec.rollout.paused
    template = serving_hash(workload)
    return observe_groups(before, template, observation.pods, now_s, serve=serve, awaited=awaited)
