"""`specdecode replay serve` and `emulate`."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from specdecode_operator.capture.files.validate import validate_capture
from specdecode_operator.cli.main import app
from specdecode_operator.replay.drafting import AcceptanceSchedule
from specdecode_operator.replay.recorded_engine import Matching, Unmatched
from specdecode_operator.replay.server import serve as server
from specdecode_operator.replay.server.playback_source import Source
from specdecode_operator.replay.server.serve import ServeSettings
from tests.support import plain_http
from tests.support.golden import EXAMPLES
from tests.support.traces import META, record, write_trace
from tests.unit.cli.conftest import Specdecode

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


def test_sigterm_finishes_open_requests_and_writes_the_capture(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace.jsonl", [record(ttft_ms=300.0, itl_ms=[300.0, 300.0])])
    with serving(str(trace), "--record", str(tmp_path / "out")) as (process, url):
        body = {"prompt": "a", "stream": True, "max_tokens": 50}
        with plain_http.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as response:
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


def test_request_beyond_drain_timeout_is_cut_off_without_a_traceback(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace.jsonl", [record(ttft_ms=10.0, itl_ms=[3_600_000.0, 1.0])])
    out = tmp_path / "out"
    with serving(str(trace), "--drain-timeout", "1", "--record", str(out)) as (process, url):
        body = {"prompt": "a", "stream": True, "max_tokens": 50}
        with plain_http.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as response:
            next(response.iter_lines())
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=60) == 0
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()
    assert json.loads((out / "trace.jsonl").read_text().splitlines()[1])["ended_by"] in {"abort", "unfinished"}


def test_crash_after_ends_the_server_and_open_requests(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace.jsonl", [record(**QUICK), record(arrival_ms=1.0, ttft_ms=60_000.0)])
    out = tmp_path / "out"
    with serving(str(trace), "--crash-after", "2", "--record", str(out)) as (process, url):
        plain_http.post(f"{url}/v1/completions", json={"prompt": "a"}, timeout=120)
        with pytest.raises(httpx.HTTPError):
            plain_http.post(f"{url}/v1/completions", json={"prompt": "a"}, timeout=120)
        assert process.wait(timeout=60) == 1
    found = validate_capture(out)
    assert found.trace is not None
    assert found.trace.records == 1, "what had ended before is whole"


def test_hang_after_stays_healthy_but_does_not_respond(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace.jsonl", [record(**QUICK)])
    with serving(str(trace), "--hang-after", "0") as (_, url):
        assert plain_http.get(f"{url}/health", timeout=120).status_code == 200
        with pytest.raises(httpx.ReadTimeout):
            plain_http.post(f"{url}/v1/completions", json={"prompt": "a"}, timeout=httpx.Timeout(120, read=1))


def test_slow_start_does_not_listen_and_can_be_stopped(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace.jsonl", [record(**QUICK)])
    process = subprocess.Popen(
        [*SERVE, str(trace), "--slow-start", "3600", "--port", "0"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stderr is not None
    process.stderr.readline()  # its note on token ids comes before it waits
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert b"http" not in output


def test_unusable_traces_and_options_are_refused_in_one_line(tmp_path: Path) -> None:
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
    assert "is not a fitted model" in refused(str(model), "--mode", "modelled")
    assert "--mode modelled" in refused(str(here), "--mode", "modelled", "--match", "prefix")
    assert "--plan" in refused(str(here), "--plan", "x.yaml")
    assert "no effect with --mode steps" in refused(str(here), "--max-num-seqs", "8")
    assert "--host" in refused(str(here), "--host", "192.0.2.1")
    occupied = tmp_path / "occupied"
    occupied.mkdir()
    (occupied / "file").touch()
    assert "--record" in refused(str(here), "--record", str(occupied), "--port", "0")


def test_skip_bad_lines_ignores_unreadable_lines(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "bad.jsonl", [record(**QUICK), record(ttft_ms=-1.0)])
    with serving(str(trace), "--skip-bad-lines") as (process, url):
        assert plain_http.get(f"{url}/v1/models", timeout=120).json()["data"][0]["id"] == "tiny"
        assert process.stderr is not None
        assert "1 unreadable lines" in process.stderr.readline()


# Every option of `specdecode replay serve` is what the server is told.

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


def test_each_option_changes_only_its_own_setting(served: Served) -> None:
    usual = served()
    assert (usual.port, usual.drain_timeout_s, usual.record, usual.api_keys) == (8000, 60, None, ())
    for cases, of in ((OF_SOURCE, lambda settings: settings.source), (OF_SERVER, lambda settings: settings)):
        for name, (argument, value) in cases.items():
            told, before = of(served(argument)), of(usual)
            assert getattr(told, name) == value
            others = [each.name for each in fields(told) if each.name not in (name, "source")]
            assert [getattr(told, each) for each in others] == [getattr(before, each) for each in others]


# `specdecode replay serve --mode emulated`, with a script in the place of the python that has vLLM.

EXAMPLE = EXAMPLES / "llama-70b.yaml"
MODEL: dict[str, Any] = {
    "schema": 1,
    "origin": {"gpu": "NVIDIA-H200", "tp": 2},
    "step_time": {"curve": [[1, 8.0]]},
    "acceptance": {
        "num_speculative_tokens": 5,
        "outcomes": [[5, 0], [5, 5]],
        "classes": [{"share": 1, "outcomes": [0.5, 0.5]}],
    },
}
VERDICT = "emulated: 5 steps, 0.0 % of them late, 0.1 % longer in all"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.json"
    path.write_text(json.dumps(MODEL))
    return path


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    """A python that says that it has vLLM, keeps what it is started with, and ends with 7."""
    path = tmp_path / "python"
    path.write_text(
        f"""#!/bin/sh
if [ "$1" = -c ]; then echo 0.31.0; exit; fi
printf '%s\\n' "$@" > {tmp_path}/arguments
env > {tmp_path}/variables
echo "{VERDICT}" > {tmp_path}/kept/engine/told/lateness.txt
exit 7
"""
    )
    path.chmod(0o755)
    return path


def _emulate(specdecode: Specdecode, *arguments: object) -> Any:
    return specdecode("replay", "serve", "--mode", "emulated", *arguments)


def test_emulated_mode_starts_vllm_with_the_plugin_and_returns_its_code(
    specdecode: Specdecode, model: Path, engine: Path, tmp_path: Path
) -> None:
    kept, record = tmp_path / "kept", tmp_path / "segments"
    options = ("--keep", kept, "--record", record, "--port", 8123, "--engine-arg=--disable-log-stats", "--seed", 5)
    done = _emulate(specdecode, model, "--plan", EXAMPLE, "--engine", engine, *options)
    assert done.exit_code == 7
    told = done.stderr.splitlines()
    assert told[0] == "emulated: 2 x NVIDIA-H200, 14823 KV blocks, 237168 tokens, vLLM 0.31.0"
    assert told[1] == "warning: the plan is for vLLM 0.33: set --engine to an engine of that version"
    assert told[-1] == VERDICT
    arguments = (tmp_path / "arguments").read_text().splitlines()
    assert arguments[:4] == ["-m", "vllm.entrypoints.cli.main", "serve", str(kept / "engine" / "target")]
    assert arguments[-5:] == ["--host", "127.0.0.1", "--port", "8123", "--disable-log-stats"]
    variables = dict(line.split("=", 1) for line in (tmp_path / "variables").read_text().splitlines() if "=" in line)
    plugins = Path(variables["PYTHONPATH"].split(os.pathsep)[0])
    assert {path.name.split("-")[0] for path in plugins.iterdir()} == {"specdecode_emulated", "specdecode_recorder"}
    assert variables["SPECDECODE_RECORD_DIR"] == str(record)
    settings = json.loads((kept / "engine" / "settings.json").read_text())
    assert (settings["gpu"], settings["seed"], settings["tells_steps"]) == ("NVIDIA-H200", 5, True)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--plan", EXAMPLE, "--engine", "/bin/ls"), "--engine /bin/ls: has no vLLM: name a python"),
        (("--plan", EXAMPLE, "--engine", "/nowhere"), "--engine /nowhere: cannot be run: name the python"),
        (("--plan", EXAMPLE, "--tokenizer", "/nowhere"), "--tokenizer /nowhere: contains no tokenizer: use a folder"),
        (("--plan", EXAMPLE.parent), "SpecDecodeDeployments: use a file with one"),
        (("--plan", EXAMPLE, EXAMPLE), "uses one fitted model, not 2"),
        ((), "--mode emulated needs --plan FILE"),
        (("--plan", EXAMPLE, "--time-scale", 2), "has no effect with --mode emulated"),
    ],
)
def test_emulated_mode_reports_unusable_inputs_in_one_line(
    specdecode: Specdecode, model: Path, arguments: tuple[object, ...], words: str
) -> None:
    done = _emulate(specdecode, model, *arguments)
    assert done.exit_code == 2
    assert words in " ".join(done.stderr.replace("│", "").split())


def test_replay_serve_accepts_plan_only_with_mode_emulated(specdecode: Specdecode, tmp_path: Path) -> None:
    done = specdecode("replay", "serve", tmp_path, "--plan", EXAMPLE)
    assert done.exit_code == 2
    assert "requires --mode emulated" in " ".join(done.stderr.replace("│", "").split())


def test_existing_keep_folder_is_refused(specdecode: Specdecode, model: Path, engine: Path, tmp_path: Path) -> None:
    (tmp_path / "kept" / "engine" / "told").mkdir(parents=True)
    done = _emulate(specdecode, model, "--plan", EXAMPLE, "--engine", engine, "--keep", tmp_path / "kept")
    assert done.exit_code == 2
    assert "already exists: use another folder" in done.stderr
    assert not (tmp_path / "arguments").exists()
