"""`specdecode replay fit`, `synth` and forecasts."""

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

from specdecode_operator.capture.trace_reader import RecordedRequest, read_recording
from specdecode_operator.cli.main import app
from specdecode_operator.replay.compare import measured
from specdecode_operator.replay.fit import fit
from specdecode_operator.replay.model_file import FittedModel, Origin, encode_model, read_model
from tests.support.replay_process import replaying
from tests.support.synthetic import Made, Truth
from tests.support.traces import META, record, write_trace


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["replay", *arguments])
    return result.exit_code, " ".join(result.output.replace("│", "").split())


def test_fit_writes_a_model_of_a_capture(tmp_path: Path) -> None:
    made = Truth().make(tmp_path / "made", "closed:4", 40)
    file = tmp_path / "model.json"
    code, text = run(
        "fit", str(made.folder), "--out", str(file), "--max-num-batched-tokens", "2048", "--num-gpu-blocks", "999"
    )
    assert code == 0, text
    assert "fitted to 40 requests in" in text
    assert "limits: max_num_seqs 64, max_num_batched_tokens 2048, block_size 16, num_gpu_blocks 999" in text
    assert "requests decoding at once: 1 to 4" in text
    model = read_model(file)
    assert model.origin.limits.num_gpu_blocks == 999
    assert [capture.requests for capture in model.origin.captures] == [40]


def test_draft_share_divides_the_step_time_among_draft_and_target(tmp_path: Path) -> None:
    capture = str(Path(__file__).parents[2] / "data/captures/draft_model")
    takes_ms = []
    for share in ("0", "0.1"):
        code, text = run("fit", capture, "--out", str(tmp_path / share), "--draft-share", share)
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
        ([record(arrival_ms=None)], "no request has arrival_ms, which a fit needs"),
        ([record(), record(itl_ms=[10.0, -1.0])], "line 3: a time of -1 ms"),
        ([record(itl_ms=[10.0, 4e6])], "it must be between 0 and 1 hour"),
    ],
)
def test_capture_without_usable_requests_is_refused(
    tmp_path: Path, records: list[dict[str, object]], says: str
) -> None:
    write_trace(tmp_path / "trace.jsonl", records)
    file = tmp_path / "model.json"
    code, text = run("fit", str(tmp_path), "--out", str(file))
    assert code == 2
    assert says in text
    assert not file.exists()


def test_skip_bad_lines_counts_the_skipped_lines(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.jsonl", [record(), record(itl_ms=[10.0, -1.0]), record(arrival_ms=100.0)])
    code, text = run("fit", str(tmp_path), "--out", str(tmp_path / "model.json"), "--skip-bad-lines")
    assert code == 0
    assert "skipped 1 lines" in text
    both = (str(tmp_path / "trace.jsonl"), str(tmp_path))
    code, text = run("fit", *both, "--out", str(tmp_path / "both.json"), "--skip-bad-lines")
    assert (code, "skipped 2 lines" in text) == (0, True)


@pytest.mark.parametrize(
    ("meta", "says"),
    [
        ({"model": "other"}, "model is other, but"),
        ({"speculative": {"method": "ngram", "num_speculative_tokens": 2}}, "speculative is"),
    ],
)
def test_captures_of_different_engines_are_not_mixed(tmp_path: Path, meta: dict[str, object], says: str) -> None:
    one = write_trace(tmp_path / "one.jsonl", [record()])
    other = write_trace(tmp_path / "other.jsonl", [record()], {**META, **meta})
    code, text = run("fit", str(one), str(other), "--out", str(tmp_path / "model.json"))
    assert code == 2
    assert says in text


def test_compare_prints_text_and_json(tmp_path: Path) -> None:
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
def test_impossible_record_is_refused_with_its_line(tmp_path: Path, fields: dict[str, object]) -> None:
    trace = write_trace(tmp_path / "trace.jsonl", [record(), record(**fields)])
    for arguments in (("fit", str(trace), "--out", str(tmp_path / "model.json")), ("compare", str(trace), str(trace))):
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
def test_unusual_capture_can_be_fitted_and_forecast(
    tmp_path: Path, meta: dict[str, object], records: list[dict[str, object]]
) -> None:
    write_trace(tmp_path / "trace.jsonl", records, {**META, **meta})
    code, text = run("fit", str(tmp_path), "--out", str(tmp_path / "model.json"))
    assert code == 0, text
    code, text = run("forecast", str(tmp_path / "model.json"), "--out", str(tmp_path / "out"), "--load", str(tmp_path))
    assert code == 0, text


def test_impossible_engine_limits_are_refused(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.jsonl", [record()], {**META, "max_num_seqs": 2**62})
    code, text = run("fit", str(tmp_path), "--out", str(tmp_path / "model.json"))
    assert code == 2
    assert "result in an invalid model: " in text
    assert "max_num_seqs" in text
    assert not (tmp_path / "model.json").exists()


# `specdecode replay forecast` on a command line.


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return Truth().make(tmp_path / "made", "closed:4", 60)


@pytest.fixture
def model(tmp_path: Path, made: Made) -> Path:
    path = tmp_path / "model.json"
    path.write_bytes(encode_model(fit([made.recording])))
    return path


def run_forecast(*arguments: object) -> tuple[int, str]:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["replay", "forecast", *map(str, arguments)])
    return result.exit_code, " ".join(result.output.replace("│", "").split())


def test_forecast_plays_a_recorded_load_twice_as_fast(tmp_path: Path, made: Made, model: Path) -> None:
    out = tmp_path / "out"
    code, text = run_forecast(model, "--out", out, "--load", made.folder, "--load-factor", 2)
    assert code == 0, text
    assert "60 requests in" in text
    assert "note: requests decoding at once" in text
    told = read_recording(out)
    assert told.meta.source == "forecast"
    assert told.meta.speculative == made.recording.meta.speculative
    last, recorded = told.requests[-1].arrival_ms, made.requests[-1].arrival_ms
    assert last == pytest.approx((recorded or 0) / 2, abs=0.001)


def test_forecast_of_a_given_load_is_a_valid_capture(tmp_path: Path, model: Path) -> None:
    out = tmp_path / "out"
    arguments = ("--arrivals", "closed:4", "--requests", 40, "--prompt-tokens", "200-400", "--output-tokens", 100)
    code, text = run_forecast(model, "--out", out, *arguments)
    assert code == 0, text
    assert "TPOT mean" in text
    assert "note:" not in text
    validated = CliRunner().invoke(app, ["capture", "validate", str(out)])
    assert validated.exit_code == 0, validated.output


def test_printed_figures_match_the_written_forecast(tmp_path: Path, model: Path) -> None:
    code, text = run_forecast(model, "--out", tmp_path / "out", "--arrivals", "poisson:4", "--requests", 40)
    assert code == 0, text
    found = measured(read_recording(tmp_path / "out"))
    assert found.acceptance is not None
    assert f"{found.output_tokens / found.seconds:,.1f} tokens/s" in text
    assert f"acceptance {100 * found.acceptance:.1f} %" in text
    for name, values in (("TTFT", found.ttft_ms), ("TPOT", found.tpot_ms), ("gap", found.gap_ms)):
        p50, p90, p99 = np.percentile(values, (50, 90, 99))
        assert f"{name} mean {values.mean():.2f} P50 {p50:.2f} P90 {p90:.2f} P99 {p99:.2f} ms" in text


def test_option_without_effect_is_refused(tmp_path: Path, made: Made, model: Path) -> None:
    for arguments in (
        ("--load", made.folder, "--prompt-tokens", 900),
        ("--load", made.folder, "--requests", 5),
        ("--arrivals", "closed:4", "--load-factor", 2),
    ):
        code, text = run_forecast(model, "--out", tmp_path / "out", *arguments)
        assert (code, str(arguments[2]) in text, "omit " in text) == (2, True, True), text


def test_request_beyond_max_model_len_is_reported(tmp_path: Path, made: Made) -> None:
    fitted = fit([made.recording])
    limits = msgspec.structs.replace(fitted.origin.limits, max_model_len=500)
    path = tmp_path / "model.json"
    origin = msgspec.structs.replace(fitted.origin, limits=limits)
    path.write_bytes(encode_model(msgspec.structs.replace(fitted, origin=origin)))
    arguments = ("--arrivals", "closed:4", "--requests", 9, "--output-tokens", 10)
    code, text = run_forecast(path, "--out", tmp_path / "short", *arguments, "--prompt-tokens", 490)
    assert (code, "max_model_len" in text) == (0, False), text
    code, text = run_forecast(path, "--out", tmp_path / "long", *arguments, "--prompt-tokens", 491)
    assert (code, "has 501 tokens, which exceeds max_model_len 500" in text) == (0, True), text


def test_forecast_of_multiturn_load_reuses_cached_prefixes(tmp_path: Path) -> None:
    made = Truth().make(tmp_path / "made", "multiturn:3x4x1", 24)
    path = tmp_path / "model.json"
    path.write_bytes(encode_model(fit([made.recording])))
    code, text = run_forecast(path, "--out", tmp_path / "out", "--load", made.folder)
    assert code == 0, text
    told = read_recording(tmp_path / "out").requests
    cached = [sum(each.cached_tokens for each in requests) for requests in (told, made.requests)]
    assert cached[1] > 5000
    # A turn that comes before the one before it is over, as that takes a little longer than it did, does not find it.
    assert cached[0] == pytest.approx(cached[1], rel=0.1)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "either --arrivals or --load"),
        (["--arrivals", "closed:1", "--load", "."], "either --arrivals or --load"),
        (["--load", "nowhere"], "nowhere: holds no trace.jsonl"),
        (["--load", "late"], "no request has arrival_ms: use --arrivals"),
        (["--arrivals", "closed:1", "--num-gpu-blocks", "1"], "too few for any request"),
    ],
)
def test_invalid_forecast_is_refused_and_writes_nothing(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], says: str
) -> None:
    (tmp_path / "late").mkdir()
    write_trace(tmp_path / "late" / "trace.jsonl", [record(arrival_ms=None)])
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    code, text = run_forecast(model, "--out", tmp_path / "out", *arguments)
    assert code == 2
    assert says in text
    assert sorted(tmp_path.iterdir()) == before


def test_invalid_model_or_model_without_donors_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    for content, says in (
        (b"{}", "is not a fitted model"),
        (encode_model(FittedModel(schema=1, origin=Origin())), "the model has no donors: fit it again"),
    ):
        path.write_bytes(content)
        code, text = run_forecast(path, "--out", tmp_path / "out", "--arrivals", "closed:1")
        assert code == 2
        assert f"model.json: {says}" in text


# `specdecode replay synth` on a command line.


def run_synth(*arguments: str) -> tuple[int, str]:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["replay", "synth", *arguments])
    return result.exit_code, " ".join(result.output.split())


def test_synth_writes_a_valid_capture(tmp_path: Path) -> None:
    code, text = run_synth(
        "--out", str(tmp_path / "made"), "--requests", "20", "--arrivals", "closed:2", "--arrivals", "burst:5x1"
    )
    assert (code, text.split(": ")[1].split(" in ")[0]) == (0, "40 requests")
    validated = CliRunner().invoke(app, ["capture", "validate", str(tmp_path / "made")])
    assert validated.exit_code == 0, validated.output
    assert [each.name for each in tmp_path.iterdir()] == ["made"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--acceptance", "0.5,0.6"], "must be shares from 1 to 0"),
        (["--acceptance", "much"], "must be shares from 1 to 0"),
        (["--arrivals", "often"], "often: write constant:4"),
        (["--prompt-tokens", "long"], "long: write 512, 100-900"),
        (["--requests", "3", "--duration", "3"], "--requests and --duration exclude each other"),
        (["--num-gpu-blocks", "2"], "too few for any request: use a larger value"),
    ],
)
def test_invalid_synth_options_are_refused_and_write_nothing(tmp_path: Path, arguments: list[str], says: str) -> None:
    code, text = run_synth("--out", str(tmp_path / "made"), *arguments)
    assert code == 2
    assert says in text.replace("│ ", "").replace(" │", "")
    assert list(tmp_path.iterdir()) == []


def test_synth_keeps_an_existing_folder(tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "mine").write_text("x")
    code, text = run_synth("--out", str(tmp_path / "made"), "--requests", "3")
    assert code == 2
    assert "already exists: use a new folder" in text.replace("│ ", "").replace(" │", "")
    assert (tmp_path / "made" / "mine").read_text() == "x"


# A capture is made, played back, asked again as it was asked, and recorded once more: the same figures come out.


def specdecode(*arguments: str | Path) -> str:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, [*map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.stdout


def by_id(folder: Path) -> dict[str, RecordedRequest]:
    return {each.request_id or "": each for each in read_recording(folder).requests}


def test_replay_driven_with_its_capture_records_the_same_tokens(tmp_path: Path) -> None:
    made, replayed = tmp_path / "made", tmp_path / "replayed"
    load = ("--arrivals", "multiturn:4x3", "--requests", "24", "--prompt-tokens", "20-60", "--output-tokens", "8-24")
    specdecode("replay", "synth", "--out", made, *load, "--step-ms", "2", "--seed", "5")
    with replaying(made, "--match", "request-id", "--unmatched", "refuse", "--record", replayed) as url:
        driven = json.loads(specdecode("replay", "drive", made, "--url", url, "-o", "json"))
    assert (driven["outcomes"], driven["other_lengths"]) == ({"completed": 24}, 0)
    assert driven["driven"]["output_tokens"] == driven["recorded"]["output_tokens"]

    before, after = by_id(made), by_id(replayed)
    assert after.keys() == before.keys()
    for name, each in before.items():
        assert after[name].prompt_tokens == each.prompt_tokens
        assert list(after[name].chunk_tokens) == list(each.chunk_tokens)
        # A busy machine makes it later, and nothing earlier.
        assert after[name].ttft_ms + sum(after[name].gaps_ms) >= each.ttft_ms + sum(each.gaps_ms) - 1

    compared: dict[str, Any] = json.loads(specdecode("replay", "compare", made, replayed, "-o", "json"))
    figures = {each["name"]: each for each in compared["figures"]}
    assert all(
        found["difference"] == 0 for name, found in figures.items() if name.startswith(("bursts of", "tokens per"))
    )
    assert figures["acceptance"]["difference"] == 0
