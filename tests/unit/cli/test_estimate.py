"""`specdecode estimate`: JSON lines in, JSON lines out, and no line that stops the batch."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specdecode_operator.estimate import speculation
from specdecode_operator.sizing.base.remembered import MadeOfContent
from specdecode_operator.sizing.families import config
from tests.support.llama import LLAMA_8B_CONFIG
from tests.unit.cli.conftest import Specdecode

GIB = 2**30
TARGET, DRAFT = "meta-llama/Llama-3.1-70B-Instruct", "meta-llama/Llama-3.1-8B-Instruct"

Estimate = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def estimate(specdecode: Specdecode, tmp_path: Path) -> Estimate:
    """Return the batch: cases (or lines as they are) in, result lines out."""

    def run(*cases: dict[str, Any] | str) -> list[dict[str, Any]]:
        source, results = tmp_path / "cases.jsonl", tmp_path / "results.jsonl"
        source.write_text("".join((case if isinstance(case, str) else json.dumps(case)) + "\n" for case in cases))
        finished = specdecode("estimate", "--in", source, "--out", results)
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
def test_the_articles_case(  # noqa: PLR0913, PLR0917  one column each
    estimate: Estimate, gpu: str, target: str, draft: str | None, weights_gib: float, available_gib: float, tokens: int
) -> None:
    (result,) = estimate(article(gpu, target, draft))
    per_gpu = result["per_gpu"]
    assert (per_gpu["target_weights"] + per_gpu["draft_weights"]) / GIB == pytest.approx(weights_gib, abs=0.006)
    assert per_gpu["available_kv"] / GIB == pytest.approx(available_gib, abs=0.006)
    assert result["kv_cache_tokens"] == tokens


def test_terms_are_integers_that_add_up(estimate: Estimate) -> None:
    for utilization in (0.9, 0.92, 0.875, 1 / 3):
        (result,) = estimate(article("H200", "bf16", "bf16", gpu_memory_utilization=utilization))
        per_gpu = result["per_gpu"]
        assert all(type(size) is int for size in per_gpu.values())
        charged = sum(size for term, size in per_gpu.items() if term not in ("total", "requested", "available_kv"))
        assert per_gpu["requested"] - charged == per_gpu["available_kv"]
        assert per_gpu["requested"] == pytest.approx(per_gpu["total"] * utilization, abs=2)


def test_every_line_gets_its_line_whatever_it_holds(estimate: Estimate) -> None:
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


def test_remarks_and_blank_lines_are_passed_over(estimate: Estimate) -> None:
    plain = article("H100", "fp8", "bf16")
    assert estimate({**plain, "notes": "from a log", "observed": {"x": 1}}, "", "  ") == estimate(plain)


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
    ],
)
def test_gpus_have_many_names(estimate: Estimate, name: str, same_as: str) -> None:
    cases = (article(gpu, "fp8", "bf16", id=1) for gpu in (name, same_as))
    one, other = estimate(*cases)
    assert one["error"] is None
    assert one == other


@pytest.mark.parametrize("name", ["H1000", "GH200", "H100 40GB", "NVIDIA-H100-80GB-HBM3-MIG-1g.10gb", "RTX 4090"])
def test_other_gpus_are_not_taken_for_known_ones(estimate: Estimate, name: str) -> None:
    (result,) = estimate(article(name, "fp8", "bf16"))
    assert "gpu_total_gib" in result["error"]


def test_the_memory_may_be_given_instead_of_the_gpu(estimate: Estimate) -> None:
    (result,) = estimate(article("H100", "fp8", "bf16", gpu=None, gpu_total_gib=100))
    assert result["per_gpu"]["total"] == 100 * GIB


@pytest.mark.parametrize(
    ("version", "utilization"), [("0.17.1", 0.9), ("v0.19.1", 0.9), ("0.22", 0.92), ("0.32.0", 0.92), (None, 0.92)]
)
def test_the_share_of_memory_follows_the_version(estimate: Estimate, version: str | None, utilization: float) -> None:
    case = article("H200", "fp8", "bf16", vllm_version=version, gpu_memory_utilization=None)
    per_gpu = estimate(case)[0]["per_gpu"]
    assert per_gpu["requested"] / per_gpu["total"] == pytest.approx(utilization)


def test_absent_settings_are_those_of_the_device(estimate: Estimate) -> None:
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


def test_a_config_stands_in_for_the_catalogue(estimate: Estimate) -> None:
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


def test_the_precision_of_the_checkpoint_is_the_default(estimate: Estimate) -> None:
    null, bf16 = estimate(article("H100", None, "bf16", id=1), article("H100", "bf16", "bf16", id=1))
    assert null["error"] is None
    assert null == bf16


def test_streams_may_be_standard_ones(specdecode: Specdecode) -> None:
    case = json.dumps(article("H100", "fp8", "bf16"))
    result = specdecode("estimate", "--in", "-", "--out", "-", stdin=f"{case}\nbad\n")
    assert [json.loads(line)["error"] is None for line in result.stdout.splitlines()] == [True, False]
    assert "1 of 2 cases have an error" in result.stderr


def test_a_file_that_cannot_be_read_is_named(specdecode: Specdecode, tmp_path: Path) -> None:
    result = specdecode("estimate", "--in", tmp_path / "absent.jsonl", "--out", "-")
    assert result.exit_code == 2
    assert "absent.jsonl" in result.stderr


OF_8B = {"model": DRAFT, "gpu": "H200", "vllm_version": "0.32"}
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
def test_what_vllm_refuses_is_refused(estimate: Estimate, change: dict[str, Any], key: str) -> None:
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
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}},
        {"model_max_length": 16384},
    ],
)
def test_what_vllm_may_stretch_is_sized(estimate: Estimate, change: dict[str, Any]) -> None:
    asked = {"gpu": "H200", "max_model_len": 16384}
    stretched, plain = estimate(
        {**asked, "model_config": small_config(**change)}, {**asked, "model_config": small_config()}
    )
    assert stretched["error"] is None
    assert plain["error"].startswith("max_model_len: 16384: ")


def test_what_the_engine_lowers_by_itself_is_sized(estimate: Estimate) -> None:
    """Its own default of sequences; and other vocabularies, where the engine is told to translate."""
    translated = {**OTHER_VOCABULARY, "use_heterogeneous_vocab": True}
    results = estimate(
        {**OF_8B, "max_num_batched_tokens": 64}, {**OF_8B, "speculative": translated}, {**OF_8B, "min_concurrency": 1}
    )
    assert [result["error"] for result in results] == [None, None, None]


def test_min_concurrency_decides_the_verdict(estimate: Estimate) -> None:
    fits, too_many = estimate(
        {**OF_8B, "max_model_len": 8192, "min_concurrency": 8}, {**OF_8B, "max_model_len": 8192, "min_concurrency": 500}
    )
    assert (fits["verdict"], too_many["verdict"]) == ("Fits", "DoesNotFit")


def test_a_line_that_is_no_json_is_told_by_its_number(estimate: Estimate) -> None:
    _, first, second = estimate("", "   ", {**OF_8B, "id": 1}, "{not json", "[" * 100_000)
    assert first["error"].startswith("line 4: is no JSON at column 2: ")
    assert second["error"].startswith("line 5: ")


@pytest.mark.parametrize("model", [DRAFT, "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"])
@pytest.mark.parametrize("place", [{"gpu": "H200"}, {"available_kv_gib": 20}])
def test_every_number_of_stages_has_a_result_or_an_error_that_names_it(
    estimate: Estimate, model: str, place: dict[str, Any]
) -> None:
    results = estimate(*({"id": pp, "model": model, "pp": pp, **place} for pp in range(1, 56)))
    assert results[0]["error"] is None
    assert results[-1]["error"]
    for result in results:
        assert result["error"] is None or result["error"].startswith(f"pp: {result['id']}: "), result


def test_float32_is_sized_as_a_public_log_has_it(estimate: Estimate) -> None:
    """The groundtruth's llama-3.1-8b-instruct-float32: 42.80 GiB and 175,296 tokens."""
    case = {
        "vllm_version": "0.19",
        "model": DRAFT,
        "gpu": "H100",
        "gpu_memory_utilization": 0.95,
        "max_model_len": 8192,
    }
    results = estimate(
        *({**case, **dtype} for dtype in ({"dtype": "float32"}, {"dtype": "float"}, {"dtype": "half"}, {}))
    )
    assert [each["kv_cache_tokens"] for each in results] == [175_296, 175_296, 476_048, 476_048]
    assert results[0]["per_gpu"]["available_kv"] / GIB == pytest.approx(42.80, abs=0.005)


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
def test_a_type_that_the_engine_refuses_is_refused(estimate: Estimate, changes: dict[str, Any], words: str) -> None:
    assert words in estimate({"model": DRAFT, "gpu": "H200", **changes})[0]["error"]


def test_a_draft_that_matches_is_named(estimate: Estimate) -> None:
    (bad,) = estimate({**OF_8B, "speculative": OTHER_VOCABULARY})
    assert bad["error"].endswith(
        "151936 tokens and that of meta-llama/Llama-3.1-8B-Instruct 128256, and vLLM wants the same:"
        " choose meta-llama/Llama-3.2-1B-Instruct"
    )


def test_a_cache_type_that_the_engine_refuses_is_told_as_plan_does(estimate: Estimate) -> None:
    models = {
        "deepseek-ai/DeepSeek-V2-Lite": "latent attention",
        "Qwen/Qwen3-32B-FP8": "whose format scales the cache: write fp8",
        "Qwen/Qwen3-8B": None,
    }
    results = estimate(*({"model": model, "gpu": "H200", "kv_cache_dtype": "fp8_e5m2"} for model in models))
    for words, result in zip(models.values(), results, strict=True):
        error = result["error"]
        assert error is None if words is None else error.startswith("kv_cache_dtype: fp8_e5m2: ") and words in error


def test_a_cache_that_the_checkpoint_made_fp8_is_not_said_to_be_asked_for(estimate: Estimate) -> None:
    (result,) = estimate({"model": "nvidia/Kimi-K2.5-NVFP4", "gpu": "A100-80", "tp": 8, "pp": 2})
    assert result["error"].startswith("kv_cache_dtype: auto: the checkpoint asks for an FP8 cache: on NVIDIA-A100")


def test_what_no_kernel_of_the_gpu_reads_is_refused(estimate: Estimate) -> None:
    asked = {"model": "openai/gpt-oss-120b", "kv_cache_dtype": "fp8"}
    on_a100, on_h100, sparse = estimate(
        {**asked, "gpu": "A100-80"},
        {**asked, "gpu": "H100"},
        {"model": "deepseek-ai/DeepSeek-V3.2", "gpu": "A100-80", "tp": 8, "pp": 2},
    )
    assert on_a100["error"].startswith("kv_cache_dtype: fp8: on NVIDIA-A100-SXM4-80GB vLLM has no kernel")
    assert on_h100["error"] is None
    assert sparse["error"].startswith("gpu: NVIDIA-A100-SXM4-80GB: vLLM has no kernel on it for the sparse attention")


def described(**changes: Any) -> dict[str, Any]:
    """A case that holds its config.json, and that of its draft."""
    drafting = {"method": "draft_model", "num_speculative_tokens": 1, "model_config": LLAMA_8B_CONFIG}
    case = {"gpu": "H100", "tp": 2, "model_config": LLAMA_8B_CONFIG, "speculative": drafting}
    return {**case, **{key: value for key, value in changes.items() if key != "drafting"}} | (
        {"speculative": {**drafting, **changes["drafting"]}} if "drafting" in changes else {}
    )


def test_a_line_is_answered_as_alone_whatever_lines_before_it_said(estimate: Estimate) -> None:
    wide = {**LLAMA_8B_CONFIG, "intermediate_size": 16_384}
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
        described(),
    ]
    together = estimate(*cases, *reversed(cases))
    for case, result in zip([*cases, *reversed(cases)], together, strict=True):
        forget_what_was_read()
        assert [result] == estimate(case)
    assert len({json.dumps(result) for result in together}) > 6


def forget_what_was_read() -> None:
    for module in (config, speculation):
        for each in vars(module).values():
            if isinstance(each, MadeOfContent):
                each.cache_clear()
