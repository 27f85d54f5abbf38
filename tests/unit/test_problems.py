"""How values that others wrote stand in messages."""

from typing import Any

import pytest

from specdecode_operator.problems import Problem, printable, shown


@pytest.mark.parametrize(
    ("text", "escaped"),
    [
        ("Modell-ü 😀 漢", "Modell-ü 😀 漢"),
        ("a\nb\r\tc", r"a\nb\r\tc"),
        ("\x00\x1b[31m\x9b", r"\x00\x1b[31m\x9b"),
        ("\u202eevil\u2066", r"\u202eevil\u2066"),
        ("\u2028\u2029\u200b", r"\u2028\u2029\u200b"),
        ("\ud800", r"\ud800"),
        ("\U000e0041", r"\U000e0041"),
    ],
)
def test_what_others_wrote_is_shown_and_not_done(text: str, escaped: str) -> None:
    assert printable(text) == escaped
    assert printable(escaped) == escaped
    assert str(Problem(text, text, text)) == f"{escaped}: {escaped}: {escaped}"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("H100", "H100"),
        ("4096", '"4096"'),
        ("1e6", '"1e6"'),
        ("true", '"true"'),
        ("", '""'),
        (" a", '" a"'),
        (4096, "4096"),
        (None, "null"),
        (True, "true"),
        ({"a": [None, False]}, '{"a": [null, false]}'),
        ("x" * 1000, "x" * 119 + "…"),
        (["\x1b"], r'["\u001b"]'),
        ("\x1b[31m", r"\x1b[31m"),
    ],
)
def test_values_are_shown_in_the_words_of_their_files(value: Any, text: str) -> None:
    assert shown(value) == text
