"""`specdecode plan`."""

import json
import re
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml
from markdown_it import MarkdownIt
from markdown_it.token import Token
from matplotlib.figure import Figure
from pydantic.alias_generators import to_camel

from specdecode_operator.api.base import ApiModel
from specdecode_operator.api.crds import structural_schema
from specdecode_operator.api.deployment import Parallelism, Serving
from specdecode_operator.api.deployment_status import PlanStatus
from specdecode_operator.cli.outputs import code
from specdecode_operator.cli.plan.batch_output import CaseOutput
from specdecode_operator.cli.plan.data import CandidateOutput, FixOutput, PrecisionOutput
from tests.support.devices import GPUS, claiming, gpu, resource_slice
from tests.support.golden import EXAMPLES, ROOT
from tests.support.imported_modules import run_and_see_imports
from tests.support.llama import SMALL_CONFIG
from tests.support.objects import Body
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


def test_table_lists_the_memory_terms_of_each_placement(specdecode: Specdecode, write: WriteObject) -> None:
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


def startup(specdecode: Specdecode, path: str, *options: str) -> dict[str, Any]:
    """Start-up time of the only object."""
    (answer,) = json.loads(specdecode("plan", "-f", path, "-o", "json", *options).stdout)["objects"]
    found: dict[str, Any] = answer["startup"]
    return found


def test_startup_time_is_part_of_the_plan(specdecode: Specdecode, write: WriteObject) -> None:
    path = write("small.yaml", manifest("small", **SMALL_TARGET, **only(H100)))
    found = startup(specdecode, path)
    phases = found["phases"]
    assert list(phases) == ["image", "download", "process", "load", "compile", "warm-up", "graphs"]
    for total, names in (("preparation", ["image", "download"]), ("engine", list(phases)[2:])):
        for end in ("fastest_s", "slowest_s"):
            assert found[total][end] == sum(phases[name][end] for name in names)
    assert found["engine"]["slowest_s"] <= found["deadline_s"]
    (line,) = (
        line for line in specdecode("plan", "-f", path).stdout.splitlines() if line.startswith("Estimated start-up")
    )
    assert all(name in line for name in ("image pull", "download", "load", "compile", "warm-up", "graphs", "allows"))


def test_models_on_a_volume_are_not_downloaded(specdecode: Specdecode, write: WriteObject) -> None:
    volume = {"persistentVolumeClaim": {"claimName": "models"}}
    spec = {**SMALL_TARGET, **only(H100), "models": {"volume": volume}}
    config = {"target": {**SMALL_TARGET["target"], "model": "llama", "config": SMALL_CONFIG}}
    assert "download" not in startup(specdecode, write("a.yaml", manifest("a", **{**spec, **config})))["phases"]


def test_compile_cache_speeds_up_later_starts(specdecode: Specdecode, write: WriteObject) -> None:
    cache = {"persistentVolumeClaim": {"claimName": "hub-cache"}}
    spec = {**SMALL_TARGET, **only(H100)}
    alone = startup(specdecode, write("a.yaml", manifest("a", **spec)))["phases"]
    cached = startup(specdecode, write("b.yaml", manifest("b", **spec, models={"cache": cache})))["phases"]
    for phase in ("download", "compile"):
        assert cached[phase]["fastest_s"] < alone[phase]["fastest_s"]
        assert cached[phase]["slowest_s"] == alone[phase]["slowest_s"]


def test_slow_storage_is_warned_of(specdecode: Specdecode, write: WriteObject) -> None:
    path = write("small.yaml", manifest("small", **SMALL_TARGET, **only(H100)))
    fast = specdecode("plan", "-f", path, "--read-rate", "2000", "--strict")
    assert fast.exit_code == 0
    slow = specdecode("plan", "-f", path, "--read-rate", "10", "--strict")
    assert slow.exit_code == 3
    assert "[slow-start]" in slow.stderr
    found = startup(specdecode, path, "--read-rate", "10")
    assert found["deadline_s"] < found["phases"]["load"]["fastest_s"]


@pytest.mark.parametrize("rate", ["0", "-1", "fast", "1e9", "99999999"])
@pytest.mark.parametrize("option", ["--read-rate", "--download-rate"])
def test_bad_rate_is_rejected(specdecode: Specdecode, write: WriteObject, option: str, rate: str) -> None:
    answer = specdecode("plan", "-f", write("a.yaml", manifest("a", **SMALL_TARGET, **only(H100))), option, rate)
    assert answer.exit_code == 2
    assert option in answer.stderr


def test_startup_time_on_cpu_and_of_a_plan_that_does_not_fit_is_unknown(
    specdecode: Specdecode, write: WriteObject
) -> None:
    assert startup(specdecode, str(EXAMPLES / "tiny-cpu.yaml")) is None
    assert startup(specdecode, write("a.yaml", manifest("a", **only(H100)))) is None


def test_plan_that_does_not_fit_lists_the_smallest_change_first(specdecode: Specdecode, write: WriteObject) -> None:
    result = specdecode("plan", "-f", write("a.yaml", manifest("a", **only(H100))))
    assert result.exit_code == 4
    _, _, list_of_changes = result.stdout.partition("Smallest change first:\n")
    changes = [line.partition("->")[0].strip() for line in list_of_changes.splitlines() if "->" in line]
    assert changes[0] == "target.quantization: FP8"
    assert "parallelism.tensor: 4" in changes


def test_advice_states_the_kv_cache_cost_of_the_draft(specdecode: Specdecode, write: WriteObject) -> None:
    with_draft = manifest("with", **FP8_TARGET, **only(H100))
    alone = manifest("alone", **FP8_TARGET, **only(H100), speculation=None)
    tokens = {}
    for body in (with_draft, alone):
        data = json.loads(specdecode("plan", "-f", write("a.yaml", body), "-o", "json").stdout)
        tokens[body["metadata"]["name"]] = data["objects"][0]["candidates"][0]["kv_cache_tokens"]
    text = specdecode("plan", "-f", write("a.yaml", with_draft)).stdout
    share = 1 - tokens["with"] / tokens["alone"]
    assert f"the draft costs {100 * share:.0f} % of the KV cache capacity" in text
    assert f"{tokens['with']:,} of {tokens['alone']:,} tokens remain" in text
    assert "[draft-kv]" in text


def test_tight_plan_warns_and_fails_only_with_strict(specdecode: Specdecode, write: WriteObject) -> None:
    serving = {"maxModelLen": min(tight_length(specdecode, write), 131_072)}
    tight = manifest("tight", **FP8_TARGET, **only(H100), serving=serving)
    path = write("tight.yaml", tight)
    assert row(specdecode("plan", "-f", path).stdout, "verdict") == ["Tight"]
    result = specdecode("plan", "-f", path)
    assert result.exit_code == 0
    assert result.stderr.splitlines()[0] == "warning: tight is tight"
    assert result.output.count("to spare where the estimate may err") == 1
    assert specdecode("plan", "-f", path, "--strict").exit_code == 3


@pytest.mark.parametrize(
    ("engine", "told"),
    [
        ({"version": "0.99", "image": "i:1"}, "spec.engine.version: 0.99: is untested, so it is launched and sized as"),
        ({"version": "0.32", "image": "vllm/vllm-openai:v0.31.0"}, "spec.engine.image: vllm/vllm-openai:v0.31.0: is"),
    ],
    ids=str,
)
def test_untested_vllm_version_warns_and_fails_only_with_strict(
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


def test_unknown_engine_version_is_sized_as_the_newest_known(specdecode: Specdecode) -> None:
    options = ("--model", "meta-llama/Llama-3.1-8B-Instruct", "--gpu", "H100", "--engine-version")
    result = specdecode("plan", *options, "0.99")
    assert result.exit_code == 0
    assert "vLLM 0.99, sized as the newest known version" in result.stdout
    assert specdecode("plan", *options, "0.27").exit_code == specdecode("plan", *options, "new").exit_code == 2


def test_plan_without_accelerator_covers_h100_and_h200(specdecode: Specdecode, write: WriteObject) -> None:
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


def test_yaml_and_json_output_are_equal(specdecode: Specdecode, write: WriteObject) -> None:
    path = write("a.yaml", manifest("a"))
    as_json = json.loads(specdecode("plan", "-f", path, "-o", "json").stdout)
    assert as_json == yaml.safe_load(specdecode("plan", "-f", path, "-o", "yaml").stdout)
    per_gpu = as_json["objects"][0]["candidates"][0]["per_gpu"]
    charged = sum(size for term, size in per_gpu.items() if term not in ("total", "requested", "available_kv"))
    assert per_gpu["requested"] - charged == per_gpu["available_kv"]


def test_folder_has_a_line_per_object_and_the_worst_exit_code(
    specdecode: Specdecode, write: WriteObject, tmp_path: Path
) -> None:
    write("repo/apps/a.yaml", {"apiVersion": "v1", "kind": "Service"}, manifest("fits", **FP8_TARGET))
    write("repo/apps/deep/b.yml", manifest("large", **only(H100)))
    write("repo/.github/workflow.yaml", "not: [yaml")
    write("repo/values.txt", "not: [yaml")
    result = specdecode("plan", "-f", tmp_path / "repo")
    assert result.exit_code == 4
    assert [line.split()[:2] for line in result.stdout.splitlines()] == [["fits", "Fits"], ["large", "DoesNotFit"]]


def test_line_of_each_object_names_namespace_and_document(specdecode: Specdecode, write: WriteObject) -> None:
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


def test_fix_never_names_products_that_are_already_allowed(specdecode: Specdecode, write: WriteObject) -> None:
    path = write("a.yaml", manifest("a"))
    text = specdecode("plan", "-f", path).stdout
    assert "2 x H100" in text
    assert "Smallest change first:" in text
    assert "accelerator.products:" not in text
    fixes = json.loads(specdecode("plan", "-f", path, "-o", "json").stdout)["objects"][0]["fixes"]
    assert not [fix for each in fixes.values() for fix in each if fix["change"].startswith("accelerator.products")]
    alone = specdecode("plan", "-f", write("b.yaml", manifest("b", **only(H100)))).stdout
    assert f"accelerator.products: [{H200}]" in alone


def test_unconfirmed_estimates_are_marked(specdecode: Specdecode, write: WriteObject) -> None:
    path = write("a.yaml", manifest("a", **SMALL_TARGET))
    (line,) = (line for line in specdecode("plan", "-f", path).stdout.splitlines() if "estimates for vLLM" in line)
    title = (ROOT / "docs/design/accuracy.md").read_text().partition("\n")[0].removeprefix("# ")
    assert "0.33" in line
    assert "1.50 GiB per GPU" in line
    assert f'"{title}"' in line
    (answer,) = json.loads(specdecode("plan", "-f", path, "-o", "json").stdout)["objects"]
    assert {candidate["calibrated"] for candidate in answer["candidates"]} == {False}


def test_exit_code_of_invalid_wins_over_does_not_fit(specdecode: Specdecode, write: WriteObject) -> None:
    invalid = manifest("invalid", target={"model": "no model"})
    result = specdecode("plan", "-f", write("a.yaml", manifest("large", **only(H100)), invalid))
    assert result.exit_code == 2
    assert [line.split()[:2] for line in result.stdout.splitlines()] == [
        ["large", "DoesNotFit"],
        ["invalid", "Invalid"],
    ]


def test_helm_template_is_an_error_and_other_objects_are_planned(specdecode: Specdecode, write: WriteObject) -> None:
    write("chart/a.yaml", manifest("fits", **FP8_TARGET))
    folder = write("chart/b.yaml", manifest("also", **FP8_TARGET), "{{ if .Values.on }}\na: {{ .Values.b }}\n").parent
    result = specdecode("plan", "-f", folder)
    assert result.exit_code == 2
    assert [line.split()[0] for line in result.stdout.splitlines()] == ["fits", "also"]
    (error,) = result.stderr.splitlines()
    assert "b.yaml, document 2: is a template" in error


@pytest.mark.parametrize("content", ["a: [1", "\x00", "a: b: c", "- &a [*a", "? {a"])
def test_invalid_yaml_is_a_one_line_error(specdecode: Specdecode, write: WriteObject, content: str) -> None:
    result = specdecode("plan", "-f", write("a.yaml", content))
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1
    assert "a.yaml, document 1: is not valid YAML" in result.stderr


def test_unknown_api_version_is_an_error(specdecode: Specdecode, write: WriteObject) -> None:
    other = {**manifest("other"), "apiVersion": "specdecode.io/v9"}
    result = specdecode("plan", "-f", write("a.yaml", other, manifest("fits", **FP8_TARGET)))
    assert result.exit_code == 2
    assert "document 1: apiVersion: specdecode.io/v9: use specdecode.io/v1alpha1" in result.stderr
    assert result.stdout.startswith("fits")


def test_missing_object_or_file_is_an_error(specdecode: Specdecode, write: WriteObject, tmp_path: Path) -> None:
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


def test_nodes_file_determines_the_candidates(specdecode: Specdecode, write: WriteObject) -> None:
    listed = {"apiVersion": "v1", "kind": "List", "items": [node("a", H100, 4), node("b", H100, 2)]}
    path = write("a.yaml", manifest("a", **FP8_TARGET, parallelism={}))
    for nodes in (write("nodes.yaml", listed), write("nodes.json", json.dumps(listed))):
        data = json.loads(specdecode("plan", "-f", path, "--nodes", nodes, "-o", "json").stdout)
        assert {(each["product"], each["gpus"]) for each in data["objects"][0]["candidates"]} == {
            (H100, gpus) for gpus in (1, 2, 4)
        }


def test_nodes_without_the_required_gpus_do_not_fit(specdecode: Specdecode, write: WriteObject) -> None:
    path = write("a.yaml", manifest("a", **only(H200)))
    result = specdecode("plan", "-f", path, "--nodes", write("nodes.yaml", node("a", H100, 8)))
    assert result.exit_code == 4
    assert "DoesNotFit" in result.stdout
    assert H200 in result.stdout


def test_nodes_file_without_nodes_is_an_error(specdecode: Specdecode, write: WriteObject) -> None:
    path = write("a.yaml", manifest("a"))
    result = specdecode("plan", "-f", path, "--nodes", path)
    assert result.exit_code == 2
    assert "kubectl get nodes -o yaml" in result.stderr


def test_model_config_option_sizes_an_unknown_model(specdecode: Specdecode, write: WriteObject) -> None:
    path = write("a.yaml", manifest("a", target={"model": "my/model"}, speculation=None))
    unknown = specdecode("plan", "-f", path)
    assert unknown.exit_code == 5
    assert "my/model" in unknown.stdout
    config = write("config.json", json.dumps(SMALL_CONFIG))
    assert specdecode("plan", "-f", path, "--model-config", f"my/model={config}").exit_code == 0
    assert specdecode("plan", "-f", path, "--model-config", f"{config}").exit_code == 2


def test_claims_are_planned_for_the_devices_in_the_file(specdecode: Specdecode, write: WriteObject) -> None:
    path = write("a.yaml", manifest("claims", accelerator=claiming()))
    fleet = {"kind": "List", "items": [GPUS, resource_slice("a", *[gpu()] * 8), node("b", H100, 8)]}
    result = specdecode("plan", "-f", path, "--nodes", write("fleet.yaml", fleet), "-o", "json")
    assert f"2 x {H200}" in result.stdout
    assert H100 not in result.stdout
    fleet["items"] = [GPUS, resource_slice("a", gpu("NVIDIA A100-SXM4-80GB", 81_920))]
    assert specdecode("plan", "-f", path, "--nodes", write("fleet.yaml", fleet)).exit_code != 0


def test_claim_that_no_device_in_the_file_satisfies_is_reported(specdecode: Specdecode, write: WriteObject) -> None:
    path = write("a.yaml", manifest("claims", accelerator=claiming(selectors=["device.driver == 'x'"])))
    fleet = write("fleet.yaml", {"kind": "List", "items": [GPUS, resource_slice("a", *[gpu()] * 8)]})
    assert (
        "spec.accelerator.resourceClaim: none of the devices" in specdecode("plan", "-f", path, "--nodes", fleet).stdout
    )
    assert "[NoMatchingDevices]" in specdecode("lint", "-f", path, "--nodes", fleet).stdout


def test_cpu_object_is_planned_without_nodes(specdecode: Specdecode, write: WriteObject) -> None:
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


def test_plan_imports_no_cluster_client_and_no_other_command(write: WriteObject) -> None:
    path = write("a.yaml", manifest("a"))
    heavy = {"kopf", "kubernetes", "httpx", "jinja2", "matplotlib", "numpy", "prompt_toolkit", "torch", "vllm"}
    heavy |= {"asyncio", "prometheus_api_client", "requests", "rich"}
    lazy = ("capture.commands", "lint", "plan.batch", "plan.data", "plan.plot")
    heavy |= {f"specdecode_operator.cli.{each}" for each in lazy}
    _, imported = run_and_see_imports(["plan", "-f", str(path)], heavy)
    assert imported == set()


@pytest.mark.parametrize("option", [(), ("-f",), ("--explain",)], ids=" ".join)
def test_examples_folder_is_planned(specdecode: Specdecode, option: tuple[str, ...]) -> None:
    result = specdecode("plan", *option, EXAMPLES)
    assert result.exit_code == 0
    told = [line.partition(": speculation on a CPU")[0] for line in result.stderr.splitlines()]
    assert [line for line in told if not line.startswith("note: ")] == ["warning: tiny", "warning: language"]
    assert "llama-70b" in result.stdout


def test_file_with_only_captures_is_an_error(specdecode: Specdecode) -> None:
    result = specdecode("plan", EXAMPLES / "capture-tiny.yaml")
    assert result.exit_code == 2
    assert "contains no SpecDecodeDeployment, only SpecDecodeCapture (specdecode.io/v1alpha1)" in result.stderr
    assert "use the file of the capture's deployment" in result.stderr


def test_plan_without_a_file_says_how_to_name_one(specdecode: Specdecode) -> None:
    result = specdecode("plan")
    assert result.exit_code == 2
    assert "use a file, a folder, or -" in " ".join(result.stderr.split())


# The changes that `plan` offers: each is applied to the object, and planned again.

GPT_OSS: dict[str, Any] = {
    "target": {"model": "openai/gpt-oss-120b"},
    "speculation": {
        "method": "eagle3",
        "numSpeculativeTokens": 3,
        "draft": {"model": "lmsys/EAGLE3-gpt-oss-120b-bf16"},
    },
    "parallelism": {"tensor": 1},
    "accelerator": {"products": [H100]},
    "serving": {"minConcurrency": 2},
}


def fixes(specdecode: Specdecode, write: WriteObject, body: dict[str, Any]) -> list[dict[str, Any]]:
    """What is offered for the first place."""
    (answer,) = json.loads(specdecode("plan", write("a.yaml", body), "-o", "json").stdout)["objects"]
    assert answer["verdict"] == "DoesNotFit", answer["problems"]
    return next(iter(answer["fixes"].values()), [])


def changed(body: dict[str, Any], changes: list[dict[str, Any]]) -> dict[str, Any]:
    """The object with its fields as a fix says; None removes one."""
    body = deepcopy(body)
    for change in changes:
        *parents, name = change["field"].split(".")
        place = body
        for parent in parents:
            place = place.setdefault(parent, {})
        if change["value"] is None:
            del place[name]
        else:
            place[name] = change["value"]
    return body


def large(name: str, **spec: Any) -> dict[str, Any]:
    """An example that fits nowhere any more, on H100 alone."""
    (body,) = (each for each in yaml.safe_load_all((EXAMPLES / f"{name}.yaml").read_text()) if each)
    serving = {**body["spec"].get("serving", {}), **spec.pop("serving", {})}
    body["spec"] |= {"accelerator": {"products": [H100]}, "serving": serving, **spec}
    return dict(body)


def with_draft(**more: Any) -> dict[str, Any]:
    speculation = {
        "method": "draft_model",
        "numSpeculativeTokens": 5,
        "draft": {"model": "meta-llama/Llama-3.1-8B-Instruct"},
    }
    return {**speculation, **more}


QWEN_NEXT = {
    "target": {"model": "Qwen/Qwen3-Next-80B-A3B-Instruct"},
    "speculation": with_draft(draft={"model": "Qwen/Qwen3-8B", "quantization": "FP8", "maxModelLen": 8192}),
    "parallelism": {"tensor": 4, "draftTensor": 4},
    "accelerator": {"products": [H100]},
    "serving": {"maxModelLen": 131_072, "minConcurrency": 8},
}
QWEN = {
    "target": {"model": "Qwen/Qwen3-8B"},
    "speculation": with_draft(
        draft={"model": "Qwen/Qwen3-1.7B", "quantization": "FP8"},
        numSpeculativeTokensByBatchSize=[{"from": 1, "to": 64, "numSpeculativeTokens": 2}],
        draftSampling="probabilistic",
    ),
    "parallelism": {"tensor": 1},
    "accelerator": {"products": [H100]},
    "serving": {"maxModelLen": 8192, "maxNumSeqs": 64, "minConcurrency": 35},
}
WHOLE_PROMPTS = {
    **GPT_OSS,
    "serving": {"maxModelLen": 16_384, "maxNumBatchedTokens": 16_384, "minConcurrency": 10},
    "engine": {"extraArgs": ["--no-enable-chunked-prefill"]},
}
AUTO = {
    "target": {"model": "meta-llama/Llama-3.1-8B-Instruct", "quantization": "Auto"},
    "speculation": with_draft(method="eagle3", draft={"model": "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"}),
    "parallelism": {"tensor": 1},
    "accelerator": {"products": ["NVIDIA-H200"]},
    "serving": {"maxModelLen": 131_072, "minConcurrency": 32, "kvCacheDtype": "fp8"},
}
DO_NOT_FIT = {
    "gpt-oss": manifest("gpt-oss", **GPT_OSS),
    "gpt-oss, any split": manifest("gpt-oss", **{**GPT_OSS, "parallelism": {}, "serving": {"minConcurrency": 200}}),
    "70B": large("llama-70b"),
    "70B, the plan chooses": large("llama-70b-auto", parallelism={"tensor": 1}),
    "8B, the plan chooses again": manifest("auto", **AUTO),
    "70B in FP8": large("llama-70b-fp8", serving={"minConcurrency": 40, "kvCacheDtype": "fp8"}),
    "405B": large("llama-405b-two-nodes", parallelism={"tensor": 8}),
    "an own head": large(
        "qwen3-8b-eagle3", serving={"maxModelLen": 40_960, "minConcurrency": 60}, parallelism={"tensor": 1}
    ),
    "own layers": large("qwen3-next-mtp", parallelism={"tensor": 2}),
    "an n-gram": large("llama-8b-ngram", serving={"minConcurrency": 60}, parallelism={"tensor": 1}),
    "a draft beside own layers": manifest("next", **QWEN_NEXT),
    "a draft beside a head": manifest("qwen", **QWEN),
    "adapters": manifest("lora", **QWEN, engine={"extraArgs": ["--enable-lora"]}),
    "whole prompts": manifest("whole", **WHOLE_PROMPTS),
    "CPU": large("tiny-cpu", accelerator={"type": "CPU", "cpuCores": 2, "memoryGiB": 2, "kvCacheGiB": 1}),
}


@pytest.mark.parametrize("body", DO_NOT_FIT.values(), ids=DO_NOT_FIT.keys())
def test_each_suggested_fix_gives_its_stated_verdict(
    specdecode: Specdecode, write: WriteObject, body: dict[str, Any]
) -> None:
    offered = fixes(specdecode, write, body)
    assert offered
    for fix in offered:
        result = specdecode("plan", write("b.yaml", changed(body, fix["changes"])), "-o", "json")
        (answer,) = json.loads(result.stdout)["objects"]
        assert answer["verdict"] == fix["verdict"], (fix["change"], answer["explanation"])
        assert answer["candidates"][0]["kv_cache_tokens"] == fix["kv_cache_tokens"], fix["change"]


def test_fixes_list_settings_before_gpus_and_mark_tight_ones(specdecode: Specdecode, write: WriteObject) -> None:
    """gpt-oss-120b with an EAGLE-3 head, two long requests on one H100: no second GPU is needed."""
    body = {**GPT_OSS, "engine": {"version": "0.32"}}
    offered = {fix["change"]: fix for fix in fixes(specdecode, write, manifest("gpt-oss", **body))}
    both = offered["serving.gpuMemoryUtilizationPercent: 95, serving.maxNumBatchedTokens: 2048"]
    assert (both["verdict"], both["kv_cache_tokens"]) == ("Tight", 262_732)
    cache = offered["serving.kvCacheDtype: fp8"]
    assert cache["verdict"] == "Fits"
    order = list(offered)
    assert max(order.index(both["change"]), order.index(cache["change"])) < order.index("parallelism.tensor: 2")
    assert not [change for change in order if "quantization" in change], "MXFP4 is as small as it gets"
    text = specdecode("plan", write("a.yaml", manifest("gpt-oss", **body))).stdout
    (line,) = (line for line in text.splitlines() if line.startswith(f"  {both['change']}  "))
    assert line.endswith("(tight)")


def test_fix_that_changes_the_draft_removes_its_old_fields(specdecode: Specdecode, write: WriteObject) -> None:
    own = [fix["change"] for fix in fixes(specdecode, write, DO_NOT_FIT["a draft beside own layers"])]
    assert "speculation.method: mtp, no speculation.draft" in own
    assert "speculation: {method: none}, no parallelism.draftTensor" in own
    assert "parallelism.tensor: 8, parallelism.draftTensor: 8" in own
    head = [fix["change"] for fix in fixes(specdecode, write, DO_NOT_FIT["a draft beside a head"])]
    assert "speculation.method: eagle3, speculation.draft: {model: AngelSlim/Qwen3-8B_eagle3}" in head


# GPUs by the names that people use, and by their memory.

SMALL = {"target": {"model": "meta-llama/Llama-3.1-8B-Instruct"}, "speculation": None, "parallelism": {}}


def candidates(specdecode: Specdecode, *arguments: object) -> list[dict[str, Any]]:
    result = specdecode("plan", *arguments, "-o", "json")
    assert result.exit_code in (0, 4), result.output
    return list(json.loads(result.stdout)["objects"][0]["candidates"])


@pytest.mark.parametrize("asked", ["48GiB", "48 gib", "48Gi", "48.0GiB"])
def test_gpu_given_by_memory_is_planned_as_uncalibrated(specdecode: Specdecode, asked: str) -> None:
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


def test_unknown_product_is_planned_by_its_given_memory(specdecode: Specdecode, write: WriteObject) -> None:
    path = write("a.yaml", manifest("a", **SMALL, accelerator={"products": ["NVIDIA-T1000"], "memoryGiBPerGPU": 48}))
    found = candidates(specdecode, path)
    assert {each["product"] for each in found} == {"NVIDIA-T1000"}
    assert all(each["uncalibrated_gpu"] and each["per_gpu"]["total"] == 48 * 2**30 for each in found)
    for option in ((), ("--explain",)):
        assert "uncalibrated" in specdecode("plan", *option, path).stdout
    assert "accelerator.memoryGiBPerGPU 48" in specdecode("plan", "--explain", path).stdout


def test_given_memory_of_a_known_product_is_ignored_with_a_warning(specdecode: Specdecode, write: WriteObject) -> None:
    accelerator = {"products": ["NVIDIA-H100-80GB-HBM3"], "memoryGiBPerGPU": 14}
    path = write("a.yaml", manifest("a", **SMALL, accelerator=accelerator))
    assert "accelerator.memoryGiBPerGPU 14 is ignored" in specdecode("lint", path).output
    unknown = {"products": ["NVIDIA-T1000"], "memoryGiBPerGPU": 48}
    path = write("b.yaml", manifest("b", **SMALL, accelerator=unknown))
    assert "is ignored" not in specdecode("lint", path).output


def test_unknown_product_without_memory_is_an_error(specdecode: Specdecode, write: WriteObject) -> None:
    path = write("a.yaml", manifest("a", **SMALL, accelerator={"products": ["NVIDIA-T1000"]}))
    result = specdecode("plan", path)
    assert result.exit_code == 2
    assert "spec.accelerator.products[0]" in result.output
    assert "set spec.accelerator.memoryGiBPerGPU" in result.output
    slice_of = {"products": ["NVIDIA-H200-MIG-1g.18gb"], "memoryGiBPerGPU": 16}
    assert "is a MIG slice" in specdecode("plan", write("b.yaml", manifest("b", accelerator=slice_of))).output


def test_gpu_option_overrides_the_products_of_the_file(specdecode: Specdecode, write: WriteObject) -> None:
    path = write("a.yaml", manifest("a", accelerator={"products": [H100]}))
    assert {each["product"] for each in candidates(specdecode, path)} == {H100}
    assert {each["product"] for each in candidates(specdecode, path, "--gpu", "H200")} == {H200}
    several = candidates(specdecode, path, "--gpu", "H200", "--gpu", "141GiB")
    assert {each["product"] for each in several} == {H200, "GPU of 141GiB"}


def test_gpu_option_overrides_the_products_of_a_replay(specdecode: Specdecode) -> None:
    replay = EXAMPLES / "replay.yaml"
    assert {each["product"] for each in candidates(specdecode, replay)} == {H200}
    asked = specdecode("plan", replay, "--gpu", "H100", "-o", "json")
    assert asked.exit_code == 4, asked.output
    (planned,) = json.loads(asked.stdout)["objects"]
    assert {each["product"] for each in planned["candidates"]} == {H100}
    assert "H200" not in planned["explanation"]
    text = specdecode("plan", replay, "--gpu", "H200", "--gpu", "H100").stdout
    assert "Runs on 2 x H200" in text
    assert f"2 x {H100} per replica (TP 2) does not fit" in text
    assert f"2 x {H200} per replica (TP 2) fits" not in text


@pytest.mark.parametrize(
    ("gpu", "words"),
    [
        ("48GB", "48GB: no memory figures are known for it: "),
        ("0GiB", "0GiB: no memory figures are known for it"),
        ("-4GiB", "no memory figures are known for it"),
        ("99999GiB", "no memory figures are known for it"),
        ("nanGiB", "give its memory as CUDA reports it, such as 48GiB"),
        ("A300", "give its memory as CUDA reports it, such as 48GiB"),
    ],
)
def test_invalid_gpu_option_is_refused(specdecode: Specdecode, write: WriteObject, gpu: str, words: str) -> None:
    for start in (("--model", "gpt2"), (write("a.yaml", manifest("a")),)):
        result = specdecode("plan", *start, "--gpu", gpu)
        assert result.exit_code == 2
        assert words in result.stderr
        assert result.stderr.count("\n") == 1


def test_nodes_and_gpu_options_exclude_each_other(specdecode: Specdecode, write: WriteObject) -> None:
    path = write("a.yaml", manifest("a"))
    result = specdecode("plan", path, "--gpu", "H200", "--nodes", path)
    assert (result.exit_code, "--nodes defines the GPUs; leave one" in result.stderr) == (2, True)


def test_short_product_name_in_a_manifest_is_an_error_with_the_label(
    specdecode: Specdecode, write: WriteObject
) -> None:
    """The scheduler compares it with the label, so nothing shorter can stand there."""
    result = specdecode("plan", write("a.yaml", manifest("a", accelerator={"products": ["H200"]})))
    assert result.exit_code == 2
    assert "spec.accelerator.products[0]: H200: " in result.stdout
    assert f"write the value of the node label nvidia.com/gpu.product: {H200}" in result.stdout


def test_nodes_file_may_use_short_product_names(specdecode: Specdecode, write: WriteObject) -> None:
    def node(product: str) -> str:
        metadata = {"name": product.lower(), "labels": {"nvidia.com/gpu.product": product}}
        body = {"apiVersion": "v1", "kind": "Node", "metadata": metadata}
        return yaml.safe_dump({**body, "status": {"allocatable": {"nvidia.com/gpu": "8"}}})

    path = write("a.yaml", manifest("a", **SMALL))
    nodes = write("nodes.yaml", node("H100"), node("H200"))
    assert {each["product"] for each in candidates(specdecode, path, "--nodes", nodes)} == {H100, H200}
    told = specdecode("plan", path, "--nodes", write("other.yaml", node("A100"))).stdout
    assert "no memory figures are known" in told, "there are A100 of 40 and of 80 GB"


# Figures of data-parallel engines are those of one copy, and every place says so.

FEW, MANY = {"maxModelLen": 8192}, {"maxModelLen": 8192, "minConcurrency": 100}


def copies(data: int, serving: Body) -> Body:
    """A pair in copies, with what is known of its requests."""
    workload = {"kind": "Chat", "promptTokens": 4000, "outputTokens": 400}
    return manifest("one", parallelism={"tensor": 2, "data": data}, serving=serving, workload=workload)


@pytest.mark.parametrize("serving", [FEW, MANY], ids=["fits", "does not fit"])
@pytest.mark.parametrize("command", [["plan"], ["plan", "--matrix"], ["plan", "--explain"]], ids=" ".join)
def test_capacity_with_data_parallelism_is_marked_per_copy(
    specdecode: Specdecode, write: WriteObject, command: list[str], serving: Body
) -> None:
    several, one = (specdecode(*command, "-f", write(f"{data}.yaml", copies(data, serving))).stdout for data in (4, 1))
    assert "per copy" not in one
    for line in several.splitlines():
        capacity = " requests of " in line or line.strip().startswith(("tokens", "full requests"))
        if capacity and "KV cache per copy" not in line:
            assert "per copy" in line, line
    assert "per copy" in several


def test_json_explanation_with_data_parallelism_says_per_copy(specdecode: Specdecode, write: WriteObject) -> None:
    answer: dict[str, Any] = json.loads(specdecode("plan", "-o", "json", "-f", write("a.yaml", copies(4, FEW))).stdout)
    (found,) = answer["objects"]
    assert "tokens per copy" in found["explanation"]
    assert found["candidates"][0]["data"] == 4


@pytest.mark.parametrize(
    ("model", "fields"),
    [
        (PlanStatus, ["kv_cache_tokens", "max_concurrency", "data"]),
        (Serving, ["max_num_seqs", "max_num_batched_tokens", "min_concurrency"]),
        (Parallelism, ["data"]),
        (CandidateOutput, ["kv_cache_tokens", "max_concurrency"]),
        (PrecisionOutput, ["kv_cache_tokens", "max_concurrency"]),
        (FixOutput, ["kv_cache_tokens", "max_concurrency"]),
        (CaseOutput, ["kv_cache_tokens", "max_concurrency"]),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_descriptions_of_per_replica_fields_say_so(model: Any, fields: list[str]) -> None:
    word = r"data-parallel\s+replica" if issubclass(model, ApiModel) else "cop"
    for field in fields:
        assert re.search(word, description(model, field).lower()), field


def description(model: Any, field: str) -> str:
    """What is said of a field where people read it: of an object's in its CRD, of a command's output in its schema."""
    if not issubclass(model, ApiModel):
        return str(model.model_fields[field].description)
    return str(structural_schema(model, {})["properties"][to_camel(field)]["description"])


# `specdecode plan --plot`: the memory of each candidate as a picture.


@pytest.mark.parametrize(("suffix", "beginning"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_plot_writes_a_png_or_svg_file(
    specdecode: Specdecode, write: WriteObject, tmp_path: Path, suffix: str, beginning: bytes
) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / f"plan.{suffix}"
    assert specdecode("plan", "-f", write("a.yaml", manifest("a")), "--plot", picture).exit_code == 0
    assert picture.read_bytes().startswith(beginning)


def test_plot_bars_match_the_memory_and_show_the_excess(
    specdecode: Specdecode, write: WriteObject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = []
    figure_class = pytest.importorskip("matplotlib.figure").Figure
    monkeypatch.setattr(figure_class, "savefig", lambda self, *_, **__: figures.append(self))
    path = write("a.yaml", manifest("a"))
    assert specdecode("plan", "-f", path, "--plot", tmp_path / "plan.png").exit_code == 0
    axes, _ = figures[0].axes
    memory = [139.80, 79.19]
    # The margin is hatched over the KV cache.
    stacked = [part for part in axes.containers if part.get_label() != "margin"]
    heights = [sum(part[bar].get_height() for part in stacked) for bar in range(2)]
    assert heights == pytest.approx(memory, abs=0.01)
    assert any(text.get_text().endswith("over the budget") for text in axes.texts), "H100 has not enough"
    shown = {text.get_text() for text in figures[0].legends[0].get_texts()}
    assert {"memory", "budget", "target weights", "draft weights", "KV cache", "outside the budget"} <= shown
    assert {"needed", "margin"} <= shown
    assert [label.get_text().splitlines()[0] for label in axes.get_xticklabels()] == [
        "2 x H200, TP 2",
        "2 x H100, TP 2",
    ]
    assert axes.get_ylabel() == "GiB per GPU"
    # The margin is the end of the KV cache, below the budget; what is needed is drawn where it is missing.
    [margin] = [part for part in axes.containers if part.get_label() == "margin"]
    lines = {line.get_label(): line for line in axes.collections}
    tops = [segment[0][1] for segment in lines["budget"].get_segments()]
    assert margin[0].get_height() > 0
    assert margin[0].get_y() + margin[0].get_height() == pytest.approx(tops[0])
    assert [round(float(segment[:, 0].mean())) for segment in lines["needed"].get_segments()] == [1]


def drawn(specdecode: Specdecode, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *arguments: object) -> Figure:
    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: figures.append(self))
    assert specdecode("plan", *arguments, "--plot", tmp_path / "plan.png").exit_code == 0
    return figures[0]


def test_plot_in_an_unknown_format_is_refused(specdecode: Specdecode, write: WriteObject, tmp_path: Path) -> None:
    result = specdecode("plan", "-f", write("a.yaml", manifest("a")), "--plot", tmp_path / "plan.pdf")
    assert result.exit_code == 2
    assert ".png or .svg" in result.stderr


def test_plot_without_matplotlib_says_what_to_install(
    specdecode: Specdecode, write: WriteObject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "specdecode_operator.cli.plan.plot", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = specdecode("plan", "-f", write("a.yaml", manifest("a")), "--plot", tmp_path / "plan.png")
    assert result.exit_code == 2
    assert "pip install '.[plot]'" in result.stderr


# `-o markdown`: what a CI job shows of `lint` and `plan`, whatever others wrote into the objects.

HARMLESS = {"text", "code_inline", "strong_open", "strong_close", "softbreak"}
EVIL = (
    "`|\\|\n# x\n<img src=x onerror=y> ![p](https://e.example/p) @everyone [a](javascript:x) `` www.e.example \x1b[2J"
)
CASES = [EVIL, "`", "``", "a`", "", " ", "\\`", "|", "\\|", "a\\", "```\nb"]


def inline(markdown: str) -> list[Token]:
    """What stands in the paragraphs, lists and tables of a text, as a reader with tables and links takes it."""
    parser = MarkdownIt("commonmark").enable(["table"])
    return [child for token in parser.parse(markdown) for child in token.children or []]


def row_widths(markdown: str) -> set[int]:
    """How many cells the rows of a table have."""
    widths, width = set(), 0
    for token in MarkdownIt("commonmark").enable(["table"]).parse(markdown):
        if token.type in ("td_open", "th_open"):
            width += 1
        elif token.type == "tr_close":
            widths.add(width)
            width = 0
    return widths


@pytest.mark.parametrize("text", CASES)
def test_any_text_becomes_one_markdown_code_span(text: str) -> None:
    (found,) = inline(f"- {code(text)}")
    assert found.type == "code_inline"
    assert found.content.isprintable()


def test_markdown_plan_has_a_row_per_placement(specdecode: Specdecode) -> None:
    result = specdecode("plan", EXAMPLES / "llama-70b.yaml", "-o", "markdown")
    heading, _, *lines = result.stdout.splitlines()
    assert (result.exit_code, heading) == (0, "### specdecode plan: Fits")
    assert [each.split("|")[2:4] for each in lines[2:4]] == [
        [" `2 x H200, TP 2` ", " `Fits` "],
        [" `2 x H100, TP 2` ", " `DoesNotFit` "],
    ]
    assert row_widths(result.stdout) == {6}


def test_markdown_matrix_has_every_split(specdecode: Specdecode) -> None:
    best, every = (
        specdecode("plan", EXAMPLES / "qwen3-8b-eagle3.yaml", "-o", "markdown", *option).stdout
        for option in ((), ("--matrix",))
    )
    assert "TP 4" in every
    assert "TP 4" not in best


def test_markdown_plan_that_does_not_fit_lists_fixes(specdecode: Specdecode, write: WriteObject) -> None:
    path = write("a.yaml", manifest("a", parallelism={"tensor": 1}, accelerator={"products": ["NVIDIA-H200"]}))
    result = specdecode("plan", path, "-o", "markdown")
    assert result.exit_code == 4
    reason, *fixes = (each for each in result.stdout.splitlines() if each.lstrip().startswith("- "))
    assert reason.startswith(f"- **DoesNotFit** `a` (`{path}, document 1`): `1 x NVIDIA-H200 per replica")
    assert any(each.startswith("  - `1 x H200, TP 1`: `parallelism.tensor: 2`, then `") for each in fixes)


def test_markdown_findings_list_errors_before_warnings(specdecode: Specdecode, write: WriteObject) -> None:
    doubtful = write("a.yaml", manifest("a", target={"model": "nobody/knows"}))
    wrong = write("b.yaml", manifest("b", target={}))
    result = specdecode("lint", doubtful, wrong, "-o", "markdown")
    assert result.exit_code == 2
    first, *_, last = (each for each in result.stdout.splitlines() if each.startswith("- "))
    assert first.startswith(f"- **error** `{wrong}:")
    assert last.startswith(f"- **warning** `{doubtful}:")
    assert "objects: 2, errors: 1, warnings: 1" in result.stdout.splitlines()


def test_markdown_of_a_clean_file_has_only_the_counts(specdecode: Specdecode) -> None:
    result = specdecode("lint", EXAMPLES / "llama-70b.yaml", "-o", "markdown")
    assert result.stdout == "### specdecode lint\n\nobjects: 1, errors: 0, warnings: 0\n"


@pytest.mark.parametrize("command", ["lint", "plan"])
@pytest.mark.parametrize(
    "change",
    [{"spec": {EVIL: 1}}, {"metadata": {"name": EVIL}}, {"metadata": {"name": "a", "namespace": EVIL}}],
    ids=str,
)
def test_markdown_output_neutralizes_markup_in_values(
    specdecode: Specdecode, write: WriteObject, command: str, change: dict[str, object]
) -> None:
    path = write("a.yaml", json.dumps({**manifest("a"), **change}))
    shown = specdecode(command, path, "-o", "markdown").stdout
    assert shown.replace("\n", "").isprintable()
    assert {each.type for each in inline(shown)} <= HARMLESS
    assert all("onerror" not in each.content for each in inline(shown) if each.type == "text")
    assert row_widths(shown) <= {6}


def test_markdown_output_neutralizes_markup_in_unreadable_file_names(specdecode: Specdecode, tmp_path: Path) -> None:
    for command in ("lint", "plan"):
        result = specdecode(command, tmp_path / f"{EVIL.replace('/', '')}.yaml", "-o", "markdown")
        assert result.exit_code == 2
        assert {each.type for each in inline(result.stdout)} <= HARMLESS
