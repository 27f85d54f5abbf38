"""Whom recorded requests are sent to."""

import asyncio
import json
from collections.abc import AsyncIterator

import pytest

from specdecode_operator.replay.drive import Address, TargetError, find_target
from tests.support.completion_server import CompletionServer, completion_server


@pytest.fixture
async def server() -> AsyncIterator[CompletionServer]:
    async with completion_server() as state:
        yield state


def page(*names: str) -> tuple[int, str]:
    return 200, json.dumps({"object": "list", "data": [{"id": name, "object": "model"} for name in names]})


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://localhost:8000", ("localhost", 8000, "", False)),
        ("http://localhost:8000/v1/", ("localhost", 8000, "", False)),
        ("https://api.example.org/llm/v1", ("api.example.org", 443, "/llm", True)),
        ("http://[::1]:80/", ("::1", 80, "", False)),
    ],
)
def test_urls(url: str, expected: tuple[str, int, str, bool]) -> None:
    address = Address.parse(url)
    assert (address.host, address.port, address.path, address.tls) == expected


@pytest.mark.parametrize(
    "url",
    ["localhost:8000", "http://", "ftp://a", "http://a:port", "http://a:99999", "http://me@a", "http://a?b", "http://a/\r\nb",
     "http://[::1", "http://a b", ""],
)  # fmt: skip
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(TargetError, match=r"--url: .*: write one such as http://localhost:8000"):
        Address.parse(url)


@pytest.mark.parametrize(
    ("served", "model", "recorded", "expected"),
    [
        (["a", "b"], "b", "a", "b"),
        (["a", "b"], None, "a", "a"),
        (["b"], None, "a", "b"),
        (["b"], None, None, "b"),
    ],
)
async def test_the_model_is_the_one_said_or_the_recorded_or_the_only_one(
    server: CompletionServer, served: list[str], model: str | None, recorded: str | None, expected: str
) -> None:
    server.pages["/v1/models"] = page(*served)
    target = await find_target(Address.parse(server.url), model, recorded, None)
    assert (target.model, target.host, target.port, target.path, target.tls) == (
        expected, "127.0.0.1", server.port, "/v1", None
    )  # fmt: skip


async def test_a_server_without_a_list_of_models_is_believed(server: CompletionServer) -> None:
    assert (await find_target(Address.parse(server.url), "mine", None, None)).model == "mine"
    with pytest.raises(TargetError, match=r"--model: .* does not say which models it serves: name one"):
        await find_target(Address.parse(server.url), None, "recorded", None)


@pytest.mark.parametrize(
    ("answer", "model", "key", "says"),
    [
        (page("a", "b"), "c", None, "--model: c: .* serves a, b: name one of them"),
        (page("a", "b"), None, None, "--model: .* serves a, b: say which is meant"),
        (page(*"abcdefg"), None, None, "serves a, b, c, d, e and 2 more"),
        (page(), None, None, "serves no model"),
        ((401, "{}"), None, None, r"wants a key \(401\): .* --api-key-variable"),
        ((403, "{}"), None, "k", r"refuses the key \(403\)"),
        ((500, '{"error": {"message": "no\\u001b[1mmemory"}}'), None, None, r"answered 500 \(no\\x1b\[1mmemory\)"),
        ((200, "<html>"), None, None, "is no list of models"),
        ((200, '{"data": [{"id": 3}]}'), None, None, "is no list of models"),
        ((200, "[" * 100_000), None, None, "is no list of models"),
        ((200, " " * 2_000_000), None, None, "has more than 1048576 bytes"),
    ],
)  # fmt: skip
async def test_a_server_that_cannot_be_driven(
    server: CompletionServer, answer: tuple[int, str], model: str | None, key: str | None, says: str
) -> None:
    server.pages["/v1/models"] = answer
    with pytest.raises(TargetError, match=says) as raised:
        await find_target(Address.parse(server.url), model, "recorded", key)
    assert "\n" not in str(raised.value)
    assert str(raised.value).isprintable()


async def test_a_server_that_is_down(server: CompletionServer) -> None:
    closed = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = closed.sockets[0].getsockname()[1]
    closed.close()
    await closed.wait_closed()
    with pytest.raises(TargetError, match=r"does not answer \(.*\): start the server, or name another"):
        await find_target(Address.parse(f"http://127.0.0.1:{port}"), None, None, None)
