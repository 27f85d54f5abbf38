"""The spec of a file, as an API server would admit it: for the command line, where no API server has seen it.

It is a file by itself, for the CEL library takes long to load.
"""

from typing import Any

from pydantic import ValidationError

from specdecode_operator.api.crd.admission import refusals
from specdecode_operator.api.deployment import SpecDecodeDeploymentSpec
from specdecode_operator.deployment.spec.pydantic_problems import spec_problems
from specdecode_operator.problems import InvalidSpecError


def admitted_spec(spec: Any, metadata: Any = None) -> SpecDecodeDeploymentSpec:
    """Return a spec that an API server would admit; a misspelt field is an error, as it is for `kubectl apply`.

    Raises
    ------
    InvalidSpecError
        With what it would refuse.
    """
    try:
        admitted = SpecDecodeDeploymentSpec.parse(spec)
    except ValidationError as error:
        raise InvalidSpecError(spec_problems(error)) from error
    if problems := refusals(admitted, metadata):
        raise InvalidSpecError(problems)
    return admitted
