"""Replicas on several nodes: planned and rendered as groups of pods."""

import json
from typing import Any

import pytest

from specdecode_operator.api.base import Body
from specdecode_operator.api.deployment_status import Condition, SpecDecodeDeploymentStatus
from specdecode_operator.cluster.nodes import NodeFacts
from specdecode_operator.deployment.desired_state import DesiredState
from specdecode_operator.deployment.observed.observation import Observation
from specdecode_operator.deployment.parsed_deployment import parse_deployment
from specdecode_operator.deployment.status import compose_status
from tests.support.decisions import NOW, desired_state
from tests.support.model_caches import pod as downloaded_by
from tests.support.objects import H100, pair_70b, parent

B405 = "meta-llama/Llama-3.1-405B-Instruct"
MOE = "Qwen/Qwen3-235B-A22B"
TWO_H100 = tuple(NodeFacts(f"h100-{number}", H100, 8) for number in range(2))
FOUR_H100 = tuple(NodeFacts(f"h100-{number}", H100, 8) for number in range(4))


def ngram(model: str = B405, **changes: Any) -> Body:
    """A spec that speculates with n-grams, which go with stages."""
    speculation = {"method": "ngram", "numSpeculativeTokens": 4}
    return pair_70b(**({"target": {"model": model}, "speculation": speculation, "parallelism": {}} | changes))


def decide(
    spec: Body, nodes: tuple[NodeFacts, ...], *, groups: bool = True, **owner: Any
) -> tuple[DesiredState, SpecDecodeDeploymentStatus, dict[str, Condition]]:
    read = parse_deployment(parent(spec, **owner))
    desired = desired_state(read, nodes, has_leader_worker_sets=groups)
    status = compose_status(read, desired, Observation(), NOW)
    return desired, status, {condition.type: condition for condition in status.conditions}


def child(desired: DesiredState, kind: str) -> Body | None:
    return next((each for each in desired.children if each["kind"] == kind), None)


def group(spec: Body, nodes: tuple[NodeFacts, ...] = TWO_H100) -> Body:
    desired, _, conditions = decide(spec, nodes)
    found = child(desired, "LeaderWorkerSet")
    assert found is not None, conditions["Planned"]
    assert child(desired, "Deployment") is None
    return found


def templates(groups: Body) -> tuple[Body, Body]:
    both = groups["spec"]["leaderWorkerTemplate"]
    return both["leaderTemplate"], both["workerTemplate"]


def engine_of(template: Body) -> Body:
    container: Body = template["spec"]["containers"][0]
    return container


def value_of(template: Body, flag: str) -> str:
    command = engine_of(template)["command"]
    assert command.count(flag) == 1
    value: str = command[command.index(flag) + 1]
    return value


STAGES = ngram(parallelism={"tensor": 8, "pipeline": 2})


def test_user_text_that_looks_like_a_variable_is_escaped() -> None:
    served = "$(LWS_LEADER_ADDRESS)"
    leader, _ = templates(group({**STAGES, "serving": {"maxModelLen": 8192, "servedModelNames": [served]}}))
    assert value_of(leader, "--served-model-name") == "$$(LWS_LEADER_ADDRESS)"


def test_only_the_leader_has_service_labels_probes_and_api_key() -> None:
    spec = {**STAGES, "serving": {"maxModelLen": 8192, "apiKeySecret": {"name": "clients", "key": "key"}}}
    desired, status, _ = decide(spec, TWO_H100)
    groups, service = child(desired, "LeaderWorkerSet"), child(desired, "Service")
    assert groups is not None
    assert service is not None
    leader, worker = templates(groups)
    selector = service["spec"]["selector"].items()
    assert selector <= leader["metadata"]["labels"].items()
    assert not selector <= worker["metadata"]["labels"].items()
    assert status.selector == ",".join(f"{name}={value}" for name, value in sorted(selector)), "what autoscalers count"
    probes = {"startupProbe", "readinessProbe", "livenessProbe"}
    assert probes <= engine_of(leader).keys()
    assert not (probes | {"ports"}) & engine_of(worker).keys()
    assert "VLLM_API_KEY" not in {variable["name"] for variable in engine_of(worker)["env"]}


def test_groups_restart_as_a_whole_and_follow_the_rollout_strategy() -> None:
    spec = group(STAGES)["spec"]
    assert spec["leaderWorkerTemplate"]["restartPolicy"] == "RecreateGroupOnPodRestart"
    assert spec["rolloutStrategy"]["rollingUpdateConfiguration"] == {"maxSurge": 0, "maxUnavailable": 1, "partition": 0}
    surge = group({**STAGES, "replicas": 3, "rollout": {"strategy": "Surge"}})["spec"]
    assert surge["replicas"] == 3
    assert surge["rolloutStrategy"]["rollingUpdateConfiguration"] == {
        "maxSurge": 1,
        "maxUnavailable": 0,
        "partition": 0,
    }
    assert group({**STAGES, "suspend": True})["spec"]["replicas"] == 0


def test_paused_rollout_starts_no_surge_group() -> None:
    """A surge group lies above the partition, and so is of the new template (rollingUpdateParameters of LWS 0.8)."""
    paused = group({**STAGES, "replicas": 3, "rollout": {"strategy": "Surge", "paused": True}})["spec"]
    assert paused["rolloutStrategy"]["rollingUpdateConfiguration"] == {
        "maxSurge": 0,
        "maxUnavailable": 1,
        "partition": 3,
    }


def test_name_longer_than_45_characters_is_refused_for_groups() -> None:
    _, _, conditions = decide(STAGES, TWO_H100, name="l" * 46)
    assert conditions["Accepted"].status == "False"
    assert "metadata.name" in conditions["Ready"].message
    assert "45 characters or less" in conditions["Ready"].message
    assert decide(STAGES, TWO_H100, name="l" * 45)[2]["Accepted"].status == "True"


def test_data_parallel_ranks_are_spread_over_nodes() -> None:
    spec = ngram(MOE, parallelism={"tensor": 4, "data": 4, "expert": True})
    leader, worker = templates(group(spec))
    for template in (leader, worker):
        assert value_of(template, "--data-parallel-size") == "4"
        assert "--enable-expert-parallel" in engine_of(template)["command"]
        assert not [each for each in engine_of(template)["command"] if each.startswith("--data-parallel-start")]
    assert value_of(leader, "--nnodes") == "2", "vLLM tells the ranks of a node by its number"


CACHED = {**STAGES, "models": {"cache": {"persistentVolumeClaim": {"claimName": "models"}}}}


def cached_group(spec: Body, nodes: tuple[NodeFacts, ...] = TWO_H100) -> tuple[Body, Body]:
    """The templates of a group whose models are downloaded."""
    read = parse_deployment(parent(spec))
    jobs = [each for each in desired_state(read, nodes, has_leader_worker_sets=True).children if each["kind"] == "Job"]
    done = [downloaded_by(job, json.dumps({"commit": "0" * 40})) for job in jobs]
    workload = desired_state(read, nodes, pods=done, has_leader_worker_sets=True).workload
    assert workload is not None
    return templates(workload)


def compile_cache_of(template: Body) -> tuple[str, dict[str, str]]:
    """The folder of the compile cache on the claim, and the flags of the program that fills it."""
    (mount,) = (each for each in engine_of(template)["volumeMounts"] if each["mountPath"] == "/compiled")
    command = engine_of(template)["command"]
    start = command.index("python3") + len(("python3", "-c", "the program"))
    flags = command[start : command.index("--")]
    return mount["subPath"], dict(flag.split("=", 1) for flag in flags)


def test_pods_of_a_group_share_a_folder_for_their_compile_caches() -> None:
    leader, worker = map(compile_cache_of, cached_group(CACHED))
    assert leader[0] == worker[0]
    assert leader[1] == {
        "--folder": "/compiled",
        "--cache": "/tmp/vllm-cache",
        "--health": "http://127.0.0.1:8000/health",
        "--pods": "2",
        "--rank": "$(LWS_WORKER_INDEX)",
        "--leader": "$(VLLM_HOST_IP)",
    }
    address = "$(LWS_LEADER_ADDRESS)"
    assert worker[1] == leader[1] | {"--leader": address, "--health": f"http://{address}:8000/health"}


def test_workers_ask_a_leader_with_a_certificate_by_https() -> None:
    serving = {"maxModelLen": 8192, "port": 8443, "tlsSecret": {"name": "tls"}}
    _, worker = map(compile_cache_of, cached_group({**CACHED, "serving": serving}))
    assert worker[1]["--health"] == "https://$(LWS_LEADER_ADDRESS):8443/health"


def test_groups_with_other_layouts_share_no_compile_cache() -> None:
    folders = {
        compile_cache_of(cached_group({**CACHED, "parallelism": parallelism}, FOUR_H100)[1])[0]
        for parallelism in ({"tensor": 8, "pipeline": 2}, {"tensor": 16}, {"tensor": 8, "pipeline": 4})
    }
    assert len(folders) == 3


def test_cached_groups_use_no_startup_plan() -> None:
    """A rank that skips profiling would leave the others waiting."""
    for template in cached_group(CACHED):
        assert "VLLM_ENABLE_STARTUP_PLAN" not in {variable["name"] for variable in engine_of(template)["env"]}


# --- planning


@pytest.mark.parametrize("parallelism", [{"tensor": 8, "pipeline": 2}, {"pipeline": 2}], ids=["tensor", "no tensor"])
def test_missing_leader_worker_set_crd_is_reported_with_install_url(parallelism: dict[str, int]) -> None:
    desired, status, conditions = decide(ngram(parallelism=parallelism), TWO_H100, groups=False)
    assert desired.children == []
    planned = conditions["Planned"]
    assert (planned.status, planned.reason) == ("Unknown", "LeaderWorkerSetMissing")
    message = conditions["Ready"].message
    assert "16 GPUs per replica (TP 8, PP 2)" in message
    assert "2 nodes x 8 x NVIDIA-H100-80GB-HBM3" in message
    assert "https://lws.sigs.k8s.io/docs/installation/" in message
    assert (conditions["Ready"].status, conditions["Reconciling"].status) == ("Unknown", "True")
    assert status.plan is None


@pytest.mark.parametrize(
    ("parallelism", "says"),
    [
        ({"tensor": 8, "pipeline": 2, "data": 2}, "use spec.replicas instead of spec.parallelism.data"),
        ({"tensor": 16, "data": 2}, "each of the 2 data-parallel replicas must fit"),
    ],
)
def test_data_parallel_replicas_larger_than_a_node_are_refused(parallelism: dict[str, int], says: str) -> None:
    _, _, conditions = decide(ngram(parallelism=parallelism), FOUR_H100)
    assert conditions["Planned"].reason == "NodesTooSmall"
    assert says in conditions["Ready"].message


def test_cordoned_nodes_keep_the_current_plan_but_allow_no_new_one() -> None:
    cordoned = (TWO_H100[0], NodeFacts("h100-1", H100, 8, schedulable=False))
    assert decide(STAGES, cordoned)[2]["Planned"].reason == "NodesTooFew"
    _, before, _ = decide(STAGES, TWO_H100)
    status = {"plan": json.loads(before.plan.model_dump_json(by_alias=True))} if before.plan else {}
    desired, _, conditions = decide(STAGES, cordoned, status=status)
    assert conditions["Planned"].reason == "Fits"
    assert child(desired, "LeaderWorkerSet") is not None
    assert decide(STAGES, TWO_H100, groups=False, status=status)[2]["Planned"].reason == "LeaderWorkerSetMissing"


@pytest.mark.parametrize(
    ("spec", "change"),
    [
        (ngram(), "parallelism.tensor: 8, parallelism.pipeline: 2"),
        (pair_70b(target={"model": B405}, parallelism={}, accelerator={"products": [H100]}), "parallelism.tensor: 16"),
    ],
    ids=["stages", "a draft model, which has none"],
)
def test_model_too_large_for_a_node_gets_a_multi_node_fix(spec: Body, change: str) -> None:
    for groups in (True, False):
        _, status, conditions = decide(spec, TWO_H100, groups=groups)
        assert conditions["Planned"].reason == "DoesNotFit"
        assert status.plan is not None
        fixes = status.plan.fixes or []
        assert any(fix.startswith(change) and "on 2 nodes x 8 x" in fix for fix in fixes), fixes
