"""Servers that are no hub, or a bad one: what they say is bounded, not believed, and told in our words."""

import json
import math
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event

import httpx
import pytest

from specdecode_operator.cli import hub
from specdecode_operator.cli.hub import Allowance, HubClient, HubSettings
from specdecode_operator.deployment.models.checkpoint_reader import CheckpointError
from tests.support.checkpoints import safetensors
from tests.support.http_server import Quiet, serving
from tests.support.loopback_hub import TOKEN, Hub
from tests.unit.cli.conftest import Specdecode, WriteObject
from tests.unit.cli.hub.conftest import FILES, SHARDS, alone

DEEP = b'{"a":' * 900 + b"1" + b"}" * 900
HOSTILE: dict[str, tuple[dict[str, bytes], str]] = {
    "no config": ({"config.json": None}, "no config.json"),
    "a large config": ({"config.json": b" " * 9 * 2**20}, "more than 8 MiB"),
    "a deep config": ({"config.json": DEEP}, "nested more than"),
    "a very deep config": ({"config.json": b"[" * 60_000}, "is not JSON"),
    "a config that is a list": ({"config.json": b"[]"}, "not an object"),
    "a header of 2^60": ({next(iter(SHARDS)): safetensors({}, 0, length=2**60)}, "more than 100,000,000"),
    "an index to elsewhere": (
        {"model.safetensors.index.json": b'{"weight_map": {"a": "../../../etc/passwd.safetensors"}}'},
        "are not in",
    ),
    "names that steer a terminal": (
        {next(iter(SHARDS)): safetensors({"\x1b[2J\u202e": 1}, 0)},
        r"describes tensor \x1b[2J",
    ),
}  # type: ignore[dict-item]


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files_end_in_a_sentence(specdecode: Specdecode, write: WriteObject, hub: Hub, case: str) -> None:
    changed, words = HOSTILE[case]
    hub.files = {name: content for name, content in {**FILES, **changed}.items() if content is not None}
    result = specdecode("plan", "-f", write("a.yaml", alone("acme/open")), "--hub")
    assert (result.exit_code, result.exception is None or isinstance(result.exception, SystemExit)) == (5, True)
    assert words in result.stdout
    assert "\x1b" not in result.output
    assert "\u202e" not in result.output


class Odd(ThreadingHTTPServer):
    """A server that answers everything in one odd way, and remembers what it was sent."""

    daemon_threads = True

    def __init__(self, way: str) -> None:
        super().__init__(("127.0.0.1", 0), OddHandler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.way = way
        self.elsewhere = ""
        self.tokens: list[str | None] = []
        self.done = Event()


class OddHandler(Quiet, BaseHTTPRequestHandler):
    server: Odd

    def do_GET(self) -> None:
        self.server.tokens.append(self.headers.get("Authorization"))
        match self.server.way:
            case "loop":
                self._send(302, b"", Location=f"{self.server.url}{self.path}x")
            case "elsewhere":
                self._send(302, b"", Location=f"{self.server.elsewhere}/x")
            case "file":
                self._send(302, b"", Location="file:///etc/passwd")
            case "silence":
                self.server.done.wait()
            case "compressed":
                self._send(200, b"\x1f\x8b" + b"0" * 100, **{"Content-Encoding": "gzip"})
            case "endless":
                self._send(200, b" " * (9 * 2**20))
            case "error":
                self._send(500, b"\x1b[2J secret words")
            case body:
                self._send(200, body.encode())

    def _send(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("loop", "redirects more than 5 times"),
        ("file", "cannot be reached, or does not speak HTTP"),
        ("compressed", "compresses"),
        ("endless", "lists no files"),
        ("error", "answers HTTP 500"),
        ("<html>", "lists no files"),
        ("[]", "lists no files"),
        ("[" * 100_000, "lists no files"),
        ('{"sha": "../..", "siblings": []}', "lists no files"),
        ('{"sha": "abcdef0123", "siblings": [{"rfilename": 3}]}', "lists no files"),
        ('{"sha": "abcdef0123", "siblings": [{"rfilename": "config.json", "size": -1}]}', "lists no files"),
        ('{"sha": "abcdef0123", "siblings": []}', "there is no config.json"),
    ],
)
def test_a_server_that_is_no_hub_is_told_in_our_words(
    specdecode: Specdecode, write: WriteObject, monkeypatch: pytest.MonkeyPatch, way: str, words: str
) -> None:
    with serving(Odd(way)) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        result = specdecode("plan", "-f", write("a.yaml", alone("acme/open")), "--hub")
    assert (result.exit_code, words in result.stdout) == (5, True)
    assert "secret" not in result.output


@pytest.mark.parametrize(("left", "at_once"), [(1000, 2**30), (2**30, 1000)])
def test_no_more_is_read_than_is_allowed_of_a_file_and_of_all(left: int, at_once: int) -> None:
    with serving(Odd("endless")) as server:
        hub = HubClient(HubSettings.of({"HF_ENDPOINT": server.url}))
        with pytest.raises(CheckpointError, match="more than a model's headers take"):
            hub.get("x", Allowance(math.inf, left, at_once), start=0, length=8 * 2**20)


@pytest.mark.parametrize(("answer", "words"), [(307, "redirects to an address without TLS"), (500, "HTTP 500")])
def test_no_redirect_leaves_tls(monkeypatch: pytest.MonkeyPatch, answer: int, words: str) -> None:
    asked = []

    def answered(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.scheme)
        return httpx.Response(answer, headers={"Location": "http://hub.invalid/x"})

    client = partial(httpx.AsyncClient, transport=httpx.MockTransport(answered))
    monkeypatch.setattr(httpx, "AsyncClient", client)
    hub = HubClient(HubSettings.of({"HF_ENDPOINT": "https://hub.invalid", "HF_TOKEN": "hf_secret"}))
    with pytest.raises(CheckpointError, match=words):
        hub.get("x", Allowance(math.inf, 2**20, 2**20), start=0, length=8)
    assert asked == ["https"], "nothing is sent in the clear"


@pytest.mark.parametrize(("files", "words"), [(4096, "there is no config.json"), (4097, "lists no files")])
def test_a_repository_has_so_many_files_at_most(
    specdecode: Specdecode, write: WriteObject, monkeypatch: pytest.MonkeyPatch, files: int, words: str
) -> None:
    listed = [{"rfilename": f"{each}.txt", "size": 1} for each in range(files)]
    with serving(Odd(json.dumps({"sha": "abcdef0123", "siblings": listed}))) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        result = specdecode("plan", "-f", write("a.yaml", alone("acme/open")), "--hub")
    assert (result.exit_code, words in result.stdout) == (5, True)


def test_what_was_read_counts_for_what_comes_after_it() -> None:
    with serving(Odd("endless")) as server:
        hub, allowance = HubClient(HubSettings.of({"HF_ENDPOINT": server.url})), Allowance(math.inf, 2**23, 2**30)
        assert len(hub.get("x", allowance, start=0, length=2**23)) == 2**23
        with pytest.raises(CheckpointError, match="more than a model's headers take"):
            hub.get("y", allowance, start=0, length=2**23)


def test_a_whole_file_is_not_taken_for_a_part_of_it() -> None:
    with serving(Odd("endless")) as server:
        hub = HubClient(HubSettings.of({"HF_ENDPOINT": server.url}))
        with pytest.raises(CheckpointError, match="does not send parts of files"):
            hub.get("x", Allowance(math.inf, 2**30, 2**30), start=1, length=8)


def test_a_server_that_never_answers_is_left(
    specdecode: Specdecode, write: WriteObject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "_DEADLINE_S", 0.05)
    with serving(Odd("silence")) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        result = specdecode("plan", "-f", write("a.yaml", alone("acme/open")), "--hub")
        server.done.set()
    assert (result.exit_code, "takes too long" in result.stdout) == (5, True)


def test_the_token_goes_to_the_hub_alone(
    specdecode: Specdecode, write: WriteObject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with serving(Odd("elsewhere")) as server, serving(Odd("{}")) as other:
        server.elsewhere = other.url.replace("127.0.0.1", "localhost")
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        specdecode("plan", "-f", write("a.yaml", alone("acme/open")), "--hub")
    assert (server.tokens, other.tokens) == ([f"Bearer {TOKEN}"], [None])
