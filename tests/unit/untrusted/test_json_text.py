"""JSON that others wrote: what it holds, and what is refused before it hurts."""

import math
from typing import Any

import pytest

from specdecode_operator.untrusted import MAX_BYTES, MAX_DEPTH, UnreadableTextError, parse_json, parse_json_values


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (r'{"a": "\u00fc\/\ud83d\ude00"}', {"a": "ü/😀"}),
        ("[1, 1.5, 1e6, true, null]", [1, 1.5, 1e6, True, None]),
        ('\ufeff {"a": {}} \n', {"a": {}}),
        (b'{"a": "\xc3\xbc"}', {"a": "ü"}),
        # As transformers writes it into the config.json of state-space models.
        ('{"time_step_limit": [0.0, Infinity]}', {"time_step_limit": [0.0, math.inf]}),
        ("[" * MAX_DEPTH + "]" * MAX_DEPTH, None),
    ],
)
def test_json_is_read_as_json(text: str | bytes, value: Any) -> None:
    assert value is None or parse_json(text) == value
    parse_json(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty"),
        ('{"a": 1} {"b": 2}', "holds 2 values"),
        ('{"a": 1,\n "b": }', "is no JSON at line 2, column 7: expecting value"),
        ('{"a": }', "is no JSON at column 7: expecting value"),
        ('{"a": 1, "a": 2}', "the key a is there twice"),
        ('{"\\u001b": 1, "\\u001b": 2}', r"the key \x1b is there twice"),
        ("[" * 50_000, "nested more than 100 deep"),
        ('{"a":' * 50_000, "nested more than 100 deep"),
        ("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), "nested more than 100 deep"),
        ("9" * 5000, "has 5,000 digits"),
        ("1e999", "the number 1e999 is too large"),
        (b'"\xff"', "is not UTF-8 text"),
        (b" " * (MAX_BYTES + 1), "has more than 32 MiB"),
    ],
)
def test_what_is_no_json_or_would_hurt_is_refused(text: str | bytes, words: str) -> None:
    with pytest.raises(UnreadableTextError) as refused:
        parse_json(text)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_values_may_follow_one_another_as_kubectl_takes_them() -> None:
    assert list(parse_json_values('{"a": 1}\n{"b": 2}\n')) == [{"a": 1}, {"b": 2}]


def test_whoever_reads_less_may_ask_for_less() -> None:
    with pytest.raises(UnreadableTextError, match="has more than 1 KiB"):
        parse_json("1" + " " * 1024, most_bytes=1024)


def test_a_number_has_no_more_digits_than_one_that_can_be_computed_with() -> None:
    assert parse_json("1" * 308) == int("1" * 308)
    with pytest.raises(UnreadableTextError, match="has 309 digits"):
        parse_json("1" * 309)
