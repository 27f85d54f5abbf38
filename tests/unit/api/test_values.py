"""Words that the API and sizing both have: sizing is pure and knows no API, so each has its own, and they agree."""

from enum import StrEnum

import pytest

from specdecode_operator.api import values
from specdecode_operator.sizing.choice import advice
from specdecode_operator.sizing.choice import objective as choice
from specdecode_operator.sizing.pair.pair import METHODS


@pytest.mark.parametrize(
    ("ours", "of_sizing"),
    [
        (values.WorkloadKind, advice.WorkloadKind),
        (values.Slo, advice.Slo),
        (values.Objective, choice.Objective),
    ],
)
def test_both_have_the_same_words(ours: type[StrEnum], of_sizing: type[StrEnum]) -> None:
    assert {word.value for word in ours} == {word.value for word in of_sizing}


def test_every_method_can_be_sized() -> None:
    assert {method.value for method in values.Method} <= set(METHODS)
