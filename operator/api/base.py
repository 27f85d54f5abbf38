"""What all models of the API share."""

from typing import Any

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel

GROUP = "specdecode.io"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"

Body = dict[str, Any]
"""An object of the Kubernetes API, as the API server has it."""


class ApiModel(BaseModel):
    """A part of a spec: camelCase outside, immutable, no unknown fields."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
    )
