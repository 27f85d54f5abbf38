"""Places in a spec are written as people write them."""

from typing import Any

import pytest
from pydantic import ValidationError

from specdecode_operator.api.deployment import SpecDecodeDeploymentSpec
from specdecode_operator.deployment.spec.pydantic_problems import spec_problems

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
            "is no field of spec.target.checkpoints[0]: did you mean quantization?",
        ),
        ({"engine": {"env": [{"name": "A"}, {"name": "B C"}]}}, "spec.engine.env[1].name", "must match"),
    ],
)
def test_entries_of_lists_are_numbered_in_brackets(changes: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(ValidationError) as refused:
        SpecDecodeDeploymentSpec.model_validate({"target": TARGET, **changes})
    problems = {problem.field: problem.message for problem in spec_problems(refused.value)}
    assert words in problems[field]
