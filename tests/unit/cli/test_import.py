"""`specdecode import`: a Deployment that people wrote by hand becomes the object that means the same."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.migrations import migrate
from tests.unit.cli.conftest import Specdecode, WriteObject
from tests.unit.cli.old_deployments import DATA, LLAMA_8B, LLAMA_70B, asked, engine, imported, with_pod


def test_the_shell_string_of_the_vllm_documents(specdecode: Specdecode) -> None:
    spec, said = imported(specdecode, DATA / "shell-string.yaml")
    assert spec == {
        "target": {"model": LLAMA_8B},
        "parallelism": {"tensor": 1},
        "serving": {"maxNumBatchedTokens": 4096, "servedModelNames": [LLAMA_8B]},
        "replicas": 2,
        "models": {
            "cache": {"persistentVolumeClaim": {"claimName": "chat-cache"}},
            "hubTokenSecret": {"name": "hub", "key": "token"},
        },
        "engine": {"version": "0.32", "extraArgs": ["--trust-remote-code", "--enable-chunked-prefill"]},
        "podTemplate": {
            "metadata": {"labels": {"team": "assistants"}},
            "spec": {
                "containers": [
                    {
                        "name": "engine",
                        "resources": {
                            "limits": {"cpu": "10", "memory": "20G"},
                            "requests": {"cpu": "2", "memory": "6G"},
                        },
                    }
                ]
            },
        },
    }
    assert "what it holds is not fetched again" in said


def test_a_deployment_of_the_production_stack_chart(specdecode: Specdecode) -> None:
    spec, said = imported(specdecode, DATA / "stack-chart.yaml")
    assert spec["target"] == {"model": LLAMA_70B}
    assert spec["speculation"] == {
        "method": "draft_model",
        "numSpeculativeTokens": 5,
        "draft": {"model": LLAMA_8B},
    }
    assert spec["accelerator"] == {"products": ["NVIDIA-H100-80GB-HBM3"]}
    assert spec["serving"] == {
        "dtype": "bfloat16",
        "maxModelLen": 8192,
        "maxNumSeqs": 128,
        "gpuMemoryUtilizationPercent": 95,
        "port": 8001,
        "servedModelNames": [LLAMA_70B],
        "apiKeySecret": {"name": "prod-secrets", "key": "vllmApiKey"},
    }
    assert spec["models"] == {
        "cache": {"persistentVolumeClaim": {"claimName": "prod-storage-claim"}},
        "hubTokenSecret": {"name": "prod-secrets", "key": "hf_token_llama"},
    }
    assert spec["engine"]["version"] == "0.32"
    assert spec["engine"]["image"] == "registry.example.com/ml/vllm-openai:v0.32.0-patched"
    assert spec["engine"]["env"] == [
        {"name": "NCCL_DEBUG", "value": "INFO"},
        {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
    ]
    assert spec["engine"]["extraArgs"] == [
        "--enable-prefix-caching",
        "--enable-auto-tool-choice",
        *("--tool-call-parser", "llama3_json"),
        *("--chat-template", "/templates/chat.jinja"),
    ]
    template = spec["podTemplate"]
    assert template["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "team-a"}
    pod = template["spec"]
    assert pod["nodeSelector"] == {"zone": "a"}
    assert (pod["priorityClassName"], pod["runtimeClassName"]) == ("serving", "nvidia")
    gpu = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    assert gpu in pod["tolerations"], "a list that replaces the operator's keeps what the operator's did"
    assert {each["name"] for each in pod["volumes"]} == {"templates", "spool"}
    containers = {each["name"]: each for each in pod["containers"]}
    assert set(containers) == {"engine", "log-shipper"}
    assert containers["engine"]["volumeMounts"] == [{"name": "templates", "mountPath": "/templates"}]
    assert "env" not in containers["engine"]
    assert "draft_tensor_parallel_size" in said
    assert "terminationGracePeriodSeconds" in said


def with_volume(deployment: dict[str, Any], volume: dict[str, Any], mount: str, **more: Any) -> dict[str, Any]:
    """The Deployment with one more volume in its server."""
    pod = deployment["spec"]["template"]["spec"]
    pod.setdefault("volumes", []).append({"name": "extra", **volume})
    pod["containers"][0].setdefault("volumeMounts", []).append({"name": "extra", "mountPath": mount, **more})
    return deployment


@pytest.mark.parametrize(
    ("mount", "more", "remark"),
    [
        ("/root/.cache/huggingface", {}, "what it holds is not fetched again"),
        ("/root/.cache", {}, "fetched once more there"),
        ("/root/.cache/huggingface/hub", {}, "fetched once more there"),
        ("/root/.cache/huggingface", {"subPath": "hf"}, "fetched once more there"),
    ],
)
def test_a_claim_with_the_hubs_cache_becomes_the_cache(mount: str, more: dict[str, Any], remark: str) -> None:
    claim = {"persistentVolumeClaim": {"claimName": "hub-cache"}}
    migration = migrate(with_volume(engine(), claim, mount, **more))
    assert migration.body["spec"]["models"] == {"cache": claim}
    assert any(remark in note.result for note in migration.settings)
    assert "podTemplate" not in migration.body["spec"], "the operator mounts it"


CERTIFICATE = ("--ssl-certfile=/tls/tls.crt", "--ssl-keyfile=/tls/tls.key", "--enable-ssl-refresh")


def test_a_certificate_of_a_tls_secret_goes_to_its_field() -> None:
    secret = {"secret": {"secretName": "llama-tls"}}
    migration = migrate(with_volume(engine(LLAMA_8B, *CERTIFICATE), secret, "/tls", readOnly=True))
    assert migration.body["spec"]["serving"]["tlsSecret"] == {"name": "llama-tls"}
    assert "podTemplate" not in migration.body["spec"]
    assert not migration.decisions


@pytest.mark.parametrize(
    ("volume", "more"),
    [
        ({"secret": {"secretName": "s", "items": [{"key": "cert.pem", "path": "tls.crt"}]}}, {}),
        ({"configMap": {"name": "c"}}, {}),
        ({"secret": {"secretName": "s"}}, {"subPath": "tls.crt"}),
    ],
)
def test_a_certificate_of_another_kind_is_a_decision(volume: dict[str, Any], more: dict[str, Any]) -> None:
    migration = migrate(with_volume(engine(LLAMA_8B, *CERTIFICATE), volume, "/tls", **more))
    (decision,) = migration.decisions
    assert decision.field == "spec.serving.tlsSecret"
    assert "kubernetes.io/tls" in decision.message


def test_a_model_in_a_directory_of_the_node_stays_there() -> None:
    migration = migrate(with_volume(engine("/m/llama"), {"hostPath": {"path": "/mnt/models"}}, "/m"))
    assert migration.body["spec"]["target"]["model"] == "llama"
    assert migration.body["spec"]["models"] == {"volume": {"hostPath": {"path": "/mnt/models"}}}
    assert any("--allow-host-path" in note.result for note in migration.settings)
    alone = migrate(with_volume(engine("/m"), {"hostPath": {"path": "/mnt/models/llama"}}, "/m")).body["spec"]
    assert (alone["target"]["model"], alone["models"]["volume"]["hostPath"]) == ("llama", {"path": "/mnt/models"})


@pytest.mark.parametrize(
    ("rolling", "strategy"),
    [
        ({"maxSurge": 1, "maxUnavailable": 0}, "Surge"),
        ({"maxSurge": "25%", "maxUnavailable": "0%"}, "Surge"),
        ({"maxSurge": "25%", "maxUnavailable": "25%"}, None),
        ({"maxSurge": 0, "maxUnavailable": 1}, None),
        (None, None),
    ],
)
def test_a_rollout_that_misses_no_engine_stays_one(rolling: dict[str, Any] | None, strategy: str | None) -> None:
    deployment = engine()
    deployment["spec"]["strategy"] = {"rollingUpdate": rolling} if rolling else {"type": "Recreate"}
    assert migrate(deployment).body["spec"].get("rollout", {}).get("strategy") == strategy


@pytest.mark.parametrize(("seconds", "kept"), [(30, False), (300, True)])
def test_a_long_time_to_end_is_kept(seconds: int, *, kept: bool) -> None:
    deployment = engine()
    deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] = seconds
    pod = migrate(deployment).body["spec"].get("podTemplate", {}).get("spec", {})
    assert pod.get("terminationGracePeriodSeconds") == (seconds if kept else None)


def test_the_flags_of_2024_are_translated(specdecode: Specdecode) -> None:
    spec, said = imported(specdecode, DATA / "speculation-of-2024.yaml")
    assert spec["speculation"] == {
        "method": "draft_model",
        "numSpeculativeTokens": 5,
        "draft": {"model": LLAMA_8B, "maxModelLen": 4096},
        "numSpeculativeTokensByBatchSize": [{"from": 16, "to": 256, "numSpeculativeTokens": 0}],
    }
    assert spec["serving"]["maxModelLen"] == 8000
    assert spec["serving"]["servedModelNames"] == ["llama-70b", "chat"]
    assert spec["parallelism"] == {"tensor": 4, "draftTensor": 1}
    assert "engine" not in spec, "a version that nobody can launch any more gives way to the one that is launched"
    for lost in ("typical acceptance", "--use-v2-block-manager", "--swap-space", "0.6", "--num-speculative-tokens ->"):
        assert lost in said


def test_models_on_a_claim_and_a_key_from_a_secret(specdecode: Specdecode) -> None:
    spec, _ = imported(specdecode, DATA / "models-on-a-claim.yaml")
    assert spec["target"]["model"] == LLAMA_70B
    assert spec["models"] == {"volume": {"persistentVolumeClaim": {"claimName": "shared-models"}}}
    assert spec["speculation"] == {
        "method": "ngram",
        "numSpeculativeTokens": 4,
        "ngram": {"promptLookupMax": 5},
    }
    assert spec["accelerator"] == {"products": ["NVIDIA-H200"]}
    assert spec["serving"]["apiKeySecret"] == {"name": "clients", "key": "key"}
    assert spec["serving"]["servedModelNames"] == ["/mnt/models/meta-llama/Llama-3.1-70B-Instruct"]
    assert spec["engine"]["image"] == "vllm/vllm-openai:v0.32.1"
    assert spec["engine"]["env"] == [{"name": "VLLM_LOGGING_LEVEL", "value": "DEBUG"}]
    assert "replicas" not in spec


@pytest.mark.parametrize("file", sorted(DATA.glob("*.yaml")), ids=lambda path: path.stem)
def test_what_import_prints_is_planned(specdecode: Specdecode, write: WriteObject, file: Path) -> None:
    result = specdecode("import", "-f", file)
    allowed = re.findall(r"--allow-pod-template=\S+", result.stderr)
    planned = specdecode("plan", "-f", write("object.yaml", result.stdout), *allowed)
    assert planned.exit_code in (0, 4), planned.stderr + planned.stdout


@pytest.mark.parametrize("file", sorted(DATA.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_steps_move_traffic_and_name_real_objects(specdecode: Specdecode, file: Path) -> None:
    result = specdecode("import", "-f", file)
    body = yaml.safe_load(result.stdout)
    old = next(each for each in yaml.safe_load_all(file.read_text()) if each["kind"] == "Deployment")
    assert body["metadata"]["name"] != old["metadata"]["name"], "the operator makes a Deployment of that name"
    assert f"kubectl wait --for=condition=Ready sdd/{body['metadata']['name']}" in result.stderr
    assert f"kubectl scale deployment/{old['metadata']['name']} --replicas=0" in result.stderr
    if "shell-string" in file.stem:
        assert "kubectl patch service chat " in result.stderr


def test_a_replica_may_spread_in_several_ways(specdecode: Specdecode, write: WriteObject) -> None:
    gpus = {"limits": {"nvidia.com/gpu": 4}}
    body = engine(LLAMA_70B, "-tp=2", "-pp", "2", "--distributed-executor-backend", "mp", resources=gpus)
    spec, said = imported(specdecode, write("d.yaml", body))
    assert spec["parallelism"] == {"tensor": 2, "pipeline": 2}
    assert "resources nvidia.com/gpu" not in said
    _, said = imported(specdecode, write("d.yaml", engine(LLAMA_70B, "-tp=2", resources=gpus)))
    assert "resources nvidia.com/gpu 4" in said, "what the old pod left idle is told"


@pytest.mark.parametrize(
    ("flags", "extra"),
    [
        (["-cc.cudagraph_mode=piecewise", "-cc.mode", "3"], ["--compilation-config.mode", "3"]),
        (['-cc={"cudagraph_mode": "PIECEWISE", "mode": 3}'], ["--compilation-config.mode", "3"]),
        (["--compilation_config.cudagraph_mode", "PIECEWISE"], None),
        (["-cc.mode=3", "--seed=1"], ["-cc.mode=3", "--seed=1"]),
    ],
)
def test_the_mode_of_graphs_goes_to_its_field_and_the_rest_is_spelled_alike(
    specdecode: Specdecode, write: WriteObject, flags: list[str], extra: list[str] | None
) -> None:
    spec, _ = imported(specdecode, write("d.yaml", engine(LLAMA_8B, *flags)))
    found = spec.get("serving", {}).get("cudagraphMode")
    assert found == (None if flags[0] == "-cc.mode=3" else "PIECEWISE")
    assert spec.get("engine", {}).get("extraArgs") == extra


@pytest.mark.parametrize(
    ("flags", "extra", "dropped"),
    [
        (
            ["-cc", '{"mode": 3, "cudagraph_mode": "NONE"}', "-cc.mode", "2"],
            ["-cc.mode", "2"],
            "lost with it: cudagraph_mode",
        ),
        (
            ["-cc.mode=2", '--compilation-config={"mode": 3, "cudagraph_mode": "NONE"}'],
            ["-cc.mode=2"],
            "cudagraph_mode",
        ),
        (["-cc.mode=2", "-cc", '{"mode": 3}'], ["-cc.mode=2"], "vLLM takes -cc.… in its place, wherever they stand\n"),
        (["-cc.mode=2", "-cc", "3"], ["-cc.mode=2"], "vLLM takes -cc.… in its place, wherever they stand\n"),
        (
            ["-cc.mode=2", "--compilation_config.level", "3"],
            ["--compilation_config.level", "3"],
            "-cc.mode: vLLM takes",
        ),
        (
            ["--compilation-config.level=3", "-cc.mode=2", "--compilation-config.backend=eager"],
            ["-cc.mode=2"],
            "config.backend: ",
        ),
        (["-cc.mode=2", "-cc.mode=3"], ["-cc.mode=3"], "is said again behind it"),
    ],
)
def test_dotted_paths_replace_a_whole_value_and_another_spelling_as_in_vllm(
    specdecode: Specdecode, write: WriteObject, flags: list[str], extra: list[str], dropped: str
) -> None:
    spec, said = imported(specdecode, write("d.yaml", engine(LLAMA_8B, *flags)))
    assert spec["engine"]["extraArgs"] == extra
    assert dropped in said


def test_a_method_that_is_lost_with_a_whole_value_is_reported(specdecode: Specdecode, write: WriteObject) -> None:
    whole = '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}'
    flags = ["--speculative-config", whole, "--speculative-config.num_speculative_tokens", "3"]
    result = specdecode("import", "-f", write("d.yaml", engine(LLAMA_8B, *flags)))
    assert "--speculative-config: vLLM takes --speculative-config.…" in result.stderr
    assert "lost with it: method, prompt_lookup_max" in result.stderr


STARTS = {
    "args of the image": {"command": None, "args": ["--model", LLAMA_8B]},
    "positional arg of the image": {"command": None, "args": [LLAMA_8B]},
    "python -m": {"command": ["python3", "-u", "-m", "vllm.entrypoints.openai.api_server", "--model", LLAMA_8B]},
    "a path to vllm": {"command": ["/opt/venv/bin/vllm", "serve", LLAMA_8B], "args": None},
    "split over both": {"command": ["vllm"], "args": ["serve", LLAMA_8B]},
    "sh -c": {"command": ["sh", "-c", f"set -e; exec vllm serve '{LLAMA_8B}'"], "args": None},
    "sh -c with variables": {"command": ["sh", "-c", f"M={LLAMA_8B}; vllm serve $M"], "args": None},
    "environment": {
        "command": ["vllm", "serve", "$(MODEL)"],
        "args": None,
        "env": [{"name": "MODEL", "value": LLAMA_8B}],
    },
    "env program": {"command": ["env", "NCCL_DEBUG=WARN", "vllm", "serve", LLAMA_8B], "args": None},
}


@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS)
def test_the_engine_is_found_however_it_is_started(
    specdecode: Specdecode, write: WriteObject, start: dict[str, Any]
) -> None:
    start = {"args": None, **start}
    spec, _ = imported(specdecode, write("d.yaml", engine(**start)))
    assert spec["target"]["model"] == LLAMA_8B


def test_the_version_can_be_given(specdecode: Specdecode, write: WriteObject) -> None:
    source = write("d.yaml", engine(image="vllm/vllm-openai:latest"))
    spec, _ = imported(specdecode, source, "--engine-version", "0.32")
    assert spec["engine"] == {"version": "0.32", "image": "vllm/vllm-openai:latest"}


def test_the_server_s_defaults_of_an_object_are_no_wishes(specdecode: Specdecode, write: WriteObject) -> None:
    body = with_pod(
        restartPolicy="Always", dnsPolicy="ClusterFirst", schedulerName="default-scheduler", securityContext={}
    )
    body["spec"] |= {"revisionHistoryLimit": 10, "progressDeadlineSeconds": 600}
    container = body["spec"]["template"]["spec"]["containers"][0]
    container |= {"terminationMessagePath": "/dev/termination-log", "terminationMessagePolicy": "File"}
    container |= {"imagePullPolicy": "IfNotPresent"}
    spec, _ = imported(specdecode, write("d.yaml", body))
    assert "podTemplate" not in spec


def test_a_download_by_an_init_container_is_the_hub(specdecode: Specdecode, write: WriteObject) -> None:
    mounts = [{"name": "weights", "mountPath": "/weights"}]
    body = engine("/weights/llama", volumeMounts=mounts)
    fetch = {
        "name": "fetch",
        "image": "python:3",
        "command": ["huggingface-cli", "download", LLAMA_8B, "--local-dir=/weights/llama", "--revision", "abc"],
        "env": [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "t"}}}],
        "volumeMounts": mounts,
    }
    pod = body["spec"]["template"]["spec"]
    pod |= {"initContainers": [fetch], "volumes": [{"name": "weights", "emptyDir": {}}]}
    spec, _ = imported(specdecode, write("d.yaml", body))
    assert spec["target"] == {"model": LLAMA_8B, "revision": "abc"}
    assert spec["models"] == {"hubTokenSecret": {"name": "hub", "key": "t"}}
    assert "podTemplate" not in spec


def test_json_and_standard_input(specdecode: Specdecode) -> None:
    result = specdecode("import", "-f", "-", "-o", "json", stdin=yaml.safe_dump(engine()))
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["spec"]["target"]["model"] == LLAMA_8B


def test_one_of_several_is_chosen_by_name(specdecode: Specdecode, write: WriteObject) -> None:
    other = engine(LLAMA_70B, "-tp", "2")
    other["metadata"]["name"] = "other"
    source = write("d.yaml", engine(), other)
    said = asked(specdecode, source)
    assert "deployment/old" in said
    assert "deployment/other" in said
    result = specdecode("import", "deployment/other", "-f", source)
    assert yaml.safe_load(result.stdout)["spec"]["target"]["model"] == LLAMA_70B
    assert "deployment/nobody" in asked(specdecode, source, "deployment/nobody")


def test_a_model_that_the_catalogue_does_not_know_is_read_in_the_cluster(
    specdecode: Specdecode, write: WriteObject
) -> None:
    spec, said = imported(specdecode, write("d.yaml", engine("my/model")))
    assert spec["target"]["model"] == "my/model"
    assert "catalogue" in said


def test_defaults_that_change_are_shown(specdecode: Specdecode, write: WriteObject) -> None:
    _, said = imported(specdecode, write("d.yaml", engine()))
    (line,) = [line for line in said.splitlines() if "spec.serving.maxNumSeqs" in line]
    assert "1024" in line
    assert "256" in line


@pytest.mark.parametrize(
    ("context", "told"),
    [({}, True), ({"fsGroup": 7}, True), ({"runAsUser": 0}, False), ({"runAsNonRoot": True}, False)],
)
def test_that_engines_are_not_root_any_more_is_told_where_the_image_decided(
    specdecode: Specdecode, tmp_path: Path, context: dict[str, Any], *, told: bool
) -> None:
    file = tmp_path / "deployment.yaml"
    file.write_text(yaml.safe_dump(with_pod(securityContext=context)))
    _, said = imported(specdecode, file)
    assert ("user 2000 in the place of the image's" in " ".join(said.split())) is told
