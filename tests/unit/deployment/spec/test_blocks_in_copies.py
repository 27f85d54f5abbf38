"""Heads that propose blocks with data-parallel copies of a mixture of experts, with which vLLM 0.29 does not start."""

from typing import Any

import pytest

from specdecode_operator.api.deployment import SpecDecodeDeploymentSpec
from specdecode_operator.deployment.validation import facts_problems, gather_facts
from specdecode_operator.sizing.catalogue import find_entry

HEAD = find_entry("sgl-project/SpecForge:configs/qwen3-8b-dflash.json")
EXPERTS = "Qwen/Qwen3-30B-A3B"
FIELD = "spec.parallelism.data"


def told(version: str, target: str = EXPERTS, *, data: int = 2, method: str = "dflash") -> list[str]:
    assert HEAD is not None
    hidden = {"Qwen/Qwen3-30B-A3B": 2048, "Qwen/Qwen3-8B": 4096}[target]
    config: dict[str, Any] = {**HEAD.config, "hidden_size": hidden}
    speculation: dict[str, Any] = {"method": method, "numSpeculativeTokens": 7}
    if method == "dflash":
        speculation["draft"] = {"model": "org/head", "config": config}
    body = {
        "target": {"model": target},
        "speculation": speculation,
        "parallelism": {"tensor": 1, "data": data, "expert": target == EXPERTS},
        "serving": {"maxModelLen": 8192},
        "engine": {"version": version},
    }
    problems = facts_problems(gather_facts(SpecDecodeDeploymentSpec.model_validate(body)))
    return [problem.message for problem in problems if problem.field == FIELD]


@pytest.mark.parametrize(("version", "fails"), [("0.29", True), ("0.30", False), ("0.33", False)])
def test_versions_before_the_draft_counts_for_itself_are_refused(version: str, fails: bool) -> None:
    messages = told(version)
    assert bool(messages) is fails
    assert all("0.30 or newer" in message for message in messages)


def test_model_runner_v1_drafts_in_copies() -> None:
    assert told("0.28") == []  # which serves experts there


def test_one_copy_is_served() -> None:
    assert told("0.29", data=1) == []


def test_copies_of_a_dense_model_do_not_compute_in_step() -> None:
    assert told("0.29", "Qwen/Qwen3-8B") == []


def test_other_methods_are_served() -> None:
    assert told("0.29", method="ngram") == []
