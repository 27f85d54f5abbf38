"""Places in a spec are written as people write them."""

from typing import Any

import pytest
from pydantic import ValidationError

from specdecode_operator.api.deployment import SpecDecodeDeploymentSpec
from specdecode_operator.api.spec_problems import spec_problems

TARGET = {"model": "org/target"}


@pytest.mark.parametrize(
    ("changes", "field", "words"),
    [
        (
            {"target": {**TARGET, "quantization": "Auto", "checkpoints": [{"model": "org/x", "quantization": "INT3"}]}},
            "spec.target.checkpoints[0].quantization",
            "use one of",
        ),
        (
            {"target": {**TARGET, "quantization": "Auto", "checkpoints": [{"model": "org/x", "quantisation": "INT4"}]}},
            "spec.target.checkpoints[0].quantisation",
            "unknown field: did you mean quantization?",
        ),
        ({"engine": {"env": [{"name": "A"}, {"name": "B C"}]}}, "spec.engine.env[1].name", "must match"),
        # vLLM's own spelling of the share.
        ({"serving": {"gpuMemoryUtilizationPercent": 0.9}}, "spec.serving.gpuMemoryUtilizationPercent", "write 90"),
        ({"speculation": {"method": "eagle-3"}}, "spec.speculation.method", "did you mean eagle3?"),
    ],
)
def test_a_problem_names_its_place_and_what_to_write(changes: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(ValidationError) as refused:
        SpecDecodeDeploymentSpec.model_validate({"target": TARGET, **changes})
    problems = {problem.field: problem.message for problem in spec_problems(refused.value)}
    assert words in problems[field]


@pytest.mark.parametrize(
    ("replicas", "message"),
    [
        ("3", "must be a whole number, without quotes"),
        ("99999999999", "must be at most 1,000"),
        ("-1", "must be at least 0"),
        ("True", "must be a whole number"),
        ("three", "must be a whole number"),
        ("", "must be a whole number"),
        ("9" * 5000, "must be a whole number"),
    ],
)
def test_quotes_are_to_be_removed_only_if_that_mends_a_value(replicas: str, message: str) -> None:
    with pytest.raises(ValidationError) as refused:
        SpecDecodeDeploymentSpec.model_validate({"target": TARGET, "replicas": replicas})
    (problem,) = spec_problems(refused.value)
    assert (problem.field, problem.message) == ("spec.replicas", message)


@pytest.mark.parametrize(
    ("given", "words"),
    [(14.5, "must be text: put it in quotes"), (True, "a size in GiB"), (1e9, "9 characters at most")],
)
def test_quotes_are_to_be_added_only_if_that_mends_a_value(given: float, words: str) -> None:
    target = {**TARGET, "assume": {"weightsGiB": given}}
    with pytest.raises(ValidationError) as refused:
        SpecDecodeDeploymentSpec.model_validate({"target": target})
    (problem,) = spec_problems(refused.value)
    assert problem.field == "spec.target.assume.weightsGiB"
    assert words in problem.message


@pytest.mark.parametrize(("wrong", "told"), [(50, 50), (51, 51), (80, 51)])
def test_at_most_50_problems_are_told_with_the_number_of_all(wrong: int, told: int) -> None:
    with pytest.raises(ValidationError) as refused:
        SpecDecodeDeploymentSpec.model_validate({"target": TARGET, **{f"f{number}": 1 for number in range(wrong)}})
    problems = spec_problems(refused.value)
    assert len(problems) == told
    assert (problems[-1].value == f"{wrong} problems") is (wrong > 50)
