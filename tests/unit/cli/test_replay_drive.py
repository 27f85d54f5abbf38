"""`specdecode replay drive` on a command line."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from typer.testing import CliRunner

from specdecode_operator.cli.main import app
from tests.support.http_server import Quiet, serving
from tests.support.traces import META, record, write_trace

VOCAB_SIZE = 1000


class _Engine(Quiet, BaseHTTPRequestHandler):
    """Answers each completion with one token an event, where it knows all of the prompt's."""

    prompts: ClassVar[list[list[int]]] = []
    is_silent: ClassVar[bool] = False
    is_over = threading.Event()

    def do_GET(self) -> None:
        self._answer(*((200, b'{"data": [{"id": "tiny"}]}') if self.path == "/v1/models" else (404, b"{}")))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.prompts.append(body["prompt"])
        if self.is_silent:
            self.is_over.wait(60)
            return
        if max(body["prompt"]) >= VOCAB_SIZE:
            self._answer(400, b'{"error": {"message": "out of vocabulary"}}')
            return
        token = b'data: {"choices": [{"index": 0, "text": "a"}]}\n\n'
        usage = b'data: {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": %d}}\n\n'
        self._answer(200, token * body["max_tokens"] + usage % body["max_tokens"] + b"data: [DONE]\n\n")

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def engine(*, silent: bool = False) -> Iterator[str]:
    _Engine.prompts.clear()
    _Engine.is_silent = silent
    _Engine.is_over.clear()
    with serving(ThreadingHTTPServer(("127.0.0.1", 0), _Engine)) as server:
        yield f"http://127.0.0.1:{server.server_port}"
        _Engine.is_over.set()


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write_trace(tmp_path / "trace.jsonl", [record(), record(arrival_ms=30.0)])


def run(*arguments: object, **environment: str) -> tuple[int, str]:
    result = CliRunner(env={"COLUMNS": "200", **environment}).invoke(app, ["replay", "drive", *map(str, arguments)])
    return result.exit_code, result.output


def test_every_request_is_in_the_output_folder_and_the_summary(trace: Path, tmp_path: Path) -> None:
    with engine() as url:
        code, text = run(trace, "--url", url, "--out", tmp_path / "driven", "--vocab-size", VOCAB_SIZE)
    assert code == 0, text
    assert "2 of 2 sent: 2 completed" in text
    assert "no record has block_hashes: prompts share no prefixes" in text
    assert [path.name for path in (tmp_path / "driven").iterdir()] == ["client.jsonl"]
    lines = [json.loads(line) for line in (tmp_path / "driven" / "client.jsonl").read_text().splitlines()]
    assert [line["id"] for line in lines] == ["replay-0", "replay-1"]
    validated = CliRunner().invoke(app, ["capture", "validate", str(tmp_path / "driven" / "client.jsonl")])
    assert validated.exit_code == 0, validated.output


def test_refused_requests_fail_the_command_with_a_hint(trace: Path) -> None:
    with engine() as url:
        code, text = run(trace, "--url", url)
    assert code == 1
    assert "first failure replay-0: http rejected 400: out of vocabulary" in text
    assert "hint: tiny has fewer tokens: set --vocab-size" in text


def test_json_output_has_outcomes_and_recorded_latencies(trace: Path) -> None:
    with engine() as url:
        code, text = run(trace, "--url", url, "--vocab-size", VOCAB_SIZE, "-o", "json", "--requests", 1)
    found: dict[str, Any] = json.loads(text[text.index("{") :])
    assert (code, found["planned"], found["outcomes"]) == (0, 1, {"completed": 1})
    assert found["recorded"]["latency_ms"]["p50"] == 52.5


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--model", "other"], "error: --model: other: http://127.0.0.1:"),
        (["--url", "nowhere"], "error: --url: nowhere: is not an HTTP URL: write one such as http://localhost:8000"),
        (["--url", "http://127.0.0.1:1"], "error: --url: http://127.0.0.1:1/v1/models: does not answer"),
        (["--api-key-variable", "UNSET"], "error: --api-key-variable: UNSET: is not set: export it"),
        (["--api-key-variable", "BROKEN"], "error: --api-key-variable: BROKEN: contains characters that are invalid"),
        (["--out", "."], "error: .: already exists: use a new folder"),
    ],
)
def test_invalid_option_is_a_one_line_error_and_writes_nothing(
    trace: Path, tmp_path: Path, arguments: list[str], says: str
) -> None:
    with engine() as url:
        given = ["--url", url] if "--url" not in arguments else []
        out = ["--out", str(tmp_path / "driven")] if "--out" not in arguments else []
        code, text = run(trace, *given, *out, *arguments, BROKEN="a\nb")
    assert code == 2
    [line] = [line for line in text.splitlines() if not line.startswith("note: ")]
    assert line.startswith(says)
    assert [path.name for path in tmp_path.iterdir()] == ["trace.jsonl"]


def test_folder_without_a_trace_is_refused(tmp_path: Path) -> None:
    code, text = run(tmp_path, "--url", "http://127.0.0.1:1")
    assert (code, text.count("\n")) == (2, 1)
    assert "holds no trace.jsonl: name a capture's folder or a trace" in text


def test_requests_without_a_response_time_out(trace: Path) -> None:
    with engine(silent=True) as url:
        code, text = run(trace, "--url", url, "--vocab-size", VOCAB_SIZE, "--timeout", "0.2", "-o", "json")
    assert (code, json.loads(text[text.index("{") :])["outcomes"]) == (1, {"timed_out": 2})


def test_prompts_share_the_prefixes_given_by_block_hashes(tmp_path: Path) -> None:
    records = [record(prompt_tokens=10, block_hashes=[1, other], arrival_ms=float(other)) for other in (2, 3)]
    trace = write_trace(tmp_path / "trace.jsonl", records, {**META, "block_size": 4})
    with engine() as url:
        assert run(trace, "--url", url, "--vocab-size", VOCAB_SIZE)[0] == 0
    first, second = _Engine.prompts
    assert first[:4] == second[:4]
    assert first[4:8] != second[4:8]
