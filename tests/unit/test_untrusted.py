"""Parse untrusted JSON and responses of the API server within bounds."""

import copy
import json
import math
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from specdecode_operator.untrusted import (
    MAX_BYTES,
    MAX_DEPTH,
    MOST_DIGITS,
    JsonLines,
    UnreadableTextError,
    in_unicode,
    parse_json,
    read_answer,
    read_event,
    read_json,
    whole_number,
)


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
def test_valid_json_is_parsed(text: str | bytes, value: Any) -> None:
    assert value is None or parse_json(text) == value
    parse_json(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty"),
        ('{"a": 1} {"b": 2}', "holds 2 values"),
        ('{"a": 1,\n "b": }', "is not valid JSON at line 2, column 7: expecting value"),
        ('{"a": }', "is not valid JSON at column 7: expecting value"),
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
def test_invalid_or_harmful_json_is_refused(text: str | bytes, words: str) -> None:
    with pytest.raises(UnreadableTextError) as refused:
        parse_json(text)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_caller_may_lower_the_size_limit() -> None:
    with pytest.raises(UnreadableTextError, match="has more than 1 KiB"):
        parse_json("1" + " " * 1024, most_bytes=1024)


def test_number_with_more_than_308_digits_is_refused() -> None:
    assert parse_json("1" * 308) == int("1" * 308)
    with pytest.raises(UnreadableTextError, match="has 309 digits"):
        parse_json("1" * 309)


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
def test_json_lines_are_parsed_like_single_documents(lines: list[tuple[Any, dict[str, Any]]]) -> None:
    reader = JsonLines(MOST_BYTES)
    for value, form in lines * 2:
        line = json.dumps(value, **form).encode(errors="surrogatepass") + b"\n"
        assert outcome(reader.parse, line) == outcome(lambda line: parse_json(line, MOST_BYTES), line)


@given(line=st.binary(max_size=20), before=st.binary(max_size=20))
@example(b'{"a":1,"a":2}', b"")
@example(b'{"a": 1, "a": 2}', b'{"a": 1}')
@example(b'{"a":1,"bbbbbb":1,"bbbbbb":1}', b"")
@example(b'{"a":1 , "a" :[1,2]}', b"")
@example(b'{"a,":1,"a":1}', b"")
@example(b'{"a\\u002c":1,"a\\u002c":2}', b"")
@example(b'{"a":"","a":","}', b"")
@example(b'{"a": {"b":1,"b":2}}', b"")
@example(b'{"a": NaN, "b": 1e999}', b"")
@example(b'{"a": 01}', b"")
@example(b'{"a\tb": 1}', b"")
@example(b'{"a": "\xff"}', b"")
@example(b'{"a": 1} {"a": 1}', b"")
@example(b"\xef\xbb\xbf{}", b"")
def test_arbitrary_line_has_the_same_outcome_as_alone(line: bytes, before: bytes) -> None:
    reader = JsonLines(MOST_BYTES)
    outcome(reader.parse, before)
    assert outcome(reader.parse, line) == outcome(lambda line: parse_json(line, MOST_BYTES), line)


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


@pytest.mark.parametrize("string", ["\\", '"', '\\"', "\\\\", "\n", "", '",["', "\u00e9[", "{"])
def test_brackets_in_strings_are_not_nesting(string: str) -> None:
    shallow = [string, {string: string + "[" * MAX_DEPTH * 2 + string}, "]" + string]
    assert read_json(json.dumps(shallow).encode()) == shallow
    deep = f"{'[' * MAX_DEPTH}[1]{']' * MAX_DEPTH}"
    cut = read_json(f"[{json.dumps(string)}, {deep}, {json.dumps(string)}]".encode())
    assert (cut[0], cut[2]) == (string, string)
    assert "1" not in json.dumps(cut[1])


@pytest.mark.parametrize("levels", [200, 990, 9_990])
@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}"), ('["]",', "]"), ('["\\\\",', "]")])
def test_too_deeply_nested_values_are_dropped_and_siblings_kept(levels: int, opening: str, closing: str) -> None:
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
def test_values_within_the_depth_limit_are_unchanged(text: str) -> None:
    assert read_json(text.encode()) == json.loads(text)


def test_invalid_json_raises_json_decode_error() -> None:
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
def test_only_invalid_characters_are_replaced(text: bytes, read_as: str) -> None:
    assert read_json(in_unicode(text)) == json.loads(read_as)


@pytest.mark.parametrize(("text", "number"), [("0", 0), ("007", 7), (42, 42), ("9" * MOST_DIGITS, 10**MOST_DIGITS - 1)])
def test_digits_are_a_whole_number(text: object, number: int) -> None:
    assert whole_number(text) == number


@pytest.mark.parametrize(
    "text", ["", "-1", "+1", "1.0", "1_0", " 1", "1\n", "x", "\u0663", "\u00b2", "9" * 16, "9" * 5000]
)
def test_other_text_is_no_whole_number(text: str) -> None:
    assert whole_number(text) is None


@pytest.mark.parametrize("value", [None, True, 1.0, -1, [1], {}, b"1"])
def test_other_values_are_no_whole_number(value: object) -> None:
    assert whole_number(value) is None


WIDE = [[] for _ in range(450_000)]
OWNER = {"kind": "SpecDecodeDeployment", "name": "llama", "uid": "uid-1"}


def body(name: str, **parts: Any) -> dict[str, Any]:
    metadata = {"name": name, "namespace": "team", "uid": f"uid-{name}", "resourceVersion": "7", "generation": 2}
    metadata |= {"labels": {"a": "b"}, "ownerReferences": [OWNER], "managedFields": [{"manager": "kubectl"}]}
    return {
        "apiVersion": "v1",
        "kind": "Thing",
        "metadata": metadata,
        "spec": {"replicas": 1},
        "status": {"phase": "Up"},
    } | parts


def stub(name: str, size_bytes: int) -> dict[str, Any]:
    whole = body(name, spec={"tooLarge": f"{size_bytes:,} bytes"})
    del whole["metadata"]["managedFields"]
    return whole


def text(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def listed(*bodies: dict[str, Any]) -> dict[str, Any]:
    return {"kind": "ThingList", "apiVersion": "v1", "metadata": {"resourceVersion": "9"}, "items": [*bodies]}


@pytest.mark.parametrize(
    "wide",
    [body("wide", spec={"lists": WIDE}), body("wide", data={str(key): "" for key in range(60_000)})],
    ids=["lists", "data"],
)
def test_object_with_too_many_values_keeps_only_identity_and_status(wide: dict[str, Any]) -> None:
    size_bytes = len(text(wide))
    seen = {key: value for key, value in stub("wide", size_bytes).items() if key != "data"}
    assert read_answer(text(wide)) == seen
    assert read_answer(text(listed(body("a"), wide, body("b")))) == listed(body("a"), seen, body("b"))
    assert read_event(text({"type": "MODIFIED", "object": wide})) == ("MODIFIED", seen)


def test_metadata_and_status_of_an_oversized_object_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = body("wide", status={"lists": WIDE})
    wide["metadata"] |= {
        "labels": {f"l{number}": "" for number in range(100_000)},
        "ownerReferences": [OWNER] * 1000,
        "managedFields": WIDE,
    }
    seen = read_answer(text(wide))
    assert seen["status"] == {}
    assert {len(seen["metadata"]["labels"]), len(seen["metadata"]["ownerReferences"])} == {64, 16}
    assert "managedFields" not in seen["metadata"]


def test_oversized_object_keeps_its_deletion_timestamp() -> None:
    wide = body("wide", spec={"lists": WIDE})
    since = {"creationTimestamp": "2026-01-01T00:00:00Z", "deletionTimestamp": "2026-01-02T00:00:00Z"}
    wide["metadata"] |= since
    assert read_answer(text(wide))["metadata"].items() >= since.items()


def test_large_strings_are_kept_whole() -> None:
    data = {"config.json": "{,[" * 300_000, "quoted": '\\"' * 100_000}
    whole = body("facts", data=data)
    assert read_answer(text(whole)) == whole
    assert read_answer(text(listed(whole, body("a")))) == listed(whole, body("a"))
    assert read_event(text({"type": "ADDED", "object": whole})) == ("ADDED", whole)


@pytest.mark.parametrize("bad", [b"\xff", rb"\ud800"])
def test_invalid_characters_in_one_object_do_not_break_the_list(bad: bytes) -> None:
    """The API server keeps it so in managed fields of its own kinds: one ConfigMap would end each list and watch."""
    evil = body("evil")
    evil["metadata"]["managedFields"] = [{"fieldsV1": {"f:data": {"f:HERE": {}}}}]
    shown = read_answer(text(listed(evil, body("b"))).replace(b"HERE", bad))
    assert [each["metadata"]["name"] for each in shown["items"]] == ["evil", "b"]
    _, seen = read_event(text({"type": "ADDED", "object": evil}).replace(b"HERE", bad))
    assert seen["metadata"]["managedFields"] == [{"fieldsV1": {"f:data": {"f:\ufffd": {}}}}]


def test_known_objects_are_reduced_to_their_uid() -> None:
    asked = []

    def is_known(seen: dict[str, Any]) -> bool:
        asked.append(seen)
        return bool(seen["metadata"]["name"] != "b")

    deep = text(listed(body("a", spec="HERE"), body("b"), body("c", spec={"lists": WIDE})))
    read = read_answer(deep.replace(b'"HERE"', b"[" * 9000 + b"]" * 9000), is_known)
    assert read == {**listed(body("b")), "known": ["uid-a", "uid-c"]}
    who = {"name": "a", "namespace": "team", "uid": "uid-a", "resourceVersion": "7", "labels": {"a": "b"}}
    assert asked[0] == {"metadata": who}
    assert read_answer(text(listed()), is_known) == {**listed(), "known": []}
    assert read_answer(text({**listed(), "items": None}), is_known) == {**listed(), "known": []}


def test_response_that_is_no_object_list_is_unchanged() -> None:
    discovery = {"kind": "APIResourceList", "resources": [{"name": f"n{number}"} for number in range(9000)]}
    assert read_answer(text(discovery)) == discovery
    assert read_answer(b'{"kind":"Status","code":404}') == {"kind": "Status", "code": 404}


@pytest.mark.parametrize("torn", [b"", b"{", text(listed(body("wide", spec={"lists": WIDE})))[:-200_000]])
def test_truncated_response_raises_value_error(torn: bytes) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        read_answer(torn)
