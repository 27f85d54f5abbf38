"""`specdecode render`: what the operator would make, without a cluster."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from specdecode_operator.cluster.nodes import gpus_of
from specdecode_operator.deployment.live_recorder import recorder_config_map
from specdecode_operator.deployment.parsed_deployment import parse_deployment
from tests.support.decisions import H100_NODE, H200_NODE, desired_state
from tests.support.devices import claiming
from tests.support.golden import EXAMPLES
from tests.support.objects import H100, H200
from tests.unit.cli.conftest import Specdecode, WriteObject, manifest

CAPTURE: dict[str, Any] = {
    "apiVersion": "specdecode.io/v1alpha1",
    "kind": "SpecDecodeCapture",
    "metadata": {"name": "evening"},
    "spec": {
        "deployment": "chat",
        "workload": {
            "prompts": {"synthetic": {"promptTokens": 512, "outputTokens": 128}},
            "phases": [{"name": "calm", "pattern": "Closed", "concurrency": 4, "durationSeconds": 60}],
        },
    },
}


TRAINING: dict[str, Any] = {
    "apiVersion": "specdecode.io/v1alpha1",
    "kind": "SpecDecodeTraining",
    "metadata": {"name": "head"},
    "spec": {"deployment": "chat", "captures": ["evening"], "trainer": {"image": "localhost/trainer:1"}},
}
ANSWERS: dict[str, Any] = {
    "deployment": "chat",
    "record": {"tokenIds": True},
    "workload": {
        "prompts": {"dataset": {"configMap": {"name": "prompts"}, "path": "a.jsonl", "format": "JSONL"}},
        "phases": [{"name": "calm", "pattern": "Closed", "concurrency": 4, "requests": 600}],
    },
    "storage": {"persistentVolumeClaim": {"claimName": "answers"}},
}


def objects(specdecode: Specdecode, *arguments: object) -> list[dict[str, Any]]:
    result = specdecode("render", *arguments, "-o", "json")
    assert result.exit_code == 0, result.output
    return list(json.loads(result.stdout)["items"])


def kinds(found: list[dict[str, Any]]) -> list[str]:
    return [each["kind"] for each in found]


def test_rendered_objects_match_those_of_the_operator(specdecode: Specdecode, write: WriteObject) -> None:
    body = manifest("chat", accelerator={"products": [H200]})
    found = objects(specdecode, write("a.yaml", body))
    owned = {"namespace": "default", "uid": "any", "generation": 1}
    parent = parse_deployment({**body, "metadata": {**body["metadata"], **owned}})
    plan, service, workload = desired_state(parent, (H100_NODE, H200_NODE)).children
    expected = [plan, service, recorder_config_map("default"), workload]
    for child in expected:
        del child["metadata"]["annotations"]["specdecode.io/applied-hash"]
        child["metadata"].pop("ownerReferences", None)
        if not child["metadata"]["annotations"]:
            del child["metadata"]["annotations"]
    workloads = [each for each in found if each["kind"] == "Deployment"]
    assert workloads == [each for each in expected if each["kind"] == "Deployment"]
    assert kinds(found) == kinds(expected)
    assert [each["metadata"] for each in found] == [each["metadata"] for each in expected]


def test_namespace_has_one_recorder_for_all_objects(specdecode: Specdecode, write: WriteObject) -> None:
    elsewhere, without = manifest("other"), manifest("without", engine={"recorder": False})
    elsewhere["metadata"]["namespace"], without["metadata"]["namespace"] = "models", "plain"
    found = objects(specdecode, write("a.yaml", manifest("a"), manifest("b"), elsewhere, without))
    recorders = [each["metadata"] for each in found if each["metadata"]["name"] == "specdecode-recorder"]
    assert [each["namespace"] for each in recorders] == ["default", "models"]


def test_capture_with_arms_claims_the_devices_of_its_deployment(specdecode: Specdecode, write: WriteObject) -> None:
    arms = [{"name": "draft"}, {"name": "none", "speculation": {"method": "none"}}]
    capture = {**CAPTURE, "spec": {**CAPTURE["spec"], "arms": arms, "deploymentDuringCapture": "Suspend"}}
    body = manifest("chat", accelerator=claiming(products=[H200]))
    found = objects(specdecode, write("a.yaml", body), write("b.yaml", capture))
    (template,) = (each["metadata"]["name"] for each in found if each["kind"] == "ResourceClaimTemplate")
    pods = [each["spec"]["template"] for each in found if each["kind"] in {"Deployment", "Job"}]
    assert len(pods) == 2
    for pod in pods:
        assert [each["resourceClaimTemplateName"] for each in pod["spec"]["resourceClaims"]] == [template]
        assert gpus_of(pod) == 2
        containers = [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]
        assert [each["name"] for each in containers if "claims" in each.get("resources", {})] == ["engine"]


def test_gitops_labels_and_annotations_are_not_copied_to_children(specdecode: Specdecode, write: WriteObject) -> None:
    """With their mark a claim that is kept, which has no owner, would be theirs to prune."""
    marks = {
        "labels": {"app.kubernetes.io/instance": "pruned", "kustomize.toolkit.fluxcd.io/name": "pruned"},
        "annotations": {"argocd.argoproj.io/tracking-id": "pruned", "argocd.argoproj.io/sync-wave": "pruned"},
    }
    marked = [{**each, "metadata": {**each["metadata"], **marks}} for each in (manifest("chat"), CAPTURE)]
    found = objects(specdecode, write("a.yaml", *marked))
    assert {"Deployment", "Job", "PersistentVolumeClaim"} <= set(kinds(found))
    assert "pruned" not in json.dumps(found)


def test_yaml_holds_the_same_objects_as_json(specdecode: Specdecode) -> None:
    example = EXAMPLES / "llama-405b-two-nodes.yaml"
    result = specdecode("render", example)
    assert result.exit_code == 0
    assert list(yaml.safe_load_all(result.stdout)) == objects(specdecode, example)


def test_command_is_what_the_container_runs(specdecode: Specdecode, write: WriteObject) -> None:
    engine = {"extraArgs": ["--response-role", "it's $HOME"], "recorder": False}
    path = write("a.yaml", manifest("chat", engine=engine))
    result = specdecode("render", path, "-o", "command")
    assert result.exit_code == 0
    title, _, shell = result.stdout.partition("\n")
    (workload,) = (each for each in objects(specdecode, path) if each["kind"] == "Deployment")
    (container,) = workload["spec"]["template"]["spec"]["containers"]
    words = shlex.split(shell.replace("\\\n", ""))
    variables = [f"{each['name']}={each['value']}" for each in container["env"] if "value" in each]
    command = [each.replace("$$", "$") for each in [*container["command"], *container.get("args", [])]]
    assert title == f"# Deployment chat: {container['image']}"
    assert words == [*variables, *command]
    assert "it's $HOME" in words


def test_recorder_does_not_change_the_command(specdecode: Specdecode, write: WriteObject) -> None:
    files = [write(f"{recorder}.yaml", manifest("chat", engine={"recorder": recorder})) for recorder in (True, False)]
    assert len({specdecode("render", file, "-o", "command").stdout for file in files}) == 1


def test_commands_of_a_multi_node_group_cover_leader_and_workers(specdecode: Specdecode) -> None:
    result = specdecode("render", EXAMPLES / "llama-405b-two-nodes.yaml", "-o", "command")
    titles = [line for line in result.stdout.splitlines() if line.startswith("#")]
    assert [title.partition(":")[0].rpartition(", ")[2] for title in titles] == ["leader", "workers"]
    assert "--headless" in result.stdout


def test_command_with_a_cache_omits_the_preceding_script(specdecode: Specdecode) -> None:
    result = specdecode("render", EXAMPLES / "llama-70b-cache.yaml", "-o", "command")
    assert "vllm serve /models/hub/" in result.stdout
    assert "python3" not in result.stdout


def test_cache_download_jobs_are_rendered_first(specdecode: Specdecode) -> None:
    found = objects(specdecode, EXAMPLES / "llama-70b-cache.yaml")
    assert kinds(found)[:3] == ["Job", "Job", "ConfigMap"]
    assert kinds(found)[-1] == "Deployment"


def test_pinned_commit_is_served_from_the_cache(specdecode: Specdecode) -> None:
    body = list(yaml.safe_load_all((EXAMPLES / "llama-70b-cache.yaml").read_text()))[-1]
    commit = "0123456789abcdef0123456789abcdef01234567"
    body["spec"]["target"]["revision"] = commit
    result = specdecode("render", "-", "-o", "command", stdin=json.dumps(body))
    assert f"/snapshots/{commit}" in result.stdout
    assert "/snapshots/not-downloaded-yet" in result.stdout, "the draft names a branch"


def test_engine_version_option_replaces_the_version_of_the_object(specdecode: Specdecode, write: WriteObject) -> None:
    path = write("a.yaml", manifest("chat", engine={"version": "0.32"}))
    result = specdecode("render", path, "-o", "command", "--engine-version", "0.30")
    assert result.exit_code == 0
    assert "v0.30" in result.stdout.splitlines()[0]
    wrong = specdecode("render", path, "--engine-version", "0.3x")
    assert wrong.exit_code == 2
    assert "spec.engine.version: 0.3x" in wrong.stderr


def test_capture_is_rendered_with_its_deployment(specdecode: Specdecode, write: WriteObject) -> None:
    body = {**CAPTURE, "metadata": {"name": "evening", "namespace": "models"}}
    # The API server takes null for an absent field.
    body["spec"] = {**body["spec"], "storage": {"persistentVolumeClaim": None}}
    owner = manifest("chat")
    owner["metadata"]["namespace"] = "models"
    path = write("a.yaml", body, owner)
    claim, job, *rest = objects(specdecode, path, "--operator-image", "example.org/operator:9")
    assert (claim["kind"], job["kind"]) == ("PersistentVolumeClaim", "Job")
    assert job["metadata"]["namespace"] == "models"
    assert "example.org/operator:9" in json.dumps(job)
    assert "Deployment" in kinds(rest)


@pytest.mark.parametrize("pods", [[], ["chat-a", "chat-b"]])
def test_live_capture_is_rendered_as_if_engines_were_ready(
    specdecode: Specdecode, write: WriteObject, pods: list[str]
) -> None:
    live = {"source": "Live", "live": {"requests": 9, "pods": pods}, "record": {"tokenIds": True}}
    body = {**CAPTURE, "spec": {"deployment": CAPTURE["spec"]["deployment"], **live}}
    claim, job, *_ = objects(specdecode, write("a.yaml", body, manifest("chat")))
    assert (claim["kind"], job["kind"]) == ("PersistentVolumeClaim", "Job")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["name"] == "collect"
    (settings,) = (each["value"] for each in container["env"] if each["name"] == "SPECDECODE_CAPTURE")
    assert json.loads(settings)["live"]["pods"] == (pods or ["known-in-the-cluster"])


@pytest.mark.parametrize(
    ("owner", "said", "code"),
    [
        (None, "error: evening: spec.deployment: chat: not found in these files: add its file", 2),
        (manifest("other"), "spec.deployment: chat: not found in these files", 2),
        (manifest("chat", serving={"maxModelLen": "x"}), "evening: its deployment: spec.serving.maxModelLen: x", 2),
        (manifest("chat", parallelism={"tensor": 1}), "evening: its deployment:", 4),
    ],
    ids=["alone", "another", "invalid", "does not fit"],
)
def test_capture_without_a_runnable_deployment_is_an_error(
    specdecode: Specdecode, write: WriteObject, owner: dict[str, Any] | None, said: str, code: int
) -> None:
    result = specdecode("render", write("a.yaml", CAPTURE, *([owner] if owner else [])))
    assert result.exit_code == code
    assert said in result.stderr
    assert "kind: Job" not in result.stdout


@pytest.mark.parametrize(
    ("draft", "said", "code"),
    [
        ("meta-llama/Llama-3.1-70B-Instruct", "(drafted): DoesNotFit: ", 4),
        ("org/unknown", "(drafted): speculation.draft.model: org/unknown: no facts about it yet", 5),
        ("meta-llama/Llama-3.1-8B-Instruct", "", 0),
    ],
    ids=["too large", "unknown", "good"],
)
def test_arm_that_cannot_start_fails_like_a_deployment(
    specdecode: Specdecode, write: WriteObject, draft: str, said: str, code: int
) -> None:
    speculation = {"method": "draft_model", "numSpeculativeTokens": 2, "draft": {"model": draft}}
    arms = [{"name": "plain"}, {"name": "drafted", "speculation": speculation}]
    body = {**CAPTURE, "spec": {**CAPTURE["spec"], "arms": arms, "repetitions": 2}}
    target = {"model": "meta-llama/Llama-3.1-70B-Instruct", "quantization": "FP8"}
    owner = manifest("chat", target=target, parallelism={"tensor": 2}, accelerator={"products": [H100]})
    result = specdecode("render", write("a.yaml", body, owner))
    assert result.exit_code == code, result.stderr
    assert said in result.stderr
    assert ("kind: Job" in result.stdout) is (code == 0)


@pytest.mark.parametrize(
    ("golden", "claim", "said"),
    [
        (None, "known-in-the-cluster", ""),
        ({}, "golden-capture", ""),
        ({"storage": {"persistentVolumeClaim": {"claimName": "shared"}}}, "shared", ""),
        ({"seed": 7}, "", "spec.against.capture: golden: its seed is 7, not 0: take another golden capture"),
    ],
    ids=["in the cluster", "in the files", "on a claim", "another seed"],
)
def test_golden_capture_is_assumed_to_have_succeeded(
    specdecode: Specdecode, write: WriteObject, golden: dict[str, Any] | None, claim: str, said: str
) -> None:
    judged = {**CAPTURE, "spec": {**CAPTURE["spec"], "against": {"capture": "golden"}}}
    other = {**CAPTURE, "metadata": {"name": "golden"}, "spec": {**CAPTURE["spec"], **(golden or {})}}
    path = write("a.yaml", judged, manifest("chat"), *([] if golden is None else [other]))
    result, linted = specdecode("render", path), specdecode("lint", path)
    assert (result.exit_code, linted.exit_code) == ((2, 2) if said else (0, 0)), result.stderr
    assert said in result.stderr
    assert said in linted.stdout
    assert "warnings: 0" in linted.stdout
    if claim:
        assert {"claimName": claim, "readOnly": True} in [
            volume.get("persistentVolumeClaim") for volume in volumes(result.stdout)
        ]


def volumes(rendered: str) -> list[dict[str, Any]]:
    """Those of the Job that runs a capture which is held against another one."""
    jobs = [body for body in yaml.safe_load_all(rendered) if body["kind"] == "Job"]
    (job,) = (body for body in jobs if body["metadata"]["name"] == "evening-capture")
    return list(job["spec"]["template"]["spec"]["volumes"])


def test_refused_capture_says_why(specdecode: Specdecode, write: WriteObject) -> None:
    spec = {**CAPTURE["spec"], "deadlineSeconds": 60, "seeds": 1}
    result = specdecode("render", write("a.yaml", {**CAPTURE, "spec": spec}, manifest("chat")))
    assert result.exit_code == 2
    assert "spec.seeds: 1: unknown field: did you mean seed?" in result.stderr
    del spec["seeds"]
    spec["workload"] = {**spec["workload"], "phases": [{**spec["workload"]["phases"][0], "durationSeconds": 90}]}
    result = specdecode("render", write("a.yaml", {**CAPTURE, "spec": spec}, manifest("chat")))
    assert result.exit_code == 2
    assert "spec.deadlineSeconds: 60: is less than the 90 s that the phases of spec.workload take" in result.stderr


def test_object_that_cannot_run_does_not_hide_others(specdecode: Specdecode, write: WriteObject) -> None:
    good, wide = manifest("good"), manifest("wide", parallelism={"tensor": 1})
    result = specdecode("render", write("a.yaml", wide, good))
    assert result.exit_code == 4
    assert "error: wide: " in result.stderr
    assert "name: good" in result.stdout
    assert "wide" not in result.stdout


def test_nodes_file_determines_the_gpu_product(specdecode: Specdecode, write: WriteObject, tmp_path: Path) -> None:
    node = {
        "kind": "Node",
        "metadata": {"name": "n1", "labels": {"nvidia.com/gpu.product": H200}},
        "status": {"allocatable": {"nvidia.com/gpu": "8"}, "capacity": {"nvidia.com/gpu": "8"}},
    }
    nodes = tmp_path / "nodes.json"
    nodes.write_text(json.dumps(node))
    found = objects(specdecode, write("a.yaml", manifest("chat")), "--nodes", nodes)
    (workload,) = (each for each in found if each["kind"] == "Deployment")
    assert workload["spec"]["template"]["spec"]["nodeSelector"] == {"nvidia.com/gpu.product": H200}


def test_training_is_rendered_with_the_capture_that_measures_its_head(
    specdecode: Specdecode, write: WriteObject
) -> None:
    answers = {**CAPTURE, "spec": ANSWERS}
    found = objects(specdecode, write("a.yaml", TRAINING, manifest("chat"), answers))
    claim, job, judge, *_ = found
    assert kinds([claim, job, judge]) == ["PersistentVolumeClaim", "Job", "SpecDecodeCapture"]
    assert [each["metadata"]["name"] for each in (claim, job, judge)] == [
        "head-training",
        "head-training",
        "head-judge",
    ]
    mounted = [each.get("persistentVolumeClaim") for each in job["spec"]["template"]["spec"]["volumes"]]
    assert {"claimName": "answers", "readOnly": True} in mounted
    assert [arm["name"] for arm in judge["spec"]["arms"]] == ["current", "trained", "none", "ngram"]
    assert judge["spec"]["arms"][1]["speculation"]["draft"]["model"] == "default/head/head"
    assert not any("ownerReferences" in each["metadata"] for each in found)


def test_training_without_a_measurement_and_with_captures_of_the_cluster(
    specdecode: Specdecode, write: WriteObject
) -> None:
    spec = {**TRAINING["spec"], "judgement": {"enabled": False}, "storage": ANSWERS["storage"]}
    job, *others = objects(specdecode, write("a.yaml", {**TRAINING, "spec": spec}, manifest("chat")))
    assert job["kind"] == "Job"
    assert "SpecDecodeCapture" not in kinds(others)
    mounted = [each.get("persistentVolumeClaim") for each in job["spec"]["template"]["spec"]["volumes"]]
    assert {"claimName": "evening-capture", "readOnly": True} in mounted


@pytest.mark.parametrize(
    ("changes", "capture", "said"),
    [
        ({"deployment": "other"}, ANSWERS, "spec.deployment: other: not found in these files: add its file"),
        ({}, {**ANSWERS, "record": {}}, "spec.captures[0]: evening: has no answers"),
        ({"captures": []}, ANSWERS, "spec.captures: []: rows have one source"),
        ({"trainer": {"image": "i", "gpus": 1}}, ANSWERS, "spec.trainer.gpus: 1: the target needs"),
    ],
)
def test_training_that_cannot_start_is_an_error(
    specdecode: Specdecode, write: WriteObject, changes: dict[str, Any], capture: dict[str, Any], said: str
) -> None:
    training = {**TRAINING, "spec": {**TRAINING["spec"], **changes}}
    path = write("a.yaml", training, manifest("chat"), {**CAPTURE, "spec": capture})
    result = specdecode("render", path)
    assert result.exit_code == 2
    assert f"error: head: {said}" in result.stderr
