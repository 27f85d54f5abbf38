"""Manifest of a capture's Job."""

import json
import subprocess
import sys
from typing import Any

import pytest

from specdecode_operator.capture.decision import decide
from specdecode_operator.capture.load.run_settings import read_settings
from specdecode_operator.capture.observation import ObservedDeployment, read_capture
from specdecode_operator.deployment.desired_state import Launch
from tests.support.capture_decisions import NOW
from tests.support.captures import OPERATOR_IMAGE, capture, capture_spec, claim, observed_deployment, surroundings
from tests.support.objects import Body, tiny_cpu

WITHOUT_RECORDER = tiny_cpu(engine={"image": "localhost/engine:1", "recorder": False})


def deployed(spec: Body | None = None) -> tuple[ObservedDeployment, Body]:
    """A deployment, and the pod that it starts."""
    seen = observed_deployment(spec)
    return seen, seen.desired.children[-1]["spec"]["template"]


def rendered(deployment: Body | None = None, **spec: Any) -> Body:
    seen, _ = deployed(deployment)
    decision = decide(read_capture(capture(capture_spec(**spec))), surroundings(deployment=seen), NOW)
    assert decision.writes.job is not None, decision.readiness
    return decision.writes.job


def pod_spec(job: Body) -> Body:
    found: Body = job["spec"]["template"]["spec"]
    return found


def containers(job: Body) -> dict[str, Body]:
    spec = pod_spec(job)
    return {each["name"]: each for each in [*spec["initContainers"], *spec["containers"]]}


def variables(container: Body) -> dict[str, Any]:
    return {each["name"]: each.get("value", each.get("valueFrom")) for each in container["env"]}


def settings(job: Body) -> Body:
    text = variables(containers(job)["load"])["SPECDECODE_CAPTURE"]
    found: Body = json.loads(text.replace("$$", "$"))
    return found


class TestEngine:
    def test_engine_equals_deployment_engine_plus_recording(self) -> None:
        _, template = deployed(WITHOUT_RECORDER)
        (original,) = template["spec"]["containers"]
        engine = containers(rendered())["engine"]
        assert engine["restartPolicy"] == "Always", "a native sidecar"
        for field in ("image", "resources", "startupProbe", "securityContext", "ports"):
            assert engine[field] == original[field]
        assert engine["command"][3:] == [
            "/specdecode/recorder",
            *original["command"],
            "--enable-logging-iteration-details",
        ]
        assert engine["env"][: len(original["env"])] == original["env"]
        assert engine["volumeMounts"][: len(original["volumeMounts"])] == original["volumeMounts"]

    def test_live_recorder_is_not_in_capture_pod(self) -> None:
        assert "recorder" in {each["name"] for each in deployed()[1]["spec"]["initContainers"]}
        assert pod_spec(rendered()) == pod_spec(rendered(WITHOUT_RECORDER))

    def test_engine_has_no_readiness_liveness_or_lifecycle(self) -> None:
        assert containers(rendered())["engine"].keys().isdisjoint({"readinessProbe", "livenessProbe", "lifecycle"})

    def test_recorder_gets_folder_of_attempt(self) -> None:
        engine = containers(rendered())["engine"]
        found = variables(engine)
        folder = "/capture/default/demo/as-deployed/1.part-$(SPECDECODE_ATTEMPT)/segments"
        assert found["SPECDECODE_RECORD_DIR"] == folder
        assert found["SPECDECODE_RECORD_TOKEN_IDS"] == "0"
        assert found["SPECDECODE_RECORD_STEPS"] == "1"
        names = [each["name"] for each in engine["env"]]
        assert names.index("SPECDECODE_ATTEMPT") < names.index("SPECDECODE_RECORD_DIR"), "or it is not put in"

    @pytest.mark.parametrize(
        ("given", "path", "plugins"),
        [
            ({}, "/specdecode/recorder", None),
            ({"PYTHONPATH": "/opt/vllm"}, "/specdecode/recorder:/opt/vllm", None),
            ({"VLLM_PLUGINS": "lora"}, "/specdecode/recorder", "lora,specdecode_recorder"),
            ({"VLLM_PLUGINS": ""}, "/specdecode/recorder", "specdecode_recorder"),
        ],
    )
    def test_recorder_is_added_to_pythonpath_and_vllm_plugins(
        self, given: dict[str, str], path: str, plugins: str | None
    ) -> None:
        """Where VLLM_PLUGINS is not set, vLLM loads every plugin."""
        shell, option, script, recorder = containers(rendered())["engine"]["command"][:4]
        show = "import json, os, sys; print(json.dumps([dict(os.environ), sys.argv[1:]]))"
        command = [shell, option, script, recorder, sys.executable, "-c", show, "--model=a b", "$HOME"]
        answer = subprocess.run(command, env=given, capture_output=True, text=True, check=True)
        environment, arguments = json.loads(answer.stdout)
        assert environment["PYTHONPATH"] == path
        assert environment.get("VLLM_PLUGINS") == plugins
        assert arguments == ["--model=a b", "$HOME"], "arguments are passed on as they are"

    def test_record_settings_are_passed_to_engine(self) -> None:
        job = rendered(record={"tokenIds": True, "stepStats": False})
        found = variables(containers(job)["engine"])
        assert (found["SPECDECODE_RECORD_TOKEN_IDS"], found["SPECDECODE_RECORD_STEPS"]) == ("1", "0")
        assert "--enable-logging-iteration-details" not in containers(job)["engine"]["command"]
        assert settings(job)["context"]["recording_flags"] == []

    def test_recording_flag_is_not_given_twice(self) -> None:
        flag = "--enable-logging-iteration-details"
        job = rendered(tiny_cpu(engine={"image": "i:1", "extraArgs": [flag]}))
        assert containers(job)["engine"]["command"].count(flag) == 1

    def test_engine_and_load_use_tls_of_deployment(self) -> None:
        serving = {"maxModelLen": 1024, "tlsSecret": {"name": "certificate"}}
        job = rendered(tiny_cpu(serving=serving))
        engine, load = containers(job)["engine"], containers(job)["load"]
        assert settings(job)["engine"]["url"] == "https://127.0.0.1:8000"
        assert "/etc/specdecode-tls/tls.crt" in " ".join(engine["command"])
        assert engine["startupProbe"]["httpGet"]["scheme"] == "HTTPS"
        (folder,) = (each["mountPath"] for each in load["volumeMounts"] if each["name"] == "specdecode-tls")
        assert settings(job)["engine"]["certificates"] == folder

    def test_load_gets_no_private_tls_key(self) -> None:
        serving = {"maxModelLen": 1024, "tlsSecret": {"name": "certificate"}}
        job = rendered(tiny_cpu(serving=serving))
        volumes = {volume["name"]: volume for volume in pod_spec(job)["volumes"]}
        ours = [volumes[each["name"]] for each in containers(job)["load"]["volumeMounts"]]
        secrets = [volume["secret"] for volume in ours if "secret" in volume]
        assert [item["key"] for secret in secrets for item in secret["items"]] == ["tls.crt", "ca.crt"]
        assert "specdecode-tls" not in {each["name"] for each in containers(job)["prepare"]["volumeMounts"]}

    def test_engine_without_tls_secret_uses_http(self) -> None:
        job = rendered()
        assert settings(job)["engine"]["url"] == "http://127.0.0.1:8000"
        assert "certificates" not in settings(job)["engine"]
        assert "specdecode-tls" not in {volume["name"] for volume in pod_spec(job)["volumes"]}

    def test_load_gets_engine_api_key(self) -> None:
        job = rendered(tiny_cpu(serving={"maxModelLen": 1024, "apiKeySecret": {"name": "clients", "key": "api"}}))
        reference = {"secretKeyRef": {"name": "clients", "key": "api"}}
        assert variables(containers(job)["load"])["VLLM_API_KEY"] == reference
        assert "VLLM_API_KEY" not in variables(containers(job)["prepare"])
        assert settings(job)["engine"]["api_key_variable"] == "VLLM_API_KEY"


class TestPod:
    def test_capture_pod_has_no_deployment_label(self) -> None:
        labels = rendered()["spec"]["template"]["metadata"]["labels"]
        assert "specdecode.io/deployment" not in labels
        assert labels["specdecode.io/capture"] == "demo"
        assert labels["specdecode.io/captured-deployment"] == "llama"
        assert labels["app.kubernetes.io/managed-by"] == "specdecode-operator"

    def test_containers_start_in_order_and_only_load_ends_the_pod(self) -> None:
        overlay = {
            "spec": {
                "initContainers": [{"name": "mine", "image": "i:1"}],
                "containers": [{"name": "shipper", "image": "i:1"}],
            }
        }
        spec = pod_spec(rendered(tiny_cpu(podTemplate=overlay)))
        assert [each["name"] for each in spec["initContainers"]] == ["prepare", "mine", "engine", "shipper"]
        assert [each["name"] for each in spec["containers"]] == ["load"], "it alone ends the pod"
        assert spec["initContainers"][-1]["restartPolicy"] == "Always"

    def test_pod_template_of_deployment_applies_to_capture_pod(self) -> None:
        overlay = {
            "metadata": {"labels": {"team": "serving", "kueue.x-k8s.io/queue-name": "pods"}},
            "spec": {
                "tolerations": [{"key": "gpus", "operator": "Exists"}],
                "priorityClassName": "high",
                "securityContext": {"runAsUser": 1000},
                "volumes": [{"name": "extra", "emptyDir": {}}],
            },
        }
        job = rendered(tiny_cpu(podTemplate=overlay))
        spec = pod_spec(job)
        assert spec["tolerations"] == [{"key": "gpus", "operator": "Exists"}]
        assert spec["priorityClassName"] == "high"
        assert spec["securityContext"]["runAsUser"] == 1000
        assert spec["automountServiceAccountToken"] is False
        assert {"name": "extra", "emptyDir": {}} in spec["volumes"]
        labels = job["spec"]["template"]["metadata"]["labels"]
        assert labels["team"] == "serving"
        assert "kueue.x-k8s.io/queue-name" not in labels

    @pytest.mark.parametrize("name", ["prepare", "load"])
    def test_operator_containers_are_restricted(self, name: str) -> None:
        container = containers(rendered())[name]
        assert container["image"] == OPERATOR_IMAGE
        context = container["securityContext"]
        assert context["runAsNonRoot"] is True
        assert context["runAsUser"] == 65532
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert context["readOnlyRootFilesystem"] is True
        assert container["args"] == ["capture-job", {"prepare": "prepare", "load": "run"}[name]]

    def test_created_volume_has_fs_group_of_load(self) -> None:
        assert pod_spec(rendered())["securityContext"]["fsGroup"] == 65532

    def test_existing_claim_gets_no_fs_group(self) -> None:
        seen = surroundings(claim={"metadata": {"name": "mine"}, "spec": {"accessModes": ["ReadWriteMany"]}})
        spec = capture_spec(storage={"persistentVolumeClaim": {"claimName": "mine"}})
        job = decide(read_capture(capture(spec)), seen, NOW).writes.job
        assert job is not None
        assert "fsGroup" not in pod_spec(job)["securityContext"]
        (volume,) = (each for each in pod_spec(job)["volumes"] if each["name"] == "specdecode-capture")
        assert volume["persistentVolumeClaim"] == {"claimName": "mine"}

    def test_pod_deadline_covers_start_load_and_merge(self) -> None:
        short, long = (pod_spec(rendered(deadlineSeconds=each))["activeDeadlineSeconds"] for each in (600, 3600))
        assert long - short == 3000 + 300, "what there is to merge grows with the load"
        assert short > 600 + 900 + 60, "an engine takes its time to start"

    def test_job_without_borrowing_has_no_deadline(self) -> None:
        assert "activeDeadlineSeconds" not in rendered()["spec"]

    def test_job_deadline_with_borrowing_covers_every_attempt(self) -> None:
        once, thrice = (rendered(deploymentDuringCapture="Suspend", backoffLimit=each) for each in (0, 2))
        attempt_s = pod_spec(once)["activeDeadlineSeconds"]
        assert pod_spec(thrice)["activeDeadlineSeconds"] == attempt_s
        assert once["spec"]["activeDeadlineSeconds"] == 1800 + attempt_s
        assert thrice["spec"]["activeDeadlineSeconds"] == 1800 + 3 * attempt_s


class TestDataset:
    def dataset(self, **source: Any) -> Body:
        dataset = {**source, "path": "a.jsonl", "format": "JSONL"}
        workload = {"prompts": {"dataset": dataset}, "phases": capture_spec()["workload"]["phases"]}
        seen = surroundings(dataset={"data": {"a.jsonl": ""}})
        job = decide(read_capture(capture(capture_spec(workload=workload))), seen, NOW).writes.job
        assert job is not None
        return job

    @pytest.mark.parametrize(
        ("source", "volume"),
        [
            ({"configMap": {"name": "prompts"}}, {"configMap": {"name": "prompts"}}),
            (
                {"persistentVolumeClaim": {"claimName": "prompts"}},
                {"persistentVolumeClaim": {"claimName": "prompts", "readOnly": True}},
            ),
        ],
    )
    def test_dataset_is_mounted_read_only_in_load(self, source: Body, volume: Body) -> None:
        job = self.dataset(**source)
        assert {"name": "specdecode-dataset", **volume} in pod_spec(job)["volumes"]
        mount = {"name": "specdecode-dataset", "mountPath": "/dataset", "readOnly": True}
        assert mount in containers(job)["load"]["volumeMounts"]


class TestSettings:
    def test_load_generator_can_read_settings(self) -> None:
        job = rendered(workload={}, deadlineSeconds=600, seed=7)
        text = variables(containers(job)["load"])["SPECDECODE_CAPTURE"]
        found = read_settings(text)
        assert (found.namespace, found.capture) == ("default", "demo")
        assert json.loads(text)["capture_uid"] == "capture-uid"
        assert (found.seed, found.deadline_seconds) == (7, 600)
        assert [phase.name for phase in found.workload.phases] == ["single", "closed-16"]
        assert (found.engine.model, found.engine.vocab_size, found.engine.max_model_len) == ("target", 1024, 1024)

    def test_dollar_signs_in_settings_are_escaped(self) -> None:
        workload = {
            "prompts": {
                "dataset": {"configMap": {"name": "p"}, "path": "$(HOME)$", "format": "JSONL", "promptField": "a'b\"c"}
            }
        }
        seen = surroundings(dataset={"data": {"$(HOME)$": ""}})
        job = decide(read_capture(capture(capture_spec(workload=workload))), seen, NOW).writes.job
        assert job is not None
        text = variables(containers(job)["load"])["SPECDECODE_CAPTURE"]
        assert "$$(HOME)$$" in text
        assert settings(job)["workload"]["prompts"]["dataset"]["promptField"] == "a'b\"c"

    def test_settings_context_describes_engine_and_plan(self) -> None:
        seen, template = deployed(WITHOUT_RECORDER)
        context = settings(rendered(WITHOUT_RECORDER))["context"]
        assert context["recording_flags"] == ["--enable-logging-iteration-details"]
        assert context["image"] == "localhost/engine:1"
        assert context["command"] == template["spec"]["containers"][0]["command"]
        assert isinstance(seen.desired.outcome, Launch)
        assert context["plan"]["kvCacheTokens"] == seen.desired.outcome.plan_status.kv_cache_tokens
        assert context["deployment"] == {"name": "llama", "uid": "uid-1", "generation": 1}


class TestClaims:
    @pytest.mark.parametrize("read_only", [True, False])
    def test_claim_for_files_prompts_and_draft_is_one_volume(self, read_only: bool) -> None:
        """A pod that names a claim twice may not start."""
        deployment = tiny_cpu()
        deployment["speculation"]["draft"]["persistentVolumeClaim"] = {"claimName": "trained"}
        on_claim = {"persistentVolumeClaim": {"claimName": "trained"}}
        dataset = {**on_claim, "path": "a.jsonl", "format": "JSONL"}
        storage = {} if read_only else {"storage": on_claim}
        spec = capture_spec(workload={"prompts": {"dataset": dataset}, "phases": [_phase()]}, **storage)
        bound = claim("trained")
        seen = surroundings(deployment=deployed(deployment)[0], dataset=bound, claim=None if read_only else bound)
        job = decide(read_capture(capture(spec)), seen, NOW).writes.job
        assert job is not None
        (volume,) = (
            each
            for each in pod_spec(job)["volumes"]
            if each.get("persistentVolumeClaim", {}).get("claimName") == "trained"
        )
        assert volume["persistentVolumeClaim"].get("readOnly", False) is read_only
        mounts = {each["mountPath"]: each for each in containers(job)["engine"]["volumeMounts"]}
        mounts |= {each["mountPath"]: each for each in containers(job)["load"]["volumeMounts"]}
        for path, is_mount_read_only in (("/drafts/trained", True), ("/dataset", True), ("/capture", False)):
            if path == "/capture" and read_only:
                continue
            assert mounts[path]["name"] == volume["name"]
            assert mounts[path].get("readOnly", False) is is_mount_read_only


def _phase() -> Body:
    return {"name": "one", "pattern": "Closed", "concurrency": 1, "requests": 10}
