"""What the models take is what the API server takes: neither guesses a type."""

from typing import Any

import pytest
from pydantic import ValidationError

from specdecode_operator.api.deployment import SpecDecodeDeploymentSpec

TARGET = {"model": "org/target"}


@pytest.mark.parametrize(
    ("field", "spec"),
    [
        ("replicas", {"replicas": "1"}),
        ("replicas", {"replicas": True}),
        ("suspend", {"suspend": "yes"}),
        ("suspend", {"suspend": 1}),
        ("modle", {"modle": "typo"}),
        ("serving.port", {"serving": {"port": 80}}),
        ("serving.memoryUtilizationPercent", {"serving": {"memoryUtilizationPercent": 101}}),
        ("accelerator.product.0", {"accelerator": {"product": ["NVIDIA H200"]}}),
        ("engine.version", {"engine": {"version": "latest"}}),
        ("engine.env.0.name", {"engine": {"env": [{"name": "A B"}]}}),
        ("serving.apiKeySecret.name", {"serving": {"apiKeySecret": {"name": "My_Secret", "key": "key"}}}),
    ],
)
def test_wrong_value_is_refused_by_field(field: str, spec: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as refused:
        SpecDecodeDeploymentSpec.model_validate({"target": TARGET, **spec})
    assert [".".join(str(part) for part in error["loc"]) for error in refused.value.errors()] == [field]


def test_spec_survives_a_round_trip() -> None:
    spec = SpecDecodeDeploymentSpec.model_validate(
        {
            "target": TARGET,
            "speculation": {
                "method": "draft_model",
                "numSpeculativeTokens": 5,
                "numSpeculativeTokensByBatchSize": [{"from": 1, "to": 8, "numSpeculativeTokens": 5}],
                "draft": {"model": "org/draft"},
            },
            "accelerator": {"type": "CPU", "cpuCores": 2, "memoryGiB": 4, "kvCacheGiB": 1},
        }
    )
    dumped = spec.model_dump(mode="json", by_alias=True, exclude_none=True)
    assert dumped["accelerator"]["memoryGiB"] == 4
    assert SpecDecodeDeploymentSpec.model_validate(dumped) == spec
