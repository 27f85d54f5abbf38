"""The pods of engines that replay a recording: the command is one that the command line takes."""

from typing import Any

import pytest
from typer.main import get_command

from specdecode_operator.api.base import Body
from specdecode_operator.cli.main import app
from specdecode_operator.deployment.desired_state import Launch, NotLaunched
from specdecode_operator.deployment.parsed_deployment import parse_deployment
from tests.support.decisions import H200_NODE, OPERATOR_IMAGE, desired_state
from tests.support.objects import H200, pair_70b, parent
from tests.support.replay_field_cases import replaying

ON_CLAIM = {"persistentVolumeClaim": {"claimName": "captures"}, "path": "team/nightly"}


def workload(spec: Body) -> Body:
    desired = desired_state(parse_deployment(parent(spec)))
    assert isinstance(desired.outcome, Launch), desired.conditions
    (found,) = (child for child in desired.children if child["kind"] in {"Deployment", "LeaderWorkerSet"})
    return found


def pod(spec: Body) -> Body:
    return dict(workload(spec)["spec"]["template"])


def engine(spec: Body) -> Body:
    (container,) = pod(spec)["spec"]["containers"]
    return dict(container)


def told(spec: Body) -> dict[str, Any]:
    """What `specdecode replay serve` takes the command of a pod for."""
    program, group, name, *arguments = engine(spec)["command"]
    assert program == "specdecode"
    command: Any = get_command(app)
    context = command.make_context(program, [], resilient_parsing=True)
    for each in (group, name):
        command = command.get_command(context, each)
    return dict(command.make_context(name, arguments).params)


def test_the_command_line_takes_the_command_and_the_plan_gives_the_kv_cache() -> None:
    spec = replaying()
    outcome = desired_state(parse_deployment(parent(spec))).outcome
    assert isinstance(outcome, Launch)
    given = told(spec)
    assert [str(path) for path in given["traces"]] == ["/recording/trace.jsonl"]
    assert given["kv_cache_tokens"] == outcome.plan.chosen.budget.kv_cache_tokens > 0
    assert (given["host"], given["port"], given["max_model_len"]) == ("0.0.0.0", 8000, 8192)
    assert given["served_model_name"] == ["Llama-3.1-70B-Instruct"]
    assert given["drain_timeout"] == 60


def test_every_field_reaches_the_server() -> None:
    given = told(
        replaying(
            match="RequestId",
            unmatched="Refuse",
            acceptance=[{"fromSeconds": 0, "percent": 80}, {"fromSeconds": 60, "percent": 30}],
            timeScalePercent=50,
            loadFactor=10,
            seed=7,
            failures={"startSeconds": 30, "errorPercent": 5, "hangAfterSeconds": 60, "crashAfterSeconds": 90},
        )
    )
    assert (given["match"], given["unmatched"]) == ("request-id", "refuse")
    assert given["acceptance"] == "0:0.8,60:0.3"
    assert (given["time_scale"], given["load_factor"], given["seed"]) == (0.5, 10, 7)
    assert (given["slow_start"], given["fail_share"]) == (30, 0.05)
    assert (given["hang_after"], given["crash_after"]) == (60, 90)


def test_a_mode_that_draws_is_not_told_how_to_match() -> None:
    given = told(replaying(mode="Modelled"))
    assert given["mode"] == "modelled"
    assert (given["max_num_seqs"], given["max_num_batched_tokens"]) == (256, 8192)
    assert not {"--match", "--unmatched"} & {
        each.partition("=")[0] for each in engine(replaying(mode="Modelled"))["command"]
    }


def test_it_is_the_operators_image_without_gpus_models_or_a_node_of_its_own() -> None:
    spec = replaying()
    spec["engine"] |= {"image": "localhost/vllm:1", "env": [{"name": "VLLM_USE_V1", "value": "1"}]}
    pod_spec, container = pod(spec)["spec"], engine(spec)
    assert container["image"] == OPERATOR_IMAGE
    assert "nvidia.com/gpu" not in str(container["resources"])
    assert not {"nodeSelector", "tolerations", "initContainers"} & set(pod_spec)
    assert "env" not in container
    assert [volume["name"] for volume in pod_spec["volumes"]] == ["specdecode-recording", "tmp"]


@pytest.mark.parametrize("spec", [replaying(), pair_70b()], ids=["replay", "vLLM"])
def test_it_is_watched_and_drained_as_vllm_is_and_passes_pod_security(spec: Body) -> None:
    desired = desired_state(parse_deployment(parent(spec)), (H200_NODE,))
    assert desired.workload is not None
    template = desired.workload["spec"]["template"]["spec"]
    (container,) = template["containers"]
    assert container["readinessProbe"]["httpGet"] == {"path": "/health", "port": "http"}
    assert container["lifecycle"] == {"preStop": {"sleep": {"seconds": 10}}}
    assert template["terminationGracePeriodSeconds"] == 90
    assert container["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert template["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}


def test_a_claim_is_mounted_for_reading_alone() -> None:
    volume = pod(replaying(trace=ON_CLAIM))["spec"]["volumes"][0]
    assert volume["persistentVolumeClaim"] == {"claimName": "captures", "readOnly": True}
    assert told(replaying(trace=ON_CLAIM))["traces"][0].as_posix() == "/recording/team/nightly"


def test_a_path_is_no_variable_of_the_pod() -> None:
    trace = ON_CLAIM | {"path": "$(VLLM_API_KEY)/$$"}
    assert engine(replaying(trace=trace))["command"][3] == "/recording/$$(VLLM_API_KEY)/$$$$"


def test_what_stands_for_two_nodes_is_one_pod() -> None:
    spec = replaying() | {"parallelism": {"tensor": 8, "pipeline": 2}, "accelerator": {"products": [H200]}}
    spec["speculation"] = {"method": "ngram", "numSpeculativeTokens": 4}
    desired = desired_state(parse_deployment(parent(spec)))
    assert isinstance(desired.outcome, Launch)
    assert desired.outcome.plan.chosen.nodes == 2
    assert desired.outcome.plan_status.nodes_per_replica == 2
    assert workload(spec)["kind"] == "Deployment"


def test_pod_template_is_merged_and_may_say_what_it_takes() -> None:
    resources = {"requests": {"cpu": "2"}, "limits": {"memory": "1Gi"}}
    template = {"spec": {"containers": [{"name": "engine", "resources": resources}], "priorityClassName": "low"}}
    spec = replaying() | {"podTemplate": template}
    assert pod(spec)["spec"]["priorityClassName"] == "low"
    assert engine(spec)["resources"]["requests"] == {"cpu": "2", "memory": "256Mi"}
    assert engine(spec)["resources"]["limits"] == {"memory": "1Gi"}


def test_a_download_that_is_not_there_cannot_be_changed() -> None:
    template = {"spec": {"initContainers": [{"name": "download-target", "resources": {"limits": {"memory": "1Gi"}}}]}}
    assert isinstance(
        desired_state(parse_deployment(parent(pair_70b(podTemplate=template))), (H200_NODE,)).outcome, Launch
    )
    outcome = desired_state(parse_deployment(parent(replaying() | {"podTemplate": template}))).outcome
    assert isinstance(outcome, NotLaunched)
    said = "spec.podTemplate.spec.initContainers[0]: download-target: a replay downloads nothing: leave it out"
    assert said in outcome.readiness.message


def test_a_key_is_asked_of_clients() -> None:
    spec = replaying() | {"serving": {"maxModelLen": 8192, "apiKeySecret": {"name": "keys", "key": "one"}}}
    (variable,) = engine(spec)["env"]
    assert variable["name"] == "VLLM_API_KEY"
    assert variable["valueFrom"]["secretKeyRef"] == {"name": "keys", "key": "one"}
