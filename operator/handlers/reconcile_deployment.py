"""Reconcile one SpecDecodeDeployment: read, decide, write, observe, report.

`Record` holds the in-memory state of one object between reconciles. It is lost when the process ends.
"""

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain

from specdecode_operator.api import capture, deployment
from specdecode_operator.api.base import Body
from specdecode_operator.api.deployment import Key, PolicyStatus, ScheduleStatus
from specdecode_operator.api.speculation import Speculation
from specdecode_operator.attestation.keys import SigningKey
from specdecode_operator.capture.borrowing import lending_to
from specdecode_operator.capture.gpu_sharing import preempting_capture
from specdecode_operator.cluster.cache import Cache
from specdecode_operator.cluster.client import Cluster, ClusterError
from specdecode_operator.cluster.clock import ServerTime
from specdecode_operator.cluster.drift import identity, is_owned
from specdecode_operator.cluster.engine_probe import EngineProbe
from specdecode_operator.cluster.nodes import NodesFrom
from specdecode_operator.cluster.observed_figures import FiguresReader, KeptFigures
from specdecode_operator.cluster.resources import CONFIG_MAP, JOB, MODEL_FACTS_NAME, POD
from specdecode_operator.deployment.decision import internal_error, newly_read_models
from specdecode_operator.deployment.desired_state import ClusterState, DesiredState, Launch
from specdecode_operator.deployment.models.model_facts import SiteFacts, believed_entries, site_facts_of
from specdecode_operator.deployment.models.model_jobs import downloads_name, is_model_pod, read_downloads
from specdecode_operator.deployment.models.model_locations import ModelSource, claims_named
from specdecode_operator.deployment.observed.decay import NOTHING_DECAYED, Decay, newest_measured, update_decay
from specdecode_operator.deployment.observed.observation import (
    Observation,
    observed_residual,
    update_group_history,
    update_last_good,
)
from specdecode_operator.deployment.parsed_deployment import ParsedDeployment, parse_deployment
from specdecode_operator.deployment.planning import plan_change
from specdecode_operator.deployment.pod_security import NONE_ALLOWED
from specdecode_operator.deployment.policy_state import refusal, why_not_plannable, with_speculation
from specdecode_operator.deployment.requeue import Requeue, requeue_for
from specdecode_operator.deployment.rollout.blocked_pods import waits_for_claim
from specdecode_operator.deployment.rollout.engine_workload import serving_pods
from specdecode_operator.deployment.rollout.readiness import Lending, Readiness, lent_since
from specdecode_operator.deployment.rollout.rollback import LastGood, last_good_name, read_last_good, render_last_good
from specdecode_operator.deployment.rollout.rollout_progress import NO_GROUP_HISTORY, GroupHistory, current_pods
from specdecode_operator.deployment.status import compose_status
from specdecode_operator.deployment.tamper_check import believed, digests, kept_entries, own_proofs, proofs_in
from specdecode_operator.handlers.apply_children import Launcher, what_blocks
from specdecode_operator.handlers.decision_cache import DecisionCache
from specdecode_operator.handlers.metrics import PolicyDecisions, ResidualCollector
from specdecode_operator.handlers.mounted_files import CalibrationFile, FactsFolder
from specdecode_operator.handlers.scheduled_captures import ScheduleKeeper
from specdecode_operator.handlers.speculation_policy import PolicyKeeper
from specdecode_operator.handlers.status_writer import Reporter
from specdecode_operator.problems import InvalidSpecError
from specdecode_operator.stats.engine_window import NOTHING_RECENT, Recent, update_recent
from specdecode_operator.vllm.engine_metrics import Reading, Unreachable


@dataclass
class Record:
    """What the operator remembers of one object from one look to the next; it is lost with the process."""

    uid: str
    decisions: DecisionCache = field(default_factory=DecisionCache)
    written: DecisionCache = field(default_factory=DecisionCache)
    """Those for the spec as it is written, where a policy has put another speculation in force."""

    candidates: DecisionCache = field(default_factory=DecisionCache)
    """Those for what its policy would put in force."""

    figures_written_s: float | None = None
    """When the status got its observed figures, on the monotonic clock."""

    silent_since_s: float | None = None
    """When no engine answered any more, on the monotonic clock; None where one does."""

    recent: Recent = NOTHING_RECENT
    decay: Decay = NOTHING_DECAYED
    figures: KeptFigures = field(default_factory=KeptFigures)
    groups: GroupHistory | None = None

    kept: dict[str, str] | None = None
    """Digests of what is kept in ConfigMaps; None before the first look, when only the status knows them."""

    last_good: LastGood | None = None
    """What is kept of earlier engines, should somebody take its ConfigMap away."""

    last_good_digests: dict[str, str] = field(default_factory=dict)
    """Those of its entries: to write it as text takes a millisecond, at every look at every object."""

    last_good_due: bool = True
    """Whether another workload may serve, or fail, since it was last looked at for that."""


_FIGURES_REST_S = 60.0
"""Observed figures are written at most this often."""


class Reconciler:
    """One reconcile for create, update, resume and resync."""

    def __init__(  # noqa: PLR0913  what one process has one of
        self,
        cluster: Cluster,
        cache: Cache,
        probe: EngineProbe,
        residuals: ResidualCollector,
        calibration: CalibrationFile,
        *,
        facts: FactsFolder | None = None,
        policy_decisions: PolicyDecisions | None = None,
        clock: ServerTime | None = None,
        host_paths: tuple[str, ...] = (),
        pod_template: frozenset[str] = NONE_ALLOWED,
        operator_image: str | None = None,
        figures: FiguresReader | None = None,
        nodes_from: NodesFrom = NodesFrom.CLUSTER,
        signing_key: SigningKey | None = None,
    ) -> None:
        self._figures = figures or FiguresReader()
        self._clock = clock or ServerTime()
        self._cache = cache
        self._probe = probe
        self._residuals = residuals
        self._calibration = calibration
        self._facts = facts or FactsFolder()
        self._launcher = Launcher(cluster, cache, self._clock, signing_key)
        self._reporter = Reporter(cluster, cache, self._clock)
        self._schedules = ScheduleKeeper(cluster, cache, self._reporter, self._clock)
        self._policies = PolicyKeeper(
            cluster, cache, self._reporter, policy_decisions or PolicyDecisions(), self._clock.now
        )
        self._host_paths, self._pod_template = host_paths, pod_template
        self._operator_image, self._nodes_from = operator_image, nodes_from
        self._records: dict[Key, Record] = {}

    async def reconcile(self, key: Key) -> Requeue:
        """Bring one SpecDecodeDeployment and its children in line; return when it is to be looked at again.

        Raises
        ------
        ClusterError
            When the status cannot say what blocks it; the queue tries again.
        """
        body = self._cache.parent(key)
        if body is None or "deletionTimestamp" in body["metadata"]:
            self._forget(key)
            return Requeue(is_close=False)
        parent, refused = self._read(body), ""
        try:
            blocked = await self._keep_what_was_read(parent)
            cluster = self._cluster_state(parent)
            desired = self._record(parent).decisions.decide(parent, cluster)
            if parent.written_spec is not None and (refused := refusal(desired)):
                # What a policy put in force: the spec as it is written serves in its place.
                parent, desired = self.desired_state_of(body)
        except ClusterError:
            raise
        except Exception as error:
            await self._report(parent, internal_error(parent, error), Observation(), policy=parent.status.policy)
            raise
        await self._schedules.gates.keep(parent, desired)
        groups = self._record(parent).groups or NO_GROUP_HISTORY
        self._record(parent).last_good_due |= not self._launcher.is_in_line(parent, desired)
        blocked = blocked or await self._write(parent, self._launcher.carry_out(parent, desired, groups))
        for repair in self._launcher.repairs(parent).untold():
            await self._reporter.post_event(parent.key, parent.uid, "DriftRepaired", repair, warns=True)
        observation = await self._observe(parent, desired, cluster.last_good, blocked)
        if observation.silent_s is None:  # an engine that misses a question holds what it held
            self._residuals.set(key, observed_residual(desired, observation))
        blocked = await self._keep_last_good(parent, desired, observation, cluster.last_good)
        self._record(parent).kept = self._kept(parent, desired, cluster.model_facts)
        kept = await self._schedules.keep(parent, parent.schedules)
        observation = replace(observation, blocked=blocked or observation.blocked)
        policy = await self._policies.keep(parent, desired, observation, partial(self._not_had, parent), refused)
        await self._report(parent, desired, observation, kept, policy)
        return requeue_for(parent, desired, observation, kept or ())

    def _not_had(self, parent: ParsedDeployment, speculation: Speculation) -> str:
        """Return why a speculation cannot take the place of the one in force; an empty text where it can."""
        changed = with_speculation(parent, speculation)
        if isinstance(changed, str):
            return changed
        desired = self._record(parent).candidates.decide(changed, self._cluster_state(parent))
        return why_not_plannable(desired, parent.status.plan)

    def desired_state_of(self, body: Body) -> tuple[ParsedDeployment, DesiredState]:
        """Return an object as it is written and what should exist for it now, for a capture of it."""
        parent = self._read(body, as_written=True)
        record = self._record(parent)
        decisions = record.written if parent.status.policy else record.decisions
        return parent, decisions.decide(parent, self._cluster_state(parent))

    def decider_of_arms(self, namespace: str) -> Callable[[Body, DecisionCache], DesiredState]:
        """Return what decides on specs that nobody wrote, of objects of a namespace, for a capture's arms.

        It is given a cache, for decisions on them would push out the object's own. Models that its own cache lacks may
        be there for others.
        """
        downloads = self._downloads_in(namespace)

        def decide(body: Body, decisions: DecisionCache) -> DesiredState:
            parent = self._read(body, as_written=True)
            cluster = self._cluster_state(parent)
            # Its own first: arms are compared with what is served, though others downloaded a later commit.
            return decisions.decide(parent, replace(cluster, downloads={**downloads, **cluster.downloads}))

        return decide

    def _record(self, parent: ParsedDeployment) -> Record:
        """Return what is remembered of an object; nothing of an earlier one of its name."""
        record = self._records.get(parent.key)
        if record is None or record.uid != parent.uid:
            record = self._records[parent.key] = Record(parent.uid)
        return record

    def _read(self, body: Body, *, as_written: bool = False) -> ParsedDeployment:
        """Parse an object; it wants no engines while a capture has their GPUs."""
        key = Key(body["metadata"]["namespace"], body["metadata"]["name"])
        preempted_by = preempting_capture(self._cache.captures_of(key))
        return parse_deployment(body, preempted_by=preempted_by, as_written=as_written, now=self._clock.now())

    def _cluster_state(self, parent: ParsedDeployment) -> ClusterState:
        """Return what a decision for an object depends on; of what lies in ConfigMaps only what the operator wrote."""
        return ClusterState(
            nodes=self._cache.nodes(),
            nodes_from=self._nodes_from,
            model_facts=self._model_facts(parent),
            site_facts=self._site_facts(parent),
            model_pods=self._model_pods(parent),
            downloads=read_downloads(self._believed(parent, downloads_name(parent.key))),
            last_good=self._record(parent).last_good
            or read_last_good(self._believed(parent, last_good_name(parent.key))),
            gate=self._schedules.gates.state(parent),
            calibration=self._calibration.read(),
            host_paths=self._host_paths,
            pod_template=self._pod_template,
            has_leader_worker_sets=self._cache.has_groups,
            operator_image=self._operator_image,
        )

    def _downloads_in(self, namespace: str) -> dict[str, str]:
        """Return what was downloaded for any object of a namespace, which goes by claim, too."""
        found: dict[str, str] = {}
        for key in self._cache.parents(deployment.KIND):
            body = self._cache.parent(key)
            if body is None or key.namespace != namespace:
                continue
            name = downloads_name(key)
            for each in self._cache.children_of(key, CONFIG_MAP.kind):
                if each["metadata"]["name"] == name:
                    # Of a neighbour nothing else is looked at: it may be as large as it likes.
                    found |= read_downloads({"data": believed(name, each.get("data") or {}, proofs_in(body))})
        return found

    def _proofs(self, parent: ParsedDeployment) -> Mapping[str, str]:
        """Return the digests of what the operator keeps in ConfigMaps for an object."""
        kept = self._record(parent).kept
        return own_proofs(parent.status.kept) if kept is None else kept

    def _believed(self, parent: ParsedDeployment, name: str) -> Body:
        """Return a ConfigMap of an object as far as the operator wrote it."""
        body = self._launcher.owned(parent).get((CONFIG_MAP.kind, name)) or {}
        return {**body, "data": believed(name, body.get("data") or {}, self._proofs(parent))}

    def _model_facts(self, parent: ParsedDeployment) -> dict[str, str]:
        """Return what was read of an object's models, for whichever object of its namespace."""
        entries = self._cache.model_facts(parent.key.namespace)
        if isinstance(parent.spec, InvalidSpecError) or not entries:
            return {}
        neighbours = (proofs_in(self._cache.parent(key) or {}) for key in self._neighbours(parent))
        return believed_entries(parent.spec, entries, chain([self._proofs(parent)], neighbours))

    def _site_facts(self, parent: ParsedDeployment) -> dict[ModelSource, SiteFacts]:
        """Return what the operator's facts files say of an object's models."""
        return {} if isinstance(parent.spec, InvalidSpecError) else site_facts_of(parent.spec, self._facts.known)

    def _kept(self, parent: ParsedDeployment, desired: DesiredState, model_facts: Mapping[str, str]) -> dict[str, str]:
        """Return the digests of all that is kept for an object now, as far as it will be read again."""
        if isinstance(parent.spec, InvalidSpecError):
            return dict(self._proofs(parent))
        name = downloads_name(parent.key)
        if self._launcher.is_in_line(parent, desired):  # it is as it was
            downloads = {entry: each for entry, each in self._proofs(parent).items() if entry.startswith(f"{name}/")}
        else:
            rendered = (child for child in desired.children if identity(child) == (CONFIG_MAP.kind, name))
            downloads = digests(name, next(rendered, self._believed(parent, name))["data"])
        return {**digests(MODEL_FACTS_NAME, model_facts), **downloads, **self._record(parent).last_good_digests}

    def _neighbours(self, parent: ParsedDeployment) -> list[Key]:
        """Return the other objects of its namespace."""
        keys = self._cache.parents(deployment.KIND)
        return [key for key in keys if key.namespace == parent.key.namespace and key.name != parent.key.name]

    def _model_pods(self, parent: ParsedDeployment) -> list[Body]:
        """Return the pods of an object that read a model or download one."""
        return [pod for pod in self._cache.children_of(parent.key, POD.kind) if is_model_pod(pod)]

    def _forget(self, key: Key) -> None:
        """Drop what is remembered of an object that is gone."""
        self._launcher.forget(key)
        self._residuals.set(key, None)
        self._policies.forget(key)
        self._records.pop(key, None)

    async def _keep_what_was_read(self, parent: ParsedDeployment) -> Readiness | None:
        """Keep what pods have read of models before their Jobs go; return what blocks that."""
        readers = self._model_pods(parent)
        if not readers:
            return None
        namespace = parent.key.namespace
        entries = newly_read_models(parent, self._model_facts(parent), readers)
        if not entries:
            return None
        self._record(parent).kept = {**self._proofs(parent), **digests(MODEL_FACTS_NAME, entries)}
        return await self._write(parent, self._launcher.keep_model_facts(namespace, entries))

    async def _keep_last_good(
        self, parent: ParsedDeployment, desired: DesiredState, observation: Observation, before: LastGood | None
    ) -> Readiness | None:
        """Write down which workload served last, and which failed; return what blocks that.

        The ConfigMap's own event brings the next reconcile, which puts the earlier workload back.
        """
        record = self._record(parent)
        if not record.last_good_due:
            return None
        now = update_last_good(desired, observation, before)
        blocked = None
        if now is not None and now != before:
            rendered = render_last_good(parent.key, parent.uid, now)
            blocked = await self._write(parent, self._launcher.keep(parent, rendered))
        kept = before if blocked else now
        if kept != record.last_good:
            entries = render_last_good(parent.key, parent.uid, kept)["data"] if kept else {}
            record.last_good, record.last_good_digests = kept, digests(last_good_name(parent.key), entries)
        record.last_good_due = blocked is not None
        return blocked

    async def _write(self, parent: ParsedDeployment, writing: Awaitable[None]) -> Readiness | None:
        """Write to the cluster; return what blocks that."""
        hint = "; spec.podTemplate is merged into it, and the engine's container there is called engine"
        return await what_blocks(
            writing,
            hint=hint if parent.raw_spec.get("podTemplate") else "",
            status_is_current=parent.status.observed_generation == parent.generation,
        )

    async def _observe(
        self, parent: ParsedDeployment, desired: DesiredState, last_good: LastGood | None, blocked: Readiness | None
    ) -> Observation:
        """Look at workload and pods, and ask the engines."""
        record, now_s, unix_s = self._record(parent), time.monotonic(), self._clock.now().timestamp()
        workload, replaced = self._launcher.workloads(parent, desired if blocked is None else None)
        pods = current_pods(self._cache.children_of(parent.key, POD.kind), workload)
        readings = await self._ask_engines(parent, desired, pods) if blocked is None else {}
        unanswered = bool(readings) and all(isinstance(reading, Unreachable) for reading in readings.values())
        record.silent_since_s = (record.silent_since_s or now_s) if unanswered else None
        record.recent = update_recent(record.recent, readings, now_s)
        facts = desired.outcome.facts if isinstance(desired.outcome, Launch) else None
        record.figures = record.figures if facts else KeptFigures()
        captures = self._cache.captures_of(parent.key)
        record.decay = update_decay(
            record.decay,
            record.recent,
            facts,
            partial(newest_measured, captures, parent.spec, desired.outcome.plan_status),
        )
        observation = Observation(
            workload,
            pods,
            readings,
            recent=record.recent,
            decay=record.decay,
            figures=await self._figures.keep(parent.key, record.figures, parent.status.figures, now_s)
            if facts
            else None,
            figures_due=record.figures_written_s is None or now_s - record.figures_written_s >= _FIGURES_REST_S,
            silent_s=None if record.silent_since_s is None else now_s - record.silent_since_s,
            lending=self._lending(parent),
            claim_users=self._claim_users(parent),
            replaced_workload=replaced,
            blocked=blocked,
            contested=tuple(self._launcher.repairs(parent).contested(now_s)),
        )
        record.groups = update_group_history(record.groups, desired, observation, last_good, unix_s)
        return replace(observation, groups=record.groups)

    async def _ask_engines(
        self, parent: ParsedDeployment, desired: DesiredState, pods: list[Body]
    ) -> Mapping[str, Reading]:
        """Return what the engines of a plan in force say of themselves, by pod."""
        if not isinstance(desired.outcome, Launch):
            return {}
        facts = desired.outcome.facts
        serving = facts.spec.serving
        tls = serving.tls_secret is not None
        looks = self._record(parent).figures.looks
        return await self._probe.read_all(serving_pods(pods), serving.port, facts.profile, looks, tls=tls)

    def _lending(self, parent: ParsedDeployment) -> Lending | None:
        """Return the capture that has the GPUs of an object's engines, and when it should give them back."""
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
        """Other objects with models on a claim of this one, where one of its pods waits for such a claim."""
        if not any(map(waits_for_claim, self._cache.children_of(parent.key, POD.kind))):
            return ()
        claims = claims_named(parent.raw_spec)
        others = self._neighbours(parent)
        found = {key.name for key in others if claims & claims_named((self._cache.parent(key) or {}).get("spec"))}
        return tuple(sorted(found))

    async def _report(
        self,
        parent: ParsedDeployment,
        desired: DesiredState,
        observation: Observation,
        schedules: Sequence[ScheduleStatus] | None = None,
        policy: PolicyStatus | None = None,
    ) -> None:
        """Write the status where it says something new, and tell of it in Events."""
        status = compose_status(parent, desired, observation, self._clock.now(), schedules, policy=policy)
        proofs = {**self._proofs(parent), **self._launcher.proofs(parent)}
        status = status.model_copy(update={"kept": kept_entries(proofs)})
        if status == parent.status and not parent.times_ahead:
            return
        if not await self._reporter.write(parent.key, parent.uid, status):
            self._forget(parent.key)
            return
        if status.observed != parent.status.observed:
            self._record(parent).figures_written_s = time.monotonic()
        await self._reporter.post_times_ahead(parent.key, parent.uid, parent.times_ahead)
        if change := plan_change(parent.status.plan, status.plan):
            await self._reporter.post_event(parent.key, parent.uid, "PlanChanged", change)
        await self._reporter.post_changes(parent.key, parent.uid, parent.status.conditions, status.conditions)
