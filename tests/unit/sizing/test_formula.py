"""Numbers that remember how they were computed: the same numbers, and a text that gives them again."""

import re
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, floor  # noqa: F401 (formulas are evaluated with them)

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdecode_operator.sizing.arithmetic import Named, ceil_div, described, formula, named, traced

SIZES = st.integers(0, 10_000)


def value_of(text: str) -> Fraction:
    arithmetic = re.sub(r"\d+", lambda found: f"Fraction({found[0]})", text.replace(",", "").replace(" x ", "*"))
    return Fraction(eval(arithmetic))


@given(a=SIZES, b=SIZES, c=SIZES, d=st.integers(1, 99), e=st.integers(1, 99))
def test_formula_text_evaluates_to_its_number(a: int, b: int, c: int, d: int, e: int) -> None:
    def computed(a: int, b: int, c: int, d: int, e: int) -> list[int]:
        return [
            a + b * c,
            (a + b) * (c + d),
            a - (b - c),
            (a - b) * c - d,
            a * d // e,
            a // d // e,
            a * (b // d),
            ceil_div(a * b, d) * e + 3,
            5 * a + max(b, c) * ceil_div(7, d),
            ceil_div(a, d) * d,
            -a + b,
            sum([a, b, c]) * 1 + 0,
            2 - a,
        ]

    plain = computed(a, b, c, d, e)
    with_formulas = computed(*traced((a, b, c, d, e), {}))
    assert with_formulas == plain
    assert [value_of(formula(each)) for each in with_formulas] == plain


@dataclass(frozen=True)
class Engine:
    tokens: int
    width: int
    eager: bool = False


def test_formula_descriptions_follow_their_numbers() -> None:
    engine = traced(Engine(8192, 128), {"tokens": "tokens"})
    states = engine.tokens * engine.width * 2
    assert formula(states) == "8,192 tokens x 128 x 2"
    assert formula(named(states, "of states") + 1) == "2,097,152 of states + 1"
    assert formula(3 + described(states + 5, "in a step")) == "3 + (8,192 tokens x 128 x 2 + 5) in a step"
    assert formula(engine.width + Named(7, "of tables")) == "128 + 7 of tables"
    assert formula(Named(7, "of tables")) == "7 of tables"


def test_plain_numbers_are_not_traced() -> None:
    assert type(named(5, "requests")) is type(described(5, "of states")) is type(Named(5, "of tables") + 1) is int
    assert type(traced(Engine(1, 2), {}).eager) is bool


@pytest.mark.parametrize(
    ("size", "text"), [(128_256, "128,256"), (32_001, "ceil(32,001 / 64) x 64")], ids=["whole", "rounded"]
)
def test_rounding_is_shown_only_if_it_changes_the_value(size: int, text: str) -> None:
    assert formula(ceil_div(*traced((size,), {}), 64) * 64) == text


def test_traced_copy_does_not_equal_the_plain_object() -> None:
    """Else a cache of sizing would hand out formulas where plain numbers are asked for."""
    plain = Engine(1, 2)
    assert traced(plain, {}) == traced(plain, {}) != plain
