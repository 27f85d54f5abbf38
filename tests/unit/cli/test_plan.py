"""`specdecode plan`: tables, exit codes, what it reads and what it refuses."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from specdecode_operator.sizing.arithmetic import GIB
from specdecode_operator.vllm.profiles import KNOWN_VERSIONS
from tests.support.llama import SMALL_CONFIG
from tests.unit.cli.conftest import Specdecode, WriteObject, manifest

H100, H200 = "NVIDIA-H100-80GB-HBM3", "NVIDIA-H200"
FP8_TARGET = {"target": {"model": "meta-llama/Llama-3.1-70B-Instruct", "quantization": "FP8"}}
SMALL_TARGET = {"target": {"model": "meta-llama/Llama-3.1-8B-Instruct"}, "speculation": None}


def only(product: str) -> dict[str, Any]:
    return {"accelerator": {"products": [product]}}


def row(text: str, label: str) -> list[str]:
    """Cells of the table's row with this label."""
    (line,) = (line for line in text.splitlines() if line.startswith(f"  {label}"))
    return line.removeprefix(f"  {label}").split()


def tight_length(specdecode: Specdecode, write: WriteObject) -> int:
    """A length whose KV cache fits only without the margin, from what the plan itself says of its room."""
    path = write("room.yaml", manifest("room", **FP8_TARGET, **only(H100)))
    (answer,) = json.loads(specdecode("plan", "-f", path, "-o", "json").stdout)["objects"]
    candidate = answer["candidates"][0]
    room = candidate["per_gpu"]["available_kv"] - candidate["margin_bytes"] // 2
    return room // candidate["kv_bytes_per_token"] // 16 * 16


def test_the_articles_case_is_laid_out_by_term(specdecode: Specdecode, write: WriteObject) -> None:
    result = specdecode("plan", "-f", write("llama-70b.yaml", manifest("llama-70b")))
    assert result.exit_code == 0
    heading = result.stdout.splitlines()[0]
    assert heading == (
        "llama-70b   Llama-3.1-70B-Instruct BF16 + draft Llama-3.1-8B-Instruct BF16, K=5, vLLM 0.33, length 8192"
    )
    assert "2 x H200, TP 2   2 x H100, TP 2" in result.stdout
    assert row(result.stdout, "budget (92 %)") == ["128.62", "72.85"]
    assert row(result.stdout, "target weights") == ["65.74", "65.74"]
    assert row(result.stdout, "draft weights") == ["7.48", "7.48"]
    assert row(result.stdout, "verdict") == ["Fits", "DoesNotFit"]
    assert row(result.stdout, "tokens / full requests")[-1] == "-"
    terms = ("target weights", "draft weights", "state, activation, graphs, NCCL", "left for KV cache")
    for column, budget in enumerate((128.62, 72.85)):
        total = sum(float(row(result.stdout, term)[column]) for term in terms)
        assert total == pytest.approx(budget, abs=0.03)


def test_what_does_not_fit_gets_the_least_change_first(specdecode: Specdecode, write: WriteObject) -> None:
    result = specdecode("plan", "-f", write("a.yaml", manifest("a", **only(H100))))
    assert result.exit_code == 4
    _, _, list_of_changes = result.stdout.partition("Smallest change first:\n")
    changes = [line.partition("->")[0].strip() for line in list_of_changes.splitlines() if "->" in line]
    assert changes[0] == "target.quantization: FP8"
    assert "parallelism.tensor: 4" in changes


def test_the_draft_costs_what_the_advice_says(specdecode: Specdecode, write: WriteObject) -> None:
    with_draft = manifest("with", **FP8_TARGET, **only(H100))
    alone = manifest("alone", **FP8_TARGET, **only(H100), speculation=None)
    tokens = {}
    for body in (with_draft, alone):
        data = json.loads(specdecode("plan", "-f", write("a.yaml", body), "-o", "json").stdout)
        tokens[body["metadata"]["name"]] = data["objects"][0]["candidates"][0]["kv_cache_tokens"]
    text = specdecode("plan", "-f", write("a.yaml", with_draft)).stdout
    share = 1 - tokens["with"] / tokens["alone"]
    assert f"the draft takes {100 * share:.0f} % of the token capacity: {tokens['with']:,} tokens are left" in text
    assert f"of the {tokens['alone']:,} that the target would have alone" in text
    assert "[draft-kv]" in text


def test_a_tight_plan_warns_and_fails_only_when_strict(specdecode: Specdecode, write: WriteObject) -> None:
    serving = {"maxModelLen": min(tight_length(specdecode, write), 131_072)}
    tight = manifest("tight", **FP8_TARGET, **only(H100), serving=serving)
    path = write("tight.yaml", tight)
    assert row(specdecode("plan", "-f", path).stdout, "verdict") == ["Tight"]
    result = specdecode("plan", "-f", path)
    assert result.exit_code == 0
    assert "warning: tight is tight" in result.stderr
    assert specdecode("plan", "-f", path, "--strict").exit_code == 3


@pytest.mark.parametrize(
    ("engine", "told"),
    [
        ({"version": "0.99", "image": "i:1"}, "spec.engine.version: 0.99: is untested: it is launched and sized as"),
        ({"version": "0.32", "image": "vllm/vllm-openai:v0.31.0"}, "spec.engine.image: vllm/vllm-openai:v0.31.0: is"),
    ],
    ids=str,
)
def test_a_vllm_in_doubt_is_told_and_fails_only_when_strict(
    specdecode: Specdecode, write: WriteObject, engine: dict[str, str], told: str
) -> None:
    path = write("a.yaml", manifest("small", **SMALL_TARGET, **only(H100), engine=engine))
    result = specdecode("plan", "-f", path)
    assert result.exit_code == 0
    assert f"warning: small: {told}" in result.stderr
    # Both go to the same terminal.
    assert told not in " ".join(result.stdout.split())
    strict = specdecode("plan", "-f", path, "--strict")
    assert strict.exit_code == 3
    assert f"error: --strict: small: {told}" in strict.stderr
    assert strict.stdout == result.stdout
    (found,) = json.loads(specdecode("lint", path, "-o", "json").stdout)["findings"]
    assert (found["level"], found["field"]) == ("warning", told.partition(": ")[0])
    assert specdecode("lint", path, "--strict").exit_code == 3


def test_a_version_that_nobody_knows_has_more_margin(specdecode: Specdecode, write: WriteObject) -> None:
    margins = {}
    for version in (KNOWN_VERSIONS[-1], "0.99"):
        body = manifest("small", **SMALL_TARGET, **only(H100), engine={"version": version, "image": "i:1"})
        data = json.loads(specdecode("plan", "-f", write("a.yaml", body), "-o", "json").stdout)
        (margins[version],) = {each["margin_bytes"] for each in data["objects"][0]["candidates"]}
    assert margins["0.99"] == margins[KNOWN_VERSIONS[-1]] + 3 * GIB // 2


def test_options_plan_for_a_version_that_nobody_knows(specdecode: Specdecode) -> None:
    options = ("--model", "meta-llama/Llama-3.1-8B-Instruct", "--gpu", "H100", "--engine-version")
    result = specdecode("plan", *options, "0.99")
    assert result.exit_code == 0
    assert "vLLM 0.99, sized as the newest known version" in result.stdout
    assert specdecode("plan", *options, "0.27").exit_code == specdecode("plan", *options, "new").exit_code == 2


def test_without_accelerator_it_answers_for_h100_and_h200(specdecode: Specdecode, write: WriteObject) -> None:
    body = manifest("small", **SMALL_TARGET, parallelism={})
    data = json.loads(specdecode("plan", "-f", write("a.yaml", body), "-o", "json").stdout)
    candidates = data["objects"][0]["candidates"]
    assert {(each["product"], each["gpus"]) for each in candidates} == {
        (product, gpus) for product in (H100, H200) for gpus in (1, 2, 4, 8)
    }


def test_the_matrix_shows_every_split(specdecode: Specdecode, write: WriteObject) -> None:
    path = write("a.yaml", manifest("small", **SMALL_TARGET, parallelism={}))
    assert "8 x H100, TP 8" not in specdecode("plan", "-f", path).stdout
    assert "8 x H100, TP 8" in specdecode("plan", "-f", path, "--matrix").stdout


def test_yaml_and_json_say_the_same(specdecode: Specdecode, write: WriteObject) -> None:
    path = write("a.yaml", manifest("a"))
    as_json = json.loads(specdecode("plan", "-f", path, "-o", "json").stdout)
    assert as_json == yaml.safe_load(specdecode("plan", "-f", path, "-o", "yaml").stdout)
    per_gpu = as_json["objects"][0]["candidates"][0]["per_gpu"]
    charged = sum(size for term, size in per_gpu.items() if term not in ("total", "requested", "available_kv"))
    assert per_gpu["requested"] - charged == per_gpu["available_kv"]


def test_a_folder_gets_a_line_an_object_and_fails_on_the_worst(
    specdecode: Specdecode, write: WriteObject, tmp_path: Path
) -> None:
    write("repo/apps/a.yaml", {"apiVersion": "v1", "kind": "Service"}, manifest("fits", **FP8_TARGET))
    write("repo/apps/deep/b.yml", manifest("large", **only(H100)))
    write("repo/.github/workflow.yaml", "not: [yaml")
    write("repo/values.txt", "not: [yaml")
    result = specdecode("plan", "-f", tmp_path / "repo")
    assert result.exit_code == 4
    assert [line.split()[:2] for line in result.stdout.splitlines()] == [["fits", "Fits"], ["large", "DoesNotFit"]]


def test_lines_of_several_name_the_namespace_and_where_to_look(specdecode: Specdecode, write: WriteObject) -> None:
    fits, not_fitting, invalid = manifest("a"), manifest("a", **only(H100)), manifest("c", target={"model": "no/such"})
    fits["metadata"]["namespace"], not_fitting["metadata"]["namespace"] = "one", "two"
    path = write("all.yaml", fits, not_fitting, invalid)
    result = specdecode("plan", "-f", path)
    first, second, third = result.stdout.splitlines()
    assert first.startswith("one/a ")
    assert "all.yaml" not in first
    assert second.startswith("two/a ")
    assert second.endswith(f"({path}, document 2)")
    assert third.startswith("c ")
    assert third.endswith(f"({path}, document 3)")
    names = [each["name"] for each in json.loads(specdecode("plan", "-f", path, "-o", "json").stdout)["objects"]]
    assert names == ["a", "a", "c"]


def test_products_that_are_there_already_are_no_fix(specdecode: Specdecode, write: WriteObject) -> None:
    path = write("a.yaml", manifest("a"))
    text = specdecode("plan", "-f", path).stdout
    assert "2 x H100" in text
    assert "Smallest change first:" in text
    assert "accelerator.products:" not in text
    fixes = json.loads(specdecode("plan", "-f", path, "-o", "json").stdout)["objects"][0]["fixes"]
    assert not [fix for each in fixes.values() for fix in each if fix["change"].startswith("accelerator.products")]
    alone = specdecode("plan", "-f", write("b.yaml", manifest("b", **only(H100)))).stdout
    assert f"accelerator.products: [{H200}]" in alone


def test_it_says_where_estimates_are_not_confirmed(specdecode: Specdecode, write: WriteObject) -> None:
    line = "Estimates for vLLM 0.33 are not confirmed by public logs, so the plan keeps a margin of 1.50 GiB per GPU"
    path = write("a.yaml", manifest("a", **SMALL_TARGET))
    assert line in specdecode("plan", "-f", path).stdout
    (answer,) = json.loads(specdecode("plan", "-f", path, "-o", "json").stdout)["objects"]
    assert {candidate["calibrated"] for candidate in answer["candidates"]} == {False}


def test_an_invalid_object_is_worse_than_one_that_does_not_fit(specdecode: Specdecode, write: WriteObject) -> None:
    invalid = manifest("invalid", target={"model": "no model"})
    result = specdecode("plan", "-f", write("a.yaml", manifest("large", **only(H100)), invalid))
    assert result.exit_code == 2
    assert [line.split()[:2] for line in result.stdout.splitlines()] == [
        ["large", "DoesNotFit"],
        ["invalid", "Invalid"],
    ]


def test_a_misspelt_field_is_named(specdecode: Specdecode, write: WriteObject) -> None:
    result = specdecode("plan", "-f", write("a.yaml", manifest("a", serving={"maxModelLength": 8192})))
    assert result.exit_code == 2
    assert "spec.serving.maxModelLength" in result.stdout


def test_a_template_is_an_error_and_the_rest_is_planned(specdecode: Specdecode, write: WriteObject) -> None:
    write("chart/a.yaml", manifest("fits", **FP8_TARGET))
    folder = write("chart/b.yaml", manifest("also", **FP8_TARGET), "{{ if .Values.on }}\na: {{ .Values.b }}\n").parent
    result = specdecode("plan", "-f", folder)
    assert result.exit_code == 2
    assert [line.split()[0] for line in result.stdout.splitlines()] == ["fits", "also"]
    (error,) = result.stderr.splitlines()
    assert "b.yaml, document 2: is a template" in error


@pytest.mark.parametrize("content", ["a: [1", "\x00", "a: b: c", "- &a [*a", "? {a"])
def test_what_is_no_yaml_is_one_line_of_error(specdecode: Specdecode, write: WriteObject, content: str) -> None:
    result = specdecode("plan", "-f", write("a.yaml", content))
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1
    assert "a.yaml, document 1: is no YAML" in result.stderr


def test_another_api_version_is_an_error_and_not_passed_over(specdecode: Specdecode, write: WriteObject) -> None:
    other = {**manifest("other"), "apiVersion": "specdecode.io/v9"}
    result = specdecode("plan", "-f", write("a.yaml", other, manifest("fits", **FP8_TARGET)))
    assert result.exit_code == 2
    assert "document 1: apiVersion: specdecode.io/v9: use specdecode.io/v1alpha1" in result.stderr
    assert result.stdout.startswith("fits")


def test_no_object_and_no_file_are_errors(specdecode: Specdecode, write: WriteObject, tmp_path: Path) -> None:
    for path in (write("a.yaml", {"kind": "Service"}), tmp_path / "absent.yaml"):
        result = specdecode("plan", "-f", path)
        assert result.exit_code == 2
        assert path.name in result.stderr


def test_standard_input_and_lists_are_read(specdecode: Specdecode) -> None:
    listed = {"apiVersion": "v1", "kind": "List", "items": [manifest("one", **FP8_TARGET), manifest("two")]}
    result = specdecode("plan", "-f", "-", stdin=yaml.safe_dump(listed))
    assert result.exit_code == 0
    assert [line.split()[0] for line in result.stdout.splitlines()] == ["one", "two"]


def node(name: str, product: str, gpus: int) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": {"nvidia.com/gpu.product": product}},
        "status": {"allocatable": {"nvidia.com/gpu": str(gpus)}},
    }


def test_it_plans_for_the_nodes_that_there_are(specdecode: Specdecode, write: WriteObject) -> None:
    listed = {"apiVersion": "v1", "kind": "List", "items": [node("a", H100, 4), node("b", H100, 2)]}
    path = write("a.yaml", manifest("a", **FP8_TARGET, parallelism={}))
    for nodes in (write("nodes.yaml", listed), write("nodes.json", json.dumps(listed))):
        data = json.loads(specdecode("plan", "-f", path, "--nodes", nodes, "-o", "json").stdout)
        assert {(each["product"], each["gpus"]) for each in data["objects"][0]["candidates"]} == {
            (H100, gpus) for gpus in (1, 2, 4)
        }


def test_nodes_without_such_gpus_are_no_place_for_it(specdecode: Specdecode, write: WriteObject) -> None:
    path = write("a.yaml", manifest("a", **only(H200)))
    result = specdecode("plan", "-f", path, "--nodes", write("nodes.yaml", node("a", H100, 8)))
    assert result.exit_code == 4
    assert "DoesNotFit" in result.stdout
    assert H200 in result.stdout


def test_a_file_without_nodes_is_an_error(specdecode: Specdecode, write: WriteObject) -> None:
    path = write("a.yaml", manifest("a"))
    result = specdecode("plan", "-f", path, "--nodes", path)
    assert result.exit_code == 2
    assert "kubectl get nodes -o yaml" in result.stderr


def test_a_config_beside_the_file_stands_in_for_the_catalogue(specdecode: Specdecode, write: WriteObject) -> None:
    path = write("a.yaml", manifest("a", target={"model": "my/model"}, speculation=None))
    unknown = specdecode("plan", "-f", path)
    assert unknown.exit_code == 5
    assert "my/model" in unknown.stdout
    config = write("config.json", json.dumps(SMALL_CONFIG))
    assert specdecode("plan", "-f", path, "--model-config", f"my/model={config}").exit_code == 0
    assert specdecode("plan", "-f", path, "--model-config", f"{config}").exit_code == 2


def test_cpu_needs_no_nodes(specdecode: Specdecode, write: WriteObject) -> None:
    spec = {
        "target": {"model": "my/model", "config": SMALL_CONFIG},
        "speculation": None,
        "parallelism": {},
        "accelerator": {"type": "CPU", "cpuCores": 4, "memoryGiB": 16, "kvCacheGiB": 2},
        "engine": {"image": "example.org/engine:1"},
        "serving": {"blockSize": 128, "maxModelLen": 4096},
    }
    result = specdecode("plan", "-f", write("a.yaml", manifest("a", **spec)))
    assert result.exit_code == 0
    assert row(result.stdout, "KV cache") == ["2.00"]
    assert "confirmed" not in result.stdout, "nothing is estimated for GPUs"


def test_a_plan_loads_no_cluster_client_and_no_other_command(write: WriteObject) -> None:
    path = write("a.yaml", manifest("a"))
    heavy = {"kopf", "kubernetes", "httpx", "jinja2", "matplotlib", "numpy", "prompt_toolkit", "torch", "vllm"}
    heavy |= {"asyncio", "prometheus_api_client", "requests", "rich"}
    heavy |= {f"specdecode_operator.cli.{each}" for each in ("capture.commands", "estimate", "lint", "plan.data")}
    code = (
        "import sys; from specdecode_operator.cli.main import app\n"
        f"try: app(['plan', '-f', {str(path)!r}])\n"
        "except SystemExit: pass\n"
        f"print(sorted({heavy} & set(sys.modules)))"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert finished.stdout.splitlines()[-1] == "[]"


def test_a_choice_of_precision_is_made_and_shown(specdecode: Specdecode, write: WriteObject) -> None:
    target = {"model": "meta-llama/Llama-3.1-70B-Instruct", "quantization": "Auto"}
    path = write(
        "auto.yaml", manifest("auto", target=target, **only(H100), objective="Cost", parallelism={"tensor": 2})
    )
    shown = specdecode("plan", "-f", path)
    assert shown.exit_code == 0
    assert "Llama-3.1-70B-Instruct FP8" in shown.stdout
    candidates = json.loads(specdecode("plan", "-f", path, "-o", "json").stdout)["objects"][0]["candidates"]
    assert [(each["target_precision"], each["verdict"]) for each in candidates] == [
        ("FP8", "Fits"),
        ("BF16", "DoesNotFit"),
    ]
    assert "2 x H100, TP 2, FP8 + BF16" in specdecode("plan", "-f", path, "--matrix").stdout


EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.mark.parametrize("command", ["plan", "explain"])
@pytest.mark.parametrize("option", [(), ("-f",)], ids=["without -f", "with -f"])
def test_the_shipped_folder_is_planned(specdecode: Specdecode, command: str, option: tuple[str, ...]) -> None:
    result = specdecode(command, *option, EXAMPLES)
    assert (result.exit_code, result.stderr) == (0, "")
    assert "llama-70b" in result.stdout


def test_captures_alone_are_no_deployment(specdecode: Specdecode) -> None:
    result = specdecode("plan", EXAMPLES / "capture-tiny.yaml")
    assert result.exit_code == 2
    assert "holds no SpecDecodeDeployment but SpecDecodeCapture (specdecode.io/v1alpha1)" in result.stderr
    assert "name that of its deployment; specdecode lint and render take both files" in result.stderr


def test_without_a_file_it_is_said_how_to_name_one(specdecode: Specdecode) -> None:
    result = specdecode("plan")
    assert result.exit_code == 2
    assert "name a file, a folder, or -" in " ".join(result.stderr.split())


def test_a_checkpoint_that_is_published_quantized_is_sized_so(specdecode: Specdecode, write: WriteObject) -> None:
    body = manifest(
        "kimi", target={"model": "moonshotai/Kimi-K2-Thinking"}, parallelism={}, speculation=None, **only(H200)
    )
    (answer,) = json.loads(specdecode("plan", "-f", write("kimi.yaml", body), "-o", "json").stdout)["objects"]
    best = answer["candidates"][0]
    assert (answer["verdict"], best["gpus"], best["target_precision"]) == ("Fits", 8, "INT4")
