"""Carries one object from what is to what should be: look, decide, launch, report."""

import logging
import time
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from datetime import UTC, datetime

from specdecode_operator.api import deployment
from specdecode_operator.api.base import Body
from specdecode_operator.api.capture_schedule import ScheduleStatus
from specdecode_operator.api.key import Key
from specdecode_operator.api.status import SpecDecodeDeploymentStatus
from specdecode_operator.capture.control.preemption import preempting_capture
from specdecode_operator.cluster.cache import Cache
from specdecode_operator.cluster.client import Cluster
from specdecode_operator.cluster.engine_probe import EngineProbe
from specdecode_operator.cluster.errors import ClusterError
from specdecode_operator.deployment.decision import learn
from specdecode_operator.deployment.desired_state import DesiredState, Launch, blocked, broken
from specdecode_operator.deployment.history import recall, update_group_history, update_last_good
from specdecode_operator.deployment.models.download import downloads_name, read_downloads
from specdecode_operator.deployment.models.reading import is_reader
from specdecode_operator.deployment.objects.workload import serving_pods
from specdecode_operator.deployment.observation import Observation, observed_residual
from specdecode_operator.deployment.plan.status import plan_change
from specdecode_operator.deployment.pods.group_history import GroupHistory
from specdecode_operator.deployment.pods.readiness import Readiness
from specdecode_operator.deployment.pods.rollback import Memory, last_good_name, read_last_good, render_last_good
from specdecode_operator.deployment.pods.rollout import current_pods, waits_for_claim
from specdecode_operator.deployment.spec.model_storage import claims_named
from specdecode_operator.deployment.spec.parent import Parent, lend, read_parent
from specdecode_operator.deployment.status import compose_status
from specdecode_operator.engine.metrics import Reading, Unreachable
from specdecode_operator.handlers.calibration_file import CalibrationFile
from specdecode_operator.handlers.hindrance import hindrance
from specdecode_operator.handlers.intents import Intents
from specdecode_operator.handlers.launcher import Launcher
from specdecode_operator.handlers.metrics import ResidualCollector
from specdecode_operator.handlers.reporter import Reporter
from specdecode_operator.handlers.schedule_keeper import ScheduleKeeper
from specdecode_operator.kube.resources import CONFIG_MAP, POD

_FIGURES_REST_S = 60.0
"""Observed figures are written at most this often."""

_logger = logging.getLogger(__name__)


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
        host_paths: tuple[str, ...] = (),
    ) -> None:
        self._cluster = cluster
        self._cache = cache
        self._probe = probe
        self._residuals = residuals
        self._calibration = calibration
        self._launcher = Launcher(cluster, cache)
        self._reporter = Reporter(cluster, cache)
        self._schedules = ScheduleKeeper(cluster, cache, self._reporter)
        self._intents = Intents(host_paths)
        self._figures_written_s: dict[Key, float] = {}
        self._silent_rounds: dict[Key, int] = {}
        self._groups: dict[Key, GroupHistory] = {}

    async def reconcile(self, key: Key) -> None:
        """Bring one SpecDecodeDeployment and its children in line.

        Raises
        ------
        ClusterError
            When the status cannot say what hinders; the queue tries again.
        """
        body = self._cache.parent(key)
        if body is None or "deletionTimestamp" in body["metadata"]:
            self._forget(key)
            return
        parent = self._read(body)
        try:
            failure = await self._keep_what_was_read(parent)
            memory = self._memory(parent)
            desired = recall(parent, self._intend(parent), memory)
        except ClusterError:
            raise
        except Exception as error:
            await self._report_if_new(parent, broken(parent, error), Observation())
            raise
        failure = failure or await self._launch(parent, desired)
        if failure is not None:
            desired = blocked(desired, failure)
        observation = await self._observe(parent, desired, memory)
        if not observation.unanswered_rounds:  # an engine that misses a question holds what it held
            self._residuals.set(key, observed_residual(desired, observation))
        failure = await self._remember(parent, update_last_good(desired, observation, memory), memory)
        if failure is not None:
            desired = blocked(desired, failure)
        schedules = self._intents.schedules(key)
        kept = None if schedules is None else await self._schedules.keep(parent, schedules)
        await self._report_if_new(parent, desired, observation, kept)

    def desired_state_of(self, body: Body) -> tuple[Parent, DesiredState]:
        """Return what the spec of an object comes to now, for a capture of it."""
        parent = self._read(body)
        return parent, recall(parent, self._intend(parent), self._memory(parent))

    def _read(self, body: Body) -> Parent:
        """Take an object apart; without its engines where a capture has their GPUs."""
        parent = read_parent(body)
        return lend(parent, preempting_capture(self._cache.captures_of(parent.key)))

    def _memory(self, parent: Parent) -> Memory | None:
        """What is known of earlier engines."""
        return read_last_good(self._launcher.owned(parent).get((CONFIG_MAP.kind, last_good_name(parent.key))))

    async def _remember(self, parent: Parent, new: Memory | None, old: Memory | None) -> Readiness | None:
        """Keep what is to be remembered; return what stands in the way.

        The ConfigMap's own event brings the next reconcile, which puts earlier engines back.
        """
        if new is None or new == old:
            return None
        return await self._attempt(parent, self._launcher.keep(parent, render_last_good(parent.key, parent.uid, new)))

    def _forget(self, key: Key) -> None:
        """Drop what is remembered of an object that is gone."""
        self._launcher.forget(key)
        self._intents.forget(key)
        self._residuals.set(key, None)
        self._figures_written_s.pop(key, None)
        self._silent_rounds.pop(key, None)
        self._groups.pop(key, None)

    async def _report_if_new(
        self,
        parent: Parent,
        desired: DesiredState,
        observation: Observation,
        schedules: Sequence[ScheduleStatus] | None = None,
    ) -> None:
        status = compose_status(parent, desired, observation, datetime.now(UTC), schedules)
        if status != parent.status:
            await self._report(parent, status)

    def _intend(self, parent: Parent) -> DesiredState:
        entries = self._cache.model_facts(parent.key.namespace)
        pods = self._cache.children_of(parent.key, POD.kind)
        kept = self._launcher.owned(parent).get((CONFIG_MAP.kind, downloads_name(parent.key)))
        return self._intents.intend(
            parent,
            self._cache.nodes(),
            entries,
            pods,
            self._calibration.read(),
            downloads=read_downloads(kept),
            groups=self._cache.has_groups,
        )

    async def _keep_what_was_read(self, parent: Parent) -> Readiness | None:
        """Keep what pods found out of models, before their Jobs go; return what stands in the way."""
        readers = [pod for pod in self._cache.children_of(parent.key, POD.kind) if is_reader(pod)]
        if not readers:
            return None
        namespace = parent.key.namespace
        entries = learn(parent, self._cache.model_facts(namespace), readers)
        return await self._attempt(parent, self._launcher.keep_model_facts(namespace, entries)) if entries else None

    async def _launch(self, parent: Parent, desired: DesiredState) -> Readiness | None:
        """Apply the children; return what stands in the way."""
        return await self._attempt(parent, self._launcher.launch(parent, desired))

    async def _attempt(self, parent: Parent, writing: Awaitable[None]) -> Readiness | None:
        """Write to the cluster; return what stands in the way."""
        hint = "; spec.podTemplate is merged into it, and the engine's container there is called engine"
        return await hindrance(
            writing,
            hint=hint if parent.spec.get("podTemplate") else "",
            status_is_current=parent.status.observed_generation == parent.generation,
        )

    async def _observe(self, parent: Parent, desired: DesiredState, memory: Memory | None) -> Observation:
        workload = self._launcher.workload(parent, desired)
        pods = current_pods(self._cache.children_of(parent.key, POD.kind), workload)
        readings: dict[str, Reading] = {}
        if isinstance(desired.outcome, Launch):
            facts = desired.outcome.facts
            serving = facts.spec.serving
            tls = serving.tls_secret is not None
            readings = dict(await self._probe.read_all(serving_pods(pods), serving.port, facts.profile, tls=tls))
        silent = bool(readings) and all(isinstance(reading, Unreachable) for reading in readings.values())
        self._silent_rounds[parent.key] = self._silent_rounds.get(parent.key, 0) + 1 if silent else 0
        written_s = self._figures_written_s.get(parent.key)
        observation = Observation(
            workload,
            pods,
            readings,
            rested=written_s is None or time.monotonic() - written_s >= _FIGURES_REST_S,
            unanswered_rounds=self._silent_rounds[parent.key],
            claim_users=self._sharers(parent),
            replaced_workload=self._launcher.replaced_workload(parent, desired),
        )
        self._groups[parent.key] = update_group_history(
            self._groups.get(parent.key), desired, observation, memory, time.time()
        )
        return replace(observation, groups=self._groups[parent.key])

    def _sharers(self, parent: Parent) -> tuple[str, ...]:
        """Other objects with models on a claim of this one, where one of its pods waits for such a claim."""
        if not any(map(waits_for_claim, self._cache.children_of(parent.key, POD.kind))):
            return ()
        claims = claims_named(parent.spec)
        others = [
            key
            for key in self._cache.parents(deployment.KIND)
            if key.namespace == parent.key.namespace and key.name != parent.key.name
        ]
        found = {key.name for key in others if claims & claims_named((self._cache.parent(key) or {}).get("spec"))}
        return tuple(sorted(found))

    async def _report(self, parent: Parent, status: SpecDecodeDeploymentStatus) -> None:
        """Write the status, and tell what changed in Events."""
        if not await self._reporter.write(parent.key, parent.uid, status):
            self._forget(parent.key)
            return
        if status.observed != parent.status.observed:
            self._figures_written_s[parent.key] = time.monotonic()
        if change := plan_change(parent.status.plan, status.plan):
            await self._reporter.tell(parent.key, parent.uid, "PlanChanged", change)
        await self._reporter.post_changes(parent.key, parent.uid, parent.status.conditions, status.conditions)
