"""Sources that are imported."""

import shlex
from copy import deepcopy
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest
import yaml

from specdecode_operator.cli.importing import report_lines
from specdecode_operator.importing.convert import Migration, migrate_workload
from specdecode_operator.importing.sources import READABLE, read_words, read_workloads
from specdecode_operator.importing.spec_builder import MigrationError, Workload
from tests.unit.cli.conftest import Specdecode, WriteObject
from tests.unit.cli.old_deployments import LLAMA_8B, LLAMA_70B, engine
from tests.unit.cli.test_importing import places

DATA = Path(__file__).parent / "data"
INVALID = 2
QWEN = "Qwen/Qwen3-32B"
HUB_TOKEN = "spec.models.hubTokenSecret"

EXPECTED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "serve.sh": (
        {
            "target": {"model": LLAMA_70B},
            "speculation": {"method": "draft_model", "numSpeculativeTokens": 4, "draft": {"model": LLAMA_8B}},
            "parallelism": {"tensor": 4},
            "serving": {"maxModelLen": 16384, "gpuMemoryUtilizationPercent": 90, "servedModelNames": [LLAMA_70B]},
            "engine": {"extraArgs": ["--enable-prefix-caching"], "env": [{"name": "NCCL_DEBUG", "value": "WARN"}]},
        },
        [],
    ),
    "docker-run.sh": (
        {
            "target": {"model": LLAMA_8B},
            "parallelism": {"tensor": 2},
            "serving": {"maxModelLen": 8192, "servedModelNames": ["chat"]},
            "engine": {"env": [{"name": "NCCL_P2P_LEVEL", "value": "NVL"}]},
        },
        [HUB_TOKEN],
    ),
    "compose.yaml": (
        {
            "target": {"model": LLAMA_8B},
            "speculation": {"method": "ngram", "numSpeculativeTokens": 3},
            "parallelism": {"tensor": 2},
            "serving": {"maxNumSeqs": 64, "servedModelNames": [LLAMA_8B]},
            "replicas": 1,
            "engine": {"version": "0.31", "env": [{"name": "VLLM_LOGGING_LEVEL", "value": "INFO"}]},
        },
        [HUB_TOKEN],
    ),
    "pod.yaml": (
        {
            "target": {"model": QWEN},
            "parallelism": {"tensor": 2},
            "serving": {"maxModelLen": 32768, "servedModelNames": [QWEN]},
            "podTemplate": {"metadata": {"labels": {"owner": "ada"}}},
        },
        [],
    ),
    "stateful-set.yaml": (
        {
            "target": {"model": LLAMA_8B},
            "parallelism": {"tensor": 1},
            "serving": {"maxModelLen": 8192, "servedModelNames": [LLAMA_8B]},
            "replicas": 3,
        },
        [],
    ),
    "leader-worker-set-ray.yaml": (
        {
            "target": {"model": LLAMA_70B},
            "parallelism": {"tensor": 8, "pipeline": 2},
            "serving": {"servedModelNames": [LLAMA_70B], "port": 8080},
            "replicas": 2,
            "models": {"hubTokenSecret": {"name": "hub", "key": "token"}},
            "podTemplate": {"metadata": {"labels": {"role": "leader"}}},
        },
        [],
    ),
    "leader-worker-set.yaml": (
        {
            "target": {"model": LLAMA_70B},
            "parallelism": {"tensor": 8, "pipeline": 2},
            "serving": {"servedModelNames": [LLAMA_70B]},
        },
        [],
    ),
    "inference-service-runtime.yaml": (
        {
            "target": {"model": "llama-3.1-8b"},
            "parallelism": {"tensor": 1},
            "serving": {"maxModelLen": 8192, "servedModelNames": ["llama"], "port": 8080},
            "replicas": 2,
            "models": {"volume": {"persistentVolumeClaim": {"claimName": "model-store"}}},
            "engine": {
                "version": "0.33",
                "image": "registry.example.com/vllm-openai:v0.33.1",
                "env": [{"name": "VLLM_LOGGING_LEVEL", "value": "DEBUG"}],
            },
        },
        [],
    ),
    "inference-service-huggingface.yaml": (
        {
            "target": {"model": LLAMA_8B},
            "parallelism": {"tensor": 1},
            "serving": {"maxModelLen": 4096, "servedModelNames": ["llama3"]},
            "models": {"hubTokenSecret": {"name": "hf-secret", "key": "HF_TOKEN"}},
        },
        [],
    ),
    "inference-service-containers.yaml": (
        {
            "target": {"model": LLAMA_70B},
            "parallelism": {"tensor": 2},
            "accelerator": {"products": ["NVIDIA-H200"]},
            "serving": {"servedModelNames": [LLAMA_70B], "port": 8080},
        },
        [],
    ),
    "llm-inference-service.yaml": (
        {
            "target": {"model": QWEN},
            "speculation": {"method": "ngram", "numSpeculativeTokens": 3},
            "parallelism": {"tensor": 2},
            "serving": {"maxModelLen": 16384, "servedModelNames": [QWEN], "port": 8000},
            "replicas": 2,
        },
        [],
    ),
    "production-stack.yaml": (
        {
            "target": {"model": LLAMA_8B},
            "parallelism": {"tensor": 1},
            "accelerator": {"products": ["NVIDIA-H100-80GB-HBM3"]},
            "serving": {
                "maxModelLen": 8192,
                "maxNumBatchedTokens": 8192,
                "dtype": "bfloat16",
                "gpuMemoryUtilizationPercent": 80,
                "servedModelNames": [LLAMA_8B],
                "apiKeySecret": {"name": "clients", "key": "key"},
                "port": 8000,
            },
            "replicas": 2,
            "models": {
                "cache": {"persistentVolumeClaim": {"claimName": "RELEASE-llama3-storage-claim"}},
                "hubTokenSecret": {"name": "RELEASE-secrets", "key": "hf_token_llama3"},
            },
            "engine": {"extraArgs": ["--no-enable-chunked-prefill", "--enable-prefix-caching"]},
        },
        ["spec.models.cache.persistentVolumeClaim.claimName", f"{HUB_TOKEN}.name"],
    ),
}
"""Of each file the spec, without what only a podTemplate holds of resources and placement, and the fields left open."""


def test_every_data_file_has_an_expectation() -> None:
    assert sorted(EXPECTED) == sorted(path.name for path in DATA.iterdir())


@pytest.mark.parametrize("file", EXPECTED)
def test_each_source_becomes_the_expected_object(specdecode: Specdecode, file: str) -> None:
    spec, left_open = EXPECTED[file]
    result = specdecode("import", "-f", DATA / file)
    assert not isinstance(result.exception, Exception), result.exception
    found = yaml.safe_load(result.stdout)["spec"]
    if "podTemplate" not in spec:
        found.pop("podTemplate", None)
    assert found == spec
    asked = [line.split(": ")[1] for line in result.stdout.splitlines() if line.startswith("# Decide first")]
    assert asked == left_open
    assert result.exit_code == (INVALID if left_open else 0)
    assert "sk-not-for-your-eyes" not in result.output


@pytest.mark.parametrize("file", [file for file, (_, left_open) in EXPECTED.items() if not left_open])
def test_complete_import_can_be_planned(specdecode: Specdecode, write: WriteObject, file: str) -> None:
    printed = specdecode("import", "-f", DATA / file).stdout
    config = ["--model-config", f"llama-3.1-8b={write('c.json', '{}')}"] if "llama-3.1-8b" in printed else []
    if not config:
        planned = specdecode("plan", "-f", write("object.yaml", printed))
        assert planned.exit_code in (0, 4), planned.stderr


@pytest.mark.parametrize(
    ("file", "ends"),
    [
        ("docker-run.sh", "docker stop llama-chat"),
        ("compose.yaml", "docker compose stop vllm"),
        ("pod.yaml", "kubectl delete pod/try-qwen -n lab"),
        ("stateful-set.yaml", "kubectl scale statefulset/llama --replicas=0 -n chat"),
        ("leader-worker-set.yaml", "kubectl scale leaderworkerset/wide --replicas=0 -n chat"),
        ("inference-service-runtime.yaml", "kubectl delete inferenceservice/llama -n llm"),
        ("llm-inference-service.yaml", "kubectl delete llminferenceservice/qwen3-32b -n llm"),
        ("production-stack.yaml", "kubectl scale deployment/RELEASE-llama3-deployment-vllm --replicas=0"),
    ],
)
def test_last_step_stops_the_old_server(specdecode: Specdecode, file: str, ends: str) -> None:
    assert ends in specdecode("import", "-f", DATA / file).stderr


def test_migration_counts_extra_gpus_of_all_replicas(specdecode: Specdecode, write: WriteObject) -> None:
    body = yaml.safe_load((DATA / "llm-inference-service.yaml").read_text())
    assert "needs 4 more GPUs" in specdecode("import", "-f", write("two.yaml", body)).stderr
    body["spec"]["parallelism"] = {"tensor": 2, "data": 4, "dataLocal": 1}
    assert "needs 16 more GPUs" in specdecode("import", "-f", write("wide.yaml", body)).stderr


@pytest.mark.parametrize(("scaled", "told"), [("llama", True), ("other", False)])
def test_autoscaler_of_the_old_server_is_reported(
    specdecode: Specdecode, tmp_path: Path, scaled: str, told: bool
) -> None:
    autoscaler = {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": "by-load"},
        "spec": {"scaleTargetRef": {"kind": "StatefulSet", "name": scaled}, "maxReplicas": 6},
    }
    path = tmp_path / "all.yaml"
    path.write_text(f"{(DATA / 'stateful-set.yaml').read_text()}\n---\n{yaml.safe_dump(autoscaler)}")
    result = specdecode("import", "-f", path)
    assert ("HorizontalPodAutoscaler by-load: scales the old server" in result.stderr) is told


def test_secret_reference_is_shown(specdecode: Specdecode, write: WriteObject) -> None:
    old = yaml.safe_load((DATA / "llm-inference-service.yaml").read_text())
    token = {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}
    old["spec"]["template"]["containers"][0]["env"].append(token)
    report = specdecode("import", "-f", write("old.yaml", old)).stderr
    assert "env HF_TOKEN -> spec.models.hubTokenSecret: name hub, key token" in report


def test_variable_with_value_from_is_imported(specdecode: Specdecode, write: WriteObject) -> None:
    old = yaml.safe_load((DATA / "llm-inference-service.yaml").read_text())
    env = old["spec"]["template"]["containers"][0]["env"]
    source = {"resourceFieldRef": {"resource": "limits.memory", "divisor": "0"}}
    env.append({"name": "MEMORY", "valueFrom": source})
    result = specdecode("import", "-f", write("old.yaml", old))
    assert "env MEMORY -> spec.engine.env" in result.stderr
    assert {"name": "MEMORY", "valueFrom": source} in yaml.safe_load(result.stdout)["spec"]["engine"]["env"]


def test_value_from_is_adapted_to_the_engine_pod(specdecode: Specdecode, write: WriteObject) -> None:
    old = yaml.safe_load((DATA / "llm-inference-service.yaml").read_text())
    container = old["spec"]["template"]["containers"][0]
    resource = {"resource": "limits.memory", "containerName": container["name"], "divisor": 1}
    container["env"] += [
        {"name": "MEMORY", "valueFrom": {"resourceFieldRef": resource}},
        {"name": "PLAIN", "value": "x", "valueFrom": None},
    ]
    env = yaml.safe_load(specdecode("import", "-f", write("old.yaml", old)).stdout)["spec"]["engine"]["env"]
    source = {"resourceFieldRef": {"resource": "limits.memory", "divisor": "1"}}
    assert {"name": "MEMORY", "valueFrom": source} in env
    assert {"name": "PLAIN", "value": "x"} in env


@pytest.mark.parametrize(
    ("source", "keys"),
    [
        ({"fileKeyRef": {"volumeName": "v", "path": "p", "key": "k"}}, "fileKeyRef"),
        ({}, "empty"),
        (
            {"fieldRef": {"fieldPath": "status.podIP"}, "secretKeyRef": {"name": "s", "key": "k"}},
            "fieldRef, secretKeyRef",
        ),
    ],
)
def test_unsupported_value_from_is_a_decision(
    specdecode: Specdecode, write: WriteObject, source: dict[str, Any], keys: str
) -> None:
    old = yaml.safe_load((DATA / "llm-inference-service.yaml").read_text())
    old["spec"]["template"]["containers"][0]["env"].append({"name": "ODD", "valueFrom": source})
    result = specdecode("import", "-f", write("old.yaml", old))
    message = f"ODD: has a valueFrom that the field does not support ({keys}): set it in spec.podTemplate"
    assert f"spec.engine.env: {message}" in result.stderr
    assert result.exit_code == 2


def spec_of(*words: str) -> dict[str, Any]:
    """The spec of a command line that leaves nothing open."""
    migration = migrate_workload(read_words(words))
    assert not migration.decisions, migration.decisions
    spec: dict[str, Any] = migration.body["spec"]
    return spec


def left_open(*words: str) -> str:
    return "; ".join(map(str, migrate_workload(read_words(words)).decisions))


IMAGE = "vllm/vllm-openai:v0.33.0"


def compose(**service: Any) -> dict[str, Any]:
    return {"services": {"llm": {"image": IMAGE, "gpus": "all", "command": [LLAMA_8B], **service}}}


def of_compose(**service: Any) -> Migration:
    (workload,) = read_workloads(compose(**service))
    return migrate_workload(workload)


@pytest.mark.parametrize(
    ("service", "words"),
    [
        (
            {"env_file": ".env"},
            "services.llm.env_file: is not read by import: import the output of docker compose config",
        ),
        ({"secrets": ["token"]}, "services.llm.secrets"),
        ({"cap_add": ["ALL"]}, "services.llm.cap_add"),
        ({"environment": {"MODE": "${MODE}"}}, "spec.engine.env: MODE"),
        ({"environment": ["MODE"]}, "spec.engine.env: MODE"),
        ({"environment": {"HF_TOKEN": "hf_secret"}}, HUB_TOKEN),
        ({"gpus": [{"driver": "amd"}]}, "services.llm.deploy.resources: amd"),
        ({"user": "ada"}, "services.llm.user"),
        ({"user": "9" * 5000}, "services.llm.user"),
        ({"volumes": ["./models:/m"], "command": ["/m/llama"]}, "spec.models.volume"),
    ],
)
def test_compose_setting_without_an_equivalent_is_a_decision(service: dict[str, Any], words: str) -> None:
    said = "; ".join(map(str, of_compose(**service).decisions))
    assert words in said
    assert "hf_secret" not in said


@pytest.mark.parametrize(
    ("devices", "gpus"),
    [
        (("all",), None),
        (("0",), "1"),
        (("0", "1", "1"), "2"),
        (("GPU-8a4ef106",), "1"),
        (("0", "all"), None),
    ],
)
def test_cdi_devices_are_gpus(devices: tuple[str, ...], gpus: str | None) -> None:
    names = [f"nvidia.com/gpu={each}" for each in devices]
    reserved = {"deploy": {"resources": {"reservations": {"devices": [{"driver": "cdi", "device_ids": names}]}}}}
    workloads = [
        read_words(["podman", "run", *(f"--device={each}" for each in names), IMAGE, LLAMA_8B]),
        read_words(["docker", "run", *(word for each in names for word in ("--device", each)), IMAGE, LLAMA_8B]),
        *read_workloads(compose(gpus=None, devices=names)),
        *read_workloads(compose(gpus=None, **reserved)),
    ]
    assert len(workloads) == 4
    for workload in workloads:
        (container,) = workload.pod["containers"]
        assert container.get("resources", {}).get("limits", {}).get("nvidia.com/gpu") == gpus
        assert not workload.remarks.decisions


@pytest.mark.parametrize("device", ["/dev/fuse", "vendor.com/gpu=all"])
def test_other_devices_are_a_decision(device: str) -> None:
    for workload in (
        read_words(["podman", "run", "--device", device, "--device=nvidia.com/gpu=all", IMAGE, LLAMA_8B]),
        *read_workloads(compose(devices=["nvidia.com/gpu=all", device])),
    ):
        (decision,) = map(str, migrate_workload(workload).decisions)
        assert "device" in decision


def test_workload_owned_by_the_operator_is_not_imported() -> None:
    owner = {"kind": "SpecDecodeDeployment", "name": "chat"}
    body = {"kind": "Deployment", "metadata": {"name": "chat", "ownerReferences": [owner]}}
    with pytest.raises(MigrationError, match="it belongs to SpecDecodeDeployment chat already"):
        read_workloads(body)


def test_one_service_of_several_is_chosen_by_name(specdecode: Specdecode, write: WriteObject) -> None:
    body = compose()
    body["services"]["big"] = {**body["services"]["llm"], "command": [LLAMA_70B, "-tp", "2"]}
    file = write("compose.yaml", body)
    told = f"contains big, llm: select one, for example: specdecode import big -f {file}"
    assert told in specdecode("import", "-f", file).stderr
    result = specdecode("import", "big", "-f", file)
    assert yaml.safe_load(result.stdout)["spec"]["target"]["model"] == LLAMA_70B


def test_one_of_two_deployments_is_selected_as_the_message_says(specdecode: Specdecode, write: WriteObject) -> None:
    other = engine()
    other["metadata"]["name"] = "other"
    file = write("two servers.yaml", engine(), other)
    refused = specdecode("import", "-f", file)
    assert refused.exit_code == 2
    command = refused.stderr.strip().partition("for example: ")[2]
    assert shlex.split(command)[:3] == ["specdecode", "import", "deployment/old"]
    selected = specdecode(*shlex.split(command)[1:])
    assert yaml.safe_load(selected.stdout)["metadata"]["name"] == "old-sdd", selected.output


@pytest.mark.parametrize(
    ("key", "advice"),
    [
        ("num_spec_tokens", "did you mean num_speculative_tokens? Correct it, or remove it"),
        ("zzz", "has no such key: correct it, or remove it"),
    ],
)
def test_unknown_key_of_speculative_config_is_a_decision(key: str, advice: str) -> None:
    words = ["vllm", "serve", LLAMA_8B, "--speculative-config", f'{{"method": "ngram", "{key}": 3}}']
    told = "; ".join(map(str, migrate_workload(read_words(words)).decisions))
    assert f"{key}: 3" in told
    assert advice in told
    assert "Deployment" not in told


def test_server_of_a_rendered_chart_is_imported(specdecode: Specdecode, write: WriteObject) -> None:
    router = engine(image="lmcache/lmstack-router:v1", command=None, args=["--routing-logic", "session"])
    router["metadata"]["name"] = "router"
    result = specdecode("import", "-f", write("all.yaml", router, engine()))
    assert (result.exit_code, yaml.safe_load(result.stdout)["metadata"]["name"]) == (0, "old-sdd")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("kind: CronJob\n", "cannot be imported"),
        ("a: 1\n", READABLE),
        ("docker compose up -d\n", "command line: no image: does not run vLLM"),
        ("[]", "kind: nothing"),
        ("docker run --gpus all\n", "names no image"),
        (f"docker run {IMAGE} a\ndocker run {IMAGE} b\n", "2 containers: import them one at a time"),
        (
            f"docker run --gpus all {IMAGE} --model $MODEL --api-key sk-secret$X\n",
            "MODEL, X: are replaced on the machine that runs it",
        ),
        ("vllm serve $(cat model)\n", "a substitution"),
        ("services: {llm: {image: 'vllm/vllm-openai:${TAG:-latest}', command: [x]}}\n", "services.llm.image: ${TAG}"),
        (
            "services: {llm: {image: vllm/vllm-openai, command: 'x \"'}}\n",
            "services.llm.command: the text: holds an open",
        ),
    ],
)
def test_unreadable_input_is_an_error_with_supported_kinds(
    specdecode: Specdecode, write: WriteObject, text: str, words: str
) -> None:
    result = specdecode("import", "-f", write("f.yaml", text))
    assert (result.exit_code, result.stdout) == (INVALID, "")
    assert result.stderr.startswith("error: ")
    assert words in " ".join(result.stderr.split())
    assert "sk-secret" not in result.stderr


def answered(body: Any, others: list[Any]) -> bool:
    """Whether an import ends with a report, or with an error that names field, value and fix."""
    try:
        for workload in read_workloads(body, others):
            assert report_lines(migrate_workload(workload), "x")
    except MigrationError as error:
        return str(error).count(": ") > 1
    return True


@pytest.mark.parametrize("odd", [None, 7, "x", [], ["a"], {}, {"a": None}], ids=str)
@pytest.mark.parametrize("file", sorted(DATA.glob("*.yaml")), ids=lambda path: path.stem)
def test_malformed_object_never_causes_a_traceback(file: Path, odd: Any) -> None:
    documents = list(yaml.safe_load_all(file.read_text()))
    for index, whole in enumerate(documents):
        for path in places(whole):
            broken = deepcopy(documents)
            *parents, last = path
            reduce(getitem, parents, broken[index])[last] = odd
            for each in broken:
                assert answered(each, broken), path


# Commands that `specdecode import` prints are copied to a shell: a name in a file of others is one word of them.

NAME = "chat'; touch here; echo $(id) '"
OBJECTS = (
    *("pod.yaml", "stateful-set.yaml", "leader-worker-set.yaml", "inference-service-containers.yaml"),
    "llm-inference-service.yaml",
)


def commands(workload: Workload, services: tuple[Any, ...] = ()) -> list[list[str]]:
    steps = migrate_workload(workload, services, name="new").steps
    return [shlex.split(step.command) for step in steps]


def with_name(file: str) -> Workload:
    bodies = list(yaml.safe_load_all((DATA / file).read_text()))
    for body in bodies:
        body["metadata"] |= {"name": NAME, "namespace": NAME}
    return next(workload for body in bodies for workload in read_workloads(body, bodies))


@pytest.mark.parametrize("file", OBJECTS)
def test_object_names_are_quoted_in_commands(file: str) -> None:
    workload = with_name(file)
    ends = shlex.split(workload.end)
    assert any(word.endswith(f"/{NAME}") for word in ends)
    found = commands(workload)
    assert ends in found
    assert [command[command.index("-n") + 1] for command in found if "-n" in command] == [NAME] * (len(found) - 1)


def test_service_names_are_quoted_in_commands() -> None:
    workload = with_name("pod.yaml")
    service = {"metadata": {"name": NAME}, "spec": {"selector": dict(list(workload.metadata["labels"].items())[:1])}}
    assert ["kubectl", "patch", "service", NAME] in [command[:4] for command in commands(workload, (service,))]


def test_container_names_are_quoted_in_commands() -> None:
    workload = read_words(
        ["docker", "run", "--gpus", "1", "--name", NAME, "vllm/vllm-openai:v0.33.0", "--model", "a/b"]
    )
    assert commands(workload)[-1] == ["docker", "stop", NAME]
    service = {"image": "vllm/vllm-openai:v0.33.0", "command": ["--model", "a/b"]}
    (workload,) = read_workloads({"services": {NAME: service}})
    assert shlex.split(workload.end) == ["docker", "compose", "stop", NAME]


def test_chart_names_are_quoted_in_commands() -> None:
    values = yaml.safe_load((DATA / "production-stack.yaml").read_text())
    values["servingEngineSpec"]["modelSpec"][0]["name"] = NAME
    ends = shlex.split(read_workloads(values)[0].end)
    assert ends == ["kubectl", "scale", f"deployment/RELEASE-{NAME}-deployment-vllm", "--replicas=0"]


def test_name_with_a_leading_dash_is_no_option() -> None:
    name = "--all"
    workload = read_words(["docker", "run", "--gpus", "1", f"--name={name}", "vllm/vllm-openai:v0.33.0", "a/b"])
    assert workload.end == f"docker stop -- {name}"
    (workload,) = read_workloads({"services": {name: {"image": "vllm/vllm-openai:v0.33.0", "command": ["a/b"]}}})
    assert workload.end == f"docker compose stop -- {name}"
    workload = with_name("pod.yaml")
    service = {"metadata": {"name": name}, "spec": {"selector": dict(list(workload.metadata["labels"].items())[:1])}}
    assert ["kubectl", "patch", f"service/{name}"] in [each[:3] for each in commands(workload, (service,))]


# What objects and values say that cannot be carried, or not be read: each is named.


def inference_service(predictor: dict[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": "serving.kserve.io/v1beta1",
        "kind": "InferenceService",
        "metadata": {"name": "llama"},
        "spec": {"predictor": predictor},
    }


GPU = {"limits": {"nvidia.com/gpu": "1"}}
HUGGINGFACE = {"modelFormat": {"name": "huggingface"}, "args": [f"--model_id={LLAMA_8B}"], "resources": GPU}
LLM = {
    "apiVersion": "serving.kserve.io/v1alpha1",
    "kind": "LLMInferenceService",
    "metadata": {"name": "llama"},
    "spec": {"model": {"uri": f"hf://{LLAMA_8B}"}, "template": {"containers": [{"name": "main", "resources": GPU}]}},
}
STACK = {"name": "m", "repository": "vllm/vllm-openai", "tag": "v0.33.0", "modelURL": LLAMA_8B, "requestGPU": 1}


def stack(**model: Any) -> dict[str, Any]:
    return {"servingEngineSpec": {"modelSpec": [{**STACK, **model}]}}


def llm(**spec: Any) -> dict[str, Any]:
    return {**LLM, "spec": {**LLM["spec"], **spec}}  # type: ignore[dict-item]


def claiming() -> dict[str, Any]:
    """A StatefulSet whose model lies on a claim of each pod's own."""
    body = engine("/m/llama", volumeMounts=[{"name": "m", "mountPath": "/m"}])
    body["spec"]["volumeClaimTemplates"] = [{"metadata": {"name": "m"}}]
    return {**body, "kind": "StatefulSet"}


OPEN = {
    "a runtime that is elsewhere": (
        inference_service({"model": {**HUGGINGFACE, "runtime": "ours"}}),
        "spec.predictor.model.runtime: ours: is not in the input",
    ),
    "an autoscaler": (
        inference_service({"model": HUGGINGFACE, "minReplicas": 1, "maxReplicas": 5}),
        "spec.replicas: minReplicas 1, maxReplicas 5",
    ),
    "a canary": (
        inference_service({"model": HUGGINGFACE, "canaryTrafficPercent": 10}),
        "spec.predictor.canaryTrafficPercent",
    ),
    "workers": (inference_service({"model": HUGGINGFACE, "workerSpec": {"size": 2}}), "spec.predictor.workerSpec"),
    "a bucket": (
        inference_service({"model": {**HUGGINGFACE, "args": [], "storageUri": "s3://bucket/llama?sig=sk-secret"}}),
        "spec.target.model: s3://bucket/llama: is an address",
    ),
    "other configurations": (llm(baseRefs=[{"name": "shared"}]), "spec.baseRefs: is set"),
    "an adapter without an address": (
        llm(model={"uri": f"hf://{LLAMA_8B}", "lora": {"adapters": [{"name": "a"}]}}),
        "spec.model.lora.adapters[0].uri",
    ),
    "workers of data": (llm(worker={"containers": [{}]}, parallelism={"data": 2}), "spec.worker: is set"),
    "a size in quotes": (llm(parallelism={"tensor": "2"}), 'spec.parallelism.tensor: "2": must be a whole number'),
    "a switch for a size": (llm(parallelism={"data": True}), "spec.parallelism.data: true: must be a whole number"),
    "replicas in quotes": (llm(replicas="3"), 'spec.replicas: "3": must be a whole number, without quotes'),
    "far too many replicas in quotes": (llm(replicas=str(2**60)), "must be at most 1,000"),
    "LMCache": (
        stack(lmcacheConfig={"enabled": True}),
        "modelSpec[0].lmcacheConfig: enabled: import the output of helm template",
    ),
    "Ray": (stack(raySpec={"headNode": {}}), "servingEngineSpec.modelSpec[0].raySpec"),
    "autoscaling by KEDA": (stack(keda={"enabled": True}), "servingEngineSpec.modelSpec[0].keda"),
    "a setting that came later": (stack(vllmConfig={"newest": 1}), "vllmConfig.newest"),
    "a Secret as variables": (stack(envFromSecret={"name": "s3"}), "envFromSecret: s3"),
    "a claim for each pod": (claiming(), "spec.models: volumeClaimTemplates m"),
}


@pytest.mark.parametrize(("body", "words"), OPEN.values(), ids=OPEN)
def test_setting_that_cannot_be_imported_is_reported(
    specdecode: Specdecode, write: WriteObject, body: dict[str, Any], words: str
) -> None:
    result = specdecode("import", "-f", write("f.yaml", body))
    assert result.exit_code == INVALID
    assert words in " ".join(result.stderr.split())
    assert "sk-secret" not in result.output
