"""GPUs by the names that people use, and by their memory."""

import json
from typing import Any

import pytest
import yaml

from tests.unit.cli.conftest import Specdecode, WriteObject, manifest

H100, H200 = "NVIDIA-H100-80GB-HBM3", "NVIDIA-H200"
SMALL = {"target": {"model": "meta-llama/Llama-3.1-8B-Instruct"}, "speculation": None, "parallelism": {}}


def candidates(specdecode: Specdecode, *arguments: object) -> list[dict[str, Any]]:
    result = specdecode("plan", *arguments, "-o", "json")
    assert result.exit_code in (0, 4), result.output
    return list(json.loads(result.stdout)["objects"][0]["candidates"])


@pytest.mark.parametrize("asked", ["48GiB", "48 gib", "48Gi", "48.0GiB"])
def test_any_gpu_is_planned_for_by_its_memory(specdecode: Specdecode, asked: str) -> None:
    model = ("--model", "meta-llama/Llama-3.1-8B-Instruct", "--max-model-len", "8192")
    found = candidates(specdecode, *model, "--gpu", asked)
    assert {each["product"] for each in found} == {"GPU of 48GiB"}
    assert all(each["per_gpu"]["total"] == 48 * 2**30 for each in found)
    assert not any(each["calibrated"] for each in found)
    text = specdecode("plan", *model, "--gpu", asked).stdout
    assert "Runs on 1 x GPU of 48GiB, TP 1: " in text
    assert "GPU of 48GiB is uncalibrated: only its memory is known" in text
    (answer,) = json.loads(specdecode("plan", *model, "--gpu", asked, "-o", "json").stdout)["objects"]
    assert any("uncalibrated" in each for each in answer["advice"])


def test_a_product_without_figures_is_planned_for_by_its_memory(specdecode: Specdecode, write: WriteObject) -> None:
    path = write("a.yaml", manifest("a", **SMALL, accelerator={"products": ["NVIDIA-T1000"], "memoryGiBPerGPU": 48}))
    found = candidates(specdecode, path)
    assert {each["product"] for each in found} == {"NVIDIA-T1000"}
    assert all(each["uncalibrated_gpu"] and each["per_gpu"]["total"] == 48 * 2**30 for each in found)
    for command in ("plan", "explain"):
        assert "uncalibrated" in specdecode(command, path).stdout
    assert "accelerator.memoryGiBPerGPU 48" in specdecode("explain", path).stdout


def test_memory_that_is_given_for_a_known_product_is_warned_of(specdecode: Specdecode, write: WriteObject) -> None:
    accelerator = {"products": ["NVIDIA-H100-80GB-HBM3"], "memoryGiBPerGPU": 14}
    path = write("a.yaml", manifest("a", **SMALL, accelerator=accelerator))
    assert "accelerator.memoryGiBPerGPU 14 is ignored" in specdecode("lint", path).output
    unknown = {"products": ["NVIDIA-T1000"], "memoryGiBPerGPU": 48}
    path = write("b.yaml", manifest("b", **SMALL, accelerator=unknown))
    assert "is ignored" not in specdecode("lint", path).output


def test_a_product_without_figures_needs_its_memory(specdecode: Specdecode, write: WriteObject) -> None:
    path = write("a.yaml", manifest("a", **SMALL, accelerator={"products": ["NVIDIA-T1000"]}))
    result = specdecode("plan", path)
    assert result.exit_code == 2
    assert "spec.accelerator.products[0]" in result.output
    assert "set spec.accelerator.memoryGiBPerGPU" in result.output
    slice_of = {"products": ["NVIDIA-H200-MIG-1g.18gb"], "memoryGiBPerGPU": 16}
    assert "is a MIG slice" in specdecode("plan", write("b.yaml", manifest("b", accelerator=slice_of))).output


def test_a_file_is_planned_for_other_gpus_than_it_names(specdecode: Specdecode, write: WriteObject) -> None:
    path = write("a.yaml", manifest("a", accelerator={"products": [H100]}))
    assert {each["product"] for each in candidates(specdecode, path)} == {H100}
    assert {each["product"] for each in candidates(specdecode, path, "--gpu", "H200")} == {H200}
    several = candidates(specdecode, path, "--gpu", "H200", "--gpu", "141GiB")
    assert {each["product"] for each in several} == {H200, "GPU of 141GiB"}


@pytest.mark.parametrize(
    ("gpu", "words"),
    [
        ("48GB", "48GB: no memory figures are known for it: use one of"),
        ("0GiB", "0GiB: no memory figures are known for it"),
        ("-4GiB", "no memory figures are known for it"),
        ("99999GiB", "no memory figures are known for it"),
        ("nanGiB", "or its memory as CUDA reports it, such as 48GiB"),
        ("A300", "or its memory as CUDA reports it, such as 48GiB"),
    ],
)
def test_what_is_no_gpu_is_refused_with_what_is(
    specdecode: Specdecode, write: WriteObject, gpu: str, words: str
) -> None:
    for start in (("--model", "gpt2"), (write("a.yaml", manifest("a")),)):
        result = specdecode("plan", *start, "--gpu", gpu)
        assert result.exit_code == 2
        assert words in result.stderr
        assert result.stderr.count("\n") == 1


def test_nodes_and_gpus_are_not_both_given(specdecode: Specdecode, write: WriteObject) -> None:
    path = write("a.yaml", manifest("a"))
    result = specdecode("plan", path, "--gpu", "H200", "--nodes", path)
    assert (result.exit_code, "--nodes says which GPUs there are: remove one" in result.stderr) == (2, True)


def test_no_manifest_asks_for_a_gpu_by_its_memory(specdecode: Specdecode, write: WriteObject) -> None:
    result = specdecode("init", "--model", "meta-llama/Llama-3.1-8B-Instruct", "--gpu", "48GiB")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "no manifest can ask for a GPU by its memory" in result.stderr
    for product in ("48GiB", "GPU of 48GiB"):
        path = write("a.yaml", manifest("a", accelerator={"products": [product]}))
        assert specdecode("plan", path).exit_code == 2


def test_a_manifest_has_the_label_of_nodes_and_is_told_which(specdecode: Specdecode, write: WriteObject) -> None:
    """The scheduler compares it with the label, so nothing shorter can stand there."""
    result = specdecode("plan", write("a.yaml", manifest("a", accelerator={"products": ["H200"]})))
    assert result.exit_code == 2
    assert "spec.accelerator.products[0]: H200: " in result.stdout
    assert f"the label of nodes is meant, so write {H200}" in result.stdout


def test_nodes_in_a_file_may_have_short_names(specdecode: Specdecode, write: WriteObject) -> None:
    def node(product: str) -> str:
        metadata = {"name": product.lower(), "labels": {"nvidia.com/gpu.product": product}}
        body = {"apiVersion": "v1", "kind": "Node", "metadata": metadata}
        return yaml.safe_dump({**body, "status": {"allocatable": {"nvidia.com/gpu": "8"}}})

    path = write("a.yaml", manifest("a", **SMALL))
    nodes = write("nodes.yaml", node("H100"), node("H200"))
    assert {each["product"] for each in candidates(specdecode, path, "--nodes", nodes)} == {H100, H200}
    told = specdecode("plan", path, "--nodes", write("other.yaml", node("A100"))).stdout
    assert "no memory figures are known" in told, "there are A100 of 40 and of 80 GB"
