"""The recorder's part of an update: requests wait only while workers load, and a failure returns the old head."""

import asyncio
import itertools
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY, generate_latest

from specdecode_operator.capture.recorder import head_metrics, head_update
from specdecode_operator.capture.recorder.head_update import Head, HeadUpdater, Judged, engine_under_construction
from specdecode_operator.vllm.engine_metrics import HEAD_PAUSE, HEAD_UPDATE, read_exposition

ORDER = Head("/drafts/heads", "team/new/head", "ab" * 32)
RIGHT = Judged("right", "")
EXTENSION = "specdecode_operator.capture.recorder.head_loader.HeadLoader"


class AsyncLLM:
    """An engine with two workers."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.output_handler = SimpleNamespace(get_loop=lambda: loop)
        self.calls: list[str] = []
        self.heads = ["old", "old"]
        self.read: list[list[str | None]] = [[None, ""], ["", ""]]
        self.fails: set[int] = set()
        """Workers that cannot load the new head."""
        self.seen_by = engine_under_construction()

    async def pause_generation(self, **_: Any) -> None:
        self.calls.append("pause")

    async def resume_generation(self) -> None:
        self.calls.append("resume")

    async def reset_prefix_cache(self, **options: bool) -> None:
        assert options == {"reset_running_requests": True, "reset_connector": True}
        self.calls.append("reset")

    async def collective_rpc(self, method: str, args: tuple[str, ...] = ()) -> list[Any]:
        if method == "specdecode_is_read":
            return self.read.pop(0)
        if method != "specdecode_load_head":
            self.calls.append(method.removeprefix("specdecode_"))
            return [None, None]
        (which,) = args
        self.calls.append(which)
        failed = self.fails if which == "new" else set()
        self.heads = ["old" if rank in failed else which for rank in range(2)]
        return ["OutOfMemoryError: GPU 0" if rank in failed else "" for rank in range(2)]


@pytest.fixture
def engine() -> Iterator[AsyncLLM]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield AsyncLLM(loop)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture(autouse=True)
def _own_metrics() -> Iterator[None]:
    head_metrics._metrics.cache_clear()
    yield
    if head_metrics._metrics.cache_info().currsize:
        metrics = head_metrics._metrics()
        REGISTRY.unregister(metrics._head)
        REGISTRY.unregister(metrics._pause)
    head_metrics._metrics.cache_clear()


def config(*, extension: str = EXTENSION, ranks: int = 1, caches: bool = True) -> Any:
    return SimpleNamespace(
        parallel_config=SimpleNamespace(worker_extension_cls=extension, data_parallel_size=ranks),
        cache_config=SimpleNamespace(enable_prefix_caching=caches),
    )


def followed(engine: Any, found: Any = None, verdict: Judged | None = RIGHT) -> list[dict[str, str]]:
    """Return the messages to the sidecar."""
    messages: list[dict[str, str]] = []
    HeadUpdater(engine, found or config()).follow(ORDER, lambda: verdict, messages.append)
    return messages


def published() -> dict[str, str]:
    """Labels of the last update in /metrics."""
    page = read_exposition(generate_latest(REGISTRY).decode(), frozenset((HEAD_UPDATE, HEAD_PAUSE)))
    (found,) = (each for each in page.samples if each.name == HEAD_UPDATE and each.value)
    return dict(found.labels)


def test_head_is_kept_if_the_answers_are_right(engine: AsyncLLM) -> None:
    assert [each["result"] for each in followed(engine)] == ["new", "kept"]
    assert engine.calls == ["read_head", "pause", "new", "reset", "resume", "end_update"]
    assert engine.read == [], "all workers have read the head"
    assert published() == {"sha256": ORDER.sha256, "result": "kept", "reason": ""}


@pytest.mark.parametrize(
    ("verdict", "result"),
    [(Judged("wrong", "token 3"), "reverted"), (Judged("unchecked", "HTTP 500"), "failed"), (None, "failed")],
)
def test_old_head_returns_unless_the_answers_are_right(engine: AsyncLLM, verdict: Judged | None, result: str) -> None:
    assert [each["result"] for each in followed(engine, verdict=verdict)] == ["new", result]
    assert engine.heads == ["old", "old"]
    assert engine.calls.count("resume") == 2
    assert engine.calls[-1] == "end_update"


def test_pause_includes_the_return_of_the_old_head(engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()
    clock = SimpleNamespace(monotonic=lambda: float(next(ticks)), sleep=lambda _: None)
    monkeypatch.setattr(head_update, "time", clock)
    followed(engine, verdict=Judged("wrong", "token 3"))
    assert REGISTRY.get_sample_value(HEAD_PAUSE) == 2, "one tick for each head"


def test_refused_head_does_not_pause_the_engine(engine: AsyncLLM) -> None:
    engine.read = [[None, None], ["", "a.weight: only in the new head"]]
    assert followed(engine) == [{"result": "refused", "reason": "a.weight: only in the new head"}]
    assert engine.calls == ["read_head", "end_update"]
    assert published()["result"] == "refused"


def test_all_workers_get_the_old_head_if_one_cannot_load_the_new_one(engine: AsyncLLM) -> None:
    engine.fails = {1}
    (told,) = followed(engine)
    assert (told["result"], "OutOfMemoryError" in told["reason"]) == ("failed", True)
    assert engine.heads == ["old", "old"]
    assert engine.calls[1:] == ["pause", "new", "old", "resume", "end_update"]


def test_old_head_returns_if_the_cache_is_not_reset(engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    async def reset(**_: bool) -> None:
        raise RuntimeError("cache")

    monkeypatch.setattr(engine, "reset_prefix_cache", reset)
    (told,) = followed(engine)
    assert told == {"result": "failed", "reason": "RuntimeError: cache"}
    assert engine.heads == ["old", "old"]
    assert engine.calls[-2:] == ["resume", "end_update"]


def test_cache_without_prefixes_is_not_reset(engine: AsyncLLM) -> None:
    followed(engine, config(caches=False))
    assert "reset" not in engine.calls


@pytest.mark.parametrize(
    ("found", "why"),
    [(config(extension=""), "without the extension"), (config(ranks=2), "data-parallel")],
)
def test_engine_without_support_refuses(engine: AsyncLLM, found: Any, why: str) -> None:
    (told,) = followed(engine, found)
    assert (told["result"], why in told["reason"]) == ("refused", True)


def test_engine_is_found_in_its_constructor(engine: AsyncLLM) -> None:
    assert engine.seen_by is engine
    assert engine_under_construction() is None
    assert followed(None)[0]["result"] == "refused"
