"""`specdecode plan --batch`."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specdecode_operator.sizing.catalogue import find_entry
from specdecode_operator.sizing.estimate import _KEY_OF as KEY_OF
from specdecode_operator.sizing.estimate_fields import CASE_SPELLINGS, SPECULATIVE_REMARKS, SPECULATIVE_SPELLINGS
from specdecode_operator.sizing.families import architectures
from specdecode_operator.sizing.result_cache import ContentMemo
from specdecode_operator.vllm.arguments import ARGUMENTS
from specdecode_operator.vllm.profiles import KNOWN_VERSIONS, find_profile
from specdecode_operator.vllm.speculative_config import SPECULATIVE_KEYS
from tests.support.llama import LLAMA_8B_CONFIG
from tests.unit.cli.conftest import Specdecode, WriteObject, manifest

GIB = 2**30
TARGET, DRAFT = "meta-llama/Llama-3.1-70B-Instruct", "meta-llama/Llama-3.1-8B-Instruct"

Estimate = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def estimate(specdecode: Specdecode, tmp_path: Path) -> Estimate:
    """Return the batch: cases (or lines as they are) in, result lines out."""

    def run(*cases: dict[str, Any] | str) -> list[dict[str, Any]]:
        source, results = tmp_path / "cases.jsonl", tmp_path / "results.jsonl"
        source.write_text("".join((case if isinstance(case, str) else json.dumps(case)) + "\n" for case in cases))
        finished = specdecode("plan", "--batch", source, "--out", results)
        assert finished.exit_code == 0, finished.output
        return [json.loads(line) for line in results.read_text().splitlines()]

    return run


def article(gpu: str, target: str | None, draft: str | None, /, **changes: Any) -> dict[str, Any]:
    """The 70B + 8B case with its settings written out."""
    drafting = {"method": "draft_model", "num_speculative_tokens": 5, "model": DRAFT, "quantization": draft}
    return {
        "id": f"{gpu} {target} {draft}",
        "vllm_version": "0.32",
        "gpu": gpu,
        "tp": 2,
        "gpu_memory_utilization": 0.92,
        "max_model_len": 8192,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 8192,
        "warm_compile_cache": True,
        "quantization": target,
        "model": TARGET,
        "speculative": drafting if draft else None,
        **changes,
    }


@pytest.mark.parametrize(
    ("gpu", "target", "draft", "weights_gib", "available_gib", "tokens"),
    [
        ("H100", "bf16", "bf16", 73.22, -4.72, 0),
        ("H100", "fp8", "bf16", 41.36, 27.14, 127_024),
        ("H100", "fp8", "fp8", 38.11, 30.38, 142_224),
        ("H100", "int8", "bf16", 41.36, 27.14, 127_024),
        ("H100", "int4", "int4", 21.08, 47.41, 221_952),
        ("H100", "bf16", None, 65.74, 2.77, 18_176),
        ("H200", "bf16", "bf16", 73.22, 51.04, 238_896),
        ("H200", "fp8", "fp8", 38.11, 86.14, 403_248),
    ],
)
def test_llama_70b_pair_has_the_reference_figures(
    estimate: Estimate, gpu: str, target: str, draft: str | None, weights_gib: float, available_gib: float, tokens: int
) -> None:
    (result,) = estimate(article(gpu, target, draft))
    per_gpu = result["per_gpu"]
    assert (per_gpu["target_weights"] + per_gpu["draft_weights"]) / GIB == pytest.approx(weights_gib, abs=0.006)
    assert per_gpu["available_kv"] / GIB == pytest.approx(available_gib, abs=0.006)
    assert result["kv_cache_tokens"] == tokens


@pytest.mark.parametrize("eager", [False, True])
def test_plan_assumes_a_cold_compile_cache(
    specdecode: Specdecode, write: WriteObject, estimate: Estimate, eager: bool
) -> None:
    """A new pod has none, nor has the first one of a spec that keeps it on a claim."""
    case = article("H200", "bf16", "bf16", vllm_version="0.33", enforce_eager=eager)
    cold, warm = estimate({**case, "warm_compile_cache": False}, {**case, "id": "later"})
    serving = {"maxModelLen": 8192, "enforceEager": eager}
    cache = {"cache": {"persistentVolumeClaim": {"claimName": "hub"}}}
    for models in ({}, cache):
        body = manifest("a", serving=serving, accelerator={"products": ["NVIDIA-H200"]}, models=models)
        (planned,) = json.loads(specdecode("plan", write("a.yaml", body), "-o", "json").stdout)["objects"]
        assert planned["candidates"][0]["kv_cache_tokens"] == cold["kv_cache_tokens"]
    assert (cold["kv_cache_tokens"] < warm["kv_cache_tokens"]) is not eager


def test_terms_are_integers_that_add_up(estimate: Estimate) -> None:
    for utilization in (0.9, 0.92, 0.875, 1 / 3):
        (result,) = estimate(article("H200", "bf16", "bf16", gpu_memory_utilization=utilization))
        per_gpu = result["per_gpu"]
        assert all(type(size) is int for size in per_gpu.values())
        charged = sum(size for term, size in per_gpu.items() if term not in ("total", "requested", "available_kv"))
        assert per_gpu["requested"] - charged == per_gpu["available_kv"]
        assert per_gpu["requested"] == pytest.approx(per_gpu["total"] * utilization, abs=2)


def test_every_input_line_gets_one_result_line(estimate: Estimate) -> None:
    good = article("H100", "fp8", "bf16", id="good")
    bad: list[dict[str, Any] | str] = [
        "no json",
        "[1]",
        "null",
        json.dumps({**good, "id": "nan", "gpu_memory_utilization": float("nan")}),
        json.dumps({**good, "id": "infinite", "gpu_total_gib": float("inf")}),
        {**good, "id": "text", "max_model_len": "8192"},
        {**good, "id": "true", "tp": True},
        {**good, "id": "huge", "max_num_seqs": 2**63},
        {**good, "id": "zero", "max_model_len": 0},
        {**good, "id": "negative", "max_num_batched_tokens": -1},
        {**good, "id": "slip", "max_num_seq": 4},
        {**good, "id": "model", "model": "no/such-model"},
        {**good, "id": "gpu", "gpu": "TPU v5"},
        {**good, "id": "none", "gpu": None},
        {**good, "id": "split", "tp": 3},
        {**good, "id": "dtype", "kv_cache_dtype": "fp3"},
        {**good, "id": "precision", "quantization": "int3"},
        {**good, "id": "version", "vllm_version": "latest"},
        {**good, "id": "old", "vllm_version": "0.11.0"},
        {**good, "id": "method", "speculative": {"method": "guess", "num_speculative_tokens": 3}},
        {**good, "id": "draft", "speculative": {"method": "draft_model", "num_speculative_tokens": 3}},
        {**good, "id": "mtp", "speculative": {"method": "mtp", "num_speculative_tokens": 1}},
        {**good, "id": "k", "speculative": {"method": "ngram"}},
        {**good, "id": "config", "model_config": {"architectures": ["LlamaForCausalLM"], "hidden_size": 0}},
        "[" * 100_000,
        '{"id": 1, "max_model_len": ' + "9" * 5000 + "}",
    ]
    results = estimate(good, *(line for case in bad for line in (case, good)))
    assert len(results) == 1 + 2 * len(bad)
    assert all(result == results[0] for result in results[::2])
    for case, result in zip(bad, results[1::2], strict=True):
        assert set(result) == {"id", "error"}, case
        assert result["error"], case
        assert result["id"] == (case["id"] if isinstance(case, dict) else result["id"])
    assert "did you mean max_num_seqs?" in next(each["error"] for each in results if each["id"] == "slip")
    assert not any("please report" in str(result["error"]) for result in results)


def test_remark_keys_and_blank_lines_are_ignored(estimate: Estimate) -> None:
    plain = article("H100", "fp8", "bf16")
    assert estimate({**plain, "notes": "from a log", "observed": {"x": 1}}, "", "  ") == estimate(plain)


def test_a_given_kv_cache_skips_the_memory_model(estimate: Estimate) -> None:
    block_bytes = 16 * 229_376
    (result,) = estimate(article("H100", "fp8", "bf16", gpu=None, available_kv_gib=600 * block_bytes / GIB))
    assert result["verdict"] == "Fits"
    assert result["kv_cache_tokens"] == 600 * 16
    assert result["max_concurrency"] == pytest.approx(600 / 512)
    assert result["per_gpu"]["target_weights"] is None
    # One block less than a request and the null block need.
    (result,) = estimate(article("H100", "fp8", "bf16", available_kv_gib=512 * block_bytes / GIB))
    assert result["verdict"] == "DoesNotFit"


def test_model_config_gives_the_same_result_as_the_catalogue(estimate: Estimate) -> None:
    config = {
        **LLAMA_8B_CONFIG,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    }
    known, given = estimate(
        article("H100", None, None, model=DRAFT, id=1),
        article("H100", None, None, model=None, model_config=config, id=1),
    )
    assert known["error"] is None
    assert known == given


def test_batch_reads_stdin_and_writes_stdout(specdecode: Specdecode) -> None:
    case = json.dumps(article("H100", "fp8", "bf16"))
    result = specdecode("plan", "--batch", "-", "--out", "-", stdin=f"{case}\nbad\n")
    assert [json.loads(line)["error"] is None for line in result.stdout.splitlines()] == [True, False]
    assert "1 of 2 cases have an error" in result.stderr


def test_unreadable_batch_file_is_named(specdecode: Specdecode, tmp_path: Path) -> None:
    result = specdecode("plan", "--batch", tmp_path / "absent.jsonl", "--out", "-")
    assert result.exit_code == 2
    assert "absent.jsonl" in result.stderr


OF_8B = {"model": DRAFT, "gpu": "H200", "vllm_version": "0.32"}


def test_min_concurrency_decides_the_verdict(estimate: Estimate) -> None:
    fits, too_many = estimate(
        {**OF_8B, "max_model_len": 8192, "min_concurrency": 8}, {**OF_8B, "max_model_len": 8192, "min_concurrency": 500}
    )
    assert (fits["verdict"], too_many["verdict"]) == ("Fits", "DoesNotFit")


def test_invalid_json_line_is_reported_by_its_number(estimate: Estimate) -> None:
    _, first, second = estimate("", "   ", {**OF_8B, "id": 1}, "{not json", "[" * 100_000)
    assert first["error"].startswith("line 4: is not valid JSON at column 2: ")
    assert second["error"].startswith("line 5: ")


def described(**changes: Any) -> dict[str, Any]:
    """A case that holds its config.json, and that of its draft."""
    drafting = {"method": "draft_model", "num_speculative_tokens": 1, "model_config": LLAMA_8B_CONFIG}
    case = {"gpu": "H100", "tp": 2, "model_config": LLAMA_8B_CONFIG, "speculative": drafting}
    return {**case, **{key: value for key, value in changes.items() if key != "drafting"}} | (
        {"speculative": {**drafting, **changes["drafting"]}} if "drafting" in changes else {}
    )


def test_result_of_a_line_does_not_depend_on_earlier_lines(estimate: Estimate) -> None:
    wide = {**LLAMA_8B_CONFIG, "intermediate_size": 16_384}
    too_many = {"method": "ngram", "num_speculative_tokens": 200}
    cases = [
        described(),
        described(max_model_len=4096),
        described(model_config=wide),
        described(model_config={**LLAMA_8B_CONFIG, "num_hidden_layers": True}),
        described(model_config={**LLAMA_8B_CONFIG, "tie_word_embeddings": 1}),
        described(drafting={"num_speculative_tokens": True}),
        described(drafting={"num_speculative_tokens": 1.0}),
        described(drafting={"model_config": wide}),
        described(hf_overrides={"num_hidden_layers": 16}),
        described(model="maker/one", max_model_len=10**7),
        described(model="maker/two", max_model_len=10**7),
        described(vllm_version="0.20", speculative=too_many),
        described(vllm_version="0.20", **{"speculative": None, "--speculative-config": too_many}),
        described(),
    ]
    together = estimate(*cases, *reversed(cases))
    for case, result in zip([*cases, *reversed(cases)], together, strict=True):
        forget_what_was_read()
        assert [result] == estimate(case)
    assert len({json.dumps(result) for result in together}) > 6


def forget_what_was_read() -> None:
    for module in (architectures, estimate):
        for each in vars(module).values():
            if isinstance(each, ContentMemo):
                each.cache_clear()


# `specdecode plan --batch`: what GPUs and settings of an engine mean, and which ones vLLM refuses.


@pytest.mark.parametrize(
    ("name", "same_as"),
    [
        ("H100 80GB", "H100"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA-H100-80GB-HBM3", "H100"),
        ("8 x h100 sxm5", "H100"),
        ("NVIDIA H200 141GB", "H200"),
        ("A100-80", "NVIDIA-A100-SXM4-80GB"),
        ("H100 NVL 94GB", "NVIDIA-H100-NVL"),
        ("GH200", "NVIDIA-GH200-480GB"),
        ("A100 40GB", "NVIDIA-A100-SXM4-40GB"),
        ("L40S", "NVIDIA-L40S"),
        ("GB200", "NVIDIA-GB200"),
        ("b300", "NVIDIA-B300-SXM6-AC"),
        ("RTX PRO 6000", "NVIDIA-RTX-PRO-6000-Blackwell-Server-Edition"),
    ],
)
def test_known_gpu_is_recognized_in_other_spellings(estimate: Estimate, name: str, same_as: str) -> None:
    cases = (article(gpu, "fp8", "bf16", id=1) for gpu in (name, same_as))
    one, other = estimate(*cases)
    assert one["error"] is None
    assert one == other


@pytest.mark.parametrize(
    "name", ["H1000", "H100 40GB", "RTX 6000 Ada", "L40", "NVIDIA-H100-80GB-HBM3-MIG-1g.10gb", "RTX 4090"]
)
def test_similar_gpu_name_is_not_mistaken_for_a_known_gpu(estimate: Estimate, name: str) -> None:
    (result,) = estimate(article(name, "fp8", "bf16"))
    assert "gpu_total_gib" in result["error"]


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("H10O", "H100"),
        ("H1000", "H100"),
        ("gh20", "GH200"),
        ("NVIDIA-H10O-80GB-HBM3", "NVIDIA-H100-80GB-HBM3"),
        ("V100", None),
        ("MI300X", None),
        ("H100 40GB", None),
    ],
)
def test_misspelt_gpu_name_has_one_suggestion(estimate: Estimate, name: str, meant: str | None) -> None:
    (result,) = estimate(article(name, "fp8", "bf16"))
    found = re.findall(r"did you mean (\S+)\?", result["error"])
    assert found == ([] if meant is None else [meant])
    assert "Other GPUs" in result["error"]


def test_gpu_memory_may_replace_the_gpu_name(estimate: Estimate) -> None:
    (result,) = estimate(article("H100", "fp8", "bf16", gpu=None, gpu_total_gib=100))
    assert result["per_gpu"]["total"] == 100 * GIB


@pytest.mark.parametrize(
    ("version", "utilization"), [("0.17.1", 0.9), ("v0.19.1", 0.9), ("0.22", 0.92), ("0.32.0", 0.92), (None, 0.92)]
)
def test_default_memory_utilization_follows_the_vllm_version(
    estimate: Estimate, version: str | None, utilization: float
) -> None:
    case = article("H200", "fp8", "bf16", vllm_version=version, gpu_memory_utilization=None)
    per_gpu = estimate(case)[0]["per_gpu"]
    assert per_gpu["requested"] / per_gpu["total"] == pytest.approx(utilization)


def test_absent_settings_take_the_defaults_of_the_gpu(estimate: Estimate) -> None:
    left_out = {"max_num_seqs": None, "max_num_batched_tokens": None, "block_size": None, "kv_cache_dtype": None}
    large = {"max_num_seqs": 1024, "max_num_batched_tokens": 8192, "block_size": 16, "kv_cache_dtype": "auto"}
    small = {**large, "max_num_seqs": 256, "max_num_batched_tokens": 2048}
    for gpu, total_gib, settings in (("H100", None, large), ("A100-80", 79.25, small), ("L40S", 44.5, small)):
        device = {"gpu": gpu, "gpu_total_gib": total_gib, "id": gpu}
        default, said = estimate(
            article("", "fp8", "bf16", **{**device, **left_out}), article("", "fp8", "bf16", **{**device, **settings})
        )
        assert default["error"] is None
        assert default == said


def test_default_quantization_is_that_of_the_checkpoint(estimate: Estimate) -> None:
    null, bf16 = estimate(article("H100", None, "bf16", id=1), article("H100", "bf16", "bf16", id=1))
    assert null["error"] is None
    assert null == bf16


OTHER_VOCABULARY = {"method": "draft_model", "num_speculative_tokens": 3, "model": "Qwen/Qwen2.5-0.5B"}


@pytest.mark.parametrize(
    ("change", "key"),
    [
        (
            {"speculative": OTHER_VOCABULARY},
            "speculative.model: Qwen/Qwen2.5-0.5B",
        ),
        ({"max_num_batched_tokens": 64, "max_num_seqs": 128}, "max_num_batched_tokens: 64"),
        ({"max_model_len": 131_073}, "max_model_len: 131073"),
        ({"block_size": 24}, "block_size: 24"),
        (
            {
                "vllm_version": "0.30",
                "speculative": {**OTHER_VOCABULARY, "model": DRAFT, "num_speculative_tokens": 129},
            },
            "speculative.num_speculative_tokens: 129",
        ),
        ({"min_concurrency": 0}, "min_concurrency: 0"),
        ({"pp": 33}, "pp: 33"),
    ],
)
def test_case_that_vllm_refuses_is_an_error(estimate: Estimate, change: dict[str, Any], key: str) -> None:
    good, bad = estimate({**OF_8B}, {**OF_8B, **change})
    assert good["error"] is None
    assert bad["error"].startswith(key + ": ")


def small_config(**changes: Any) -> dict[str, Any]:
    """The config.json of a small model made for 4096 tokens."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
        **changes,
    }


@pytest.mark.parametrize(
    "change",
    [
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
        {"model_max_length": 16384},
    ],
)
def test_length_extended_by_the_model_config_is_sized(estimate: Estimate, change: dict[str, Any]) -> None:
    asked = {"gpu": "H200", "max_model_len": 16384}
    stretched, plain = estimate(
        {**asked, "model_config": small_config(**change)}, {**asked, "model_config": small_config()}
    )
    assert stretched["error"] is None
    assert plain["error"].startswith("max_model_len: 16384: ")


def test_yarn_length_limit_follows_the_vllm_version(estimate: Estimate) -> None:
    """From 0.30 on max_position_embeddings counts, as a file has it; without a version it is the newest."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    case = {"gpu": "H200", "max_model_len": 16384, "model_config": small_config(rope_scaling=yarn)}
    old, longer, new, newest = estimate(
        {**case, "vllm_version": "0.29"},
        {**case, "vllm_version": "0.29", "max_model_len": 16385},
        {**case, "vllm_version": "0.30"},
        case,
    )
    assert old["error"] is None
    assert longer["error"].startswith("max_model_len: 16385: ")
    assert new["error"] == newest["error"]
    assert "made for at most 4096 tokens" in new["error"]


def test_settings_that_the_engine_adjusts_itself_are_no_error(estimate: Estimate) -> None:
    """Its own default of sequences; and other vocabularies, where the engine is told to translate."""
    translated = {**OTHER_VOCABULARY, "use_heterogeneous_vocab": True}
    results = estimate(
        {**OF_8B, "max_num_batched_tokens": 64}, {**OF_8B, "speculative": translated}, {**OF_8B, "min_concurrency": 1}
    )
    assert [result["error"] for result in results] == [None, None, None]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dtype": "fp64"}, "dtype: fp64: is not known: use one of auto, bfloat16"),
        (
            {"dtype": "half", "model": "google/gemma-3-27b-it"},
            "dtype: half: google/gemma-3-27b-it is not stable in it",
        ),
        ({"dtype": "float32", "quantization": "fp8"}, "multiplies in 16 bits"),
    ],
)
def test_dtype_that_the_engine_refuses_is_an_error(estimate: Estimate, changes: dict[str, Any], words: str) -> None:
    assert words in estimate({"model": DRAFT, "gpu": "H200", **changes})[0]["error"]


def test_refused_kv_cache_dtype_is_reported_with_its_reason(estimate: Estimate) -> None:
    models = {
        "deepseek-ai/DeepSeek-V2-Lite": "latent attention",
        "Qwen/Qwen3-32B-FP8": "whose format scales the cache: write fp8",
        "Qwen/Qwen3-8B": None,
    }
    results = estimate(*({"model": model, "gpu": "H200", "kv_cache_dtype": "fp8_e5m2"} for model in models))
    for words, result in zip(models.values(), results, strict=True):
        error = result["error"]
        assert error is None if words is None else error.startswith("kv_cache_dtype: fp8_e5m2: ") and words in error


def test_error_blames_the_checkpoint_for_the_fp8_cache_it_requires(estimate: Estimate) -> None:
    (result,) = estimate({"model": "nvidia/Kimi-K2.5-NVFP4", "gpu": "A100-80", "tp": 8, "pp": 2})
    assert result["error"].startswith("kv_cache_dtype: auto: the checkpoint requires an FP8 cache: on NVIDIA-A100")


@pytest.mark.parametrize(
    ("gpu", "uncalibrated"),
    [
        ({"gpu": "H100"}, False),
        ({"gpu": "A100-80", "gpu_total_gib": 79.2}, False),
        ({"gpu_total_gib": 79.2}, True),
        ({"gpu": "RTX 5060 Ti", "gpu_total_gib": 15.48}, True),
    ],
)
def test_gpu_without_logs_is_marked_uncalibrated(estimate: Estimate, gpu: dict[str, Any], uncalibrated: bool) -> None:
    known, (result,) = estimate({"gpu": "H100", "model": DRAFT})[0], estimate({**gpu, "model": DRAFT})
    assert result.get("uncalibrated", False) is uncalibrated
    assert (result["margin_bytes"] > known["margin_bytes"]) is uncalibrated


# `specdecode plan --batch` takes vLLM's own names, and passes nothing over that it does not know.

OURS = {"model": TARGET, "gpu": "H200", "tp": 4, "max_model_len": 8192}
SPECULATIVE = {"method": "draft_model", "num_speculative_tokens": 5, "model": DRAFT}
ONE_GPU = {"model": DRAFT, "gpu": "H200"}


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({**OURS}, {"model": TARGET, "gpu": "H200", "tensor_parallel_size": 4, "max_seq_len": 8192}),
        ({**OURS}, {"--model": TARGET, "gpu": "H200", "--tensor-parallel-size": 4, "--max-model-len": 8192}),
        ({**OURS}, {**OURS, "tensor_parallel_size": 4, "max_seq_len": None, "model_tag": TARGET}),
        ({**OURS, "pp": 2}, {**OURS, "pipeline_parallel_size": 2}),
        ({**OURS, "dp": 2}, {**OURS, "data_parallel_size": 2}),
        ({**OURS, "speculative": SPECULATIVE}, {**OURS, "speculative_config": SPECULATIVE}),
        (
            {**OURS, "speculative": SPECULATIVE},
            {
                **OURS,
                "--speculative-config": json.dumps(SPECULATIVE),
            },
        ),
        (
            {**OURS, "speculative": SPECULATIVE},
            {
                **OURS,
                "speculative": {**SPECULATIVE, "draft_tensor_parallel_size": 4, "rejection_sample_method": "block"},
            },
        ),
        (
            {
                "model": "deepseek-ai/DeepSeek-R1",
                "gpu": "H200",
                "tp": 8,
                "speculative": {"method": "mtp", "num_speculative_tokens": 1},
            },
            {
                "model": "deepseek-ai/DeepSeek-R1",
                "gpu": "H200",
                "tp": 8,
                "speculative": {"method": "deepseek_mtp", "num_speculative_tokens": 1},
            },
        ),
    ],
)
def test_vllm_option_names_give_the_same_result(
    estimate: Estimate, ours: dict[str, Any], theirs: dict[str, Any]
) -> None:
    one, other = estimate(ours, theirs)
    assert one["error"] is None
    assert one == other


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ({**OURS, "tensor_parallel_size": 2}, "tensor_parallel_size: 2: contradicts tp, 4: remove one of the two"),
        ({**ONE_GPU, "tp": 1, "tensor_parallel_size": True}, "contradicts tp, 1"),
        ({**ONE_GPU, "tensor_paralell_size": 2}, "is not a key of a case: did you mean tensor_parallel_size?"),
        ({**ONE_GPU, "max_model_length": 2}, "did you mean max_model_len?"),
        ({**ONE_GPU, "zzz": 2}, "zzz: 2: is not a key of a case: remove it, or use one of id, "),
        ({**ONE_GPU, "": 2}, "is not a key of a case"),
        ({**ONE_GPU, "tensor_parallel_size": "2"}, 'tensor_parallel_size: "2": must be a whole number'),
        ({**ONE_GPU, "speculative_config": {"method": "ngram"}}, "speculative_config.num_speculative_tokens"),
        (
            {**ONE_GPU, "speculative_config": {"metod": "ngram"}},
            "speculative_config.metod: ngram: is not a key of a case: did you mean method?",
        ),
        ({**ONE_GPU, "speculative_config": "{"}, "speculative_config: {: is not valid JSON"),
        ({**ONE_GPU, "speculative_config": "ngram"}, "speculative_config: ngram: must be an object"),
        ({**ONE_GPU, "enable_expert_parallel": True}, "has no experts to spread"),
        ({**ONE_GPU, "quantization": "awq"}, "is not quantized: name the checkpoint that is"),
        ({**ONE_GPU, "gpu_count": 4}, "gpu_count: 4: does not say how the engine uses them: add tp, pp or dp"),
        (
            {
                **ONE_GPU,
                "speculative": {
                    "method": "ngram",
                    "num_speculative_tokens": 3,
                    "num_speculative_tokens_per_batch_size": [[1, 4]],
                },
            },
            "must be a list of [first, last, tokens]",
        ),
        (
            {**OURS, "speculative": {**SPECULATIVE, "draft_sample_method": "random"}},
            "draft_sample_method: random: is not known",
        ),
    ],
)
def test_invalid_key_fails_only_its_own_line(estimate: Estimate, case: dict[str, Any], words: str) -> None:
    before, bad, after = estimate(ONE_GPU, case, ONE_GPU)
    assert words in bad["error"]
    assert before == after
    assert before["error"] is None


def test_speculative_options_that_change_memory_are_counted(estimate: Estimate) -> None:
    drafted = {**OURS, "speculative": SPECULATIVE}
    pairs = [
        (drafted, {**OURS, "speculative": {**SPECULATIVE, "draft_sample_method": "probabilistic"}}),
        (
            drafted,
            {**OURS, "speculative": {**SPECULATIVE, "num_speculative_tokens_per_batch_size": [[1, 8, 5], [9, 256, 1]]}},
        ),
    ]
    for without, counted in pairs:
        one, other = estimate(without, counted)
        assert (one["error"], other["error"]) == (None, None)
        assert one["per_gpu"] != other["per_gpu"]


def test_hf_overrides_are_applied(estimate: Estimate) -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "rope_theta": 1000000}
    asked = {"model": "Qwen/Qwen3-32B", "gpu": "H200", "max_model_len": 131_072}
    plain, told = estimate(
        asked, {**asked, "hf_overrides": {"rope_parameters": rope, "max_position_embeddings": 131_072}}
    )
    assert "was made for at most 40960 tokens: use that or less, or stretch it by hf_overrides" in plain["error"]
    assert told["error"] is None
    (bad,) = estimate({**asked, "hf_overrides": {"num_hidden_layers": "x"}})
    assert bad["error"].startswith("hf_overrides.num_hidden_layers: x")


def test_quantization_scheme_of_the_checkpoint_changes_nothing(estimate: Estimate) -> None:
    model = {"model": "nvidia/Llama-3.1-70B-Instruct-FP8", "gpu": "H200"}
    plain, named = estimate(model, {**model, "quantization": "modelopt"})
    assert plain == named
    assert plain["error"] is None


def test_remark_keys_of_collected_logs_are_ignored(estimate: Estimate) -> None:
    plain = article("H100", "fp8", "bf16")
    remarks = {"source_url": "https://example.org", "confidence": "high", "observed": {}, "gpu_count": 2, "comment": 1}
    assert estimate({**plain, **remarks}) == estimate(plain)


def test_removed_method_is_sized_only_for_versions_that_have_it(estimate: Estimate) -> None:
    head = {"model_type": "medusa", "hidden_size": 4096, "num_heads": 4, "num_hidden_layers": 1, "vocab_size": 128256}
    case = {**ONE_GPU, "speculative": {"method": "medusa", "num_speculative_tokens": 3, "model_config": head}}
    lives, ended = (estimate({**case, "vllm_version": version})[0] for version in ("0.32", "0.33"))
    assert lives["error"] is None
    assert ended["error"].startswith("speculative.method: medusa: vLLM 0.33")
    assert "use eagle3, or vllm_version 0.32" in ended["error"]


# `specdecode plan --batch` takes the settings that real logs name, or says of each what it does not model.

TEXT, IMAGES = "meta-llama/Llama-3.1-8B-Instruct", "google/gemma-3-4b-it"
NEWEST = find_profile(KNOWN_VERSIONS[-1])
STATES = "Qwen/Qwen3-Next-80B-A3B-Instruct"


@pytest.fixture
def on_h100(estimate: Estimate) -> Estimate:
    """Return the batch: changes of one H100 in, result lines out."""
    case = {"gpu": "H100", "max_model_len": 8192}
    return lambda model, *changes: estimate(*({"model": model, **case, **each} for each in changes))


@pytest.mark.parametrize(
    "asked", [{"language_model_only": True}, {"limit_mm_per_prompt": {"image": 0, "video": {"count": 0}}}]
)
def test_unused_multimodal_encoder_is_not_counted(on_h100: Estimate, asked: dict[str, Any]) -> None:
    with_encoder, without = on_h100(IMAGES, {}, asked)
    assert without["per_gpu"]["target_weights"] < with_encoder["per_gpu"]["target_weights"]
    assert without["per_gpu"]["activation"] < with_encoder["per_gpu"]["activation"]
    assert "unmodelled" not in without


@pytest.mark.parametrize("limits", [{"image": 2}, {"image": 0}, {"image": 0, "video": 0, "audio": 1}])
def test_image_limits_are_reported_as_unmodelled(on_h100: Estimate, limits: dict[str, int]) -> None:
    plain, limited = on_h100(IMAGES, {}, {"limit_mm_per_prompt": limits})
    assert limited["per_gpu"] == plain["per_gpu"]
    (said,) = limited["unmodelled"]
    assert said.startswith("limit_mm_per_prompt: ")


@pytest.mark.parametrize(
    "asked",
    [
        {"max_cudagraph_capture_size": 64},
        {"compilation_config": {"max_cudagraph_capture_size": 64}},
        {"compilation_config": '{"max_cudagraph_capture_size": 64}'},
        {"compilation_config": {"max_cudagraph_capture_size": 64}, "--max-cudagraph-capture-size": 64},
    ],
)
def test_fewer_cuda_graphs_take_less_memory(on_h100: Estimate, asked: dict[str, Any]) -> None:
    plain, fewer, none = on_h100(TEXT, {}, asked, {"compilation_config": {"cudagraph_mode": "none"}})
    assert 0 < fewer["per_gpu"]["cuda_graphs"] < plain["per_gpu"]["cuda_graphs"]
    assert none["per_gpu"]["cuda_graphs"] == 0


def test_other_compilation_keys_are_reported_as_unmodelled(on_h100: Estimate) -> None:
    (result,) = on_h100(
        TEXT, {"compilation_config": {"cudagraph_mode": "FULL", "pass_config": {"fuse_norm_quant": True}}}
    )
    (said,) = result["unmodelled"]
    assert said.startswith("compilation_config.pass_config: ")


def test_decode_context_parallelism_is_reported_as_unmodelled(on_h100: Estimate) -> None:
    alone, shared = on_h100(TEXT, {"decode_context_parallel_size": 1}, {"decode_context_parallel_size": 2, "tp": 16})
    assert "unmodelled" not in alone
    (said,) = shared["unmodelled"]
    assert said.startswith("decode_context_parallel_size: 2 ranks")


def test_ssm_cache_dtype_changes_the_capacity(on_h100: Estimate) -> None:
    own, small, wide = on_h100(
        STATES, *({"available_kv_gib": 20, "mamba_ssm_cache_dtype": each} for each in ("auto", "bfloat16", "float32"))
    )
    assert small["max_concurrency"] > wide["max_concurrency"]
    assert own["max_concurrency"] in {small["max_concurrency"], wide["max_concurrency"]}


@pytest.mark.parametrize(
    ("asked", "start"),
    [
        ({"language_model_only": "yes"}, "language_model_only: yes: must be true or false"),
        ({"limit_mm_per_prompt": {"image": -1}}, "limit_mm_per_prompt.image: -1: must be a whole number"),
        ({"max_cudagraph_capture_size": 0}, "max_cudagraph_capture_size: 0: must lie between"),
        ({"compilation_config": {"cudagraph_mode": "SOME"}}, "compilation_config.cudagraph_mode: SOME: is not known"),
        (
            {"compilation_config": {"max_cudagraph_capture_size": 8}, "max_cudagraph_capture_size": 16},
            "compilation_config.max_cudagraph_capture_size: 8: contradicts",
        ),
        ({"decode_context_parallel_size": "2"}, 'decode_context_parallel_size: "2": must be a whole number'),
        ({"mamba_ssm_cache_dtype": "fp8"}, "mamba_ssm_cache_dtype: fp8: is not known"),
    ],
)
def test_invalid_value_is_reported_with_its_key(on_h100: Estimate, asked: dict[str, Any], start: str) -> None:
    (result,) = on_h100(TEXT, asked)
    assert result["error"].startswith(start)


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"decode_context_parallel_size": 8}, "decode_context_parallel_size: 8"),
        ({"decode_context_parallel_size": 2, "tp": 8}, "decode_context_parallel_size: 2"),
        ({"decode_context_parallel_size": 3, "tp": 32}, "decode_context_parallel_size: 3"),
        ({"decode_context_parallel_size": True}, "decode_context_parallel_size: true"),
        ({"compilation_config": {"cudagraph_capture_sizes": [2**60]}}, "compilation_config.cudagraph_capture_sizes"),
        ({"compilation_config": {"cudagraph_capture_sizes": [100_000]}}, "compilation_config.cudagraph_capture_sizes"),
        ({"compilation_config": {"cudagraph_capture_sizes": []}}, "compilation_config.cudagraph_capture_sizes"),
        ({"compilation_config": {"cudagraph_capture_sizes": [True]}}, "compilation_config.cudagraph_capture_sizes"),
        ({"compilation_config": {"cudagraph_capture_sizes": 8}}, "compilation_config.cudagraph_capture_sizes"),
        ({"compilation_config": {"cudagraph_capture_sizes": [1, 8]}, "max_cudagraph_capture_size": 64}, "contradicts"),
        ({"compilation_config": {"level": 2**60}}, "compilation_config.level"),
        ({"compilation_config": {"compile_sizes": [1, 1e300]}}, "compilation_config.compile_sizes"),
        ({"limit_mm_per_prompt": {"image": 2**60}}, "limit_mm_per_prompt.image"),
        ({"limit_mm_per_prompt": {"video": {"count": -1}}}, "limit_mm_per_prompt.video"),
    ],
)
def test_settings_that_no_engine_accepts_are_an_error(on_h100: Estimate, asked: dict[str, Any], field: str) -> None:
    (result,) = on_h100(TEXT, asked)
    assert field in result["error"]


@pytest.mark.parametrize(
    ("model", "asked"),
    [
        (TEXT, {"decode_context_parallel_size": 2, "tp": 16}),
        ("deepseek-ai/DeepSeek-V3", {"decode_context_parallel_size": 8, "tp": 8}),
        # Its full layers have 16 query heads for each KV head, those with a window have 8.
        ("XiaomiMiMo/MiMo-V2-Flash", {"decode_context_parallel_size": 16, "tp": 64}),
        (TEXT, {"compilation_config": {"cudagraph_capture_sizes": [8, 1]}, "max_cudagraph_capture_size": 8}),
    ],
)
def test_settings_that_an_engine_accepts_are_sized(on_h100: Estimate, model: str, asked: dict[str, Any]) -> None:
    (result,) = on_h100(model, asked)
    assert result["error"] is None


# What `plan --batch` makes of a --speculative-config that says more of the draft.


def test_parallel_drafting_changes_the_memory_terms(estimate: Estimate) -> None:
    speculative = {"method": "draft_model", "model": "meta-llama/Llama-3.2-1B", "num_speculative_tokens": 8}
    plain, parallel = estimate(
        {**OF_8B, "speculative": speculative},
        {**OF_8B, "speculative": {**speculative, "parallel_drafting": True}},
    )
    assert (plain["error"], parallel["error"]) == (None, None)
    # On model runner V1, whose terms are others.
    assert plain["per_gpu"] != parallel["per_gpu"]


def test_quantized_copy_of_the_output_head_takes_memory(estimate: Estimate) -> None:
    case = {"gpu": "H200", "model": "deepseek-ai/DeepSeek-V3", "tp": 8, "max_model_len": 8192}
    speculative = {"method": "mtp", "num_speculative_tokens": 1}
    plain, copied, unknown = estimate(
        {**case, "speculative": speculative},
        {**case, "speculative": {**speculative, "draft_lm_head_quantization": "fp8"}},
        {**case, "speculative": {**speculative, "draft_lm_head_quantization": "int4"}},
    )
    assert (plain["error"], copied["error"]) == (None, None)
    rows = 129_280 // 8
    assert copied["per_gpu"]["draft_weights"] - plain["per_gpu"]["draft_weights"] == rows * (7168 + 4)
    assert "use one of fp8, nvfp4" in unknown["error"]


def test_xpress_head_that_refines_all_tokens_takes_memory(estimate: Estimate) -> None:
    entry = find_entry("sgl-project/SpecForge:configs/qwen3-8b-dflash.json")
    assert entry is not None
    head = {**entry.config, "architectures": ["Qwen3XPressModel"]}
    case = {"gpu": "H200", "model": "Qwen/Qwen3-8B", "max_model_len": 8192, "max_num_seqs": 128}
    refined = {"method": "dflash", "model_config": head, "num_speculative_tokens": 15}
    own, all_tokens, too_many, plain, old = estimate(
        {**case, "speculative": refined},
        {**case, "speculative": {**refined, "xpress_topc": 0}},
        {**case, "speculative": {**refined, "xpress_topc": 151_937}},
        {**case, "speculative": {**refined, "model_config": dict(entry.config), "xpress_topc": 64}},
        {**case, "speculative": refined, "vllm_version": "0.32"},
    )
    assert (own["error"], all_tokens["error"]) == (None, None)
    kept = 128 * 15 * ((2 * 151_936 + 256) * 2 + 38 * 12)
    assert all_tokens["per_gpu"]["activation"] - own["per_gpu"]["activation"] == kept
    assert "from 0 to the vocabulary, 151936" in too_many["error"]
    assert "only applies to XPress heads" in plain["error"]
    assert "speculative.model" in old["error"]
    assert "use 0.33 or later" in old["error"]


def test_lossy_fly_verification_takes_memory_and_needs_vllm_033(estimate: Estimate) -> None:
    speculative = {"method": "draft_model", "model": "meta-llama/Llama-3.2-1B", "num_speculative_tokens": 8}
    block, fly = ({**speculative, "rejection_sample_method": way} for way in ("block", "fly"))
    full = {"max_num_seqs": 1024, "max_num_batched_tokens": 16_384, "gpu_memory_utilization": 0.95}
    exact, lossy, early, single, two, unknown = estimate(
        {**OF_8B, **full, "max_model_len": 8192, "vllm_version": "0.33", "speculative": block},
        {
            **OF_8B,
            **full,
            "max_model_len": 8192,
            "vllm_version": "0.33",
            "speculative": {**fly, "fly_window_size": 3},
        },
        {**OF_8B, "vllm_version": "0.32", "speculative": fly},
        {**OF_8B, "vllm_version": "0.33", "speculative": {**fly, "num_speculative_tokens": 1}},
        {**OF_8B, "vllm_version": "0.33", "speculative": {**fly, "num_speculative_tokens": 2}},
        {**OF_8B, "vllm_version": "0.33", "speculative": {**fly, "rejection_sample_method": "typical"}},
    )
    assert (exact["error"], lossy["error"]) == (None, None)
    assert (exact["verdict"], lossy["verdict"]) == ("Fits", "Tight"), "what runs beside the KV cache is 1 GiB more"
    assert "vLLM 0.32 does not have it" in early["error"]
    assert "use 2 or more" in single["error"]
    assert two["error"] is None, "one token comes after a rejected one"
    assert "use one of standard, block, fly" in unknown["error"]


OUR_KEYS = {"id", "vllm_version", "gpu", "gpu_total_gib", "model_config", "min_concurrency", "available_kv_gib"}
SHORT_KEYS = {"speculative": "speculative_config"}
LOGGED_KEYS = {"max_seq_len", "model_tag", "warm_compile_cache"}


def test_batch_keys_are_vllm_flags() -> None:
    flags = {name.removeprefix("--").lstrip("-").replace("-", "_") for name in NEWEST.flags}
    keys = {SHORT_KEYS.get(key, key) for key in CASE_SPELLINGS} - OUR_KEYS - LOGGED_KEYS
    assert keys <= flags
    assert {*SPECULATIVE_SPELLINGS, *SPECULATIVE_REMARKS} - {"model_config", "draft_layers"} <= NEWEST.speculative_keys


def test_spec_field_errors_name_the_matching_batch_key() -> None:
    becomes = {(f"spec.{field}", key) for field, key in KEY_OF.items()}
    keys = {(row.field, f"speculative.{row.key}") for row in SPECULATIVE_KEYS}
    flags = {(row.field, CASE_SPELLINGS.get(row.flag.removeprefix("--").replace("-", "_"))) for row in ARGUMENTS}
    written = {row.field for row in (*ARGUMENTS, *SPECULATIVE_KEYS)}
    assert {each for each in becomes if each[0] in written} <= keys | flags
