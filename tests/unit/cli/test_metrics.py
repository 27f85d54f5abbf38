"""`specdecode metrics`: engines that are looked at twice, a Prometheus, and what both may answer instead."""

import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from specdecode_operator.cli import metrics
from specdecode_operator.cluster import bounded_fetch
from tests.support.figure_cases import page
from tests.support.http_server import Quiet, serving
from tests.unit.cli.conftest import Specdecode

Answer = Callable[[BaseHTTPRequestHandler], tuple[int, bytes] | None]
"""Status and body; None from one that has written all of it."""
NOBODY = "http://127.0.0.1:9"
FIVE_MINUTES_S = 300


@contextmanager
def answering(answer: Answer) -> Iterator[str]:
    """Serve on the loopback; yields the URL."""

    class Handler(Quiet, BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            with suppress(OSError):
                said = answer(self)
                if said is not None:
                    status, body = said
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(body)))
                    self.end_headers()
                    self.wfile.write(body)

    with serving(HTTPServer(("127.0.0.1", 0), Handler)) as server:
        yield f"http://127.0.0.1:{server.server_port}"


@contextmanager
def engine(*pages: str | None) -> Iterator[str]:
    """An engine with one page after the other; None is one that is gone."""
    left = list(pages)

    def answer(_: BaseHTTPRequestHandler) -> tuple[int, bytes]:
        text = left.pop(0)
        return (404, b"") if text is None else (200, text.encode())

    with answering(answer) as url:
        yield url


class _Clock:
    """Time that only passes while somebody sleeps."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def sleep(self, seconds: float) -> None:
        self._now_s += seconds

    def monotonic(self) -> float:
        return self._now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the time between two looks pass at once."""
    monkeypatch.setattr(metrics, "time", _Clock())


def told(text: str) -> dict[str, dict[str, object]]:
    """Figures of an answer as JSON."""
    return {each["name"]: each for each in json.loads(text)["figures"]}


@pytest.mark.usefixtures("clock")
def test_engines_are_scraped_twice_and_summed(specdecode: Specdecode) -> None:
    with engine(page("a", 10), page("a", 15)) as a, engine(page("b", 10), page("b", 15)) as b:
        done = specdecode("metrics", "--engine", a, "--engine", b, "--over", FIVE_MINUTES_S, "-o", "json")
    assert done.exit_code == 0, done.output
    figures = told(done.stdout)
    assert figures["output_tokens_per_second"]["value"] == pytest.approx(12)
    assert figures["acceptance_rate"]["value"] == 0.5
    assert figures["acceptance_rate_by_position"]["by_position"] == pytest.approx({"0": 0.7, "1": 0.5})
    assert figures["kv_cache_usage"]["value"] == 0.75
    assert "time_to_first_token_within_limit" not in figures, "nobody said a limit"
    assert json.loads(done.stdout)["engines"] == 2


@pytest.mark.usefixtures("clock")
def test_engine_that_vanishes_between_scrapes_is_left_out_and_reported(specdecode: Specdecode) -> None:
    with engine(page("a", 10), page("a", 15)) as a, engine(page("b", 10), None) as b:
        done = specdecode("metrics", "--engine", a, "--engine", b, "--over", FIVE_MINUTES_S)
    assert done.exit_code == 0, done.output
    assert "of 1 engine over 300 s" in done.stdout
    assert "output_tokens_per_second          10 tokens/s" in done.stdout
    assert f"left out: {b}" in done.stderr
    assert "HTTP 404" in done.stderr


@pytest.mark.usefixtures("clock")
def test_engine_that_appears_between_scrapes_is_left_out_and_reported(specdecode: Specdecode) -> None:
    with engine(page("a", 10), page("a", 15)) as a, engine(None, page("b", 15)) as b:
        done = specdecode("metrics", "--engine", a, "--engine", b, "-o", "json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert (found["engines"], len(found["left_out"])) == (1, 1)
    assert found["left_out"][0].startswith(f"{b}: ")


@pytest.mark.usefixtures("clock")
def test_latency_limits_give_the_share_of_requests_within_them(specdecode: Specdecode) -> None:
    histogram = "vllm:time_to_first_token_seconds"
    text = f'# TYPE {histogram} histogram\n{histogram}_bucket{{le="1.0"}} %d\n{histogram}_bucket{{le="+Inf"}} %d\n'
    pages = [text % counts + f"{histogram}_count {counts[1]}\n" for counts in ((5, 10), (80, 110))]
    with engine(*pages) as url:
        done = specdecode("metrics", "--engine", url, "--ttft-limit", 1, "--tpot-limit", 0.05, "-o", "json")
    figures = told(done.stdout)
    assert figures["time_to_first_token_within_limit"]["value"] == 0.75
    assert figures["time_per_output_token_within_limit"]["value"] is None
    assert "no bucket" not in done.stderr, "no time per output token was seen at all"
    with engine(*pages) as url:
        other = specdecode("metrics", "--engine", url, "--ttft-limit", 0.33)
    assert "note: 0.33 is not a bucket of the time_to_first_token histogram" in other.stderr
    assert re.search("time_to_first_token_within_limit +-$", other.stdout, re.MULTILINE)


@pytest.mark.usefixtures("clock")
def test_engines_of_a_deployment_are_read_through_kubectl(
    specdecode: Specdecode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pod(name: str, ready: str, port: str) -> dict[str, object]:
        containers = [
            {"ports": [{"name": "metrics", "containerPort": 1}]},
            {"ports": [{"name": port, "containerPort": 8000}]},
        ]
        status = {"conditions": [{"type": "Ready", "status": ready}]}
        return {"metadata": {"name": name, "namespace": "team"}, "spec": {"containers": containers}, "status": status}

    pods = [pod("a", "True", "https"), pod("starts", "False", "http"), pod("odd", "True", "grpc")]
    (tmp_path / "pods.json").write_text(json.dumps({"kind": "List", "items": pods}))
    (tmp_path / "page").write_text(page("a", 15))
    kubectl = tmp_path / "kubectl"
    lines = (f'echo "$*" >>{tmp_path}/calls', 'case "$*" in *--raw*) answer=page ;; *) answer=pods.json ;; esac')
    kubectl.write_text("\n".join(("#!/bin/sh", *lines, f"cat {tmp_path}/$answer\n")))
    kubectl.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    done = specdecode("metrics", "llama", "-n", "team", "-o", "json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["engines"] == 1
    calls = (tmp_path / "calls").read_text().splitlines()
    assert "specdecode.io/deployment=llama" in calls[0]
    path = "/api/v1/namespaces/team/pods/https:a:8000/proxy/metrics"
    assert calls[1:] == [f"--namespace=team get --raw {path} --request-timeout=15s"] * 2
    (tmp_path / "pods.json").write_text(json.dumps({"kind": "List", "items": pods[1:]}))
    none = specdecode("metrics", "llama", "-n", "team")
    assert (none.exit_code, "llama has no ready engine" in none.output) == (2, True)


def test_prometheus_is_queried_with_the_token_for_one_deployment(specdecode: Specdecode, tmp_path: Path) -> None:
    queries = []

    def answer(request: BaseHTTPRequestHandler) -> tuple[int, bytes]:
        assert request.headers["Authorization"] == "Bearer secret"
        queries.append(parse_qs(urlsplit(request.path).query)["query"][0])
        series = {"metric": {"namespace": "models", "specdecode_deployment": "llama"}, "value": [0, "0.25"]}
        found = {"status": "success", "data": {"resultType": "vector", "result": [series]}}
        return 200, json.dumps(found).encode()

    (tmp_path / "token").write_text("secret\n")
    options = ("-n", "models", "--over", 60, "--token-file", tmp_path / "token", "-o", "json")
    with answering(answer) as url:
        done = specdecode("metrics", "llama", "--prometheus", f"{url}/", *options)
    assert done.exit_code == 0, done.output
    assert told(done.stdout)["acceptance_rate"]["value"] == 0.25
    chosen = 'namespace="models", specdecode_deployment="llama"'
    assert all(chosen in query for query in queries)
    assert any("[60s]" in query for query in queries)


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (401, b"", "rejects the request with HTTP 401: set --token-file"),
        (403, b"", "rejects the request with HTTP 403"),
        (302, b"", "answers with HTTP 302"),
        (503, b"starting", "answers with HTTP 503"),
        (400, b'{"status":"error","error":"bad query"}', "reports bad query"),
        (200, b"hello", "not a Prometheus"),
        (200, b'{"status":"success","data":{"resultType":"vector","result":[]}}', "no series with namespace=models"),
        # More than sockets buffer: the server is stuck unless the connection is closed.
        (200, b" " * (64 * 2**20), "answers with more than"),
    ],
)
def test_unusable_prometheus_response_is_an_error(specdecode: Specdecode, status: int, body: bytes, said: str) -> None:
    with answering(lambda _: (status, body)) as url:
        done = specdecode("metrics", "llama", "-n", "models", "--prometheus", url)
    assert done.exit_code == 2
    assert said in " ".join(done.output.split())
    assert "Traceback" not in done.output


def test_prometheus_with_an_endless_header_times_out(specdecode: Specdecode, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each letter of its head comes in time."""
    monkeypatch.setattr(bounded_fetch, "DEADLINE_S", 0.5)
    given_up = threading.Event()

    def answer(request: BaseHTTPRequestHandler) -> tuple[int, bytes]:
        request.wfile.write(b"HTTP/1.1 200 OK\r\nX: ")
        for _ in range(1000):
            if given_up.wait(0.02):
                break
            request.wfile.write(b"x")
        return 200, b""

    with answering(answer) as url:
        done = specdecode("metrics", "llama", "-n", "models", "--prometheus", url)
        given_up.set()
    assert (done.exit_code, "does not answer within" in done.output) == (2, True)


@pytest.mark.parametrize("option", ["--prometheus", "--engine"])
@pytest.mark.usefixtures("clock")
def test_password_in_a_url_is_not_shown(specdecode: Specdecode, option: str) -> None:
    name = ["llama", "-n", "models"] if option == "--prometheus" else []
    with answering(lambda _: (404, b"")) as url:
        done = specdecode("metrics", *name, option, url.replace("//", "//me:hunter2@"))
        assert f"{url}/" in done.output
    with answering(lambda _: (200, page("a", 1).encode())) as url:
        told = specdecode("metrics", "--engine", url.replace("//", "//me:hunter2@"), "-o", "json").stdout
    assert json.loads(told)["source"] == url
    assert "hunter2" not in done.output + told


@pytest.mark.parametrize(("file", "said"), [("/dev/zero", "is a device"), ("long", "contains no token")])
def test_token_file_that_is_a_device_or_too_long_is_refused(
    specdecode: Specdecode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("long").write_text("x" * 20_000)
    done = specdecode("metrics", "a", "-n", "n", "--prometheus", NOBODY, "--token-file", file)
    assert (done.exit_code, f"--token-file: {file}" in done.output, said in done.output) == (2, True, True)


def test_oversized_metrics_page_through_kubectl_is_refused(
    specdecode: Specdecode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pod = {
        "metadata": {"name": "a", "namespace": "team"},
        "spec": {"containers": [{"ports": [{"name": "http", "containerPort": 8000}]}]},
        "status": {"conditions": [{"type": "Ready", "status": "True"}]},
    }
    (tmp_path / "pods.json").write_text(json.dumps({"kind": "List", "items": [pod]}))
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(
        f'#!/bin/sh\ncase "$*" in *--raw*) head -c 5000000 /dev/zero ;; *) cat {tmp_path}/pods.json ;; esac\n'
    )
    kubectl.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    done = specdecode("metrics", "llama", "-n", "team")
    assert (done.exit_code, "a: the answer exceeds 4194304 bytes" in done.output) == (2, True)


def test_redirect_is_not_followed_with_the_token(specdecode: Specdecode, tmp_path: Path) -> None:
    asked = []

    def elsewhere(request: BaseHTTPRequestHandler) -> tuple[int, bytes]:
        asked.append(request.path)
        return 200, b""

    with answering(elsewhere) as other:

        def redirect(request: BaseHTTPRequestHandler) -> None:
            request.wfile.write(f"HTTP/1.1 307 Elsewhere\r\nLocation: {other}/\r\n\r\n".encode())

        (tmp_path / "token").write_text("secret")
        with answering(redirect) as url:
            options = ("--prometheus", url, "--token-file", tmp_path / "token")
            done = specdecode("metrics", "llama", "-n", "models", *options)
    assert (done.exit_code, "answers with HTTP 307: is this its URL?" in " ".join(done.output.split())) == (2, True)
    assert "secret" not in done.output
    assert asked == []


def test_token_file_is_used_and_netrc_is_ignored(
    specdecode: Specdecode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = []

    def answer(request: BaseHTTPRequestHandler) -> tuple[int, bytes]:
        given.append(request.headers["Authorization"])
        return 401, b""

    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password mine")
    (tmp_path / "netrc").chmod(0o600)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    (tmp_path / "token").write_text("secret")
    with answering(answer) as url:
        for options in ((), ("--token-file", tmp_path / "token")):
            specdecode("metrics", "llama", "-n", "models", "--prometheus", url, *options)
    assert given == [None, "Bearer secret"]


@pytest.mark.parametrize("token", ["sec\nret", "sec nret", ""])
def test_invalid_token_is_not_shown(specdecode: Specdecode, tmp_path: Path, token: str) -> None:
    (tmp_path / "token").write_text(token)
    done = specdecode("metrics", "a", "-n", "n", "--prometheus", NOBODY, "--token-file", tmp_path / "token")
    assert (done.exit_code, "contains no token" in " ".join(done.output.split())) == (2, True)
    assert "nret" not in done.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "NAME, --engine"),
        (("llama", "--engine", NOBODY), "NAME, --engine"),
        (("--engine", NOBODY, "--prometheus", NOBODY), "NAME, --engine"),
        (("llama", "--prometheus", NOBODY), "--namespace: required with --prometheus"),
        (("llama", "--token-file", "t"), "--token-file: requires --prometheus"),
        (("llama", "-n", "n", "--prometheus", NOBODY, "--token-file", "/none"), "--token-file: /none: No such file"),
        (('x"}) or vector(1', "-n", "n", "--prometheus", NOBODY), "is not a Kubernetes name"),
        (("llama", "-n", "n", "--prometheus", NOBODY), "does not answer"),
        (("llama", "-n", "n", "--prometheus", "file:///etc/passwd"), "does not answer"),
        (("llama", "-n", "n", "--prometheus", "prometheus:9090"), "does not begin with http:// or"),
        (("llama", "-n", "n", "--prometheus", "http://["), "does not answer"),
        (("--engine", NOBODY), "does not answer"),
        (("--engine", "http://[", "--over", "5"), "does not answer"),
        (("--engine", NOBODY, "--over", "0"), "must be greater than or equal to 1"),
    ],
)
def test_invalid_options_are_a_plain_error(specdecode: Specdecode, arguments: tuple[str, ...], said: str) -> None:
    done = specdecode("metrics", *arguments)
    assert done.exit_code == 2, done.output
    assert said in " ".join(done.output.replace("│", "").split())
    assert done.exception is None or isinstance(done.exception, SystemExit)
