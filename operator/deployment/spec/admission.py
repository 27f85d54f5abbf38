"""The spec of a file, as an API server would admit it: for the command line, where no API server has seen it.

It is a file by itself, for the CEL library takes long to load.
"""

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from specdecode_operator.api.base import ApiModel
from specdecode_operator.api.capture import SpecDecodeCaptureSpec
from specdecode_operator.api.crd.admission import broken_rules, metadata_problems, name_refusals, refusals
from specdecode_operator.api.deployment import SpecDecodeDeploymentSpec
from specdecode_operator.deployment.spec.pydantic_problems import UNKNOWN_FIELD, inner_model, parsed_spec
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
    try:
        admitted = parsed_spec(kind, spec)
    except InvalidSpecError as error:
        rules = [] if not isinstance(spec, dict) else [*_rules_of_sound_parts(kind, spec, "spec")]
        rules += name_refusals(kind, metadata)
        raise InvalidSpecError([*error.problems, *rules], error.reason) from error
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


def _rules_of_sound_parts(kind: type[ApiModel], document: Any, place: str) -> Iterator[Problem]:
    """Yield the rules that a document breaks whatever its wrong fields are meant to be.

    Rules that read a wrong field are not judged. Nor are those of an object with an unknown field, which may be a
    misspelt one, and of an object that lacks a required field.
    """
    wrong = _wrong_fields(kind, document)
    try:
        sound = kind.parse({name: value for name, value in document.items() if name not in wrong})
    except ValidationError:
        wrong = set(document)
    else:
        yield from broken_rules(sound, place, wrong)
    for name in filter(wrong.__contains__, document):
        inner, value = inner_model(kind, name), document[name]
        if inner is None or not issubclass(inner, ApiModel):
            continue
        parts = {f"[{index}]": item for index, item in enumerate(value)} if isinstance(value, list) else {"": value}
        for part, item in parts.items():
            if isinstance(item, dict):
                yield from _rules_of_sound_parts(inner, item, f"{place}.{name}{part}")


def _wrong_fields(kind: type[ApiModel], document: Mapping[str, Any]) -> set[str]:
    """Return the fields of an object in which something is wrong; all of them if it has an unknown one."""
    try:
        kind.parse(document)
    except ValidationError as error:
        details = error.errors(include_url=False)
        unknown = any(detail["type"] == UNKNOWN_FIELD and len(detail["loc"]) == 1 for detail in details)
        return set(document) if unknown else {str(detail["loc"][0]) for detail in details if detail["loc"]}
    return set()
