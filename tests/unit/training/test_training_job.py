"""Manifest of a training's Job."""

import json
from typing import Any

import pytest

from specdecode_operator.capture.observation import ObservedDeployment
from specdecode_operator.cluster.nodes import NodeFacts, gpus_of
from specdecode_operator.training.files.pod_settings import read_pod_settings
from specdecode_operator.training.job.settings import Settings, read_settings
from tests.support.captures import OPERATOR_IMAGE, claim, observed_deployment
from tests.support.devices import claiming
from tests.support.objects import Body, tiny_cpu
from tests.support.trainings import STEPS, decided, surroundings, training, training_spec

LLAMA = {
    "target": {"model": "meta-llama/Llama-3.1-8B-Instruct"},
    "speculation": {"method": "ngram", "numSpeculativeTokens": 3},
}
FOLDER = "/training/default/head"
TLS_VARIABLE = "SPECDECODE_TLS_CERTIFICATE"


def on_h100(**changes: Any) -> ObservedDeployment:
    spec = {**LLAMA, "parallelism": {"tensor": 2}, "serving": {"maxModelLen": 8192}, **changes}
    return observed_deployment(spec, (NodeFacts("node", "NVIDIA-H100-80GB-HBM3", 8, schedulable=True),))


def observed_pod(deployment: ObservedDeployment) -> Body:
    """Return the template of the engine's pods."""
    workload = deployment.desired.workload
    assert workload is not None
    found: Body = workload["spec"]["template"]
    return found


def rendered(deployment: ObservedDeployment | None = None, seen: Body | None = None, **spec: Any) -> Body:
    around = {"deployment": deployment or observed_deployment(), **(seen or {})}
    decision, _ = decided(training(training_spec(**spec)), surroundings(**around))
    assert decision.writes.job is not None, decision.readiness
    return decision.writes.job


def pod_spec(job: Body) -> Body:
    found: Body = job["spec"]["template"]["spec"]
    return found


def containers(job: Body) -> dict[str, Body]:
    spec = pod_spec(job)
    return {each["name"]: each for each in [*spec["initContainers"], *spec["containers"]]}


def variables(container: Body) -> Body:
    return {each["name"]: each.get("value", each.get("valueFrom")) for each in container["env"]}


def text(job: Body, step: str = "train") -> str:
    found: str = variables(containers(job)[step])["SPECDECODE_TRAINING"]
    return found.replace("$$", "$")


def settings(job: Body) -> Settings:
    return read_settings({"SPECDECODE_TRAINING": text(job)})


def volumes(job: Body) -> Body:
    return {
        each["name"]: {name: value for name, value in each.items() if name != "name"}
        for each in pod_spec(job)["volumes"]
    }


def mounts(job: Body, step: str) -> Body:
    return {each["mountPath"]: each for each in containers(job)[step]["volumeMounts"]}


class TestPod:
    def test_steps_run_one_after_the_other(self) -> None:
        job = rendered()
        names = [each["name"] for each in pod_spec(job)["initContainers"]]
        assert [each for each in names if each in STEPS] == list(STEPS[:-1])
        assert [each["name"] for each in pod_spec(job)["containers"]] == [STEPS[-1]]
        assert not [each for each in pod_spec(job)["initContainers"] if "restartPolicy" in each], "no sidecars"

    def test_images(self) -> None:
        images = {name: each["image"] for name, each in containers(rendered()).items() if name in STEPS}
        trainer = "localhost/trainer:1"
        assert images == dict(zip(STEPS, (OPERATOR_IMAGE, trainer, trainer, OPERATOR_IMAGE), strict=True))

    def test_trainer_gets_neither_token_nor_secrets_of_serving(self) -> None:
        served = tiny_cpu(
            serving={"maxModelLen": 1024, "apiKeySecret": {"name": "k", "key": "k"}, "tlsSecret": {"name": "t"}}
        )
        job = rendered(observed_deployment(served))
        assert pod_spec(job)["automountServiceAccountToken"] is False
        for step in ("hidden-states", "train"):
            assert not variables(containers(job)[step]).keys() & {"VLLM_API_KEY", TLS_VARIABLE}
            assert not any("secret" in json.dumps(each).lower() for each in containers(job)[step]["env"])
        assert not any("secret" in each for each in volumes(job).values())
        assert not {"--ssl-certfile", "--ssl-keyfile"} & set(settings(job).command)

    @pytest.mark.parametrize(
        "source",
        [
            {"secret": {"secretName": "s"}},
            {"projected": {"sources": [{"configMap": {"name": "c"}}, {"secret": {"name": "s"}}]}},
            {"csi": {"driver": "secrets-store.csi.k8s.io", "readOnly": True}},
        ],
    )
    def test_trainer_gets_no_secrets_of_the_pod_template(self, source: Body) -> None:
        reference = {"secretKeyRef": {"name": "s", "key": "k"}}
        engine = {
            "name": "engine",
            "env": [{"name": "STORE_PASSWORD", "valueFrom": reference}, {"name": "REGION", "value": "eu"}],
            "volumeMounts": [{"name": "extra", "mountPath": "/extra"}],
        }
        template = {"spec": {"containers": [engine], "volumes": [{"name": "extra", **source}]}}
        job = rendered(observed_deployment(tiny_cpu(podTemplate=template)))
        for step in STEPS[1:3]:
            assert "/extra" not in mounts(job, step)
            assert "STORE_PASSWORD" not in variables(containers(job)[step])
            assert variables(containers(job)[step])["REGION"] == "eu"

    def test_containers_are_restricted(self) -> None:
        job = rendered()
        assert pod_spec(job)["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for step in STEPS:
            context = containers(job)[step]["securityContext"]
            assert context["runAsUser"] == 65532
            assert context["runAsNonRoot"] is True
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"] == {"drop": ["ALL"]}

    def test_only_own_folders_are_writable(self) -> None:
        job = rendered()
        own = {str(each) for each in (settings(job).places.hidden_states, settings(job).places.checkpoints)}
        for step in STEPS[1:3]:
            writable = {path for path, each in mounts(job, step).items() if not each.get("readOnly")}
            assert writable == {"/tmp", "/dev/shm", *own}
        assert volumes(job)[mounts(job, "train")["/dev/shm"]["name"]]["emptyDir"]["medium"] == "Memory"
        assert all(each.get("readOnly") for path, each in mounts(job, "export").items() if path.startswith("/captures"))

    def test_trainer_reaches_no_head_on_the_claim(self) -> None:
        job = rendered()
        volume = mounts(job, "publish")["/training"]["name"]
        for step in STEPS[1:3]:
            found = {path: each for path, each in mounts(job, step).items() if each["name"] == volume}
            assert found.keys() == {f"{FOLDER}/rows", f"{FOLDER}/hidden-states", f"{FOLDER}/checkpoints/training-uid"}
            assert all(f"/training/{each['subPath']}" == path for path, each in found.items())

    def test_models_claim_is_not_writable_as_storage(self) -> None:
        shared = {"persistentVolumeClaim": {"claimName": "models"}}
        served = tiny_cpu(models={"volume": shared})
        job = rendered(observed_deployment(served), {"claim": claim("models")}, storage=shared)
        writable = [each for each in mounts(job, "train").values() if not each.get("readOnly")]
        models = mounts(job, "train")["/models"]
        assert models["readOnly"] is True
        assert all(each.get("subPath") for each in writable if each["name"] == models["name"])

    def test_mounts_of_a_pod_template_are_read_only(self) -> None:
        mount = {"name": "extra", "mountPath": "/extra"}
        template = {
            "spec": {
                "containers": [{"name": "engine", "volumeMounts": [mount]}],
                "volumes": [{"name": "extra", "emptyDir": {}}],
            }
        }
        job = rendered(observed_deployment(tiny_cpu(podTemplate=template)))
        assert mounts(job, "train")["/extra"] == {**mount, "readOnly": True}

    def test_sidecars_of_a_pod_template_are_left_out(self) -> None:
        prepare = {"name": "prepare", "image": "i"}
        sidecar = {"name": "logs", "image": "i", "restartPolicy": "Always"}
        template = {"spec": {"initContainers": [prepare, sidecar]}}
        found = containers(rendered(observed_deployment(tiny_cpu(podTemplate=template))))
        assert "prepare" in found
        assert "logs" not in found, "the Job would not end"

    def test_group_of_a_users_claim_is_kept(self) -> None:
        mine = {"persistentVolumeClaim": {"claimName": "mine"}}
        assert "fsGroup" not in pod_spec(rendered(seen={"claim": claim("mine")}, storage=mine))["securityContext"]
        assert pod_spec(rendered())["securityContext"]["fsGroup"] == 65532

    def test_output_of_the_trainer_is_no_message(self) -> None:
        policies = {step: containers(rendered())[step]["terminationMessagePolicy"] for step in STEPS[1:3]}
        assert set(policies.values()) == {"File"}

    def test_no_service_selects_it(self) -> None:
        labels = rendered()["spec"]["template"]["metadata"]["labels"]
        assert "specdecode.io/deployment" not in labels
        assert labels["specdecode.io/training"] == "head"

    def test_dollar_signs_are_not_expanded(self) -> None:
        job = rendered(trainer={"image": "i", "args": ["--loss-fn=$(HOME)"]})
        assert "$$(HOME)" in variables(containers(job)["train"])["SPECDECODE_TRAINING"]
        assert settings(job).args == ["--loss-fn=$(HOME)"]


class TestVolumes:
    def test_captures_and_datasets_are_mounted_read_only(self) -> None:
        job = rendered()
        assert volumes(job)["specdecode-capture-0"]["persistentVolumeClaim"] == {
            "claimName": "evening-capture",
            "readOnly": True,
        }
        (found,) = json.loads(text(job, "export"))["sources"]
        assert found["mount"] == "/captures/evening"
        assert found["dataset"] == "/datasets/evening"
        assert {found["mount"], found["dataset"]} <= mounts(job, "export").keys()

    def test_claim_is_mounted_once(self) -> None:
        shared = {"persistentVolumeClaim": {"claimName": "evening-capture"}}
        job = rendered(seen={"claim": claim("evening-capture")}, storage=shared)
        claims = [each for each in volumes(job).values() if "persistentVolumeClaim" in each]
        assert [each["persistentVolumeClaim"] for each in claims].count({"claimName": "evening-capture"}) == 1
        names = [each["persistentVolumeClaim"]["claimName"] for each in claims]
        assert len(set(names)) == len(names)
        assert mounts(job, "export")["/captures/evening"]["readOnly"] is True

    def test_claim_that_engines_read_is_writable_for_the_training(self) -> None:
        read = {"name": "more", "persistentVolumeClaim": {"claimName": "mine", "readOnly": True}}
        mount = {"name": "more", "mountPath": "/more", "readOnly": True}
        template = {"spec": {"volumes": [read], "containers": [{"name": "engine", "volumeMounts": [mount]}]}}
        served = observed_deployment(tiny_cpu(podTemplate=template))
        job = rendered(served, {"claim": claim("mine")}, storage={"persistentVolumeClaim": {"claimName": "mine"}})
        assert volumes(job)["more"] == {"persistentVolumeClaim": {"claimName": "mine"}}
        assert mounts(job, "train")["/more"]["readOnly"] is True
        (rows,) = (path for path in mounts(job, "train") if path.startswith("/training/") and path.endswith("/rows"))
        assert mounts(job, "train")[rows]["name"] == "more"

    def test_rows_of_a_file(self) -> None:
        dataset = {"configMap": {"name": "rows"}, "path": "rows.jsonl"}
        job = rendered(seen={"rows": {"data": {"rows.jsonl": ""}}}, captures=[], dataset=dataset)
        assert json.loads(text(job, "export"))["sources"] == [{"mount": "/dataset", "path": "rows.jsonl"}]
        assert volumes(job)[mounts(job, "export")["/dataset"]["name"]] == {"configMap": {"name": "rows"}}


class TestEngineForHiddenStates:
    def test_is_the_deployments_without_speculation(self) -> None:
        command = settings(rendered(on_h100())).command
        assert command[:2] == ["vllm", "serve"]
        assert command[command.index("--tensor-parallel-size") + 1] == "2"
        assert not [each for each in command if each.startswith("--speculative")]

    def test_is_one_replica_with_hidden_states_in_full_precision(self) -> None:
        served = on_h100(parallelism={"tensor": 2, "data": 2}, serving={"maxModelLen": 8192, "kvCacheDtype": "fp8"})
        command = " ".join(settings(rendered(served)).command)
        assert "--data-parallel" not in command
        assert "fp8" not in command

    def test_takes_a_row_and_more_tokens(self) -> None:
        found = settings(rendered(on_h100(), trainer={"image": "i", "sequenceLength": 4096}))
        assert found.command[found.command.index("--max-model-len") + 1] == "4104"
        assert found.sequence_length == 4096

    def test_rows_are_cut_at_the_length_that_the_deployment_serves(self) -> None:
        found = settings(rendered(on_h100(), trainer={"image": "i", "sequenceLength": 65536}, maxTokens=1000))
        assert found.command[found.command.index("--max-model-len") + 1] == "8192"
        assert found.sequence_length == 8184

    @pytest.mark.parametrize("flag", ["--kv-transfer-config={}", "--enable-prefix-caching"])
    def test_flags_of_serving_are_left_out(self, flag: str) -> None:
        served = on_h100(engine={"extraArgs": [flag, "--seed", "7"]})
        command = settings(rendered(served)).command
        assert flag not in command
        assert command[-2:] == ["--seed", "7"]


class TestGpus:
    def test_trainer_gets_those_of_one_replica(self) -> None:
        job = rendered(on_h100())
        for step in ("hidden-states", "train"):
            assert containers(job)[step]["resources"]["limits"]["nvidia.com/gpu"] == "2"
        for step in ("export", "publish"):
            assert "nvidia.com/gpu" not in containers(job)[step]["resources"].get("limits", {})
        assert pod_spec(job)["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}
        assert settings(job).gpus == 2

    def test_more_for_the_trainer(self) -> None:
        job = rendered(on_h100(), trainer={"image": "i", "gpus": 4})
        assert containers(job)["hidden-states"]["resources"]["limits"]["nvidia.com/gpu"] == "2"
        assert containers(job)["train"]["resources"]["limits"]["nvidia.com/gpu"] == "4"

    def test_none_on_a_cpu(self) -> None:
        assert settings(rendered()).gpus == 0

    def test_pod_claims_the_devices_of_an_engine_for_all_steps(self) -> None:
        job = rendered(on_h100(accelerator=claiming()))
        engine = observed_pod(on_h100(accelerator=claiming()))
        template = job["spec"]["template"]
        assert template["spec"]["resourceClaims"] == engine["spec"]["resourceClaims"]
        with_gpus = [name for name, each in containers(job).items() if "claims" in (each.get("resources") or {})]
        assert with_gpus == ["hidden-states", "train"]
        assert "nvidia.com/gpu" not in str([each.get("resources") for each in containers(job).values()])
        assert gpus_of(template) == 2


class TestStartingHead:
    def test_on_a_claim(self) -> None:
        head = {"model": "default/first/head", "persistentVolumeClaim": {"claimName": "first-training"}}
        job = rendered(seen={"starting_head": claim("first-training")}, **{"from": head})
        assert settings(job).head == "/from/default/first/head"
        assert mounts(job, "train")["/from"]["readOnly"] is True
        assert mounts(job, "hidden-states").keys() == mounts(job, "train").keys()

    def test_from_the_hub_is_downloaded(self) -> None:
        job = rendered(on_h100(), **{"from": {"model": "org/head", "revision": "v1"}})
        assert settings(job).head == "/models/org/head"
        download = containers(job)["download-head"]
        assert download["command"] == ["hf", "download", "org/head", "--local-dir", "/models/org/head", "--revision=v1"]

    def test_none(self) -> None:
        assert settings(rendered()).head is None
        assert "download-draft" not in containers(rendered(on_h100()))


def test_both_images_read_the_same_settings() -> None:
    job = rendered(on_h100())
    ours, of_bundle = read_pod_settings(text(job, "publish")), settings(job)
    assert ours.places == of_bundle.places
    assert (ours.target_layers, ours.hidden_size, ours.vocabulary) == (32, 4096, 128_256)
