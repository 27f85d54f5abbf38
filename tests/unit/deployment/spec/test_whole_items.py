"""An image or a video that vLLM reads in one step must fit into serving.maxNumBatchedTokens."""

from typing import Any

import pytest

from specdecode_operator.api.deployment import SpecDecodeDeploymentSpec
from specdecode_operator.deployment.validation import facts_problems, gather_facts
from specdecode_operator.problems import Problem

GEMMA_4 = "google/gemma-4-26B-A4B"
LONGEST_VIDEO = 32 * 78
QWEN_VL = "Qwen/Qwen3-VL-8B-Instruct"
NOT_CUT = ["--disable-chunked-mm-input"]
FIELD = "spec.serving.maxNumBatchedTokens"


def told(model: str, tokens: int | None, *extra_args: str) -> list[Problem]:
    serving: dict[str, Any] = {"maxModelLen": 16384, "maxNumSeqs": 16}
    if tokens is not None:
        serving["maxNumBatchedTokens"] = tokens
    body = {"target": {"model": model}, "serving": serving, "engine": {"extraArgs": list(extra_args)}}
    problems = facts_problems(gather_facts(SpecDecodeDeploymentSpec.model_validate(body)))
    return [problem for problem in problems if problem.field == FIELD]


@pytest.mark.parametrize("model", [GEMMA_4, "google/gemma-3-27b-it"])
def test_the_default_holds_the_largest_item(model: str) -> None:
    assert told(model, None) == []


def test_the_longest_video_is_the_least() -> None:
    assert told(GEMMA_4, LONGEST_VIDEO) == []
    problem = told(GEMMA_4, LONGEST_VIDEO - 1)[0]
    assert problem.value == str(LONGEST_VIDEO - 1)
    assert f"use {LONGEST_VIDEO} or more" in problem.message


@pytest.mark.parametrize(
    "extra_args",
    [["--language-model-only"], ["--limit-mm-per-prompt.video=0"], ["--limit-mm-per-prompt", '{"video": 0}']],
    ids=str,
)
def test_limits_of_ones_own_are_left_to_vllm(extra_args: list[str]) -> None:
    assert told(GEMMA_4, 2048, *extra_args) == []


def test_images_are_cut_for_other_models_unless_a_flag_forbids_it() -> None:
    assert told(QWEN_VL, 2048) == []
    assert told(QWEN_VL, 2048, *NOT_CUT)
