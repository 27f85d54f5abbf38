"""`specdecode estimate`: what GPUs and settings of an engine mean, and which ones vLLM refuses."""

from typing import Any

import pytest

from tests.unit.cli.test_estimate import DRAFT, GIB, OF_8B, Estimate, article, estimate

__all__ = ["estimate"]


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
def test_gpus_have_many_names(estimate: Estimate, name: str, same_as: str) -> None:
    cases = (article(gpu, "fp8", "bf16", id=1) for gpu in (name, same_as))
    one, other = estimate(*cases)
    assert one["error"] is None
    assert one == other


@pytest.mark.parametrize(
    "name", ["H1000", "H100 40GB", "RTX 6000 Ada", "L40", "NVIDIA-H100-80GB-HBM3-MIG-1g.10gb", "RTX 4090"]
)
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


def test_the_precision_of_the_checkpoint_is_the_default(estimate: Estimate) -> None:
    null, bf16 = estimate(article("H100", None, "bf16", id=1), article("H100", "bf16", "bf16", id=1))
    assert null["error"] is None
    assert null == bf16


OTHER_VOCABULARY = {"method": "draft_model", "num_speculative_tokens": 3, "model": "Qwen/Qwen2.5-0.5B"}


def test_as_many_tokens_as_vllm_verifies_are_sized(estimate: Estimate) -> None:
    longest = {"method": "draft_model", "model": DRAFT, "num_speculative_tokens": 128}
    (result,) = estimate({**OF_8B, "vllm_version": "0.30", "speculative": longest})
    assert result["error"] is None


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
        {"model_max_length": 16384},
    ],
)
def test_what_vllm_stretches_is_sized(estimate: Estimate, change: dict[str, Any]) -> None:
    asked = {"gpu": "H200", "max_model_len": 16384}
    stretched, plain = estimate(
        {**asked, "model_config": small_config(**change)}, {**asked, "model_config": small_config()}
    )
    assert stretched["error"] is None
    assert plain["error"].startswith("max_model_len: 16384: ")


def test_yarn_stretches_as_in_the_version_of_the_line(estimate: Estimate) -> None:
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


@pytest.mark.parametrize(
    ("model", "longest"),
    [("deepseek-ai/DeepSeek-V3", 163_840), ("deepseek-ai/DeepSeek-R1", 163_840), ("openai/gpt-oss-120b", 131_072)],
)
def test_a_length_that_the_file_has_stretched_already_is_the_longest(
    estimate: Estimate, model: str, longest: int
) -> None:
    """A factor stretches it no further; specdecode plan refuses from the same length on."""
    case = {"model": model, "gpu": "H200", "tp": 8}
    most, over = estimate({**case, "max_model_len": longest}, {**case, "max_model_len": longest + 1})
    assert most["error"] is None
    assert f"was made for at most {longest} tokens" in over["error"]


def test_what_the_engine_lowers_by_itself_is_sized(estimate: Estimate) -> None:
    """Its own default of sequences; and other vocabularies, where the engine is told to translate."""
    translated = {**OTHER_VOCABULARY, "use_heterogeneous_vocab": True}
    results = estimate(
        {**OF_8B, "max_num_batched_tokens": 64}, {**OF_8B, "speculative": translated}, {**OF_8B, "min_concurrency": 1}
    )
    assert [result["error"] for result in results] == [None, None, None]


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
        "warm_compile_cache": True,
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


@pytest.mark.parametrize(
    ("gpu", "refused"),
    [
        ({"gpu": "H200", "vllm_version": "0.29"}, True),
        ({"gpu": "H200", "vllm_version": "0.33"}, False),
        ({"gpu": "GB200", "gpu_total_gib": 184.31}, False),
    ],
)
def test_who_serves_sparse_attention_with_the_cache_of_modelopt(
    estimate: Estimate, gpu: dict[str, Any], refused: bool
) -> None:
    (result,) = estimate({**gpu, "model": "nvidia/GLM-5.2-NVFP4", "tp": 4, "kv_cache_dtype": "fp8_e4m3"})
    assert ("kv_cache_dtype" in str(result["error"])) is refused


@pytest.mark.parametrize(
    ("gpu", "uncalibrated"),
    [
        ({"gpu": "H100"}, False),
        ({"gpu": "A100-80", "gpu_total_gib": 79.2}, False),
        ({"gpu_total_gib": 79.2}, True),
        ({"gpu": "RTX 5060 Ti", "gpu_total_gib": 15.48}, True),
    ],
)
def test_a_gpu_without_logs_is_said_to_be_uncalibrated(
    estimate: Estimate, gpu: dict[str, Any], uncalibrated: bool
) -> None:
    known, (result,) = estimate({"gpu": "H100", "model": DRAFT})[0], estimate({**gpu, "model": DRAFT})
    assert result.get("uncalibrated", False) is uncalibrated
    assert (result["margin_bytes"] > known["margin_bytes"]) is uncalibrated
