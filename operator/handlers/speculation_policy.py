"""Carry out the speculation policy of a deployment: record samples, decide, switch, report."""

from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from typing import Final

from specdecode_operator.api.deployment import Key, Policy, PolicyStatus, SpecDecodeDeploymentSpec
from specdecode_operator.api.speculation import Speculation
from specdecode_operator.cluster.cache import Cache
from specdecode_operator.cluster.client import Cluster, ClusterError
from specdecode_operator.cluster.resources import POD
from specdecode_operator.deployment.desired_state import DesiredState, RolledBack
from specdecode_operator.deployment.observed.observation import Observation
from specdecode_operator.deployment.parsed_deployment import ParsedDeployment, engine_spec_hash
from specdecode_operator.deployment.policy_decision import Decision, NoEvidence
from specdecode_operator.deployment.policy_state import (
    Measured,
    PolicyInputs,
    Remembered,
    given_up,
    is_unchanged,
    judge,
    observe_engines,
    of_this_spec,
    policy_status,
    read_measured,
    steady,
)
from specdecode_operator.enums import PolicyAction, PolicyOutcome
from specdecode_operator.handlers.metrics import PolicyDecisions
from specdecode_operator.handlers.status_writer import Reporter
from specdecode_operator.problems import InvalidSpecError
from specdecode_operator.stats.engine_window import Window

_WORDS_REST_S: Final = 300.0
"""Figures in the words are written at most this often while they say the same."""

NotHad = Callable[[Speculation], str]
"""Says why a speculation cannot be had where the engines are; an empty text where it can."""


class PolicyKeeper:
    """Carries out the policies of all deployments."""

    def __init__(
        self,
        cluster: Cluster,
        cache: Cache,
        reporter: Reporter,
        decisions: PolicyDecisions,
        now: Callable[[], datetime],
    ) -> None:
        self._cluster = cluster
        self._cache = cache
        self._reporter = reporter
        self._decisions = decisions
        self._now = now
        self._remembered: dict[Key, Remembered] = {}

    def forget(self, key: Key) -> None:
        """Drop what is remembered of an object that is gone, or has no policy."""
        self._remembered.pop(key, None)

    async def keep(
        self, parent: ParsedDeployment, desired: DesiredState, observation: Observation, not_had: NotHad, refused: str
    ) -> PolicyStatus | None:
        """Decide, do it, and return what the status says of it.

        ``refused`` is why what the policy had put in force cannot be launched any more, if it cannot.
        """
        written = parent.written_spec or parent.spec
        if isinstance(written, InvalidSpecError):
            return parent.status.policy
        if written.policy is None:
            self.forget(parent.key)
            return None
        asked = engine_spec_hash(written)
        before = of_this_spec(parent.status.policy, asked)
        if isinstance(desired.outcome, RolledBack) and parent.written_spec is not None:
            refused = f"its engines never served ({desired.outcome.failure})"
        if refused and before is not None:
            self.forget(parent.key)
            status = given_up(before, refused, self._now())
            await self._reporter.post_event(parent.key, parent.uid, "PolicyActed", status.message, warns=True)
            return status
        case = PolicyInputs(
            written.policy,
            asked,
            before,
            self._measured(parent, desired, written, written.policy),
            rollout_paused=written.rollout.paused,
        )
        return await self._decide(parent, desired, observation, case, not_had)

    async def _decide(
        self,
        parent: ParsedDeployment,
        desired: DesiredState,
        observation: Observation,
        case: PolicyInputs,
        not_had: NotHad,
    ) -> PolicyStatus | None:
        now, measured = self._now(), case.measured
        remembered = self._remembered.get(parent.key)
        length_s = float(case.policy.window_seconds)
        if remembered is None or remembered.window.length_s != length_s:
            remembered = Remembered(Window(length_s))
        seen = observe_engines(desired, observation, remembered.window, now.timestamp())

        def fits(arm: str) -> str:
            return not_had(measured.speculations[arm]) if isinstance(measured, Measured) else ""

        decision, memory = judge(case, seen, remembered, fits)
        if refused := await self._refused(parent, decision):
            decision = replace(decision, outcome=PolicyOutcome.REFUSED, message=f"{decision.message}; {refused}")
            memory = replace(memory, restarts=memory.restarts[:-1])
        now_s = now.timestamp()
        due = not 0 <= now_s - remembered.written_s < _WORDS_REST_S  # the API server's clock may step back
        status = steady(policy_status(case, decision, memory, now), case.before, due=due)
        written_s = remembered.written_s if status is case.before else now_s
        window = Window(length_s) if decision.changes else seen.window
        self._remembered[parent.key] = Remembered(window, memory.looked_s, dict(memory.ahead_s), written_s)
        await self._tell(parent, case, decision)
        return status

    def _measured(
        self, parent: ParsedDeployment, desired: DesiredState, written: SpecDecodeDeploymentSpec, policy: Policy
    ) -> Measured | NoEvidence:
        """Return what captures of the deployment compared."""
        in_force = None if isinstance(parent.spec, InvalidSpecError) else parent.spec.speculation
        engine = engine_spec_hash(written, desired.outcome.plan_status)
        captures = self._cache.captures_of(parent.key)
        return read_measured(captures, policy.evidence, engine, written.speculation, in_force)

    async def _refused(self, parent: ParsedDeployment, decision: Decision) -> str:
        """Start an engine anew where that is decided; return what hinders it, an empty text where nothing does."""
        if decision.action is not PolicyAction.RESTART or decision.outcome is not PolicyOutcome.DONE:
            return ""
        pods = self._cache.children_of(parent.key, POD.kind)
        pod = next((each for each in pods if each["metadata"]["name"] == decision.target), None)
        if pod is None:
            return "it is gone already"
        try:
            await self._cluster.evict(pod)
        except ClusterError as error:
            return str(error)
        return ""

    async def _tell(self, parent: ParsedDeployment, case: PolicyInputs, decision: Decision) -> None:
        """Count what is new, and post an Event of what was done."""
        if decision.action is PolicyAction.KEEP or is_unchanged(case.before, decision):
            return
        self._decisions.count(decision.action, decision.outcome)
        if decision.outcome is PolicyOutcome.DONE:
            words = f"{decision.action} {decision.target}: {decision.message}"
            await self._reporter.post_event(parent.key, parent.uid, "PolicyActed", words)
