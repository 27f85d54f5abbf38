"""Traffic of an earlier capture as the shape of a load: lengths, common prefixes, moments."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from specdecode_operator.api.capture import CaptureWorkload, Dataset, DatasetFormat, Pattern, Phase, Prompts
from specdecode_operator.capture.load.arrivals import arrival_offsets_s
from specdecode_operator.capture.load.datasets import BadDatasetError
from specdecode_operator.capture.load.prompts import Prompt, PromptSource, prompt_source
from specdecode_operator.capture.load.run_settings import EngineAddress, RunSettings
from tests.support.sequences import common_length

META = {"meta": {"block_size": 8, "schema": 1, "model": "any"}}
REQUESTS = [
    {"prompt_tokens": 41, "output_tokens": 9, "arrival_ms": 1500.0, "block_hashes": [1, 2, 4, 5, 6], "ttft_ms": 3.0},
    {"prompt_tokens": 30, "output_tokens": 5, "arrival_ms": 1000.0, "block_hashes": [1, 2, 3], "ttft_ms": 2.0},
    {"prompt_tokens": 7, "output_tokens": 1, "arrival_ms": 1600.0, "itl_ms": [], "ttft_ms": 2.0},
]
RECORDED = Phase(name="recorded", pattern=Pattern.RECORDED, requests=7)
CLOSED = Phase(name="closed", pattern=Pattern.CLOSED, concurrency=2, requests=4)


def _source(mount: Path, path: str, *phases: Phase, seed: int = 1) -> PromptSource:
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
def test_lengths_are_those_of_the_trace_in_order_of_arrival(volume: Path, path: str) -> None:
    source = _source(volume, path)
    for phase in ("warmup", "recorded", "closed"):
        assert [source.first(phase, index).tokens for index in range(4)] == [30, 41, 7, 30]
        assert [source.output_tokens(phase, index) for index in range(4)] == [5, 9, 1, 5]


def test_prompts_have_in_common_what_they_had(volume: Path) -> None:
    source = _source(volume, FOLDER)
    one, other, short = (_ids(source.first("recorded", index)) for index in range(3))
    assert common_length(one, other) == 16
    assert common_length(one, short) == 0
    assert _ids(_source(volume, FOLDER).first("recorded", 0)) == one
    assert common_length(_ids(_source(volume, FOLDER, seed=2).first("recorded", 0)), one) == 0


def test_no_phase_and_no_second_run_meets_a_prompt_again(volume: Path) -> None:
    """The engine's prefix cache would know it, as it did not when it was recorded."""
    source = _source(volume, FOLDER)
    again = [_ids(source.first(*place)) for place in (("recorded", 0), ("recorded", 3), ("closed", 0), ("warmup", 0))]
    assert {common_length(one, other) for one in again for other in again if one is not other} == {0}


def test_moments_are_those_of_the_trace_over_and_over(volume: Path) -> None:
    """It begins again after a mean gap, here 300 ms."""
    offsets_s = arrival_offsets_s(RECORDED, 1, _source(volume, FOLDER).recorded_s("recorded"))
    assert list(offsets_s) == pytest.approx([0, 0.5, 0.6, 0.9, 1.4, 1.5, 1.8])


def test_a_phase_that_lasts_sends_until_then(volume: Path) -> None:
    lasting = Phase(name="recorded", pattern=Pattern.RECORDED, duration_seconds=1)
    source = _source(volume, FOLDER, lasting)
    assert list(arrival_offsets_s(lasting, 1, source.recorded_s("recorded"))) == pytest.approx([0, 0.5, 0.6, 0.9])


def test_requests_of_one_moment_come_again_a_second_later(tmp_path: Path) -> None:
    _write(tmp_path / "a.jsonl", META, REQUESTS[0], REQUESTS[0])
    source = _source(tmp_path, "a.jsonl")
    assert list(arrival_offsets_s(RECORDED, 1, source.recorded_s("recorded")))[:5] == [0, 0, 1, 1, 2]


def test_a_trace_of_others_has_no_header_and_may_be_packed(tmp_path: Path) -> None:
    _write(tmp_path / "a.jsonl.gz", {"prompt_tokens": 40, "output_tokens": 2, "block_hashes": [7, 8]}, REQUESTS[2])
    source = _source(tmp_path, "a.jsonl.gz", CLOSED)
    assert [source.first("closed", index).tokens for index in range(2)] == [7, 40]


def test_requests_without_moments_cannot_be_sent_at_them(tmp_path: Path) -> None:
    _write(tmp_path / "a.jsonl", META, *REQUESTS, {"prompt_tokens": 4, "output_tokens": 2})
    with pytest.raises(BadDatasetError, match=r"a.jsonl: has requests without arrival_ms.* or take another pattern"):
        _source(tmp_path, "a.jsonl")


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ({"prompt": "one"}, "line 2: is no record of a trace (Object missing required field `prompt_tokens`): mend it"),
        ({"prompt_tokens": 0, "output_tokens": 1}, "line 2: is no record of a trace (Expected `int` >= 1"),
        ({"prompt_tokens": 2**40, "output_tokens": 1}, "line 2: is no record of a trace (Expected `int` <= 16777216"),
        ({"prompt_tokens": 9, "output_tokens": 1, "block_hashes": [2**64]}, "line 2: is no record of a trace"),
        ({"prompt_tokens": 9, "output_tokens": 1, "arrival_ms": 1e300}, "line 2: is no record of a trace"),
    ],
)
def test_bad_records(tmp_path: Path, line: dict[str, Any], complaint: str) -> None:
    _write(tmp_path / "a.jsonl", META, line)
    with pytest.raises(BadDatasetError) as refused:
        _source(tmp_path, "a.jsonl")
    assert f"{tmp_path}/a.jsonl: {complaint}" in str(refused.value)


def test_what_is_no_trace(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(BadDatasetError, match=r"folder: holds no trace.jsonl: name a capture's folder"):
        _source(tmp_path, "folder")
    _write(tmp_path / "a.jsonl", META)
    with pytest.raises(BadDatasetError, match=r"a.jsonl: has no request"):
        _source(tmp_path, "a.jsonl")
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"prompt_tokens": 5, "output_tokens": 1}\n')[:-9])
    with pytest.raises(BadDatasetError, match=r"a.jsonl.gz: line 2: .*: copy it again"):
        _source(tmp_path, "a.jsonl.gz")
    with pytest.raises(BadDatasetError, match="does not exist"):
        _source(tmp_path, "b.jsonl")
