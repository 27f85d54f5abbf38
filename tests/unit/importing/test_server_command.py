"""Command lines of servers."""

import shlex

import pytest
import yaml

from specdecode_operator.importing.convert import migrate_workload
from specdecode_operator.importing.sources import is_command_text, read_command_text, read_words
from specdecode_operator.importing.spec_builder import MigrationError
from tests.unit.cli.conftest import Specdecode
from tests.unit.cli.old_deployments import LLAMA_8B
from tests.unit.importing.test_sources import HUB_TOKEN, IMAGE, QWEN, left_open, spec_of


def test_command_words_are_read_after_two_dashes(specdecode: Specdecode) -> None:
    result = specdecode("import", "--", "vllm", "serve", LLAMA_8B, "--max-num-seqs", "64", "--api-key", "sk-secret")
    body = yaml.safe_load(result.stdout)
    assert body["metadata"] == {"name": "llama-3-1-8b-instruct"}
    assert body["spec"]["serving"] == {"maxNumSeqs": 64, "servedModelNames": [LLAMA_8B]}
    assert "spec.serving.apiKeySecret" in result.stderr
    assert "sk-secret" not in result.output


def test_command_line_is_read_from_standard_input(specdecode: Specdecode) -> None:
    result = specdecode("import", "-f", "-", stdin=f"$ vllm serve {LLAMA_8B} \\\n    -tp 2\n")
    assert (result.exit_code, yaml.safe_load(result.stdout)["spec"]["parallelism"]) == (0, {"tensor": 2})


@pytest.mark.parametrize(
    "words", [("bash", "-c", "vllm serve Qwen/Qwen3-8B -tp 2"), ("sh", "-ec", "exec vllm serve Qwen/Qwen3-8B -tp 2")]
)
def test_shell_script_argument_is_read(words: tuple[str, ...]) -> None:
    assert spec_of(*words) == spec_of("vllm", "serve", "Qwen/Qwen3-8B", "-tp", "2")
    assert spec_of(shlex.join(words)) == spec_of(*words)


def test_quoted_command_line_is_read() -> None:
    assert spec_of("vllm serve Qwen/Qwen3-8B -tp 2") == spec_of("vllm", "serve", "Qwen/Qwen3-8B", "-tp", "2")


def test_variable_set_before_a_shell_command_is_refused() -> None:
    with pytest.raises(MigrationError):
        migrate_workload(read_words(["HF_HOME=/x bash -c 'vllm serve Qwen/Qwen3-8B'"]))


RUN = ("docker", "run", "--rm", "-it", "--gpus=all")


def test_combined_short_docker_options_are_read() -> None:
    spec = spec_of(
        "sudo", "docker", "run", "-dit", "-p8000:8000", "-eA=1", "-e", "B=$x", "--gpus", "2", IMAGE, LLAMA_8B
    )
    assert spec["engine"]["env"] == [{"name": "A", "value": "1"}, {"name": "B", "value": "$x"}]
    assert spec["target"]["model"] == LLAMA_8B


def test_docker_entrypoint_precedes_the_command() -> None:
    spec = spec_of(
        *RUN, "--entrypoint", "python3", IMAGE, "-m", "vllm.entrypoints.openai.api_server", "--model", LLAMA_8B
    )
    assert spec["target"]["model"] == LLAMA_8B


def test_docker_memory_cpus_and_user_go_to_the_pod_template() -> None:
    spec = spec_of(*RUN, "-m", "64g", "--cpus=8", "--user", "1000:100", IMAGE, LLAMA_8B)
    (container,) = spec["podTemplate"]["spec"]["containers"]
    assert container["resources"] == {"limits": {"memory": "64Gi", "cpu": "8"}}
    assert container["securityContext"] == {"runAsUser": 1000, "runAsGroup": 100}


def test_idle_docker_gpus_are_reported() -> None:
    migration = migrate_workload(read_words(["docker", "run", "--gpus", '"device=0,1,2,3"', IMAGE, LLAMA_8B, "-tp=2"]))
    assert any(each.name == "resources nvidia.com/gpu 4" for each in migration.settings)


def test_docker_cpu_server_becomes_a_cpu_accelerator() -> None:
    words = [
        *("docker", "run", "--cpus", "16", "--memory=64g", "-e", "VLLM_CPU_KVCACHE_SPACE=8"),
        *("my.io/vllm-cpu:v0.33.0", LLAMA_8B),
    ]
    assert spec_of(*words)["accelerator"] == {"type": "CPU", "cpuCores": 16, "memoryGiB": 64, "kvCacheGiB": 8}
    assert spec_of(*words, "-tp", "2")["accelerator"]["kvCacheGiB"] == 16, "the variable says what each rank has"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["-v", "/data/llama:/m/llama"], "spec.models.volume: /data: is on the machine that runs it"),
        (["--mount", "type=bind,source=/data,target=/m"], "spec.models.volume: /data: "),
        (["-v", "weights:/m"], "spec.models.volume: /var/lib/docker/volumes/weights/_data: "),
    ],
)
def test_folder_of_the_local_machine_is_a_decision(options: list[str], words: str) -> None:
    assert words in left_open(*RUN, *options, IMAGE, "--model", "/m/llama")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--privileged"], "spec.podTemplate: --privileged"),
        (["--cap-add", "SYS_ADMIN"], "spec.podTemplate: --cap-add"),
        (["--device=/dev/fuse"], "spec.podTemplate: --device"),
        (["--env-file", "prod.env"], "--env-file prod.env"),
        (["-e", "MODE"], "spec.engine.env: MODE: has its value only on the machine"),
        (["-e", "HF_TOKEN"], HUB_TOKEN),
        (["-e", "HF_TOKEN=hf_secret"], HUB_TOKEN),
        (["--user", "ada"], "--user ada"),
        (["--user", "9" * 5000], "--user 9"),
        (["--user", str(2**31)], "--user 2147483648"),
        (["--made-up", "1"], "spec.podTemplate: --made-up"),
    ],
)
def test_docker_option_without_a_pod_equivalent_is_a_decision(options: list[str], words: str) -> None:
    said = left_open(*RUN, *options, IMAGE, LLAMA_8B)
    assert words in said
    assert "hf_secret" not in said


@pytest.mark.parametrize(
    ("text", "is_command"),
    [
        ("vllm serve x", True),
        ("# start\nA=1 exec /opt/bin/vllm serve x", True),
        ("#!/bin/sh\npython3 -m vllm.entrypoints.openai.api_server --model x", True),
        ("podman run --rm x", True),
        ("kind: Deployment\nspec: |\n  vllm serve x", False),
        ('{"kind": "Pod"}', False),
        ("services:\n  a: {command: |\n  vllm serve x\n}", False),
        ("nothing of the kind", False),
    ],
)
def test_command_lines_are_distinguished_from_yaml(text: str, *, is_command: bool) -> None:
    assert is_command_text(text) == is_command


@pytest.mark.parametrize(
    "end", ["&", "> vllm.log 2>&1 &", ">>log", "2>&1 | tee -a run.log", "&> /var/log/vllm.log", "|& tee x &"]
)
def test_log_redirection_is_ignored(end: str) -> None:
    text = f"nohup vllm serve {LLAMA_8B} --chat-template 'a > b' {end}\n"
    migration = migrate_workload(read_command_text(text))
    assert migration.body["spec"]["engine"]["extraArgs"] == ["--chat-template", "a > b"]


@pytest.mark.parametrize("off", ["--no-enable-expert-parallel", "--disable-expert-parallel", "--disable-expert-p"])
def test_negated_flag_turns_the_switch_off(off: str) -> None:
    spec = spec_of("vllm", "serve", QWEN, "-tp", "2", "--enable-expert-parallel", off)
    assert spec["parallelism"] == {"tensor": 2}


def test_cuda_visible_devices_is_dropped() -> None:
    migration = migrate_workload(read_command_text(f"CUDA_VISIBLE_DEVICES=2,3 vllm serve {LLAMA_8B} -tp 2"))
    assert not migration.decisions
    assert "engine" not in migration.body["spec"]


def test_other_commands_of_a_docker_script_are_a_decision() -> None:
    text = f"set -e\ndocker pull {IMAGE}\nhf download {QWEN}\ndocker run --gpus all {IMAGE} {LLAMA_8B}\n"
    (decision,) = migrate_workload(read_command_text(text)).decisions
    assert decision.value == "hf download"


def test_script_file_variables_are_expanded() -> None:
    migration = migrate_workload(read_command_text(f"M={LLAMA_8B}\nvllm serve $M --seed 7 # $OTHER\n"))
    assert migration.body["spec"]["engine"]["extraArgs"] == ["--seed", "7"]


@pytest.mark.parametrize(
    "tail", ["", " -e", " --gpus", " -v", " --env-file=", " -v :", " --mount x", " -", " -z9 x", " --", " '' ''"]
)
def test_truncated_command_line_never_causes_a_traceback(tail: str) -> None:
    for text in (f"docker run --name a{tail}", f"docker run{tail} {IMAGE} {LLAMA_8B}", f"vllm serve {LLAMA_8B}{tail}"):
        assert answers(text), text


def answers(text: str) -> bool:
    """Whether a command line is imported, or refused with field, value and fix."""
    try:
        return bool(migrate_workload(read_command_text(text)).body)
    except MigrationError as error:
        return str(error).count(": ") > 1
