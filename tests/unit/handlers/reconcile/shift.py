"""Hours of engines under a policy, in no time."""

from datetime import UTC, datetime
from typing import Any
from unittest.mock import AsyncMock

import pytest

from specdecode_operator.api import capture
from specdecode_operator.api.deployment_status import PlanStatus
from specdecode_operator.cluster.resources import DEPLOYMENT, NODE, POD, SPECDECODE_DEPLOYMENT
from specdecode_operator.deployment.parsed_deployment import engine_spec_hash, parse_deployment
from specdecode_operator.vllm.engine_metrics import EngineReading, SpeculationReading
from tests.support.driven_clock import DrivenServerTime
from tests.support.objects import H200, Body, pair_70b
from tests.support.policy_field_cases import OFF_ARM, measured_capture
from tests.unit.handlers.reconcile.reconciler_world import World

LOOK_S = 30.0
WINDOW = {"windowSeconds": 300, "cooldownSeconds": 600}
STEPS_A_LOOK = 300
K = 5
LOADS = ((8, 0.7), (64, 1.2))
"""Without speculation goodput falls at a low load, and rises at a high one."""


class Shift:
    """An object with a policy, and hours of its engines in no time."""

    def __init__(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        self.world = world
        self.clock = DrivenServerTime(datetime(2026, 1, 1, tzinfo=UTC))
        self.drafted: dict[str, list[int]] = {}
        self.said = AsyncMock(return_value={})
        monkeypatch.setattr(world.probe, "read_all", self.said)
        self.begin()

    def begin(self) -> None:
        """Let another process take over."""
        self.world.clock = self.clock
        self.world.begin()

    async def serve(
        self, *, evidence: Body | None = None, engines: int = 1, spec: Body | None = None, **policy: Any
    ) -> None:
        """Let engines of an object with a policy serve, that a capture has measured."""
        self.world.add(pair_70b(policy={**WINDOW, **policy}, replicas=engines, **(spec or {})))
        node = {"metadata": {"name": "n", "labels": {"nvidia.com/gpu.product": H200}}}
        self.world.api.create(NODE, {**node, "status": {"allocatable": {"nvidia.com/gpu": "8"}}})
        await self.world.look()
        for number in range(engines):
            self.world.start_engines(f"llama-{number}")
        self.world.serve(engines)
        self.measure(evidence or measured_capture(arms=[{"name": "on"}, OFF_ARM], ratio=1.0, loads=LOADS))

    def measure(self, body: Body, **status: Any) -> None:
        """Let a capture have ended."""
        found = parse_deployment(self.world.object, as_written=True)
        plan = PlanStatus.parse(self.world.object["status"]["plan"], newer=True)
        known = {"engine": engine_spec_hash(found.spec, plan)}  # type: ignore[arg-type]
        metadata = {**body["metadata"], "uid": body["metadata"]["name"], "generation": 1, "resourceVersion": "1"}
        self.world.cache.put_parent(
            capture.KIND, {**body, "metadata": metadata, "status": {**body["status"], **known, **status}}
        )

    async def work(self, minutes: float, running: float, *, accepted: dict[str, float] | float = 0.6) -> None:
        """Let time pass while engines work."""
        for _ in range(round(minutes * 60 / LOOK_S)):
            self.clock.advance(LOOK_S)
            self.said.return_value = {
                pod["metadata"]["name"]: self._reading(pod["metadata"]["name"], running, accepted)
                for pod in self.world.all(POD)
            }
            await self.world.look()
            self.roll_out()

    def _reading(self, name: str, running: float, accepted: dict[str, float] | float) -> EngineReading:
        share = accepted.get(name, 0.6) if isinstance(accepted, dict) else accepted
        counters = self.drafted.setdefault(name, [0, 0])
        counters[0] += STEPS_A_LOOK
        counters[1] += round(STEPS_A_LOOK * K * share)
        spoken = SpeculationReading(counters[0], counters[0] * K, counters[1], (counters[1],))
        speculates = self.speculation() is not None
        return EngineReading(
            *(None, None, None, None, spoken if speculates else None, counters[0] * 3, round(running), 0),
            decode_steps=counters[0],
        )

    def roll_out(self) -> None:
        """Let the Deployment's controller replace pods of an earlier template."""
        (workload,) = self.world.all(DEPLOYMENT)
        template, replicas = workload["spec"]["template"]["metadata"], workload["spec"]["replicas"]
        for pod in self.world.all(POD):
            if pod["metadata"]["annotations"] != template["annotations"]:
                self.world.api.remove(POD, pod["metadata"]["name"])
        for number in range(replicas):
            if self.world.api.find(POD, f"llama-{number}") is None:
                self.drafted.pop(f"llama-{number}", None)
                self.world.start_engines(f"llama-{number}")

    def speculation(self) -> str | None:
        """What the engines are told of speculation."""
        (workload,) = self.world.all(DEPLOYMENT)
        arguments: list[str] = workload["spec"]["template"]["spec"]["containers"][0]["command"]
        return next((each for each in arguments if "num_speculative_tokens" in each), None)

    @property
    def policy(self) -> Body:
        found: Body = self.world.object["status"]["policy"]
        return found

    def done(self) -> list[tuple[str, str]]:
        """What was done, in order."""
        return [(each["action"], each["outcome"]) for each in reversed(self.policy.get("decisions", []))]

    def change(self, **fields: Any) -> None:
        """Edit the spec as a person."""
        spec = {**self.world.object["spec"], **fields}
        metadata = {**self.world.object["metadata"], "generation": self.world.object["metadata"]["generation"] + 1}
        self.world.api.change(SPECDECODE_DEPLOYMENT, "llama", spec=spec, metadata=metadata)
