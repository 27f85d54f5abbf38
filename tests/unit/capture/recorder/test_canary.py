"""Canary questions to an engine that answers right, wrong, or not at all."""

import json
import os
import socket
import socketserver
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY, generate_latest

from specdecode_operator.capture.recorder import canary_metrics
from specdecode_operator.capture.recorder.canary import (
    FAILED,
    REQUEST_ID_PREFIX,
    RIGHT,
    UNCONFIRMED,
    UNSUPPORTED,
    VERDICTS,
    WRONG,
    BadSettingsError,
    Canaries,
    Checked,
    Engine,
    Settings,
    Verdict,
    digest,
    judge,
    line_of,
    read_settings,
    tell_recorder,
)
from specdecode_operator.capture.recorder.canary_metrics import publish
from specdecode_operator.vllm.engine_metrics import CANARY_ANSWERS, CANARY_REFUSED, read_exposition
from specdecode_operator.vllm.plugin_bundle import RECORDER
from tests.support.certificates import write_certificate
from tests.support.http_server import Quiet, serving
from tests.support.waiting import DEADLINE_S, Rounds, eventually

MARGIN = 0.25
SETTINGS = Settings(("one", "two"), max_tokens=6, interval_s=100, model="tiny", margin_nats=MARGIN)
FILE = {"prompts": ["one", "two"], "max_tokens": 6, "interval_s": 100, "model": "tiny", "margin_nats": MARGIN}
NO_LOGPROBS = (400, {"error": {"message": "Requested prompt logprobs of 1, which is greater than max allowed: 0"}})
BROKEN = (500, {"error": {"message": "EngineCore encountered an issue"}})


def best(prefix: list[int]) -> int:
    """Return the token that the target finds most likely after a prefix."""
    return (7 * sum(prefix) + len(prefix)) % 1000


@dataclass
class Target:
    """An engine whose target is known, and what goes wrong in each of its answers.

    ``gaps`` has for each answer by how much its third token is less likely than the best one, and ``says`` a response
    in place of its own answer, by the number of the request.
    """

    gaps: list[float] = field(default_factory=list)
    says: dict[int, tuple[int, Any]] = field(default_factory=dict)
    healthy: bool = True
    key: str | None = None
    received: list[dict[str, Any]] = field(default_factory=list)
    url: str = ""

    def respond(self, document: dict[str, Any]) -> tuple[int, Any]:
        self.received.append(document)
        if (number := len(self.received)) in self.says:
            return self.says[number]
        prompt = document["prompt"]
        if "prompt_logprobs" in document:
            return 200, {"choices": [{"prompt_logprobs": [None, *map(self.logprobs, self.prefixes(prompt))]}]}
        tokens = prefix = list(prompt.encode())
        answer: list[int] = []
        gap = self.gaps.pop(0) if self.gaps else 0.0
        for position in range(document["max_tokens"]):
            token = best(prefix) if position != 2 or not gap else 2000 + round(100 * gap)
            answer, prefix = [*answer, token], [*prefix, token]
        return 200, {"choices": [{"prompt_token_ids": tokens, "token_ids": answer}]}

    @staticmethod
    def prefixes(prompt: list[int]) -> list[list[int]]:
        return [prompt[: position + 1] for position in range(1, len(prompt))]

    @staticmethod
    def logprobs(prefix: list[int]) -> dict[str, Any]:
        *before, token = prefix
        # Tokens of the prompt may be as unlikely as they like.
        gap = 9.0 if len(before) < len("one") else max(0.0, (token - 2000) / 100)
        own = {str(token): {"logprob": -0.1 - gap, "rank": 1, "decoded_token": "x"}}
        return {str(best(before)): {"logprob": -0.1, "rank": 1, "decoded_token": "y"}} | own


@pytest.fixture
def target() -> Iterator[Target]:
    engine = Target()
    with serving(_server(engine)) as server:
        engine.url = f"http://127.0.0.1:{server.server_port}"
        yield engine


def _server(target: Target) -> ThreadingHTTPServer:
    class Handler(Quiet, BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(200 if target.healthy and self.path == "/health" else 503, {})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            if target.key is not None and self.headers["authorization"] != f"Bearer {target.key}":
                self.answer(401, {"error": "Unauthorized"})
            else:
                self.answer(*target.respond(body))

        def answer(self, status: int, document: Any) -> None:
            body = document if isinstance(document, bytes) else json.dumps(document).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    return ThreadingHTTPServer(("127.0.0.1", 0), Handler)


def test_answer_with_best_tokens_of_target_is_right(target: Target) -> None:
    assert judge(Engine(target.url), SETTINGS, "one") == Verdict(RIGHT)
    asked, checked = target.received
    # Defaults of the checkpoint or the server must not change the answer.
    assert {name: asked[name] for name in ("temperature", "repetition_penalty", "presence_penalty")} == {
        "temperature": 0,
        "repetition_penalty": 1,
        "presence_penalty": 0,
    }
    assert (asked["max_tokens"], checked["max_tokens"]) == (SETTINGS.max_tokens, 1)
    assert checked["prompt"][:3] == list(b"one")
    assert len(checked["prompt"]) == 3 + SETTINGS.max_tokens
    assert all(each["request_id"].startswith(REQUEST_ID_PREFIX) for each in target.received)


@pytest.mark.parametrize(
    ("gaps", "verdict", "requests"),
    [
        pytest.param([0.24], RIGHT, 2, id="tie within the margin"),
        pytest.param([0.26, 0.26], WRONG, 4, id="confirmed"),
        pytest.param([9.0, 0.3], WRONG, 4, id="another wrong answer"),
        pytest.param([9.0, 0.0], UNCONFIRMED, 4, id="hiccup"),
        pytest.param([9.0, 0.2], UNCONFIRMED, 4, id="a tie does not confirm"),
    ],
)
def test_unlikely_token_is_wrong_only_if_confirmed(
    target: Target, gaps: list[float], verdict: str, requests: int
) -> None:
    found = judge(Engine(target.url), SETTINGS, "one")
    assert found.word == RIGHT
    target.received.clear()
    target.gaps = gaps
    found = judge(Engine(target.url), SETTINGS, "one")
    assert (found.word, len(target.received)) == (verdict, requests)
    if verdict != RIGHT:
        assert f"token 3 of {SETTINGS.max_tokens}" in found.details


def test_difference_equal_to_the_margin_is_a_tie() -> None:
    assert Checked([7], [0.25]).wrong_token(0.25) is None


@pytest.mark.parametrize("request_number", [1, 2])
@pytest.mark.parametrize(
    ("response", "verdict", "reason"),
    [
        pytest.param(NO_LOGPROBS, UNSUPPORTED, "greater than max allowed", id="rejected"),
        pytest.param((404, {"error": {"message": "The model `x` does not exist."}}), UNSUPPORTED, "404", id="model"),
        pytest.param((401, {"error": "Unauthorized"}), UNSUPPORTED, "401", id="key"),
        pytest.param((200, {"choices": [{"text": "x"}]}), UNSUPPORTED, "does not return", id="too old"),
        pytest.param(BROKEN, FAILED, "500", id="broken"),
        pytest.param((429, {}), FAILED, "429", id="overloaded"),
        pytest.param((408, {}), FAILED, "408", id="timed out"),
        pytest.param((400, b"\xff" * 9), UNSUPPORTED, "400", id="no JSON, rejected"),
        pytest.param((200, b"\xff" * 9), FAILED, "unreadable", id="no JSON"),
        pytest.param((200, {"choices": []}), FAILED, "one choice", id="no choice"),
        pytest.param((200, [1]), FAILED, "one choice", id="no object"),
    ],
)
def test_rejection_is_unsupported_and_error_is_failed(
    target: Target, request_number: int, response: tuple[int, Any], verdict: str, reason: str
) -> None:
    target.says[request_number] = response
    found = judge(Engine(target.url), SETTINGS, "one")
    assert found.word == verdict
    assert reason in found.details


@pytest.mark.parametrize(
    "choice",
    [
        {"prompt_token_ids": [], "token_ids": [1]},
        {"prompt_token_ids": [1], "token_ids": ["1"]},
        {"prompt_token_ids": [1], "token_ids": [-1]},
        {"prompt_token_ids": [1], "token_ids": [2**32]},
        {"prompt_token_ids": [True], "token_ids": [1]},
    ],
)
def test_invalid_token_ids_fail(target: Target, choice: dict[str, Any]) -> None:
    target.says[1] = (200, {"choices": [choice]})
    assert judge(Engine(target.url), SETTINGS, "one").word == FAILED


@pytest.mark.parametrize(
    "entry",
    [
        pytest.param({}, id="nothing"),
        pytest.param({"5": {"logprob": -1.0}}, id="another token"),
        pytest.param(None, id="null"),
        pytest.param({"x": {"logprob": -1.0}}, id="no id"),
        pytest.param({"1": {"logprob": None}}, id="no number"),
        pytest.param({"1": {"logprob": float("nan")}}, id="NaN"),
        pytest.param({"1": {"logprob": float("-inf")}}, id="infinite"),
        pytest.param({"1": {"logprob": 10**400}}, id="too large for a float"),
        pytest.param({"1": {"logprob": -(10**400)}}, id="too small for a float"),
        pytest.param({"1": {"logprob": "-1"}}, id="text"),
    ],
)
def test_invalid_log_probabilities_fail(target: Target, entry: Any) -> None:
    target.says[1] = (200, {"choices": [{"prompt_token_ids": [1], "token_ids": [1]}]})
    target.says[2] = (200, {"choices": [{"prompt_logprobs": [None, entry]}]})
    assert judge(Engine(target.url), SETTINGS, "one").word == FAILED
    target.says |= {3: target.says[1], 4: (200, {"choices": [{"prompt_logprobs": [None]}]})}
    assert judge(Engine(target.url), SETTINGS, "one").word == FAILED


def test_engine_error_on_retry_is_unconfirmed(target: Target) -> None:
    target.gaps = [5.0]
    target.says[3] = BROKEN
    found = judge(Engine(target.url), SETTINGS, "one")
    assert found.word == UNCONFIRMED
    assert "500" in found.details


def test_oversized_response_fails(target: Target) -> None:
    target.says[1] = (200, b" " * (2**21 + 1))
    assert judge(Engine(target.url), SETTINGS, "one").word == FAILED


def test_api_key_is_sent_and_certificate_is_not_verified(tmp_path: Path) -> None:
    target = Target(key="secret")
    server = _server(target)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    write_certificate(tmp_path)
    context.load_cert_chain(tmp_path / "tls.crt", tmp_path / "tls.key")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    with serving(server):
        url = f"https://127.0.0.1:{server.server_port}"
        assert judge(Engine(url, "secret"), SETTINGS, "one").word == RIGHT
        assert judge(Engine(url), SETTINGS, "one").word == UNSUPPORTED


class Told:
    """What a sidecar tells the recorder."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []
        self.broken = False

    def __call__(self, line: dict[str, Any]) -> None:
        if self.broken:
            raise ConnectionRefusedError
        self.lines.append(line["canary"])

    @property
    def asked(self) -> list[tuple[str, str]]:
        """Prompts and verdicts."""
        names = {digest(each): each for each in ("one", "two", "three")}
        return [(names[each["prompt"]], each["verdict"]) for each in self.lines]


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def settings_file(tmp_path: Path) -> Path:
    return tmp_path / "canaries.json"


@pytest.fixture
def canaries(target: Target, told: Told, settings_file: Path) -> Canaries:
    return Canaries(Engine(target.url), settings_file, told)


def test_prompts_are_spread_over_the_interval(canaries: Canaries, told: Told, settings_file: Path) -> None:
    canaries.step(0)
    assert told.asked == [], "no file, no canaries"
    settings_file.write_text(json.dumps(FILE))
    for now_s in (1, 2, 50, 51, 100, 101):
        canaries.step(now_s)
    assert told.asked == [("one", RIGHT), ("two", RIGHT), ("one", RIGHT)]


def test_settings_change_takes_effect_at_once(
    canaries: Canaries, told: Told, settings_file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings_file.write_text(json.dumps({**FILE, "prompts": ["one"]}))
    canaries.step(0)
    _replace(settings_file, json.dumps({**FILE, "prompts": ["three"]}))
    canaries.step(1)
    _replace(settings_file, "{}")
    canaries.step(2)
    canaries.step(200)
    settings_file.unlink()
    canaries.step(400)
    assert told.asked == [("one", RIGHT), ("three", RIGHT)]
    assert capfd.readouterr().err.count("canaries.json is ignored") == 1


def _replace(file: Path, text: str) -> None:
    """Replace a file as the kubelet does: the new one is another file."""
    new = file.with_name("new")
    new.write_text(text)
    new.replace(file)


def test_settings_that_could_not_be_read_for_a_while_take_effect_again(
    canaries: Canaries, told: Told, settings_file: Path
) -> None:
    settings_file.write_text(json.dumps(FILE))
    canaries.step(0)
    settings_file.rename(settings_file.with_name("moved"))
    canaries.step(1)
    settings_file.with_name("moved").rename(settings_file)
    canaries.step(2)
    assert told.asked == [("one", RIGHT), ("two", RIGHT)]


def test_unhealthy_engine_is_not_asked(canaries: Canaries, told: Told, settings_file: Path, target: Target) -> None:
    settings_file.write_text(json.dumps(FILE))
    target.healthy = False
    canaries.step(0)
    canaries.step(20)
    assert target.received == []
    target.healthy = True
    canaries.step(29)
    assert target.received == [], "it may recover"
    canaries.step(30)
    assert told.asked == [("one", RIGHT)]
    gone = Canaries(Engine("http://127.0.0.1:1"), settings_file, told)
    gone.step(0)
    assert len(told.lines) == 1


def test_verdicts_are_logged_and_sent_to_recorder(
    canaries: Canaries, told: Told, settings_file: Path, target: Target, capfd: pytest.CaptureFixture[str]
) -> None:
    settings_file.write_text(json.dumps(FILE))
    target.gaps = [3.0, 3.0]
    canaries.step(0)
    target.says = {5: NO_LOGPROBS}
    canaries.step(100)
    told.broken = True
    canaries.step(200)
    assert told.asked == [("one", WRONG), ("two", UNSUPPORTED)]
    assert told.lines[0]["reason"] is None
    assert "max allowed: 0" in told.lines[1]["reason"]
    logged = capfd.readouterr().err
    assert f"{digest('one')}: wrong: token 3" in logged
    assert "3.00 nats" in logged
    assert "a verdict is lost" in logged


def test_verdict_line_reaches_first_live_recorder(tmp_path: Path) -> None:
    received: list[bytes] = []

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            received.append(self.rfile.read())

    with pytest.raises(FileNotFoundError):
        tell_recorder(tmp_path, {})
    with socket.socket(socket.AF_UNIX) as gone:
        gone.bind(str(tmp_path / "1.sock"))
    with pytest.raises(ConnectionRefusedError):
        tell_recorder(tmp_path, {})
    line = line_of("one", Verdict(RIGHT))
    with socketserver.UnixStreamServer(str(tmp_path / "2.sock"), Handler) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        tell_recorder(tmp_path, line)
        thread.join()
    assert received == [json.dumps(line).encode() + b"\n"]


def test_canary_thread_runs_until_stopped(canaries: Canaries, told: Told, settings_file: Path) -> None:
    settings_file.write_text(json.dumps(FILE))
    stopped = threading.Event()
    thread = threading.Thread(target=canaries.run, args=(stopped,))
    thread.start()
    eventually(lambda: told.lines, "a verdict is sent")
    stopped.set()
    thread.join()
    assert told.asked == [("one", RIGHT)]


def test_unexpected_error_is_logged_and_does_not_end_the_thread(
    target: Target, told: Told, settings_file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings_file.write_text(json.dumps(FILE))
    rounds = Rounds(2)

    def tell(line: dict[str, Any]) -> None:
        told(line)
        settings_file.unlink()
        settings_file.write_text(json.dumps({**FILE, "prompts": ["three"]}))
        raise RuntimeError("of the recorder")

    Canaries(Engine(target.url), settings_file, tell).run(rounds)
    assert told.asked == [("one", RIGHT), ("three", RIGHT)]
    assert "canary: error: unexpected error: RuntimeError: of the recorder" in capfd.readouterr().err


def test_sidecar_program_asks_engine_and_sends_verdict_to_recorder(target: Target, tmp_path: Path) -> None:
    (tmp_path / "recorder.zip").write_bytes(RECORDER.zipped())
    (tmp_path / "canaries.json").write_text(json.dumps(FILE))
    target.key = "secret"
    received: list[bytes] = []

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            received.append(self.rfile.read())

    env = os.environ | {"SPECDECODE_ENGINE_URL": target.url, "VLLM_API_KEY": target.key}
    command = [sys.executable, "-I", str(tmp_path / "recorder.zip"), str(tmp_path), str(tmp_path)]
    with socketserver.UnixStreamServer(str(tmp_path / "1.sock"), Handler) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        process = subprocess.Popen(command, env=env)
        try:
            thread.join(DEADLINE_S)
        finally:
            process.kill()
            process.wait()
    assert [json.loads(line) for line in received] == [line_of("one", Verdict(RIGHT))]


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("prompts", [], "prompts"),
        ("prompts", ["x"] * 17, "prompts"),
        ("prompts", ["x" * 2001], "prompts"),
        ("prompts", [1], "prompts"),
        ("max_tokens", 0, "max_tokens"),
        ("max_tokens", 257, "max_tokens"),
        ("interval_s", True, "interval_s"),
        ("interval_s", "60", "interval_s"),
        ("margin_nats", float("nan"), "margin_nats"),
        ("model", "", "model"),
        ("more", 1, "not an object with"),
    ],
)
def test_invalid_settings_name_the_field(field: str, value: Any, says: str) -> None:
    with pytest.raises(BadSettingsError, match=says):
        read_settings(json.dumps({**FILE, field: value}).encode())


def test_settings_that_are_not_json_are_invalid() -> None:
    for text in (b"{", b"\xff", b"[" * 100_000, b" " * (2**19 + 1)):
        with pytest.raises(BadSettingsError):
            read_settings(text)
    assert read_settings(json.dumps(FILE).encode()) == SETTINGS


def test_the_module_needs_only_the_standard_library() -> None:
    """The sidecar runs it with the python3 of the engine's image, isolated from the image's packages."""
    module = Path(canary_metrics.__file__).with_name("canary.py")
    done = subprocess.run([sys.executable, "-I", "-S", str(module)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_verdicts_are_published_as_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    for verdict in (Verdict(RIGHT), Verdict(RIGHT), Verdict(WRONG), Verdict(UNSUPPORTED, 'HTTP 400: "no"')):
        publish(line_of("one", verdict)["canary"])
    page = generate_latest(REGISTRY).decode()
    for word, count in ((RIGHT, 2), (WRONG, 1), (UNSUPPORTED, 1)):
        labels = f'prompt="{digest("one")}",verdict="{word}"'
        assert f"{canary_metrics.ANSWERS}_total{{{labels}}} {count}.0" in page
    assert f'{canary_metrics.REFUSED}{{reason="HTTP 400: \\"no\\""}} 1.0' in page
    # The operator reads them by these names.
    samples = {each.name for each in read_exposition(page, {CANARY_ANSWERS, CANARY_REFUSED}).samples}
    assert samples == {CANARY_ANSWERS, CANARY_REFUSED}
    publish(line_of("one", Verdict(RIGHT))["canary"])
    assert f'{canary_metrics.REFUSED}{{reason="HTTP 400: \\"no\\""}} 0.0' in generate_latest(REGISTRY).decode()


@pytest.mark.parametrize(
    "canary",
    [
        None,
        {},
        {"prompt": "0" * 8, "verdict": "right"},
        {"prompt": "0" * 9, "verdict": "right", "reason": None},
        {"prompt": "0" * 8, "verdict": "good", "reason": None},
        {"prompt": "0" * 8, "verdict": ["right"], "reason": None},
        {"prompt": "0" * 8, "verdict": "right", "reason": "x"},
        {"prompt": "0" * 8, "verdict": "unsupported", "reason": None},
        {"prompt": "0" * 8, "verdict": "unsupported", "reason": "x" * 201},
        {"prompt": "0" * 8, "verdict": "unsupported", "reason": "a\nb"},
    ],
)
def test_invalid_verdict_line_is_rejected(canary: Any) -> None:
    with pytest.raises(ValueError, match="canary"):
        publish(canary)


def test_every_verdict_can_be_published() -> None:
    for word in VERDICTS:
        publish(line_of("every", Verdict(word, "why" if word == UNSUPPORTED else "details\nof the log"))["canary"])


def test_counters_of_several_processes_add_up(tmp_path: Path) -> None:
    told = [
        "from specdecode_operator.capture.recorder.canary import *",
        "from specdecode_operator.capture.recorder.canary_metrics import publish",
        "publish(line_of('one', Verdict('right'))['canary'])",
    ]
    read = [
        "from prometheus_client import CollectorRegistry, generate_latest",
        "from prometheus_client.multiprocess import MultiProcessCollector",
        "registry = CollectorRegistry(); MultiProcessCollector(registry)",
        "print(generate_latest(registry).decode())",
    ]
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    pages = [
        subprocess.run(
            [sys.executable, "-c", "\n".join(script)], env=environment, capture_output=True, text=True, check=True
        ).stdout
        for script in (told, told, read)
    ]
    assert f'specdecode:canary_answers_total{{prompt="{digest("one")}",verdict="right"}} 2.0' in pages[-1]
