"""`specdecode import`: what is wrong or must be decided is named, and nothing secret is shown."""

from collections.abc import Iterator
from copy import deepcopy
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest
import yaml

from specdecode_operator.cli.importing import report_lines
from specdecode_operator.importing.spec_builder import MigrationError
from tests.support.migrations import migrate
from tests.unit.cli.conftest import Specdecode, WriteObject
from tests.unit.cli.old_deployments import DATA, INVALID, LLAMA_8B, asked, engine, with_pod


def without_gpu(**changes: Any) -> dict[str, Any]:
    return engine(LLAMA_8B, resources={"limits": changes})


def two_engines() -> dict[str, Any]:
    body = engine()
    containers = body["spec"]["template"]["spec"]["containers"]
    containers.append({**deepcopy(containers[0]), "name": "other"})
    return body


WRONG = {
    "not a server": ({**engine(), "kind": "DaemonSet"}, "kind: DaemonSet: holds nothing that can be imported"),
    "no vLLM": (engine(image="nginx:1", command=["nginx"]), "spec.template.spec.containers: nginx:1: runs no vLLM"),
    "two engines": (two_engines(), "spec.template.spec.containers: vllm, other: run vLLM each"),
    "no containers": (with_pod(containers=[]), "spec.template.spec.containers: is missing: must be a list"),
    "containers no list": (with_pod(containers="x"), "spec.template.spec.containers: x: must be a list"),
    "no template": ({**engine(), "spec": {}}, "spec.template"),
    "spec no object": ({**engine(), "spec": []}, "spec"),
    "another vendor": (without_gpu(**{"amd.com/gpu": 1}), "resources.limits.amd.com/gpu: 1"),
    "no GPU": (without_gpu(cpu=1), "resources.limits.nvidia.com/gpu: is missing"),
    "MIG": (without_gpu(**{"nvidia.com/mig-1g.10gb": 1}), "nvidia.com/mig-1g.10gb"),
    "not vllm serve": (engine(command=["vllm", "bench"], args=["latency"]), "runs no vLLM server"),
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
        "spec.speculation.method: mlp_speculator: no vLLM that the operator launches",
    ),
    "no K": (engine(LLAMA_8B, "-sc", '{"method":"ngram"}'), "spec.speculation.numSpeculativeTokens"),
    "speculation no JSON": (engine(LLAMA_8B, "-sc", "{ngram"), "--speculative-config"),
    "speculation no object": (engine(LLAMA_8B, "-sc", "3"), "--speculative-config"),
    "no number": (engine(LLAMA_8B, "--max-num-seqs", "many"), "spec.serving.maxNumSeqs: many"),
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
def test_what_is_wrong_or_open_is_named(
    specdecode: Specdecode, write: WriteObject, body: dict[str, Any], words: str
) -> None:
    options = ["--name", "x" * 60] if words == "metadata.name" else []
    assert words in asked(specdecode, write("d.yaml", body), *options)


DIGITS = "9" * 5000
BIG = {
    "lists": (engine(LLAMA_8B, "-sc", "[" * 100_000), "spec.speculation: "),
    "objects": (engine(LLAMA_8B, "-sc", '{"a":' * 100_000), "spec.speculation: "),
    "an object that ends": (engine(LLAMA_8B, "-sc", '{"a":' * 100 + "1" + "}" * 100), "16 levels"),
    "a value": (engine(LLAMA_8B, "-sc.method", "[" * 100_000), "spec.speculation.method"),
    "compilation": (engine(LLAMA_8B, "-cc", "[" * 100_000), "spec.engine.extraArgs"),
    "infinite": (
        engine(LLAMA_8B, "-sc", '{"method":"ngram","num_speculative_tokens_per_batch_size":[[1,1e999,2]]}'),
        "must be a list of [first, last, tokens]",
    ),
    "a length": (engine(LLAMA_8B, "--max-model-len", DIGITS), "spec.serving.maxModelLen"),
    "a number in JSON": (engine(LLAMA_8B, "-sc", f'{{"num_speculative_tokens":{DIGITS}}}'), "spec.speculation: "),
    "a share": (engine(LLAMA_8B, "--gpu-memory-utilization", "1e99999"), "gpuMemoryUtilizationPercent"),
    "no share": (engine(LLAMA_8B, "--gpu-memory-utilization", "nan"), "gpuMemoryUtilizationPercent"),
    "GPUs": (without_gpu(**{"nvidia.com/gpu": DIGITS}), "must be a whole number"),
    "cores": (
        engine(image="vllm-cpu:v0.32.0", resources={"limits": {"cpu": DIGITS, "memory": DIGITS}}),
        "spec.accelerator.cpuCores",
    ),
}


@pytest.mark.parametrize(("body", "words"), BIG.values(), ids=BIG)
def test_what_is_too_deep_or_too_large_is_named(body: dict[str, Any], words: str) -> None:
    try:
        said = [str(each) for each in migrate(body).decisions]
    except MigrationError as error:
        said = [str(error)]
    assert any(words in each for each in said), said


def test_errors_print_nothing_to_apply(specdecode: Specdecode, write: WriteObject) -> None:
    assert specdecode("import", "-f", write("d.yaml", two_engines())).stdout == ""


def test_what_must_be_decided_is_printed_as_far_as_it_goes(specdecode: Specdecode, write: WriteObject) -> None:
    arguments = ["-sc", '{"method":"eagle9","model":"a/b","num_speculative_tokens":3}']
    result = specdecode("import", "-f", write("d.yaml", engine(LLAMA_8B, *arguments)))
    assert yaml.safe_load(result.stdout)["spec"]["speculation"]["method"] == "eagle9", "no cluster takes it as it is"
    assert result.stdout.startswith("# To be decided first: spec.speculation.method: eagle9: ")


def test_secrets_are_never_shown(specdecode: Specdecode, write: WriteObject) -> None:
    secrets = ["sk-secret-1", "hf_secret2", "hf_secret3"]
    body = engine(
        LLAMA_8B, f"--api-key={secrets[0]}", "--hf-token", secrets[1], env=[{"name": "HF_TOKEN", "value": secrets[2]}]
    )
    result = specdecode("import", "-f", write("d.yaml", body))
    assert result.exit_code == INVALID
    for field in ("spec.serving.apiKeySecret", "spec.models.hubTokenSecret"):
        assert field in result.stderr
    for secret in secrets:
        assert secret not in result.output


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place inside an object."""
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in parts:
        yield (*path, key)
        yield from places(part, (*path, key))


@pytest.mark.parametrize("odd", [None, 7, "x", [], ["a"], {}, {"a": None}], ids=str)
@pytest.mark.parametrize("file", sorted(DATA.glob("*.yaml")), ids=lambda path: path.stem)
def test_no_broken_deployment_is_answered_with_a_traceback(file: Path, odd: Any) -> None:
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
        ([], "name deployment/NAME"),
        (["daemonset/x"], "daemonset/x: write KIND/NAME"),
        (["deployment/"], "deployment/"),
        (["-f", "nowhere.yaml"], "nowhere.yaml"),
        (["deployment/x", "--context", "nowhere"], "KUBECONFIG"),
    ],
)
def test_bad_arguments(
    specdecode: Specdecode, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: list[str], words: str
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    result = specdecode("import", *arguments)
    assert result.exit_code == INVALID
    assert not isinstance(result.exception, Exception)
    assert words in result.stderr


def test_a_kubeconfig_that_is_missing_is_said_once(
    specdecode: Specdecode, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    result = specdecode("import", "deployment/x")
    assert result.stderr == f"error: KUBECONFIG: {tmp_path / 'none'}: there is no such file: name a kubeconfig\n"
    assert not caplog.records, "the client's own words"
