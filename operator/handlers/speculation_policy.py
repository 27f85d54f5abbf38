"""Carry out the speculation policy of a deployment: record samples, decide, switch, report."""

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from specdecode_operator.api.deployment import Policy, PolicyStatus
from specdecode_operator.api.speculation import Speculation
from specdecode_operator.cluster.client import ClusterError
from specdecode_operator.cluster.resources import POD
from specdecode_operator.deployment.desired_state import DesiredState, RolledBack
from specdecode_operator.deployment.observed.observation import Observation
from specdecode_operator.deployment.parsed_deployment import ParsedDeployment, engine_spec_hash
from specdecode_operator.deployment.policy import (
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
from specdecode_operator.handlers.metrics import OperatorMetrics
from specdecode_operator.handlers.status_writer import Reporter
from specdecode_operator.problems import InvalidSpecError
from specdecode_operator.stats.engine_window import Window

_MESSAGE_REST_S: Final = 300.0
"""Minimum interval between writes of a message in which only figures changed."""

NotHad = Callable[[Speculation], str]
"""Returns why a speculation cannot be had where the engines are; an empty text if it can."""


class PolicyKeeper:
    """Carries out the policy of one deployment."""

    def __init__(self, reporter: Reporter, metrics: OperatorMetrics) -> None:
        self._reporter, self._metrics = reporter, metrics
        self._memory: Remembered | None = None

    async def keep(
        self, parent: ParsedDeployment, desired: DesiredState, observation: Observation, not_had: NotHad, refused: str
    ) -> PolicyStatus | None:
        """Decide, act, and return the status of the policy.

        ``refused`` is why the speculation that the policy put in force cannot be launched any more, or empty.
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
        if refused and before is not None:
            self._memory = None
            status = given_up(before, refused, now)
            await self._reporter.post_event("PolicyActed", status.message, warns=True)
            return status
        policy: Policy = written.policy
        in_force = None if isinstance(parent.spec, InvalidSpecError) else parent.spec.speculation
        measured = read_measured(
            self._reporter.cache.captures_of(parent.key),
            policy.evidence,
            engine_spec_hash(written, desired.outcome.plan_status),
            written.speculation,
            in_force,
        )
        case = PolicyInputs(policy, asked, before, measured, rollout_paused=written.rollout.paused)
        return await self._decide(desired, observation, case, not_had)

    async def _decide(
        self, desired: DesiredState, observation: Observation, case: PolicyInputs, not_had: NotHad
    ) -> PolicyStatus | None:
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
        due = not 0 <= now_s - remembered.written_s < _MESSAGE_REST_S  # the API server's clock may step back
        status = steady(policy_status(case, decision, memory, now), case.before, due=due)
        written_s = remembered.written_s if status is case.before else now_s
        window = Window(length_s) if decision.changes else seen.window
        self._memory = Remembered(window, memory.looked_s, dict(memory.ahead_s), written_s)
        if decision.action is not PolicyAction.KEEP and not is_unchanged(case.before, decision):
            self._metrics.count_policy_decision(decision.action, decision.outcome)
            if decision.outcome is PolicyOutcome.DONE:
                message = f"{decision.action} {decision.target}: {decision.message}"
                await self._reporter.post_event("PolicyActed", message)
        return status

    async def _restart(self, name: str | None) -> str:
        """Evict an engine's pod; return what prevents it, or an empty text."""
        pods = self._reporter.cache.children_of(self._reporter.key, POD.kind)
        pod = next((each for each in pods if each["metadata"]["name"] == name), None)
        if pod is None:
            return "it is gone already"
        try:
            await self._reporter.cluster.evict(pod)
        except ClusterError as error:
            return str(error)
        return ""
