"""`specdecode replay forecast` on a command line."""

from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

from specdecode_operator.capture.trace_reader import read_recording
from specdecode_operator.cli.main import app
from specdecode_operator.replay.compare import measured
from specdecode_operator.replay.fit import fit
from specdecode_operator.replay.model_file import Clients, FittedModel, Origin, encode_model
from tests.support.synthetic import Made, Truth
from tests.support.traces import record, write_trace


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return Truth().make(tmp_path / "made", "closed:4", 60)


@pytest.fixture
def model(tmp_path: Path, made: Made) -> Path:
    path = tmp_path / "model.json"
    path.write_bytes(encode_model(fit([made.recording])))
    return path


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["replay", "forecast", *map(str, arguments)])
    return result.exit_code, " ".join(result.output.replace("│", "").split())


def test_a_recorded_load_twice_as_fast(tmp_path: Path, made: Made, model: Path) -> None:
    out = tmp_path / "out"
    code, text = run(model, "-o", out, "--load", made.folder, "--load-factor", 2)
    assert code == 0, text
    assert "60 requests in" in text
    assert "note: requests decoding at once" in text
    told = read_recording(out)
    assert told.meta.source == "forecast"
    assert told.meta.speculative == made.recording.meta.speculative
    last, recorded = told.requests[-1].arrival_ms, made.requests[-1].arrival_ms
    assert last == pytest.approx((recorded or 0) / 2, abs=0.001)


def test_a_load_that_is_given(tmp_path: Path, model: Path) -> None:
    out = tmp_path / "out"
    arguments = ("--arrivals", "closed:4", "--requests", 40, "--prompt-tokens", "200-400", "--output-tokens", 100)
    code, text = run(model, "-o", out, *arguments)
    assert code == 0, text
    assert "TPOT mean" in text
    assert "note:" not in text
    validated = CliRunner().invoke(app, ["capture", "validate", str(out)])
    assert validated.exit_code == 0, validated.output


def test_what_is_said_is_what_was_written(tmp_path: Path, model: Path) -> None:
    code, text = run(model, "-o", tmp_path / "out", "--arrivals", "poisson:4", "--requests", 40)
    assert code == 0, text
    found = measured(read_recording(tmp_path / "out"))
    assert found.acceptance is not None
    assert f"{found.output_tokens / found.seconds:,.1f} tokens/s" in text
    assert f"acceptance {100 * found.acceptance:.1f} %" in text
    for name, values in (("TTFT", found.ttft_ms), ("TPOT", found.tpot_ms), ("gap", found.gap_ms)):
        p50, p90, p99 = np.percentile(values, (50, 90, 99))
        assert f"{name} mean {values.mean():.2f} P50 {p50:.2f} P90 {p90:.2f} P99 {p99:.2f} ms" in text


def test_a_seed_makes_the_same_steps_and_another_one_others(tmp_path: Path, made: Made, model: Path) -> None:
    traces = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        assert run(model, "-o", tmp_path / name, "--load", made.folder, "--seed", seed)[0] == 0
        traces.append((tmp_path / name / "trace.jsonl").read_bytes())
    assert traces[0] == traces[1] != traces[2]


def test_prompts_have_the_prefix_that_is_asked_for(tmp_path: Path, model: Path) -> None:
    arguments = ("--arrivals", "closed:1", "--requests", 3, "--prompt-tokens", 64, "--shared-prefix-tokens", 160)
    assert run(model, "-o", tmp_path / "out", *arguments)[0] == 0
    told = read_recording(tmp_path / "out").requests
    assert [(each.prompt_tokens, each.cached_tokens) for each in told] == [(224, 0), (224, 160), (224, 160)]


def test_clients_take_as_long_between_answers_as_they_did(tmp_path: Path, made: Made) -> None:
    fitted = msgspec.structs.replace(fit([made.recording]), clients=Clients(turnarounds_ms=[500.0]))
    path = tmp_path / "model.json"
    path.write_bytes(encode_model(fitted))
    assert run(path, "-o", tmp_path / "out", "--arrivals", "closed:1", "--requests", 3)[0] == 0
    told = read_recording(tmp_path / "out").requests
    waits_ms = [(after.arrival_ms or 0) - (before.end_ms or 0) for before, after in pairwise(told)]
    assert waits_ms == pytest.approx([500.0] * 2, abs=0.01)


def test_limits_may_be_others(tmp_path: Path, model: Path) -> None:
    arguments = ("--arrivals", "closed:8", "--requests", 40, "--max-num-seqs", 2, "--num-gpu-blocks", 75)
    code, text = run(model, "-o", tmp_path / "out", *arguments, "--output-tokens", 100)
    assert code == 0, text
    told = read_recording(tmp_path / "out").requests
    assert max(max(each.num_running or [0]) for each in told) <= 2
    assert sum(each.preemptions for each in told) > 0
    assert "preemptions" in text


def test_what_would_not_be_heeded_is_refused(tmp_path: Path, made: Made, model: Path) -> None:
    for arguments in (
        ("--load", made.folder, "--prompt-tokens", 900),
        ("--load", made.folder, "--requests", 5),
        ("--arrivals", "closed:4", "--load-factor", 2),
    ):
        code, text = run(model, "-o", tmp_path / "out", *arguments)
        assert (code, str(arguments[2]) in text, "heeded with" in text) == (2, True, True), text


def test_answers_that_outgrow_the_kv_cache_are_no_answers(tmp_path: Path, model: Path) -> None:
    arguments = ("--arrivals", "closed:4", "--requests", 9, "--prompt-tokens", 160, "--num-gpu-blocks", 12)
    code, text = run(model, "-o", tmp_path / "none", *arguments, "--output-tokens", 100)
    assert (code, "no request fits into so many" in text) == (2, True), text
    code, text = run(model, "-o", tmp_path / "some", *arguments, "--output-tokens", "5-100")
    assert code == 0, text
    assert "requests were too large for the KV cache" in text


def test_requests_beyond_max_model_len_are_told(tmp_path: Path, made: Made) -> None:
    fitted = fit([made.recording])
    limits = msgspec.structs.replace(fitted.origin.limits, max_model_len=500)
    path = tmp_path / "model.json"
    origin = msgspec.structs.replace(fitted.origin, limits=limits)
    path.write_bytes(encode_model(msgspec.structs.replace(fitted, origin=origin)))
    arguments = ("--arrivals", "closed:4", "--requests", 9, "--output-tokens", 10)
    code, text = run(path, "-o", tmp_path / "short", *arguments, "--prompt-tokens", 490)
    assert (code, "max_model_len" in text) == (0, False), text
    code, text = run(path, "-o", tmp_path / "long", *arguments, "--prompt-tokens", 491)
    assert (code, "requests of up to 501 tokens are longer than max_model_len 500" in text) == (0, True), text


def test_a_conversation_finds_its_answers_again(tmp_path: Path) -> None:
    made = Truth().make(tmp_path / "made", "multiturn:3x4x1", 24)
    path = tmp_path / "model.json"
    path.write_bytes(encode_model(fit([made.recording])))
    code, text = run(path, "-o", tmp_path / "out", "--load", made.folder)
    assert code == 0, text
    told = read_recording(tmp_path / "out").requests
    cached = [sum(each.cached_tokens for each in requests) for requests in (told, made.requests)]
    assert cached[1] > 5000
    # A turn that comes before the one before it is over, as that takes a little longer than it did, does not find it.
    assert cached[0] == pytest.approx(cached[1], rel=0.1)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "give --arrivals or --load, one of them"),
        (["--arrivals", "closed:1", "--load", "."], "give --arrivals or --load, one of them"),
        (["--load", "nowhere"], "nowhere: holds no trace.jsonl"),
        (["--load", "late"], "no request has arrival_ms: give --arrivals"),
        (["--arrivals", "closed:1", "--num-gpu-blocks", "1"], "no request fits into so many"),
    ],
)
def test_what_cannot_be_forecast_is_refused_and_leaves_nothing(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], says: str
) -> None:
    (tmp_path / "late").mkdir()
    write_trace(tmp_path / "late" / "trace.jsonl", [record(arrival_ms=None)])
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    code, text = run(model, "-o", tmp_path / "out", *arguments)
    assert code == 2
    assert says in text
    assert sorted(tmp_path.iterdir()) == before


def test_a_file_that_is_no_model_or_has_no_donors_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    for content, says in (
        (b"{}", "is no fitted model"),
        (encode_model(FittedModel(schema=1, origin=Origin())), "the model has no donors: fit it again"),
    ):
        path.write_bytes(content)
        code, text = run(path, "-o", tmp_path / "out", "--arrivals", "closed:1")
        assert code == 2
        assert f"model.json: {says}" in text
