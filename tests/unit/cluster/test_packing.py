"""Compressed texts: they come back unchanged, equal ones are equal, and similar ones take little memory."""

import json
import random
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from uuid import uuid4

import pytest

from specdecode_operator.cluster.packing import PackedTexts, pack, unpack
from specdecode_operator.deployment.rollout.engine_workload import pack_object, unpack_object

WORDS = [f"word-{number:x}" for number in random.Random(7).sample(range(10**9), 400)]
"""Text that a dictionary of common parts does not have."""


def workload(name: str, kind: str = "Deployment") -> dict[str, object]:
    labels = {"specdecode.io/deployment": name}
    return {"kind": kind, "metadata": {"name": f"{name}-plan", "labels": labels}, "spec": {"words": WORDS}}


@pytest.fixture
def group() -> str:
    """A group that no other test uses."""
    return str(uuid4())


def test_texts_come_back_unchanged(group: str) -> None:
    texts = [b"", b"first", b"second", " ".join(WORDS).encode() * 20]
    assert [unpack(pack(text, group)) for text in texts] == texts
    assert [unpack(pack(text)) for text in texts] == texts


def test_equal_texts_are_equal_before_and_after_others(group: str) -> None:
    first, packed = b"the first text", pack(b"the first text", group)
    pack(b"the second text", group)
    assert pack(first, group) == packed


def test_similar_texts_take_little_memory(group: str) -> None:
    first, second = (json.dumps(workload(name)).encode() for name in ("llama", "qwen"))
    pack(first, group)
    assert len(pack(second, group)) < len(pack(second)) / 10


def test_objects_that_differ_in_names_take_little_memory() -> None:
    kind = f"Kind{uuid4()}"
    first, second = pack_object(workload("llama", kind)), pack_object(workload("qwen", kind))
    assert unpack_object(second) == workload("qwen", kind)
    assert max(map(len, (first, second))) < len(pack(json.dumps(workload("qwen")).encode())) / 10


def test_the_objects_of_one_deployment_are_in_groups_of_their_own() -> None:
    kind = f"Kind{uuid4()}"
    other = {**workload("llama", kind), "metadata": {"name": "llama", "labels": {"specdecode.io/deployment": "llama"}}}
    pack_object({**other, "spec": {"words": "few"}})
    pack_object(workload("llama", kind))
    assert len(pack_object(workload("qwen", kind))) < len(pack(json.dumps(workload("qwen")).encode())) / 10


def test_a_forged_checksum_does_not_replace_the_dictionary_of_another_group() -> None:
    # Adler-32 of both is the same: adding 1, -2 and 1 to neighbouring bytes changes neither of its sums.
    text, forged = (f"{' '.join(WORDS)} {each} and more" for each in ("bdb", "cbc"))
    groups = f"a{uuid4()}", f"b{uuid4()}"
    packed = pack(text.encode(), groups[0])
    assert unpack(pack(forged.encode(), groups[1])) == forged.encode()
    assert unpack(packed) == text.encode()


def test_entries_come_back_unchanged() -> None:
    entries = {"engines.json": json.dumps(WORDS), "failure.json": "half of a pair: \ud800"}
    packed = PackedTexts(entries, {"engines.json"})
    assert dict(packed) == entries
    assert packed == PackedTexts(entries, {"engines.json"})
    assert packed != PackedTexts({**entries, "failure.json": ""}, {"engines.json"})


def test_names_of_entries_take_no_memory_for_ever() -> None:
    """Users who may write ConfigMaps choose the names of their entries."""
    with tracing():
        for number in range(100):
            PackedTexts({f"name-{number}": f"{number:02}" * 10_000}, {"engines.json"})
        assert tracemalloc.get_traced_memory()[0] < 20_000 * 10


@contextmanager
def tracing() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()
