"""Every option of `specdecode replay serve` is what the server is told."""

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from specdecode_operator.replay.drafting import AcceptanceSchedule
from specdecode_operator.replay.recorded_engine import Matching, Unmatched
from specdecode_operator.replay.server import serve as server
from specdecode_operator.replay.server.playback_source import Mode, Source, SourceSettings
from specdecode_operator.replay.server.serve import ServeSettings
from tests.support.traces import record, write_trace
from tests.unit.cli.conftest import Specdecode

OF_SOURCE: dict[str, Any] = {
    "skip_bad_lines": ("--skip-bad-lines", True),
    "matching": ("--match=request-id", Matching.REQUEST_ID),
    "unmatched": ("--unmatched=refuse", Unmatched.REFUSE),
    "kv_cache_tokens": ("--kv-cache-tokens=4096", 4096),
    "max_model_len": ("--max-model-len=77", 77),
    "time_scale": ("--time-scale=0.5", 0.5),
    "acceptance": ("--acceptance=0.5", AcceptanceSchedule.parse("0.5")),
    "seed": ("--seed=9", 9),
}
OF_MODELLED: dict[str, Any] = {
    "mode": ("--mode=modelled", Mode.MODELLED),
    "max_num_seqs": ("--max-num-seqs=5", 5),
    "max_num_batched_tokens": ("--max-num-batched-tokens=600", 600),
}
OF_SERVER: dict[str, Any] = {
    "host": ("--host=127.0.0.2", "127.0.0.2"),
    "port": ("--port=4321", 4321),
    "served_model_names": ("--served-model-name=a", ("a",)),
    "api_keys": ("--api-key=b", ("b",)),
    "load_factor": ("--load-factor=2.5", 2.5),
    "record": ("--record=out", Path("out")),
    "slow_start_s": ("--slow-start=3", 3.0),
    "fail_share": ("--fail-share=0.25", 0.25),
    "hang_after_s": ("--hang-after=4", 4.0),
    "crash_after_s": ("--crash-after=6", 6.0),
    "drain_timeout_s": ("--drain-timeout=7", 7),
    "most_connections": ("--max-connections=9", 9),
}

Served = Callable[..., ServeSettings]


@pytest.fixture
def served(specdecode: Specdecode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Served:
    found: list[ServeSettings] = []

    def serve(settings: ServeSettings, _source: Source, _say: object) -> None:
        found.append(settings)

    monkeypatch.setattr(server, "serve", serve)
    trace = write_trace(tmp_path / "trace.jsonl", [record(arrival_ms=100.0 * place) for place in range(9)])

    def run(*arguments: str) -> ServeSettings:
        ended = specdecode("replay", "serve", str(trace), *arguments)
        assert ended.exit_code == 0, ended.stderr
        return found.pop()

    return run


def test_each_option_is_what_the_server_is_told_and_changes_nothing_else(served: Served) -> None:
    usual = served()
    assert (usual.port, usual.drain_timeout_s, usual.record, usual.api_keys) == (8000, 60, None, ())
    for cases, of in ((OF_SOURCE, lambda settings: settings.source), (OF_SERVER, lambda settings: settings)):
        for name, (argument, value) in cases.items():
            told, before = of(served(argument)), of(usual)
            assert getattr(told, name) == value
            others = [each.name for each in fields(told) if each.name not in (name, "source")]
            assert [getattr(told, each) for each in others] == [getattr(before, each) for each in others]


def test_limits_of_a_modelled_engine_are_each_their_own(served: Served) -> None:
    source = served(*(argument for argument, _ in OF_MODELLED.values())).source
    assert {name: getattr(source, name) for name in OF_MODELLED} == {
        name: each for name, (_, each) in OF_MODELLED.items()
    }


def test_no_setting_is_without_an_option() -> None:
    assert {each.name for each in fields(SourceSettings)} == {"traces", *OF_SOURCE, *OF_MODELLED}
    assert {each.name for each in fields(ServeSettings)} == {"source", *OF_SERVER}
