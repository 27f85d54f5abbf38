"""A spec with proposed changes: what has to go along, and whether it would be refused."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

from pydantic import ValidationError

from specdecode_operator.api.base import Body
from specdecode_operator.api.deployment import SpecDecodeDeploymentSpec
from specdecode_operator.deployment.spec.facts import Facts
from specdecode_operator.deployment.spec.validation import facts_problems
from specdecode_operator.sizing.choice.changes import Change, Changes
from specdecode_operator.sizing.pair.pair import Pair
from specdecode_operator.vocabulary import METHODS_WITH_DRAFT, Method

_METHOD: Final = "speculation.method"
_DRAFT: Final = "speculation.draft"
_DRAFT_LENGTH: Final = "speculation.draft.maxModelLen"
_DRAFT_TENSOR: Final = "parallelism.draftTensor"


def changed_spec(spec: SpecDecodeDeploymentSpec, changes: Changes) -> SpecDecodeDeploymentSpec:
    """Return a spec with other values in some of its fields.

    Raises
    ------
    ValidationError
        When a field cannot have its new value.
    """
    body = spec.model_dump(mode="json", by_alias=True, exclude_none=True)
    for change in changes:
        *parents, name = change.field.split(".")
        place: Body = body
        for parent in parents:
            place = place.setdefault(parent, {})
        place[name] = change.value
    return SpecDecodeDeploymentSpec.parse(body)


def admitted(facts: Facts, pair: Pair, changes: Changes) -> Changes | None:
    """Return changes with what has to go along with them; None where the API server or the engine refuses the spec.

    ``pair`` is what is then served.
    """
    # CEL takes a while to load, and only what does not fit needs it.
    from specdecode_operator.api.crd.admission import refusals  # noqa: PLC0415

    body = facts.spec.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    whole = tuple(each for change in changes for each in _with_what_goes_along(change, body))
    try:
        spec = changed_spec(facts.spec, whole)
    except ValidationError:
        return None
    refused = refusals(spec) or facts_problems(replace(facts, spec=spec, pair=pair))
    return None if refused else whole


def _with_what_goes_along(change: Change, spec: Body) -> Iterator[Change]:
    """Yield a change, and those of fields that only go with the old value."""
    match change:
        case Change("speculation.method", Method.NONE.value):
            yield Change("speculation", {"method": Method.NONE.value})
            yield from _removed(spec, _DRAFT_TENSOR)
        case Change("speculation.method", str(method)):
            yield change
            if method not in METHODS_WITH_DRAFT:
                yield from _removed(spec, _DRAFT)
        case Change("speculation.draft.model", str(model)) if set(_at(spec, _DRAFT)) - {"model"}:
            # What else is said there is of the old one.
            yield Change(_DRAFT, {"model": model})
        case Change("parallelism.tensor", int(tensor)):
            yield change
            if (_at(spec, _DRAFT_TENSOR) or 1) > 1:
                yield Change(_DRAFT_TENSOR, tensor)
        case Change("serving.maxModelLen", int(length)):
            yield change
            if (_at(spec, _DRAFT_LENGTH) or 0) > length:
                yield Change(_DRAFT_LENGTH, length)
        case _:
            yield change


def _removed(spec: Body, field: str) -> Iterator[Change]:
    if _at(spec, field) is not None:
        yield Change(field, None)


def _at(spec: Body, field: str) -> Any:
    found: Any = spec
    for name in field.split("."):
        found = found.get(name) if isinstance(found, dict) else None
    return found
