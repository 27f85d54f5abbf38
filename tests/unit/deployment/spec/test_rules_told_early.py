"""Every rule of docs/reference/launch.md is broken once, and told of by the field that the document names."""

import pytest

from tests.unit.deployment.spec.broken_rules import BROKEN, problems
from tests.unit.vllm.test_arguments import rows


def test_every_rule_of_the_document_is_broken_here() -> None:
    assert {row[1] for row in rows("told of")} == set(BROKEN)


@pytest.mark.parametrize(
    "told_of_and_rule",
    [(row[0], row[1]) for row in rows("told of")],
    # An id with an escaped character cannot be asked for by itself.
    ids=lambda row: row[1].replace("…", "..."),
)
def test_a_broken_rule_is_told_of_by_its_field(told_of_and_rule: tuple[str, str]) -> None:
    told_of, rule = told_of_and_rule
    for broken, words in BROKEN[rule]:
        found = problems(broken)
        assert [p for p in found if told_of.strip("`") in p.field and words in p.message], found
