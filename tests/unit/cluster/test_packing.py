"""Compressed texts: they come back unchanged, equal ones are equal, and similar ones take little memory."""

import json
import random
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from specdecode_operator.cluster import packing
from specdecode_operator.cluster.packing import PackedTexts, pack, unpack
from specdecode_operator.deployment.rollout.engine_workload import pack_object, unpack_object

WORDS = [f"word-{number:x}" for number in random.Random(7).sample(range(10**9), 400)]
"""Text that a dictionary of common parts does not have."""


def workload(name: str, kind: str = "Deployment") -> dict[str, object]:
    labels = {"specdecode.io/deployment": name}
    return {"kind": kind, "metadata": {"name": f"{name}-plan", "labels": labels}, "spec": {"words": WORDS}}


@pytest.fixture(autouse=True)
def _no_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "_DICTIONARIES", {"": packing._COMMON})


def test_texts_come_back_unchanged() -> None:
    texts = [b"", b"first", b"second", " ".join(WORDS).encode() * 20]
    assert [unpack(pack(text, "plan")) for text in texts] == texts
    assert [unpack(pack(text)) for text in texts] == texts


def test_equal_texts_are_equal_before_and_after_others() -> None:
    first, packed = b"the first text", pack(b"the first text", "plan")
    pack(b"the second text", "plan")
    assert pack(first, "plan") == packed


def test_similar_texts_take_little_memory() -> None:
    first, second = (json.dumps(workload(name)).encode() for name in ("llama", "qwen"))
    pack(first, "plan")
    assert len(pack(second, "plan")) < len(pack(second)) / 10


def test_objects_that_differ_in_names_take_little_memory() -> None:
    first, second = pack_object(workload("llama")), pack_object(workload("qwen"))
    assert unpack_object(second) == workload("qwen")
    assert max(map(len, (first, second))) < len(pack(json.dumps(workload("qwen")).encode())) / 10


def test_the_objects_of_one_deployment_are_in_groups_of_their_own() -> None:
    other = {**workload("llama"), "metadata": {"name": "llama", "labels": {"specdecode.io/deployment": "llama"}}}
    pack_object({**other, "spec": {"words": "few"}})
    pack_object(workload("llama"))
    assert len(pack_object(workload("qwen"))) < len(pack(json.dumps(workload("qwen")).encode())) / 10


def test_a_forged_checksum_does_not_replace_the_dictionary_of_another_group() -> None:
    # Adler-32 of both is the same: adding 1, -2 and 1 to neighbouring bytes changes neither of its sums.
    text, forged = (f"{' '.join(WORDS)} {each} and more" for each in ("bdb", "cbc"))
    groups = "a", "b"
    packed = pack(text.encode(), groups[0])
    assert unpack(pack(forged.encode(), groups[1])) == forged.encode()
    assert unpack(packed) == text.encode()


def test_entries_come_back_unchanged() -> None:
    entries = {"engines.json": json.dumps(WORDS), "failure.json": "half of a pair: \ud800"}
    packed = PackedTexts(entries, {"engines.json"})
    assert dict(packed) == entries
    assert packed == PackedTexts(entries, {"engines.json"})
    assert packed != PackedTexts({**entries, "failure.json": ""}, {"engines.json"})


@pytest.mark.parametrize("suffix", ["facts-{:04x}", "gpus-{:06x}"])
def test_names_with_a_hash_are_in_one_group(suffix: str) -> None:
    """The hash follows from the spec, so each edit would add a group."""
    names = [f"llama-{suffix.format(number)}" for number in range(2)]
    labels = {"specdecode.io/deployment": "llama"}
    jobs = [{"kind": "Job", "metadata": {"name": name, "labels": labels}, "spec": WORDS} for name in names]
    assert len([*map(pack_object, jobs)][1]) < len(pack(json.dumps(jobs[1]).encode())) / 10


def test_groups_are_limited() -> None:
    texts = {str(number): json.dumps([*WORDS, number]).encode() for number in range(200)}
    with tracing():
        packed = [pack(text, group) for group, text in texts.items()]
        assert tracemalloc.get_traced_memory()[0] - sum(map(len, packed)) < 50 * 2**15
    assert [*map(unpack, packed)] == [*texts.values()]
    assert pack(texts["199"], "199") == packed[199]


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
