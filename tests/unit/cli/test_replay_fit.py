"""`specdecode replay fit` and `compare` on a command line."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from specdecode_operator.cli.main import app
from specdecode_operator.replay.model_file import read_model
from tests.support.synthetic import Truth
from tests.support.traces import META, record, write_trace


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["replay", *arguments])
    return result.exit_code, " ".join(result.output.replace("│", "").split())


def test_a_capture_becomes_a_small_file(tmp_path: Path) -> None:
    made = Truth().make(tmp_path / "made", "closed:4", 40)
    file = tmp_path / "model.json"
    code, text = run(
        "fit", str(made.folder), "-o", str(file), "--max-num-batched-tokens", "2048", "--num-gpu-blocks", "999"
    )
    assert code == 0, text
    assert "fitted to 40 requests in" in text
    assert "limits: max_num_seqs 64, max_num_batched_tokens 2048, block_size 16, num_gpu_blocks 999" in text
    assert "requests decoding at once: 1 to 4" in text
    model = read_model(file)
    assert model.origin.limits.num_gpu_blocks == 999
    assert [capture.requests for capture in model.origin.captures] == [40]


def test_what_a_draft_takes_of_a_step_is_told_by_who_knows_the_models(tmp_path: Path) -> None:
    capture = str(Path(__file__).parents[2] / "data/captures/draft_model")
    takes_ms = []
    for share in ("0", "0.1"):
        code, text = run("fit", capture, "-o", str(tmp_path / share), "--draft-share", share)
        assert code == 0, text
        step_time = read_model(tmp_path / share).step_time or {}
        takes_ms.append((step_time.get("draft_ms", 0.0), step_time["curve"][0][1]))
    (none, whole), (draft_ms, base_ms) = takes_ms
    assert none == 0
    assert draft_ms == pytest.approx(base_ms * 0.1, rel=0.1)
    # Three passes of the draft are in what was one sum before.
    assert base_ms + 3 * draft_ms == pytest.approx(whole, rel=0.02)


@pytest.mark.parametrize(
    ("records", "says"),
    [
        ([], "has no request: record some load"),
        ([record(arrival_ms=None)], "no request has arrival_ms: nothing can be fitted to it"),
        ([record(), record(itl_ms=[10.0, -1.0])], "line 3: a time of -1 ms"),
        ([record(itl_ms=[10.0, 4e6])], "it must lie between 0 and an hour"),
    ],
)
def test_what_nothing_can_be_fitted_to_is_refused(tmp_path: Path, records: list[dict[str, object]], says: str) -> None:
    write_trace(tmp_path / "trace.jsonl", records)
    file = tmp_path / "model.json"
    code, text = run("fit", str(tmp_path), "-o", str(file))
    assert code == 2
    assert says in text
    assert not file.exists()


def test_bad_lines_may_be_left_out_and_are_counted(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.jsonl", [record(), record(itl_ms=[10.0, -1.0]), record(arrival_ms=100.0)])
    code, text = run("fit", str(tmp_path), "-o", str(tmp_path / "model.json"), "--skip-bad-lines")
    assert code == 0
    assert "1 lines could not be read and were left out" in text
    both = (str(tmp_path / "trace.jsonl"), str(tmp_path))
    code, text = run("fit", *both, "-o", str(tmp_path / "both.json"), "--skip-bad-lines")
    assert (code, "2 lines could not be read" in text) == (0, True)


@pytest.mark.parametrize(
    ("meta", "says"),
    [
        ({"model": "other"}, "model is other, that of"),
        ({"speculative": {"method": "ngram", "num_speculative_tokens": 2}}, "speculative is"),
    ],
)
def test_captures_of_different_engines_are_not_mixed(tmp_path: Path, meta: dict[str, object], says: str) -> None:
    one = write_trace(tmp_path / "one.jsonl", [record()])
    other = write_trace(tmp_path / "other.jsonl", [record()], {**META, **meta})
    code, text = run("fit", str(one), str(other), "-o", str(tmp_path / "model.json"))
    assert code == 2
    assert says in text


def test_of_several_engines_it_is_said_that_one_is_fitted(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.jsonl", [record(engine=0), record(engine=1)])
    code, text = run("fit", str(tmp_path), "-o", str(tmp_path / "model.json"))
    assert code == 0
    assert "2 data-parallel engines were recorded: the model is of one of them" in text
    donors = read_model(tmp_path / "model.json").donors
    assert donors is not None
    assert donors.ranges["requests decoding at once"].most == 1


def test_gaps_of_zero_can_be_fitted(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.jsonl", [record(itl_ms=[0.0, 0.0], ttft_ms=0.0), record(arrival_ms=5.0, ttft_ms=0.0)])
    code, text = run("fit", str(tmp_path), "-o", str(tmp_path / "model.json"))
    assert code == 0, text
    assert read_model(tmp_path / "model.json").donors is not None


def test_two_recordings_are_compared_as_text_and_as_data(tmp_path: Path) -> None:
    one = write_trace(tmp_path / "one.jsonl", [record()])
    other = write_trace(tmp_path / "other.jsonl", [record(ttft_ms=33.0)])
    code, text = run("compare", str(one), str(other))
    assert code == 0
    assert "FAR TTFT mean 30.00 33.00 ms +10.00 % (limit 5)" in text
    assert "ok gap mean 11.25 11.25 ms +0.00 % (limit 5)" in text
    code, text = run("compare", str(one), str(other), "-o", "json", "--check")
    assert code == 1
    assert {"name": "TTFT mean", "passed": False}.items() <= json.loads(text)["figures"][0].items()
    assert run("compare", str(one), str(one), "--check")[0] == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_tokens": 2**63},
        {"output_tokens": 2**40},
        {"output_tokens": 2**31},
        {"arrival_ms": 1e300},
        {"scheduled_ms": -1e300},
    ],
)
def test_what_no_engine_ever_did_is_refused_with_its_line(tmp_path: Path, fields: dict[str, object]) -> None:
    trace = write_trace(tmp_path / "trace.jsonl", [record(), record(**fields)])
    for arguments in (("fit", str(trace), "-o", str(tmp_path / "model.json")), ("compare", str(trace), str(trace))):
        code, text = run(*arguments)
        assert code == 2
        assert "trace.jsonl: line 3: " in text


@pytest.mark.parametrize(
    ("meta", "records"),
    [
        ({}, [record(output_tokens=100_000, itl_tokens=None)]),
        ({"speculative": {"num_speculative_tokens": 10**9}}, [record()]),
        ({"speculative": {"num_speculative_tokens": -1}}, [record()]),
        ({"max_num_seqs": 0, "block_size": 0, "tp": 0}, [record()]),
        ({}, [record(itl_tokens=[5000, 2], output_tokens=5003)]),
        ({}, [record(cached_tokens=500), record(prompt_tokens=0)]),
        ({}, [record(scheduled_ms=1e12), record(scheduled_ms=-1e12)]),
    ],
)
def test_what_is_strange_is_fitted_and_played(
    tmp_path: Path, meta: dict[str, object], records: list[dict[str, object]]
) -> None:
    write_trace(tmp_path / "trace.jsonl", records, {**META, **meta})
    code, text = run("fit", str(tmp_path), "-o", str(tmp_path / "model.json"))
    assert code == 0, text
    code, text = run("forecast", str(tmp_path / "model.json"), "-o", str(tmp_path / "out"), "--load", str(tmp_path))
    assert code == 0, text


def test_limits_that_no_engine_has_are_refused(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.jsonl", [record()], {**META, "max_num_seqs": 2**62})
    code, text = run("fit", str(tmp_path), "-o", str(tmp_path / "model.json"))
    assert code == 2
    assert "no engine is so: " in text
    assert "max_num_seqs" in text
    assert not (tmp_path / "model.json").exists()
