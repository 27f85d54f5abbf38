"""Figures of an object: from Prometheus, else from its engines."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock
from urllib.parse import parse_qs, urlsplit

import pytest

from specdecode_operator.api.deployment import Key
from specdecode_operator.api.deployment_status import FiguresSource, FiguresStatus, FigureStatus
from specdecode_operator.cluster import observed_figures
from specdecode_operator.cluster.bounded_fetch import in_time
from specdecode_operator.cluster.observed_figures import FiguresReader, KeptFigures, Prometheus
from specdecode_operator.stats.figures import SampleBuffer, find_figure
from specdecode_operator.stats.measures import Scope
from tests.support.figure_cases import hear, page
from tests.unit.cli.test_metrics import NOBODY, answering

KEY = Key("n", "d")
SCOPE = Scope(window="300s", namespace="n", deployment="d")
NOW_S = 1000.0


class Clock:
    """Time that passes when the test says so."""

    now_s = NOW_S

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(observed_figures, "time", made)
    return made


@pytest.fixture
def looks() -> SampleBuffer:
    made = SampleBuffer()
    for at_s, minute in ((NOW_S - 300, 10), (NOW_S, 15)):
        for pod in ("a", "b"):
            hear(made, pod, page(pod, minute), at_s)
    return made


def series(value: str, **labels: str) -> bytes:
    named = {"namespace": "n", "specdecode_deployment": "d", **labels}
    result = [{"metric": named, "value": [0, value]}]
    return json.dumps({"status": "success", "data": {"resultType": "vector", "result": result}}).encode()


NOTHING = json.dumps({"status": "success", "data": {"resultType": "vector", "result": []}}).encode()


@contextmanager
def prometheus(answer: Callable[[str], tuple[int, bytes]]) -> Iterator[tuple[str, list[str | None]]]:
    """A Prometheus that answers queries; yields its URL and the tokens that it was shown."""
    tokens = []

    def get(request: BaseHTTPRequestHandler) -> tuple[int, bytes]:
        tokens.append(request.headers["Authorization"])
        return answer(parse_qs(urlsplit(request.path).query)["query"][0])

    with answering(get) as url:
        yield url, tokens


def values(status: FiguresStatus) -> dict[str, str]:
    return {each.name: each.value for each in status.values}


@pytest.mark.usefixtures("clock")
async def test_figures_are_read_from_engines_without_prometheus(looks: SampleBuffer) -> None:
    status = await FiguresReader().read(KEY, looks)
    assert status is not None
    assert (status.source, status.message, status.over_seconds) == (FiguresSource.PODS, None, 300)
    told = values(status)
    assert (told["output_tokens_per_second"], told["acceptance_rate"]) == ("12", "0.5")
    assert told["acceptance_rate_by_position"] == "0.7 0.5"
    assert await FiguresReader().read(KEY, SampleBuffer()) is None


@pytest.mark.usefixtures("clock")
async def test_figures_are_read_from_prometheus_with_the_same_definitions(looks: SampleBuffer, tmp_path: Path) -> None:
    answers = {
        find_figure("acceptance_rate").promql(SCOPE): series("0.25"),
        find_figure("mean_acceptance_length").promql(SCOPE): series("NaN"),
    }
    (tmp_path / "token").write_text("secret\n")
    with prometheus(lambda query: (200, answers.get(query, NOTHING))) as (url, tokens):
        status = await FiguresReader(Prometheus(url, tmp_path / "token")).read(KEY, looks)
    assert status is not None
    assert (status.source, status.message, status.over_seconds) == (FiguresSource.PROMETHEUS, None, 300)
    assert values(status) == {"acceptance_rate": "0.25"}, "NaN says nothing"
    assert set(tokens) == {"Bearer secret"}


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (401, b"", "rejects the request with HTTP 401: set --prometheus-token-file"),
        (503, b"starting", "answers with HTTP 503"),
        (200, b"hello", "not a Prometheus"),
        (200, NOTHING, "has no series with namespace=n and specdecode_deployment=d"),
        (200, series("1", namespace="other"), "returns series of other/d"),
        (200, series("NaN"), "has no series with"),
    ],
)
@pytest.mark.usefixtures("clock")
async def test_unusable_prometheus_falls_back_to_engines_with_a_message(
    looks: SampleBuffer, status: int, body: bytes, said: str
) -> None:
    alone = await FiguresReader().read(KEY, looks)
    with prometheus(lambda _: (status, body)) as (url, _):
        found = await FiguresReader(Prometheus(url)).read(KEY, looks)
    assert alone is not None
    assert found is not None
    assert found.source is FiguresSource.PODS
    assert said in str(found.message)
    assert found.values == alone.values


@pytest.mark.usefixtures("clock")
async def test_password_in_prometheus_url_is_not_shown(looks: SampleBuffer) -> None:
    found = await FiguresReader(Prometheus(NOBODY.replace("//", "//me:hunter2@"))).read(KEY, looks)
    assert found is not None
    assert "does not answer" in str(found.message)
    assert "hunter2" not in str(found.message)


@pytest.mark.usefixtures("clock")
async def test_missing_prometheus_token_is_reported(looks: SampleBuffer, tmp_path: Path) -> None:
    for file in (tmp_path / "absent", tmp_path):
        found = await FiguresReader(Prometheus(NOBODY, file)).read(KEY, looks)
        assert found is not None
        assert f"--prometheus-token-file: {file} contains no token" in str(found.message)


async def test_slow_prometheus_delays_one_object_and_is_then_skipped_for_a_while(
    looks: SampleBuffer, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observed_figures, "_DEADLINE_S", 0.05)
    given_up, asked = threading.Event(), []

    def answer(_: str) -> tuple[int, bytes]:
        given_up.wait(60)
        return 200, series("0.25")

    def counted(url: str, *given: Any) -> Any:
        asked.append(url)
        return in_time(url, *given)

    monkeypatch.setattr(observed_figures, "in_time", counted)

    with prometheus(answer) as (url, _):
        reader = FiguresReader(Prometheus(url))
        for name in ("d", "e", "f"):
            found = await reader.read(Key("n", name), looks)
            assert found is not None
            assert found.source is FiguresSource.PODS
            assert "does not answer within" in str(found.message)
        assert len(asked) == 1
        given_up.set()
        monkeypatch.setattr(observed_figures, "_DEADLINE_S", 60)
        clock.now_s += 61
        found = await reader.read(KEY, looks)
    assert found is not None
    assert found.source is FiguresSource.PROMETHEUS


def break_off() -> tuple[int, bytes]:
    raise ConnectionAbortedError


@pytest.mark.parametrize(
    "answer",
    [
        break_off,
        lambda: (503, b"overloaded"),
        lambda: (503, b'{"status":"error","errorType":"timeout","error":"query timed out"}'),
        lambda: (500, NOTHING),
        lambda: (429, b"Too many requests"),
    ],
    ids=["breaks off", "503", "503 of Prometheus", "500", "429"],
)
async def test_failing_prometheus_is_retried_after_a_while_not_per_object(
    looks: SampleBuffer, clock: Clock, answer: Callable[[], tuple[int, bytes]]
) -> None:
    with prometheus(lambda _: answer()) as (url, asked):
        reader = FiguresReader(Prometheus(url))
        at_first = await reader.read(Key("n", "d"), looks)
        questions = len(asked)
        then = await reader.read(Key("n", "e"), looks)
        assert len(asked) == questions > 0
        assert at_first is not None
        assert then is not None
        assert then.message == at_first.message
        clock.now_s += 61
        await reader.read(Key("n", "f"), looks)
        assert len(asked) > questions


@pytest.mark.parametrize(("said", "moved"), [("100.9", False), ("103", True), ("100 100", True), ("hello", True)])
async def test_figures_are_updated_only_if_one_changed(
    monkeypatch: pytest.MonkeyPatch, said: str, *, moved: bool
) -> None:
    def of(value: str, over_s: int) -> FiguresStatus:
        told = [FigureStatus(name="output_tokens_per_second", value=value)]
        return FiguresStatus(source=FiguresSource.PODS, over_seconds=over_s, values=told)

    reader, before, now = FiguresReader(), of("100", 60), of(said, 300)
    monkeypatch.setattr(reader, "read", AsyncMock(return_value=now))
    kept = KeptFigures()
    assert await reader.update(KEY, kept, before, NOW_S) is moved
    assert kept.shown == (now if moved else before)
    assert not await reader.update(KEY, kept, before, NOW_S), "they are read once per window"
