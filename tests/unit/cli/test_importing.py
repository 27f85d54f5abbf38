"""`specdecode import`."""

import asyncio
import json
import re
import shlex
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Mapping
from copy import deepcopy
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from specdecode_operator.cli.importing import _RESOURCES, _RUNTIMES, Source, SourceError, read_source, report_lines
from specdecode_operator.cli.main import app
from specdecode_operator.cluster.resources import SERVICE
from specdecode_operator.importing.convert import Migration, migrate_workload
from specdecode_operator.importing.server_command import read_script
from specdecode_operator.importing.spec_builder import MigrationError
from specdecode_operator.vllm.profiles import KNOWN_VERSIONS
from tests.support.api_server import ApiServer
from tests.support.migrations import migrate
from tests.unit.cli.conftest import Specdecode, WriteObject
from tests.unit.cli.old_deployments import DATA, INVALID, LLAMA_8B, LLAMA_70B, asked, engine, imported, with_pod


def test_deployment_with_a_shell_command_is_imported(specdecode: Specdecode) -> None:
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
    assert "models in it are not downloaded again" in said


def test_deployment_of_the_production_stack_chart_is_imported(specdecode: Specdecode) -> None:
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
        ("/root/.cache/huggingface", {}, "models in it are not downloaded again"),
        ("/root/.cache", {}, "downloaded again to its folder hub"),
        ("/root/.cache/huggingface/hub", {}, "downloaded again to its folder hub"),
        ("/root/.cache/huggingface", {"subPath": "hf"}, "downloaded again to its folder hub"),
    ],
)
def test_claim_with_the_hub_cache_becomes_models_cache(mount: str, more: dict[str, Any], remark: str) -> None:
    claim = {"persistentVolumeClaim": {"claimName": "hub-cache"}}
    migration = migrate(with_volume(engine(), claim, mount, **more))
    assert migration.body["spec"]["models"] == {"cache": claim}
    assert any(remark in note.result for note in migration.settings)
    assert "podTemplate" not in migration.body["spec"], "the operator mounts it"


CERTIFICATE = ("--ssl-certfile=/tls/tls.crt", "--ssl-keyfile=/tls/tls.key", "--enable-ssl-refresh")


def test_certificate_of_a_tls_secret_becomes_serving_tls_secret() -> None:
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
def test_certificate_from_another_source_is_a_decision(volume: dict[str, Any], more: dict[str, Any]) -> None:
    migration = migrate(with_volume(engine(LLAMA_8B, *CERTIFICATE), volume, "/tls", **more))
    (decision,) = migration.decisions
    assert decision.field == "spec.serving.tlsSecret"
    assert "kubernetes.io/tls" in decision.message


def test_model_on_a_host_path_keeps_its_path() -> None:
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
def test_rolling_update_without_unavailability_becomes_surge(
    rolling: dict[str, Any] | None, strategy: str | None
) -> None:
    deployment = engine()
    deployment["spec"]["strategy"] = {"rollingUpdate": rolling} if rolling else {"type": "Recreate"}
    assert migrate(deployment).body["spec"].get("rollout", {}).get("strategy") == strategy


@pytest.mark.parametrize(("seconds", "kept"), [(30, False), (300, True)])
def test_long_termination_grace_period_is_kept(seconds: int, *, kept: bool) -> None:
    deployment = engine()
    deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] = seconds
    pod = migrate(deployment).body["spec"].get("podTemplate", {}).get("spec", {})
    assert pod.get("terminationGracePeriodSeconds") == (seconds if kept else None)


def test_speculation_flags_of_2024_are_translated(specdecode: Specdecode) -> None:
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


def test_models_on_a_claim_and_an_api_key_secret_are_imported(specdecode: Specdecode) -> None:
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
def test_imported_object_can_be_planned(specdecode: Specdecode, write: WriteObject, file: Path) -> None:
    result = specdecode("import", "-f", file)
    allowed = re.findall(r"--allow-pod-template=[^\s)]+", result.stderr)
    planned = specdecode("plan", "-f", write("object.yaml", result.stdout), *allowed)
    assert planned.exit_code in (0, 4), planned.stderr + planned.stdout


@pytest.mark.parametrize("file", sorted(DATA.glob("*.yaml")), ids=lambda path: path.stem)
def test_migration_steps_move_traffic_and_name_existing_objects(specdecode: Specdecode, file: Path) -> None:
    result = specdecode("import", "-f", file)
    body = yaml.safe_load(result.stdout)
    old = next(each for each in yaml.safe_load_all(file.read_text()) if each["kind"] == "Deployment")
    assert body["metadata"]["name"] != old["metadata"]["name"], "the operator makes a Deployment of that name"
    assert f"kubectl wait --for=condition=Ready sdd/{body['metadata']['name']}" in result.stderr
    assert f"kubectl scale deployment/{old['metadata']['name']} --replicas=0" in result.stderr
    if "shell-string" in file.stem:
        assert "kubectl patch service chat " in result.stderr


def test_report_names_toleration_gpus_and_volumes(specdecode: Specdecode, write: WriteObject) -> None:
    body = engine(
        LLAMA_70B,
        resources={"limits": {"nvidia.com/gpu": 1}},
        volumeMounts=[{"name": "shm", "mountPath": "/dev/shm"}],
    )
    body["spec"]["template"]["spec"] |= {
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}],
    }
    spec, said = imported(specdecode, write("d.yaml", body))
    assert "podTemplate" not in spec
    for reported in ("toleration nvidia.com/gpu: ", "resources nvidia.com/gpu 1: ", "volume shm: "):
        assert reported in said


def test_pipeline_parallelism_is_imported_and_gpu_count_reported(specdecode: Specdecode, write: WriteObject) -> None:
    gpus = {"limits": {"nvidia.com/gpu": 4}}
    body = engine(LLAMA_70B, "-tp=2", "-pp", "2", "--distributed-executor-backend", "mp", resources=gpus)
    spec, said = imported(specdecode, write("d.yaml", body))
    assert spec["parallelism"] == {"tensor": 2, "pipeline": 2}
    assert "resources nvidia.com/gpu 4: follows from spec.parallelism" in said
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
def test_cudagraph_mode_becomes_a_field_and_other_keys_stay_arguments(
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
            "this also drops cudagraph_mode",
        ),
        (
            ["-cc.mode=2", '--compilation-config={"mode": 3, "cudagraph_mode": "NONE"}'],
            ["-cc.mode=2"],
            "cudagraph_mode",
        ),
        (["-cc.mode=2", "-cc", '{"mode": 3}'], ["-cc.mode=2"], "vLLM uses -cc.… instead, regardless of the order\n"),
        (["-cc.mode=2", "-cc", "3"], ["-cc.mode=2"], "vLLM uses -cc.… instead, regardless of the order\n"),
        (
            ["-cc.mode=2", "--compilation_config.level", "3"],
            ["--compilation_config.level", "3"],
            "-cc.mode: vLLM uses",
        ),
        (
            ["--compilation-config.level=3", "-cc.mode=2", "--compilation-config.backend=eager"],
            ["-cc.mode=2"],
            "config.backend: ",
        ),
        (["-cc.mode=2", "-cc.mode=3"], ["-cc.mode=3"], "is repeated later"),
    ],
)
def test_dotted_flag_replaces_the_whole_value_as_in_vllm(
    specdecode: Specdecode, write: WriteObject, flags: list[str], extra: list[str], dropped: str
) -> None:
    spec, said = imported(specdecode, write("d.yaml", engine(LLAMA_8B, *flags)))
    assert spec["engine"]["extraArgs"] == extra
    assert dropped in said


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
def test_engine_is_found_for_every_kind_of_start_command(
    specdecode: Specdecode, write: WriteObject, start: dict[str, Any]
) -> None:
    start = {"args": None, **start}
    spec, _ = imported(specdecode, write("d.yaml", engine(**start)))
    assert spec["target"]["model"] == LLAMA_8B


def test_engine_version_option_sets_the_version(specdecode: Specdecode, write: WriteObject) -> None:
    source = write("d.yaml", engine(image="vllm/vllm-openai:latest"))
    spec, _ = imported(specdecode, source, "--engine-version", "0.32")
    assert spec["engine"] == {"version": "0.32", "image": "vllm/vllm-openai:latest"}


def test_api_server_defaults_are_not_imported(specdecode: Specdecode, write: WriteObject) -> None:
    body = with_pod(
        restartPolicy="Always", dnsPolicy="ClusterFirst", schedulerName="default-scheduler", securityContext={}
    )
    body["spec"] |= {"revisionHistoryLimit": 10, "progressDeadlineSeconds": 600}
    container = body["spec"]["template"]["spec"]["containers"][0]
    container |= {"terminationMessagePath": "/dev/termination-log", "terminationMessagePolicy": "File"}
    container |= {"imagePullPolicy": "IfNotPresent"}
    spec, _ = imported(specdecode, write("d.yaml", body))
    assert "podTemplate" not in spec


def test_init_container_download_becomes_a_hub_model(specdecode: Specdecode, write: WriteObject) -> None:
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


def test_import_reads_stdin_and_writes_json(specdecode: Specdecode) -> None:
    result = specdecode("import", "-f", "-", "-o", "json", stdin=yaml.safe_dump(engine()))
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["spec"]["target"]["model"] == LLAMA_8B


def test_one_of_several_deployments_is_chosen_by_name(specdecode: Specdecode, write: WriteObject) -> None:
    other = engine(LLAMA_70B, "-tp", "2")
    other["metadata"]["name"] = "other"
    source = write("d.yaml", engine(), other)
    said = asked(specdecode, source)
    assert "deployment/old" in said
    assert "deployment/other" in said
    result = specdecode("import", "deployment/other", "-f", source)
    assert yaml.safe_load(result.stdout)["spec"]["target"]["model"] == LLAMA_70B
    assert "deployment/nobody" in asked(specdecode, source, "deployment/nobody")


def test_model_outside_the_catalogue_is_imported_with_a_remark(specdecode: Specdecode, write: WriteObject) -> None:
    spec, said = imported(specdecode, write("d.yaml", engine("my/model")))
    assert spec["target"]["model"] == "my/model"
    assert "catalogue" in said


def test_changed_defaults_are_reported(specdecode: Specdecode, write: WriteObject) -> None:
    _, said = imported(specdecode, write("d.yaml", engine()))
    (line,) = [line for line in said.splitlines() if "spec.serving.maxNumSeqs" in line]
    assert "1024" in line
    assert "256" in line


@pytest.mark.parametrize(
    ("context", "told"),
    [({}, True), ({"fsGroup": 7}, True), ({"runAsUser": 0}, False), ({"runAsNonRoot": True}, False)],
)
def test_change_of_user_is_reported_if_the_image_decided_it(
    specdecode: Specdecode, tmp_path: Path, context: dict[str, Any], *, told: bool
) -> None:
    file = tmp_path / "deployment.yaml"
    file.write_text(yaml.safe_dump(with_pod(securityContext=context)))
    _, said = imported(specdecode, file)
    assert ("user 2000 instead of the user of the image" in " ".join(said.split())) is told


# `specdecode import` takes the models and settings that vLLM would take, or asks: never others with exit 0.

SMALL = "Qwen/Qwen3-0.6B"


def scripted(script: str, *arguments: str, **env: str) -> dict[str, Any]:
    """A Deployment whose engine is started by a shell script."""
    variables = [{"name": name, "value": value} for name, value in env.items()]
    return engine(command=["bash", "-c", script], args=list(arguments) or None, env=variables)


def spec_of(migration: Migration) -> dict[str, Any]:
    """The spec of an import that leaves nothing open."""
    assert not migration.decisions, migration.decisions
    spec: dict[str, Any] = migration.body["spec"]
    return spec


MODELS = {
    "by position and by flag": engine(LLAMA_8B, "--model", SMALL),
    "flag before the position": engine("--model", SMALL, "--port=8001", LLAMA_8B),
    "last of two flags": engine("--model", SMALL, "--model", LLAMA_8B),
    "before values of a flag that is gone": engine(LLAMA_8B, "--cuda-graph-sizes", "1", "2", "4"),
    "after a switch that is gone": engine("--use-v2-block-manager", LLAMA_8B),
    "in a script with comments": scripted(f"# vllm serve {SMALL}\nvllm serve {LLAMA_8B} # --model {SMALL}"),
    "an empty variable is no word": scripted(f"vllm serve $EXTRA {LLAMA_8B}", EXTRA=""),
    "after a command that is nothing": scripted(f"$NOTHING; vllm serve {LLAMA_8B}", NOTHING=""),
    "after settings of the shell": scripted(f"set -euo pipefail; ulimit -n 65535\necho go\nexec vllm serve {LLAMA_8B}"),
    "a variable put together": scripted("O=meta-llama; vllm serve $O/Llama-3.1-8B-Instruct"),
}


@pytest.mark.parametrize("body", MODELS.values(), ids=MODELS)
def test_model_argument_is_resolved_as_in_vllm(body: dict[str, Any]) -> None:
    assert spec_of(migrate(body))["target"]["model"] == LLAMA_8B


def test_unquoted_shell_variable_is_split_into_arguments() -> None:
    migration = migrate(scripted(f"vllm serve {LLAMA_8B} $EXTRA_ARGS", EXTRA_ARGS="--seed 7  --max-num-seqs 64"))
    spec = spec_of(migration)
    assert (spec["serving"]["maxNumSeqs"], spec["engine"]["extraArgs"]) == (64, ["--seed", "7"])


def test_exported_script_variables_become_engine_env() -> None:
    script = f"export A=1 B='x y'; A=2; C=3; export C; D=4; G=7\nE=$A$B env F=6 vllm serve {LLAMA_8B}"
    env = spec_of(migrate(scripted(script, G="1")))["engine"]["env"]
    found = {each["name"]: each["value"] for each in env}
    # G is the container's, and so exported already; D is the script's own.
    assert found == {"A": "2", "B": "x y", "C": "3", "E": "2x y", "F": "6", "G": "7"}


OPEN = {
    "a variable of the image": (scripted(f"vllm serve {LLAMA_8B} --max-num-seqs $SEQS"), "--max-num-seqs"),
    "a variable from elsewhere": (engine("--model", "$(MODEL)"), "--model"),
    "set to what is unknown": (scripted(f"M={LLAMA_8B}; M=$OTHER; vllm serve $M"), "$M"),
    "exported from the container": (scripted(f"export VLLM_HOST_IP=$POD_IP; vllm serve {LLAMA_8B}"), "VLLM_HOST_IP"),
    "given to the command": (scripted(f"VLLM_HOST_IP=$POD_IP vllm serve {LLAMA_8B}"), "VLLM_HOST_IP"),
    "given to env": (scripted(f"env VLLM_HOST_IP=$POD_IP vllm serve {LLAMA_8B}"), "VLLM_HOST_IP"),
    "another command": (
        scripted(f"pip install x\nvllm serve {LLAMA_8B}"),
        "args: pip install: the operator only starts the server",
    ),
    "two other commands": (
        scripted(f"cd /m; hf download {SMALL}; vllm serve {LLAMA_8B}"),
        "cd; hf download:",
    ),
    "read from elsewhere": (
        scripted(f"M={LLAMA_8B}; . /env.sh; vllm serve $M"),
        "args: .: the operator only starts the server",
    ),
    "two starts": (scripted(f"vllm serve {LLAMA_70B}; vllm serve {LLAMA_8B}"), "once"),
    "a program that starts it": (scripted(f"nohup vllm serve {LLAMA_8B}"), "nohup vllm: "),
    "a file of arguments": (engine(LLAMA_8B, "--config", "/etc/vllm.yaml"), "--config /etc/vllm.yaml"),
    "two models": (engine(LLAMA_8B, SMALL), SMALL),
    "a secret in single quotes": (
        engine(
            command=["sh", "-c", f"vllm serve {LLAMA_8B} --chat-template '$(KEY)'"],
            args=None,
            env=[{"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}],
        ),
        "--chat-template: has its value only in the running container",
    ),
    "a secret in a variable": (
        engine(
            env=[
                {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
                {"name": "URL", "value": "https://x/$(KEY)"},
            ]
        ),
        "spec.engine.env: URL: contains a variable",
    ),
    "a flag that nobody knows": (engine("--all-new", "1", LLAMA_8B), "spec.target.model: is missing"),
}
BEYOND = {
    "a command's output": (f"vllm serve {LLAMA_8B} -tp $(nvidia-smi -L | wc -l)", "a substitution"),
    "backquotes in double quotes": (f'vllm serve "`cat /model`" {LLAMA_8B}', "a substitution"),
    "a default": ("vllm serve ${MODEL:-" + LLAMA_8B + "}", "a substitution"),
    "arguments of the script": ('vllm serve "$@"', "a substitution"),
    "an array": (f'ARGS=(--model {LLAMA_8B}); vllm serve "${{ARGS[@]}}"', "a substitution"),
    "an array that nobody reads": (f"ARGS=(--port 1); vllm serve {LLAMA_8B}", "an array"),
    "a subshell": (f"(vllm serve {LLAMA_8B})", "a subshell"),
    "a function": (f"f() {{ vllm serve {LLAMA_8B}; }}; f", "a function"),
    "a group": (f"{{ vllm serve {LLAMA_8B}; }}", "a group"),
    "if": (f"M={LLAMA_8B}\nif [ -e /big ]; then\nM={LLAMA_70B}\nfi\nvllm serve $M", "a condition"),
    "case": (f"case x in\nvllm serve {LLAMA_8B}", "a condition"),
    "and": (f"nvidia-smi && vllm serve {LLAMA_8B}", "a condition"),
    "or": (f"cd /big || M={LLAMA_8B}; vllm serve $M", "a condition"),
    "for": (f"M={LLAMA_8B}; for M in {LLAMA_70B}; do vllm serve $M; done", "a loop"),
    "until": (f"until curl localhost\ndo sleep 1\ndone\nvllm serve {LLAMA_8B}", "a loop"),
    "a pipe": (f"vllm serve {LLAMA_8B} | tee /log", "a pipe"),
    "in the background": (f"watch & vllm serve {LLAMA_8B}", "in the background"),
    "a file": (f"vllm serve {LLAMA_8B} > /var/log/engine", "a redirection"),
    "streams that are joined": (f"vllm serve {LLAMA_8B} 2>&1", "a redirection"),
    "a variable from a file": (f"read -r M < /model; vllm serve {LLAMA_8B}", "a redirection"),
    "a here-document": (f"cat <<EOF\nEOF\nvllm serve {LLAMA_8B}", "a here-document"),
    "a pattern": (f"vllm serve {LLAMA_8B} --allowed-origins *", "a pattern"),
    "an open quote": (f"vllm serve {LLAMA_8B} 'x", "an open quote"),
}
"""What a shell can do and import does not follow."""


@pytest.mark.parametrize(("script", "what"), BEYOND.values(), ids=BEYOND)
def test_unsupported_shell_syntax_is_an_error(
    specdecode: Specdecode, write: WriteObject, script: str, what: str
) -> None:
    result = specdecode("import", "-f", write("d.yaml", scripted(script)))
    assert (result.exit_code, result.stdout) == (INVALID, ""), "nothing is guessed"
    assert result.stderr.startswith("error: spec.template.spec.containers[0].args: ")
    assert what in result.stderr
    assert "exec vllm serve MODEL" in result.stderr, "what to write instead"


@pytest.mark.parametrize(
    "script",
    [
        f"vllm serve {LLAMA_8B} --chat-template '`|&;<>()$(x) *?{{}}'",
        f'vllm serve {LLAMA_8B} --chat-template "|&;<>() *?{{}} \\$(x) it\'s"',
        f"vllm serve {LLAMA_8B} --chat-template a\\&b\\|c # && that's $(all) `it` is",
        f"# if it's <big>\nvllm serve {LLAMA_8B} --chat-template '\nif x\n' \\\n  --seed 1",
    ],
)
def test_shell_syntax_in_quotes_and_comments_is_plain_text(script: str) -> None:
    assert "--chat-template" in spec_of(migrate(scripted(script)))["engine"]["extraArgs"]


@pytest.mark.parametrize(
    ("script", "where"),
    [
        ("--api-key SEKRET | cat", "line 1, |"),
        ('--api-key "a b SEKRET" | cat', "line 1, |"),
        ("--api-key \\\n  SEKRET \\\n | tee /log", "line 3, |"),
        ("--header 'Authorization: Bearer SEKRET'\nif true; then", "line 2, if"),
        ("--api-key 'SEKRET", "the script"),
    ],
)
def test_script_error_shows_no_word_of_the_script(script: str, where: str) -> None:
    with pytest.raises(MigrationError) as caught:
        migrate(scripted(f"vllm serve {LLAMA_8B} {script}"))
    assert caught.value.problem.value == where
    assert "SEKRET" not in str(caught.value)


@pytest.mark.parametrize(
    ("other", "shown"),
    [
        ("hf auth login --token SEKRET", "hf auth"),
        ("wandb login SEKRET", "wandb login"),
        ("git clone https://user:SEKRET@host/x", "git clone"),
        ("readonly T=SEKRET", "readonly"),
        ("mysql -pSEKRET", "mysql"),
        ("printf sekret", "printf"),
        ("'Authorization: Bearer SEKRET'", "…"),
    ],
)
def test_other_script_command_is_shown_without_its_arguments(other: str, shown: str) -> None:
    migration = migrate(scripted(f"echo sekret; {other}; vllm serve {LLAMA_8B}"))
    (decision,) = migration.decisions
    assert decision.value == shown
    assert "sekret" not in str(migration).lower()


LONG = {
    "a word": f"{'token' * 8000}!",
    "blanks": f"x{' ' * 60_000}",
    "lines that go on": f"x{chr(92)}\n" + "\\\n" * 20_000,
    "lines that go on with blanks": "key=x" + " \\\n" * 20_000,
    "open variables": "$(" * 30_000,
}


@pytest.mark.parametrize("text", LONG.values(), ids=LONG)
def test_long_script_is_parsed_to_its_end(text: str) -> None:
    with pytest.raises(MigrationError) as caught:
        migrate(scripted(f"vllm serve {LLAMA_8B} {text} | cat"))
    assert "holds a " in str(caught.value)


def test_a_script_that_is_too_long_is_refused() -> None:
    with pytest.raises(MigrationError, match="holds more than 65536 characters"):
        migrate(scripted(f"vllm serve {LLAMA_8B} {'x' * 65_536}"))
    with pytest.raises(MigrationError, match="holds more than 65536 characters"):
        migrate(scripted(f"A=xx; {'A=$A$A; ' * 20} vllm serve {LLAMA_8B}"))


@pytest.mark.parametrize("sign", "\ue000\ue001\ue002\ue003\ue004\ue005")
def test_private_use_characters_are_refused(sign: str) -> None:
    for body in (scripted(f"vllm serve {LLAMA_8B}{sign}"), scripted(f"vllm serve {LLAMA_8B} $X", X=sign)):
        with pytest.raises(MigrationError, match="private characters"):
            migrate(body)


def test_token_exported_by_a_script_is_a_decision_and_not_printed() -> None:
    migration = migrate(scripted(f"export HF_TOKEN=hf_secret; vllm serve {LLAMA_8B}"))
    (decision,) = migration.decisions
    assert decision.field == "spec.models.hubTokenSecret"
    assert "hf_secret" not in str(migration)


def test_a_sidecar_may_run_any_script() -> None:
    body = engine(LLAMA_8B)
    sidecar = {"name": "logs", "image": "busybox", "command": ["sh", "-c", "while true; do cat /log | nc x 1; done"]}
    body["spec"]["template"]["spec"]["containers"].insert(0, sidecar)
    (kept,) = spec_of(migrate(body))["podTemplate"]["spec"]["containers"]
    assert kept == sidecar
    sidecar["command"][2] = f"while true; do vllm serve {SMALL}; done"
    with pytest.raises(MigrationError, match="a loop"):
        migrate(body)


@pytest.mark.parametrize(("body", "words"), OPEN.values(), ids=OPEN)
def test_value_known_only_in_the_container_is_a_decision(
    specdecode: Specdecode, write: WriteObject, body: dict[str, Any], words: str
) -> None:
    assert words in asked(specdecode, write("d.yaml", body))
    printed = specdecode("import", "-f", write("d.yaml", body)).stdout
    assert "$" not in yaml.safe_dump(yaml.safe_load(printed)), "what is printed holds no variable"


def fetching(script: str, *models: str, env: str = "") -> dict[str, Any]:
    """A Deployment whose init container fetches its models by a script."""
    target, draft = models
    speculative = f'{{"model": "{draft}", "num_speculative_tokens": 5}}'
    mounts = [{"name": "weights", "mountPath": "/m"}]
    body = engine(target, "--speculative-config", speculative, volumeMounts=mounts)
    variables = [{"name": "DRAFT", "value": env}] if env else []
    fetch = {"name": "fetch", "command": ["bash", "-c"], "args": [script], "env": variables, "volumeMounts": mounts}
    body["spec"]["template"]["spec"] |= {
        "initContainers": [fetch],
        "volumes": [{"name": "weights", "emptyDir": {}}],
    }
    return body


BOTH = f"""
set -e
pip install -q huggingface_hub   # hf download nobody/nothing --local-dir /m/target
hf download --quiet {LLAMA_70B} --local-dir /m/target
hf download "$DRAFT" \\
  --local-dir=/m/draft --revision main
"""


def test_models_fetched_by_a_script_are_matched_by_folder() -> None:
    spec = spec_of(migrate(fetching(BOTH, "/m/target", "/m/draft", env=LLAMA_8B)))
    assert spec["target"]["model"] == LLAMA_70B
    assert spec["speculation"]["draft"] == {"model": LLAMA_8B, "revision": "main"}


def speculating(**config: Any) -> Migration:
    """The import of an engine with 64 requests at once that looks up 5 tokens, and more."""
    settings = {"method": "ngram", "num_speculative_tokens": 5, **config}
    return migrate(engine(LLAMA_8B, "--max-num-seqs=64", "--speculative-config", json.dumps(settings)))


def ranges_of(migration: Migration) -> list[tuple[int, int, int]]:
    """First, last and tokens of each range of an import that leaves nothing open."""
    ranges = spec_of(migration)["speculation"]["numSpeculativeTokensByBatchSize"]
    return [(each["from"], each["to"], each["numSpeculativeTokens"]) for each in ranges]


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ([[1, 16, 5], [17, 32, 0]], [(1, 16, 5), (17, 64, 0)]),
        ([[1, 4, 5], [17, 64, 2]], [(1, 16, 5), (17, 64, 2)]),
        ([[9, 64, 2], [1, 8, 5]], [(1, 8, 5), (9, 64, 2)]),
        ([[1, 16, 9], [17, 512, 1], [513, 1024, 0]], [(1, 16, 5), (17, 64, 1)]),
    ],
    ids=["past the end", "in a gap", "out of order", "beyond K and the requests"],
)
def test_batch_size_range_extends_to_the_next_one_as_in_vllm(
    written: list[list[int]], meant: list[tuple[int, int, int]]
) -> None:
    # vllm/v1/spec_decode/dynamic/utils.py, build_dynamic_sd_schedule_lookup
    for order in (1, -1):
        config = {"num_speculative_tokens_per_batch_size": written, "num_speculative_tokens": 5}
        assert ranges_of(speculating(**dict(list(config.items())[::order]))) == meant


@pytest.mark.parametrize(("limit", "first"), [(1, 1), (16, 16), (64, 64)])
def test_disable_by_batch_size_becomes_a_range_with_zero_tokens(limit: int, first: int) -> None:
    assert ranges_of(speculating(disable_by_batch_size=limit)) == [(first, 64, 0)]


def test_unsupported_draft_sample_method_is_a_decision() -> None:
    (decision,) = speculating(draft_sample_method=["greedy"]).decisions
    assert (decision.field, "draft_sample_method" in decision.value) == ("spec.speculation.draftSampling", True)
    assert "greedy" in decision.message


@pytest.mark.parametrize("key", ["tensor_parallel_size", "synthetic_acceptance_length"])
def test_refused_speculative_key_is_a_decision(key: str) -> None:
    (decision,) = speculating(**{key: 2}).decisions
    assert key in decision.value


@pytest.mark.parametrize(
    "key",
    [
        {"use_heterogeneous_vocab": False},
        {"parallel_drafting": True},
        {"kv_cache_dtype": None},
        {"max_model_len": None},
        {"acceptance_method": "typical"},
    ],
    ids=str,
)
def test_speculative_key_without_effect_is_reported(key: dict[str, Any]) -> None:
    migration = speculating(**key)
    assert not migration.decisions
    assert any(next(iter(key)) in setting.name for setting in migration.settings)


@pytest.mark.parametrize(
    ("share", "percent", "remark"),
    [
        ("0.29", 29, ""),
        ("0.855", 85, "rounded down"),
        ("0.8599", 85, "rounded down"),
        ("0.57", 57, ""),
        ("8.5e-1", 85, ""),
    ],
)
def test_memory_utilization_is_rounded_down_to_whole_percent(share: str, percent: int, remark: str) -> None:
    migration = migrate(engine(LLAMA_8B, "--gpu-memory-utilization", share))
    assert spec_of(migration)["serving"]["gpuMemoryUtilizationPercent"] == percent
    (setting,) = (each for each in migration.settings if "--gpu-memory-utilization" in each.name)
    assert (remark in setting.result, "rounded" in setting.result) == (True, bool(remark))


@pytest.mark.parametrize(("port", "kept"), [(1023, None), (1024, 1024), (1, None)])
def test_port_is_kept_only_if_it_needs_no_root(port: int, kept: int | None) -> None:
    spec = spec_of(migrate(engine(LLAMA_8B, "--port", str(port))))
    assert spec.get("serving", {}).get("port") == kept


WORDS = {
    "a": ["a"],
    "'a  $X' \"b '$X'\"": ["a  $X", "b 'one two'"],
    '"a\\"b \\$X" \\$X': ['a"b $X', "$X"],
    "a$X.b": ["aone", "two.b"],
    '"" $E "$E" x': ["", "", "x"],
    '""$E $E"$E" x$E': ["", "", "x"],
    "a\\\nb": ["ab"],
    "a#b #c": ["a#b"],
    "a\\ #b \\;#c \\\n#d": ["a #b", ";#c"],
    "a\\\n\\\n#b \\\n\\\n c": ["a#b", "c"],
    "\\\n# b\n a \\\n \\\n # c": ["a"],
    "'>' '#' ';' ';'": [">", "#", ";", ";"],
    "a=b ${X}s $XX": ["one", "twos", "$XX"],
}


@pytest.mark.parametrize(("text", "words"), WORDS.items(), ids=WORDS)
def test_script_is_split_into_words_like_in_a_shell(text: str, words: list[str]) -> None:
    (command,) = read_script(text, {"X": "one two", "E": ""})
    assert list(command.words) == words
    assert command.unknown == ({"$XX"} if "$XX" in words else set())


# `specdecode import`: what is wrong or must be decided is named, and nothing secret is shown.


def without_gpu(**changes: Any) -> dict[str, Any]:
    return engine(LLAMA_8B, resources={"limits": changes})


def two_engines() -> dict[str, Any]:
    body = engine()
    containers = body["spec"]["template"]["spec"]["containers"]
    containers.append({**deepcopy(containers[0]), "name": "other"})
    return body


WRONG = {
    "not a server": ({**engine(), "kind": "DaemonSet"}, "kind: DaemonSet: cannot be imported"),
    "no vLLM": (engine(image="nginx:1", command=["nginx"]), "containers: nginx:1: does not run vLLM"),
    "two engines": (two_engines(), "spec.template.spec.containers: vllm, other: each run vLLM"),
    "no containers": (with_pod(containers=[]), "spec.template.spec.containers: is missing: must be a list"),
    "no GPU": (without_gpu(cpu=1), "resources.limits.nvidia.com/gpu: is missing"),
    "MIG": (without_gpu(**{"nvidia.com/mig-1g.10gb": 1}), "nvidia.com/mig-1g.10gb"),
    "not vllm serve": (engine(command=["vllm", "bench"], args=["latency"]), "does not run vLLM"),
    "args no list": (engine(args="vllm"), "spec.template.spec.containers[0].args: vllm: must be a list"),
    "unclosed quote": (engine(command=["sh", "-c", "vllm serve 'x"], args=None), "No closing quotation"),
    "no model": (engine("--port", "8000"), "spec.target.model: is missing"),
    "floating tag": (engine(image="vllm/vllm-openai:latest"), "spec.engine.version: latest: "),
    "digest": (engine(image="vllm/vllm-openai@sha256:" + "0" * 64), "spec.engine.version: "),
    "an old image of one's own": (engine(image="my.io/vllm:v0.8.5"), "spec.engine.image: my.io/vllm:v0.8.5"),
    "eagle3": (
        engine(LLAMA_8B, "-sc", '{"method":"eagle9","model":"a/b","num_speculative_tokens":3}'),
        "spec.speculation.method: eagle9",
    ),
    "a method that died": (
        engine(LLAMA_8B, "--speculative-model", "org/llama-mlp-speculator", "--num-speculative-tokens", "3"),
        "spec.speculation.method: mlp_speculator: no vLLM version that the operator supports",
    ),
    "no K": (engine(LLAMA_8B, "-sc", '{"method":"ngram"}'), "spec.speculation.numSpeculativeTokens"),
    "speculation no JSON": (engine(LLAMA_8B, "-sc", "{ngram"), "--speculative-config"),
    "utilization": (engine(LLAMA_8B, "--gpu-memory-utilization", "1.5"), "spec.serving.gpuMemoryUtilizationPercent"),
    "a tensor split that cannot be": (engine(LLAMA_8B, "-tp", "3"), "spec.parallelism.tensor: 3"),
    "a draft of another family": (
        engine(LLAMA_8B, "-sc", '{"model":"Qwen/Qwen3-0.6B","num_speculative_tokens":3}'),
        "vocabulary",
    ),
    "host path": (
        engine("/models/x", volumeMounts=[{"name": "m", "mountPath": "/models"}]),
        "spec.models",
    ),
    "a name that is too long": (engine(), "metadata.name"),
}


@pytest.mark.parametrize(("body", "words"), WRONG.values(), ids=WRONG)
def test_invalid_or_ambiguous_deployment_is_reported(
    specdecode: Specdecode, write: WriteObject, body: dict[str, Any], words: str
) -> None:
    options = ["--name", "x" * 60] if words == "metadata.name" else []
    assert words in asked(specdecode, write("d.yaml", body), *options)


DIGITS = "9" * 5000
BIG = {
    "lists": (engine(LLAMA_8B, "-sc", "[" * 100_000), "spec.speculation: "),
    "an object that ends": (engine(LLAMA_8B, "-sc", '{"a":' * 100 + "1" + "}" * 100), "16 levels"),
    "compilation": (engine(LLAMA_8B, "-cc", "[" * 100_000), "spec.engine.extraArgs"),
    "infinite": (
        engine(LLAMA_8B, "-sc", '{"method":"ngram","num_speculative_tokens_per_batch_size":[[1,1e999,2]]}'),
        "must be a list of [first, last, tokens]",
    ),
    "a length": (engine(LLAMA_8B, "--max-model-len", DIGITS), "spec.serving.maxModelLen"),
    "a share": (engine(LLAMA_8B, "--gpu-memory-utilization", "1e99999"), "gpuMemoryUtilizationPercent"),
    "GPUs": (without_gpu(**{"nvidia.com/gpu": DIGITS}), "must be a whole number"),
    "cores": (
        engine(image="vllm-cpu:v0.32.0", resources={"limits": {"cpu": DIGITS, "memory": DIGITS}}),
        "spec.accelerator.cpuCores",
    ),
}


@pytest.mark.parametrize(("body", "words"), BIG.values(), ids=BIG)
def test_too_deep_or_too_large_value_is_reported(body: dict[str, Any], words: str) -> None:
    try:
        said = [str(each) for each in migrate(body).decisions]
    except MigrationError as error:
        said = [str(error)]
    assert any(words in each for each in said), said


def test_object_with_open_decisions_is_printed_with_a_comment(specdecode: Specdecode, write: WriteObject) -> None:
    arguments = ["-sc", '{"method":"eagle9","model":"a/b","num_speculative_tokens":3}']
    result = specdecode("import", "-f", write("d.yaml", engine(LLAMA_8B, *arguments)))
    assert yaml.safe_load(result.stdout)["spec"]["speculation"]["method"] == "eagle9", "no cluster takes it as it is"
    assert result.stdout.startswith("# Decide first: spec.speculation.method: eagle9: ")


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place inside an object."""
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in parts:
        yield (*path, key)
        yield from places(part, (*path, key))


@pytest.mark.parametrize("odd", [None, 7, "x", [], ["a"], {}, {"a": None}], ids=str)
@pytest.mark.parametrize("file", sorted(DATA.glob("*.yaml")), ids=lambda path: path.stem)
def test_malformed_deployment_never_causes_a_traceback(file: Path, odd: Any) -> None:
    *_, whole = yaml.safe_load_all(file.read_text())
    for path in places(whole):
        broken = deepcopy(whole)
        *parents, last = path
        reduce(getitem, parents, broken)[last] = odd
        assert answered(broken), path


def answered(body: dict[str, Any]) -> bool:
    """Whether an import ends with a report, or with an error that names field, value and fix."""
    try:
        return bool(report_lines(migrate(body), "x"))
    except MigrationError as error:
        return str(error).count(": ") > 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "pass deployment/NAME"),
        (["daemonset/x"], "daemonset/x: use KIND/NAME"),
        (["deployment/"], "deployment/"),
        (["-f", "nowhere.yaml"], "nowhere.yaml"),
        (["deployment/x", "--context", "nowhere"], "KUBECONFIG"),
    ],
)
def test_invalid_arguments_are_refused(
    specdecode: Specdecode, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: list[str], words: str
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    result = specdecode("import", *arguments)
    assert result.exit_code == INVALID
    assert not isinstance(result.exception, Exception)
    assert words in result.stderr


# `specdecode import`: who drafts, however it is written.

SPECULATIVE = {
    "JSON": ["--speculative-config", '{"method":"ngram","num_speculative_tokens":3,"prompt_lookup_min":2}'],
    "JSON after =": ['--speculative-config={"method":"ngram","num_speculative_tokens":3,"prompt_lookup_min":2}'],
    "alias": ["-sc", '{"model":"ngram","num-speculative-tokens":3,"prompt-lookup-min":2}'],
    "dotted": ["-sc.method=ngram", "-sc.num_speculative_tokens", "3", "-sc.prompt_lookup_min=2"],
    "short flags": ["--spec-method", "ngram", "--spec-tokens", "3", "-sc.prompt_lookup_min=2"],
    "2024": ["--speculative-model", "[ngram]", "--num_speculative_tokens=3", "--ngram-prompt-lookup-min", "2"],
}


@pytest.mark.parametrize("arguments", SPECULATIVE.values(), ids=SPECULATIVE)
def test_every_speculation_syntax_is_imported(specdecode: Specdecode, write: WriteObject, arguments: list[str]) -> None:
    spec, _ = imported(specdecode, write("d.yaml", engine(LLAMA_8B, *arguments)))
    assert spec["speculation"] == {"method": "ngram", "numSpeculativeTokens": 3, "ngram": {"promptLookupMin": 2}}
    assert "extraArgs" not in spec.get("engine", {})


HEADS = {
    "eagle3": ["-sc", '{"method":"eagle3","model":"yuhuili/EAGLE3-LLaMA3.1-Instruct-8B","num_speculative_tokens":3}'],
    "eagle": ["--speculative-model", "yuhuili/EAGLE-LLaMA3.1-Instruct-8B", "--num-speculative-tokens", "3"],
    "medusa": ["--speculative-model", "org/medusa-8b", "--num-speculative-tokens", "3"],
}


@pytest.mark.parametrize("method", HEADS)
def test_method_of_a_head_is_given_or_derived_from_its_path(
    specdecode: Specdecode, write: WriteObject, method: str
) -> None:
    body = yaml.safe_load(specdecode("import", "-f", write("d.yaml", engine(LLAMA_8B, *HEADS[method]))).stdout)
    speculation = body["spec"]["speculation"]
    assert (speculation["method"], speculation["numSpeculativeTokens"]) == (method, 3)
    assert speculation["draft"]["model"] in " ".join(HEADS[method])


def test_removed_method_is_a_decision_for_an_unknown_model(specdecode: Specdecode, write: WriteObject) -> None:
    result = specdecode("import", "--engine-version", "0.33", "--", "vllm", "serve", "org/vicuna", *HEADS["medusa"])
    assert result.exit_code == INVALID
    assert "spec.speculation.method: medusa: vLLM 0.33 no longer supports it; use method eagle3" in result.stderr
    written = write("written.yaml", result.stdout)
    for command in ("plan", "lint"):
        refused = specdecode(command, "-f", written)
        assert (refused.exit_code, "no longer supports it" in refused.output) == (INVALID, True)


@pytest.mark.parametrize("value", ['"perhaps"', "2", "[true]"])
def test_parallel_drafting_that_is_not_boolean_is_a_decision(
    specdecode: Specdecode, write: WriteObject, value: str
) -> None:
    config = f'{{"model":"amd/PARD-Llama-3.2-1B","num_speculative_tokens":3,"parallel_drafting":{value}}}'
    said = asked(specdecode, write("d.yaml", engine(LLAMA_8B, "-sc", config)))
    assert "parallel_drafting: " in said
    assert "must be true or false" in said


@pytest.mark.parametrize(
    ("version", "lacks"),
    [
        ("0.32", "vLLM 0.32 has no such"),
        ("0.99", f"vLLM 0.99 is newer than the supported versions, and {KNOWN_VERSIONS[-1]} has no such"),
    ],
)
def test_unknown_key_and_flag_are_reported_for_the_given_version(
    specdecode: Specdecode, write: WriteObject, version: str, lacks: str
) -> None:
    config = '{"method":"ngram","num_speculative_tokens":3,"xyzzy":1}'
    source = write("d.yaml", engine(LLAMA_8B, "-sc", config, "--speculative-xyzzy", "1"))
    said = asked(specdecode, source, "--engine-version", version)
    assert f"{lacks} key" in said
    assert f"{lacks} flag" in said


# The commands of vllm-project/recipes that speculate: each is imported, and most reach a memory verdict offline.

COMMANDS = json.loads((Path(__file__).parent / "import_data/recipe-commands.json").read_text())["commands"]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, list[tuple[int, int | None]]]:
    """Exit codes of import and of the plan of its object, by recipe; None where import printed no object."""
    folder, found = tmp_path_factory.mktemp("recipes"), defaultdict(list)
    for number, each in enumerate(COMMANDS):
        command = shlex.split(each["command"])
        imported = CliRunner().invoke(app, ["import", "--engine-version", "0.33", "--", *command])
        path, planned = folder / f"{number}.yaml", None
        if imported.stdout:
            path.write_text(imported.stdout)
            planned = CliRunner().invoke(app, ["plan", "-f", str(path)])
        for result in (imported, planned):
            assert result is None or isinstance(result.exception, SystemExit | None), each["command"]
        found[each["recipe"]].append((imported.exit_code, None if planned is None else planned.exit_code))
    return found


def test_data_has_all_recipe_commands_with_speculation() -> None:
    assert (len(COMMANDS), len({each["recipe"] for each in COMMANDS})) == (64, 56)


def test_every_recipe_command_becomes_an_object(answers: Mapping[str, list[tuple[int, int | None]]]) -> None:
    assert [recipe for recipe, codes in answers.items() if any(planned is None for _, planned in codes)] == []


# `specdecode import KIND/NAME` reads each kind from the cluster, with what it refers to there.

SOURCES = Path(__file__).parents[1] / "importing/data"
KINDS = {each.kind: each for found in (*_RESOURCES.values(), _RUNTIMES) for each in found} | {"Service": SERVICE}


@pytest.fixture
async def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ApiServer]:
    server = ApiServer()
    server.served |= {each.qualified_plural: each for each in KINDS.values()}
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    async with server.serving(tmp_path / "kubeconfig"):
        yield server


def put(api: ApiServer, file: str) -> None:
    for body in yaml.safe_load_all((SOURCES / file).read_text()):
        body["metadata"].setdefault("namespace", "team")
        # A server does not say a kind again with each object of a list.
        api.create(KINDS[body["kind"]], {key: value for key, value in body.items() if key != "kind"})


async def read(which: str, namespace: str | None = None) -> Source:
    return await asyncio.to_thread(read_source, [which], None, namespace, None)


FOUND = {
    "statefulset/llama": ("stateful-set.yaml", "chat", "meta-llama/Llama-3.1-8B-Instruct"),
    "sts/llama": ("stateful-set.yaml", "chat", "meta-llama/Llama-3.1-8B-Instruct"),
    "pod/try-qwen": ("pod.yaml", "lab", "Qwen/Qwen3-32B"),
    "lws/wide": ("leader-worker-set.yaml", "chat", "meta-llama/Llama-3.1-70B-Instruct"),
    "isvc/llama": ("inference-service-runtime.yaml", "llm", "llama-3.1-8b"),
    "llmisvc/qwen3-32b": ("llm-inference-service.yaml", "llm", "Qwen/Qwen3-32B"),
}


@pytest.mark.parametrize("which", FOUND)
async def test_each_kind_is_read_from_the_cluster(api: ApiServer, which: str) -> None:
    file, namespace, model = FOUND[which]
    put(api, file)
    source = await read(which, namespace)
    migration = migrate_workload(source.workload, source.services)
    assert migration.body["spec"]["target"]["model"] == model
    assert not migration.decisions
    assert not {each.partition(" ")[0] for each in api.requests} - {"get", "list"}, "it only reads"


async def test_services_of_the_namespace_become_steps(api: ApiServer) -> None:
    put(api, "pod.yaml")
    source = await read("pod/try-qwen", "lab")
    steps = migrate_workload(source.workload, source.services).steps
    assert any("kubectl patch service try-qwen -n lab" in each.command for each in steps)


async def test_missing_serving_runtime_is_a_decision(api: ApiServer) -> None:
    put(api, "inference-service-huggingface.yaml")
    body: dict[str, Any] = {"metadata": {"name": "other", "namespace": "team"}}
    model = {"modelFormat": {"name": "vLLM"}, "runtime": "gone", "resources": {"limits": {"nvidia.com/gpu": "1"}}}
    api.create(KINDS["InferenceService"], body | {"spec": {"predictor": {"model": model}}})
    decisions = migrate_workload((await read("isvc/other")).workload).decisions
    assert any(each.field == "spec.predictor.model.runtime" for each in decisions)


@pytest.mark.parametrize("which", ["statefulset/nobody", "isvc/nobody"])
async def test_missing_object_is_reported(api: ApiServer, which: str) -> None:
    with pytest.raises(SourceError, match="/nobody: not found in namespace team"):
        await read(which)
