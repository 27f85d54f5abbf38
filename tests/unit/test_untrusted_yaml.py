"""YAML that others wrote: read as Kubernetes reads it, and refused before it hurts."""

import math
import tracemalloc
from typing import Any

import pytest

from specdecode_operator.untrusted import MANY_VALUES, MAX_BYTES, UnreadableTextError
from specdecode_operator.untrusted_yaml import parse_yaml


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a: 2024-01-01", {"a": "2024-01-01"}),
        ("a: 2024-13-45", {"a": "2024-13-45"}),
        ("a: 12:30:45", {"a": "12:30:45"}),
        ("a: 1:2", {"a": "1:2"}),
        ("a: =", {"a": "="}),
        ("a: [1e6, 1E-3, .5, 1., 1.5e+3]", {"a": [1e6, 1e-3, 0.5, 1.0, 1500.0]}),
        ("a: [0x1f, 0o17, 017, 0b11, 1_000, -3]", {"a": [31, 15, 15, 3, 1000, -3]}),
        ("a: [.inf, -.inf]", {"a": [math.inf, -math.inf]}),
        ("{1: a, true: b, 1.5: c}", {"1": "a", "true": "b", "1.5": "c"}),
        ("a: !!str 12", {"a": "12"}),
        ("a: &x [1]\nb: *x", {"a": [1], "b": [1]}),
        ("a: &x {p: 1, q: 2}\nb: {<<: *x, q: 3}", {"a": {"p": 1, "q": 2}, "b": {"p": 1, "q": 3}}),
        ("a: &x {p: 1}\nb: &y {q: 2}\nc: {<<: [*x, *y]}", {"a": {"p": 1}, "b": {"q": 2}, "c": {"p": 1, "q": 2}}),
    ],
)
def test_yaml_values_are_parsed_as_in_kubernetes(text: str, value: Any) -> None:
    (found,) = parse_yaml(text)
    assert found == value


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[" * 50_000, "at line 1, column 101: is nested more than 100 deep"),
        ("{a: " * 50_000, "is nested more than 100 deep"),
        ("- " * 50_000, "is nested more than 100 deep"),
        ("? " * 50_000, "is nested more than 100 deep"),
        ("".join(f"{' ' * level}a:\n" for level in range(200)), "is nested more than 100 deep"),
        ("a: &a [*a]", "the alias *a has no anchor that ends before it"),
        ("a: *b", "the alias *b has no anchor that ends before it"),
        ("a: &x [1]\n---\nb: *x", "the alias *x has no anchor that ends before it"),
        ("a: !!python/object/apply:os.system [ls]", "is nothing that Kubernetes knows"),
        ("a: !!binary aGk=", "is nothing that Kubernetes knows"),
        ("a: !!bool abc", "is nothing that Kubernetes knows"),
        ("a: !!float ''", "is nothing that Kubernetes knows"),
        ("a: " + "9" * 5000, "has 5,000 digits"),
        ("a: 0x" + "f" * 5000, "digits: write one with fewer"),
        ("a: 1e999", "the number 1e999 is too large"),
        ("[a]: b", "a key must be text"),
        ("null: b", "a key must be text"),
        ("a: 1\n'a': 2", "line 2, column 1: the key a is there twice"),
        ("1: a\n'1': b", 'the key "1" is there twice'),
        ("a: \x00", "is not valid YAML at"),
        ("a:\n\tb: 1", "line 2, column 1: the line is indented with a tab"),
        ("a: [1", "is not valid YAML at line 2, column 1"),
        ("\n".join(f"%TAG !a{index}! x" for index in range(9)) + "\n---\na", "lines with %TAG"),
        ("a" * (MAX_BYTES + 1), "has more than 32 MiB"),
    ],
)
def test_invalid_or_harmful_yaml_is_refused(text: str, words: str) -> None:
    with pytest.raises(UnreadableTextError) as refused:
        list(parse_yaml(text))
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


LAUGHS = "a0: &a0 [ha]\n" + "".join(
    f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]\n" for level in range(1, 12)
)
MERGES = "a0: &a0 {k: v}\n" + "".join(
    f"a{level}: &a{level} {{<<: [{', '.join([f'*a{level - 1}'] * 10)}]}}\n" for level in range(1, 12)
)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("".join(f"k{index}: 1\n" for index in range(30_000)), id="keys"),
        pytest.param(f"[{'a,' * 60_000}]", id="words"),
        pytest.param(f"[{'[],' * 60_000}]", id="lists"),
        pytest.param("---\n" * (MANY_VALUES + 1), id="documents"),
        pytest.param(LAUGHS, id="aliases"),
        pytest.param(MERGES, id="merges"),
    ],
)
def test_too_many_values_are_refused_before_they_are_built(text: str) -> None:
    """A megabyte has at most 87,000 values, so neither time nor memory grows without end."""
    tracemalloc.start()
    try:
        with pytest.raises(UnreadableTextError, match=r"has more than \d+,\d+ values"):
            list(parse_yaml(text))
        assert tracemalloc.get_traced_memory()[1] < 20 * 2**20
    finally:
        tracemalloc.stop()


def test_a_large_list_of_nodes_is_read() -> None:
    """What kubectl prints has few values for its size, and may have more than a small text."""
    item = "- metadata:\n    name: " + "n" * 80 + "\n"
    (found,) = parse_yaml("items:\n" + item * (MANY_VALUES // 4))
    assert len(found["items"]) == MANY_VALUES // 4


def test_documents_before_an_invalid_one_are_read() -> None:
    documents = parse_yaml("a: 1\n---\nb: [\n")
    assert next(documents) == {"a": 1}
    with pytest.raises(UnreadableTextError, match="line 4"):
        next(documents)


def test_scalar_aliases_and_several_merge_keys_are_accepted() -> None:
    text = "a: &a 1\nb: *a\nc: &c {d: 2}\ne: &e {f: 3}\ng:\n  <<: *c\n  <<: *e\n"
    (found,) = parse_yaml(text)
    assert (found["b"], found["g"]) == (1, {"d": 2, "f": 3})
