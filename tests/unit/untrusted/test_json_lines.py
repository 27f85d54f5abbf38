"""Lines of JSON mean what they mean one by one, whatever lines came before."""

import json
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from specdecode_operator.untrusted import JsonLines, UnreadableTextError, parse_json

MOST_BYTES = 2000
KEYS = st.sampled_from(["id", "model", "tp", 'a"b', "é", "\u2028", "a\\", " ", ""])
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(KEYS, inner), max_leaves=5)
OBJECTS = st.dictionaries(KEYS, VALUES)
FORMS = st.sampled_from([{}, {"separators": (",", ":")}, {"separators": (" , ", " : ")}, {"ensure_ascii": False}])


def outcome(read: Any, line: bytes) -> Any:
    """Return the value with its types, or what is said of the line."""
    try:
        return repr(read(line))
    except UnreadableTextError as error:
        return f"refused: {error}"


@given(lines=st.lists(st.tuples(OBJECTS | VALUES, FORMS), min_size=1, max_size=4))
def test_lines_are_read_as_they_are_one_by_one(lines: list[tuple[Any, dict[str, Any]]]) -> None:
    reader = JsonLines(MOST_BYTES)
    for value, form in lines * 2:
        line = json.dumps(value, **form).encode(errors="surrogatepass") + b"\n"
        assert outcome(reader.parse, line) == outcome(lambda line: parse_json(line, MOST_BYTES), line)


@given(line=st.binary(max_size=20), before=st.binary(max_size=20))
@example(b'{"a":1,"a":2}', b"")
@example(b'{"a": 1, "a": 2}', b'{"a": 1}')
@example(b'{"a":1,"bbbbbb":1,"bbbbbb":1}', b"")
@example(b'{"a": {"b":1,"b":2}}', b"")
@example(b'{"a": NaN, "b": 1e999}', b"")
@example(b'{"a": 01}', b"")
@example(b'{"a\tb": 1}', b"")
@example(b'{"a": "\xff"}', b"")
@example(b'{"a": 1} {"a": 1}', b"")
@example(b"\xef\xbb\xbf{}", b"")
def test_whatever_stands_in_a_line_is_refused_as_alone(line: bytes, before: bytes) -> None:
    reader = JsonLines(MOST_BYTES)
    outcome(reader.parse, before)
    assert outcome(reader.parse, line) == outcome(lambda line: parse_json(line, MOST_BYTES), line)


def test_a_value_that_a_line_before_had_is_not_read_again() -> None:
    reader = JsonLines(MOST_BYTES)
    first, second = (reader.parse(json.dumps({"id": number, "config": {"layers": 80}}).encode()) for number in (1, 2))
    assert first["config"] is second["config"]
    assert (first["id"], second["id"]) == (1, 2)
