"""A problem shows the value that the spec has, so that people find what they wrote."""

import pytest

from specdecode_operator.api.base import Body
from specdecode_operator.problems import shown
from tests.unit.deployment.spec.broken_rules import BROKEN
from tests.unit.deployment.spec.broken_rules import problems as broken_rules
from tests.unit.deployment.spec.test_pairing import BAD, problems

SPECS = [spec for spec, _, _ in BAD.values()]
SPECS += [spec for cases in BROKEN.values() for spec, _ in cases if isinstance(spec, dict)]


def given(spec: Body, field: str) -> object:
    """What a spec has at a field's path; None where it has nothing."""
    value: object = {"spec": spec}
    for name in field.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


@pytest.mark.parametrize("spec", SPECS)
def test_a_problem_of_a_plain_field_shows_what_is_written_there(spec: Body) -> None:
    told = [(found.value, given(spec, found.field)) for found in problems(spec)]
    plain = [(str(value), shown(written)) for value, written in told if isinstance(written, str | int)]
    # Two models whose vocabularies differ: the sizes tell more than the names.
    assert [each for each in plain if each[0] != each[1] and not each[0].startswith("vocabulary of ")] == []


@pytest.mark.parametrize("rule", BROKEN)
def test_every_problem_shows_a_value_and_says_what_to_do(rule: str) -> None:
    found = [problem for broken, _ in BROKEN[rule] for problem in broken_rules(broken)]
    assert found
    assert {type(text) for problem in found for text in (problem.field, problem.message)} == {str}
    assert not [problem for problem in found if str(problem.value) in {"", "None"} or len(problem.message) < 20]
