"""`specdecode lint`: what API server and operator would refuse, where it stands, for people and for machines."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from specdecode_operator.sizing.catalogue import find_entry
from tests.support.golden import EXAMPLES, ROOT
from tests.support.objects import HUB_TOKEN, TINY_CONFIG, pair_70b, tiny_cpu
from tests.unit.cli.conftest import Specdecode, WriteObject, manifest
from tests.unit.cli.test_plan import H100, only
from tests.unit.cli.test_render import CAPTURE

BROKEN = """\
# A comment, so that lines are counted from the file's first.
apiVersion: v1
kind: ConfigMap
metadata: {name: other}
---
apiVersion: specdecode.io/v1alpha1
kind: SpecDecodeDeployment
metadata:
  name: chat
spec:
  target:
    model: Qwen/Qwen3-8B
  speculation:
    method: ngram
  serving:
    max_num_seqs: 4
    maxModelLen: "x"
"""


def findings(specdecode: Specdecode, *arguments: object, code: int = 2) -> list[dict[str, Any]]:
    result = specdecode("lint", *arguments, "-o", "json")
    assert result.exit_code == code, result.output
    return list(json.loads(result.stdout)["findings"])


def capture(**spec: Any) -> dict[str, Any]:
    return {**CAPTURE, "spec": {**deepcopy(CAPTURE["spec"]), **spec}}


def test_only_examples_on_a_cpu_have_findings(specdecode: Specdecode) -> None:
    found = [each for each in findings(specdecode, EXAMPLES, code=0) if each["level"] != "note"]
    assert [Path(each["file"]).name for each in found] == ["tiny-cpu.yaml", "tiny-language-cpu.yaml"]
    assert all(each["level"] == "warning" and "vllm#55005" in each["message"] for each in found)
    assert "errors: 0, warnings: 2, " in specdecode("lint", EXAMPLES).stdout.splitlines()[-1]


def test_sampled_capture_on_a_cpu_is_a_warning(specdecode: Specdecode, write: WriteObject) -> None:
    hot = {"name": "hot", "pattern": "Closed", "concurrency": 1, "requests": 4, "temperature": "0.7"}
    pair = {**manifest("tiny"), "spec": tiny_cpu()}
    for phase, files in ((hot, ["pair", "capture"]), ({**hot, "temperature": "0.0"}, ["pair"])):
        asked = capture(deployment="tiny", workload={"phases": [phase]})
        paths = [write("pair.yaml", pair), write("capture.yaml", asked)]
        found = [each for each in findings(specdecode, *paths, code=0) if "vllm#55005" in each["message"]]
        assert [Path(each["file"]).stem for each in found] == files
        assert {(each["level"], each["rule"]) for each in found} == {("warning", "PlanWarning")}


@pytest.mark.parametrize(
    ("kinds", "told"),
    [
        ("", "no ValidatingAdmissionPolicy found: set limits in the chart's values"),
        ("ValidatingAdmissionPolicy", "the bindings of its policies are missing"),
        ("ValidatingAdmissionPolicyBinding", "the policies of its bindings are missing"),
    ],
    ids=["a chart without limits", "no binding", "no policy"],
)
def test_admission_policy_file_without_limits_is_an_error(
    specdecode: Specdecode, write: WriteObject, tmp_path: Path, kinds: str, told: str
) -> None:
    rendered = (ROOT / "manifests/deployment.yaml").read_text()
    policy = tmp_path / "policy.yaml"
    policy.write_text(rendered + (f"---\nkind: {kinds}\nmetadata: {{name: ours}}\n" if kinds else ""))
    result = specdecode("lint", write("a.yaml", manifest("a")), "--admission-policy", policy)
    assert result.exit_code == 2
    assert f"{policy}: {told}" in result.output


def test_disallowed_pod_template_field_needs_the_allow_option(specdecode: Specdecode, write: WriteObject) -> None:
    path = write("a.yaml", manifest("a", podTemplate={"spec": {"hostNetwork": True}}))
    (found,) = findings(specdecode, path)
    assert (found["rule"], found["field"]) == ("PodTemplateNotAllowed", "spec.podTemplate.spec.hostNetwork")
    assert findings(specdecode, path, "--allow-pod-template=hostNetwork", code=0) == []


def test_each_finding_names_its_line(specdecode: Specdecode, write: WriteObject) -> None:
    path = write("a.yaml", BROKEN)
    found = {each["field"]: each["line"] for each in findings(specdecode, path)}
    wrong = {"spec.serving.max_num_seqs": 16, "spec.serving.maxModelLen": 17}
    assert found == {**wrong, "spec.speculation.numSpeculativeTokens": 13}
    result = specdecode("lint", path)
    assert f"{path}:17: error: spec.serving.maxModelLen: " in result.stdout
    assert result.stdout.splitlines()[-1] == "objects: 1, errors: 3, warnings: 0"


def all_wrong(**changes: Any) -> dict[str, Any]:
    """Return an object whose mistakes are of the schema, of rules of its parts, and of its name."""
    spec = {
        "speculation": {"method": "ngram"},
        "accelerator": {"type": "CPU", "memoryGiB": 8, "kvCacheGiB": 9},
        "serving": {"maxModelLen": "x", "enforceEager": True, "cudagraphMode": "NONE", "minConcurrency": 999},
        "parallelism": {},
    }
    return manifest("Chat_1", **{**spec, **changes})


def test_schema_and_rule_errors_are_reported_in_one_run(specdecode: Specdecode, write: WriteObject) -> None:
    found = {each["field"] for each in findings(specdecode, write("a.yaml", all_wrong()))}
    assert found == {
        "metadata.name",
        "spec.accelerator.cpuCores",
        "spec.accelerator.kvCacheGiB",
        "spec.serving.cudagraphMode",
        "spec.serving.maxModelLen",
        "spec.serving.minConcurrency",
        "spec.speculation.numSpeculativeTokens",
    }


@pytest.mark.parametrize(
    ("changes", "silent"),
    [
        ({"serving": {"maxModelLen": "x", "maxNumSeqs": "y", "minConcurrency": 999}}, "spec.serving.minConcurrency"),
        ({"serving": {"maxNumSeq": 1000, "minConcurrency": 999}}, "spec.serving.minConcurrency"),
        ({"speculation": {"method": "ngram", "numSpeculativToken": 3}}, "spec.speculation.numSpeculativeTokens"),
        ({"speculation": {"method": "ngrams"}}, "spec.speculation.numSpeculativeTokens"),
        ({"speculation": ["ngram"]}, "spec.speculation.numSpeculativeTokens"),
        ({"accelerator": {"typ": "CPU"}}, "spec.accelerator.cpuCores"),
        ({"accelerator": {"type": "CPU", "cpuCores": "x"}}, "spec.accelerator.cpuCores: is missing"),
    ],
)
def test_rule_is_skipped_if_a_field_it_needs_is_invalid(
    specdecode: Specdecode, write: WriteObject, changes: dict[str, Any], silent: str
) -> None:
    body = all_wrong(serving={"maxModelLen": "x"}, **{k: v for k, v in changes.items() if k != "serving"})
    body["spec"].update(changes)
    messages = [each["message"] for each in findings(specdecode, write("a.yaml", body))]
    assert not any(message.startswith(silent) for message in messages), messages
    assert len(messages) > 2


def test_list_items_are_checked_beside_an_invalid_one(specdecode: Specdecode, write: WriteObject) -> None:
    arms = [{"name": "a", "speculation": {"method": "none", "numSpeculativeTokens": 3}}, {"name": "b", "tokens": 1}]
    found = {each["field"] for each in findings(specdecode, write("a.yaml", capture(arms=arms)))}
    assert {"spec.arms[0].speculation.numSpeculativeTokens", "spec.arms[1].tokens"} <= found


def test_all_disallowed_settings_are_reported_in_one_run(specdecode: Specdecode, write: WriteObject) -> None:
    body = manifest(
        "a", podTemplate={"spec": {"hostNetwork": True}}, engine={"extraArgs": ["--tensor-parallel-size=4"]}
    )
    body["spec"]["models"] = {"volume": {"hostPath": {"path": "/models"}}}
    rules = [each["rule"] for each in findings(specdecode, write("a.yaml", body))]
    assert rules == ["HostPathNotAllowed", "PodTemplateNotAllowed", "Invalid"]


def test_missing_field_is_reported_at_the_line_of_its_parent(specdecode: Specdecode, write: WriteObject) -> None:
    text = BROKEN.replace("    max_num_seqs: 4\n", "").replace('"x"', "4096")
    (found,) = findings(specdecode, write("a.yaml", text))
    assert (found["field"], found["line"]) == ("spec.speculation.numSpeculativeTokens", 13)


def test_finding_in_a_list_object_names_the_line_of_the_item(specdecode: Specdecode, write: WriteObject) -> None:
    body = manifest("a", serving={"maxModelLen": 0})
    items = {"apiVersion": "v1", "kind": "List", "items": [manifest("b"), body]}
    text = json.dumps(items, indent=1)
    (found,) = findings(specdecode, write("a.json", text))
    line = text.splitlines()[found["line"] - 1]
    assert line.strip() == '"maxModelLen": 0'
    assert found["name"] == "a"


def test_crd_rules_and_vllm_rules_are_checked(specdecode: Specdecode, write: WriteObject) -> None:
    crd_rule = manifest("a", speculation={"method": "none", "numSpeculativeTokens": 3})
    engine_rule = manifest("b", engine={"extraArgs": ["--tensor-parallel-size", "4"]})
    found = findings(specdecode, write("a.yaml", crd_rule, engine_rule))
    assert {each["name"] for each in found} == {"a", "b"}
    assert {each["rule"] for each in found} == {"Invalid"}


def test_unknown_model_is_a_warning_and_hides_no_errors(specdecode: Specdecode, write: WriteObject) -> None:
    body = manifest("a", target={"model": "acme/new"}, speculation=None)
    (found,) = findings(specdecode, write("a.yaml", body), code=0)
    assert (found["level"], found["rule"], found["field"]) == ("warning", "ModelUnknown", "spec.target.model")
    assert "--model-config" in found["message"]
    assert specdecode("lint", write("a.yaml", body), "--strict").exit_code == 3
    body["spec"]["engine"] = {"extraArgs": ["--tensor-parallel-size", "4"]}
    assert [each["level"] for each in findings(specdecode, write("a.yaml", body))] == ["warning", "error"]


def test_untested_version_is_reported_beside_an_unknown_model(specdecode: Specdecode, write: WriteObject) -> None:
    body = manifest("a", target={"model": "acme/new"}, speculation=None, engine={"version": "0.99", "image": "i:1"})
    path = write("a.yaml", body)
    found = {each["field"]: each["message"] for each in findings(specdecode, path, code=0)}
    assert set(found) == {"spec.target.model", "spec.engine.version"}
    assert f"warning: a: {found['spec.engine.version']}" in specdecode("plan", "-f", path).stderr


def test_model_config_option_makes_a_model_known(specdecode: Specdecode, write: WriteObject) -> None:
    body = manifest("a", target={"model": "acme/new"}, speculation=None, serving={"maxModelLen": 9999})
    config = {**TINY_CONFIG, "max_position_embeddings": 2048}
    path = write("config.json", json.dumps(config))
    (found,) = findings(specdecode, write("a.yaml", body), "--model-config", f"acme/new={path}")
    assert found["field"] == "spec.serving.maxModelLen"


def test_plan_warning_is_a_lint_warning(specdecode: Specdecode, write: WriteObject) -> None:
    body = manifest("a", engine={"version": "0.32", "image": "example.org/vllm-openai:v0.30.1"})
    (found,) = findings(specdecode, write("a.yaml", body), code=0)
    assert found["rule"] == "PlanWarning"
    assert "is vLLM 0.30 by its name" in found["message"]


def test_replicas_beside_an_autoscaler_are_a_warning(specdecode: Specdecode, write: WriteObject) -> None:
    autoscaling = {"maxReplicas": 4, "metric": "RunningRequests", "target": 24}
    for replicas, rules in (({"replicas": 2}, ["ReplicasAlsoSet"]), ({}, [])):
        body = {**manifest("chat"), "spec": {**pair_70b(autoscaling=autoscaling, models=HUB_TOKEN), **replicas}}
        found = [each for each in findings(specdecode, write("chat.yaml", body), code=0) if each["level"] == "warning"]
        assert [each["rule"] for each in found if each["rule"] == "ReplicasAlsoSet"] == rules


def test_capture_of_a_misspelt_deployment_is_a_warning(specdecode: Specdecode, write: WriteObject) -> None:
    path = write("a.yaml", manifest("chat"), capture(deployment="caht"))
    (found,) = findings(specdecode, path, code=0)
    assert (found["level"], found["rule"], found["field"]) == ("warning", "DeploymentNotFound", "spec.deployment")
    assert "did you mean chat?" in found["message"]
    assert not findings(specdecode, write("a.yaml", manifest("chat"), capture(deployment="other")), code=0)


def test_hub_is_not_suggested_for_a_model_on_a_volume(specdecode: Specdecode, write: WriteObject) -> None:
    volume = {"volume": {"persistentVolumeClaim": {"claimName": "models"}}}
    for models, suggested in ((volume, False), ({}, True)):
        body = manifest("a", target={"model": "acme/new"}, speculation=None, models=models)
        (found,) = findings(specdecode, write("a.yaml", body), code=0)
        assert (found["rule"], "--hub" in found["message"]) == ("ModelUnknown", suggested)


def test_a_deployment_of_vllm_without_a_pod_is_a_warning(specdecode: Specdecode, write: WriteObject) -> None:
    path = write("a.yaml", {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "vllm"}})
    (found,) = findings(specdecode, path, code=0)
    assert (found["level"], found["rule"], found["field"]) == ("warning", "NotRead", "spec")


ADAPTIVE = {"method": "eagle3", "numSpeculativeTokens": 3, "adaptiveVerification": True} | {
    "draft": {"model": "AngelSlim/Qwen3-8B_eagle3"}
}


def test_plan_note_does_not_fail_strict(specdecode: Specdecode, write: WriteObject) -> None:
    path = write("a.yaml", manifest("a", **only(H100), target={"model": "Qwen/Qwen3-8B"}, speculation=ADAPTIVE))
    (found,) = findings(specdecode, path, "--strict", code=0)
    assert (found["level"], found["rule"]) == ("note", "PlanNote")
    assert "acceptance reads low" in found["message"]
    assert specdecode("lint", path).stdout.splitlines()[-1] == "objects: 1, errors: 0, warnings: 0, notes: 1"
    planned = specdecode("plan", "-f", path, "--strict")
    assert (planned.exit_code, planned.stderr) == (0, "")
    assert "acceptance reads low" in " ".join(planned.stdout.split())


def test_lora_adapters_give_only_a_note(specdecode: Specdecode, write: WriteObject) -> None:
    body = manifest("a", **only("NVIDIA-H200"), engine={"extraArgs": ["--enable-lora"]}, speculation=None)
    path = write("a.yaml", body)
    (found,) = findings(specdecode, path, "--strict", code=0)
    assert (found["level"], found["rule"]) == ("note", "PlanNote")
    planned = specdecode("plan", "-f", path, "--strict")
    assert (planned.exit_code, planned.stderr) == (0, "")
    assert "--enable-lora, which the plan does not count" in " ".join(planned.stdout.split())


def test_strict_fails_on_warnings_in_lint_and_plan(specdecode: Specdecode, write: WriteObject) -> None:
    engine = {"version": "0.32", "image": "vllm/vllm-openai:v0.31.0"}
    body = manifest("a", **only("NVIDIA-H200"), engine=engine, speculation=None)
    path = write("a.yaml", body)
    (found,) = findings(specdecode, path, "--strict", code=3)
    assert found["level"] == "warning"
    planned = specdecode("plan", "-f", path, "--strict")
    assert (planned.exit_code, planned.stderr) == (3, f"error: --strict: a: {found['message']}\n")


@pytest.mark.parametrize("kind", ["List", "StorageClassList"])
def test_empty_list_of_storage_classes_gives_a_warning(specdecode: Specdecode, write: WriteObject, kind: str) -> None:
    classes = write("classes.yaml", {"apiVersion": "v1", "kind": kind, "items": []})
    (found,) = findings(specdecode, write("a.yaml", capture()), f"--storage-classes={classes}", code=0)
    assert (found["level"], found["rule"]) == ("warning", "StorageClassNotFound")


@pytest.mark.parametrize(
    ("spec", "rule", "field"),
    [
        ({"seeds": 1}, "Invalid", "spec.seeds"),
        (
            {"storage": {"persistentVolumeClaim": {"claimName": "x"}, "size": "1Gi"}},
            "Invalid",
            "spec.storage.persistentVolumeClaim",
        ),
        ({"deadlineSeconds": 60, "workload": None}, "Invalid", "spec.workload"),
        # Rules of the API server, between fields of the whole.
        ({"arms": [{"name": "one"}, {"name": "other"}], "repetitions": 1}, "Invalid", "spec.repetitions"),
        ({"arms": [{"name": "one"}, {"name": "one"}]}, "Invalid", "spec.arms"),
        ({"slo": {"ttftMs": 100}}, "Invalid", "spec.slo"),
        ({"arms": [{"name": "one"}, {"name": "other"}], "against": {"capture": "g"}}, "Invalid", "spec.against"),
    ],
)
def test_captures_are_checked(
    specdecode: Specdecode, write: WriteObject, spec: dict[str, Any], rule: str, field: str
) -> None:
    (found,) = findings(specdecode, write("a.yaml", capture(**spec)))
    assert (found["kind"], found["name"], found["rule"]) == ("SpecDecodeCapture", "evening", rule)
    assert found["field"] == field


TRAINING = {
    "apiVersion": "specdecode.io/v1alpha1",
    "kind": "SpecDecodeTraining",
    "metadata": {"name": "head"},
    "spec": {"deployment": "chat", "captures": ["evening"], "trainer": {"image": "localhost/trainer:1"}},
}


def training(**spec: Any) -> dict[str, Any]:
    return {**TRAINING, "spec": {**deepcopy(TRAINING["spec"]), **spec}}


@pytest.mark.parametrize(
    ("spec", "rule", "field"),
    [
        ({"trainer": {}}, "Invalid", "spec.trainer.image"),
        ({"trainer": {"image": "i", "learningRate": "fast"}}, "Invalid", "spec.trainer.learningRate"),
        ({"captures": []}, "Invalid", "spec.captures"),
        ({"method": "eagle"}, "Invalid", "spec.method"),
    ],
)
def test_trainings_are_checked(
    specdecode: Specdecode, write: WriteObject, spec: dict[str, Any], rule: str, field: str
) -> None:
    assert findings(specdecode, write("a.yaml", training()), code=0) == []
    (found,) = findings(specdecode, write("a.yaml", training(**spec)))
    assert (found["kind"], found["name"], found["rule"]) == ("SpecDecodeTraining", "head", rule)
    assert found["field"] == field


def test_training_is_checked_against_its_deployment_in_the_files(specdecode: Specdecode, write: WriteObject) -> None:
    body = training(trainer={"image": "i", "gpus": 0})
    assert findings(specdecode, write("a.yaml", body), code=0) == []
    (found,) = findings(specdecode, write("a.yaml", body, manifest("chat")))
    assert (found["kind"], found["rule"]) == ("SpecDecodeTraining", "TrainerWithoutGPUs")
    (found,) = findings(specdecode, write("a.yaml", body, manifest("chats")), code=0)
    assert (found["rule"], found["field"]) == ("DeploymentNotFound", "spec.deployment")


@pytest.mark.parametrize("kind", ["SpecDecodeDeployment", "SpecDecodeCapture", "SpecDecodeTraining"])
@pytest.mark.parametrize("name", [None, "Chat", "a" * 60, 7])
def test_names_of_all_kinds_are_checked(specdecode: Specdecode, write: WriteObject, kind: str, name: object) -> None:
    bodies = {"SpecDecodeCapture": capture(), "SpecDecodeTraining": training()}
    body = bodies.get(kind) or manifest("a")
    (found,) = findings(specdecode, write("a.yaml", {**body, "metadata": {"name": name} if name else {}}))
    assert (found["kind"], found["field"]) == (kind, "metadata.name")


def test_capture_longer_than_its_deadline_is_refused(specdecode: Specdecode, write: WriteObject) -> None:
    body = capture(deadlineSeconds=60)
    body["spec"]["workload"]["phases"][0]["durationSeconds"] = 90
    (found,) = findings(specdecode, write("a.yaml", body))
    assert found["rule"] == "WorkloadTooLong"


def test_capture_is_checked_against_its_deployment_in_the_files(specdecode: Specdecode, write: WriteObject) -> None:
    owner = manifest("chat", engine={"extraArgs": ["--stream-interval", "4"]})
    assert findings(specdecode, write("a.yaml", capture()), code=0) == []
    (found,) = findings(specdecode, write("a.yaml", capture(), owner))
    assert (found["kind"], found["rule"]) == ("SpecDecodeCapture", "StreamIntervalNotOne")


def test_requests_longer_than_the_engines_allow_are_found(specdecode: Specdecode, write: WriteObject) -> None:
    prompts = {"synthetic": {"promptTokens": 900, "outputTokens": 900}}
    asked = capture(workload={"prompts": prompts})
    owner = manifest("chat", serving={"maxModelLen": 1024})
    assert findings(specdecode, write("a.yaml", asked), code=0) == []
    assert findings(specdecode, write("a.yaml", asked, manifest("chat")), code=0) == []
    (found,) = findings(specdecode, write("a.yaml", asked, owner))
    assert (found["kind"], found["rule"]) == ("SpecDecodeCapture", "RequestsTooLong")
    owner["spec"]["captures"] = [
        {"name": "nightly", "schedule": "0 3 * * *", "template": {"workload": {"prompts": prompts}}},
        {"name": "live", "schedule": "0 3 * * *", "template": {"source": "Live", "live": {"requests": 1}}},
    ]
    (found,) = findings(specdecode, write("a.yaml", owner), code=0)
    assert (found["level"], found["rule"]) == ("warning", "PlanWarning")
    assert found["field"] == "spec.captures[name=nightly].template.workload.prompts.synthetic.outputTokens"


def test_each_capture_arm_is_planned_like_a_deployment(
    specdecode: Specdecode, write: WriteObject, tmp_path: Path
) -> None:
    def drafted(method: str, model: str) -> dict[str, Any]:
        return {
            "name": "drafted",
            "speculation": {"method": method, "numSpeculativeTokens": 2, "draft": {"model": model}},
        }

    plain = {"name": "plain", "speculation": {"method": "none"}}
    headless = write(
        "a.yaml", manifest("chat"), capture(arms=[plain, drafted("eagle3", "meta-llama/Llama-3.1-8B-Instruct")])
    )
    (found,) = findings(specdecode, headless)
    assert (found["level"], found["rule"]) == ("error", "ArmRefused")
    assert "spec.arms[1].speculation.draft.model: meta-llama/Llama-3.1-8B-Instruct" in found["message"]
    unknown = write("b.yaml", manifest("chat"), capture(arms=[plain, drafted("draft_model", "org/unknown")]))
    (found,) = findings(specdecode, unknown, code=0)
    assert (found["level"], found["rule"]) == ("warning", "ArmWaits"), "in a cluster it may be known"
    known = tmp_path / "config.json"
    known.write_text(json.dumps(find_entry("meta-llama/Llama-3.1-8B-Instruct").config))  # type: ignore[union-attr]
    assert findings(specdecode, unknown, f"--model-config=org/unknown={known}", code=0) == []
    rendered = specdecode("render", unknown, f"--model-config=org/unknown={known}")
    assert rendered.exit_code == 0, rendered.stderr
    assert "org/unknown" in rendered.stdout


def test_sarif_names_rule_place_and_object(
    specdecode: Specdecode, write: WriteObject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = write("a folder/ä.yaml", BROKEN)
    result = specdecode("lint", path, "-o", "sarif")
    assert result.exit_code == 2
    log = json.loads(result.stdout)
    (run,) = log["runs"]
    assert log["version"] == "2.1.0"
    rules = [rule["id"] for rule in run["tool"]["driver"]["rules"]]
    assert rules == ["Invalid"]
    for each in run["results"]:
        assert rules[each["ruleIndex"]] == each["ruleId"]
        assert each["level"] == "error"
        (place,) = each["locations"]
        uri = place["physicalLocation"]["artifactLocation"]["uri"]
        assert uri.isascii()
        assert unquote(uri) == "a folder/ä.yaml"
        assert place["physicalLocation"]["region"]["startLine"] in {13, 16, 17}
        (name,) = place["logicalLocations"]
        assert name["fullyQualifiedName"].startswith("SpecDecodeDeployment chat spec.s")


def test_sarif_without_findings_has_a_run_without_results(specdecode: Specdecode, write: WriteObject) -> None:
    result = specdecode("lint", write("a.yaml", manifest("a")), "-o", "sarif")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["runs"][0]["results"] == []


def test_unreadable_file_is_a_finding_of_that_file(specdecode: Specdecode, write: WriteObject) -> None:
    path = write("a.yaml", "a: 1\nb: [")
    (found,) = findings(specdecode, path)
    assert (found["rule"], found["file"], found["line"]) == ("Unreadable", str(path), 2)
    result = specdecode("lint", path, "-o", "sarif")
    place = json.loads(result.stdout)["runs"][0]["results"][0]["locations"][0]
    assert unquote(place["physicalLocation"]["artifactLocation"]["uri"]).endswith(path.name)
    assert place["physicalLocation"]["region"] == {"startLine": 2}


def test_findings_in_standard_input_have_no_line_numbers(specdecode: Specdecode) -> None:
    result = specdecode("lint", "-", "-o", "json", stdin=BROKEN)
    assert result.exit_code == 2
    assert {each["line"] for each in json.loads(result.stdout)["findings"]} == {None}
    result = specdecode("lint", "-", "-o", "json", stdin="a: [")
    assert {each["line"] for each in json.loads(result.stdout)["findings"]} == {None}


def test_empty_input_is_an_error_without_a_location(specdecode: Specdecode, write: WriteObject) -> None:
    result = specdecode("lint", write("a.yaml", ""))
    assert result.exit_code == 2
    assert result.stdout.startswith("error: ")
