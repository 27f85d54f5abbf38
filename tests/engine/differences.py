"""One failure for many comparisons: what differs, a line each."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

SHOWN = 40


def assert_none(differences: Iterable[str]) -> None:
    """Fail with the differences, if there are any."""
    found = list(differences)
    more = [f"and {len(found) - SHOWN} more"] if len(found) > SHOWN else []
    assert not found, "\n".join([f"{len(found)} differ:", *found[:SHOWN], *more])


def differing_terms(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[str]:
    """Yield a text for each key whose values differ."""
    for term in sorted(ours.keys() | theirs.keys()):
        if ours.get(term) != theirs.get(term):
            yield f"{term}: ours {ours.get(term)}, vLLM's {theirs.get(term)}"
