"""Specs of models whose class the registry of their vLLM version does not have."""

from typing import Any

import pytest

from specdecode_operator.api.deployment import SpecDecodeDeploymentSpec
from specdecode_operator.deployment.validation import facts_problems, gather_facts
from specdecode_operator.deployment.warnings import plan_warnings
from specdecode_operator.problems import Problem
from specdecode_operator.sizing.estimate import size_case
from specdecode_operator.sizing.estimate_fields import CaseError
from tests.support.objects import TINY_CONFIG

NEW, RUNS_IN_TRANSFORMERS = "AliceAIForCausalLM", "MiniMaxForCausalLM"
"""Registered since 0.33; registered up to 0.23, and in transformers since."""


def told(architecture: str, version: str, *extra_args: str) -> tuple[list[Problem], list[str]]:
    """Return problems and warnings about the class of a target."""
    target = {"model": "my/model", "config": TINY_CONFIG | {"architectures": [architecture]}}
    engine: dict[str, Any] = {"version": version, "extraArgs": list(extra_args)}
    body = {"target": target, "engine": engine, "serving": {"maxModelLen": 128}}
    facts = gather_facts(SpecDecodeDeploymentSpec.model_validate(body))
    problems = [problem for problem in facts_problems(facts) if problem.field == "spec.target.config.architectures"]
    return problems, [text for text in plan_warnings(facts, {}, 1) if text.startswith("spec.target.config.architect")]


@pytest.mark.parametrize(
    ("architecture", "version", "words"),
    [
        (NEW, "0.30", "needs vLLM 0.33 (registered since)"),
        ("ArcticForCausalLM", "0.30", "use vLLM 0.28, or another model"),
        ("BertModel", "0.33", "is unknown to vLLM"),
    ],
)
def test_a_class_that_the_version_lacks_is_refused(architecture: str, version: str, words: str) -> None:
    (problem,), warnings = told(architecture, version)
    assert problem.value == architecture
    assert words in problem.message
    assert not warnings


@pytest.mark.parametrize(
    ("architecture", "version"),
    [(NEW, "0.33"), (NEW, "0.34"), ("ArcticForCausalLM", "0.28"), ("LlamaForCausalLM", "0.28")],
)
def test_a_class_that_the_version_has_is_not_mentioned(architecture: str, version: str) -> None:
    assert told(architecture, version) == ([], [])


@pytest.mark.parametrize(
    ("architecture", "version", "extra_args", "words"),
    [
        (RUNS_IN_TRANSFORMERS, "0.33", [], "up to 0.23"),
        (NEW, "0.30", ["--trust-remote-code"], "needs vLLM 0.33"),
        ("BertModel", "0.34", [], "unknown to vLLM 0.33"),
    ],
)
def test_a_class_that_vllm_may_run_all_the_same_is_a_warning(
    architecture: str, version: str, extra_args: list[str], words: str
) -> None:
    problems, (warning,) = told(architecture, version, *extra_args)
    assert problems == []
    assert words in warning


def test_estimate_refuses_what_its_version_refuses() -> None:
    case = {"model_config": TINY_CONFIG | {"architectures": [NEW]}, "gpu": "H100", "max_model_len": 128}
    assert size_case(case | {"vllm_version": "0.33"})["verdict"] == "Fits"
    with pytest.raises(CaseError) as caught:
        size_case(case | {"vllm_version": "0.32"})
    assert str(caught.value).startswith("model_config:")
    assert "needs vLLM 0.33" in str(caught.value)
