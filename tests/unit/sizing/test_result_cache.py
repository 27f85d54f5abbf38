"""Caches of sizing are bounded and equal configs share one geometry."""

import importlib
import inspect
import weakref
from functools import _lru_cache_wrapper
from pathlib import Path
from typing import Any

import pytest

from specdecode_operator.sizing import arithmetic
from specdecode_operator.sizing.families.architectures import GeometryError, geometry_from_config, head_from_config
from specdecode_operator.sizing.result_cache import MEMO_SIZE
from specdecode_operator.untrusted import SharedObject
from tests.support.llama import LLAMA_8B_CONFIG

ROOM = Path(arithmetic.__file__).parent
FINITE = {vars(arithmetic)["_unequal"]}
"""Keyed by what the program itself is made of."""


def test_every_keyed_cache_is_bounded() -> None:
    found = set()
    for file in ROOM.rglob("*.py"):
        name = ".".join(file.relative_to(ROOM).with_suffix("").parts)
        values = vars(importlib.import_module(f"specdecode_operator.sizing.{name}")).values()
        found |= {value for value in values if isinstance(value, _lru_cache_wrapper)}
    own = {each for each in found - FINITE if each.__module__.startswith("specdecode_operator.sizing.")}
    keyed = {each for each in own if inspect.signature(each).parameters}
    assert len(keyed) > 20, "the functions whose answers are kept"
    bounds = {each.__name__: each.cache_info().maxsize for each in keyed}
    assert [name for name, most in bounds.items() if most is None or most > MEMO_SIZE] == []


# Equal configs are one geometry, so that what was worked out of one holds for the next; no other config is.


def copied(**changes: Any) -> dict[str, Any]:
    return {**LLAMA_8B_CONFIG, **changes}


def test_equal_configs_share_one_geometry() -> None:
    assert geometry_from_config("a", copied()) is geometry_from_config("a", copied())
    assert head_from_config("a", copied(), "eagle") is head_from_config("a", copied(), "eagle")


def test_other_names_methods_and_values_have_their_own_geometry() -> None:
    plain = geometry_from_config("a", copied())
    assert geometry_from_config("b", copied()).name == "b"
    assert head_from_config("a", copied(), "eagle").head is not None
    assert geometry_from_config("a", copied(num_hidden_layers=2)).num_layers == 2
    assert geometry_from_config("a", copied()) is plain


def test_changed_config_gets_a_new_geometry() -> None:
    config = copied()
    before = geometry_from_config("a", config)
    config["num_hidden_layers"] = 3
    assert geometry_from_config("a", config).num_layers == 3
    assert before.num_layers == LLAMA_8B_CONFIG["num_hidden_layers"]


@pytest.mark.parametrize("value", [True, 32.0, "32"])
def test_equal_value_of_another_type_is_refused_despite_the_cache(value: object) -> None:
    geometry_from_config("a", copied(num_hidden_layers=32))
    for _ in range(2):
        with pytest.raises(GeometryError, match="num_hidden_layers"):
            geometry_from_config("a", copied(num_hidden_layers=value))


def test_cache_size_is_limited() -> None:
    first = geometry_from_config("a", copied())
    for number in range(MEMO_SIZE):
        geometry_from_config(f"model-{number}", copied())
    assert geometry_from_config("a", copied()) is not first


def test_shared_config_uses_the_cache_and_keeps_no_geometry_alive() -> None:
    shared = SharedObject(copied())
    first = geometry_from_config("a", shared)
    assert geometry_from_config("a", shared) is geometry_from_config("a", copied()) is first
    for number in range(MEMO_SIZE):
        geometry_from_config(f"model-{number}", shared)
    left = weakref.ref(first)
    del first
    assert left() is None


def test_equal_layers_are_one_object() -> None:
    geometry = geometry_from_config("a", copied())
    assert len(set(map(id, geometry.layers))) == 1
    assert geometry.distinct_layers == ((geometry.layers[0], geometry.num_layers),)
