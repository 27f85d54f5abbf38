"""Objects of other projects, planned and checked without changes."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specdecode_operator.cli.input_files import InputOptions, foreign_converter, read_deployments
from specdecode_operator.cli.plan.answers import Answer, ask
from tests.unit.cli.conftest import Specdecode, WriteObject, manifest
from tests.unit.cli.old_deployments import LLAMA_8B, engine, with_pod

DATA = Path(__file__).parent / "foreign_data"
IMPORTED = Path(__file__).parents[1] / "importing" / "data"
EXAMPLES = Path(__file__).parents[3] / "examples"
H100, H200 = "NVIDIA-H100-80GB-HBM3", "NVIDIA-H200"
QWEN, HEAD = "Qwen/Qwen3-8B", "AngelSlim/Qwen3-8B_eagle3"
EAGLE3 = ("--speculative-config", json.dumps({"method": "eagle3", "model": HEAD, "num_speculative_tokens": 3}))
OK, INVALID, TIGHT, UNKNOWN = 0, 2, 3, 5


def planned(specdecode: Specdecode, *arguments: object, code: int = OK, stdin: str | None = None) -> dict[str, Any]:
    """Return the plans of a file by the names of its servers."""
    result = specdecode("plan", "-o", "json", *arguments, stdin=stdin)
    assert result.exit_code == code, result.output
    return {each["name"]: each for each in json.loads(result.stdout)["objects"]}


def split_side(role: str, *args: str) -> dict[str, Any]:
    """Return a Deployment of one side of a prefill/decode split."""
    transfer = json.dumps({"kv_connector": "NixlConnector", "kv_role": role})
    body = engine(QWEN, "--kv-transfer-config", transfer, *args)
    body["metadata"]["name"] = {"kv_producer": "prefill", "kv_consumer": "decode"}.get(role, "both")
    return body


SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "dynamo-v1alpha1.yaml": (
        "chat-vllmdecodeworker",
        {
            "kind": "DynamoGraphDeployment",
            "field": "spec.services.VllmDecodeWorker.extraPodSpec.mainContainer",
            "role": "decode",
            "product": H200,
            "tensor": 2,
            "draft": HEAD,
        },
    ),
    "dynamo-v1beta1.yaml": (
        "qwen-vllmdecodeworker",
        {
            "kind": "DynamoGraphDeployment",
            "field": "spec.components[1].podTemplate.spec.containers[0]",
            "role": "decode",
            "product": H100,
            "tensor": 4,
        },
    ),
    "llm-inference-service-pd.yaml": (
        "qwen3-pd-prefill",
        {
            "kind": "LLMInferenceService",
            "field": "spec.prefill.template.containers[0]",
            "role": "prefill",
            "product": H100,
            "tensor": 2,
        },
    ),
    "llm-d-modelservice.yaml": (
        "ms-llm-d-modelservice-decode",
        {
            "kind": "Deployment",
            "field": "spec.template.spec.containers[0]",
            "role": "decode",
            "product": H100,
            "tensor": 4,
        },
    ),
    "ray-service.yaml": (
        "ray-llm-chat",
        {
            "kind": "RayService",
            "field": "spec.serveConfigV2: applications[0].args.llm_configs[0].engine_kwargs",
            "role": None,
            "product": H100,
            "tensor": 2,
        },
    ),
    "vllm-runtime.yaml": (
        "runtime",
        {"kind": "VLLMRuntime", "field": "spec.vllmConfig", "role": None, "product": H100, "tensor": 4},
    ),
    "inference-service-huggingface.yaml": (
        "huggingface-llama3",
        {"kind": "InferenceService", "field": "spec.predictor.model", "role": None, "product": H100, "tensor": 1},
    ),
}


@pytest.mark.parametrize("file", SHAPES)
def test_object_of_another_project_is_planned_as_it_is(specdecode: Specdecode, file: str) -> None:
    name, expected = SHAPES[file]
    folder = DATA if (DATA / file).exists() else IMPORTED
    found = planned(specdecode, "-f", folder / file)[name]
    source, best = found["source"], found["candidates"][0]
    assert found["verdict"] == "Fits"
    assert {key: source[key] for key in ("kind", "field", "role")} == {
        key: expected[key] for key in ("kind", "field", "role")
    }
    assert (best["product"], best["tensor"]) == (expected["product"], expected["tensor"])
    assert source["unread"] == []
    assert not [each for each in found["advice"] if "does not know" in each]
    drafts = [each["model"] for each in found["models"] if each["role"] == "draft"]
    assert drafts == [expected[key] for key in ("draft",) if key in expected]


def test_every_server_of_a_stream_is_planned_and_the_rest_is_noted(specdecode: Specdecode) -> None:
    service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "s"}}
    listed = {"apiVersion": "v1", "kind": "List", "items": [service, engine(), "text"]}
    text = "\n---\n".join([(DATA / "dynamo-v1alpha1.yaml").read_text(), yaml.safe_dump(listed)])
    result = specdecode("plan", "-f", "-", "-o", "json", stdin=text)
    assert result.exit_code == OK
    objects = json.loads(result.stdout)["objects"]
    assert [each["name"] for each in objects] == ["chat-vllmdecodeworker", "chat-vllmprefillworker", "old"]
    assert objects[2]["place"] == "standard input, document 2, item 2"
    (note,) = [line for line in result.stderr.splitlines() if "do not run vLLM" in line]
    assert "chat-frontend of DynamoGraphDeployment" in note
    assert "Service" in note


def test_own_objects_and_those_of_other_projects_are_planned_together(
    specdecode: Specdecode, write: WriteObject
) -> None:
    found = planned(specdecode, "-f", write("both.yaml", manifest("ours"), engine()))
    assert (found["ours"]["source"], found["old"]["source"]["kind"]) == (None, "Deployment")


def test_memory_of_adapters_is_counted(specdecode: Specdecode, write: WriteObject) -> None:
    lora = ("--enable-lora", "--lora-modules", "sql=/adapters/sql", "--max-lora-rank", "64")
    (found,) = planned(specdecode, "-f", write("a.yaml", engine(QWEN, *lora))).values()
    assert found["source"]["unread"] == []
    assert found["candidates"][0]["per_gpu"]["adapters"] > 0


def test_settings_that_vllm_chooses_are_its_defaults_not_ours(specdecode: Specdecode, write: WriteObject) -> None:
    """The operator's default of 256 requests would plan another server."""
    result = specdecode("plan", "-f", write("d.yaml", engine("Qwen/Qwen3-Next-80B-A3B-Instruct")), "--explain")
    assert "1,024 requests" in result.stdout or "1024" in result.stdout, result.output


@pytest.mark.parametrize(("tokens", "requests"), [("16384", "1024"), ("512", "512")])
def test_only_fewer_tokens_lower_the_default_number_of_requests(
    specdecode: Specdecode, write: WriteObject, tokens: str, requests: str
) -> None:
    args = (LLAMA_8B, "--max-num-batched-tokens", tokens)
    bodies = (engine(*args), engine(*args, "--max-num-seqs", requests))
    assumed, given = (planned(specdecode, "-f", write("d.yaml", body), "--gpu", "H100")["old"] for body in bodies)
    assert assumed["candidates"] == given["candidates"]


@pytest.mark.parametrize(("gpus", "warned"), [("1", True), ("2", False)])
def test_arguments_that_use_more_gpus_than_the_pod_has_are_warned_about(
    specdecode: Specdecode, write: WriteObject, gpus: str, *, warned: bool
) -> None:
    body = engine(LLAMA_8B, "-tp", "2", resources={"limits": {"nvidia.com/gpu": gpus}})
    found = planned(specdecode, "-f", write("d.yaml", body), "--gpu", "H100")["old"]
    assert any("containers[0].resources: nvidia.com/gpu" in each for each in found["advice"]) is warned


@pytest.mark.parametrize(
    ("body", "field", "value"),
    [
        (engine(LLAMA_8B, "--max-model-len", "lots"), "spec.template.spec.containers[0].args", "--max-model-len lots"),
        (engine(LLAMA_8B, "-tp", "3"), "spec.template.spec.containers[0].args", "-tp 3"),
        (engine(LLAMA_8B, "--max-num-seqs", "0"), "spec.template.spec.containers[0].args", "--max-num-seqs 0"),
        (
            engine(LLAMA_8B, *EAGLE3[:1], '{"method": "ngram", "num_speculative_tokens": -1}'),
            "spec.template.spec.containers[0].args",
            "--speculative-config num_speculative_tokens -1",
        ),
    ],
)
def test_problem_names_the_field_and_the_flag_of_the_object(
    specdecode: Specdecode, write: WriteObject, body: dict[str, Any], field: str, value: str
) -> None:
    (problem, *_) = planned(specdecode, "-f", write("d.yaml", body), code=INVALID)["old"]["problems"]
    assert (problem["field"], problem["value"]) == (field, value)
    assert "spec.serving" not in problem["message"]


def test_fix_names_flags(specdecode: Specdecode, write: WriteObject) -> None:
    body = engine("meta-llama/Llama-3.1-70B-Instruct", "--max-model-len", "131072", "-tp", "2")
    found = planned(specdecode, "-f", write("d.yaml", body), "--gpu", "H100", code=4)["old"]
    fields = {change["field"] for fixes in found["fixes"].values() for fix in fixes for change in fix["changes"]}
    assert "--tensor-parallel-size" in fields
    assert not [each for each in fields if each.startswith("spec.")]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (engine(command=["bash", "-c"], args=["for i in 1; do vllm serve x; done"]), ".containers[0].args"),
        ({**engine(), "spec": {"template": {"spec": {"containers": "vllm"}}}}, "spec.template.spec.containers"),
        ({**engine(), "spec": {"template": {"metadata": {"labels": {"a": "vllm"}}}}}, "spec.template.spec"),
        (engine(resources={"limits": {"amd.com/gpu": 1}}), ".containers[0].resources.limits.amd.com/gpu"),
    ],
)
def test_server_that_cannot_be_read_is_unknown_and_the_others_are_planned(
    specdecode: Specdecode, write: WriteObject, body: dict[str, Any], field: str
) -> None:
    body = deepcopy(body)
    body["metadata"] = {"name": "odd"}
    found = planned(specdecode, "-f", write("d.yaml", body, engine()), code=UNKNOWN)
    assert (found["odd"]["verdict"], found["old"]["verdict"]) == ("Unknown", "Fits")
    (problem,) = found["odd"]["problems"]
    assert problem["field"].endswith(field)


def test_broken_worker_of_a_graph_does_not_hide_the_other(specdecode: Specdecode, write: WriteObject) -> None:
    body = yaml.safe_load((DATA / "dynamo-v1alpha1.yaml").read_text())
    body["spec"]["services"]["VllmPrefillWorker"]["extraPodSpec"]["mainContainer"] = "vllm"
    found = planned(specdecode, "-f", write("g.yaml", body), code=UNKNOWN)
    assert found["chat-vllmdecodeworker"]["verdict"] == "Fits"
    (problem,) = found["chat-vllmprefillworker"]["problems"]
    assert problem["field"] == "spec.services.VllmPrefillWorker.extraPodSpec.mainContainer"


def test_variable_that_vllm_rejects_does_not_hide_the_plan(specdecode: Specdecode, write: WriteObject) -> None:
    transfer = ("--kv-transfer-config", '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}')
    env = [{"name": "A", "value": "1"}, {"name": "PYTORCH_CUDA_ALLOC_CONF", "value": "expandable_segments:True"}]
    found = planned(specdecode, "-f", write("d.yaml", engine(LLAMA_8B, *transfer, env=env)))["old"]
    assert found["verdict"] == "Fits"
    assert [each for each in found["advice"] if "containers[0].env: PYTORCH_CUDA_ALLOC_CONF expandable" in each]


def test_other_fp8_types_of_the_cache_are_sized_as_fp8(specdecode: Specdecode, write: WriteObject) -> None:
    tokens = {}
    for dtype in ("fp8", "fp8_ds_mla", "auto"):
        body = engine("deepseek-ai/DeepSeek-R1", "-tp", "8", "--kv-cache-dtype", dtype)
        body["spec"]["template"]["spec"]["containers"][0]["resources"] = {"limits": {"nvidia.com/gpu": "8"}}
        found = planned(specdecode, "-f", write(f"{dtype}.yaml", body), "--gpu", "H200")["old"]
        tokens[dtype] = found["candidates"][0]["kv_cache_tokens"]
        assert any("is sized as fp8" in each for each in found["advice"]) is (dtype == "fp8_ds_mla")
    assert tokens["fp8"] == tokens["fp8_ds_mla"] > tokens["auto"]


def test_server_on_cpu_is_planned_with_an_assumed_cache(specdecode: Specdecode, write: WriteObject) -> None:
    resources = {"limits": {"cpu": "8", "memory": "64Gi"}}
    body = engine(LLAMA_8B, "--max-model-len", "8192", image="vllm/vllm-openai-cpu:v0.32.0", resources=resources)
    found = planned(specdecode, "-f", write("d.yaml", body))["old"]
    assert found["candidates"][0]["product"] == "CPU"
    assert [each for each in found["advice"] if "VLLM_CPU_KVCACHE_SPACE" in each]


def test_setting_that_is_not_understood_is_listed_and_the_plan_goes_on(
    specdecode: Specdecode, write: WriteObject
) -> None:
    found = planned(specdecode, "-f", write("d.yaml", engine(LLAMA_8B, "--data-parallel-size-local", "2")))["old"]
    assert found["verdict"] == "Fits"
    assert [(each["field"], each["value"]) for each in found["source"]["unread"]] == [
        ("spec.template.spec.containers[0].args", "--data-parallel-size-local 2")
    ]


def pinned(**pod: Any) -> dict[str, Any]:
    return with_pod(**pod)


def node_affinity(label: str, *values: str) -> dict[str, Any]:
    terms = [{"matchExpressions": [{"key": label, "operator": "In", "values": list(values)}]}]
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}


@pytest.mark.parametrize(
    "pod",
    [
        {"nodeSelector": {"nvidia.com/gpu.product": H200}},
        {"affinity": node_affinity("nvidia.com/gpu.product", H200)},
        {"tolerations": [{"key": "nvidia.com/gpu.product", "operator": "Equal", "value": H200}]},
        {"nodeSelector": {"cloud.google.com/gke-accelerator": "nvidia-h200-141gb"}},
        {"nodeSelector": {"karpenter.k8s.aws/instance-gpu-name": "h200"}},
    ],
)
def test_gpu_comes_from_the_labels_that_pin_the_pod(
    specdecode: Specdecode, write: WriteObject, pod: dict[str, Any]
) -> None:
    result = specdecode("plan", "-f", write("d.yaml", pinned(**pod)), "-o", "json")
    found = json.loads(result.stdout)["objects"][0]
    assert {each["product"] for each in found["candidates"]} == {H200}
    assert "--gpu" not in result.stderr


def test_gpu_is_not_taken_from_labels_with_an_unknown_one(specdecode: Specdecode, write: WriteObject) -> None:
    labels = node_affinity("karpenter.k8s.aws/instance-gpu-name", "h200", "a-gpu-of-2030")
    result = specdecode("plan", "-f", write("d.yaml", pinned(affinity=labels)), "-o", "json")
    assert {each["product"] for each in json.loads(result.stdout)["objects"][0]["candidates"]} != {H200}
    assert "--gpu" in result.stderr


def test_one_message_asks_for_the_gpu_of_all_servers(specdecode: Specdecode, write: WriteObject) -> None:
    bodies = [{**engine(), "metadata": {"name": name}} for name in ("a", "b", "c")]
    path = write("d.yaml", *bodies)
    asked = [line for line in specdecode("plan", "-f", path).stderr.splitlines() if "--gpu" in line]
    assert len(asked) == 1
    assert "3 servers" in asked[0]
    assert "--gpu" not in specdecode("plan", "-f", path, "--gpu", "H100").stderr


def test_engine_version_is_for_images_that_do_not_tell(specdecode: Specdecode, write: WriteObject) -> None:
    path = write("d.yaml", engine(image="example.com/vllm:latest"))
    assert "--engine-version" in specdecode("plan", "-f", path).stderr
    told = specdecode("plan", "-f", path, "--engine-version", "0.30")
    assert "--engine-version" not in told.stderr
    assert "vLLM 0.30" in told.stdout
    unknown = specdecode("plan", "-f", path, "--engine-version", "newest")
    assert (unknown.exit_code, unknown.stderr.count("--engine-version: newest")) == (INVALID, 1)
    refused = specdecode("plan", "-f", write("o.yaml", manifest("ours")), "--engine-version", "0.30")
    assert refused.exit_code == INVALID
    assert "spec.engine.version" in refused.stderr


def test_objects_that_the_operator_or_an_owner_creates_are_not_planned_again(
    specdecode: Specdecode, write: WriteObject
) -> None:
    ours, pod = engine(), engine()
    ours["metadata"] = {"name": "rendered", "labels": {"app.kubernetes.io/managed-by": "specdecode-operator"}}
    spec = pod["spec"]["template"]["spec"]
    owned = {"name": "old-1", "ownerReferences": [{"kind": "Deployment", "name": "old"}]}
    pods = {"apiVersion": "v1", "kind": "Pod", "metadata": owned, "spec": spec}
    assert [*planned(specdecode, "-f", write("d.yaml", engine(), ours, pods))] == ["old"]


def test_unknown_model_takes_a_config_and_names_no_field_of_ours(
    specdecode: Specdecode, write: WriteObject, tmp_path: Path
) -> None:
    path = write("d.yaml", engine("org/unheard-of", "-tp", "1"))
    result = specdecode("plan", "-f", path)
    assert result.exit_code == UNKNOWN
    assert "--model-config org/unheard-of=PATH" in result.stderr
    assert "target.config" not in result.stderr
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 8192,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128_256,
        "torch_dtype": "bfloat16",
    }
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    assert specdecode("plan", "-f", path, "--model-config", f"org/unheard-of={file}").exit_code == OK


@pytest.mark.parametrize(
    ("prefill", "decode", "differs"),
    [
        ((), EAGLE3, True),
        (EAGLE3, EAGLE3, False),
        (EAGLE3, (), True),
        ((), ("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}'), False),
        ((*EAGLE3, "--kv-cache-dtype", "fp8"), EAGLE3, True),
    ],
)
def test_decode_side_that_differs_from_its_prefill_side_is_warned_about(
    specdecode: Specdecode, write: WriteObject, prefill: tuple[str, ...], decode: tuple[str, ...], *, differs: bool
) -> None:
    path = write("pd.yaml", split_side("kv_producer", *prefill), split_side("kv_consumer", *decode))
    found = planned(specdecode, "-f", path)
    assert (found["prefill"]["source"]["role"], found["decode"]["source"]["role"]) == ("prefill", "decode")
    warned = [each for each in found["decode"]["advice"] if "the prefill side prefill has" in each]
    assert bool(warned) is differs
    assert not [each for each in found["prefill"]["advice"] if "the prefill side" in each and "must" in each]


def test_sides_of_other_models_are_not_compared(specdecode: Specdecode, write: WriteObject) -> None:
    other = split_side("kv_producer")
    other["spec"]["template"]["spec"]["containers"][0]["args"][0] = LLAMA_8B
    found = planned(specdecode, "-f", write("pd.yaml", other, split_side("kv_consumer", *EAGLE3)))
    assert not [each for each in found["decode"]["advice"] if "the prefill side prefill has" in each]


@pytest.mark.parametrize(
    ("target", "method", "draft", "report"),
    [
        ("Qwen/Qwen3.6-35B-A3B", "dspark", "RedHatAI/Qwen3.6-35B-A3B-speculator.dspark", "vllm-project/vllm#48221"),
        ("google/gemma-4-26B-A4B-it", "mtp", "google/gemma-4-26B-A4B-it-assistant", "vllm-project/vllm#54926"),
    ],
)
def test_known_fault_of_a_method_in_a_split_is_named(
    specdecode: Specdecode, write: WriteObject, target: str, method: str, draft: str, report: str
) -> None:
    config = json.dumps({"method": method, "model": draft, "num_speculative_tokens": 3})
    args = [target, "--speculative-config", config, "-tp", "2", "--max-model-len", "8192"]
    transfer = '{"kv_connector": "NixlConnector", "kv_role": "kv_consumer"}'
    found = {}
    for name, more in (("alone", []), ("split", ["--kv-transfer-config", transfer])):
        body = engine(*args, "--max-num-batched-tokens", "8192", *more, resources={"limits": {"nvidia.com/gpu": 2}})
        result = specdecode("lint", "-f", write(f"{name}.yaml", body), "-o", "json")
        found[name] = [each["message"] for each in json.loads(result.stdout)["findings"]]
    assert [each for each in found["split"] if report in each], found
    assert not [each for each in found["alone"] if report in each]


def told_of_split(specdecode: Specdecode, path: Path) -> list[str]:
    """Return the findings about a prefill/decode split."""
    findings = json.loads(specdecode("lint", "-f", path, "-o", "json").stdout)["findings"]
    return [each["message"] for each in findings if "prefill/decode split" in each["message"].lower()]


@pytest.mark.parametrize(
    ("speculation", "count"),
    [
        ({"method": "eagle3", "numSpeculativeTokens": 3, "draft": {"model": HEAD}}, 1),
        ({"method": "ngram", "numSpeculativeTokens": 3}, 0),
        ({"method": "none"}, 0),
    ],
)
def test_own_object_with_a_connector_is_told_what_both_sides_need(
    specdecode: Specdecode, write: WriteObject, speculation: dict[str, Any], count: int
) -> None:
    args = ["--kv-transfer-config", '{"kv_connector": "NixlConnector", "kv_role": "kv_consumer"}']
    spec = {"target": {"model": QWEN}, "speculation": speculation, "engine": {"extraArgs": args}}
    assert len(told_of_split(specdecode, write("a.yaml", manifest("a", **spec)))) == count


@pytest.mark.parametrize(("version", "warned"), [("0.30", True), ("0.31", False)])
def test_stale_layers_of_multi_token_prediction_are_a_warning_before_their_fix(
    specdecode: Specdecode, write: WriteObject, version: str, *, warned: bool
) -> None:
    args = ["--kv-transfer-config", '{"kv_connector": "NixlConnector", "kv_role": "kv_consumer"}']
    spec = {
        "target": {"model": "stepfun-ai/Step-3.5-Flash"},
        "speculation": {"method": "mtp", "numSpeculativeTokens": 3},
        "parallelism": {"tensor": 8},
        "engine": {"version": version, "extraArgs": args},
    }
    told = told_of_split(specdecode, write("a.yaml", manifest("a", **spec)))
    assert any("vllm-project/vllm#55055" in each for each in told) is warned, told


def test_import_says_that_a_worker_is_one_side_of_a_split(specdecode: Specdecode) -> None:
    result = specdecode("import", "-f", DATA / "dynamo-v1alpha1.yaml", "chat-vllmdecodeworker")
    assert result.exit_code == INVALID
    spec = yaml.safe_load(result.stdout)["spec"]
    assert (spec["target"]["model"], spec["parallelism"]["tensor"], spec["replicas"]) == (QWEN, 2, 2)
    told = " ".join(result.stderr.split())
    assert "spec.services.VllmDecodeWorker.subComponentType: decode: this server is the decode side" in told


@pytest.mark.parametrize(("role", "side"), [("kv_producer", "the prefill side"), ("kv_both", "one side")])
def test_import_recognises_a_plain_server_of_a_split(
    specdecode: Specdecode, write: WriteObject, role: str, side: str
) -> None:
    result = specdecode("import", "-f", write("d.yaml", split_side(role)))
    assert result.exit_code == INVALID
    assert f"--kv-transfer-config NixlConnector: this server is {side} of a" in " ".join(result.stderr.split())


def test_offloading_is_not_a_split(specdecode: Specdecode, write: WriteObject) -> None:
    transfer = '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}'
    found = planned(specdecode, "-f", write("d.yaml", engine(LLAMA_8B, "--kv-transfer-config", transfer)))
    assert found["old"]["source"]["role"] is None


def test_lint_findings_about_other_projects_are_warnings_at_their_line(
    specdecode: Specdecode, write: WriteObject
) -> None:
    path = write("d.yaml", engine(LLAMA_8B, "-tp", "3"))
    result = specdecode("lint", "-f", path, "-o", "json")
    assert result.exit_code == OK
    findings = json.loads(result.stdout)["findings"]
    (found,) = [each for each in findings if each["rule"] == "Invalid"]
    assert (found["level"], found["kind"], found["name"]) == ("warning", "Deployment", "old")
    lines = path.read_text().splitlines()
    assert lines[found["line"] - 1].strip().removeprefix("- ") == "args:"
    assert specdecode("lint", "-f", path, "--strict").exit_code == TIGHT


def test_lint_keeps_errors_of_own_objects(specdecode: Specdecode, write: WriteObject) -> None:
    path = write("d.yaml", manifest("ours", parallelism={"tensor": 3}), engine(LLAMA_8B, "-tp", "3"))
    result = specdecode("lint", "-f", path, "-o", "json")
    assert result.exit_code == INVALID
    levels = {(each["kind"], each["level"]) for each in json.loads(result.stdout)["findings"]}
    assert ("SpecDecodeDeployment", "error") in levels
    assert ("Deployment", "error") not in levels


def test_secrets_in_arguments_are_not_printed(specdecode: Specdecode, write: WriteObject) -> None:
    body = engine(LLAMA_8B, "--api-key", "sk-hidden", "--hf-token", "hf_hidden")
    for command in ("plan", "lint"):
        assert "hidden" not in specdecode(command, "-f", write("d.yaml", body)).output


def test_example_is_planned(specdecode: Specdecode) -> None:
    found = planned(specdecode, "-f", EXAMPLES / "foreign" / "dynamo-disagg.yaml")
    assert {each["source"]["role"] for each in found.values()} == {"prefill", "decode"}
    assert {each["verdict"] for each in found.values()} == {"Fits"}


VALUES = st.one_of(
    st.sampled_from(
        [None, True, 0, -1, 2**70, 1e308, "", " ", "vllm", "x" * 5000, "$(A)", "{{ .Values.x }}", "\x1b[0m"]
    ),
    st.sampled_from([[], {}, [[]], [None], {"": None}, [{}], {"a": {"b": [1]}}, ["--model"], ["\ud7ff"]]),
    st.integers(),
    st.text(max_size=20),
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of all values in an object."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, each in inner for place in places(each, (*path, key)))]


def put(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    copy = value.copy()
    copy[path[0]] = put(value[path[0]], path[1:], new)
    return copy


BODIES = [
    body
    for file in sorted((*DATA.glob("*.yaml"), *IMPORTED.glob("*.yaml")))
    for body in yaml.safe_load_all(file.read_text())
    if "kind" in body
]


def answered(body: Any, folder: Path) -> list[Answer]:
    """Return the plans of an object, with a message that names a field for each problem."""
    file = folder / "mutated.json"
    file.write_text(json.dumps(body))
    found = [*ask(read_deployments([str(file)], foreign_converter()), InputOptions()).answers]
    for answer in found:
        assert answer.candidates or answer.problems or answer.explanation, answer
        for problem in answer.problems:
            assert problem.field, problem
            assert problem.message, problem
            assert str(problem).isprintable(), problem
    return found


@pytest.mark.parametrize("file", sorted(DATA.glob("*.yaml")), ids=lambda path: path.stem)
def test_wrong_type_at_any_field_ends_in_a_message(file: Path, tmp_path: Path) -> None:
    for body in yaml.safe_load_all(file.read_text()):
        for path in places(body)[1:]:
            for odd in (None, 7, [], {"a": None}):
                answered(put(body, path, odd), tmp_path)


@settings(
    deadline=None, max_examples=100, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_no_value_at_any_field_ends_in_a_traceback(data: st.DataObject, tmp_path: Path) -> None:
    body = data.draw(st.sampled_from(BODIES))
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(places(body)[1:] or [()]))
        body = put(body, path, data.draw(VALUES))
        if not isinstance(body, dict):
            body = {"kind": body}
    answered(body, tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "a: &a [vllm, vllm]\nb: &b [*a, *a]\nkind: Deployment\nspec: {template: {spec: {containers: *b}}}",
        "kind: Deployment\nmetadata: {name: vllm}\nspec: " + "[" * 500 + "]" * 500,
        "kind: Deployment\nmetadata: {name: vllm}\nspec: {replicas: " + "9" * 400 + "}",
        "kind: Pod\nspec: {containers: [{image: vllm, args: [" + ", ".join(["--max-model-len=9"] * 3000) + "]}]}",
        "kind: RayService\nmetadata: {name: vllm}\nspec: {serveConfigV2: '" + "[" * 300 + "'}",
    ],
)
def test_hostile_text_ends_in_one_message(specdecode: Specdecode, write: WriteObject, text: str) -> None:
    result = specdecode("plan", "-f", write("h.yaml", text))
    assert result.exit_code in {INVALID, UNKNOWN}
    assert not isinstance(result.exception, Exception), result.exception
