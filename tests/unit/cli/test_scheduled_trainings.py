"""The plan and lint of a schedule that trains: the largest cost of a training, and budgets that are too small."""

from typing import Any

import pytest

from tests.support.refreshes import LLAMA_SPEC, schedule_of
from tests.unit.cli.conftest import Specdecode, WriteObject


def deployment(limit: int, **template: Any) -> dict[str, Any]:
    return {
        "apiVersion": "specdecode.io/v1alpha1",
        "kind": "SpecDecodeDeployment",
        "metadata": {"name": "chat"},
        "spec": {**LLAMA_SPEC, "captures": [schedule_of(limit, template=template)]},
    }


def test_plan_and_lint_tell_the_largest_cost_of_a_training(specdecode: Specdecode, write: WriteObject) -> None:
    path = write("a.yaml", deployment(10))
    for command in ("plan", "lint"):
        result = specdecode(command, path)
        assert result.exit_code == 0, result.output
        assert "captures[name=weekly].training: one training uses at most 2.1 GPU hours on 2 GPUs" in result.stdout


@pytest.mark.parametrize(
    ("limit", "template", "said", "linted"),
    [
        (1, {}, "spec.captures[name=weekly].training.gpuHoursPerMonth: 1: one training can use 2.1 GPU hours", 2),
        (2, {}, "spec.captures[name=weekly].training.gpuHoursPerMonth: 2: one training can use 2.1 GPU hours", 0),
        (10, {"trainer": {"image": "i", "gpus": 1}}, "captures[name=weekly].training.template.trainer.gpus: 1: the", 0),
    ],
    ids=["budget", "budget on these GPUs", "GPUs"],
)
def test_schedule_that_can_never_train_is_refused(
    specdecode: Specdecode, write: WriteObject, limit: int, template: dict[str, Any], said: str, linted: int
) -> None:
    path = write("a.yaml", deployment(limit, **template))
    for command, code in (("plan", 2), ("lint", linted)):
        result = specdecode(command, path)
        assert result.exit_code == code, result.output
        assert said in result.stdout


def test_schedule_without_a_training_has_no_cost(specdecode: Specdecode, write: WriteObject) -> None:
    body = deployment(10)
    del body["spec"]["captures"][0]["training"]
    assert "GPU hours" not in specdecode("plan", write("a.yaml", body)).stdout
