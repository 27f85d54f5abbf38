"""Prompts of a load."""

import gzip
import json
from array import array
from collections import Counter
from math import gcd
from pathlib import Path
from typing import Any

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
from specdecode_operator.capture.load.arrivals import arrival_offsets_s
from specdecode_operator.capture.load.datasets import BadDatasetError, Part
from specdecode_operator.capture.load.prompts import (
    BlockPrompts,
    DatasetSource,
    Prompt,
    PromptSource,
    Said,
    SyntheticSource,
    TokenIds,
    prompt_source,
)
from specdecode_operator.capture.load.run_settings import EngineAddress, RunSettings
from specdecode_operator.capture.load.sender import TemperatureMix
from specdecode_operator.capture.trace_reader import RecordedRequest
from tests.support.sequences import common_length


def _source(seed: int = 1, vocab_size: int = 32_000, **lengths: int) -> SyntheticSource:
    workload = CaptureWorkload(prompts=Prompts(synthetic=SyntheticPrompts(**lengths)))
    return SyntheticSource(workload, vocab_size, seed)


@given(length=st.integers(1, 2000), prefix_percent=st.integers(0, 100), vocab_size=st.integers(64, 300_000))
@settings(deadline=None, max_examples=50)
def test_synthetic_prompts_have_exact_length_and_no_special_ids(
    length: int, prefix_percent: int, vocab_size: int
) -> None:
    prefix = length * prefix_percent // 100
    source = _source(vocab_size=vocab_size, prompt_tokens=length, shared_prefix_tokens=prefix)
    first, second = source.first("a", 0), source.first("a", 1)
    assert first.tokens == second.tokens == length
    assert first.content[:prefix] == second.content[:prefix]
    assert source.message("a", 0).tokens == length - prefix
    assert min(first.content) >= 8
    assert max(first.content) < vocab_size - 8


def test_synthetic_prompts_share_only_their_prefix() -> None:
    source = _source(prompt_tokens=80, shared_prefix_tokens=16)
    prompts = [source.first(phase, index).content for phase in ("a", "b") for index in range(50)]
    assert len({tuple(prompt[:16]) for prompt in prompts}) == 1
    assert len({tuple(prompt[16:20]) for prompt in prompts}) == 100


def test_synthetic_prompts_depend_on_seed() -> None:
    lengths = {"prompt_tokens": 32, "shared_prefix_tokens": 8}
    assert _source(**lengths).first("a", 5) == _source(**lengths).first("a", 5)
    assert _source(seed=2, **lengths).first("a", 5).content[:8] != _source(**lengths).first("a", 5).content[:8]
    assert _source(seed=2, **lengths).first("a", 5).content[8:] != _source(**lengths).first("a", 5).content[8:]


def test_next_turn_contains_conversation_so_far() -> None:
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


def test_dataset_prompts_repeat_only_after_all_are_used() -> None:
    assert sorted(_texts("a", 20)) == sorted(TEXTS)
    assert _texts("a", 40)[20:] == _texts("a", 20)


def test_dataset_prompts_may_be_token_ids() -> None:
    texts = [array("I", [number, 7]) for number in range(3)]
    source = DatasetSource({Part("a.jsonl"): texts}, CaptureWorkload(prompts=DATASET, phases=PHASES), 1)
    prompts = [source.first("a", index) for index in range(3)]
    assert sorted(prompt.content for prompt in prompts) == [[0, 7], [1, 7], [2, 7]]
    assert prompts[0].tokens == 2
    assert not source.ignore_eos


def test_conversation_of_text_and_token_ids_is_refused() -> None:
    talk = Phase(name="talk", pattern=Pattern.MULTITURN, concurrency=1, turns=2, requests=9)
    mixed = {Part("a.jsonl"): ["text", array("I", [1])]}
    with pytest.raises(BadDatasetError, match=r"a\.jsonl: .* phase talk"):
        DatasetSource(mixed, CaptureWorkload(prompts=DATASET, phases=[*PHASES, talk]), 1)
    DatasetSource(mixed, CaptureWorkload(prompts=DATASET, phases=PHASES), 1)


def test_phases_use_different_dataset_prompts() -> None:
    used = _texts("warmup", 2) + _texts("a", 9) + _texts("b", 8)
    assert len(set(used)) == len(used)


def test_dataset_order_depends_on_seed() -> None:
    assert _texts("a", 20) == _texts("a", 20)
    assert _texts("a", 20) != _texts("a", 20, seed=2)
    assert _texts("a", 20) != TEXTS


def test_phase_lengths_override_workload_lengths() -> None:
    lengths = SyntheticPrompts(prompt_tokens=20, output_tokens=8, shared_prefix_tokens=4)
    phases = [*PHASES, Phase(name="long", pattern=Pattern.CLOSED, concurrency=1, prompt_tokens=90, output_tokens=3)]
    source = SyntheticSource(CaptureWorkload(prompts=Prompts(synthetic=lengths), phases=phases), 32_000, 1)
    assert [source.first(phase, 0).tokens for phase in ("warmup", "a", "long")] == [20, 20, 90]
    assert [source.output_tokens(phase, 0) for phase in ("warmup", "a", "long")] == [8, 8, 3]
    assert source.first("long", 0).content[:4] == source.first("a", 0).content[:4]


def test_phase_can_use_its_own_dataset_path_or_category() -> None:
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
def test_temperature_shares_are_exact_in_every_block(shares: dict[str, int]) -> None:
    mix = _mix(shares)
    unit = gcd(*shares.values())
    size = 100 // unit
    for block in range(5):
        counts = Counter(mix.at("a", index) for index in range(block * size, (block + 1) * size))
        assert counts == {float(text): percent // unit for text, percent in shares.items()}


def test_temperature_order_depends_on_seed_and_phase() -> None:
    shares = {"0.0": 37, "0.7": 43, "1.0": 20}

    def order(phase: str, seed: int) -> list[float]:
        mix = _mix(shares, seed)
        return [mix.at(phase, index) for index in range(200)]

    assert order("a", 1) == order("a", 1)
    assert order("a", 1) != order("a", 2)
    assert order("a", 1) != order("b", 1)
    assert order("a", 1)[:100] != order("a", 1)[100:]


# Prompts that are made up from lengths and hashes.

NOTHING = Said()


def request(prompt_tokens: int, *blocks: int) -> RecordedRequest:
    return RecordedRequest(
        arrival_ms=0,
        prompt_tokens=prompt_tokens,
        cached_tokens=0,
        ttft_ms=1,
        chunk_tokens=array("I", [1]),
        gaps_ms=array("d"),
        block_hashes=array("Q", blocks) if blocks else None,
    )


def prompts(seed: int = 0, block_size: int = 8) -> BlockPrompts:
    return BlockPrompts(TokenIds(32_000), block_size, seed)


def test_prompts_share_blocks_with_equal_hashes() -> None:
    made = prompts()
    one, other = made.make(request(30, 1, 2, 3), 0, NOTHING), made.make(request(41, 1, 2, 4, 5, 6), 1, NOTHING)
    assert (len(one), len(other)) == (30, 41)
    assert common_length(one, other) == 16
    assert made.make(request(30, 1, 2, 3), 0, NOTHING) == one


def test_block_prompts_of_different_seeds_share_no_block() -> None:
    one, other = (
        prompts(seed=1).make(request(16, 1, 2), 0, NOTHING),
        prompts(seed=2).make(request(16, 1, 2), 0, NOTHING),
    )
    assert one[:8] != other[:8]
    assert one[8:] != other[8:]


def test_turn_starts_with_conversation_and_shares_it_with_equal_blocks() -> None:
    made = prompts()
    first = made.make(request(10, 1), 0, NOTHING)
    said = Said([*first, *range(100_000, 100_009)], blocks=1)
    # The answer ends within the third block.
    second = made.make(request(30, 1, 2, 3), 1, said)
    assert second[:19] == said.tokens
    assert len(second) == 30
    branch = made.make(request(40, 1, 2, 3, 4, 5), 2, NOTHING)
    assert common_length(second, branch) == 24


# Traffic of an earlier capture as the shape of a load: lengths, common prefixes, moments.

META = {"meta": {"block_size": 8, "schema": 1, "model": "any"}}
REQUESTS = [
    {"prompt_tokens": 41, "output_tokens": 9, "arrival_ms": 1500.0, "block_hashes": [1, 2, 4, 5, 6], "ttft_ms": 3.0},
    {"prompt_tokens": 30, "output_tokens": 5, "arrival_ms": 1000.0, "block_hashes": [1, 2, 3], "ttft_ms": 2.0},
    {"prompt_tokens": 7, "output_tokens": 1, "arrival_ms": 1600.0, "itl_ms": [], "ttft_ms": 2.0},
]
RECORDED = Phase(name="recorded", pattern=Pattern.RECORDED, requests=7)
CLOSED = Phase(name="closed", pattern=Pattern.CLOSED, concurrency=2, requests=4)


def _trace_source(mount: Path, path: str, *phases: Phase, seed: int = 1) -> PromptSource:
    dataset = Dataset(path=path, format=DatasetFormat.TRACE)
    settings = RunSettings(
        namespace="n",
        capture="c",
        engine=EngineAddress(url="http://127.0.0.1:8000", model="m", max_model_len=4096, vocab_size=32_000),
        workload=CaptureWorkload(prompts=Prompts(dataset=dataset), phases=list(phases or (RECORDED, CLOSED))),
        seed=seed,
    )
    return prompt_source(settings, mount)


def _write(path: Path, *lines: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(each) + "\n" for each in lines).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    _write(tmp_path / "default/demo/as-deployed/1/trace.jsonl", META, *REQUESTS)
    return tmp_path


FOLDER = "default/demo/as-deployed/1"


def _ids(prompt: Prompt) -> list[int]:
    assert isinstance(prompt.content, list)
    return prompt.content


@pytest.mark.parametrize("path", [FOLDER, f"{FOLDER}/trace.jsonl"])
def test_trace_lengths_are_used_in_order_of_arrival(volume: Path, path: str) -> None:
    source = _trace_source(volume, path)
    for phase in ("warmup", "recorded", "closed"):
        assert [source.first(phase, index).tokens for index in range(4)] == [30, 41, 7, 30]
        assert [source.output_tokens(phase, index) for index in range(4)] == [5, 9, 1, 5]


def test_trace_prompts_share_recorded_prefixes(volume: Path) -> None:
    source = _trace_source(volume, FOLDER)
    one, other, short = (_ids(source.first("recorded", index)) for index in range(3))
    assert common_length(one, other) == 16
    assert common_length(one, short) == 0
    assert _ids(_trace_source(volume, FOLDER).first("recorded", 0)) == one
    assert common_length(_ids(_trace_source(volume, FOLDER, seed=2).first("recorded", 0)), one) == 0


def test_trace_prompts_differ_between_phases_and_passes(volume: Path) -> None:
    """The engine's prefix cache would know it, as it did not when it was recorded."""
    source = _trace_source(volume, FOLDER)
    again = [_ids(source.first(*place)) for place in (("recorded", 0), ("recorded", 3), ("closed", 0), ("warmup", 0))]
    assert {common_length(one, other) for one in again for other in again if one is not other} == {0}


def test_recorded_arrivals_repeat_after_a_mean_gap(volume: Path) -> None:
    """It begins again after a mean gap, here 300 ms."""
    offsets_s = arrival_offsets_s(RECORDED, 1, _trace_source(volume, FOLDER).recorded_s("recorded"))
    assert list(offsets_s) == pytest.approx([0, 0.5, 0.6, 0.9, 1.4, 1.5, 1.8])


def test_recorded_phase_with_duration_ends_after_it(volume: Path) -> None:
    lasting = Phase(name="recorded", pattern=Pattern.RECORDED, duration_seconds=1)
    source = _trace_source(volume, FOLDER, lasting)
    assert list(arrival_offsets_s(lasting, 1, source.recorded_s("recorded"))) == pytest.approx([0, 0.5, 0.6, 0.9])


def test_foreign_trace_may_lack_header_and_be_gzipped(tmp_path: Path) -> None:
    _write(tmp_path / "a.jsonl.gz", {"prompt_tokens": 40, "output_tokens": 2, "block_hashes": [7, 8]}, REQUESTS[2])
    source = _trace_source(tmp_path, "a.jsonl.gz", CLOSED)
    assert [source.first("closed", index).tokens for index in range(2)] == [7, 40]


def test_recorded_pattern_requires_arrival_times(tmp_path: Path) -> None:
    _write(tmp_path / "a.jsonl", META, *REQUESTS, {"prompt_tokens": 4, "output_tokens": 2})
    with pytest.raises(BadDatasetError, match=r"a.jsonl: has requests without arrival_ms.* or use another pattern"):
        _trace_source(tmp_path, "a.jsonl")


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (
            {"prompt": "one"},
            "line 2: is not a record of a trace (Object missing required field `prompt_tokens`): correct it",
        ),
        ({"prompt_tokens": 0, "output_tokens": 1}, "line 2: is not a record of a trace (Expected `int` >= 1"),
        (
            {"prompt_tokens": 2**40, "output_tokens": 1},
            "line 2: is not a record of a trace (Expected `int` <= 16777216",
        ),
        ({"prompt_tokens": 9, "output_tokens": 1, "block_hashes": [2**64]}, "line 2: is not a record of a trace"),
        ({"prompt_tokens": 9, "output_tokens": 1, "arrival_ms": 1e300}, "line 2: is not a record of a trace"),
    ],
)
def test_invalid_trace_record_is_refused(tmp_path: Path, line: dict[str, Any], complaint: str) -> None:
    _write(tmp_path / "a.jsonl", META, line)
    with pytest.raises(BadDatasetError) as refused:
        _trace_source(tmp_path, "a.jsonl")
    assert f"{tmp_path}/a.jsonl: {complaint}" in str(refused.value)


def test_invalid_trace_path_or_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(BadDatasetError, match=r"folder: holds no trace.jsonl: name a capture's folder"):
        _trace_source(tmp_path, "folder")
    _write(tmp_path / "a.jsonl", META)
    with pytest.raises(BadDatasetError, match=r"a.jsonl: has no request"):
        _trace_source(tmp_path, "a.jsonl")
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"prompt_tokens": 5, "output_tokens": 1}\n')[:-9])
    with pytest.raises(BadDatasetError, match=r"a.jsonl.gz: line 2: .*: copy it again"):
        _trace_source(tmp_path, "a.jsonl.gz")
    with pytest.raises(BadDatasetError, match="does not exist"):
        _trace_source(tmp_path, "b.jsonl")
