"""`specdecode estimate` takes vLLM's own names, and passes nothing over that it does not know."""

import json
from typing import Any

import pytest

from tests.unit.cli.test_estimate import DRAFT, TARGET, Estimate, article, estimate

__all__ = ["estimate"]

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
def test_vllms_names_say_the_same(estimate: Estimate, ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    one, other = estimate(ours, theirs)
    assert one["error"] is None
    assert one == other


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ({**OURS, "tensor_parallel_size": 2}, "tensor_parallel_size: 2: contradicts tp, 4: remove one of the two"),
        ({**ONE_GPU, "tp": 1, "tensor_parallel_size": True}, "contradicts tp, 1"),
        ({**ONE_GPU, "tensor_paralell_size": 2}, "is no key of a case: did you mean tensor_parallel_size?"),
        ({**ONE_GPU, "max_model_length": 2}, "did you mean max_model_len?"),
        ({**ONE_GPU, "zzz": 2}, "zzz: 2: is no key of a case: remove it, or use one of id, "),
        ({**ONE_GPU, "": 2}, "is no key of a case"),
        ({**ONE_GPU, "tensor_parallel_size": "2"}, 'tensor_parallel_size: "2": must be a whole number'),
        ({**ONE_GPU, "speculative_config": {"method": "ngram"}}, "speculative_config.num_speculative_tokens"),
        (
            {**ONE_GPU, "speculative_config": {"metod": "ngram"}},
            "speculative_config.metod: ngram: is no key of a case: did you mean method?",
        ),
        ({**ONE_GPU, "speculative_config": "{"}, "speculative_config: {: is no JSON"),
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
def test_what_is_not_understood_spoils_its_own_line_alone(estimate: Estimate, case: dict[str, Any], words: str) -> None:
    before, bad, after = estimate(ONE_GPU, case, ONE_GPU)
    assert words in bad["error"]
    assert before == after
    assert before["error"] is None


def test_what_changes_memory_is_counted(estimate: Estimate) -> None:
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


def test_what_the_engine_is_told_of_the_config_is_counted(estimate: Estimate) -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "rope_theta": 1000000}
    asked = {"model": "Qwen/Qwen3-32B", "gpu": "H200", "max_model_len": 131_072}
    plain, told = estimate(
        asked, {**asked, "hf_overrides": {"rope_parameters": rope, "max_position_embeddings": 131_072}}
    )
    assert "was made for at most 40960 tokens: use that or less, or stretch it by hf_overrides" in plain["error"]
    assert told["error"] is None
    (bad,) = estimate({**asked, "hf_overrides": {"num_hidden_layers": "x"}})
    assert bad["error"].startswith("hf_overrides.num_hidden_layers: x")


def test_schemes_of_checkpoints_ask_for_nothing(estimate: Estimate) -> None:
    model = {"model": "nvidia/Llama-3.1-70B-Instruct-FP8", "gpu": "H200"}
    plain, named = estimate(model, {**model, "quantization": "modelopt"})
    assert plain == named
    assert plain["error"] is None


def test_remarks_of_collected_logs_are_passed_over(estimate: Estimate) -> None:
    plain = article("H100", "fp8", "bf16")
    remarks = {"source_url": "https://example.org", "confidence": "high", "observed": {}, "gpu_count": 2, "comment": 1}
    assert estimate({**plain, **remarks}) == estimate(plain)


def test_a_method_that_ended_is_sized_where_it_lives(estimate: Estimate) -> None:
    head = {"model_type": "medusa", "hidden_size": 4096, "num_heads": 4, "num_hidden_layers": 1, "vocab_size": 128256}
    case = {**ONE_GPU, "speculative": {"method": "medusa", "num_speculative_tokens": 3, "model_config": head}}
    lives, ended = (estimate({**case, "vllm_version": version})[0] for version in ("0.32", "0.33"))
    assert lives["error"] is None
    assert ended["error"].startswith("speculative.method: medusa: vLLM 0.33")
    assert "use eagle3, or vllm_version 0.32" in ended["error"]
