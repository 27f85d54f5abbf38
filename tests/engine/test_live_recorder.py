"""Live captures of a busy vLLM, through the sidecar: its counters, its scheduler and its users agree with them."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from specdecode_operator.api.deployment import SpecDecodeDeploymentSpec
from specdecode_operator.capture.recorder.salting import Salt
from specdecode_operator.deployment.canaries import canaries_json
from specdecode_operator.deployment.live_recorder import CANARIES_ENTRY
from specdecode_operator.deployment.spec_facts import gather_facts
from specdecode_operator.vllm.engine_metrics import CanaryReading, read_metrics
from specdecode_operator.vllm.profiles import find_profile
from tests.engine.engine_process import Engine
from tests.engine.engine_versions import SERVED
from tests.engine.live_traffic import Collector, Received, Users, wait_for_traffic
from tests.engine.recorder_checks import SPECULATION, chunks_of, speculation
from tests.engine.recorder_server import Line, Server, serving
from tests.support import plain_http
from tests.support.small_pair import small_pair
from tests.support.waiting import eventually

KEY = "5a" * 32
KINDS = ("plain", "plain-too", "stopped", "pair", "leaver")


def arm(sample_percent: int) -> Line:
    more = {"token_ids": False, "prompt_token_ids": False, "steps": True}
    return {"arm": {"salt": KEY, "sample_percent": sample_percent, **more}}


@contextmanager
def live_serving(engine: Engine, models: Path, collector: Collector, *options: str) -> Iterator[Server]:
    """Start an engine that is ready for live captures, and a sidecar beside it that can ask it."""
    folder, sockets = collector.sockets.parent / "engine", str(collector.sockets)
    with (
        serving(engine, models, folder, *options, SPECDECODE_RECORD_DIR="", SPECDECODE_LIVE_DIR=sockets) as server,
        collector.beside(engine, SPECDECODE_ENGINE_URL=server.url),
    ):
        yield server


@pytest.fixture(scope="module")
def live(engine: Engine, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Collector, Server]]:
    """Serve with an idle recorder. Each test dismisses it at its end."""
    collector = Collector(tmp_path_factory.mktemp("live"))
    with live_serving(engine, models, collector) as server:
        yield collector, server


def of_kind(lines: list[Line], kind: str) -> list[Line]:
    return [line for line in lines if line["k"] == kind]


def is_armed(lines: list[Line]) -> bool:
    return len(of_kind(lines, "counters")) == 1


def enough(lines: list[Line]) -> bool:
    return len(of_kind(lines, "request")) >= 12


def assert_counted_as_by_vllm(lines: list[Line]) -> Line:
    """Fail unless what the recorder counted is what vLLM counted, exactly; return the tally."""
    first, last = (line["values"] for line in of_kind(lines, "counters"))
    counted = {key: last[key] - first[key] for key in last}
    (tally,) = of_kind(lines, "tally")
    assert tally["finished"] == counted["requests_finished"] > 0
    assert tally["generated_tokens"] == counted["generation_tokens"] > 0
    from_steps = speculation(of_kind(lines, "step"))
    assert {key: from_steps[f"{SPECULATION}{key}_total"] for key in ("drafts", "draft_tokens", "accepted_tokens")} == {
        key: counted[key] for key in ("drafts", "draft_tokens", "accepted_tokens")
    }
    assert tally["admitted"] == tally["recorded"] + tally["sampled_out"] + tally["dropped"]
    assert (tally["dropped"], tally["recorded"]) == (0, len(of_kind(lines, "request")))
    assert (lines[-1]["k"], lines[-1]["reason"], lines[-1]["first_error"]) == ("closed", "ordered", None)
    return tally


def assert_records_are_what_happened(lines: list[Line], users: Users, server: Server) -> None:
    """Fail unless each record has the chunks that the scheduler handed out, and the tokens that its user counted."""
    salt = Salt(bytes.fromhex(KEY))
    observed = {salt.pseudonym(request_id): chunks for request_id, chunks in server.observed().items()}
    by_user: Counter[str] = Counter()
    cut: Counter[str] = Counter()
    for record in of_kind(lines, "request"):
        chunks = observed.get(record["id"], [])
        assert chunks_of(record) == chunks[: len(record["chunk_s"])]
        if record["ended_by"] == "engine":
            assert len(chunks) == len(record["chunk_s"])
        by_user[record["external_id"]] += sum(record["chunk_tokens"])
        if "kept_tokens" in record:
            cut[record["external_id"]] = record["chunk_tokens"][-1] - record["kept_tokens"]
    for asked in users.asked:
        name = salt.pseudonym(asked.name)
        if name in by_user and asked.tokens is not None:
            assert by_user[name] - cut[name] == asked.tokens, asked


def armed(collector: Collector, sample_percent: int) -> Received:
    """Return a connection that records. A recorder that has not seen the end of the last one refuses it at first."""
    while True:
        received = collector.accept()
        assert (received.hello["pod"], received.hello["sockets"]) == ("tiny-0", 1)
        received.send(arm(sample_percent))
        received.read(lambda lines: is_armed(lines) or bool(of_kind(lines, "refused")))
        if is_armed(received.lines):
            return received
        assert received.lines[0]["reason"] == "another connection is armed"
        received.close()


def recorded_window(received: Received, users: Users) -> list[Line]:
    """Record for a while, and disarm; return all lines."""
    wait_for_traffic(users, 15)
    received.read(enough)
    received.send({"disarm": {"drain_s": 60.0}})
    return received.read()


def test_live_captures_of_a_busy_engine_match_counters_and_users(live: tuple[Collector, Server]) -> None:
    collector, server = live
    users = Users(server.url)
    with users.busy(KINDS):
        wait_for_traffic(users, 5)
        windows = []
        for sample_percent in (100, 50, 100):
            collector.call()
            received = armed(collector, sample_percent)
            lines = recorded_window(received, users)
            received.close()
            windows.append(lines)
            # Cut in the middle: the engine forgets, serves on, and can be armed again.
            cut = armed(collector, 100)
            wait_for_traffic(users, 3)
            cut.close()
            collector.dismiss()
        wait_for_traffic(users, 5)

    assert {asked.status for asked in users.asked} == {200}
    tallies = [assert_counted_as_by_vllm(lines) for lines in windows]
    for lines in windows:
        assert_records_are_what_happened(lines, users, server)
    assert {line["ended_by"] for lines in windows for line in of_kind(lines, "request")} == {
        "engine",
        "stop_string",
        "abort",
    }
    assert tallies[1]["sampled_out"] > 0
    header = windows[1][0]
    assert (header["live"], header["sample_percent"], header["block_hash"]) == (True, 50, "blake2b-salted")
    assert len({lines[0]["boot"] for lines in windows}) == 3
    text = repr(windows)
    assert not any(kind in text for kind in KINDS)


def test_canaries_are_counted_and_not_recorded(live: tuple[Collector, Server]) -> None:
    spec = small_pair()["spec"]
    spec["serving"]["servedModelNames"] = ["tiny"]
    spec["policy"] = {"canaries": {"intervalSeconds": 86_400, "prompts": ["The capital of Italy is"]}}  # asked once
    canaries = canaries_json(gather_facts(SpecDecodeDeploymentSpec.parse(spec)))
    assert canaries is not None
    collector, server = live
    users = Users(server.url)

    def told() -> CanaryReading | None:
        page = plain_http.get(f"{server.url}/metrics", timeout=120).text
        return read_metrics(page, find_profile(SERVED)).canaries

    collector.call()
    with users.busy(("other", "another")):
        received = armed(collector, 100)
        (collector.folder / CANARIES_ENTRY).write_text(canaries)
        eventually(told, "the answer is judged")
        received.read(enough)
        received.send({"disarm": {"drain_s": 60.0}})
        lines = received.read()
    received.close()
    collector.dismiss()
    assert told() == CanaryReading(right=1)
    tally = assert_counted_as_by_vllm(lines)
    assert tally["sampled_out"] == 2, "the question, and its check"
    salt = Salt(bytes.fromhex(KEY))
    by_users = {salt.pseudonym(asked.name) for asked in users.asked}
    assert {record["external_id"] for record in of_kind(lines, "request")} <= by_users


@pytest.mark.long
def test_each_api_server_counts_its_own_requests(engine: Engine, models: Path, tmp_path: Path) -> None:
    """vLLM's counters are in one folder for all API servers; each recorder reads those of its own process."""
    collector = Collector(tmp_path)
    with live_serving(engine, models, collector, "--api-server-count=2") as server:
        users = Users(server.url)
        with users.busy(KINDS):
            collector.call()
            both = [collector.accept() for _ in range(2)]
            assert [received.hello["sockets"] for received in both] == [2, 2]
            for received in both:
                received.send(arm(100))
                received.read(is_armed)
            wait_for_traffic(users, 60)
            for received in both:
                received.send({"disarm": {"drain_s": 60.0}})
            windows = [received.read() for received in both]
        steps: Counter[str] = Counter()
        drafts: Counter[str] = Counter()
        for lines in windows:
            first, last = (line["values"] for line in of_kind(lines, "counters"))
            (tally,) = of_kind(lines, "tally")
            assert tally["finished"] == last["requests_finished"] - first["requests_finished"] > 0
            assert tally["generated_tokens"] == last["generation_tokens"] - first["generation_tokens"]
            steps += Counter({"drafts": speculation(of_kind(lines, "step"))[f"{SPECULATION}drafts_total"]})
            drafts += Counter({"drafts": int(last["drafts"] - first["drafts"])})
            assert_records_are_what_happened(lines, users, server)
        assert steps == drafts
        assert {asked.status for asked in users.asked} == {200}
