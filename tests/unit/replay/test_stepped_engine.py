"""Engines that work step by step."""

from dataclasses import dataclass, field

import pytest

from specdecode_operator.replay.clocks import VirtualClock
from specdecode_operator.replay.emulated.engine_model import StepTime, from_rates
from specdecode_operator.replay.engine import Burst, Incoming, Ticket
from specdecode_operator.replay.model_file import Limits
from specdecode_operator.replay.stepped_engine import KvCache, OnStep, SteppedEngine, StepReport
from specdecode_operator.replay.virtual_run import GivenBehaviour


@dataclass
class Got:
    """What one request got."""

    arrival_ms: float
    bursts: list[Burst] = field(default_factory=list)
    at_ms: list[float] = field(default_factory=list)
    ticket: Ticket | None = None

    @property
    def tokens(self) -> list[int]:
        return [burst.tokens for burst in self.bursts]

    @property
    def ttft_ms(self) -> float:
        return self.at_ms[0] - self.arrival_ms


class Rig:
    """An engine with steps of 10 ms, and 1 ms more for each 100 tokens of prompts."""

    def __init__(
        self, limits: Limits, rates: tuple[float, ...] = (), on_step: OnStep | None = None, drafting: float = 1.0
    ) -> None:
        self.clock = VirtualClock()
        self.steps: list[StepReport] = []
        step_time = StepTime(curve=((1, 10.0),), prefill_token_us=10.0)
        behaviour = GivenBehaviour(step_time, from_rates(rates, drafting) if rates else None, seed=1)
        self.engine = SteppedEngine(self.clock, behaviour, limits, on_step or self.steps.append)

    def send(
        self, request_id: str = "r", prompt: int = 100, output: int = 10, *, at_ms: float = 0.0, **more: object
    ) -> Got:
        """Have a request come at a moment."""
        request = Incoming(request_id=request_id, prompt_tokens=prompt, max_tokens=output, **more)  # type: ignore[arg-type]
        got = Got(at_ms)

        def take(burst: Burst) -> None:
            got.bursts.append(burst)
            got.at_ms.append(self.clock.now_ms())

        def arrive() -> None:
            got.ticket = self.engine.submit(request, take)

        self.clock.call_at(at_ms, arrive)
        return got


def test_single_request_has_prefill_then_one_token_per_step() -> None:
    rig = Rig(Limits())
    got = rig.send(prompt=500, output=4)
    rig.clock.run()
    assert got.tokens == [1, 1, 1, 1]
    assert got.at_ms == pytest.approx([15, 25, 35, 45])
    assert [burst.finish_reason for burst in got.bursts] == [None, None, None, "length"]


def test_accepted_tokens_come_in_one_burst_per_step() -> None:
    rig = Rig(Limits(), rates=(1.0, 1.0, 1.0))
    got = rig.send(output=10)
    rig.clock.run()
    assert got.tokens == [1, 4, 4, 1]
    assert got.at_ms == pytest.approx([11, 21, 31, 41])
    assert [(burst.drafted, burst.accepted) for burst in got.bursts] == [(0, 0), (3, 3), (3, 3), (3, 3)]


def test_prefill_lengthens_step_of_all_requests() -> None:
    rig = Rig(Limits())
    early = rig.send("a", output=5)
    late = rig.send("b", prompt=1000, at_ms=15.0)
    rig.clock.run()
    # It comes while a step runs, and is in the next.
    assert early.at_ms == pytest.approx([11, 21, 41, 51, 61])
    assert late.at_ms[0] == pytest.approx(41)


def test_async_scheduling_admits_requests_one_step_later() -> None:
    rig = Rig(Limits(async_scheduling=True))
    rig.send("a", output=6)
    late = rig.send("b", prompt=1000, at_ms=15.0)
    rig.clock.run()
    assert late.at_ms[0] == pytest.approx(51)


def test_long_prompt_is_prefilled_in_chunks_beside_decodes() -> None:
    rig = Rig(Limits(max_num_batched_tokens=401))
    early = rig.send("a", output=6)
    late = rig.send("b", prompt=1000, at_ms=5.0)
    rig.clock.run()
    assert [step.shape.prefill_tokens for step in rig.steps[:4]] == [100, 400, 400, 200]
    assert late.at_ms[0] == pytest.approx(11 + 14 + 14 + 12)
    assert len(early.at_ms) == 6


def test_draft_slots_reduce_prefill_budget() -> None:
    """As in vLLM's scheduler: each request of a step has them beside its own tokens."""
    limits = Limits(max_num_batched_tokens=128, draft_slots=1)
    rig = Rig(limits, rates=(0.0, 0.0, 0.0))
    for index in range(7):
        rig.send(str(index), prompt=10, output=100)
    rig.send("late", prompt=96, at_ms=25.0)
    rig.clock.run()
    # Seven requests with 4 tokens and a slot each leave 93, of which one is the prompt's own slot.
    assert [step.shape.prefill_tokens for step in rig.steps if step.end_ms > 35][:2] == [92, 4]


def test_scheduled_tokens_are_one_plus_drafted_tokens() -> None:
    """A drafter that looks tokens up finds none in half of the steps."""
    rig = Rig(Limits(), rates=(0.0, 0.0, 0.0), drafting=0.5)
    got = rig.send(output=200)
    rig.clock.run()
    drafted = [burst.drafted for burst in got.bursts[1:]]
    assert set(drafted) == {0, 3}
    assert [step.shape.scheduled_tokens for step in rig.steps[1:]] == [1 + tokens for tokens in drafted]


def test_requests_beyond_max_num_seqs_wait_and_ttft_grows() -> None:
    rig = Rig(Limits(max_num_seqs=2))
    got = [rig.send(str(index), output=5) for index in range(6)]
    rig.clock.run()
    assert max(step.load.running for step in rig.steps) == 2
    assert max(step.load.waiting for step in rig.steps) >= 3
    assert [each.ttft_ms for each in got] == sorted(each.ttft_ms for each in got)
    assert got[-1].ttft_ms > 3 * got[0].ttft_ms
    assert all(sum(each.tokens) == 5 for each in got)


def test_full_kv_cache_preempts_latest_request_and_recomputes_it() -> None:
    rig = Rig(Limits(block_size=10, num_gpu_blocks=12))
    got = [rig.send(str(index), prompt=30, output=50) for index in range(2)]
    rig.clock.run()
    assert [each for step in rig.steps for each in step.preempted] == ["1"]
    assert rig.engine.load().preemptions == 1
    assert [sum(each.tokens) for each in got] == [50, 50]
    again = [step.shape.prefill_tokens for step in rig.steps if step.prefilling][-1]
    assert again > 30  # its prompt, and what it had been given
    assert rig.engine.load().kv_cache_usage == 0


def test_request_too_large_for_kv_cache_fails_alone() -> None:
    rig = Rig(Limits(block_size=10, num_gpu_blocks=5))
    large = rig.send("large", prompt=100)
    grows = rig.send("grows", prompt=30, output=100)
    small = rig.send("small", prompt=20)
    rig.clock.run()
    assert [burst.finish_reason for burst in large.bursts] == ["error"]
    assert grows.bursts[-1].finish_reason == "error"
    assert sum(small.tokens) == 10


def test_common_prefix_is_served_from_prefix_cache() -> None:
    rig = Rig(Limits(block_size=10))
    first = rig.send("a", prompt=105, block_hashes=range(10), output=2)
    second = rig.send("b", prompt=105, block_hashes=[*range(9), 77], at_ms=100.0)
    rig.clock.run()
    assert first.bursts[0].cached_tokens == 0
    assert second.bursts[0].cached_tokens == 90
    assert second.ttft_ms < first.ttft_ms
    assert (rig.engine.load().prefix_cache_queries, rig.engine.load().prefix_cache_hits) == (210, 90)


@pytest.mark.parametrize(("enabled", "cached"), [(True, 90), (False, 0)])
def test_prefix_cache_has_all_but_the_last_token_if_it_is_enabled(enabled: bool, cached: int) -> None:
    rig = Rig(Limits(block_size=10, enable_prefix_caching=enabled))
    rig.send("a", prompt=100, block_hashes=range(10))
    again = rig.send("b", prompt=100, block_hashes=range(10), at_ms=500.0)
    rig.clock.run()
    assert again.bursts[0].cached_tokens == cached
    assert rig.engine.load().kv_cache_usage == 0


def test_next_turn_reuses_cached_answer() -> None:
    rig = Rig(Limits(block_size=10))
    rig.send("a", prompt=100, output=31, block_hashes=range(10), answer_hashes=range(10, 14))
    again = rig.send("b", prompt=150, block_hashes=range(15), at_ms=500.0)
    rig.clock.run()
    assert again.bursts[0].cached_tokens == 130


def test_cancelled_request_frees_its_slot() -> None:
    rig = Rig(Limits(max_num_seqs=1, block_size=10, num_gpu_blocks=100))
    first, second = rig.send("a", output=100), rig.send("b", output=3)
    third = rig.send("c", output=3)
    rig.clock.call_at(35.0, lambda: first.ticket.cancel() if first.ticket else None)
    rig.clock.call_at(36.0, lambda: third.ticket.cancel() if third.ticket else None)
    rig.clock.run()
    assert len(first.bursts) == 3
    assert second.at_ms[0] == pytest.approx(41 + 11)
    assert third.bursts == []
    assert (rig.engine.load().running, rig.engine.load().waiting, rig.engine.load().kv_cache_usage) == (0, 0, 0)


def test_cancelled_requests_get_no_more_tokens() -> None:
    rig = Rig(Limits())
    second = rig.send("b", output=3, at_ms=1.0)
    rig.clock.run(0.5)
    first = rig.send("a", output=3, at_ms=0.6)
    rig.clock.run(12.0)
    assert first.ticket is not None
    assert second.ticket is not None
    second.ticket.cancel()
    first.ticket.cancel()
    before = len(second.bursts)
    rig.clock.run()
    assert len(second.bursts) == before


def test_max_model_len_ends_a_request() -> None:
    rig = Rig(Limits(max_model_len=105))
    got = rig.send(prompt=100, output=50)
    rig.clock.run()
    assert sum(got.tokens) == 5
    assert got.bursts[-1].finish_reason == "length"


# Blocks of the KV cache: counted, found again, and given away.


def test_least_recently_freed_block_is_evicted_first() -> None:
    cache = KvCache(4, prefix_caching=True)
    for first in (0, 10):
        assert cache.admit((), 0, 2)
        named = cache.name([first, first + 1], 0)
        cache.release([first, first + 1][:named], 0)
    assert cache.usage == 0
    assert cache.grow(1)
    # The end of the older prompt went: its beginning is of more use.
    assert (cache.found([0, 1]), cache.found([10, 11])) == (1, 2)
    assert cache.grow(2)
    assert (cache.found([0, 1]), cache.found([10, 11])) == (0, 1)


def test_shared_block_is_kept_until_both_users_release_it() -> None:
    cache = KvCache(3, prefix_caching=True)
    assert cache.admit((), 0, 1)
    cache.name([5], 0)
    assert cache.admit([5], 1, 1)
    assert cache.usage == 2 / 3
    cache.release([5], 0)
    assert not cache.grow(2)
    cache.release([5], 1)
    assert cache.usage == 0
    assert cache.grow(3)


def test_reused_cached_blocks_count_toward_usage() -> None:
    cache = KvCache(2, prefix_caching=True)
    assert cache.admit((), 0, 2)
    cache.name([1, 2], 0)
    cache.release([1, 2], 0)
    assert not cache.admit([1, 2], 2, 1)
    assert cache.usage == 0
    assert cache.admit([1, 2], 2, 0)
    assert cache.usage == 1
