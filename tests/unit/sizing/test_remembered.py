"""Sizing does not remember without bound: configs that change again and again do not fill the operator's memory."""

import importlib
import inspect
from functools import _lru_cache_wrapper
from pathlib import Path

from specdecode_operator.sizing import arithmetic
from specdecode_operator.sizing.result_cache import MEMO_SIZE

ROOM = Path(arithmetic.__file__).parent
FINITE = {vars(arithmetic)["_unequal"]}
"""Keyed by what the program itself is made of."""


def test_whatever_is_remembered_by_an_argument_is_bounded() -> None:
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
