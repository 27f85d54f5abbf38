import pytest

from specdecode_operator.untrusted import MOST_DIGITS, whole_number


@pytest.mark.parametrize(("text", "number"), [("0", 0), ("007", 7), (42, 42), ("9" * MOST_DIGITS, 10**MOST_DIGITS - 1)])
def test_digits_are_a_number(text: object, number: int) -> None:
    assert whole_number(text) == number


@pytest.mark.parametrize(
    "text", ["", "-1", "+1", "1.0", "1_0", " 1", "1\n", "x", "\u0663", "\u00b2", "9" * 16, "9" * 5000]
)
def test_other_text_is_no_number(text: str) -> None:
    assert whole_number(text) is None


@pytest.mark.parametrize("value", [None, True, 1.0, -1, [1], {}, b"1"])
def test_other_values_are_no_number(value: object) -> None:
    assert whole_number(value) is None
