"""Generates the tables of methods by vLLM version, for docs/reference/engine-versions.md and supported.md."""

from collections.abc import Iterator
from typing import Final

from specdecode_operator.enums import Method
from specdecode_operator.vllm.profiles import KNOWN_VERSIONS, EngineProfile, find_profile
from tests.engine.engine_versions import SERVED
from tests.engine.test_recorder_methods import METHODS, REFUSALS

SERVED_METHODS: Final = {Method.NGRAM, *(Method(each.name) for each in METHODS if each.name not in REFUSALS)}
"""Methods with which the development cluster's engine answers requests in tests; that of ngram is the recorder's."""


def version_table() -> str:
    """Return a row for each version and method, the newest version first."""
    rows: list[tuple[str, ...]] = [("vLLM", "method", "model runner on GPUs", "test"), ("---",) * 4]
    for version in reversed(KNOWN_VERSIONS):
        rows += _rows_of(find_profile(version))
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def method_table() -> str:
    """Return a row for each method: the versions that have it, and the replacement if the newest no longer does."""
    newest = find_profile(KNOWN_VERSIONS[-1])
    rows = [("method", "vLLM", "note"), ("---",) * 3]
    for method in Method:
        versions = [each for each in KNOWN_VERSIONS if method not in find_profile(each).ended_methods]
        instead = newest.ended_methods.get(method)
        note = f"removed from vLLM {_first_without(method)}; use `{instead}`" if instead else ""
        rows.append((f"`{method}`", f"{versions[0]} to {versions[-1]}", note))
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _first_without(method: Method) -> str:
    return next(each for each in KNOWN_VERSIONS if method in find_profile(each).ended_methods)


def _rows_of(profile: EngineProfile) -> Iterator[tuple[str, ...]]:
    for method in Method:
        if instead := profile.ended_methods.get(method):
            yield profile.version, f"`{method}`", "-", f"removed from vLLM; use `{instead}`"
        elif method is not Method.NONE:
            served = "; served on V1" if profile.version == SERVED and method in SERVED_METHODS else ""
            yield profile.version, f"`{method}`", profile.runners[method], f"contract{served}"
