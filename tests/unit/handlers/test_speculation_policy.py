"""Hours and days of engines under a policy, in virtual time."""

import time
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from prometheus_client import CollectorRegistry

from specdecode_operator.api import capture
from specdecode_operator.api.deployment_status import PlanStatus
from specdecode_operator.cluster.client import Cluster, ForbiddenError
from specdecode_operator.cluster.resources import DEPLOYMENT, NODE, POD, SPECDECODE_DEPLOYMENT
from specdecode_operator.deployment.parsed_deployment import engine_spec_hash, parse_deployment
from specdecode_operator.handlers import reconcile_deployment
from specdecode_operator.vllm.engine_metrics import CanaryReading, EngineReading, SpeculationReading, Unreachable
from tests.support.driven_clock import DrivenServerTime
from tests.support.objects import H200, Body, ended, pair_70b
from tests.support.policy_field_cases import OFF_ARM, measured_capture
from tests.unit.handlers.reconciler_world import World

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
        self.canaries: dict[str, CanaryReading] = {}
        self.step_s: float | None = None
        """Time of a decode step, if the engines report it."""
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

    async def work(
        self,
        minutes: float,
        running: float,
        *,
        accepted: dict[str, float] | float = 0.6,
        look_s: float = LOOK_S,
        steps: int = STEPS_A_LOOK,
    ) -> None:
        """Let time pass while engines work."""
        for _ in range(round(minutes * 60 / look_s)):
            self.clock.advance(look_s)
            self.said.return_value = {
                pod["metadata"]["name"]: self._reading(pod["metadata"]["name"], running, accepted, steps)
                for pod in self.world.all(POD)
            }
            await self.world.look()
            self.roll_out()

    def _reading(self, name: str, running: float, accepted: dict[str, float] | float, steps: int) -> EngineReading:
        share = accepted.get(name, 0.6) if isinstance(accepted, dict) else accepted
        counters = self.drafted.setdefault(name, [0, 0])
        counters[0] += steps
        counters[1] += round(steps * K * share)
        spoken = SpeculationReading(counters[0], counters[0] * K, counters[1], (counters[1],))
        speculates = self.speculation() is not None
        return EngineReading(
            *(None, None, None, None, spoken if speculates else None, counters[0] * 3, round(running), 0),
            decode_steps=counters[0],
            **({} if self.step_s is None else {"decode_seconds": counters[0] * self.step_s, "first_tokens": 0}),
            canaries=self.canaries.get(name),
        )

    def roll_out(self) -> None:
        """Let the Deployment's controller replace pods of an earlier template."""
        workload = self.workload
        if workload["spec"].get("paused"):
            return
        template, replicas = workload["spec"]["template"]["metadata"], workload["spec"]["replicas"]
        for pod in self.world.all(POD):
            if pod["metadata"]["annotations"] != template["annotations"]:
                self.world.api.remove(POD, pod["metadata"]["name"])
        for number in range(replicas):
            if self.world.api.find(POD, f"llama-{number}") is None:
                self.drafted.pop(f"llama-{number}", None)
                self.canaries.pop(f"llama-{number}", None)
                self.world.start_engines(f"llama-{number}")

    @property
    def workload(self) -> Body:
        found = self.world.api.find(DEPLOYMENT, "llama")
        assert found is not None
        return found

    def speculation(self) -> str | None:
        """What the engines are told of speculation."""
        arguments: list[str] = self.workload["spec"]["template"]["spec"]["containers"][0]["command"]
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


@pytest.fixture
def shift(world: World, monkeypatch: pytest.MonkeyPatch) -> Shift:
    return Shift(world, monkeypatch)


@pytest.mark.parametrize("mode", ["Observe", "Advise"])
async def test_observe_and_advise_change_nothing(shift: Shift, mode: str) -> None:
    await shift.serve(mode=mode)
    await shift.work(60, 64)
    assert shift.speculation() is not None
    assert shift.policy["action"] == "TurnOff"
    if mode == "Advise":
        assert shift.done() == [("TurnOff", "Advised")]
        status, reason, message = shift.world.said("SpeculationEffective")
        assert (status, reason) == ("False", "BetterMeasured")
        assert "off: +20.0% goodput compared with on" in message
        assert shift.world.told().count("BetterMeasured") == 1
    else:
        assert shift.done() == []
        assert "SpeculationEffective" not in {each["type"] for each in shift.world.object["status"]["conditions"]}


@pytest.mark.parametrize("paused", [{"paused": True}, {"spec": {"rollout": {"paused": True}}}])
async def test_paused_policy_keeps_speculation(shift: Shift, paused: Body) -> None:
    await shift.serve(mode="Enforce", **paused)
    await shift.work(60, 64)
    assert (shift.policy["outcome"], shift.done()) == ("Paused", [])
    assert shift.speculation() is not None


async def test_refused_eviction_is_reported_and_retried(shift: Shift, monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = AsyncMock(side_effect=ForbiddenError("the operator may not create pods/eviction"))
    with monkeypatch.context() as hindered:
        hindered.setattr(Cluster, "evict", refusal)
        await shift.serve(mode="Enforce", engines=2)
        await shift.work(15, 8, accepted={"llama-1": 0.02})
        assert (shift.policy["outcome"], shift.done()) == ("Refused", [])
        assert "may not create pods/eviction" in shift.policy["message"]
        assert "restarts" not in shift.policy or shift.policy["restarts"] == []
    await shift.work(0.5, 8, accepted={"llama-1": 0.02})
    assert shift.done() == [("Restart", "Done")]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"engine": "another"}, "EvidenceOutdated"),
        ({"comparison": None}, "NoEvidence"),
        ({"comparison": {"baseline": 1}}, "EvidenceUnusable"),
        ({"comparison": {"baseline": "on", "levelPercent": 95, "arms": []}}, "EvidenceUnusable"),
    ],
)
async def test_outdated_missing_or_unusable_evidence_changes_nothing(shift: Shift, change: Body, reason: str) -> None:
    await shift.serve(mode="Enforce")
    shift.measure(measured_capture(arms=[{"name": "on"}, OFF_ARM], ratio=1.0, loads=LOADS), **change)
    await shift.work(30, 64)
    assert (shift.policy["reason"], shift.done()) == (reason, [])


async def test_temperature_sweep_is_not_used_as_evidence(shift: Shift) -> None:
    """Its phases have other temperatures, not other loads, and would be taken for these."""
    await shift.serve(mode="Enforce")
    sweep = measured_capture(arms=[{"name": "on"}, OFF_ARM], ratio=1.0, loads=((8, 3.0),))
    phase = {"pattern": "Closed", "concurrency": 8, "requests": 8}
    hot = {**phase, "name": "hot", "temperature": "1.0"}
    sweep["spec"]["workload"] = {"phases": [{**phase, "name": "cold"}, hot]}
    sweep["metadata"] = {**sweep["metadata"], "name": "sweep"}
    shift.measure(sweep, finishedAt="2027-01-01T00:00:00Z")
    await shift.work(30, 8)
    assert (shift.policy["reason"], shift.policy["evidence"], shift.done()) == ("BestMeasured", "nightly", [])
    shift.change(policy={**WINDOW, "mode": "Enforce", "evidence": "sweep"})
    await shift.work(30, 8)
    assert (shift.policy["reason"], shift.done()) == ("EvidenceUnusable", [])


async def test_lossy_arm_is_never_chosen(shift: Shift) -> None:
    lossy = {**pair_70b()["speculation"], "rejectionSampling": "fly", "lossy": True}
    body = measured_capture(arms=[{"name": "on"}, {"name": "fly", "speculation": lossy}], ratio=1.0, loads=LOADS)
    await shift.serve(mode="Enforce", evidence=body)
    await shift.work(30, 64)
    assert (shift.policy["reason"], shift.done()) == ("BestMeasured", [])


@pytest.mark.parametrize("said", [{"outputs": "Different"}, {"verdict": "Incorrect"}])
async def test_arm_with_different_or_incorrect_outputs_is_never_chosen(shift: Shift, said: Body) -> None:
    body = measured_capture(arms=[{"name": "on"}, OFF_ARM], ratio=1.0, loads=LOADS)
    body["status"]["comparison"]["arms"][0] |= said
    await shift.serve(mode="Enforce", evidence=body)
    await shift.work(30, 64)
    assert (shift.policy["reason"], shift.done()) == ("BestMeasured", [])


async def test_arm_with_unknown_draft_is_not_chosen(shift: Shift) -> None:
    """Its draft is known to nobody: planned first, it waits for a model to be read."""
    unknown = {"method": "draft_model", "numSpeculativeTokens": 5, "draft": {"model": "org/unknown"}}
    arms = [{"name": "on"}, {"name": "other", "speculation": unknown}]
    await shift.serve(mode="Enforce", evidence=measured_capture(arms=arms, ratio=1.0, loads=LOADS))
    await shift.work(30, 64)
    assert (shift.policy["reason"], shift.done()) == ("SettingDoesNotFit", [])
    assert shift.speculation() is not None


async def test_arm_whose_engines_fail_to_start_is_rolled_back_and_not_retried(shift: Shift) -> None:
    await shift.serve(mode="Enforce")
    await shift.work(2, 64)
    served = shift.world.all(DEPLOYMENT)[0]["spec"]["template"]
    while not shift.done():
        await shift.work(0.5, 64)
    shift.world.serve(0)
    await shift.world.look()
    assert shift.speculation() is None
    for pod in shift.world.all(POD):
        shift.world.api.remove(POD, pod["metadata"]["name"])
    crashed = ended(2, "vllm: error: unrecognized arguments: --x")
    shift.world.start_engines(phase="Running", containerStatuses=[crashed])
    for _ in range(3):
        await shift.world.look()
    assert [name.rpartition("@")[0] for name in shift.policy["failedArms"]] == ["off"]
    assert "unrecognized arguments: --x" in shift.policy["decisions"][0]["message"]
    assert shift.world.all(DEPLOYMENT)[0]["spec"]["template"] == served
    shift.world.api.remove(POD, "llama-1")
    shift.roll_out()
    shift.world.serve()
    await shift.work(60, 64)
    assert shift.done() == [("TurnOff", "Done"), ("Keep", "Done")]
    assert shift.speculation() is not None
    fewer = {"name": "off", "speculation": {**pair_70b()["speculation"], "numSpeculativeTokens": 2}}
    for arm in ({**OFF_ARM, "name": "plain"}, fewer):
        newer = measured_capture(arms=[{"name": "on"}, arm], ratio=1.0, loads=LOADS)
        shift.measure(newer, finishedAt="2027-01-01T00:00:00Z")
        await shift.work(15, 64)
        changed = shift.done()[2:]
        assert bool(changed) is (arm is fewer), "what failed is not taken by another name, and another arm of its is"


async def test_policy_changes_bypass_the_rollout_gate(shift: Shift) -> None:
    gated = {"gate": {"capture": "golden"}}
    await shift.serve(mode="Enforce", spec={"rollout": gated})
    await shift.work(30, 64)
    assert shift.speculation() is None
    await shift.work(30, 8)
    assert shift.done() == [("TurnOff", "Done"), ("TryAgain", "Done")]
    assert shift.speculation() is not None
    shift.change(speculation={**pair_70b()["speculation"], "numSpeculativeTokens": 3})
    await shift.world.look()
    assert shift.world.said("Ready")[1] == "GoldenNotReady"


ILLEGAL = "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"
IN_DRAFTER = f"""ERROR 01-01 00:00:00 [core.py:1] Traceback (most recent call last):
ERROR 01-01 00:00:00 [core.py:1]   File "/usr/lib/vllm/v1/spec_decode/eagle.py", line 310, in propose
ERROR 01-01 00:00:00 [core.py:1] {ILLEGAL}"""


async def crash(
    shift: Shift, times: int, message: str = ILLEGAL, minutes: float = 10, reason: str = "Error", engines: int = 1
) -> None:
    """Let engines crash together some times, and serve again after each."""
    for _ in range(times):
        await shift.work(minutes, 8)
        for pod in shift.world.all(POD)[:engines]:
            end(shift, pod, message, reason)
        await shift.work(1, 8)


def moment(shift: Shift, ahead_s: float = 0) -> str:
    """Return the time after a number of seconds, as Kubernetes writes it."""
    return (shift.clock.now() + timedelta(seconds=ahead_s)).strftime("%Y-%m-%dT%H:%M:%SZ")


def end(shift: Shift, pod: Body, message: str = ILLEGAL, reason: str = "Error", ahead_s: float = 0) -> None:
    """Let an engine end and start again, by the clock of its node."""
    (before,) = pod["status"].get("containerStatuses") or [{"restartCount": 0}]
    last = ended(1, message, reason=reason)
    last["lastState"]["terminated"]["finishedAt"] = moment(shift, ahead_s)
    last["lastState"]["terminated"]["containerID"] = f"containerd://{before['restartCount']}"
    again = {**last, "restartCount": before["restartCount"] + 1, "ready": True, "state": {"running": {}}}
    shift.world.api.change(POD, pod["metadata"]["name"], status={**pod["status"], "containerStatuses": [again]})


@pytest.mark.parametrize("policy", [{"mode": "Enforce"}, {"onCrashLoop": "ServeWithoutSpeculation"}])
async def test_crash_loop_turns_speculation_off_until_the_spec_changes(shift: Shift, policy: Body) -> None:
    await shift.serve(**policy)
    await crash(shift, 2)
    assert shift.speculation() is not None, "two may be one request that is sent again"
    await crash(shift, 1)
    assert shift.speculation() is None
    assert (shift.policy["reason"], shift.policy["speculation"]["method"]) == ("CrashLoop", "none")
    assert shift.done() == [("TurnOff", "Done")]
    status, reason, message = shift.world.said("SpeculationEffective")
    assert (status, reason) == ("False", "CrashLoop")
    assert ILLEGAL in message
    assert shift.world.told().count("PolicyActed") == 1
    shift.begin()
    await shift.work(150, 8)
    assert shift.speculation() is None, "neither time nor another process tries again"
    shift.change(serving={"maxModelLen": 8192, "maxNumSeqs": 128})
    await shift.work(10, 8)
    assert shift.speculation() is not None


async def test_spec_change_restores_speculation_within_the_hour_of_a_crash_loop(shift: Shift) -> None:
    await shift.serve(mode="Enforce")
    await crash(shift, 3)
    assert shift.speculation() is None
    shift.change(serving={"maxModelLen": 8192, "maxNumSeqs": 128})
    await shift.work(15, 8)
    assert shift.speculation() is not None
    assert "CrashLoop" not in {each["reason"] for each in shift.world.object["status"]["conditions"]}


async def test_simultaneous_crashes_count_once(shift: Shift) -> None:
    """A driver reset, or a request that the gateway sends to one replica after the other."""
    await shift.serve(mode="Enforce", engines=3)
    await crash(shift, 1, engines=3)
    assert shift.speculation() is not None
    await crash(shift, 2, engines=3)
    assert shift.speculation() is None


async def test_an_engine_that_crashes_each_minute_is_a_loop(shift: Shift) -> None:
    await shift.serve(mode="Enforce")
    await crash(shift, 2, minutes=0.5)
    assert shift.speculation() is not None
    await crash(shift, 1, minutes=0.5)
    assert shift.speculation() is None


async def test_crash_counts_once_before_and_after_the_restart(shift: Shift) -> None:
    """The kubelet reports it as the state of the container, then as its last state with one restart more."""
    await shift.serve(mode="Enforce")
    await crash(shift, 1)
    end(shift, shift.world.all(POD)[0])
    (pod,) = shift.world.all(POD)
    (after,) = pod["status"]["containerStatuses"]
    first = {**after, "state": after["lastState"], "lastState": {}, "restartCount": after["restartCount"] - 1}
    shift.world.api.change(POD, "llama-0", status={**pod["status"], "containerStatuses": [first]})
    await shift.world.look()
    shift.world.api.change(POD, "llama-0", status=pod["status"])
    await shift.work(1, 8)
    assert shift.speculation() is not None


async def test_pod_that_never_becomes_ready_is_no_crash_loop(shift: Shift) -> None:
    await shift.serve(mode="Enforce", engines=2)
    await shift.work(10, 8)
    shift.world.api.change(POD, "llama-1", status={"podIP": "127.0.0.1", "conditions": []})
    shift.begin()
    for _ in range(4):
        await shift.work(10, 8)
        end(shift, shift.world.api.find(POD, "llama-1") or {})
    await shift.work(1, 8)
    assert shift.speculation() is not None
    assert "CrashLoop" not in shift.world.told()


async def test_long_escaped_crash_message_does_not_prevent_turning_off(shift: Shift) -> None:
    await shift.serve(mode="Enforce")
    await crash(shift, 3, f"RuntimeError: {chr(0x10FFFF) * 290}")
    assert shift.speculation() is None
    assert len(shift.policy["message"]) <= 1024


async def test_acceptance_below_break_even_is_reported(shift: Shift) -> None:
    """An 8B draft for 70B with K 5 needs 11 % at low load, by the weights that a step reads."""
    await shift.serve(mode="Observe")
    await shift.work(150, 8, accepted=0.02)
    status, reason, message = shift.world.said("SpeculationEffective")
    assert (status, reason) == ("False", "BelowBreakEven")
    assert "11.4%" in message


async def test_on_crash_loop_report_keeps_speculation_and_reports(shift: Shift) -> None:
    await shift.serve(mode="Enforce", onCrashLoop="Report")
    await crash(shift, 4, IN_DRAFTER)
    assert shift.speculation() is not None
    status, reason, message = shift.world.said("SpeculationEffective")
    assert (status, reason) == ("False", "CrashLoop")
    assert "4 times" in message
    assert "drafter" in message
    assert "spec.policy.onCrashLoop" in message
    await shift.work(90, 8)
    assert shift.world.said("SpeculationEffective")[1] != "CrashLoop", "an hour without a crash"


async def test_crash_loop_is_reported_without_a_policy(shift: Shift) -> None:
    await shift.serve()
    shift.change(policy=None)
    await crash(shift, 3)
    assert shift.world.said("SpeculationEffective")[:2] == ("False", "CrashLoop")
    assert shift.speculation() is not None


@pytest.mark.parametrize(("minutes", "reason"), [(35, "Error"), (10, "Unknown"), (10, "ContainerStatusUnknown")])
async def test_rare_crashes_and_node_restarts_are_no_crash_loop(shift: Shift, minutes: float, reason: str) -> None:
    await shift.serve(mode="Enforce")
    await crash(shift, 4, minutes=minutes, reason=reason)
    assert shift.speculation() is not None
    assert "CrashLoop" not in shift.world.told()


async def test_crash_loop_that_also_occurs_without_speculation_keeps_it(shift: Shift) -> None:
    await shift.serve(mode="Enforce", spec={"speculation": {"method": "none"}})
    await crash(shift, 3)
    shift.change(speculation=pair_70b()["speculation"])
    await crash(shift, 3)
    assert shift.speculation() is not None
    await crash(shift, 3, IN_DRAFTER)
    assert shift.speculation() is None, "a traceback through the drafter is its fault"


async def test_paused_policy_reports_crash_loop_and_keeps_speculation(shift: Shift) -> None:
    await shift.serve(mode="Enforce", paused=True)
    await crash(shift, 3)
    assert shift.speculation() is not None
    assert (shift.policy["outcome"], shift.policy["reason"]) == ("Paused", "CrashLoop")
    assert "paused" in shift.world.said("SpeculationEffective")[2]


async def test_changing_on_crash_loop_to_report_restores_speculation(shift: Shift) -> None:
    await shift.serve(onCrashLoop="ServeWithoutSpeculation")
    await crash(shift, 3)
    assert shift.speculation() is None
    shift.change(policy={**WINDOW, "onCrashLoop": "Report"})
    await shift.work(10, 8)
    assert shift.speculation() is not None


CHANGED = {"maxModelLen": 8192, "maxNumSeqs": 64}


@pytest.mark.parametrize(
    ("change", "ready"),
    [
        ({"serving": CHANGED, "rollout": {"gate": {"capture": "golden"}}}, "GoldenNotReady"),
        ({"serving": CHANGED, "rollout": {"strategy": "Canary"}}, "CanaryStarting"),
        ({"serving": CHANGED, "rollout": {"paused": True}}, "RolloutPaused"),
        ({"serving": {"maxModelLen": 1_000_000}}, "Invalid"),
    ],
)
async def test_engines_of_an_earlier_spec_are_watched_and_left_alone(shift: Shift, change: Body, ready: str) -> None:
    await shift.serve(mode="Enforce")
    await shift.work(5, 8)
    (before,) = shift.world.all(POD)
    shift.change(**change)
    await shift.world.look()
    if ready == "RolloutPaused":
        counts = {"replicas": 1, "updatedReplicas": 0, "availableReplicas": 1}
        shift.world.api.change(DEPLOYMENT, "llama", status={"observedGeneration": 9, **counts})
    await crash(shift, 2)
    assert shift.world.said("Ready")[1] == ready
    assert "CrashLoop" not in shift.world.told()
    await crash(shift, 1)
    status, reason, message = shift.world.said("SpeculationEffective")
    assert (status, reason) == ("False", "CrashLoop")
    assert "earlier rollout" in message
    (after,) = shift.world.all(POD)
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    assert shift.done() == []
    assert shift.world.told().count("CrashLoop") == 1


async def test_engines_after_a_rollback_are_watched_and_left_alone(shift: Shift) -> None:
    await shift.serve(mode="Enforce")
    await shift.work(5, 8)
    shift.change(serving=CHANGED)
    shift.world.serve(0)
    await shift.world.look()
    shift.world.api.remove(POD, "llama-0")
    refused = ended(2, "vllm: error: unrecognized arguments: --x")
    shift.world.start_engines("llama-0", phase="Running", containerStatuses=[refused])
    for _ in range(3):
        await shift.world.look()
    shift.world.api.remove(POD, "llama-0")
    shift.roll_out()
    shift.world.serve()
    await crash(shift, 3)
    assert shift.world.said("Ready")[1] == "RolledBack"
    assert shift.world.said("SpeculationEffective")[:2] == ("False", "CrashLoop")
    assert shift.done() == []


async def test_crashes_before_a_change_that_waits_count_with_those_after_it(shift: Shift) -> None:
    await shift.serve(mode="Enforce")
    await crash(shift, 2)
    shift.change(serving=CHANGED, rollout={"paused": True})
    await crash(shift, 1)
    assert shift.world.said("SpeculationEffective")[1] == "CrashLoop"


@pytest.mark.parametrize("ahead_s", [-10_000, 10_000])
async def test_the_clock_of_a_node_hides_no_crash_loop(shift: Shift, ahead_s: float) -> None:
    await shift.serve(mode="Enforce")
    for _ in range(3):
        await shift.work(10, 8)
        end(shift, shift.world.all(POD)[0], ahead_s=ahead_s)
        await shift.work(1, 8)
    assert shift.speculation() is None


async def test_a_node_whose_clock_steps_back_to_the_last_crash_hides_no_crash_loop(shift: Shift) -> None:
    await shift.serve(mode="Enforce")
    await shift.work(10, 8)
    began = shift.clock.now()
    for _ in range(3):
        end(shift, shift.world.all(POD)[0], ahead_s=(began - shift.clock.now()).total_seconds())
        await shift.work(10, 8)
    assert shift.speculation() is None


@pytest.mark.parametrize(("minutes", "jump_s", "is_loop"), [(10, 7200, True), (10, -7200, True), (35, -2700, False)])
async def test_the_clock_of_the_api_server_neither_hides_nor_makes_a_crash_loop(
    shift: Shift, minutes: float, jump_s: float, *, is_loop: bool
) -> None:
    await shift.serve(mode="Enforce")
    for _ in range(3):
        await crash(shift, 1, minutes=minutes)
        shift.clock.jump(jump_s)
    await shift.work(1, 8)
    assert (shift.speculation() is None) is is_loop
    assert ("CrashLoop" in shift.world.told()) is is_loop


@pytest.mark.parametrize("is_seen_running", [True, False])
async def test_engines_that_are_deleted_on_a_node_whose_clock_is_slow_do_not_crash(
    shift: Shift, *, is_seen_running: bool
) -> None:
    await shift.serve(mode="Enforce")
    for _ in range(3):
        await shift.work(10, 8)
        pod = shift.world.all(POD)[0]
        leaving = {"deletionTimestamp": moment(shift, 30), "deletionGracePeriodSeconds": 30}
        shift.world.api.change(POD, "llama-0", metadata={**pod["metadata"], **leaving})
        if is_seen_running:
            await shift.work(0.5, 8)
        end(shift, shift.world.all(POD)[0], ahead_s=-600 if is_seen_running else 1)
        await shift.work(0.5, 8)
        shift.world.api.remove(POD, "llama-0")
        shift.roll_out()
    await shift.work(1, 8)
    assert shift.speculation() is not None
    assert "CrashLoop" not in shift.world.told()


CANARIES: Body = {"canaries": {}}
WRONG = CanaryReading(right=10, wrong=3, wrong_prompts=2)


@pytest.mark.parametrize("policy", [{}, {"onCrashLoop": "Report"}])
async def test_wrong_canary_answers_turn_speculation_off_until_the_spec_changes(shift: Shift, policy: Body) -> None:
    await shift.serve(mode="Enforce", **CANARIES, **policy)
    shift.canaries["llama-0"] = CanaryReading(right=10, wrong=9, unconfirmed=5, failed=7, wrong_prompts=1)
    await shift.work(10, 8)
    assert shift.speculation() is not None, "one prompt may lie at a near tie"
    shift.canaries["llama-0"] = WRONG
    await shift.work(1, 8)
    assert shift.speculation() is None
    assert (shift.policy["reason"], shift.policy["arm"]) == ("WrongAnswers", "without speculation")
    assert shift.done() == [("TurnOff", "Done")]
    status, reason, message = shift.world.said("SpeculationEffective")
    assert (status, reason) == ("False", "WrongAnswers")
    assert "llama-0 gave 3 wrong answers to 2 canary prompts" in message
    assert "of 13 answers" in message
    assert shift.world.told().count("PolicyActed") == 1
    shift.begin()
    shift.canaries["llama-0"] = CanaryReading(right=50)
    await shift.work(150, 8)
    assert shift.speculation() is None, "neither time nor another process tries again"
    shift.change(serving={"maxModelLen": 8192, "maxNumSeqs": 128})
    await shift.work(10, 8)
    assert shift.speculation() is not None
    assert shift.world.object["status"]["policy"]["reason"] != "WrongAnswers"


@pytest.mark.parametrize("mode", ["Observe", "Advise"])
async def test_observe_and_advise_only_report_wrong_canary_answers(shift: Shift, mode: str) -> None:
    await shift.serve(mode=mode, engines=2, onCrashLoop="ServeWithoutSpeculation", **CANARIES)
    shift.canaries = dict.fromkeys(("llama-0", "llama-1"), WRONG)
    await shift.work(2, 8)
    assert shift.speculation() is not None
    status, reason, message = shift.world.said("SpeculationEffective")
    assert (status, reason) == ("False", "WrongAnswers")
    assert "as 1 more engines do" in message
    assert "spec.policy.mode: Enforce" in message
    assert "WrongAnswers" in shift.world.told()
    shift.canaries.clear()
    await shift.work(2, 8)
    found = {each["reason"] for each in shift.world.object["status"]["conditions"]}
    assert "WrongAnswers" not in found, "restarted engines have given no wrong answer"


async def test_unreachable_engine_does_not_clear_wrong_answers(shift: Shift) -> None:
    await shift.serve(**CANARIES)
    shift.canaries["llama-0"] = WRONG
    await shift.work(2, 8)
    shift.said.return_value = {"llama-0": Unreachable("timeout")}
    await shift.world.look()
    assert shift.world.said("SpeculationEffective")[1] == "WrongAnswers"


async def test_canary_counters_are_ignored_without_canaries_in_the_spec(shift: Shift) -> None:
    await shift.serve(mode="Enforce")
    shift.canaries["llama-0"] = WRONG
    await shift.work(2, 8)
    assert shift.speculation() is not None
    assert "canaries" not in shift.world.object["status"]


async def test_wrong_answers_without_speculation_are_not_attributed_to_it(shift: Shift) -> None:
    await shift.serve(mode="Enforce", **CANARIES)
    shift.canaries["llama-0"] = WRONG
    await shift.work(5, 8)
    assert shift.speculation() is None
    shift.canaries["llama-0"] = WRONG
    await shift.work(5, 8)
    status, reason, message = shift.world.said("SpeculationEffective")
    assert (status, reason) == ("False", "WrongAnswers")
    assert "do not speculate" in message
    assert shift.done() == [("TurnOff", "Done")]


async def test_one_wrong_prompt_is_enough_if_only_one_is_configured(shift: Shift) -> None:
    await shift.serve(mode="Enforce", canaries={"prompts": ["Once upon a time"]})
    shift.canaries["llama-0"] = CanaryReading(right=3, wrong=1, wrong_prompts=1)
    await shift.work(1, 8)
    assert shift.speculation() is None


async def test_paused_policy_reports_wrong_answers(shift: Shift) -> None:
    await shift.serve(mode="Enforce", paused=True, **CANARIES)
    shift.canaries["llama-0"] = WRONG
    await shift.work(2, 8)
    assert shift.speculation() is not None
    assert (shift.policy["outcome"], shift.policy["reason"]) == ("Paused", "WrongAnswers")
    assert "paused" in shift.world.said("SpeculationEffective")[2]


async def test_changing_mode_to_advise_restores_speculation(shift: Shift) -> None:
    await shift.serve(mode="Enforce", **CANARIES)
    shift.canaries["llama-0"] = WRONG
    await shift.work(2, 8)
    assert shift.speculation() is None
    shift.change(policy={**WINDOW, **CANARIES, "mode": "Advise"})
    await shift.work(10, 8)
    assert shift.speculation() is not None


async def test_status_shows_canary_counts_and_token_cost(shift: Shift) -> None:
    await shift.serve(engines=2, canaries={"intervalSeconds": 3600, "maxTokens": 9, "prompts": ["abc", "defgh"]})
    shift.canaries = {"llama-0": CanaryReading(right=5, failed=1), "llama-1": CanaryReading(unconfirmed=1)}
    await shift.work(1, 8)
    assert shift.world.object["status"]["canaries"] == {
        "right": 5,
        "wrong": 0,
        "unconfirmed": 1,
        "failed": 1,
        "generatedTokensPerHour": 2 * (9 + 1),
        "promptTokensPerHour": 2 * (4 + 6) + 2 * 9,
    }
    # Each write of a status triggers all watches of the object.
    shift.canaries["llama-0"] = CanaryReading(right=9, failed=1)
    await shift.work(1, 8)
    assert shift.world.object["status"]["canaries"]["right"] == 5
    shift.canaries["llama-0"] = CanaryReading(right=10, failed=1)
    await shift.work(1, 8)
    assert shift.world.object["status"]["canaries"]["right"] == 10
    shift.canaries["llama-0"] = CanaryReading(unsupported="HTTP 400: \x1b no")
    await shift.work(1, 8)
    assert shift.world.object["status"]["canaries"]["unsupported"] == r"HTTP 400: \x1b no"


BY_FAR: Body = measured_capture(arms=[{"name": "on"}, OFF_ARM], ratio=1.0, loads=((8, 0.3), (64, 0.3)))
"""Speculation is the best setting at each load, even with few accepted tokens."""
RUNNING = STEPS_A_LOOK * 0.8 / LOOK_S
"""Concurrent requests if an engine needs 0.8 s for all steps of a second."""


class Days(Shift):
    """Days of engines that report the time of their steps."""

    def __init__(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(world, monkeypatch)
        self.step_s = 0.8
        self._told = Counter[str]()
        driven = Mock(monotonic=self.clock.steady_s, time=time.time)
        monkeypatch.setattr(reconcile_deployment, "time", driven)

    async def day(self, hours: float, accepted: float = 0.6) -> None:
        await self.work(hours * 60, RUNNING, accepted=accepted)

    async def night(self) -> None:
        """Let eight hours pass with a request now and then, whose drafts are accepted by chance."""
        for share in (0.0, 1.0, 0.4, 0.8):
            await self.work(120, 0, accepted=share, look_s=600, steps=2)

    def effective(self) -> tuple[str, str]:
        return self.world.said("SpeculationEffective")[:2]

    def new_events(self) -> list[str]:
        """Return the reasons of all Events since the last call, without those of ordinary rollouts."""
        told = Counter(each for each in self.world.told() if each in OF_TRIPS)
        new, self._told = told - self._told, told
        return sorted(new.elements())


OF_TRIPS = {"AcceptanceDecayed", "DraftsBringLess", "StepsSlower", "BelowBreakEven", "CrashLoop", "WrongAnswers"} | {
    "PolicyActed"
}
BEST = ("True", "BestMeasured")


@pytest.fixture
def days(world: World, monkeypatch: pytest.MonkeyPatch) -> Days:
    return Days(world, monkeypatch)


async def test_days_in_which_acceptance_falls_and_recovers(days: Days) -> None:
    await days.serve(mode="Enforce", evidence=BY_FAR, **CANARIES)
    await days.day(1)
    assert days.effective() == BEST
    await days.night()
    assert days.new_events() == [], "the few requests of a night prove nothing"
    for _ in range(2):
        await days.day(1, accepted=0.15)
        assert days.effective() == ("False", "AcceptanceDecayed")
        await days.night()
        assert days.effective() == ("False", "AcceptanceDecayed"), "a night proves no recovery either"
        await days.day(1)
        assert days.effective() == BEST
        assert days.new_events() == ["AcceptanceDecayed"]
    assert days.done() == []
    assert days.speculation() is not None


async def test_days_with_trips_that_turn_speculation_off(days: Days) -> None:
    await days.serve(mode="Enforce", evidence=BY_FAR, **CANARIES)
    await days.day(1)
    days.canaries["llama-0"] = CanaryReading(right=200, unconfirmed=1, failed=3)
    await days.night()
    assert (days.new_events(), days.done()) == ([], [])
    await crash(days, 3)
    assert (days.effective(), days.speculation()) == (("False", "CrashLoop"), None)
    await days.night()
    await days.day(1)
    assert days.effective() == ("False", "CrashLoop")
    assert days.new_events().count("PolicyActed") == 1
    days.change(engine={"version": "0.32"})
    days.measure(BY_FAR)
    await days.day(1)
    assert days.speculation() is not None
    days.canaries["llama-0"] = WRONG
    await days.day(0.1)
    assert (days.effective(), days.speculation()) == (("False", "WrongAnswers"), None)
    days.canaries["llama-0"] = CanaryReading(right=200)
    await days.night()
    await days.day(1)
    assert days.effective() == ("False", "WrongAnswers")
    assert days.new_events().count("PolicyActed") == 1
    assert days.done() == [("TurnOff", "Done"), ("TurnOff", "Done")]
    days.change(engine={"version": "0.31"})
    await days.day(1)
    assert days.speculation() is not None
    assert days.new_events() == []


async def test_days_of_adaptive_verification_raise_no_alarm(days: Days) -> None:
    """It lowers the counted acceptance by design, and further at a high load."""
    adaptive = {**pair_70b()["speculation"], "adaptiveVerification": True}
    await days.serve(mode="Enforce", evidence=BY_FAR, spec={"speculation": adaptive}, **CANARIES)
    for share in (0.6, 0.1, 0.02, 0.3):
        await days.day(1, accepted=share)
        await days.night()
    assert (days.new_events(), days.done()) == ([], [])
    assert days.speculation() is not None


async def test_predicted_load_follows_the_setting_in_force(shift: Shift) -> None:
    registry = CollectorRegistry()
    registry.register(shift.world.metrics)
    labels = {"deployment_namespace": "team", "deployment": "llama"}
    loads = ((8, 0.7), (32, 2.5), (64, 1.2))
    evidence = measured_capture(arms=[{"name": "on"}, OFF_ARM], ratio=1.0, loads=loads)
    autoscaling = {"maxReplicas": 4, "metric": "PredictedUtilization", "target": 80}
    await shift.serve(mode="Enforce", evidence=evidence, spec={"autoscaling": autoscaling})
    await shift.work(1, 64)
    assert registry.get_sample_value("specdecode_load_replicas", labels) == 1, "goodput is highest at 64 requests"
    await shift.work(60, 64)
    assert shift.speculation() is None
    assert registry.get_sample_value("specdecode_load_replicas", labels) == 2, "without drafts at 32"
