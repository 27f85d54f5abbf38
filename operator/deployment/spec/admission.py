"""The spec of a file, as an API server would admit it: for the command line, where no API server has seen it.

It is a file by itself, for the CEL library takes long to load.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

from specdecode_operator.api.base import ApiModel
from specdecode_operator.api.capture import SpecDecodeCaptureSpec
from specdecode_operator.api.crd.admission import metadata_problems, refusals
from specdecode_operator.api.deployment import SpecDecodeDeploymentSpec
from specdecode_operator.deployment.spec.pydantic_problems import parsed_spec
from specdecode_operator.problems import InvalidSpecError, Problem

_Spec = TypeVar("_Spec", bound=ApiModel)


def admitted_spec(spec: Any, metadata: Any = None) -> SpecDecodeDeploymentSpec:
    """Return a spec that an API server would admit; a misspelt field is an error, as it is for `kubectl apply`.

    Raises
    ------
    InvalidSpecError
        With what it would refuse.
    """
    return _admitted(SpecDecodeDeploymentSpec, spec, metadata)


def admitted_object(body: Mapping[str, Any]) -> SpecDecodeDeploymentSpec:
    """Return the spec of a SpecDecodeDeployment that an API server would admit.

    Raises
    ------
    InvalidSpecError
        With what it would refuse in metadata and spec.
    """
    return _admitted_object(SpecDecodeDeploymentSpec, body)


def admitted_capture(body: Mapping[str, Any]) -> SpecDecodeCaptureSpec:
    """Return the spec of a SpecDecodeCapture that an API server would admit.

    Raises
    ------
    InvalidSpecError
        With what it would refuse in metadata and spec.
    """
    return _admitted_object(SpecDecodeCaptureSpec, body)


def _admitted(kind: type[_Spec], spec: Any, metadata: Any) -> _Spec:
    admitted = parsed_spec(kind, spec)
    if problems := refusals(admitted, metadata):
        raise InvalidSpecError(problems)
    return admitted


def _admitted_object(kind: type[_Spec], body: Mapping[str, Any]) -> _Spec:
    of_metadata: list[Problem] = metadata_problems(body.get("metadata"))
    try:
        spec = _admitted(kind, body.get("spec"), body.get("metadata"))
    except InvalidSpecError as error:
        raise InvalidSpecError([*of_metadata, *error.problems], error.reason) from error
    if of_metadata:
        raise InvalidSpecError(of_metadata)
    return spec
