"""What the operator makes of each example is what is checked in."""

import difflib

import pytest

from tests.support.golden import EXAMPLES, GOLDEN, golden_texts


@pytest.fixture(scope="module")
def fresh() -> dict[str, str]:
    return golden_texts()


def test_every_example_has_its_objects_checked_in(fresh: dict[str, str]) -> None:
    assert {path.name for path in GOLDEN.glob("*.yaml")} == set(fresh), "renew them: ./just golden"


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.yaml")))
def test_objects_of_an_example_are_those_that_are_checked_in(fresh: dict[str, str], name: str) -> None:
    if name not in fresh:
        pytest.skip("has no object of our kinds")
    assert "\nkind: " in fresh[name], "an example is one that something comes of"
    known = (GOLDEN / name).read_text() if (GOLDEN / name).exists() else ""
    difference = difflib.unified_diff(
        known.splitlines(), fresh[name].splitlines(), "checked in", "made now", lineterm="", n=6
    )
    assert "\n".join(difference) == "", "if it is meant so, renew it: ./just golden"
