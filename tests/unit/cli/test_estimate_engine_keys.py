"""`specdecode estimate` takes the settings that real logs name, or says of each what it does not model."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specdecode_operator.sizing.estimate import _KEY_OF as KEY_OF
from specdecode_operator.sizing.estimate_fields import CASE_SPELLINGS, SPECULATIVE_REMARKS, SPECULATIVE_SPELLINGS
from specdecode_operator.vllm.arguments import ARGUMENTS
from specdecode_operator.vllm.profiles import KNOWN_VERSIONS, find_profile
from specdecode_operator.vllm.speculative_config import SPECULATIVE_KEYS
from tests.unit.cli.conftest import Specdecode

Estimate = Callable[..., list[dict[str, Any]]]

TEXT, IMAGES = "meta-llama/Llama-3.1-8B-Instruct", "google/gemma-3-4b-it"
NEWEST = find_profile(KNOWN_VERSIONS[-1])
STATES = "Qwen/Qwen3-Next-80B-A3B-Instruct"


@pytest.fixture
def estimate(specdecode: Specdecode, tmp_path: Path) -> Estimate:
    """Return the batch: changes of one H100 in, result lines out."""

    def run(model: str, *changes: dict[str, Any]) -> list[dict[str, Any]]:
        source, results = tmp_path / "cases.jsonl", tmp_path / "results.jsonl"
        cases = [{"model": model, "gpu": "H100", "max_model_len": 8192, **each} for each in changes]
        source.write_text("".join(f"{json.dumps(case)}\n" for case in cases))
        finished = specdecode("estimate", "--in", source, "--out", results)
        assert finished.exit_code == 0, finished.output
        return [json.loads(line) for line in results.read_text().splitlines()]

    return run


@pytest.mark.parametrize(
    "asked", [{"language_model_only": True}, {"limit_mm_per_prompt": {"image": 0, "video": {"count": 0}}}]
)
def test_an_encoder_that_takes_nothing_is_not_loaded(estimate: Estimate, asked: dict[str, Any]) -> None:
    with_encoder, without = estimate(IMAGES, {}, asked)
    assert without["per_gpu"]["target_weights"] < with_encoder["per_gpu"]["target_weights"]
    assert without["per_gpu"]["activation"] < with_encoder["per_gpu"]["activation"]
    assert "unmodelled" not in without


@pytest.mark.parametrize("limits", [{"image": 2}, {"image": 0}, {"image": 0, "video": 0, "audio": 1}])
def test_fewer_images_are_said_not_to_be_modelled(estimate: Estimate, limits: dict[str, int]) -> None:
    plain, limited = estimate(IMAGES, {}, {"limit_mm_per_prompt": limits})
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
def test_fewer_graphs_take_less(estimate: Estimate, asked: dict[str, Any]) -> None:
    plain, fewer, none = estimate(TEXT, {}, asked, {"compilation_config": {"cudagraph_mode": "none"}})
    assert 0 < fewer["per_gpu"]["cuda_graphs"] < plain["per_gpu"]["cuda_graphs"]
    assert none["per_gpu"]["cuda_graphs"] == 0


def test_other_keys_of_compilation_are_said_not_to_be_modelled(estimate: Estimate) -> None:
    (result,) = estimate(
        TEXT, {"compilation_config": {"cudagraph_mode": "FULL", "pass_config": {"fuse_norm_quant": True}}}
    )
    (said,) = result["unmodelled"]
    assert said.startswith("compilation_config.pass_config: ")


def test_shared_sequences_are_said_not_to_be_modelled(estimate: Estimate) -> None:
    alone, shared = estimate(TEXT, {"decode_context_parallel_size": 1}, {"decode_context_parallel_size": 2, "tp": 16})
    assert "unmodelled" not in alone
    (said,) = shared["unmodelled"]
    assert said.startswith("decode_context_parallel_size: 2 ranks")


def test_states_in_another_type_take_other_room(estimate: Estimate) -> None:
    own, small, wide = estimate(
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
def test_a_bad_value_is_an_error_of_its_key(estimate: Estimate, asked: dict[str, Any], start: str) -> None:
    (result,) = estimate(TEXT, asked)
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
def test_settings_that_no_engine_takes_are_one_error(estimate: Estimate, asked: dict[str, Any], field: str) -> None:
    (result,) = estimate(TEXT, asked)
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
def test_settings_that_an_engine_takes_are_sized(estimate: Estimate, model: str, asked: dict[str, Any]) -> None:
    (result,) = estimate(model, asked)
    assert result["error"] is None


OUR_KEYS = {"id", "vllm_version", "gpu", "gpu_total_gib", "model_config", "min_concurrency", "available_kv_gib"}
SHORT_KEYS = {"speculative": "speculative_config"}
LOGGED_KEYS = {"max_seq_len", "model_tag", "warm_compile_cache"}


def test_other_keys_of_a_case_are_flags_of_vllm() -> None:
    flags = {name.removeprefix("--").lstrip("-").replace("-", "_") for name in NEWEST.flags}
    keys = {SHORT_KEYS.get(key, key) for key in CASE_SPELLINGS} - OUR_KEYS - LOGGED_KEYS
    assert keys <= flags
    assert {*SPECULATIVE_SPELLINGS, *SPECULATIVE_REMARKS} - {"model_config", "draft_layers"} <= NEWEST.speculative_keys


def test_an_error_about_a_field_names_the_key_that_the_field_becomes() -> None:
    becomes = {(f"spec.{field}", key) for field, key in KEY_OF.items()}
    keys = {(row.field, f"speculative.{row.key}") for row in SPECULATIVE_KEYS}
    flags = {(row.field, CASE_SPELLINGS.get(row.flag.removeprefix("--").replace("-", "_"))) for row in ARGUMENTS}
    written = {row.field for row in (*ARGUMENTS, *SPECULATIVE_KEYS)}
    assert {each for each in becomes if each[0] in written} <= keys | flags
