"""The models that a spec names, by the field that names them."""

from typing import Final

from specdecode_operator.api.deployment import SpecDecodeDeploymentSpec
from specdecode_operator.api.pair import ServedModel

TARGET: Final = "spec.target"
DRAFT: Final = "spec.speculation.draft"


def served_models(spec: SpecDecodeDeploymentSpec) -> dict[str, ServedModel]:
    """Return the target and, where there is one, the draft, by field."""
    draft = spec.speculation.draft if spec.speculation else None
    return {TARGET: spec.target} | ({DRAFT: draft} if draft else {})
