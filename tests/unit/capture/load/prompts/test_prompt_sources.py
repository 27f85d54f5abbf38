"""Prompts and temperatures: exact lengths, shared prefixes, the same for the same seed."""

from collections import Counter
from math import gcd

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdecode_operator.api.capture import (
    CaptureWorkload,
    Dataset,
    DatasetFormat,
    Pattern,
    Phase,
    Prompts,
    SyntheticPrompts,
    TemperatureShare,
)
from specdecode_operator.capture.load.datasets import Part
from specdecode_operator.capture.load.prompts import DatasetSource, Prompt, SyntheticSource
from specdecode_operator.capture.load.sender import TemperatureMix


def _source(seed: int = 1, vocab_size: int = 32_000, **lengths: int) -> SyntheticSource:
    workload = CaptureWorkload(prompts=Prompts(synthetic=SyntheticPrompts(**lengths)))
    return SyntheticSource(workload, vocab_size, seed)


@given(length=st.integers(1, 2000), prefix_percent=st.integers(0, 100), vocab_size=st.integers(64, 300_000))
@settings(deadline=None, max_examples=50)
def test_lengths_are_exact_and_ids_are_ordinary(length: int, prefix_percent: int, vocab_size: int) -> None:
    prefix = length * prefix_percent // 100
    source = _source(vocab_size=vocab_size, prompt_tokens=length, shared_prefix_tokens=prefix)
    first, second = source.first("a", 0), source.first("a", 1)
    assert first.tokens == second.tokens == length
    assert first.content[:prefix] == second.content[:prefix]
    assert source.message("a", 0).tokens == length - prefix
    assert min(first.content) >= 8
    assert max(first.content) < vocab_size - 8


def test_special_ids_of_large_vocabularies_are_left_out() -> None:
    source = _source(vocab_size=131_072, prompt_tokens=200_000)
    ids = source.first("a", 0).content
    # So many draws come close to both bounds.
    assert 1310 <= min(ids) < 1320
    assert 131_072 - 1320 <= max(ids) < 131_072 - 1310


def test_prompts_share_the_prefix_and_nothing_else() -> None:
    source = _source(prompt_tokens=80, shared_prefix_tokens=16)
    prompts = [source.first(phase, index).content for phase in ("a", "b") for index in range(50)]
    assert len({tuple(prompt[:16]) for prompt in prompts}) == 1
    assert len({tuple(prompt[16:20]) for prompt in prompts}) == 100


def test_the_seed_decides() -> None:
    lengths = {"prompt_tokens": 32, "shared_prefix_tokens": 8}
    assert _source(**lengths).first("a", 5) == _source(**lengths).first("a", 5)
    assert _source(seed=2, **lengths).first("a", 5).content[:8] != _source(**lengths).first("a", 5).content[:8]
    assert _source(seed=2, **lengths).first("a", 5).content[8:] != _source(**lengths).first("a", 5).content[8:]


def test_a_turn_holds_all_that_was_said() -> None:
    assert Prompt([1, 2]).followed_by(Prompt([3]), Prompt([4, 5])) == Prompt([1, 2, 3, 4, 5])
    assert Prompt("why?").followed_by(Prompt("so."), Prompt("oh?")) == Prompt("why?\nso.\noh?")
    assert Prompt("why?").tokens is None


PHASES = [Phase(name=name, pattern=Pattern.CLOSED, concurrency=1, requests=9) for name in ("a", "b")]
DATASET = Prompts(dataset=Dataset(path="a.jsonl", format=DatasetFormat.JSONL, output_tokens=9))
TEXTS = [f"question {number}" for number in range(20)]


def _texts(phase: str, count: int, seed: int = 1) -> list[str]:
    workload = CaptureWorkload(prompts=DATASET, phases=PHASES, warmup_requests=2)
    source = DatasetSource({Part("a.jsonl"): TEXTS}, workload, seed)
    return [str(source.first(phase, index).content) for index in range(count)]


def test_a_dataset_is_used_up_before_a_prompt_comes_again() -> None:
    assert sorted(_texts("a", 20)) == sorted(TEXTS)
    assert _texts("a", 40)[20:] == _texts("a", 20)


def test_phases_do_not_meet_each_others_prompts_before_they_must() -> None:
    used = _texts("warmup", 2) + _texts("a", 9) + _texts("b", 8)
    assert len(set(used)) == len(used)


def test_the_seed_decides_the_order_of_a_dataset() -> None:
    assert _texts("a", 20) == _texts("a", 20)
    assert _texts("a", 20) != _texts("a", 20, seed=2)
    assert _texts("a", 20) != TEXTS


def test_a_phase_may_have_lengths_of_its_own() -> None:
    lengths = SyntheticPrompts(prompt_tokens=20, output_tokens=8, shared_prefix_tokens=4)
    phases = [*PHASES, Phase(name="long", pattern=Pattern.CLOSED, concurrency=1, prompt_tokens=90, output_tokens=3)]
    source = SyntheticSource(CaptureWorkload(prompts=Prompts(synthetic=lengths), phases=phases), 32_000, 1)
    assert [source.first(phase, 0).tokens for phase in ("warmup", "a", "long")] == [20, 20, 90]
    assert [source.output_tokens(phase, 0) for phase in ("warmup", "a", "long")] == [8, 8, 3]
    assert source.first("long", 0).content[:4] == source.first("a", 0).content[:4]


def test_a_phase_may_have_prompts_of_its_own() -> None:
    phases = [
        PHASES[0],
        Phase(name="long", pattern=Pattern.CLOSED, concurrency=1, requests=2, path="long.jsonl", output_tokens=3),
        Phase(name="code", pattern=Pattern.CLOSED, concurrency=1, requests=2, category="coding"),
        PHASES[1],
    ]
    texts = {Part("a.jsonl"): TEXTS, Part("long.jsonl"): ["long"], Part("a.jsonl", "coding"): ["c", "d"]}
    source = DatasetSource(texts, CaptureWorkload(prompts=DATASET, phases=phases), 1)
    assert {source.first("long", index).content for index in range(3)} == {"long"}
    assert {source.first("code", index).content for index in range(2)} == {"c", "d"}
    assert [source.output_tokens(phase, 0) for phase in ("warmup", "a", "long", "code")] == [9, 9, 3, 9]
    # Phases of other prompts take no place in the order of those that share them.
    shared = [str(source.first(phase, index).content) for phase in ("a", "b") for index in range(10)]
    assert sorted(shared) == sorted(TEXTS)


def _mix(shares: dict[str, int], seed: int = 1) -> TemperatureMix:
    return TemperatureMix(
        [TemperatureShare(temperature=text, share_percent=percent) for text, percent in shares.items()], seed
    )


@pytest.mark.parametrize("shares", [{"0.0": 100}, {"0.0": 50, "1.0": 50}, {"0.0": 37, "0.7": 43, "1.0": 20}])
def test_shares_are_exact_in_every_block(shares: dict[str, int]) -> None:
    mix = _mix(shares)
    unit = gcd(*shares.values())
    size = 100 // unit
    for block in range(5):
        counts = Counter(mix.at("a", index) for index in range(block * size, (block + 1) * size))
        assert counts == {float(text): percent // unit for text, percent in shares.items()}


def test_the_order_of_temperatures_is_the_seeds() -> None:
    shares = {"0.0": 37, "0.7": 43, "1.0": 20}

    def order(phase: str, seed: int) -> list[float]:
        mix = _mix(shares, seed)
        return [mix.at(phase, index) for index in range(200)]

    assert order("a", 1) == order("a", 1)
    assert order("a", 1) != order("a", 2)
    assert order("a", 1) != order("b", 1)
    assert order("a", 1)[:100] != order("a", 1)[100:]
