"""`specdecode estimate`: JSON lines in, JSON lines out, and no line that stops the batch."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specdecode_operator.sizing.families import architectures
from specdecode_operator.sizing.result_cache import ContentMemo
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
def test_the_articles_case(  # noqa: PLR0913, PLR0917  one column each
    estimate: Estimate, gpu: str, target: str, draft: str | None, weights_gib: float, available_gib: float, tokens: int
) -> None:
    (result,) = estimate(article(gpu, target, draft))
    per_gpu = result["per_gpu"]
    assert (per_gpu["target_weights"] + per_gpu["draft_weights"]) / GIB == pytest.approx(weights_gib, abs=0.006)
    assert per_gpu["available_kv"] / GIB == pytest.approx(available_gib, abs=0.006)
    assert result["kv_cache_tokens"] == tokens


@pytest.mark.parametrize("eager", [False, True])
def test_plans_are_for_a_start_without_a_compile_cache(
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


def test_min_concurrency_decides_the_verdict(estimate: Estimate) -> None:
    fits, too_many = estimate(
        {**OF_8B, "max_model_len": 8192, "min_concurrency": 8}, {**OF_8B, "max_model_len": 8192, "min_concurrency": 500}
    )
    assert (fits["verdict"], too_many["verdict"]) == ("Fits", "DoesNotFit")


def test_a_line_that_is_no_json_is_told_by_its_number(estimate: Estimate) -> None:
    _, first, second = estimate("", "   ", {**OF_8B, "id": 1}, "{not json", "[" * 100_000)
    assert first["error"].startswith("line 4: is no JSON at column 2: ")
    assert second["error"].startswith("line 5: ")


def described(**changes: Any) -> dict[str, Any]:
    """A case that holds its config.json, and that of its draft."""
    drafting = {"method": "draft_model", "num_speculative_tokens": 1, "model_config": LLAMA_8B_CONFIG}
    case = {"gpu": "H100", "tp": 2, "model_config": LLAMA_8B_CONFIG, "speculative": drafting}
    return {**case, **{key: value for key, value in changes.items() if key != "drafting"}} | (
        {"speculative": {**drafting, **changes["drafting"]}} if "drafting" in changes else {}
    )


def test_a_line_is_answered_as_alone_whatever_lines_before_it_said(estimate: Estimate) -> None:
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
