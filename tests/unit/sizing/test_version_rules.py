"""Rules of vLLM versions."""

from dataclasses import replace

import pytest

from specdecode_operator.sizing.arithmetic import GIB
from specdecode_operator.sizing.errors import SizingError
from specdecode_operator.sizing.version_rules import NEWEST_VERSION, ModelTraits, Runner, Sampler, find_version_rules

LLAMA = ModelTraits("LlamaForCausalLM")
QWEN3 = ModelTraits("Qwen3ForCausalLM")
GEMMA3 = ModelTraits("Gemma3ForConditionalGeneration")
QWEN3_MOE = ModelTraits("Qwen3MoeForCausalLM", has_experts=True)
DEEPSEEK_V2 = ModelTraits("DeepseekV2ForCausalLM", has_experts=True)
QWEN3_NEXT = ModelTraits("Qwen3NextForCausalLM", has_experts=True, has_states=True)
NEMOTRON = ModelTraits("NemotronHForCausalLM", has_states=True)


@pytest.mark.parametrize(
    ("model", "first_on_v2"),
    [
        (QWEN3, 22),
        (LLAMA, 23),
        (DEEPSEEK_V2, 24),
        (GEMMA3, 25),
        (QWEN3_MOE, 29),
        (QWEN3_NEXT, 29),
        (NEMOTRON, 29),
    ],
    ids=lambda value: value.architecture if isinstance(value, ModelTraits) else str(value),
)
def test_model_runner_depends_on_version_and_architecture(model: ModelTraits, first_on_v2: int) -> None:
    runners = [find_version_rules(f"0.{minor}.0", model=model).runner for minor in range(17, 34)]
    assert runners == [Runner.V1] * (first_on_v2 - 17) + [Runner.V2] * (34 - first_on_v2)


def test_quantized_models_run_on_v2_one_version_later() -> None:
    quantized = ModelTraits("LlamaForCausalLM", quantized=True)
    assert [find_version_rules(f"0.{minor}.0", model=quantized).runner for minor in (23, 24)] == [Runner.V1, Runner.V2]


@pytest.mark.parametrize(
    ("method", "first_on_v2"),
    [("eagle3", 23), ("mtp", 23), ("dflash", 24), ("dspark", 25), ("draft_model", 31), ("ngram", 32), ("suffix", None)],
)
def test_methods_run_on_v2_since_a_known_version(method: str, first_on_v2: int | None) -> None:
    on_v2 = [minor for minor in range(17, 33) if find_version_rules(f"0.{minor}.0", method, LLAMA).runner is Runner.V2]
    assert on_v2 == ([] if first_on_v2 is None else list(range(first_on_v2, 33)))


def test_charged_memory_and_defaults_per_version() -> None:
    assert [find_version_rules(f"0.{minor}").charges_graphs for minor in (17, 19, 20, 24)] == [False, False, True, True]
    assert [find_version_rules(f"0.{minor}", model=LLAMA).charges_graphs for minor in (23, 28, 29)] == [
        False,
        False,
        True,
    ]
    assert [find_version_rules(f"0.{minor}", model=LLAMA).charges_state for minor in (22, 26, 27)] == [
        False,
        False,
        True,
    ]
    assert find_version_rules("0.30", "suffix", LLAMA).charges_state
    assert [find_version_rules(f"0.{minor}").sampler for minor in (20, 21)] == [Sampler.TRITON, Sampler.FLASHINFER]
    assert [find_version_rules(f"0.{minor}").default_memory_utilization_percent for minor in (19, 20)] == [90, 92]


def test_only_versions_with_logs_count_as_calibrated() -> None:
    calibrated = [minor for minor in range(17, 33) if find_version_rules(f"0.{minor}").calibrated]
    assert calibrated == [17, 18, 19]
    margins = [find_version_rules(f"0.{minor}").margin_bytes for minor in range(17, 33)]
    assert margins == sorted(margins), "the less is measured, the more is kept back"


def test_unknown_newer_version_has_the_newest_rules_with_more_margin() -> None:
    newest, newer = find_version_rules(NEWEST_VERSION), find_version_rules("0.99.0")
    assert newer == replace(newest, margin_bytes=newest.margin_bytes + 3 * GIB // 2)
    assert find_version_rules(f"{NEWEST_VERSION}.dev7") == newest


@pytest.mark.parametrize("version", ["0.16.9", "latest", "0", ""])
def test_unknown_old_or_invalid_version_is_refused(version: str) -> None:
    with pytest.raises(SizingError, match="vllm_version"):
        find_version_rules(version)
