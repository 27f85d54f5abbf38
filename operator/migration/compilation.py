"""Takes ``--compilation-config`` apart, whose keys partly have fields."""

import json
from collections.abc import Iterable, Iterator
from typing import Any, Final

from specdecode_operator.engine.arguments import COMPILATION_CONFIG
from specdecode_operator.migration.flags import Given

FIELDS: Final[dict[str, str]] = {
    "cudagraph_mode": "serving.cudagraphMode",
    "max_cudagraph_capture_size": "serving.maxCudagraphCaptureSize",
}
"""Keys with a field."""


def key_by_key(flags: Iterable[Given]) -> list[Given]:
    """Return the flags with ``--compilation-config`` as one flag a key, all under one name.

    Only where a key has a field: the operator then writes that key itself, and
    of two spellings vLLM would keep one (engine/rules/graphs.py).
    """
    given = list(flags)
    apart = [each for flag in given for each in _keys(flag)]
    return apart if any(each.path and each.path[0] in FIELDS for each in apart) else given


def _keys(given: Given) -> Iterator[Given]:
    if given.name != COMPILATION_CONFIG or not given.known or not given.values:
        yield given
    elif given.path:
        yield _key(given.path, given.values[0])
    else:
        try:
            values: Any = json.loads(given.values[0])
        except ValueError:
            values = None
        if not isinstance(values, dict):
            yield given
            return
        for key, value in values.items():
            yield _key((key,), value if isinstance(value, str) else json.dumps(value))


def _key(path: tuple[str, ...], value: str) -> Given:
    name = ".".join((COMPILATION_CONFIG, *path))
    return Given(COMPILATION_CONFIG, (value,), (name, value), path)
