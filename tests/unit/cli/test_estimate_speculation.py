"""What `estimate` makes of a --speculative-config that says more of the draft."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

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
