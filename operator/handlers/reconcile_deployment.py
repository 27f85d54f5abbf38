"""Reconcile one SpecDecodeDeployment: read, decide, write, observe, run schedules and policy, report.

`Record` holds all in-memory state of one object between reconciles. It is lost when the process ends.
"""

import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Final, TypeVar

from specdecode_operator.api import base, capture, deployment, training
from specdecode_operator.api.base import Body
from specdecode_operator.api.deployment import (
    CaptureSchedule,
    Gate,
    Key,
    Policy,
    PolicyStatus,
    ScheduleStatus,
    SpecDecodeDeploymentSpec,
)
from specdecode_operator.api.deployment_status import TrainedDraftStatus
from specdecode_operator.api.speculation import Speculation
from specdecode_operator.capture.borrowing import lending_to
from specdecode_operator.capture.golden_gate import GateObjects, gate_state, gate_writes
from specdecode_operator.capture.gpu_sharing import preempting_capture
from specdecode_operator.capture.observation import ObservedDeployment
from specdecode_operator.capture.preconditions import captured_deployment
from specdecode_operator.capture.schedules import (
    OVER_AGE_FOR,
    DueCapture,
    Note,
    ObservedSchedules,
    ScheduleEvent,
    decide_schedules,
)
from specdecode_operator.cluster.cache import Cache
from specdecode_operator.cluster.client import Cluster, ClusterError
from specdecode_operator.cluster.drift import Identity, identity, is_owned
from specdecode_operator.cluster.engine_probe import EngineProbe
from specdecode_operator.cluster.observed_figures import FiguresReader, KeptFigures
from specdecode_operator.cluster.resources import (
    AUTOSCALERS,
    CONFIG_MAP,
    HTTP_ROUTE,
    INFERENCE_POOL,
    JOB,
    LEADER_WORKER_SET,
    MODEL_FACTS_NAME,
    PERSISTENT_VOLUME_CLAIM,
    POD,
    RESOURCE_CLAIM_TEMPLATE,
    plan_name,
)
from specdecode_operator.deployment.autoscaler import wanted_autoscaler
from specdecode_operator.deployment.conditions import CRASH_LOOP, WRONG_ANSWERS
from specdecode_operator.deployment.configmap_digests import believed, digests, kept_entries, own_proofs, proofs_in
from specdecode_operator.deployment.decision import internal_error, newly_read_models
from specdecode_operator.deployment.desired_state import (
    ClusterState,
    DesiredState,
    InCanary,
    Launch,
    Outcome,
    RolledBack,
)
from specdecode_operator.deployment.live_recorder import DRAFT_ENTRY
from specdecode_operator.deployment.models.model_facts import believed_entries, site_facts_of
from specdecode_operator.deployment.models.model_jobs import downloads_name, is_model_pod, read_downloads
from specdecode_operator.deployment.models.model_locations import claims_named
from specdecode_operator.deployment.observed.crash_loop import (
    NO_CRASHES,
    CrashHistory,
    Engines,
    crash_loop,
    update_crashes,
)
from specdecode_operator.deployment.observed.decay import NOTHING_DECAYED, Decay, newest_measured, update_decay
from specdecode_operator.deployment.observed.observation import (
    Observation,
    observed_residual,
    update_group_history,
    update_last_good,
)
from specdecode_operator.deployment.observed.replica_load import ReplicaLoad
from specdecode_operator.deployment.observed.wrong_answers import Answers, update_answers, wrong_answers
from specdecode_operator.deployment.parsed_deployment import (
    ParsedDeployment,
    distrusts,
    engine_spec_hash,
    engine_spec_hash_of,
    is_off_until_change,
    parse_deployment,
    serves_without,
    stays_off,
)
from specdecode_operator.deployment.planning import plan_change, planned_break_even
from specdecode_operator.deployment.replica_capacity import replica_load
from specdecode_operator.deployment.requeue import Requeue, needs_another, requeue_for, same_status_apart_from_figures
from specdecode_operator.deployment.rollout.blocked_pods import waits_for_claim
from specdecode_operator.deployment.rollout.canary import (
    CanaryDecision,
    CanaryTrial,
    after_canary,
    canary_settings,
    judge_canary,
)
from specdecode_operator.deployment.rollout.engine_workload import serving_pods, speculates
from specdecode_operator.deployment.rollout.readiness import Lending, Readiness, lent_since
from specdecode_operator.deployment.rollout.rollback import LastGood, last_good_name, read_last_good, render_last_good
from specdecode_operator.deployment.rollout.rollout_gate import GateState, may_be_of_gate
from specdecode_operator.deployment.rollout.rollout_progress import (
    NO_GROUP_HISTORY,
    GroupHistory,
    current_pods,
    only_startup_changes,
    read_rollout,
    serving_hash,
)
from specdecode_operator.deployment.spec_facts import Facts
from specdecode_operator.deployment.speculation_policy import (
    OFF,
    Measured,
    NoEvidence,
    PolicyInputs,
    Remembered,
    given_up,
    is_unchanged,
    judge,
    observe_engines,
    of_this_spec,
    policy_status,
    read_measured,
    refusal,
    steady,
    turned_off,
    why_not_plannable,
    with_speculation,
)
from specdecode_operator.deployment.status import compose_status
from specdecode_operator.enums import AutoscalingMetric, Method, PolicyAction, PolicyOutcome, RolloutStrategy
from specdecode_operator.handlers.apply_children import EngineChildren, SharedConfigMaps, what_blocks
from specdecode_operator.handlers.decision_cache import DecisionCache
from specdecode_operator.handlers.metrics import OperatorMetrics
from specdecode_operator.handlers.settings import Settings
from specdecode_operator.handlers.status_writer import Reporter
from specdecode_operator.problems import InvalidSpecError
from specdecode_operator.stats.engine_window import ENOUGH_DRAFTED_TOKENS, NOTHING_RECENT, Recent, Window, update_recent
from specdecode_operator.stats.figures import SampleBuffer
from specdecode_operator.stats.pool_comparison import served
from specdecode_operator.training.in_place import Update
from specdecode_operator.training.offers import OfferedHead, Offers, offers_of
from specdecode_operator.training.promotion import Rollouts, choose, draft_order, is_news, update_state
from specdecode_operator.training.refresh import (
    ObservedRefresh,
    RefreshDecision,
    created_event,
    decide_refresh,
    render_training,
    reserved,
)
from specdecode_operator.untrusted import mapping
from specdecode_operator.vllm.engine_metrics import Reading, Unreachable

_logger = logging.getLogger(__name__)
_T = TypeVar("_T")

_MESSAGE_REST_S: Final = 300.0
"""Minimum interval between writes of a message if only its numbers changed."""

NotHad = Callable[[Speculation], str]
"""Returns why the engines' placement cannot run a speculation; an empty text if it can."""


class PolicyKeeper:
    """Carries out the policy of one deployment."""

    def __init__(self, reporter: Reporter, metrics: OperatorMetrics) -> None:
        self._reporter, self._metrics = reporter, metrics
        self._memory: Remembered | None = None

    async def keep(
        self, parent: ParsedDeployment, desired: DesiredState, observation: Observation, not_had: NotHad, refused: str
    ) -> PolicyStatus | None:
        """Decide, act, and return the status of the policy.

        ``refused`` is why the speculation that the policy chose can no longer be launched; empty if it can.
        """
        written = parent.written_spec or parent.spec
        if isinstance(written, InvalidSpecError):
            return parent.status.policy
        if written.policy is None:
            self._memory = None
            return None
        asked, now = engine_spec_hash(written), self._reporter.cluster.clock.now()
        before = of_this_spec(parent.status.policy, asked)
        if isinstance(desired.outcome, RolledBack) and parent.written_spec is not None:
            refused = f"its engines never served ({desired.outcome.failure})"
        elif before is not None and is_off_until_change(before):
            if stays_off(written.policy, before):
                return before
            before = before.model_copy(update=dict.fromkeys(("speculation", "since", "arm")))
        if refused and before is not None:
            self._memory = None
            status = given_up(before, refused, now)
            self._reporter.post_event("PolicyActed", status.message, warns=True)
            return status
        policy: Policy = written.policy
        measured = _measured(self._reporter.cache, parent, written, desired)
        case = PolicyInputs(policy, asked, before, measured, rollout_paused=written.rollout.paused)
        if found := _failure(observation, policy):
            return self._turned_off(case, *found, not_had(OFF))
        return await self._decide(desired, observation, case, not_had)

    def _turned_off(self, case: PolicyInputs, reason: str, why: str, refusal: str) -> PolicyStatus:
        """Turn speculation off if the engines can run without it; ``refusal`` is why they cannot, or empty."""
        status = turned_off(case, reason, why, refusal, self._reporter.cluster.clock.now())
        if status.outcome is PolicyOutcome.DONE:
            self._memory = None
            self._metrics.count_policy_decision(status.action, status.outcome)
            self._reporter.post_event("PolicyActed", f"{status.action}: {status.message}", warns=True)
        return status

    async def _decide(
        self, desired: DesiredState, observation: Observation, case: PolicyInputs, not_had: NotHad
    ) -> PolicyStatus:
        now, measured = self._reporter.cluster.clock.now(), case.measured
        now_s, length_s = now.timestamp(), float(case.policy.window_seconds)
        remembered = self._memory
        if remembered is None or remembered.window.length_s != length_s:
            remembered = Remembered(Window(length_s))
        seen = observe_engines(desired, observation, remembered.window, now_s)

        def fits(arm: str) -> str:
            return not_had(measured.speculations[arm]) if isinstance(measured, Measured) else ""

        decision, memory = judge(case, seen, remembered, fits)
        is_restart = decision.action is PolicyAction.RESTART and decision.outcome is PolicyOutcome.DONE
        if is_restart and (refused := await self._restart(decision.target)):
            decision = replace(decision, outcome=PolicyOutcome.REFUSED, message=f"{decision.message}; {refused}")
            memory = replace(memory, restarts=memory.restarts[:-1])
        due = not 0 <= now_s - remembered.written_s < _MESSAGE_REST_S  # The API server's clock may step back.
        status = steady(policy_status(case, decision, memory, now), case.before, due=due)
        written_s = remembered.written_s if status is case.before else now_s
        window = Window(length_s) if decision.changes else seen.window
        self._memory = Remembered(window, memory.looked_s, dict(memory.ahead_s), written_s)
        if decision.action is not PolicyAction.KEEP and not is_unchanged(case.before, decision):
            self._metrics.count_policy_decision(decision.action, decision.outcome)
            if decision.outcome is PolicyOutcome.DONE:
                message = f"{decision.action} {decision.target}: {decision.message}"
                self._reporter.post_event("PolicyActed", message)
        return status

    async def _restart(self, name: str | None) -> str:
        """Evict an engine's pod; return why that failed, or an empty text."""
        pods = self._reporter.cache.children_of(self._reporter.key, POD.kind)
        pod = next((each for each in pods if each["metadata"]["name"] == name), None)
        if pod is None:
            return "it is gone already"
        try:
            await self._reporter.cluster.evict(pod)
        except ClusterError as error:
            return str(error)
        return ""


def _measured(
    cache: Cache, parent: ParsedDeployment, written: SpecDecodeDeploymentSpec, desired: DesiredState
) -> Measured | NoEvidence:
    """Return the measurement of an object's engines by a capture with arms, or why there is none."""
    return read_measured(
        cache.captures_of(parent.key),
        written.policy.evidence if written.policy else None,
        engine_spec_hash(written, desired.outcome.plan_status),
        written.speculation,
        None if isinstance(parent.spec, InvalidSpecError) else parent.spec.speculation,
    )


def _failure(observation: Observation, policy: Policy) -> tuple[str, str] | None:
    """Return reason and message of a failure for which a policy turns speculation off, or None."""
    wrong = observation.wrong_answers
    loop = observation.crash_loop
    if loop is not None and loop.of_spec and serves_without(policy):
        return CRASH_LOOP, loop.message
    if wrong is not None and wrong.speculates and distrusts(policy):
        return WRONG_ANSWERS, wrong.message
    return None


async def keep_schedules(
    reporter: Reporter,
    parent: ParsedDeployment,
    schedules: Sequence[CaptureSchedule] | None,
    refreshes: Mapping[str, RefreshDecision] | None = None,
) -> list[ScheduleStatus] | None:
    """Create due captures, and delete old captures and trainings; return the status of the schedules.

    Returns None if the schedules cannot be read. The status of a schedule stays the same while its capture cannot be
    created. ``refreshes`` are the decisions about trainings by schedule; `start_trainings` creates trainings.
    """
    refreshes = refreshes or {}
    if not schedules:  # Most objects have no schedules, so their reconciles skip the rest.
        return None if schedules is None else []
    cluster, cache = reporter.cluster, reporter.cache
    observed = ObservedSchedules(
        [each for each in cache.captures_of(parent.key) if is_owned(each, parent.uid)],
        cache.claims_captured_from(parent.key),
        parent.status.captures,
        time_is_sure=cluster.clock.is_known and not cluster.clock.disputed_within(OVER_AGE_FOR.total_seconds()),
        in_use=frozenset(chain.from_iterable(each.in_use for each in refreshes.values())),
    )
    decision = decide_schedules(parent.key, parent.uid, schedules, observed, cluster.clock.now())
    events, statuses = [*decision.events], {each.name: each for each in decision.statuses}
    for due in decision.create:
        event = await _tried(parent, _start(reporter, due))
        if event is not None:
            events.append(event)
        else:
            statuses |= {each.name: each for each in parent.status.captures if each.name == due.schedule}
    claims = [{**body, "kind": PERSISTENT_VOLUME_CLAIM.kind} for body in decision.delete_claims]
    trainings = [_typed(body, training.KIND) for each in refreshes.values() for body in each.delete]
    for body in [*map(_typed, decision.delete_captures), *claims, *trainings]:
        await _tried(parent, cluster.delete(body))
    written = [note for note in decision.notes if await _tried(parent, _write_note(reporter, note))]
    events += [note.event for note in written if note.event]
    for event in [*events, *chain.from_iterable(each.events for each in refreshes.values())]:
        reporter.post_event(event.reason, event.message, warns=event.warns)
    statuses |= {name: statuses[name].model_copy(update={"training": each.status}) for name, each in refreshes.items()}
    return [
        each if each.name in refreshes else each.model_copy(update={"training": None}) for each in statuses.values()
    ]


async def start_trainings(
    reporter: Reporter, parent: ParsedDeployment, seen: ObservedRefresh, refreshes: Mapping[str, RefreshDecision]
) -> None:
    """Create the trainings that the written status reserves."""
    for schedule in parent.schedules or ():
        refresh = refreshes.get(schedule.name)
        running = reserved(refresh.status) if refresh is not None else None
        if schedule.training is None or running is None:
            continue
        body = render_training(schedule, schedule.training, seen, running)
        created = await _tried(parent, reporter.cluster.create(body))
        if created is not None:
            reporter.cache.put_parent(training.KIND, created)
            event = created_event(schedule, running)
            reporter.post_event(event.reason, event.message)


async def _tried(parent: ParsedDeployment, writing: Awaitable[_T]) -> _T | None:
    try:
        return await writing
    except ClusterError as error:
        _logger.warning("%s: spec.captures: %s; will retry", parent.key, error)
        return None


async def _write_note(reporter: Reporter, note: Note) -> bool:
    changed = await reporter.cluster.merge(note.body, {"metadata": {"annotations": {note.annotation: note.text}}})
    kind = note.body["kind"]
    if kind == capture.KIND:
        reporter.cache.put_parent(kind, changed)
    else:
        reporter.cache.put(kind, changed)
    return True


async def _start(reporter: Reporter, due: DueCapture) -> ScheduleEvent:
    """Create a capture unless it exists; return the event to post.

    It is created, not applied, because an apply would take over another owner's object with this name. If a capture
    exists that no watch has reported yet, the request is a conflict, and the next reconcile knows the capture.
    """
    live = reporter.cache.parent(Key(reporter.key.namespace, due.name, capture.KIND))
    if live is not None and not is_owned(live, reporter.uid):
        return due.told_as_taken()
    for body in due.replaces:
        await reporter.cluster.merge(_typed(body), {"spec": {"suspend": True}})
    if live is None:
        reporter.cache.put_parent(capture.KIND, await reporter.cluster.create(due.body))
    return due.told_as_started()


def _typed(body: Body, kind: str = capture.KIND) -> Body:
    """Return the object with its kind, which lists omit."""
    return {**body, "apiVersion": base.API_VERSION, "kind": kind}


def seen_gate(cache: Cache, parent: ParsedDeployment) -> GateState:
    """Return the observed state of a deployment's gate."""
    gate = _gate_of(parent)
    return gate_state(parent.key, parent.uid, gate, _gate_objects(cache, parent.key, gate))


async def keep_gate(reporter: Reporter, parent: ParsedDeployment, desired: DesiredState) -> None:
    """Create and delete the captures of a deployment's gate."""
    gate = _gate_of(parent)
    seen = _gate_objects(reporter.cache, parent.key, gate)
    writes = gate_writes(parent.key, parent.uid, gate, desired, seen)
    try:
        for body in writes.delete:
            await reporter.cluster.delete(_typed(body))
        if writes.create is not None:
            reporter.cache.put_parent(capture.KIND, await reporter.cluster.create(writes.create))
            message = (
                f"capture {writes.create['metadata']['name']} compares the engines of this spec with the golden capture"
            )
            reporter.post_event("GateCaptureStarted", message)
    except ClusterError as error:
        _logger.warning("%s: spec.rollout.gate: %s; will retry", parent.key, error)


def _gate_objects(cache: Cache, key: Key, gate: Gate | None) -> GateObjects:
    captures = cache.captures_of(key)
    if gate is None:
        return GateObjects(captures)
    # A capture of another deployment may have the name of this gate's capture.
    names = {body["metadata"]["name"] for body in captures}
    in_its_place = [
        body
        for other in cache.parents(capture.KIND)
        if other.namespace == key.namespace and other.name not in names and may_be_of_gate(key, other.name)
        if (body := cache.parent(other)) is not None
    ]
    golden = cache.parent(Key(key.namespace, gate.capture, capture.KIND))
    return GateObjects([*captures, *in_its_place], golden)


def _gate_of(parent: ParsedDeployment) -> Gate | None:
    return None if isinstance(parent.spec, InvalidSpecError) else parent.spec.rollout.gate


_MOST_POLLS: Final = 20
"""Maximum number of polls between two reconciles of a settled object, in case an event was missed."""


@dataclass(frozen=True)
class ReconcileInputs:
    """Cached objects that a reconcile used."""

    body: Body | None
    """The object, with the status that the reconcile has written."""
    children: Mapping[Identity, Body]
    runs: Sequence[Body]
    """The captures and the trainings of the object."""
    removals: int
    """`Cache.removals` at the start of the reconcile."""


@dataclass
class Rest:
    """State of a settled object. While the engines report the same, another reconcile changes nothing."""

    facts: Facts
    pods: list[Body]
    readings: Mapping[str, Reading]
    requeue: Requeue
    looks: int = 0


@dataclass
class Record:
    """In-memory state of one object between reconciles. Times are on the monotonic clock."""

    children: EngineChildren
    policy: PolicyKeeper
    decisions: DecisionCache = field(default_factory=DecisionCache)
    written: DecisionCache = field(default_factory=DecisionCache)
    """Decisions for the spec as written, if a policy has chosen another speculation."""
    candidates: DecisionCache = field(default_factory=DecisionCache)
    """Decisions for the speculations that the policy may choose."""
    figures_written_s: float | None = None
    silent_since_s: float | None = None
    """Time at which the last engine stopped answering; None while an engine answers."""
    recent: Recent = NOTHING_RECENT
    decay: Decay = NOTHING_DECAYED
    crashes: CrashHistory = NO_CRASHES
    answers: Answers = field(default_factory=dict)
    figures: KeptFigures = field(default_factory=KeptFigures)
    groups: GroupHistory | None = None
    kept: dict[str, str] | None = None
    """Digests of ConfigMap entries; None before the first reconcile, when only the status contains them."""
    canary: CanaryTrial | None = None
    readings: Mapping[str, Reading] = field(default_factory=dict)
    """Readings of the last scrape of the engines that serve."""
    inputs: ReconcileInputs | None = None
    """Objects used by the running reconcile. None between reconciles, or if another reconcile must follow."""
    last_inputs: ReconcileInputs | None = None
    """Objects used by the last reconcile. None if another reconcile must follow."""
    rest: Rest | None = None
    """None unless the object is settled and its engines repeat their values."""
    is_settled: bool = False
    """Whether the last reconcile left no work until an event arrives or the engines report other values."""
    draft_order: str | None = None
    """Order for engines to load another head; None before the first reconcile."""
    update_progress: tuple[object, float] = (None, 0.0)
    """Progress of an update without a restart, and the time at which it was first seen."""
    last_good: LastGood | None = None
    """Content of the ConfigMap with the last good workload, in case that is deleted."""
    last_good_digests: dict[str, str] = field(default_factory=dict)
    """Digests of that ConfigMap. Computing them at each reconcile would take a millisecond."""
    last_good_due: bool = True
    """Whether a workload may have become ready or failed since the last check."""

    def update_waits_s(self, update: Update | None, now_s: float) -> float:
        """Return the time since the last progress of an update."""
        progress = None if update is None else (update.head.sha256, update.updated, update.waiting)
        if progress is None or self.update_progress[0] != progress:
            self.update_progress = progress, now_s
        return now_s - self.update_progress[1]


_FIGURES_REST_S = 60.0
"""Minimum interval between writes of observed figures."""


class Reconciler:
    """Reconciles deployments for create, update, resume and resync."""

    def __init__(
        self, cluster: Cluster, cache: Cache, probe: EngineProbe, metrics: OperatorMetrics, settings: Settings
    ) -> None:
        self._cluster, self._cache, self._probe, self._metrics = cluster, cache, probe, metrics
        self._settings = settings
        self._figures = FiguresReader(settings.prometheus)
        self._records: dict[Key, Record] = {}
        self._shared: dict[str, SharedConfigMaps] = {}
        """Shared ConfigMaps by namespace."""

    def needs_reconcile(self, key: Key) -> bool:
        """Return whether an object must be reconciled because it, a child, a capture or a training changed."""
        record = self._records.get(key)
        seen, body = record.last_inputs if record else None, self._cache.parent(key)
        if record is None or seen is None or body is None or body != seen.body:
            return True
        if seen.runs != self._cache.runs_of(key) or seen.removals != self._cache.removals(key):
            return True
        return not only_startup_changes(
            key, record.children.with_own_writes(seen.children), self._cache.all_children(key)
        )

    async def look(self, key: Key) -> Requeue | None:
        """Scrape the engines of a settled object; return None if it must be reconciled.

        Busy engines report new values each time, so their objects are always reconciled.
        """
        record = self._records.get(key)
        rest = record.rest if record else None
        if record is None or rest is None or rest.looks >= _MOST_POLLS or self.needs_reconcile(key):
            return None
        rest.looks += 1
        readings = await self._scrape(rest.facts, rest.pods, record.figures.looks)
        have_moved = await self._figures.update(key, record.figures, None, time.monotonic())
        return rest.requeue if readings == rest.readings and not have_moved else None

    async def reconcile(self, key: Key) -> Requeue:
        """Reconcile one SpecDecodeDeployment; return when to requeue it.

        Raises
        ------
        ClusterError
            If a request failed for a cause that the status cannot report; the queue retries.
        """
        body = self._cache.parent(key)
        if body is None or "deletionTimestamp" in body["metadata"]:
            self.forget(key)
            if not self._keys_in(key.namespace):
                await self._shared_in(key.namespace).drop_recorder()
                self._shared.pop(key.namespace, None)
            return Requeue(is_close=False)
        return await self._reconcile(key, body)

    def forget(self, key: Key) -> None:
        """Drop the in-memory state of an object that was deleted, or that another operator serves."""
        self._metrics.set_residual(key, None)
        self._metrics.set_load(key, None)
        self._records.pop(key, None)

    async def _reconcile(self, key: Key, body: Body) -> Requeue:
        offers = self._offers(body)
        parent, refused = self._read(body, offers=offers), ""
        record = self._begin(parent)
        try:
            blocked = await self._keep_what_was_read(parent, record)
            cluster = self._cluster_state(parent)
            desired = record.decisions.decide(parent, cluster)
            if parent.written_spec is not None and (refused := refusal(desired)):
                # The speculation that a policy chose is rejected, so the spec as written applies.
                parent, desired = self.desired_state_of(body)
        except ClusterError:
            raise
        except Exception as error:
            status, failed = parent.status, internal_error(parent, error)
            await self._report(parent, failed, Observation(), policy=status.policy, trained=status.trained_draft)
            raise
        desired = replace(desired, draft_order=self._draft_order(parent, offers))
        await keep_gate(record.children, parent, desired)
        record.last_good_due |= not record.children.is_in_line(parent, desired)
        groups = record.groups or NO_GROUP_HISTORY
        blocked = blocked or await self._write(parent, record.children.carry_out(parent, desired, groups))
        for repair in chain(record.children.repairs.untold(), record.children.shared.repairs.untold()):
            record.children.post_event("DriftRepaired", repair, warns=True)
        observation = await self._observe(parent, desired, cluster.last_good, blocked)
        if observation.silent_s is None:  # An engine that misses a scrape keeps its residual.
            self._metrics.set_residual(key, observed_residual(desired, observation))
        blocked = await self._keep_last_good(parent, desired, observation, cluster.last_good)
        blocked = blocked or await self._keep_verdict(parent, desired, observation, cluster.last_good)
        record.kept = self._kept(parent, desired, cluster.model_facts)
        seen, refreshes = self._refreshes(parent, desired, record.decay, offers)
        schedules = await keep_schedules(record.children, parent, parent.schedules, refreshes)
        observation = replace(observation, blocked=blocked or observation.blocked)
        policy = await record.policy.keep(parent, desired, observation, partial(self._not_had, parent), refused)
        update = None if parent.by_policy else update_state(offers, desired, observation)
        rollouts = Rollouts(
            desired,
            observation,
            partial(self._head_refused, body, record),
            parent.by_policy,
            update,
            record.update_waits_s(update, time.monotonic()),
        )
        trained = choose(offers, rollouts, parent.status.trained_draft, self._cluster.clock.now())
        record.draft_order = draft_order(update, desired, trained)
        if record.draft_order != desired.draft_order:
            ordered, record.inputs = replace(desired, draft_order=record.draft_order), None
            await self._write(parent, record.children.carry_out(parent, ordered, groups))
        exists = await self._report(parent, desired, observation, schedules, policy=policy, trained=trained)
        if exists and seen is not None:
            await start_trainings(record.children, parent, seen, refreshes)
        requeue = requeue_for(parent, desired, observation, schedules or ())
        return self._conclude(parent, desired, observation, requeue, body, has_offers=offers is not None)

    def _conclude(  # noqa: PLR0913  the results of a reconcile
        self,
        parent: ParsedDeployment,
        desired: DesiredState,
        observation: Observation,
        requeue: Requeue,
        body: Body,
        *,
        has_offers: bool,
    ) -> Requeue:
        """Return when to reconcile ``body`` again.

        Record the objects that this reconcile used and whether the object is settled. If the engines repeated their
        readings, keep them for later comparison.
        """
        record, now, outcome = self._record(parent), self._cache.parent(parent.key), desired.outcome
        requeue = replace(requeue, is_due=now is not None and needs_another(body, now))
        is_done = record.children.is_done and not observation.blocked and not requeue.is_due
        record.last_inputs, record.inputs = record.inputs if is_done else None, None
        if now is None or requeue.is_due or has_offers or not requeue.follows_engines:
            return requeue
        # The load that an autoscaler follows is exported by each process.
        record.is_settled = record.children.is_in_line(parent, desired) and wanted_autoscaler(parent) is None
        is_steady = observation.repeats and observation.figures_due and same_status_apart_from_figures(body, now)
        if record.is_settled and is_steady and isinstance(outcome, Launch):
            record.rest = Rest(outcome.facts, serving_pods(observation.pods), observation.readings, requeue)
        return requeue

    def settled(self) -> list[Key]:
        """Return the objects that the last reconcile has settled."""
        return [key for key, record in self._records.items() if record.is_settled]

    def _draft_order(self, parent: ParsedDeployment, offers: Offers | None) -> str:
        """Return the order to load another head, from the last reconcile; its successor follows from the engines."""
        record = self._record(parent)
        if offers is None or offers.start is None or parent.by_policy:
            return ""
        if record.draft_order is None:  # The operator has restarted.
            name = (CONFIG_MAP.kind, plan_name(parent.key.name))
            record.draft_order = str(mapping(record.children.owned().get(name) or {}, "data").get(DRAFT_ENTRY) or "")
        return record.draft_order

    def _offers(self, body: Body) -> Offers | None:
        """Return the trained heads for a deployment; None if it does not ask for them."""
        key = Key(body["metadata"]["namespace"], body["metadata"]["name"])
        return offers_of(body, self._cache.trainings_of(key))

    def _refreshes(
        self, parent: ParsedDeployment, desired: DesiredState, decay: Decay, offers: Offers | None
    ) -> tuple[ObservedRefresh | None, dict[str, RefreshDecision]]:
        """Return the decisions about trainings by schedule, and what they are based on; None if no schedule trains."""
        trains = [(each, each.training) for each in parent.schedules or () if each.training is not None]
        if not trains:  # As in most objects.
            return None, {}
        key, written = parent.key, parent.written_spec or parent.spec
        heads = [offers.present, *offers.heads[:1]] if offers is not None else []
        seen = ObservedRefresh(
            key,
            parent.uid,
            captures=[each for each in self._cache.captures_of(key) if is_owned(each, parent.uid)],
            trainings=self._cache.trainings_of(key),
            training=lambda name: self._cache.parent(Key(key.namespace, name, training.KIND)),
            capture=lambda name: self._cache.parent(Key(key.namespace, name, capture.KIND)),
            source=captured_deployment(key.name, ObservedDeployment(key, parent.uid, parent.generation, desired)),
            decay=decay,
            speculation=None if isinstance(written, InvalidSpecError) else written.speculation,
            engine=engine_spec_hash_of(parent),
            served=frozenset(each.training for each in heads if each is not None),
        )
        before = {each.name: each.training for each in parent.status.captures}
        now = self._cluster.clock.now()
        return seen, {
            each.name: decide_refresh(each, scheduled, seen, before.get(each.name), now) for each, scheduled in trains
        }

    def in_force(self, body: Body) -> Body:
        """Return a deployment with the trained head that replaces its draft, if one does."""
        offers = self._offers(body)
        return body if offers is None or offers.present is None else offers.present.applied_to(body)

    def _head_refused(self, body: Body, record: Record, head: OfferedHead) -> str:
        """Return why a trained head cannot be planned; an empty text if it can."""
        parent = self._read(body, as_written=True, offers=Offers(body, present=head))
        return refusal(record.candidates.decide(parent, self._cluster_state(parent)))

    def _not_had(self, parent: ParsedDeployment, speculation: Speculation) -> str:
        """Return why a speculation cannot replace the one in force; an empty text if it can."""
        changed = with_speculation(parent, speculation)
        if isinstance(changed, str):
            return changed
        desired = self._record(parent).candidates.decide(changed, self._cluster_state(parent))
        return why_not_plannable(desired, parent.status.plan)

    def desired_state_of(self, body: Body) -> tuple[ParsedDeployment, DesiredState]:
        """Return an object without the choice of a policy, and its desired state, for a capture."""
        offers = self._offers(body)
        parent = self._read(body, as_written=True, offers=offers)
        record = self._record(parent)
        decisions = record.written if parent.status.policy else record.decisions
        return parent, decisions.decide(parent, self._cluster_state(parent))

    def decider_of_arms(self, namespace: str) -> Callable[[Body, DecisionCache], DesiredState]:
        """Return a function that decides on the specs of a capture's arms, for objects of a namespace.

        It takes a separate cache, because these decisions would evict the object's own. A model that is missing in the
        object's downloads may have been downloaded for another object.
        """
        downloads: dict[str, str] = {}
        for key in self._keys_in(namespace):
            name = downloads_name(key)
            for each in self._cache.children_of(key, CONFIG_MAP.kind):
                if each["metadata"]["name"] == name:
                    # Parse only the digests of the other object, because its size is not limited.
                    proofs = proofs_in(self._cache.parent(key) or {})
                    downloads |= read_downloads({"data": believed(name, each.get("data") or {}, proofs)})

        def decide(body: Body, decisions: DecisionCache) -> DesiredState:
            parent = self._read(body, as_written=True)
            cluster = self._cluster_state(parent)
            # Its own downloads take precedence: another object may have a later commit than the engines that serve.
            return decisions.decide(parent, replace(cluster, downloads={**downloads, **cluster.downloads}))

        return decide

    def _record(self, parent: ParsedDeployment) -> Record:
        """Return the record of the object with this UID, not of an earlier object with this name."""
        record = self._records.get(parent.key)
        if record is None or record.children.uid != parent.uid:
            shared = self._shared_in(parent.key.namespace)
            children = EngineChildren(shared, parent.key, parent.uid, self._settings.signing_key)
            record = self._records[parent.key] = Record(children, PolicyKeeper(children, self._metrics))
        return record

    def _shared_in(self, namespace: str) -> SharedConfigMaps:
        if namespace not in self._shared:
            self._shared[namespace] = SharedConfigMaps(self._cluster, self._cache, namespace)
        return self._shared[namespace]

    def _begin(self, parent: ParsedDeployment) -> Record:
        """Return the record of an object that is reconciled now."""
        record, cache, key = self._record(parent), self._cache, parent.key
        record.is_settled, record.rest, record.last_inputs = False, None, None
        record.inputs = ReconcileInputs(
            cache.parent(key), cache.all_children(key), cache.runs_of(key), cache.removals(key)
        )
        return record

    def _read(self, body: Body, *, as_written: bool = False, offers: Offers | None = None) -> ParsedDeployment:
        """Parse an object; its engines are scaled to zero while a capture holds their GPUs.

        ``offers`` has the trained head that replaces its draft, if one does.
        """
        head = offers.loaded if offers else None
        key = Key(body["metadata"]["namespace"], body["metadata"]["name"])
        preempted_by = preempting_capture(self._cache.captures_of(key))
        now = self._cluster.clock.now()
        applied = body if head is None else head.applied_to(body)
        parent = parse_deployment(applied, preempted_by=preempted_by, as_written=as_written, now=now)
        if head is None:
            return parent
        in_place = offers.present if offers and offers.present != head else None
        return replace(
            parent,
            trained_draft=head.sha256,
            draft_in_place=in_place.sha256 if in_place else None,
            object_spec=body["spec"],
        )

    def _cluster_state(self, parent: ParsedDeployment) -> ClusterState:
        """Return the inputs of a decision; ConfigMap entries that the operator did not write are ignored."""
        settings, spec = self._settings, parent.spec
        return ClusterState(
            nodes=self._cache.nodes(),
            nodes_from=settings.nodes_from,
            model_facts=self._model_facts(parent),
            site_facts={} if isinstance(spec, InvalidSpecError) else site_facts_of(spec, settings.facts.known),
            model_pods=self._model_pods(parent),
            downloads=read_downloads(self._believed(parent, downloads_name(parent.key))),
            last_good=self._record(parent).last_good
            or read_last_good(self._believed(parent, last_good_name(parent.key))),
            gate=seen_gate(self._cache, parent),
            calibration=settings.calibration.read(),
            host_paths=settings.host_paths,
            pod_template=settings.pod_template,
            has_leader_worker_sets=LEADER_WORKER_SET.kind in self._cache.optional_kinds,
            has_resource_claims=RESOURCE_CLAIM_TEMPLATE.kind in self._cache.optional_kinds,
            devices=self._cache.devices,
            live_token_ids=settings.token_ids_allowed(parent.key.namespace),
            operator_image=settings.operator_image,
        )

    def _keys_in(self, namespace: str) -> list[Key]:
        return [key for key in self._cache.parents(deployment.KIND) if key.namespace == namespace]

    def _neighbours(self, parent: ParsedDeployment) -> list[Key]:
        return [key for key in self._keys_in(parent.key.namespace) if key != parent.key]

    def _model_pods(self, parent: ParsedDeployment) -> list[Body]:
        return [pod for pod in self._cache.children_of(parent.key, POD.kind) if is_model_pod(pod)]

    def _proofs(self, parent: ParsedDeployment) -> Mapping[str, str]:
        """Return the digests of the entries that the operator wrote to ConfigMaps of an object."""
        kept = self._record(parent).kept
        return own_proofs(parent.status.kept) if kept is None else kept

    def _believed(self, parent: ParsedDeployment, name: str) -> Body:
        """Return a ConfigMap of an object without entries that the operator did not write."""
        body = self._record(parent).children.owned().get((CONFIG_MAP.kind, name)) or {}
        return {**body, "data": believed(name, body.get("data") or {}, self._proofs(parent))}

    def _model_facts(self, parent: ParsedDeployment) -> dict[str, str]:
        """Return the facts about an object's models that objects of its namespace have read."""
        entries = self._cache.model_facts(parent.key.namespace)
        if isinstance(parent.spec, InvalidSpecError) or not entries:
            return {}
        neighbours = (proofs_in(self._cache.parent(key) or {}) for key in self._neighbours(parent))
        return believed_entries(parent.spec, entries, chain([self._proofs(parent)], neighbours))

    def _kept(self, parent: ParsedDeployment, desired: DesiredState, model_facts: Mapping[str, str]) -> dict[str, str]:
        """Return the digests of all ConfigMap entries that will be read again."""
        if isinstance(parent.spec, InvalidSpecError):
            return dict(self._proofs(parent))
        name, record = downloads_name(parent.key), self._record(parent)
        if record.children.is_in_line(parent, desired):  # Unchanged
            downloads = {entry: each for entry, each in self._proofs(parent).items() if entry.startswith(f"{name}/")}
        else:
            rendered = (child for child in desired.children if identity(child) == (CONFIG_MAP.kind, name))
            downloads = digests(name, next(rendered, self._believed(parent, name))["data"])
        return {**digests(MODEL_FACTS_NAME, model_facts), **downloads, **record.last_good_digests}

    async def _keep_what_was_read(self, parent: ParsedDeployment, record: Record) -> Readiness | None:
        """Store the facts that pods have read, before their Jobs are deleted; return what blocks this, or None."""
        readers = self._model_pods(parent)
        entries = newly_read_models(parent, self._model_facts(parent), readers) if readers else {}
        if not entries:
            return None
        record.kept = {**self._proofs(parent), **digests(MODEL_FACTS_NAME, entries)}
        return await self._write(parent, record.children.shared.add_model_facts(entries))

    async def _keep_last_good(
        self, parent: ParsedDeployment, desired: DesiredState, observation: Observation, before: LastGood | None
    ) -> Readiness | None:
        """Store the workload that served last, and the failed attempt; return what blocks this, or None.

        After a failure, the event of the ConfigMap triggers the next reconcile, which rolls back.
        """
        record = self._record(parent)
        if not record.last_good_due:
            return None
        blocked = await self._store(parent, before, update_last_good(desired, observation, before))
        record.last_good_due = blocked is not None
        return blocked

    async def _keep_verdict(
        self, parent: ParsedDeployment, desired: DesiredState, observation: Observation, before: LastGood | None
    ) -> Readiness | None:
        """Store the verdict on a canary, and report it; return what blocks this, or None."""
        outcome, decision = desired.outcome, observation.canary
        if before is None or decision is None or not isinstance(outcome, InCanary):
            return None
        now = after_canary(before, decision, outcome.promoted, outcome.attempt)
        return None if now == before else await self._store(parent, before, now)

    async def _store(self, parent: ParsedDeployment, before: LastGood | None, now: LastGood | None) -> Readiness | None:
        """Write the ConfigMap with the last good workload if it changed; return what blocks this, or None."""
        record, blocked, render = self._record(parent), None, partial(render_last_good, parent.key, parent.uid)
        if now == record.last_good:
            return None
        body = None if now is None else render(now)
        if now is not None and body is not None and now != before:
            if self._needs_another_after_storing(parent, before, now):
                record.inputs = None
            blocked = await self._write(parent, record.children.apply([body], parent.kept_managers))
        if blocked:
            now, body = before, None if before is None else render(before)
        record.last_good = now
        record.last_good_digests = digests(last_good_name(parent.key), body["data"] if body else {})
        return blocked

    def _needs_another_after_storing(self, parent: ParsedDeployment, before: LastGood | None, now: LastGood) -> bool:
        """Return whether storing the last good workload may change children or conditions in the next reconcile."""
        is_judged = isinstance(parent.spec, InvalidSpecError) or (
            parent.spec.rollout.gate is not None or parent.spec.rollout.strategy is RolloutStrategy.CANARY
        )
        # The next reconcile attests that the engines serve.
        is_attested = self._settings.signing_key is not None
        return is_judged or is_attested or replace(now, packed=b"") != replace(before or LastGood(b""), packed=b"")

    async def _write(self, parent: ParsedDeployment, writing: Awaitable[object]) -> Readiness | None:
        """Write to the cluster; return what blocks this, or None."""
        hint = "; spec.podTemplate is merged into it, and the engine's container there is called engine"
        return await what_blocks(
            writing,
            hint=hint if parent.raw_spec.get("podTemplate") else "",
            status_is_current=parent.status.observed_generation == parent.generation,
        )

    def _inputs_if_unchanged(self, record: Record, key: Key) -> ReconcileInputs | None:
        """Return the inputs with the current children; None if another writer has changed a child since the start."""
        begun, now = record.inputs, self._cache.all_children(key)
        if begun is None or not only_startup_changes(key, record.children.with_own_writes(begun.children), now):
            return None
        return replace(begun, children=now)

    async def _observe(
        self, parent: ParsedDeployment, desired: DesiredState, last_good: LastGood | None, blocked: Readiness | None
    ) -> Observation:
        """Observe workload and pods, and scrape the engines."""
        record, now_s, key = self._record(parent), time.monotonic(), parent.key
        record.inputs = self._inputs_if_unchanged(record, key)
        workload, replaced = record.children.workloads(desired if blocked is None else None)
        pods = current_pods(record.children.engine_pods(), workload)
        launch = desired.outcome if isinstance(desired.outcome, Launch) else None
        facts = launch.facts if launch else None
        record.figures = record.figures if facts else KeptFigures()
        readings: Mapping[str, Reading] = {}
        if blocked is None and facts is not None:
            readings = await self._scrape(facts, serving_pods(pods), record.figures.looks)
        repeats, record.readings = bool(readings) and readings == record.readings, readings
        unanswered = bool(readings) and all(isinstance(reading, Unreachable) for reading in readings.values())
        record.silent_since_s = (record.silent_since_s or now_s) if unanswered else None
        record.recent = update_recent(record.recent, readings, now_s)
        measured = partial(newest_measured, self._cache.captures_of(key), parent.spec, desired.outcome.plan_status)
        break_even = partial(planned_break_even, launch.facts, launch.plan) if launch else lambda: None
        record.decay = update_decay(record.decay, record.recent, facts, measured, break_even)
        unix_s, steady_s = self._cluster.clock.now().timestamp(), self._cluster.clock.steady_s()
        engines = self._engines(parent, None if blocked else launch, workload, last_good)
        record.crashes = update_crashes(record.crashes, engines, steady_s)
        record.answers = update_answers(record.answers, {each["metadata"]["name"] for each in pods}, readings)
        if facts is not None:
            await self._figures.update(key, record.figures, parent.status.figures, now_s)
        observation = Observation(
            workload,
            pods,
            readings,
            repeats=repeats and not unanswered,
            canary=await self._observe_canary(desired.outcome, record, pods, now_s) if blocked is None else None,
            recent=record.recent,
            decay=record.decay,
            crash_loop=crash_loop(record.crashes, engines, steady_s),
            wrong_answers=wrong_answers(facts, record.answers),
            answers=record.answers,
            figures=record.figures.shown,
            figures_due=record.figures_written_s is None or now_s - record.figures_written_s >= _FIGURES_REST_S,
            silent_s=None if record.silent_since_s is None else now_s - record.silent_since_s,
            lending=self._lending(parent),
            claim_users=self._claim_users(parent),
            replaced_workload=replaced,
            blocked=blocked,
            route=record.children.beside(HTTP_ROUTE),
            pool=record.children.beside(INFERENCE_POOL),
            autoscaler=record.children.beside(*AUTOSCALERS),
            blocked_beside=record.children.blocked_beside,
            load=self._load(parent, desired, record.recent, readings),
            contested=(
                *record.children.repairs.contested(now_s),
                *record.children.shared.repairs.contested(now_s),
            ),
        )
        record.groups = update_group_history(record.groups, desired, observation, last_good, unix_s)
        return replace(observation, groups=record.groups)

    def _load(
        self, parent: ParsedDeployment, desired: DesiredState, recent: Recent, readings: Mapping[str, Reading]
    ) -> ReplicaLoad | None:
        """Return the load that an autoscaler with PredictedUtilization follows, and export it."""
        written, autoscaling, load = parent.written_spec or parent.spec, wanted_autoscaler(parent), None
        predicts = autoscaling is not None and autoscaling.metric is AutoscalingMetric.PREDICTED_UTILIZATION
        if predicts and not isinstance(written, InvalidSpecError):
            acceptance = recent.last.acceptance(ENOUGH_DRAFTED_TOKENS) if recent.last else None
            load = replica_load(_measured(self._cache, parent, written, desired), acceptance, readings)
        self._metrics.set_load(parent.key, load)
        return load

    def _engines(
        self, parent: ParsedDeployment, launch: Launch | None, live: Body | None, last_good: LastGood | None
    ) -> list[Engines]:
        """Return the engines that serve: those of the live workload, and of the last good one during a rollout."""
        pods = self._record(parent).children.engine_pods()
        current = current_pods(pods, live)
        found = []
        if live is not None:
            speculate = speculates(live) if launch is None else launch.facts.method is not Method.NONE
            spec = None if launch is None else engine_spec_hash_of(parent)
            found.append(Engines(current, serving_hash(live), spec, speculate))
        if launch is not None and last_good is not None and len(current) < len(pods):
            earlier = last_good.workload
            if live is None or serving_hash(earlier) != serving_hash(live):
                found.append(Engines(current_pods(pods, earlier), serving_hash(earlier), None, speculates(earlier)))
        return found

    async def _observe_canary(
        self, outcome: Outcome, record: Record, earlier: list[Body], now_s: float
    ) -> CanaryDecision | None:
        """Scrape both pools, add to their comparison, and judge the canary; ``earlier`` are pods of the other pool."""
        live = record.children.canary()
        if not isinstance(outcome, InCanary) or outcome.waits is not None or live is None:
            record.canary = None
            return None
        facts, canary = outcome.facts, canary_settings(outcome.facts.spec)
        trial = record.canary = CanaryTrial.of(live, record.canary)
        pods = current_pods(record.children.engine_pods(), live)
        readings = await self._scrape(facts, [*earlier, *pods])
        counters, new = served(readings), {pod["metadata"]["name"] for pod in pods}
        rollout = read_rollout(live, pods, canary.replicas)
        if trial.since_s is None and rollout.available:
            trial.since_s = now_s
        trial.comparison.observe(
            {name: each for name, each in counters.items() if name not in new},
            {name: each for name, each in counters.items() if name in new},
            now_s,
        )
        wrong = wrong_answers(
            facts, update_answers({}, new, {name: each for name, each in readings.items() if name in new})
        )
        return judge_canary(canary, trial, rollout, now_s, None if wrong is None else wrong.message)

    async def _scrape(self, facts: Facts, pods: list[Body], looks: SampleBuffer | None = None) -> Mapping[str, Reading]:
        """Return a reading of each ready engine; ``looks`` gets samples for figures."""
        serving = facts.spec.serving
        tls = serving.tls_secret is not None
        return await self._probe.read_all(pods, serving.port, facts.profile, looks, tls=tls)

    def _lending(self, parent: ParsedDeployment) -> Lending | None:
        """Return the capture that holds the GPUs of an object's engines, and when it should return them."""
        if parent.suspended_for is None:
            return None
        key = Key(parent.key.namespace, parent.suspended_for, capture.KIND)
        body = self._cache.parent(key)
        if body is None:
            return None
        jobs = (job for job in self._cache.children_of(key, JOB.kind) if is_owned(job, body["metadata"]["uid"]))
        pods = self._cache.children_of(key, POD.kind)
        return lending_to(body, next(jobs, None), pods, lent_since(parent.status.conditions))

    def _claim_users(self, parent: ParsedDeployment) -> tuple[str, ...]:
        """Return the objects that share a claim with models, if a pod of this object waits for such a claim."""
        if not any(map(waits_for_claim, self._cache.children_of(parent.key, POD.kind))):
            return ()
        claims, others = claims_named(parent.raw_spec), self._neighbours(parent)
        found = {key.name for key in others if claims & claims_named((self._cache.parent(key) or {}).get("spec"))}
        return tuple(sorted(found))

    async def _report(  # noqa: PLR0913  the status combines these inputs
        self,
        parent: ParsedDeployment,
        desired: DesiredState,
        observation: Observation,
        schedules: Sequence[ScheduleStatus] | None = None,
        *,
        policy: PolicyStatus | None = None,
        trained: TrainedDraftStatus | None = None,
    ) -> bool:
        """Write the status if it changed, and post Events; return whether the object exists."""
        record = self._record(parent)
        children = record.children
        now = self._cluster.clock.now()
        status = compose_status(parent, desired, observation, now, schedules, policy=policy, trained_draft=trained)
        proofs = {**self._proofs(parent), **children.proofs()}
        status = status.model_copy(update={"kept": kept_entries(proofs)})
        if status == parent.status and not parent.times_ahead:
            return True
        if not await children.write_status(status):
            self.forget(parent.key)
            return False
        if record.inputs is not None:
            record.inputs = replace(record.inputs, body=self._cache.parent(parent.key))
        if status.observed != parent.status.observed:
            record.figures_written_s = time.monotonic()
        children.post_times_ahead(parent.times_ahead)
        if change := plan_change(parent.status.plan, status.plan):
            children.post_event("PlanChanged", change)
        children.post_changes(parent.status.conditions, status.conditions)
        if is_news(parent.status.trained_draft, trained):
            told = f"{trained.reason}: {trained.message}" if trained else "spec.speculation.trainedDrafts is not true"
            children.post_event("TrainedDraftChanged", told, warns=trained is not None and not trained.training)
        return True
