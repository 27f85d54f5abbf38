import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from specdecode_operator.capture.files.validate import validate_capture
from specdecode_operator.cli.main import app
from tests.support.traces import META, record, write_trace

QUICK = {"ttft_ms": 1.0, "itl_ms": [1.0, 1.0]}
SERVE = [sys.executable, "-m", "specdecode_operator", "replay", "serve"]


@contextmanager
def serving(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start a server; yields its process and where it listens."""
    process = subprocess.Popen(
        [*SERVE, "--port", "0", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        line = process.stdout.readline() if process.stdout else ""
        found = re.search(r"http://\S+", line)
        assert found, line or (process.stderr.read() if process.stderr else "")
        yield process, found[0]
    finally:
        process.kill()
        process.communicate()


def refused(*arguments: str) -> str:
    """Return the line with which it ends."""
    ended = CliRunner().invoke(app, ["replay", "serve", *arguments])
    assert ended.exit_code == 2, ended.output
    assert ended.exception is None or isinstance(ended.exception, SystemExit)
    return " ".join(re.sub(r"[│╭╮╰╯─]", " ", ended.output).split())


def test_a_server_that_is_told_to_end_answers_what_it_has_begun_and_leaves_a_capture(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace.jsonl", [record(ttft_ms=300.0, itl_ms=[300.0, 300.0])])
    with serving(str(trace), "--record", str(tmp_path / "out")) as (process, url):
        body = {"prompt": "a", "stream": True, "max_tokens": 50}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, trust_env=False, timeout=120) as response:
            lines = response.iter_lines()
            first = next(lines)
            process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert json.loads(first.removeprefix("data: "))["choices"][0]["text"]
        assert len(rest) == 3
        assert rest[-1] == "data: [DONE]"
        assert process.wait(timeout=60) == 0
    found = validate_capture(tmp_path / "out")
    assert found.passed, found.problems


def test_what_takes_longer_than_the_end_may_is_cut_off_without_a_word_of_python(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace.jsonl", [record(ttft_ms=10.0, itl_ms=[3_600_000.0, 1.0])])
    out = tmp_path / "out"
    with serving(str(trace), "--drain-timeout", "1", "--record", str(out)) as (process, url):
        body = {"prompt": "a", "stream": True, "max_tokens": 50}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, trust_env=False, timeout=120) as response:
            next(response.iter_lines())
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=60) == 0
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()
    assert json.loads((out / "trace.jsonl").read_text().splitlines()[1])["ended_by"] in {"abort", "unfinished"}


def test_a_server_that_crashes_is_gone_with_its_streams(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace.jsonl", [record(**QUICK), record(arrival_ms=1.0, ttft_ms=60_000.0)])
    out = tmp_path / "out"
    with serving(str(trace), "--crash-after", "2", "--record", str(out)) as (process, url):
        httpx.post(f"{url}/v1/completions", json={"prompt": "a"}, trust_env=False, timeout=120)
        with pytest.raises(httpx.HTTPError):
            httpx.post(f"{url}/v1/completions", json={"prompt": "a"}, trust_env=False, timeout=120)
        assert process.wait(timeout=60) == 1
    found = validate_capture(out)
    assert found.trace is not None
    assert found.trace.records == 1, "what had ended before is whole"


def test_a_server_that_hangs_is_healthy_and_says_nothing(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace.jsonl", [record(**QUICK)])
    with serving(str(trace), "--hang-after", "0") as (_, url):
        assert httpx.get(f"{url}/health", trust_env=False, timeout=120).status_code == 200
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(
                f"{url}/v1/completions", json={"prompt": "a"}, trust_env=False, timeout=httpx.Timeout(120, read=1)
            )


def test_one_that_starts_slowly_does_not_listen_and_can_be_stopped(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace.jsonl", [record(**QUICK)])
    process = subprocess.Popen(
        [*SERVE, str(trace), "--slow-start", "3600", "--port", "0"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stderr is not None
    process.stderr.readline()  # its note on token ids comes before it waits
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert b"http" not in output


def test_traces_that_cannot_be_played_are_refused_in_one_line(tmp_path: Path) -> None:
    empty = write_trace(tmp_path / "empty.jsonl", [])
    assert "has no request" in refused(str(empty))
    bad = write_trace(tmp_path / "bad.jsonl", [record(), record(ttft_ms=-1.0)])
    assert "line 3" in refused(str(bad))
    here = write_trace(tmp_path / "here.jsonl", [record()])
    other = write_trace(tmp_path / "other.jsonl", [record()], dict(META) | {"model": "other"})
    assert "model is other" in refused(str(here), str(other))
    plain = write_trace(tmp_path / "plain.jsonl", [record(output_tokens=3, itl_tokens=None)], {"model": "tiny"})
    five = write_trace(tmp_path / "five.jsonl", [record(output_tokens=9)], {"model": "tiny"})
    assert "K is" in refused(str(plain), str(five))
    assert "--acceptance" in refused(str(plain), "--acceptance", "0.5")
    assert "block_hashes" in refused(str(here), "--match", "prefix")
    model = tmp_path / "model.json"
    model.write_text("{}")
    assert "is no fitted model" in refused(str(model), "--mode", "modelled")
    assert "--mode modelled" in refused(str(here), "--mode", "modelled", "--match", "prefix")
    assert "--plan" in refused(str(here), "--plan", "x.yaml")
    assert "not heeded with --mode steps" in refused(str(here), "--max-num-seqs", "8")
    assert "--host" in refused(str(here), "--host", "192.0.2.1")
    occupied = tmp_path / "occupied"
    occupied.mkdir()
    (occupied / "file").touch()
    assert "--record" in refused(str(here), "--record", str(occupied), "--port", "0")


def test_a_bad_line_can_be_left_out(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "bad.jsonl", [record(**QUICK), record(ttft_ms=-1.0)])
    with serving(str(trace), "--skip-bad-lines") as (process, url):
        assert httpx.get(f"{url}/v1/models", trust_env=False, timeout=120).json()["data"][0]["id"] == "tiny"
        assert process.stderr is not None
        assert "1 lines" in process.stderr.readline()


def test_a_key_is_taken_from_where_vllm_takes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    trace = write_trace(tmp_path / "trace.jsonl", [record(**QUICK)])
    with serving(str(trace)) as (_, url):
        assert httpx.get(f"{url}/v1/models", trust_env=False, timeout=120).status_code == 401
