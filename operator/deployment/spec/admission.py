"""The spec of a file, as an API server would admit it: for the command line, where no API server has seen it.

It is a file by itself, for the CEL library takes long to load.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from specdecode_operator.api.crd.admission import metadata_problems, refusals
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


def admitted_object(body: Mapping[str, Any]) -> SpecDecodeDeploymentSpec:
    """Return the spec of an object that an API server would admit.

    Raises
    ------
    InvalidSpecError
        With what it would refuse in metadata and spec.
    """
    metadata = body.get("metadata")
    problems = metadata_problems(metadata)
    try:
        spec = admitted_spec(body.get("spec"), metadata)
    except InvalidSpecError as error:
        raise InvalidSpecError([*problems, *error.problems], error.reason) from error
    if problems:
        raise InvalidSpecError(problems)
    return spec
