"""Long prompts hold up nobody."""

import asyncio
import json
from collections.abc import Sequence

from specdecode_operator.capture.recorder.block_hashes import block_hashes
from specdecode_operator.replay.clocks import VirtualClock
from specdecode_operator.replay.engine import Incoming, Load, Sink, Submission
from specdecode_operator.replay.server.completion_answers import Engines, Whole
from specdecode_operator.replay.server.completion_requests import read_completion
from specdecode_operator.replay.server.served_answers import Meter


class Ticket:
    """Of a request that never has a token."""

    def cancel(self) -> None:
        pass

    def waited_ms(self) -> None:
        return None


class Engine:
    """Keeps what comes to it."""

    def __init__(self) -> None:
        self.found: list[Incoming] = []

    def submit(self, request: Incoming, sink: Sink) -> Submission:
        self.found.append(request)
        return Ticket()

    def load(self) -> Load:
        return Load()


class Client:
    """Waits for its answer, until it goes."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()

    async def __call__(self) -> dict[str, str]:
        await self.gone.wait()
        return {"type": "http.disconnect"}


async def turns(of: "asyncio.Task[bool]") -> int:
    """Return how often the loop can do something else until a task is done."""
    count = 0
    while not of.done():
        await asyncio.sleep(0)
        count += 1
    return count


def whole(engines: Engines, prompt: str | Sequence[int]) -> Whole:
    return Whole(engines, read_completion(json.dumps({"prompt": prompt}).encode()), "tiny", None)


async def test_others_go_on_while_a_long_prompt_is_hashed_and_none_comes_before_it() -> None:
    engine, ids = Engine(), [*range(200_000)]
    engines = Engines(engine=engine, meter=Meter(VirtualClock(), 0), hash_blocks_of=16)
    begun = [asyncio.create_task(whole(engines, prompt).begin(Client())) for prompt in (ids, "four" * 20)]
    assert await turns(begun[0]) > 20
    await begun[1]
    assert [each.prompt_tokens for each in engine.found] == [200_000, 20]
    assert engine.found[0].block_hashes == block_hashes(ids, 16, lambda: None)


async def test_where_nobody_asks_for_hashes_there_are_none() -> None:
    engine = Engine()
    await whole(Engines(engine=engine, meter=Meter(VirtualClock(), 0)), [1] * 64).begin(Client())
    assert engine.found[0].block_hashes == ()


async def test_nobody_waits_for_the_prompt_of_a_client_that_has_gone() -> None:
    engine, gone = Engine(), Client()
    meter = Meter(VirtualClock(), 0)
    engines = Engines(engine=engine, meter=meter, hash_blocks_of=16)
    left = asyncio.create_task(whole(engines, "four" * 10**6).begin(gone))
    waiting = asyncio.create_task(whole(engines, "four" * 20).begin(Client()))
    await asyncio.sleep(0)
    gone.gone.set()
    assert await turns(waiting) < 20
    assert (await left, await waiting) == (False, True)
    assert [each.prompt_tokens for each in engine.found] == [20]
    assert sum(meter.request_n.counts) == 1
