"""What the models take is what the API server takes: neither guesses a type."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import ValidationError

from specdecode_operator.api.base import ApiModel
from specdecode_operator.api.capture import SpecDecodeCaptureSpec
from specdecode_operator.api.capture_status import SpecDecodeCaptureStatus
from specdecode_operator.api.deployment import SpecDecodeDeploymentSpec
from specdecode_operator.api.deployment_status import SpecDecodeDeploymentStatus

TARGET = {"model": "org/target"}
PRODUCT = Path(__file__).parents[3] / "operator"


@pytest.mark.parametrize(
    ("field", "spec"),
    [
        ("replicas", {"replicas": "1"}),
        ("replicas", {"replicas": True}),
        ("suspend", {"suspend": "yes"}),
        ("suspend", {"suspend": 1}),
        ("modle", {"modle": "typo"}),
        ("serving.port", {"serving": {"port": 80}}),
        ("serving.gpuMemoryUtilizationPercent", {"serving": {"gpuMemoryUtilizationPercent": 101}}),
        ("accelerator.products.0", {"accelerator": {"products": ["NVIDIA H200"]}}),
        ("engine.version", {"engine": {"version": "latest"}}),
        ("engine.env.0.name", {"engine": {"env": [{"name": "A B"}]}}),
        ("serving.apiKeySecret.name", {"serving": {"apiKeySecret": {"name": "My_Secret", "key": "key"}}}),
    ],
)
def test_wrong_value_is_refused_with_its_field(field: str, spec: dict[str, Any]) -> None:
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


def models_in(annotation: Any) -> Iterator[type[ApiModel]]:
    """The models of our API that a field's type names, at any depth."""
    for each in get_args(annotation):
        yield from models_in(each)
    if isinstance(annotation, type) and issubclass(annotation, ApiModel):
        yield annotation
        for field in annotation.model_fields.values():
            yield from models_in(field.annotation)


ROOTS = (SpecDecodeDeploymentSpec, SpecDecodeCaptureSpec, SpecDecodeDeploymentStatus, SpecDecodeCaptureStatus)
OTHER_NAMES = [
    pytest.param(model, name, field.alias, id=f"{model.__name__}.{name}")
    for model in sorted({model for root in ROOTS for model in models_in(root)}, key=lambda model: model.__name__)
    for name, field in model.model_fields.items()
    if field.alias not in (None, name)
]


@pytest.mark.parametrize(("model", "name", "alias"), OTHER_NAMES)
def test_python_names_of_fields_are_refused_in_documents(model: type[ApiModel], name: str, alias: str) -> None:
    with pytest.raises(ValidationError) as refused:
        model.parse({name: None})
    unknown = [each["loc"] for each in refused.value.errors() if each["type"] == "extra_forbidden"]
    assert unknown == [(name,)], f"only {alias} is a field of the CRD"


def test_only_the_base_module_calls_model_validate() -> None:
    readers = [path.name for path in PRODUCT.rglob("*.py") if ".model_validate(" in path.read_text()]
    assert readers == ["base.py"]
