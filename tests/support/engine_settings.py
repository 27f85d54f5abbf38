"""Change settings of an engine, whether they are its own or fields of the spec inside them."""

import dataclasses
from typing import Any, TypeVar

from specdecode_operator.api.speculation import Speculation
from specdecode_operator.enums import Method
from specdecode_operator.vllm.settings import EngineSettings, SpeculationSettings

Settings = TypeVar("Settings")

_SPEC_INSIDE = {EngineSettings: "serving", SpeculationSettings: "spec"}


def replace(settings: Settings, **changes: Any) -> Settings:
    """Return settings with changes, as `dataclasses.replace` does; a field of the spec inside is changed there.

    The values are not validated, so that rules may be given what the API rejects.
    """
    own = {field.name for field in dataclasses.fields(settings)}
    inside = {name: changes.pop(name) for name in [*changes] if name not in own}
    if inside:
        name = _SPEC_INSIDE[type(settings)]
        part = getattr(settings, name)
        assert inside.keys() <= type(part).model_fields.keys(), f"{inside.keys()} of {type(part).__name__}"
        changes[name] = part.model_copy(update=inside)
    return dataclasses.replace(settings, **changes)


def speculating_with(method: Method, num_speculative_tokens: int, **changes: Any) -> SpeculationSettings:
    """Return settings of speculation with a method, K, and changes as for `replace`."""
    spec = Speculation.model_construct(method=method, num_speculative_tokens=num_speculative_tokens)
    return replace(SpeculationSettings(spec), **changes)
