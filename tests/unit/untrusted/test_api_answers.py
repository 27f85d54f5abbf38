"""Answers of the API server: what anybody put into an object takes no more memory than objects of use do."""

import json
import tracemalloc
from typing import Any

import pytest

from specdecode_operator.untrusted import bounded_event, read_answer

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
def test_an_object_of_too_many_values_is_read_as_who_it_is_and_how_it_stands(wide: dict[str, Any]) -> None:
    size_bytes = len(text(wide))
    seen = {key: value for key, value in stub("wide", size_bytes).items() if key != "data"}
    assert read_answer(text(wide)) == seen
    assert read_answer(text(listed(body("a"), wide, body("b")))) == listed(body("a"), seen, body("b"))
    event = json.loads(bounded_event(text({"type": "MODIFIED", "object": wide})))
    assert event == {"type": "MODIFIED", "object": seen}


def test_what_others_wrote_into_metadata_and_status_is_no_way_around(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_one_that_is_being_deleted_is_read_as_such_however_large() -> None:
    wide = body("wide", spec={"lists": WIDE})
    since = {"creationTimestamp": "2026-01-01T00:00:00Z", "deletionTimestamp": "2026-01-02T00:00:00Z"}
    wide["metadata"] |= since
    assert read_answer(text(wide))["metadata"].items() >= since.items()


def test_large_texts_are_read_whole() -> None:
    data = {"config.json": "{,[" * 300_000, "quoted": '\\"' * 100_000}
    whole = body("facts", data=data)
    assert read_answer(text(whole)) == whole
    assert read_answer(text(listed(whole, body("a")))) == listed(whole, body("a"))
    line = text({"type": "ADDED", "object": whole})
    assert bounded_event(line) == line


@pytest.mark.parametrize("bad", [b"\xff", rb"\ud800"])
def test_what_others_wrote_that_is_no_character_hides_nothing(bad: bytes) -> None:
    """The API server keeps it so in managed fields of its own kinds: one ConfigMap would end each list and watch."""
    evil = body("evil")
    evil["metadata"]["managedFields"] = [{"fieldsV1": {"f:data": {"f:HERE": {}}}}]
    shown = read_answer(text(listed(evil, body("b"))).replace(b"HERE", bad))
    assert [each["metadata"]["name"] for each in shown["items"]] == ["evil", "b"]
    line = bounded_event(text({"type": "ADDED", "object": evil}).replace(b"HERE", bad))
    assert json.loads(line.decode())["object"]["metadata"]["managedFields"] == [
        {"fieldsV1": {"f:data": {"f:\ufffd": {}}}}
    ]


def test_of_objects_that_are_known_only_the_uid_is_read() -> None:
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


def test_what_is_no_list_of_objects_is_read_as_it_is() -> None:
    discovery = {"kind": "APIResourceList", "resources": [{"name": f"n{number}"} for number in range(9000)]}
    assert read_answer(text(discovery)) == discovery
    assert read_answer(b'{"kind":"Status","code":404}') == {"kind": "Status", "code": 404}


def test_deep_objects_of_too_many_values_are_read_too() -> None:
    deep = text(body("deep", spec={"a": "HERE", "lists": WIDE})).replace(b'"HERE"', b"[" * 9000 + b"]" * 9000)
    assert read_answer(deep)["spec"].keys() == {"tooLarge"}
    event = b'{"type":"ADDED","object":' + deep + b"}"
    assert json.loads(bounded_event(event))["object"]["spec"].keys() == {"tooLarge"}


@pytest.mark.parametrize("torn", [b"", b"{", text(listed(body("wide", spec={"lists": WIDE})))[:-200_000]])
def test_a_torn_answer_is_an_error_of_one_kind(torn: bytes) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        read_answer(torn)


def test_many_of_them_take_the_memory_of_few() -> None:
    answer = text(listed(*(body(f"wide-{number}", spec={"lists": WIDE}) for number in range(8))))
    tracemalloc.start()
    try:
        read_answer(answer)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 2 * len(answer)
