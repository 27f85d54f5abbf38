"""Requests to a stepped engine know how long they waited for it."""

import pytest

from specdecode_operator.replay.clocks import VirtualClock
from specdecode_operator.replay.emulated.engine_model import StepTime
from specdecode_operator.replay.engine import Burst, Incoming
from specdecode_operator.replay.model_file import Limits
from specdecode_operator.replay.stepped_engine import SteppedEngine
from specdecode_operator.replay.virtual_run import GivenBehaviour


def engine(clock: VirtualClock, **limits: int) -> SteppedEngine:
    """Return an engine with steps of 10 ms."""
    behaviour = GivenBehaviour(StepTime(curve=((1, 10.0),)), None, seed=1)
    return SteppedEngine(clock, behaviour, Limits(block_size=16, **limits))


def test_answers_of_one_id_know_each_how_long_it_waited() -> None:
    clock = VirtualClock()
    watched = engine(clock, max_num_seqs=1)
    request = Incoming(request_id="same", prompt_tokens=20, max_tokens=3)
    first = watched.submit(request, lambda _: None)
    second = watched.submit(request, lambda _: None)
    assert (first.waited_ms(), second.waited_ms()) == (0.0, None)
    clock.run()
    assert (first.waited_ms(), second.waited_ms()) == (0.0, pytest.approx(30.0))


def test_who_leaves_before_it_ran_never_waited_to_the_end() -> None:
    clock = VirtualClock()
    watched = engine(clock, max_num_seqs=1)
    request = Incoming(request_id="same", prompt_tokens=20, max_tokens=3)
    watched.submit(request, lambda _: None)
    found: list[Burst] = []
    second = watched.submit(request, found.append)
    second.cancel()
    clock.run()
    assert (second.waited_ms(), found) == (None, [])
