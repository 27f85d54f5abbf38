"""The client that counts what a roll-out costs its users counts every way in which an answer can fail."""

import asyncio

import pytest

from tests.support.completion_server import (
    LAST_CHUNK,
    OK_HEAD,
    Answer,
    answer_in_full,
    answer_with,
    chunk,
    completion_server,
    event,
    rejection,
    token_event,
    usage_event,
)
from tests.support.traffic import Traffic

DONE = chunk(b"data: [DONE]\n\n") + LAST_CHUNK
TOKENS = OK_HEAD + chunk(token_event([1000, 1001]))
CASES = {
    "refused": (rejection(503, b"shutting down"), "HTTP 503"),
    "cut": (TOKENS, "RemoteProtocolError"),
    "ended early": (TOKENS + LAST_CHUNK, "cut after"),
    "an error in the stream": (
        TOKENS + chunk(event({"error": {"message": "EngineCore encountered an issue"}})) + DONE,
        "EngineCore encountered an issue",
    ),
    "no usage": (TOKENS + DONE, "KeyError"),
    "not JSON": (TOKENS + chunk(b"data: {\n\n") + DONE, "JSONDecodeError"),
    "too few tokens": (TOKENS + chunk(usage_event(1, 2)) + DONE, "2 of 4 tokens"),
}


def traffic_until(answer: Answer, requests: int) -> Traffic:
    """Ask until the server got so many requests."""

    async def run() -> Traffic:
        async with completion_server() as server:
            server.answer = answer
            traffic = Traffic(f"{server.url}/v1/completions", [{"prompt": "a", "max_tokens": 4}])
            traffic.__enter__()
            await server.wait_for_requests(requests)
            await asyncio.to_thread(traffic.__exit__, None, None, None)
            return traffic

    return asyncio.run(run())


@pytest.mark.parametrize(("raw", "told"), CASES.values(), ids=CASES)
def test_failed_responses_are_counted_and_the_client_continues(raw: bytes, told: str) -> None:
    traffic = traffic_until(answer_with(raw), 2)
    assert traffic.complete == 0
    assert len(traffic.failures) >= 2
    assert all(told in failure for failure in traffic.failures), traffic.failures


def test_complete_responses_are_counted() -> None:
    traffic = traffic_until(answer_in_full, 2)
    assert traffic.failures == []
    assert traffic.complete >= 2
