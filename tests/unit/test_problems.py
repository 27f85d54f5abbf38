"""How values that others wrote stand in messages."""

import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest

from specdecode_operator.problems import Problem, printable, shown, shown_or_missing, some_of


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
def test_control_characters_are_escaped(text: str, escaped: str) -> None:
    assert printable(text) == escaped
    assert printable(escaped) == escaped
    assert str(Problem(text, text, text)) == f"{escaped}: {escaped}: {escaped}"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (f"401 for token hf_{'aB3' * 8}, renew it", "401 for token (a secret), renew it"),
        (f"api_key='sk-proj-{'x1' * 12}'", "api_key='(a secret)'"),
        (f"ghp_{'a' * 36}", "(a secret)"),
        ("eyJhbGciOiJSUzI1NiJ9.eyJzdWIiOiJ4In0.c2ln", "(a secret)"),
        ("{'Authorization': 'Bearer s3same-open'}", "{'Authorization': 'Bearer (a secret)'}"),
        ("Authorization: Basic dXNlcjpwYXNzd29yZA==", "Authorization: Basic (a secret)"),
        ("proxy http://user:open@proxy:3128 refused", "proxy http://(a secret)@proxy:3128 refused"),
        ("https://u:p@ss@host/x", "https://(a secret)@host/x"),
        ("https://dGhpc2lzYXRva2Vu@host/x", "https://(a secret)@host/x"),
        ("authorization: BEARER s3same-open", "authorization: BEARER (a secret)"),
        ("403 of https://cdn/x?X-Amz-Signature=0a1b2c3d4e&b=1", "403 of https://cdn/x?X-Amz-Signature=(a secret)&b=1"),
        ("https://blob/x?sv=1&sig=ab%2Fcdefghi", "https://blob/x?sv=1&sig=(a secret)"),
        ("-----BEGIN PRIVATE KEY-----\nMIIEv\n-----END PRIVATE KEY----- is no key", "(a secret) is no key"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIEv", "(a secret)"),
    ],
)
def test_text_that_looks_like_a_secret_is_masked(text: str, told: str) -> None:
    assert printable(text) == told
    assert str(Problem("a", text, "b")) == f"a: {told}: b"


@pytest.mark.parametrize(
    "text",
    [
        "hf_transfer is not installed",
        "sk-learn",
        "http://127.0.0.1:8000/metrics",
        "registry:5000/team/engine:0.32@sha256:" + "a" * 64,
        "ask the bearer of it",
        "basic settings",
        "git+ssh://git@host/engines",
        "https://cdn/x?design=1&token=short",
        "Qwen/eyJ-7B",
    ],
)
def test_harmless_text_similar_to_a_secret_is_shown(text: str) -> None:
    assert printable(text) == text


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
def test_values_are_shown_as_written_in_yaml(value: Any, text: str) -> None:
    assert shown(value) == text


@pytest.mark.parametrize("message", ["is missing: name a GPU", "name a GPU"])
def test_missing_value_is_mentioned_only_once(message: str) -> None:
    assert str(Problem("gpu", shown_or_missing(None), message)) == "gpu: is missing: name a GPU"


@pytest.mark.parametrize(
    "texts",
    [(f"{number} {'x' * 100_000}" for number in range(100)), (f"its text is {number}" for number in range(150_000))],
    ids=["long", "many"],
)
def test_memory_of_the_printable_cache_is_bounded(texts: Iterator[str]) -> None:
    """Of both, all are 10 MB and more."""
    tracemalloc.start()
    try:
        for text in texts:
            printable(text)
        held_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held_bytes < 8 * 2**20


def test_value_that_is_not_json_is_shown_by_its_type() -> None:
    for value in (int("f" * 5000, 16), [int("f" * 5000, 16)], {(1, 2): 3}, {b"a": 1}, {1j: 2}):
        assert shown(value) == f"a {type(value).__name__} that is not JSON"


def test_message_lists_at_most_a_few_names() -> None:
    assert some_of(["a", "b"]) == "a, b"
    assert some_of(map(str, range(7))) == "0, 1, 2, 3, 4, 5, 6"
    assert some_of(map(str, range(90))) == "0, 1, 2, 3, 4, 5 and 84 more"
