"""Compression: texts survive the round trip, equal texts give equal bytes, similar texts take little memory."""

import json
import random
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from specdecode_operator.cluster import packing
from specdecode_operator.cluster.packing import PackedTexts, pack, unpack
from specdecode_operator.cluster.resources import DEPLOYMENT_LABEL
from specdecode_operator.deployment.rollout.engine_workload import pack_object, unpack_object

WORDS = [f"word-{number:x}" for number in random.Random(7).sample(range(10**9), 400)]
"""Words that the common dictionary lacks."""


def workload(name: str, kind: str = "Deployment") -> dict[str, object]:
    labels = {DEPLOYMENT_LABEL: name}
    return {"kind": kind, "metadata": {"name": f"{name}-plan", "labels": labels}, "spec": {"words": WORDS}}


@pytest.fixture(autouse=True)
def _no_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "_DICTIONARIES", {"": packing._COMMON})


def test_texts_come_back_unchanged() -> None:
    texts = [b"", b"first", b"second", " ".join(WORDS).encode() * 20]
    assert [unpack(pack(text, "plan")) for text in texts] == texts
    assert [unpack(pack(text)) for text in texts] == texts


def test_equal_texts_give_equal_bytes_after_another_text() -> None:
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


def test_different_children_of_a_deployment_are_in_different_groups() -> None:
    other = {**workload("llama"), "metadata": {"name": "llama", "labels": {DEPLOYMENT_LABEL: "llama"}}}
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


def test_objects_with_the_name_of_their_deployment_are_in_one_group() -> None:
    owners = ("my-pair", "your-pair")
    bodies = [
        {"kind": "Deployment", "metadata": {"name": each, "labels": {DEPLOYMENT_LABEL: each}}, "spec": WORDS}
        for each in owners
    ]
    assert len([*map(pack_object, bodies)][1]) < len(pack(json.dumps(bodies[1]).encode())) / 10


@pytest.mark.parametrize("suffix", ["facts-{:04x}", "gpus-{:06x}"])
def test_names_that_differ_in_a_hash_are_in_one_group(suffix: str) -> None:
    """The hash follows from the spec, so each edit would add a group."""
    names = [f"llama-{suffix.format(number)}" for number in range(2)]
    labels = {DEPLOYMENT_LABEL: "llama"}
    jobs = [{"kind": "Job", "metadata": {"name": name, "labels": labels}, "spec": WORDS} for name in names]
    assert len([*map(pack_object, jobs)][1]) < len(pack(json.dumps(jobs[1]).encode())) / 10


def test_groups_are_limited() -> None:
    texts = {str(number): json.dumps([*WORDS, number]).encode() for number in range(200)}
    with tracing():
        packed = [pack(text, group) for group, text in texts.items()]
        assert tracemalloc.get_traced_memory()[0] - sum(map(len, packed)) < 50 * 2**15
    assert [*map(unpack, packed)] == [*texts.values()]
    assert pack(texts["199"], "199") == packed[199]


def test_entry_names_add_no_dictionaries() -> None:
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
