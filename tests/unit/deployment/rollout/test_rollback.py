"""Roll back a spec whose engines never serve, and retry only a changed spec."""

import json
from datetime import UTC, datetime
from typing import Any

import pytest

from specdecode_operator.api.deployment_status import Condition
from specdecode_operator.cluster.resources import TEMPLATE_HASH_ANNOTATION
from specdecode_operator.deployment.desired_state import DesiredState, RolledBack
from specdecode_operator.deployment.observed.observation import Observation, update_last_good
from specdecode_operator.deployment.parsed_deployment import ParsedDeployment, parse_deployment
from specdecode_operator.deployment.rollout.rollback import Failure, LastGood, read_last_good, render_last_good
from specdecode_operator.deployment.status import compose_status
from tests.support.decisions import desired_state
from tests.support.objects import Body, ended, parent, pod, tiny_cpu, waiting

NOW = datetime(2026, 1, 1, tzinfo=UTC)
REFUSED = ended(2, "vllm: error: unrecognized arguments: --nonsense")
TEMPLATE = {"metadata": {"annotations": {TEMPLATE_HASH_ANNOTATION: "abc"}}, "spec": {"containers": []}}
WORKLOAD: Body = {"apiVersion": "apps/v1", "kind": "Deployment", "spec": {"template": TEMPLATE}}
CRASHED = ended(1, "RuntimeError: NCCL error in ncclCommInitRank")


class Story:
    """One object through its changes, as a reconciler would take it."""

    def __init__(self) -> None:
        self.memory: LastGood | None = None
        self.generation = 0
        self.spec: Body = {}
        self.status: Body = {}
        self.good = ""

    def apply(self, **changes: Any) -> None:
        """Write the spec."""
        self.generation += 1
        self.spec = tiny_cpu(**changes)

    def look(self, serving: int = 0, *pods: Body, replicas: int = 1, overdue: bool = False) -> dict[str, Condition]:
        """Reconcile with so many engines of the wanted template serving; return the conditions."""
        owner = parse_deployment(parent(self.spec, generation=self.generation, status=self.status))
        # What is remembered goes through the cluster: the operator may be another one each time.
        kept = render_last_good(owner.key, owner.uid, self.memory) if self.memory else None
        memory = read_last_good(json.loads(json.dumps(kept)))
        self.desired = self.decide(owner, memory)
        observation = Observation(self._deployment(serving, replicas, overdue=overdue), list(pods))
        status = compose_status(owner, self.desired, observation, NOW)
        self.memory = update_last_good(self.desired, observation, memory)
        self.status = status.model_dump(by_alias=True, mode="json", exclude_none=True)
        return {condition.type: condition for condition in status.conditions}

    def decide(self, owner: ParsedDeployment, memory: LastGood | None) -> DesiredState:
        """Return what should exist."""
        return desired_state(owner, (), last_good=memory)

    def _deployment(self, serving: int, replicas: int, *, overdue: bool) -> Body:
        workload = self.desired.workload
        assert workload is not None
        status: Body = {
            "observedGeneration": 1,
            "replicas": replicas,
            "updatedReplicas": replicas,
            "availableReplicas": serving,
        }
        if overdue:
            why = {"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded"}
            status["conditions"] = [why]
        return {**workload, "metadata": {**workload["metadata"], "generation": 1}, "status": status}

    @property
    def template_hash(self) -> str:
        """Hash of the template that the engines have now."""
        assert self.desired.workload is not None
        annotations = self.desired.workload["spec"]["template"]["metadata"]["annotations"]
        return str(annotations[TEMPLATE_HASH_ANNOTATION])


def changed(**changes: Any) -> Body:
    """Fields of another engine."""
    return {"serving": {"maxModelLen": 512}, **changes}


@pytest.fixture
def story() -> Story:
    """An object whose engine serves, then a spec that changes it."""
    story = Story()
    story.apply()
    assert story.look(1)["Ready"].reason == "Serving"
    story.good = story.template_hash
    story.apply(**changed())
    return story


@pytest.mark.parametrize(
    ("pod_fields", "permission"),
    [
        ({"hostPID": True}, {"pod_template": frozenset({"hostPID"})}),
        ({"volumes": [{"name": "r", "hostPath": {"path": "/mnt/models"}}]}, {"host_paths": ("/mnt",)}),
    ],
    ids=["a field of podTemplate", "a directory of the nodes"],
)
def test_rollback_needs_the_permissions_of_the_last_good_spec(
    story: Story, pod_fields: Body, permission: dict[str, Any]
) -> None:
    story.look(0, crash_looping(0, REFUSED))
    assert story.memory is not None
    workload = story.memory.workload
    workload["spec"]["template"]["spec"] |= pod_fields
    owner = parse_deployment(parent(story.spec, generation=story.generation))
    kept = LastGood.of(workload, story.memory.failure)
    outcomes = [desired_state(owner, last_good=kept, **given).outcome for given in (permission, {})]
    assert [isinstance(outcome, RolledBack) for outcome in outcomes] == [True, False]


def crash_looping(times: int, container: Body = CRASHED) -> Body:
    return pod(containerStatuses=[{**container, "restartCount": times}])


def stand(conditions: dict[str, Condition]) -> tuple[str, str, str, str]:
    return (
        conditions["Ready"].status,
        conditions["Ready"].reason,
        conditions["Reconciling"].status,
        conditions["Stalled"].status,
    )


@pytest.mark.parametrize(
    ("pods", "overdue", "cause"),
    [
        ([crash_looping(0, REFUSED)], False, "EngineRefusesArguments: vllm: error: unrecognized arguments: --nonsense"),
        ([crash_looping(3)], False, "EngineFailed: engine ended with exit code 1: RuntimeError: NCCL error"),
        ([pod(containerStatuses=[waiting("ImagePullBackOff", "not found")])], True, "ImagePullFailed: image i:1"),
        ([], True, "EngineReadyTimeout: no engine became ready within 1505 s and"),
    ],
    ids=["refuses at once", "crash loop", "image", "hangs"],
)
def test_failed_spec_rolls_back_to_the_last_good_engines(
    story: Story, pods: list[Body], overdue: bool, cause: str
) -> None:
    story.look(0, *pods, overdue=overdue)
    assert stand(story.look(0)) == ("False", "RolledBack", "True", "False")
    assert story.template_hash == story.good
    conditions = story.look(1)
    assert stand(conditions) == ("False", "RolledBack", "False", "True")
    assert cause in conditions["Ready"].message
    assert conditions["Available"].status == "True"
    assert conditions["SpeculationActive"].reason == "RolledBack"


@pytest.mark.parametrize(
    "pods",
    [
        [],
        [crash_looping(2)],
        [crash_looping(9, waiting("ImagePullBackOff"))],
        [pod(conditions=[{"type": "PodScheduled", "status": "False", "message": "0/1 nodes are available"}])],
    ],
    ids=["starts", "crashed twice", "waits for its image", "waits for a node"],
)
def test_engine_that_may_still_start_is_not_rolled_back(story: Story, pods: list[Body]) -> None:
    story.look(0, *pods)
    assert stand(story.look(0, *pods))[1] != "RolledBack"
    assert story.template_hash != story.good


def test_scaling_applies_without_retrying_the_failed_spec(story: Story) -> None:
    story.look(0, crash_looping(0, REFUSED))
    story.apply(**changed(replicas=3))
    assert story.look(1, replicas=3)["Ready"].reason == "RolledBack"
    assert story.desired.workload is not None
    assert story.desired.workload["spec"]["replicas"] == 3
    assert story.template_hash == story.good
    story.apply(**changed(suspend=True))
    assert stand(story.look(0, replicas=0)) == ("True", "Suspended", "False", "False")


def test_changed_spec_is_tried_and_becomes_last_good_once_ready(story: Story) -> None:
    story.look(0, crash_looping(0, REFUSED))
    story.look(1)
    story.apply(**changed(serving={"maxModelLen": 256}))
    assert story.look(0)["Ready"].reason == "Starting"
    assert story.look(1)["Ready"].reason == "Serving"
    second = story.template_hash
    story.apply(**changed())
    assert story.look(0)["Ready"].reason == "Starting", "the spec changed: it is tried again"
    story.look(0, crash_looping(0, REFUSED))
    story.look(1)
    assert story.template_hash == second


def test_engines_that_served_are_not_rolled_back_for_later_crashes() -> None:
    story = Story()
    story.apply()
    story.look(1)
    story.apply(replicas=2)
    story.look(1, crash_looping(9), replicas=2, overdue=True)
    assert not isinstance(story.desired.outcome, RolledBack)
    assert story.look(1, crash_looping(9), replicas=2)["Ready"].reason != "RolledBack"


def test_first_spec_that_fails_reports_its_error() -> None:
    story = Story()
    story.apply()
    story.look(0, crash_looping(0, REFUSED))
    assert stand(story.look(0, crash_looping(0, REFUSED))) == ("False", "EngineRefusesArguments", "False", "True")
    assert story.memory is None


def test_paused_rollout_is_not_rolled_back(story: Story) -> None:
    story.apply(**changed(rollout={"paused": True}))
    story.look(0, crash_looping(0, REFUSED))
    assert story.look(0, crash_looping(0, REFUSED))["Ready"].reason == "EngineRefusesArguments"
    story.apply(**changed())
    story.look(0, crash_looping(0, REFUSED))
    assert story.look(1)["Ready"].reason == "RolledBack"


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"engines.json": "{"},
        {"engines.json": "[]"},
        {"engines.json": '{"kind": "Pod", "spec": {}}'},
        {"engines.json": '{"apiVersion": "apps/v1", "kind": "Deployment", "spec": {"template": {"spec": {}}}}'},
        {"engines.json": json.dumps(WORKLOAD | {"spec": {"template": {"metadata": {"annotations": None}}}})},
        {"engines.json": json.dumps(WORKLOAD), "failure.json": "3"},
    ],
)
def test_broken_last_good_config_map_is_ignored(data: dict[str, str]) -> None:
    assert read_last_good({"metadata": {"name": "llama-last-good"}, "data": data}) is None


def test_last_good_survives_a_config_map_round_trip() -> None:
    memory = LastGood.of(WORKLOAD, Failure("attempt", "EngineFailed", "it said \u201cno\u201d"))
    owner = parse_deployment(parent(tiny_cpu()))
    assert read_last_good(render_last_good(owner.key, owner.uid, memory)) == memory
