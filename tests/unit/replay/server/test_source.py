"""What is played heeds its settings: seeds, and the size of the KV cache."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from specdecode_operator.capture.trace_reader import read_recording
from specdecode_operator.replay.clocks import VirtualClock
from specdecode_operator.replay.drafting import AcceptanceSchedule
from specdecode_operator.replay.engine import Burst, Incoming
from specdecode_operator.replay.fit import fit
from specdecode_operator.replay.model_file import encode_model
from specdecode_operator.replay.server.playback_source import Mode, SourceSettings, play, read_source
from tests.support.synthetic import Truth
from tests.support.traces import record, write_trace


def tokens(settings: SourceSettings) -> list[int]:
    clock, found = VirtualClock(), list[Burst]()
    engine = play(settings, read_source(settings), clock).engine
    engine.submit(Incoming(request_id="a", prompt_tokens=300, max_tokens=100, ignore_eos=True), found.append)
    clock.run()
    return [burst.tokens for burst in found]


@pytest.mark.parametrize(
    "more", [{"mode": Mode.MODELLED}, {"acceptance": AcceptanceSchedule.parse("0.5")}], ids=["modelled", "acceptance"]
)
def test_a_seed_gives_the_same_bursts_and_another_one_others(tmp_path: Path, more: dict[str, Any]) -> None:
    made = Truth().make(tmp_path / "made", "closed:4", 40)
    one, same, other = (tokens(SourceSettings(traces=[made.folder], seed=seed, **more)) for seed in (1, 1, 2))
    assert one == same != other


def test_a_cache_of_so_many_tokens_has_so_many_blocks(tmp_path: Path) -> None:
    records = [record(arrival_ms=100.0 * place) for place in range(20)]
    trace = write_trace(tmp_path / "trace.jsonl", records)
    settings = SourceSettings(traces=[trace], mode=Mode.MODELLED, kv_cache_tokens=1600)
    engine = play(settings, read_source(settings), VirtualClock()).engine
    engine.submit(Incoming(request_id="a", prompt_tokens=320, max_tokens=10), lambda _: None)
    assert engine.load().kv_cache_usage == pytest.approx(0.2, abs=0.01)


def test_the_cache_of_a_model_is_told_in_tokens(tmp_path: Path) -> None:
    records = [record(arrival_ms=100.0 * place) for place in range(20)]
    model = fit([read_recording(write_trace(tmp_path / "trace.jsonl", records))])
    limits = msgspec.structs.replace(model.origin.limits, num_gpu_blocks=100, block_size=32)
    path = tmp_path / "model.json"
    origin = msgspec.structs.replace(model.origin, limits=limits)
    path.write_bytes(encode_model(msgspec.structs.replace(model, origin=origin)))
    assert read_source(SourceSettings(traces=[path], mode=Mode.MODELLED)).kv_cache_tokens == 3200


@pytest.mark.parametrize(("burst", "told"), [(5, False), (6, True)])
def test_bursts_of_more_than_k_and_the_targets_own_token_are_told(tmp_path: Path, burst: int, told: bool) -> None:
    records = [record(output_tokens=3 + burst, itl_tokens=[burst, 2])]
    notes = read_source(SourceSettings(traces=[write_trace(tmp_path / "trace.jsonl", records)])).notes
    assert any(f"the largest burst has {burst} tokens" in note for note in notes) == told
