"""How long the steps of an engine's life take, how engines are replaced, and what is said on the way."""

import json
import re
from typing import Any

import pytest

from specdecode_operator.api.deployment import PodTemplate
from specdecode_operator.api.deployment_status import ConditionStatus
from specdecode_operator.cluster.nodes import NodeFacts
from specdecode_operator.deployment.conditions import ConditionUpdate
from specdecode_operator.deployment.parsed_deployment import parse_deployment
from specdecode_operator.deployment.pod_template_merge import pod_template_problems
from specdecode_operator.deployment.rollout.readiness import summarize
from specdecode_operator.deployment.rollout.rollout_progress import read_rollout
from specdecode_operator.vllm.settings import Platform
from tests.support.decisions import desired_state
from tests.support.objects import H200, Body, deployment, ended, pair_70b, parent, pod, tiny_cpu

NODES = (NodeFacts("h200-0", H200, 8),)
DRAFTING = ConditionUpdate("SpeculationActive", ConditionStatus.TRUE, "Drafting", "acceptance 71%")
OVERDUE = {"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded"}


def child(spec: dict[str, Any], kind: str) -> Body:
    children = desired_state(parse_deployment(parent(spec)), NODES).children
    return next(each for each in children if each["kind"] == kind)


def engine(spec: dict[str, Any]) -> Body:
    return child(spec, "Deployment")


def pod_spec(spec: dict[str, Any]) -> Body:
    content: Body = engine(spec)["spec"]["template"]["spec"]
    return content


@pytest.mark.parametrize(("grace_s", "drain_s"), [(31, 1), (330, 300)])
def test_a_grace_period_of_the_user_is_what_requests_get(grace_s: int, drain_s: int) -> None:
    pod = pod_spec(tiny_cpu(podTemplate={"spec": {"terminationGracePeriodSeconds": grace_s}}))
    assert pod["terminationGracePeriodSeconds"] == grace_s
    command = pod["containers"][0]["command"]
    assert command[command.index("--shutdown-timeout") + 1] == str(drain_s)


@pytest.mark.parametrize("grace_s", [30, 0, "60", True])
def test_a_grace_period_that_cuts_requests_off_is_refused(grace_s: Any) -> None:
    template = PodTemplate.model_validate({"spec": {"terminationGracePeriodSeconds": grace_s}})
    (problem,) = pod_template_problems(template, Platform.GPU)
    assert problem.field == "spec.podTemplate.spec.terminationGracePeriodSeconds"
    assert "at least 31" in problem.message


def start_budget_s(spec: dict[str, Any]) -> int:
    probe = pod_spec(spec)["containers"][0]["startupProbe"]
    seconds: int = probe["failureThreshold"] * probe["periodSeconds"]
    return seconds


def test_a_larger_model_gets_longer_to_start() -> None:
    reading_s = 156_000_000_000 // (125 * 2**20)
    assert start_budget_s(tiny_cpu()) in range(900, 911)
    assert start_budget_s(pair_70b()) in range(900 + reading_s, 900 + reading_s + 120)


def test_an_engine_that_measures_what_steps_cost_gets_longer_to_start() -> None:
    fixed = pair_70b()
    adaptive = pair_70b(speculation=fixed["speculation"] | {"adaptiveVerification": True})
    assert start_budget_s(fixed) + 30 < start_budget_s(adaptive) < start_budget_s(fixed) + 600


def test_the_rollout_is_given_up_after_the_engine_had_its_time_and_its_download() -> None:
    def deadline_s(spec: dict[str, Any]) -> int:
        seconds: int = engine(spec)["spec"]["progressDeadlineSeconds"]
        return seconds

    on_volume = {"volume": {"persistentVolumeClaim": {"claimName": "models"}}}
    assert deadline_s(pair_70b(models=on_volume)) > start_budget_s(pair_70b())
    assert deadline_s(pair_70b()) > deadline_s(pair_70b(models=on_volume)) + 1000


@pytest.mark.parametrize(
    ("strategy", "limits"),
    [("Replace", {"maxSurge": 0, "maxUnavailable": 1}), ("Surge", {"maxSurge": 1, "maxUnavailable": 0})],
)
def test_the_strategy_says_which_engine_goes_first(strategy: str, limits: dict[str, int]) -> None:
    spec = engine(tiny_cpu(rollout={"strategy": strategy}))["spec"]
    assert spec["strategy"] == {"type": "RollingUpdate", "rollingUpdate": limits}
    assert engine(tiny_cpu())["spec"]["strategy"]["rollingUpdate"]["maxSurge"] == 0


def test_the_last_words_of_the_engine_reach_the_termination_log() -> None:
    spec = tiny_cpu(engine={"image": "localhost/engine:1", "env": [{"name": "VLLM_LOGGING_LEVEL", "value": "debug"}]})
    template = engine(spec)["spec"]["template"]
    container = template["spec"]["containers"][0]
    env = {variable["name"]: variable.get("value") for variable in container["env"]}
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    (volume,) = (volume for volume in template["spec"]["volumes"] if volume["name"] == "engine-config")
    item, watch = volume["downwardAPI"]["items"]
    assert env["VLLM_LOGGING_CONFIG_PATH"] == f"{mounts['engine-config']}/{item['path']}"
    (annotation,) = re.findall(r"metadata\.annotations\['(.+)'\]", item["fieldRef"]["fieldPath"])
    config = json.loads(template["metadata"]["annotations"][annotation])
    assert config["handlers"]["lastWords"]["filename"] == "/dev/termination-log"
    assert config["loggers"]["vllm"]["level"] == "DEBUG"
    assert config["filters"]["runSettingsWatch"]["path_name"] == f"{mounts['engine-config']}/{watch['path']}"


def test_the_disruption_budget_keeps_no_broken_engine_on_a_node() -> None:
    spec = child(tiny_cpu(replicas=2), "PodDisruptionBudget")["spec"]
    assert (spec["maxUnavailable"], spec["unhealthyPodEvictionPolicy"]) == (1, "AlwaysAllow")


def summary(live: Body, *pods: Body, paused: bool = False) -> tuple[str, str, bool, bool]:
    rollout = read_rollout(live, list(pods), 2)
    found = summarize(rollout, DRAFTING, None, 1, paused=paused)
    return found.status, found.reason, found.reconciling, found.stalled


@pytest.mark.parametrize(
    "status",
    [
        {"conditions": [{"type": "DisruptionTarget", "status": "True", "message": "Taint manager: deleting"}]},
        {"phase": "Failed", "reason": "Terminated", "message": "Pod was terminated in response to node shutdown."},
        {"phase": "Failed", "reason": "NodeLost"},
    ],
)
def test_a_lost_node_is_told_and_its_pod_started_elsewhere(status: Body) -> None:
    lost = pod("llama-lost", created="2026-01-01T00:00:00Z", **status)
    lost["metadata"]["deletionTimestamp"] = "2026-01-02T00:00:00Z"
    live = deployment(replicas=2, updated=2, available=1)
    assert summary(live, lost) == ("Unknown", "NodeLost", True, False)
    unscheduled = pod(conditions=[{"type": "PodScheduled", "status": "False", "message": "0/1 nodes are available"}])
    assert summary(live, lost, unscheduled)[1] == "Unschedulable", "what its successor lacks says more"


def test_what_the_controller_said_of_an_earlier_spec_says_nothing_of_this_one() -> None:
    live = deployment(replicas=2, updated=2, available=0, generation=2)
    refused = {"type": "ReplicaFailure", "status": "True", "message": "exceeded quota"}
    live["status"]["conditions"] = [OVERDUE, refused]
    earlier = read_rollout(live, [], 2)
    assert (earlier.overdue, earlier.blocked) == (False, None)
    live["status"]["observedGeneration"] = 2
    present = read_rollout(live, [], 2)
    assert present.overdue
    assert present.blocked is not None
    assert (present.blocked.reason, present.blocked.message) == (
        "PodsRefused",
        "no engine pod can be created: exceeded quota",
    )


def test_how_an_engine_ends_that_is_to_go_is_no_trouble() -> None:
    ending = pod("llama-old", containerStatuses=[ended(137)])
    ending["metadata"]["deletionTimestamp"] = "2026-01-02T00:00:00Z"
    assert summary(deployment(replicas=2, updated=2, available=1), ending)[1] == "Starting"
