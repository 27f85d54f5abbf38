"""Fields that were renamed, and the error messages about their old names.

The CRD declares each old name for one minor version, because the API server silently drops undeclared fields. A CEL
rule rejects it with the same message as `lint` and `plan`. `docs/reference` also lists the table.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from specdecode_operator.api.base import ApiModel
from specdecode_operator.api.capture import Storage
from specdecode_operator.api.deployment import Accelerator, Override, Serving
from specdecode_operator.api.deployment_rules import Rule, forbidden


@dataclass(frozen=True)
class RenamedField:
    """One field that was renamed."""

    owner: type[ApiModel]
    """Model that had the field. The new field is in the same model."""
    places: tuple[str, ...]
    """Paths of the objects of that model, in any kind; ``[]`` stands for each element of a list."""
    name: str
    """Old name."""
    new: str
    """New name."""
    hint: str
    """How to convert the value."""
    schema: Mapping[str, Any]
    """Type and bounds of the old field, for the CRD."""

    @property
    def paths(self) -> tuple[str, ...]:
        """Full paths of the old name."""
        return tuple(f"{place}.{self.name}" for place in self.places)

    @property
    def message(self) -> str:
        """Error message about the old name, to follow its path."""
        return f"was renamed to {self.new}: {self.hint}"

    @property
    def rule(self) -> Rule:
        """CEL rule that rejects the old name."""
        return forbidden(f"!has(self.{self.name})", f"{self.name}: {self.message}")


RENAMED: Final = (
    RenamedField(
        Accelerator,
        ("spec.accelerator",),
        "product",
        "products",
        "keep the list unchanged",
        {
            "type": "array",
            "maxItems": 16,
            "x-kubernetes-list-type": "atomic",
            "items": {"type": "string", "maxLength": 63},
        },
    ),
    RenamedField(
        Serving,
        ("spec.serving",),
        "memoryUtilizationPercent",
        "gpuMemoryUtilizationPercent",
        "keep the number unchanged",
        {"type": "integer", "format": "int64"},
    ),
    RenamedField(
        Override,
        ("spec.override",),
        "planning",
        "ignorePlan",
        "replace Ignore with true",
        {"type": "string", "maxLength": 63},
    ),
    RenamedField(
        Storage,
        ("spec.storage", "spec.captures[].template.storage"),
        "existingClaim",
        "persistentVolumeClaim",
        "write the name into persistentVolumeClaim.claimName",
        {"type": "string", "maxLength": 253},
    ),
)
"""All renamed fields. Remove an entry one minor version after the rename."""


OLD_NAMES: Final = frozenset(path for field in RENAMED for path in field.paths)
"""Paths that the CRD declares only to reject them."""


def renamed_in(model: str) -> tuple[RenamedField, ...]:
    """Return the renamed fields of a model, by the model's class name."""
    return tuple(field for field in RENAMED if field.owner.__name__ == model)
