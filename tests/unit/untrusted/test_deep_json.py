"""What others nest too deep is left out, and nothing else."""

import copy
import json
from typing import Any

import pytest

from specdecode_operator.untrusted import MAX_DEPTH, in_unicode, read_json


def nested(levels: int, opening: str = "[", closing: str = "]") -> str:
    return opening * levels + closing * levels


def depth(value: Any) -> int:
    levels, level = 0, [value]
    while level:
        levels += 1
        level = [
            inner
            for each in level
            if isinstance(each, dict | list)
            for inner in (each.values() if isinstance(each, dict) else each)
        ]
    return levels - 1


@pytest.mark.parametrize("levels", [200, 990, 9_990])
@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}"), ('["]",', "]"), ('["\\\\",', "]")])
def test_what_is_too_deep_is_left_out_and_all_beside_it_stays(levels: int, opening: str, closing: str) -> None:
    deep = opening * levels + "1" + closing * levels
    found = read_json(f'{{"before": [{{}}], "deep": {deep}, "after": "[{{"}}'.encode())
    assert (found["before"], found["after"]) == ([{}], "[{")
    assert depth(found) == MAX_DEPTH
    assert copy.deepcopy(found) == found


@pytest.mark.parametrize(
    "text",
    [
        nested(MAX_DEPTH),
        json.dumps([{"a": []}] * 2_000),
        json.dumps({"script": "[[{{" * 500, "quoted": '"[\\' * 300}),
        json.dumps(["]", "}", '"', "\\"]),
        "1",
    ],
)
def test_what_is_not_too_deep_stays_as_it_is(text: str) -> None:
    assert read_json(text.encode()) == json.loads(text)


def test_what_is_no_json_is_told_as_such() -> None:
    """As kopf expects of an answer in plain text."""
    for text in (b"", b"404 page not found", b"[" * 5_000, b"]" * 500, b'"' + b"\\" * 501):
        with pytest.raises(json.JSONDecodeError):
            read_json(text)


@pytest.mark.parametrize(
    ("text", "read_as"),
    [
        (b'{"a": "\xff"}', '{"a": "\ufffd"}'),
        (rb'{"a": "\ud800"}', '{"a": "\ufffd"}'),
        (rb'{"a": "\uDC00\ud83d"}', '{"a": "\ufffd\ufffd"}'),
        (rb'{"a": "\\ud800"}', r'{"a": "\\ud800"}'),
        (rb'{"a": "\\\ud800\n\ud800"}', r'{"a": "\\\ufffd\n\ufffd"}'),
        (rb'{"a": "\ud83d\ude00"}', '{"a": "\U0001f600"}'),
        ('{"a": "\u00e9"}'.encode(), '{"a": "\u00e9"}'),
    ],
)
def test_what_is_no_character_is_replaced_and_all_else_stays(text: bytes, read_as: str) -> None:
    assert read_json(in_unicode(text)) == json.loads(read_as)


def test_a_number_that_is_too_large_is_read_all_the_same() -> None:
    assert read_json(b'{"a": 1e999}') == {"a": float("inf")}
