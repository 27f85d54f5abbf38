"""What `estimate` makes of a --speculative-config that says more of the draft."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specdecode_operator.sizing.catalogue import find_entry
from tests.unit.cli.conftest import Specdecode

Estimate = Callable[..., list[dict[str, Any]]]
OF_8B = {"model": "meta-llama/Llama-3.1-8B-Instruct", "gpu": "H200", "vllm_version": "0.32"}


@pytest.fixture
def estimate(specdecode: Specdecode, tmp_path: Path) -> Estimate:
    """Return the batch: cases in, result lines out."""

    def run(*cases: dict[str, Any]) -> list[dict[str, Any]]:
        source, results = tmp_path / "cases.jsonl", tmp_path / "results.jsonl"
        source.write_text("".join(json.dumps(case) + "\n" for case in cases))
        finished = specdecode("estimate", "--in", source, "--out", results)
        assert finished.exit_code == 0, finished.output
        return [json.loads(line) for line in results.read_text().splitlines()]

    return run


def test_a_draft_in_one_pass_is_sized_where_the_engine_is_told_so(estimate: Estimate) -> None:
    speculative = {"method": "draft_model", "model": "meta-llama/Llama-3.2-1B", "num_speculative_tokens": 8}
    plain, parallel = estimate(
        {**OF_8B, "speculative": speculative}, {**OF_8B, "speculative": {**speculative, "parallel_drafting": True}}
    )
    assert (plain["error"], parallel["error"]) == (None, None)
    # On model runner V1, whose terms are others.
    assert plain["per_gpu"] != parallel["per_gpu"]


def test_a_quantized_copy_of_the_output_head_takes_memory(estimate: Estimate) -> None:
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


def test_a_refiner_that_chooses_among_all_tokens_takes_memory(estimate: Estimate) -> None:
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
    assert "is of XPress heads alone" in plain["error"]
    assert "speculative.model" in old["error"]
    assert "use 0.33 or later" in old["error"]


def test_a_lossy_check_takes_memory_where_the_version_has_it(estimate: Estimate) -> None:
    speculative = {"method": "draft_model", "model": "meta-llama/Llama-3.2-1B", "num_speculative_tokens": 8}
    block, fly = ({**speculative, "rejection_sample_method": way} for way in ("block", "fly"))
    full = {"max_num_seqs": 1024, "max_num_batched_tokens": 16_384, "gpu_memory_utilization": 0.95}
    exact, lossy, early, single, two, unknown = estimate(
        {**OF_8B, **full, "max_model_len": 8192, "vllm_version": "0.33", "speculative": block},
        {**OF_8B, **full, "max_model_len": 8192, "vllm_version": "0.33", "speculative": {**fly, "fly_window_size": 3}},
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


def test_runner_v1_alone_verifies_at_most_128_tokens(estimate: Estimate) -> None:
    draft = {"method": "draft_model", "model": "meta-llama/Llama-3.2-1B"}
    v2, v1, v1_at_its_limit = estimate(
        {**OF_8B, "speculative": {**draft, "num_speculative_tokens": 129}},
        {**OF_8B, "speculative": {**draft, "num_speculative_tokens": 129, "parallel_drafting": True}},
        {**OF_8B, "speculative": {**draft, "num_speculative_tokens": 128, "parallel_drafting": True}},
    )
    assert v1["error"].startswith("speculative.num_speculative_tokens: 129: ")
    assert (v2["error"], v1_at_its_limit["error"]) == (None, None)


def test_the_element_type_is_judged_by_the_precision_of_each_model(estimate: Estimate) -> None:
    draft = {"method": "draft_model", "model": "meta-llama/Llama-3.2-1B", "num_speculative_tokens": 4}
    case = {**OF_8B, "dtype": "float32"}
    plain, quantized_draft, quantized_target = estimate(
        {**case, "speculative": draft},
        {**case, "speculative": {**draft, "quantization": "fp8"}},
        {**case, "quantization": "fp8", "speculative": draft},
    )
    assert plain["error"] is None
    assert quantized_draft["error"].startswith("dtype: float32: meta-llama/Llama-3.2-1B ")
    assert quantized_target["error"].startswith("dtype: float32: meta-llama/Llama-3.1-8B-Instruct ")
