"""When the operator says that it is of no use any more, and how it ends."""

import asyncio
import itertools
import time

import pytest

from specdecode_operator.api.deployment import Key
from specdecode_operator.handlers.operator_state import OperatorState, OperatorStuckError
from tests.support.api_server import ApiServer
from tests.support.embedded_operator import until
from tests.unit.handlers.state.resync_rounds import LLAMA, Rounds, add, reason, stop


class TestHealth:
    async def test_it_is_well_while_its_tasks_work(self, api: ApiServer, state: OperatorState) -> None:
        await state.start()
        state.check()

    @pytest.mark.parametrize("ended", [0, 1], ids=["the queue", "the resync"])
    async def test_a_task_that_ended_is_told(self, api: ApiServer, state: OperatorState, ended: int) -> None:
        await state.start()
        state._tasks[ended].cancel()
        await asyncio.wait([state._tasks[ended]])
        with pytest.raises(OperatorStuckError, match="has ended"):
            state.check()

    @pytest.mark.parametrize(("waited_s", "stuck"), [(240.0, False), (301.0, True)])
    async def test_an_object_that_no_worker_takes_is_told(
        self, monkeypatch: pytest.MonkeyPatch, waited_s: float, *, stuck: bool
    ) -> None:
        state = OperatorState()
        state.queue.add(LLAMA)
        began = time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda: began + waited_s)
        if stuck:
            with pytest.raises(OperatorStuckError, match="waited for more than 300 s"):
                state.check()
        else:
            state.check()

    async def test_a_queue_that_gets_shorter_is_work_however_long_it_is(self, monkeypatch: pytest.MonkeyPatch) -> None:
        state, worked = OperatorState(), asyncio.Queue[Key]()
        now_s = time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda: now_s)

        async def work(key: Key) -> None:
            worked.put_nowait(key)
            if key.name != "0":
                await asyncio.Event().wait()

        for number in range(40):  # more than there are workers
            state.queue.add(Key("team", str(number)))
        now_s += 10_000.0
        task = asyncio.create_task(state.queue.run(work))
        for _ in range(17):
            await worked.get()
        assert state.queue.longest_wait_s() > 300
        state.check()
        now_s += 301.0
        with pytest.raises(OperatorStuckError, match="nothing was done"):
            state.check()
        task.cancel()

    @pytest.mark.parametrize(("silent_s", "stuck"), [(240.0, False), (301.0, True)])
    async def test_an_event_loop_that_does_not_turn_is_told(
        self, api: ApiServer, state: OperatorState, monkeypatch: pytest.MonkeyPatch, silent_s: float, *, stuck: bool
    ) -> None:
        await state.start()
        now_s = time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda: now_s + silent_s)
        if stuck:
            with pytest.raises(OperatorStuckError, match="has not turned for more than 300 s"):
                state.check()
        else:
            state.check()


class TestStop:
    async def test_work_ends_and_nothing_is_asked_afterwards(self, api: ApiServer, rounds: Rounds) -> None:
        add(api)
        state = OperatorState()
        await state.start()
        await rounds.go()
        await until(lambda: reason(api) == "Suspended", lambda: "it works")
        before = asyncio.all_tasks()
        await stop(state)
        assert len(before - asyncio.all_tasks()) >= 2 + 16, "the resync, the queue, and its workers"
        api.requests.clear()
        state.queue.add(LLAMA)
        for _ in itertools.repeat(None, 10):
            await asyncio.sleep(0)
        assert api.requests == []

    async def test_it_may_be_stopped_before_it_was_started(self) -> None:
        await stop(OperatorState())
