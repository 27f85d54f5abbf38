"""Events are posted in order, in the background, and a failure affects only one of them."""

import asyncio
from contextvars import ContextVar

import pytest

from specdecode_operator.api.base import Body
from specdecode_operator.cluster import events
from specdecode_operator.cluster.client import ClusterError
from specdecode_operator.cluster.events import EventQueue


def event(reason: str) -> Body:
    return {"reason": reason, "involvedObject": {"kind": "SpecDecodeDeployment", "namespace": "team", "name": "llama"}}


class Posting:
    """Fake API server that blocks until ``may_answer`` is set."""

    def __init__(self) -> None:
        self.posted: list[str] = []
        self.may_answer = asyncio.Event()

    async def __call__(self, event: Body) -> None:
        await self.may_answer.wait()
        if event["reason"] == "Denied":
            raise ClusterError("create events team: denied")
        self.posted.append(event["reason"])


async def test_events_are_posted_in_order_and_do_not_block() -> None:
    queue = EventQueue(server := Posting())
    for reason in ("Fits", "Drafting", "Serving"):
        queue.add(event(reason))
    assert server.posted == []
    server.may_answer.set()
    await queue.join()
    assert server.posted == ["Fits", "Drafting", "Serving"]


async def test_failed_event_is_logged_and_the_next_is_posted(caplog: pytest.LogCaptureFixture) -> None:
    queue = EventQueue(server := Posting())
    server.may_answer.set()
    for reason in ("Denied", "Serving"):
        queue.add(event(reason))
    await queue.join()
    assert server.posted == ["Serving"]
    assert [message for message in caplog.messages if "team/llama" in message and "denied" in message]


async def test_waiting_events_are_posted_before_the_end() -> None:
    queue = EventQueue(server := Posting())
    queue.add(event("Serving"))
    server.may_answer.set()
    await queue.close()
    assert server.posted == ["Serving"]


async def test_end_does_not_wait_for_a_server_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(events, "_END_S", 0)
    queue = EventQueue(server := Posting())
    queue.add(event("Serving"))
    await queue.close()
    assert server.posted == []
    assert [message for message in caplog.messages if "dropped" in message]


async def test_events_beyond_the_limit_are_dropped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(events, "_MOST", 2)
    queue = EventQueue(server := Posting())
    for number in range(3):
        queue.add(event(str(number)))
    server.may_answer.set()
    await queue.join()
    assert server.posted == ["0", "1"]
    assert [message for message in caplog.messages if "dropped" in message]


CALLER = ContextVar("caller", default="none")


async def test_events_do_not_count_towards_the_reconcile_that_adds_the_first() -> None:
    callers: list[str] = []

    async def post(_: Body) -> None:
        callers.append(CALLER.get())

    queue = EventQueue(post)
    token = CALLER.set("a reconcile")
    queue.add(event("Fits"))
    CALLER.reset(token)
    queue.add(event("Serving"))
    await queue.join()
    assert callers == ["none", "none"]
