"""The container that collects a live capture: permitted connections, the window, and the published files."""

import errno
import functools
import os
import resource
import signal
import stat
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from specdecode_operator.api.capture_status import CaptureSummary
from specdecode_operator.capture.files.formats import PARTIAL_MANIFEST, CaptureError, Live, Manifest, PartialManifest
from specdecode_operator.capture.files.publish import verify
from specdecode_operator.capture.files.validate import validate_capture
from specdecode_operator.capture.job import collect
from specdecode_operator.capture.job.collect import CollectJob
from specdecode_operator.capture.job.entrypoint import success_message
from specdecode_operator.capture.job.finish import Published
from specdecode_operator.capture.recorder.segment_format import LONGEST_LINE_BYTES
from specdecode_operator.capture.trace_reader import Recording, read_recording, read_steps
from tests.support.live_capture import (
    TOKEN,
    WALL_S,
    Peer,
    PlayedPod,
    PlayedServer,
    Running,
    collector,
    environment,
    publish,
)
from tests.support.recordings import Scenario

FOLDER = "team/live/as-deployed/1"


def live_of(published: Published) -> Live:
    live = published.manifest.live
    assert live is not None
    return live


def recording_in(root: Path) -> Recording:
    return read_recording(root / FOLDER)


def requests_of(played: PlayedServer) -> list[dict[str, Any]]:
    return [line for line in played.recorded if line["k"] == "request"]


async def send_all(running: Running, joined: list[tuple[Peer, PlayedServer]]) -> None:
    """Send all lines between the first and the last ones, and wait until they are on the volume."""
    for peer, played in joined:
        await peer.send(*played.recorded)
    await running.received(sum(2 + len(played.recorded) for _, played in joined))


async def bad_and_good(running: Running) -> list[tuple[Peer, PlayedServer]]:
    """Join one pod of each of these names, whose recorders are armed."""
    pods = [PlayedPod("bad"), PlayedPod("good")]
    peers = [peer for pod in pods for peer in await running.join(pod)]
    return [(peer, await peer.armed(pod)) for pod, peer in zip(pods, peers, strict=True)]


async def armed(running: Running, pod: PlayedPod) -> list[tuple[Peer, PlayedServer]]:
    """Connect a pod to a collector that waits for no other, and begin its segments."""
    peers = await running.join(pod)
    return [(peer, await peer.armed(pod, server)) for server, peer in enumerate(peers)]


async def end(running: Running, joined: list[tuple[Peer, PlayedServer]], **tally: int) -> Published:
    """End the window by its duration, finish all segments, and return what was published."""
    running.advance(600)
    for peer, played in joined:
        await peer.finish(played, **tally)
    return await running.published()


class TestPublished:
    async def test_traffic_of_all_pods_is_one_capture(self, tmp_path: Path) -> None:
        shared = PlayedPod("a", Scenario(warmup=0, servers=2, requests=12), node="node-1", older=1)
        other = PlayedPod("b", Scenario(warmup=0, requests=8, seed=1), node="node-2", monotonic_s=7.0)
        published = await publish(tmp_path, shared, other)
        manifest = published.manifest
        assert (manifest.source, manifest.accounting, manifest.node) == ("live", None, None)
        live = live_of(published)
        assert [(each.pod, each.node, each.api_servers, each.missing) for each in live.pods] == [
            ("a", "node-1", 2, None),
            ("b", "node-2", 1, None),
        ]
        assert [(each.engine, each.pod, each.index) for each in live.engines] == [(0, "a", 0), (1, "b", 0)]
        assert (live.window.ended_by, live.window.started_wall_s, live.sample_percent) == ("duration", WALL_S, 100)
        assert live.window.seconds >= 600
        assert (live.accounting.admitted, live.accounting.records, live.accounting.older) == (20, 20, 2)
        assert live.lost == []
        recording = recording_in(tmp_path)
        assert [sum(each.engine == engine for each in recording.requests) for engine in (0, 1)] == [12, 8]
        assert {each.phase for each in recording.requests} == {None}
        assert recording.meta.block_hash == "blake2b-salted"
        assert recording.steps is not None
        assert {step.engine for step in read_steps(recording.steps)} == {0, 1}

    async def test_published_files_are_valid(self, tmp_path: Path) -> None:
        await publish(tmp_path, PlayedPod("a"), PlayedPod("b"))
        folder = tmp_path / FOLDER
        assert verify(folder) == []
        found = validate_capture(folder)
        assert found.problems == []
        assert {"accounting", "finished_requests", "generated_tokens", "engine_counters"} <= found.gates.keys()
        assert sorted(path.name for path in folder.iterdir()) == ["manifest.json", "step-stats.jsonl", "trace.jsonl"]

    async def test_status_has_engine_times_and_recorded_counts(self, tmp_path: Path) -> None:
        published = await publish(tmp_path, PlayedPod("a"), sample_percent=50)
        status = CaptureSummary.model_validate(msgspec.json.decode(success_message(published)))
        assert status.ttft_ms is not None
        assert status.live is not None
        recorded = live_of(published).accounting.records
        assert (status.live.sample_percent, status.live.recorded, status.live.sampled_out) == (
            50,
            recorded,
            12 - recorded,
        )
        assert (status.live.pods, status.live.missing_pods, status.live.gaps) == (1, 0, 0)
        assert (status.requests.sent, status.requests.completed) == (12, recorded)
        assert status.prompt_notes is None

    async def test_later_attempt_returns_published_capture(self, tmp_path: Path) -> None:
        first = await publish(tmp_path, PlayedPod("a"))
        again = await CollectJob(environment(tmp_path, ["a"])).run()
        assert again.manifest == first.manifest

    async def test_token_ids_are_recorded_if_requested(self, tmp_path: Path) -> None:
        pod = PlayedPod("a", Scenario(warmup=0, token_ids=True))
        await publish(tmp_path, pod, record={"tokenIds": True})
        assert all(each.token_ids is not None for each in recording_in(tmp_path).requests)


class TestClocks:
    async def test_times_of_all_hosts_are_on_one_clock(self, tmp_path: Path) -> None:
        pods = [PlayedPod("a", monotonic_s=1e6), PlayedPod("b", monotonic_s=3.0, ahead_s=0.02)]
        await publish(tmp_path, *pods)
        by_engine: dict[int, list[float]] = {0: [], 1: []}
        for each in recording_in(tmp_path).requests:
            assert each.arrival_ms is not None
            by_engine[each.engine].append(each.arrival_ms)
        first, second = (sorted(times) for times in by_engine.values())
        # Equal traffic, but the clock of the second host is 20 ms ahead.
        assert [later - earlier for earlier, later in zip(first, second, strict=True)] == pytest.approx([20.0] * 12)
        assert first[0] == pytest.approx(9_998.0)
        _, *lines = map(msgspec.json.decode, (tmp_path / FOLDER / "trace.jsonl").read_bytes().splitlines())
        assert all(line["arrival_ms"] <= line["queued_ms"] <= line["scheduled_ms"] for line in lines)

    async def test_api_servers_of_one_engine_share_one_clock_reading(self, tmp_path: Path) -> None:
        """Their messages of one step are microseconds apart, and stay so if they read other wall clocks."""
        pod = PlayedPod("a", Scenario(warmup=0, servers=2))
        async with collector(environment(tmp_path, ["a"])) as running:
            peers = await running.join(pod)
            joined = [
                (peer, await peer.armed(pod, server, wall_s=WALL_S + 0.03 * server))
                for server, peer in enumerate(peers)
            ]
            await send_all(running, joined)
            await end(running, joined)
        apart_ms = {
            round(request.arrival_ms - 1000 * (line["arrival_monotonic_s"] - pod.monotonic_s), 3)
            for request in recording_in(tmp_path).requests
            for _, played in joined
            for line in requests_of(played)
            if line["external_id"] == request.request_id and request.arrival_ms is not None
        }
        assert len(apart_ms) == 1
        assert {each.concurrency for each in recording_in(tmp_path).requests} > {1}

    async def test_starts_of_an_engine_that_are_unknown_have_their_own_clocks(self, tmp_path: Path) -> None:
        pod = PlayedPod("a", Scenario(warmup=0, requests=4))
        async with collector(environment(tmp_path, ["a"])) as running:
            ((peer, _),) = [(each, await each.armed(pod, start=None)) for each in await running.join(pod)]
            await running.received(2)
            await peer.close()
            await running.until(lambda: running.connected("a") == 0, "the connection has ended")
            pod.monotonic_s = 1e6  # its new host has run for longer
            joined = [(each, await each.armed(pod, start=None)) for each in await running.join(pod)]
            await running.received(4)
            for each, played in joined:
                await each.send(*played.recorded)
            await running.received(4 + len(joined[0][1].recorded))
            await end(running, joined)
        assert recording_in(tmp_path).requests[0].arrival_ms == pytest.approx(9_998.0)

    @pytest.mark.parametrize("jump_s", [-3.5, 3.5])
    async def test_clock_jump_is_noted_and_ignored(self, tmp_path: Path, jump_s: float) -> None:
        pod = PlayedPod("a")
        async with collector(environment(tmp_path, ["a"])) as running:
            joined = await armed(running, pod)
            for after_s, ahead_s in ((5, jump_s), (6, 0.0)):
                anchor = {"k": "anchor", "monotonic_s": pod.monotonic_s + after_s, "wall_s": WALL_S + after_s + ahead_s}
                await joined[0][0].send(anchor)
            await running.received(4)
            for peer, played in joined:
                await peer.send(*played.recorded)
            await running.received(4 + len(joined[0][1].recorded))
            published = await end(running, joined)
        assert [note for note in published.manifest.notes if f"jumped by {jump_s:+.3f} s" in note]
        assert recording_in(tmp_path).requests[0].arrival_ms == pytest.approx(9_998.0)

    async def test_clock_offsets_between_pods_are_published(self, tmp_path: Path) -> None:
        published = await publish(tmp_path, PlayedPod("a"), PlayedPod("b", node="node-2", ahead_s=7.0))
        live = live_of(published)
        assert [each.clock_ahead_ms for each in live.pods] == [pytest.approx((0, 0)), pytest.approx((7000, 7000))]
        assert live.clock_uncertainty_ms == pytest.approx(7000)
        assert [note for note in published.manifest.notes if "(pod b) is at least 7.0 s ahead" in note]

    async def test_clock_offset_is_bounded_by_all_api_servers_of_a_pod(self, tmp_path: Path) -> None:
        pod = PlayedPod("a", Scenario(warmup=0, servers=2))
        async with collector(environment(tmp_path, ["a"])) as running:
            peers = await running.join(pod)
            orders = [await peer.order() for peer in peers]
            running.advance(3)
            joined = []
            # The clock is 7 s ahead. One recorder begins 1 s after the order, the other 2 s after it.
            for server, (peer, order) in enumerate(zip(peers, orders, strict=True)):
                assert order is not None
                played = pod.played(server, order["arm"], wall_s=WALL_S + 8 + server)
                await peer.send(*played.first_lines())
                joined.append((peer, played))
            await send_all(running, joined)
            published = await end(running, joined)
        assert live_of(published).pods[0].clock_ahead_ms == pytest.approx((6000, 8000))
        assert [note for note in published.manifest.notes if "(pod a) is at least 6.0 s ahead" in note]


class TestWindow:
    async def test_window_begins_when_all_api_servers_have_joined(self, tmp_path: Path) -> None:
        pod = PlayedPod("a", Scenario(warmup=0, servers=2))
        async with collector(environment(tmp_path, ["a"])) as running:
            peers = [await running.connect(pod.hello(0))]
            await running.until(lambda: running.connected("a") == 1, "one has joined")
            await running.clock.let_arrive()
            running.advance(100)
            peers.append(await running.connect(pod.hello(1)))
            joined = [(peer, await peer.armed(pod, server)) for server, peer in enumerate(peers)]
            await send_all(running, joined)
            published = await end(running, joined)
        assert live_of(published).lost == []

    async def test_window_ends_after_number_of_requests(self, tmp_path: Path) -> None:
        pod = PlayedPod("a")
        async with collector(environment(tmp_path, ["a"], requests=12)) as running:
            ((peer, played),) = await armed(running, pod)
            *rest, last = played.recorded
            assert last["k"] == "request"
            await peer.send(*rest)
            await running.received(2 + len(rest))
            await peer.send(last)
            await peer.finish(played)  # without a driven clock
            window = live_of(await running.published()).window
        assert (window.ended_by, window.requests, window.duration_seconds) == ("requests", 12, None)

    async def test_duration_is_no_deadline_by_rounding(self, tmp_path: Path) -> None:
        async with collector(environment(tmp_path, ["a"], duration_seconds=600.0000001)) as running:
            running.advance(2.0**33)  # begins at a time with steps of 2 microseconds
            joined = await armed(running, PlayedPod("a"))
            await send_all(running, joined)
            published = await end(running, joined)
        assert live_of(published).window.ended_by == "duration"

    async def test_deadline_ends_a_window_of_requests(self, tmp_path: Path) -> None:
        async with collector(environment(tmp_path, ["a"], requests=1000, deadline_seconds=600.0)) as running:
            joined = await armed(running, PlayedPod("a"))
            await send_all(running, joined)
            published = await end(running, joined)
        assert live_of(published).window.ended_by == "deadline"
        assert [note for note in published.manifest.notes if "after 12 of 1000 requests" in note]

    async def test_pod_that_does_not_join_is_reported_missing(self, tmp_path: Path) -> None:
        pod = PlayedPod("a")
        async with collector(environment(tmp_path, ["a", "gone"])) as running:
            (peer,) = await running.join(pod)
            await running.until(lambda: running.connected(pod.name) == 1, "the pod has joined")
            running.advance(150)
            joined = [(peer, await peer.armed(pod))]
            await send_all(running, joined)
            published = await end(running, joined)
        missing = {each.pod: each.missing for each in live_of(published).pods}
        assert missing["a"] is None
        assert "sidecar never connected" in (missing["gone"] or "")
        assert published.status["live"]["missingPods"] == 1

    async def test_late_pod_is_recorded_and_its_gap_reported(self, tmp_path: Path) -> None:
        early, late = PlayedPod("a"), PlayedPod("late", Scenario(warmup=0, requests=4))
        async with collector(environment(tmp_path, ["a", "late"])) as running:
            (peer,) = await running.join(early)
            await running.until(lambda: running.connected("a") == 1, "the pod has joined")
            running.advance(150)
            joined = [(peer, await peer.armed(early))]
            await running.received(2)
            running.advance(60)
            joined += await armed(running, late)
            await send_all(running, joined)
            published = await end(running, joined)
        (loss,) = live_of(published).lost
        assert (loss.pod, loss.requests) == ("late", None)
        assert loss.seconds is not None
        assert loss.seconds >= 60
        assert live_of(published).accounting.records == 16

    async def test_recorder_that_does_not_finish_is_reported_as_loss(self, tmp_path: Path) -> None:
        async with collector(environment(tmp_path, ["a", "b"], drain_seconds=30.0)) as running:
            pods = [PlayedPod("a"), PlayedPod("b")]
            peers = [peer for pod in pods for peer in await running.join(pod)]
            joined = [(peer, await peer.armed(pod)) for pod, peer in zip(pods, peers, strict=True)]
            await send_all(running, joined)
            running.advance(600)
            (hung, _), (other, played) = joined
            assert await hung.order() == {"disarm": {"drain_s": 30.0}}
            await other.finish(played)
            running.advance(90)
            published = await running.published()
        assert [(each.pod, each.requests) for each in live_of(published).lost] == [("a", None)]
        assert "did not finish within 90 s" in live_of(published).lost[0].reason

    async def test_peer_connecting_after_window_gets_bye(self, tmp_path: Path) -> None:
        pod = PlayedPod("a")
        async with collector(environment(tmp_path, ["a"])) as running:
            joined = await armed(running, pod)
            await send_all(running, joined)
            running.advance(600)
            ((peer, played),) = joined
            assert await peer.order() == {"disarm": {"drain_s": 60.0}}
            late = await running.connect(pod.hello())
            assert await late.order() == {"bye": True}
            assert await late.order() is None
            await peer.send(*played.last_lines())
            assert await peer.order() == {"bye": True}
            await running.published()

    async def test_sigterm_cancels_capture(self, tmp_path: Path) -> None:
        async with collector(environment(tmp_path, ["a"])) as running:
            ((peer, _),) = await armed(running, PlayedPod("a"))
            os.kill(os.getpid(), signal.SIGTERM)
            failure = await running.failure()
            assert await peer.order() is None, "the recorder is disarmed"
        assert failure.reason == "Cancelled"
        label = msgspec.json.decode((running.job.places.folder / PARTIAL_MANIFEST).read_bytes(), type=PartialManifest)
        assert label.reason == "Cancelled"


async def test_progress_tells_who_has_joined_and_what_was_seen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told: list[dict[str, Any]] = []

    def last() -> dict[str, Any]:
        told.extend(msgspec.json.decode(line) for line in capsys.readouterr().out.splitlines())
        return told[-1] if told else {}

    pod = PlayedPod("a")
    async with collector(environment(tmp_path, ["a", "gone"], sample_percent=50)) as running:
        (peer,) = await running.join(pod)
        await running.until(lambda: running.connected("a") == 1, "the pod has joined")
        running.advance(1)
        await running.until(lambda: last().get("joined") == 1, "a line of progress")
        assert (last()["phase"], last()["pods"]) == ("joining", 2)
        running.advance(150)
        played = await peer.armed(pod)
        anchor = {"k": "anchor", "monotonic_s": pod.monotonic_s, "wall_s": WALL_S, "admitted": 20, "sampled_out": 8}
        await peer.send(anchor, *played.recorded)
        await running.received(3 + len(played.recorded))
        running.advance(1)
        await running.until(lambda: last()["seen"] == 20, "what the recorder has said")
    assert (last()["phase"], last()["joined"]) == ("live", 1)
    assert (last()["recorded"], last()["sampled_out"]) == (len(requests_of(played)), 8)


class TestLosses:
    async def test_lost_requests_of_a_gap_come_from_vllm_counters(self, tmp_path: Path) -> None:
        pod = PlayedPod("a")
        async with collector(environment(tmp_path, ["a"])) as running:
            ((peer, cut),) = await armed(running, pod)
            some = [line for line in cut.recorded if line["k"] == "request"][:5]
            await peer.send(*some)
            await running.received(2 + 5)
            running.advance(200)
            await peer.close()
            await running.until(lambda: running.connected("a") == 0, "the connection has ended")
            running.advance(7)
            (again,) = await running.join(pod)
            # In between vLLM has finished 9 requests: 5 are recorded, 4 are lost.
            second = await again.armed(pod, base=1009.0)
            await again.send(*second.recorded)
            await running.received(2 + 5 + 2 + len(second.recorded))
            published = await end(running, [(again, second)])
        (loss,) = live_of(published).lost
        assert (loss.pod, loss.requests, loss.reason) == ("a", 4, "the connection ended")
        assert loss.seconds is not None
        assert 7 <= loss.seconds < 200, "not the time that was recorded"
        assert published.status["live"] | {"windowSeconds": ""} == {
            "samplePercent": 100,
            "windowSeconds": "",
            "pods": 1,
            "missingPods": 0,
            "recorded": 17,
            "sampledOut": 0,
            "gaps": 1,
            "lostRequests": 4,
        }
        assert published.manifest.gates["dropped"].passed
        assert validate_capture(tmp_path / FOLDER).problems == []
        interrupted, whole = published.manifest.segments
        assert (interrupted.closed, whole.closed) == (None, "ordered")

    async def test_recorded_aborts_are_not_subtracted_from_finished_requests(self, tmp_path: Path) -> None:
        pod = PlayedPod("a")
        async with collector(environment(tmp_path, ["a"])) as running:
            ((peer, cut),) = await armed(running, pod)
            aborted, *_ = requests_of(cut)
            await peer.send(aborted | {"ended_by": "abort", "finish_reason": "abort"})
            await running.received(3)
            await peer.close()
            await running.until(lambda: running.connected("a") == 0, "the connection has ended")
            (again,) = await running.join(pod)
            second = await again.armed(pod, base=1100.0)
            await again.send(*second.recorded)
            await running.received(5 + len(second.recorded))
            published = await end(running, [(again, second)])
        (loss,) = live_of(published).lost
        assert (loss.requests, loss.tokens) == (100, 100 - sum(aborted["chunk_tokens"]))

    @pytest.mark.parametrize("base", [0.0, 5000.0])
    async def test_lost_requests_of_restarted_engine_are_unknown(self, tmp_path: Path, base: float) -> None:
        pod = PlayedPod("a")
        async with collector(environment(tmp_path, ["a"])) as running:
            ((peer, _),) = await armed(running, pod)
            await peer.close()
            await running.until(lambda: running.connected("a") == 0, "the connection has ended")
            (again,) = await running.join(pod)
            second = await again.armed(pod, start="another", base=base)
            joined = [(again, second)]
            await again.send(*second.recorded)
            await running.received(4 + len(second.recorded))
            published = await end(running, joined)
        (loss,) = live_of(published).lost
        assert loss.requests is None
        assert loss.reason.endswith("the engine restarted")
        assert "lostRequests" not in published.status["live"]

    async def test_dropped_requests_are_reported_without_failing_capture(self, tmp_path: Path) -> None:
        async with collector(environment(tmp_path, ["a"])) as running:
            ((peer, played),) = await armed(running, PlayedPod("a"))
            await send_all(running, [(peer, played)])
            running.advance(600)
            assert await peer.order() is not None
            tally, counters, closed = played.last_lines(admitted=15, dropped=3)
            counters["values"]["drafts"] += 1  # of a step that was dropped
            await peer.send(tally, counters, closed | {"dropped": 4})
            published = await running.published()
        assert published.manifest.gates["dropped"].value == 4
        assert [each.requests for each in live_of(published).lost] == [3]
        assert live_of(published).accounting.equation == "15 admitted = 12 recorded + 0 sampled out + 3 dropped"

    async def test_counts_after_an_error_in_a_hook_are_not_judged(self, tmp_path: Path) -> None:
        async with collector(environment(tmp_path, ["a"])) as running:
            ((peer, played),) = await armed(running, PlayedPod("a"))
            await send_all(running, [(peer, played)])
            running.advance(600)
            assert await peer.order() is not None
            tally, counters, closed = played.last_lines()
            counters["values"]["requests_finished"] += 1
            await peer.send(tally, counters, closed | {"dropped": 1, "errors": 1, "first_error": "KeyError"})
            published = await running.published()
        assert "finished_requests" not in published.manifest.gates
        assert ["1 by errors, first KeyError" in each.reason for each in live_of(published).lost] == [True]

    async def test_request_without_a_token_is_accounted_for(self, tmp_path: Path) -> None:
        async with collector(environment(tmp_path, ["a"])) as running:
            ((peer, played),) = await armed(running, PlayedPod("a"))
            requests_of(played)[0].update(
                ended_by="abort", finish_reason="abort", chunk_s=[], chunk_tokens=[], num_running=[], prefill_tokens=[]
            )
            await send_all(running, [(peer, played)])
            published = await end(running, [(peer, played)])
        assert published.manifest.gates["accounting"].passed
        assert len((tmp_path / FOLDER / "aborted.jsonl").read_bytes().splitlines()) == 1

    async def test_recorder_that_turns_itself_off_is_reported_as_loss(self, tmp_path: Path) -> None:
        async with collector(environment(tmp_path, ["a", "b"])) as running:
            pods = [PlayedPod("a"), PlayedPod("b")]
            peers = [peer for pod in pods for peer in await running.join(pod)]
            joined = [(peer, await peer.armed(pod)) for pod, peer in zip(pods, peers, strict=True)]
            await send_all(running, joined)
            (off, played), whole = joined
            tally, counters, closed = played.last_lines()
            await off.send(
                {"k": "off", "reason": "the hooks failed"}, tally, counters, closed | {"reason": "unknown_shape"}
            )
            assert await off.order() is None
            published = await end(running, [whole])
        (loss,) = live_of(published).lost
        assert (loss.pod, "the hooks failed" in loss.reason) == ("a", True)

    async def test_window_without_traffic_fails(self, tmp_path: Path) -> None:
        async with collector(environment(tmp_path, ["a"])) as running:
            pod = PlayedPod("a", older=3)
            (peer,) = await running.join(pod)
            played = await peer.armed(pod)
            played.lines = []
            await running.received(2)
            running.advance(600)
            await peer.finish(played)
            failure = await running.failure()
        assert failure.reason == "NothingRecorded"
        assert "finished 3 requests" in failure.message


class TestGates:
    """Each gate fails if the compared figures differ."""

    async def failing(self, root: Path, counters: dict[str, float] | None = None, **tally: int) -> str:
        async with collector(environment(root, ["a"])) as running:
            ((peer, played),) = await armed(running, PlayedPod("a"))
            await send_all(running, [(peer, played)])
            running.advance(600)
            assert await peer.order() is not None
            counts, last, closed = played.last_lines(**tally)
            last["values"] |= {name: last["values"][name] + by for name, by in (counters or {}).items()}
            await peer.send(counts, last, closed)
            failure = await running.failure()
        assert failure.reason == "ValidationFailed"
        return failure.message

    @pytest.mark.parametrize("admitted", [11, 13])
    async def test_unaccounted_request_fails_accounting(self, tmp_path: Path, admitted: int) -> None:
        failure = await self.failing(tmp_path, admitted=admitted)
        assert failure.startswith(f"accounting: {admitted} admitted != 12 recorded")

    async def test_recorded_request_that_did_not_arrive_fails_validation(self, tmp_path: Path) -> None:
        assert "of which 12 arrived" in await self.failing(tmp_path, admitted=13, recorded=13)

    async def test_request_not_counted_by_vllm_fails_finished_requests(self, tmp_path: Path) -> None:
        assert (await self.failing(tmp_path, {"requests_finished": -1})).startswith("finished_requests: ")

    async def test_different_token_count_of_vllm_fails_generated_tokens(self, tmp_path: Path) -> None:
        assert (await self.failing(tmp_path, {"generation_tokens": 1})).startswith("generated_tokens: ")

    @pytest.mark.parametrize("counter", ["drafts", "draft_tokens", "accepted_tokens"])
    async def test_drafts_missing_in_steps_fail_engine_counters(self, tmp_path: Path, counter: str) -> None:
        assert (await self.failing(tmp_path, {counter: 1})).startswith("engine_counters: ")

    async def test_missing_lines_fail_accounting_and_engine_counters(self, tmp_path: Path) -> None:
        published = await publish(tmp_path, PlayedPod("a"))
        folder = tmp_path / FOLDER
        trace = folder / "trace.jsonl"
        trace.write_bytes(b"".join(trace.read_bytes().splitlines(keepends=True)[:-1]))
        steps = folder / "step-stats.jsonl"
        steps.write_bytes(b"".join(steps.read_bytes().splitlines(keepends=True)[:-2]))
        found = validate_capture(_unsealed(folder), published.manifest.segments, published.manifest.live)
        assert {"accounting", "engine_counters"} <= {name for name, gate in found.gates.items() if not gate.passed}

    async def test_sampled_capture_does_not_judge_step_counters(self, tmp_path: Path) -> None:
        published = await publish(tmp_path, PlayedPod("a"), sample_percent=50)
        gate = published.manifest.gates["step_counters"]
        assert (gate.limit, gate.passed) == (None, True)
        assert "only 50 % of the requests are recorded" in gate.why
        counts = live_of(published).accounting
        assert counts.admitted == 12 == counts.recorded + counts.sampled_out
        assert 0 < counts.recorded < 12

    async def test_capture_beside_canaries_does_not_compare_steps_with_chunks(self, tmp_path: Path) -> None:
        async with collector(environment(tmp_path, ["a"])) as running:
            ((peer, played),) = await armed(running, PlayedPod("a"))
            await send_all(running, [(peer, played)])
            running.advance(600)
            await peer.finish(played, admitted=13, sampled_out=1)
            published = await running.published()
        assert published.manifest.gates["step_counters"].limit is None
        assert "1 canary" in published.manifest.gates["step_counters"].why

    async def test_unsampled_capture_judges_step_counters(self, tmp_path: Path) -> None:
        gates = (await publish(tmp_path, PlayedPod("a"))).manifest.gates
        assert gates["step_counters"].passed
        assert "not judged" not in gates["step_counters"].why
        assert gates["largest_chunk"].limit == 5

    async def test_capture_without_step_stats_has_no_step_gates(self, tmp_path: Path) -> None:
        gates = (await publish(tmp_path, PlayedPod("a"), record={"stepStats": False})).manifest.gates
        assert gates.keys().isdisjoint({"engine_counters", "step_counters", "missing_steps"})


def _unsealed(folder: Path) -> Path:
    """Take the manifest away, which has the checksums."""
    (folder / "manifest.json").unlink()
    return folder


class TestNoEngine:
    async def test_failure_names_state_of_each_pod(self, tmp_path: Path) -> None:
        async with collector(environment(tmp_path, ["silent", "starting"])) as running:
            starting = await running.connect(
                PlayedPod("starting").hello(socket=None, sockets=0, note="no process of the engine has a recorder yet")
            )
            assert await starting.order() is None
            running.advance(150)
            failure = await running.failure()
        assert failure.reason == "NoEngineJoined"
        assert "pod silent: its sidecar never connected" in failure.message
        assert "TCP port 8470" in failure.message
        assert (
            "pod starting: its sidecar found no API server with a recorder: no process of the engine" in failure.message
        )

    async def test_failure_names_why_recorder_refused(self, tmp_path: Path) -> None:
        async with collector(environment(tmp_path, ["a"])) as running:
            (peer,) = await running.join(PlayedPod("a"))
            assert await peer.order() is not None
            await peer.send({"k": "refused", "reason": "this engine is not supported: vLLM 9"})
            assert await peer.order() is None
            running.advance(90)
            failure = await running.failure()
        assert failure.reason == "NoEngineJoined"
        assert "vLLM 9" in failure.message

    async def test_recorder_that_refuses_once_may_join_again(self, tmp_path: Path) -> None:
        pod = PlayedPod("a")
        async with collector(environment(tmp_path, ["a"])) as running:
            (peer,) = await running.join(pod)
            assert await peer.order() is not None
            await peer.send({"k": "refused", "reason": "another connection is armed"})
            assert await peer.order() is None
            joined = await armed(running, pod)
            await send_all(running, joined)
            published = await end(running, joined)
        assert live_of(published).accounting.records == 12
        assert live_of(published).pods[0].missing is None


def nested(levels: int) -> list[Any]:
    """Return lists inside lists."""
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


class TestUntrustedPeers:
    @pytest.mark.parametrize(
        ("first", "why"),
        [
            (PlayedPod("a").hello(token=TOKEN[:-1] + "0"), "wrong token"),
            (PlayedPod("a").hello(token="é" * 8), "wrong token"),
            (PlayedPod("a").hello(hello=2), "no valid hello"),
            (PlayedPod("a").hello(more=1), "no valid hello"),
            (PlayedPod("a").hello(socket="../x.sock"), "no valid hello"),
            (PlayedPod("a").hello(socket="1.sock\n"), "no valid hello"),
            (PlayedPod("a").hello(node="\x1b[2J"), "no valid hello"),
            (PlayedPod("a").hello(pod_uid="<b>"), "no valid hello"),
            (PlayedPod("a").hello(sockets=10**6), "no valid hello"),
            (b"GET / HTTP/1.1\r\n\r\n", "no valid hello"),
            (b"\xff\xfe\n", "no valid hello"),
            (b"[" * 4000 + b"\n", "no valid hello"),
            (b"x" * 5000, "a line of more than 4096 bytes"),
        ],
    )
    async def test_connection_with_invalid_hello_is_closed_and_logged(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], first: Any, why: str
    ) -> None:
        async with collector(environment(tmp_path, ["a"])) as running:
            peer = await running.connect(first)
            assert await peer.order() is None
            assert running.connected("a") == 0
        assert f"rejected a connection from 127.0.0.1: {why}" in capsys.readouterr().out

    async def test_unknown_pod_gets_bye(self, tmp_path: Path) -> None:
        async with collector(environment(tmp_path, ["a"])) as running:
            peer = await running.connect(PlayedPod("stranger").hello())
            assert await peer.order() == {"bye": True}
            assert await peer.order() is None

    async def test_silent_peer_is_closed(self, tmp_path: Path) -> None:
        async with collector(environment(tmp_path, ["a"])) as running:
            peer = await running.connect()
            await running.until(lambda: running.connections == 1, "a connection")
            running.advance(10)
            assert await peer.order() is None

    async def test_rejections_are_logged_once_per_second(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        async with collector(environment(tmp_path, ["a"])) as running:
            for _ in range(5):
                assert await (await running.connect(b"{}\n")).order() is None
            running.advance(1)
            assert await (await running.connect(b"{}\n")).order() is None
        lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("rejected")]
        assert len(lines) == 2
        assert lines[1].endswith("5 since the last such line")

    async def test_connections_are_bounded(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(collect, "CONNECTIONS_PER_POD", 2)
        async with collector(environment(tmp_path, ["a", "b"])) as running:
            kept = [await running.connect(PlayedPod(name).hello(server)) for name in "ab" for server in range(2)]
            await running.until(lambda: running.connected("a") + running.connected("b") == len(kept), "four sidecars")
            assert await (await running.connect(PlayedPod("a").hello())).order() is None
            assert running.connected("a") + running.connected("b") == len(kept)

    async def test_silent_peers_keep_no_sidecar_out(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(collect, "CONNECTIONS_PER_POD", 2)
        async with collector(environment(tmp_path, ["a"])) as running:
            silent = [await running.connect() for _ in range(2)]
            await running.until(lambda: running.connections == len(silent), "two connections")
            ((peer, _),) = await armed(running, PlayedPod("a"))
            assert await silent[0].order() is None
            assert running.connections == len(silent)
            await peer.close()

    async def test_line_before_arm_order_closes_connection(self, tmp_path: Path) -> None:
        pod = PlayedPod("a")
        async with collector(environment(tmp_path, ["a", "b"])) as running:
            (peer,) = await running.join(pod)
            await peer.send({"k": "anchor", "monotonic_s": 1.0, "wall_s": 1.0})
            assert await peer.order() is None

    @pytest.mark.parametrize(
        ("change", "why"),
        [
            ({"live": False}, "does not follow the order"),
            ({"block_hash": "fnv1a64"}, "does not follow the order"),
            ({"sample_percent": 50}, "does not follow the order"),
            ({"schema": 2}, "schema 2"),
            ({"boot": "../../x"}, "boot id"),
            ({"client_index": 1}, "index of an API server"),
            ({"engines": []}, "engine indexes"),
            ({"engines": [-1]}, "engine indexes"),
            ({"gpu_uuids": ["x"] * 20_000}, "header of more than"),
            ({"token_ids": True}, "token ids that were not ordered"),
            ({"config": {"tensor_parallel": 2**32}}, "settings of the engine"),
            ({"config": {"block_size": -1}}, "settings of the engine"),
        ],
    )
    async def test_invalid_header_begins_no_segment(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], why: str
    ) -> None:
        pod = PlayedPod("a")
        async with collector(environment(tmp_path, ["a"])) as running:
            (peer,) = await running.join(pod)
            order = await peer.order()
            assert order is not None
            header, _ = pod.played(0, order["arm"]).first_lines()
            await peer.send(header | change)
            assert await peer.order() is None
            assert running.segments == []
        assert why in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("change", "why"),
        [
            ({"chunk_tokens": [1]}, "different lengths"),
            ({"engine": 5}, "unknown engine"),
            ({"engine": None}, "without an engine"),
            ({"id": "cmpl-x"}, "not salted"),
            ({"external_id": "user@example.com"}, "not salted"),
            ({"prompt_tokens": -1}, "invalid number"),
            ({"block_hashes": [2**64]}, "invalid number"),
            ({"arrival_monotonic_s": 1e300}, "invalid time"),
            ({"arrival_monotonic_s": 1e11}, "chunk times out of order"),
            ({"ended_by": "me"}, "unknown end"),
            ({"finish_reason": "tired"}, "unknown end"),
            ({"stop_reason": "secret"}, "a stop string"),
            ({"stop_reason": 9642}, "stop token"),
            ({"temperature": 10**400}, "unreadable line"),
            ({"token_ids": [1]}, "not ordered"),
            ({"prompt_token_ids": [1]}, "not ordered"),
            ({"chunk_s": "x"}, "unreadable line"),
            ({"k": "header"}, "unreadable line"),
        ],
    )
    async def test_invalid_request_interrupts_only_its_segment(
        self, tmp_path: Path, change: dict[str, Any], why: str
    ) -> None:
        async with collector(environment(tmp_path, ["bad", "good"])) as running:
            (bad, played), good = await bad_and_good(running)
            request, *_ = requests_of(played)
            await bad.send(request, request | change, request)
            assert await bad.order() is None
            await good[0].send(*good[1].recorded)
            await running.received(3 + 2 + len(good[1].recorded))
            published = await end(running, [good])
        (loss,) = live_of(published).lost
        assert loss.pod == "bad"
        assert why in loss.reason
        assert live_of(published).accounting.records == 13

    @pytest.mark.parametrize(
        ("place", "value", "why"),
        [
            pytest.param(("iteration_details", "elapsed_ms"), 10**400, "duration_ms", id="too large for a float"),
            (("iteration_details", "elapsed_ms"), True, "duration_ms"),
            (("iteration_details", "iteration_index"), 2**64, "64 bits"),
            (("iteration_details", "deep"), nested(200), "nested more than 100 deep"),
            (("num_running_reqs",), 2**64, "64 bits"),
            (("spec_decoding_stats", "num_accepted_tokens"), 2**63, "per position"),
            (("spec_decoding_stats", "num_accepted_tokens_per_pos"), [0, 1, 0, 0], "per position"),
        ],
    )
    async def test_invalid_step_interrupts_only_its_segment(
        self, tmp_path: Path, place: tuple[str, ...], value: Any, why: str
    ) -> None:
        async with collector(environment(tmp_path, ["bad", "good"])) as running:
            (bad, played), good = await bad_and_good(running)
            steps = [line for line in played.recorded if line["k"] == "step" and line["scheduler"]]
            step = next(line for line in steps if line["scheduler"]["spec_decoding_stats"])
            wrong = msgspec.json.decode(msgspec.json.encode(step))
            *above, name = place
            functools.reduce(dict.__getitem__, above, wrong["scheduler"])[name] = value
            await bad.send(b"".join(msgspec.json.encode(line) + b"\n" for line in (step, wrong, step)))
            assert await bad.order() is None
            await good[0].send(*good[1].recorded)
            await running.received(3 + 2 + len(good[1].recorded))
            published = await end(running, [good])
        (loss,) = live_of(published).lost
        assert loss.pod == "bad"
        assert why in loss.reason
        assert [each.live.steps for each in published.manifest.segments if each.live] == [
            1,
            sum(line["k"] == "step" for line in good[1].recorded),
        ]

    async def test_unexpected_error_of_a_line_interrupts_only_its_segment(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fails(*_: Any) -> Any:
            raise OverflowError

        async with collector(environment(tmp_path, ["bad", "good"])) as running:
            (bad, played), good = await bad_and_good(running)
            await good[0].send(*good[1].recorded)
            await running.received(4 + len(good[1].recorded))
            with monkeypatch.context() as broken:
                broken.setattr(collect, "step_stats", fails)
                await bad.send(*played.recorded)
                assert await bad.order() is None
            published = await end(running, [good])
        (loss,) = live_of(published).lost
        assert (loss.pod, "failed with OverflowError" in loss.reason) == ("bad", True)

    @pytest.mark.parametrize("change", [{"finished": 10**400}, {"older": -1}])
    async def test_invalid_tally_interrupts_only_its_segment(self, tmp_path: Path, change: dict[str, int]) -> None:
        async with collector(environment(tmp_path, ["bad", "good"])) as running:
            (bad, played), good = await bad_and_good(running)
            await send_all(running, [(bad, played), good])
            running.advance(600)
            assert await bad.order() is not None
            await bad.send(*played.last_lines(**change))
            assert await bad.order() is None
            await good[0].finish(good[1])
            published = await running.published()
        (loss,) = live_of(published).lost
        assert (loss.pod, "an invalid tally" in loss.reason) == ("bad", True)

    @pytest.mark.parametrize("change", [{"reason": "x" * 100_000}, {"dropped": 10**400}])
    async def test_invalid_last_line_interrupts_only_its_segment(self, tmp_path: Path, change: dict[str, Any]) -> None:
        async with collector(environment(tmp_path, ["bad", "good"])) as running:
            (bad, played), good = await bad_and_good(running)
            await send_all(running, [(bad, played), good])
            running.advance(600)
            assert await bad.order() is not None
            *rest, last = played.last_lines()
            await bad.send(*rest, last | change)
            assert await bad.order() is None
            await good[0].finish(good[1])
            published = await running.published()
        assert [each.pod for each in live_of(published).lost] == ["bad"]

    @pytest.mark.parametrize("change", [lambda ids: ids[:-1], lambda ids: [*ids, 1], lambda ids: [2**32, *ids[1:]]])
    @pytest.mark.parametrize("field", ["token_ids", "prompt_token_ids"])
    async def test_wrong_token_ids_interrupt_the_segment(self, tmp_path: Path, field: str, change: Any) -> None:
        record = {"tokenIds": True, "promptTokenIds": True}
        async with collector(environment(tmp_path, ["a"], record=record)) as running:
            ((peer, played),) = await armed(running, PlayedPod("a", Scenario(warmup=0, token_ids=True)))
            request, *_ = requests_of(played)
            right = request | {"prompt_token_ids": [7] * request["prompt_tokens"]}
            await peer.send(right)
            await running.received(3)
            await peer.send(right | {field: change(right[field])})
            assert await peer.order() is None
            assert running.written() == 3

    async def test_clients_temperature_ends_no_connection(self, tmp_path: Path) -> None:
        async with collector(environment(tmp_path, ["a"])) as running:
            ((peer, played),) = await armed(running, PlayedPod("a"))
            request, *others = requests_of(played)
            rest = [line for line in played.recorded if line["k"] != "request"]
            await peer.send(request | {"temperature": 1e300}, *others, *rest)
            await running.received(2 + len(played.recorded))
            published = await end(running, [(peer, played)])
        assert live_of(published).lost == []
        assert live_of(published).accounting.records == len(others) + 1

    @pytest.mark.parametrize(
        "line",
        [
            b"not json\n",
            b"[]\n",
            b'{"k":"surprise"}\n',
            b'{"k":"closed","reason":"ordered","requests":0,"steps":0,"dropped":0,"unfinished":0,"errors":0,"first_error":null}\n',
            b'{"k":"step","engine":7,"t":1.0}\n',
            b'{"k":"anchor","monotonic_s":1.0,"wall_s":1.0,"admitted":1,"sampled_out":2}\n',
            b'{"k":"step","engine":0,"t":1.0,"scheduler":{"num_running_reqs":-1}}\n',
            b'{"k":"counters","monotonic_s":1.0,"values":{}}\n',
            b"[" * 100_000 + b"\n",
            b"x" * (LONGEST_LINE_BYTES + 2),
        ],
    )
    async def test_invalid_line_closes_connection(self, tmp_path: Path, line: bytes) -> None:
        async with collector(environment(tmp_path, ["a"])) as running:
            ((peer, _),) = await armed(running, PlayedPod("a"))
            await peer.send_what_is_read(line)
            assert await peer.order() is None
            assert running.written() == 2

    async def test_unfinished_lines_of_all_peers_are_bounded(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(collect, "_MOST_TORN_BYTES", 2**20)
        pods = [PlayedPod("a"), PlayedPod("b")]
        async with collector(environment(tmp_path, ["a", "b"])) as running:
            peers = [peer for pod in pods for peer in await running.join(pod)]
            for pod, peer in zip(pods, peers, strict=True):
                await peer.armed(pod)
            for peer in peers:
                await peer.send_what_is_read(b"x" * 2**19)
            await peers[1].send_what_is_read(b"x" * 2**18)
            await running.until(lambda: running.connected("a") + running.connected("b") == 1, "one is closed")

    async def test_unfinished_lines_of_closed_connections_are_forgotten(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(collect, "_MOST_TORN_BYTES", 2**20)
        pod = PlayedPod("a")
        async with collector(environment(tmp_path, ["a"])) as running:
            for _ in range(2):
                ((peer, _),) = await armed(running, pod)
                await peer.send(b"x" * 2**19)
                await peer.close()
                await running.until(lambda: running.connected("a") == 0, "the connection has ended")
            ((peer, played),) = await armed(running, pod)
            first, *_ = played.recorded
            await peer.send(b" " * 2**19, first)
            await running.received(3 * 2 + 1)

    async def test_torn_line_is_not_written(self, tmp_path: Path) -> None:
        async with collector(environment(tmp_path, ["a"])) as running:
            ((peer, played),) = await armed(running, PlayedPod("a"))
            await running.received(2)
            await peer.send(msgspec.json.encode(played.recorded[0]))
            await peer.close()
            await running.until(lambda: running.connected("a") == 0, "the connection has ended")
            (segment,) = running.segments
            assert segment.read_bytes().count(b"\n") == 2
            assert segment.read_bytes().endswith(b"\n")

    async def test_newer_connection_of_a_socket_replaces_the_older(self, tmp_path: Path) -> None:
        pod = PlayedPod("a")
        async with collector(environment(tmp_path, ["a"])) as running:
            ((old, _),) = await armed(running, pod)
            await running.received(2)
            joined = await armed(running, pod)
            assert await old.order() is None
            for peer, played in joined:
                await peer.send(*played.recorded)
            await running.received(4 + len(joined[0][1].recorded))
            published = await end(running, joined)
        assert [each.reason for each in live_of(published).lost] == ["the sidecar connected again"]


def test_invalid_settings_do_not_reveal_the_token(tmp_path: Path) -> None:
    variables = environment(tmp_path, ["a", "a"])
    with pytest.raises(CaptureError) as failure:
        CollectJob(variables)
    assert failure.value.reason == "InvalidSettings"
    assert "pods has a duplicate name" in failure.value.message
    assert TOKEN not in failure.value.message


class TestVolume:
    @pytest.mark.parametrize(
        ("code", "reason"),
        [
            (errno.ENOSPC, "DiskFull"),
            (errno.EDQUOT, "DiskFull"),
            (errno.EROFS, "VolumeReadOnly"),
            (errno.EIO, "VolumeFailed"),
        ],
    )
    async def test_volume_error_fails_capture(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, reason: str
    ) -> None:
        write = os.write

        def fails(file: int, data: Any) -> int:
            if stat.S_ISREG(os.fstat(file).st_mode):
                raise OSError(code, os.strerror(code))
            return write(file, data)

        async with collector(environment(tmp_path, ["a"])) as running:
            ((peer, played),) = await armed(running, PlayedPod("a"))
            await running.received(2)
            with monkeypatch.context() as patch:
                patch.setattr(os, "write", fails)
                await peer.send(*played.recorded)
                failure = await running.failure()
        assert failure.reason == reason

    async def test_connection_may_end_while_its_segment_is_flushed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        flush, is_flushing, has_ended, flushed = os.fsync, threading.Event(), threading.Event(), threading.Event()

        def slow(file: int) -> None:
            if threading.current_thread() is threading.main_thread():
                flush(file)
                return
            is_flushing.set()
            try:
                assert has_ended.wait(60)
                flush(file)
            finally:
                flushed.set()

        async with collector(environment(tmp_path, ["a"])) as running:
            joined = await armed(running, PlayedPod("a"))
            await send_all(running, joined)
            monkeypatch.setattr(os, "fsync", slow)
            running.advance(collect._SYNC_EVERY_S)
            await running.until(is_flushing.is_set, "a flush")
            await joined[0][0].close()
            await running.until(lambda: running.connected("a") == 0, "the end of the connection")
            has_ended.set()
            await running.until(flushed.is_set, "the end of the flush")
            again = await armed(running, PlayedPod("a"))
            await again[0][0].send(*again[0][1].recorded)
            await running.received(2 * (2 + len(again[0][1].recorded)))
            published = await end(running, again)
        assert [each.pod for each in live_of(published).lost] == ["a"]

    async def test_slow_flush_of_an_ended_connection_does_not_block_others(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        flush, may_flush, in_loop = os.fsync, threading.Event(), list[int]()

        def slow(file: int) -> None:
            if threading.current_thread() is threading.main_thread():
                in_loop.append(file)
            else:
                assert may_flush.wait(60)
            flush(file)

        async with collector(environment(tmp_path, ["a", "b"])) as running:
            peers = [peer for pod in "ab" for peer in await running.join(PlayedPod(pod))]
            joined = [(peer, await peer.armed(PlayedPod(pod))) for pod, peer in zip("ab", peers, strict=True)]
            await running.received(4)
            (ended, _), (other, played) = joined
            with monkeypatch.context() as patch:
                patch.setattr(os, "fsync", slow)
                await ended.close()
                await running.until(lambda: running.connected("a") == 0, "the end of the connection")
                await other.send(*played.recorded)
                await running.received(4 + len(played.recorded))
                may_flush.set()
                assert not in_loop
            published = await end(running, [(other, played)])
        assert [each.pod for each in live_of(published).lost] == ["a"]

    async def test_failed_flush_of_an_ended_connection_fails_capture(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        flush, flushes, fails = os.fsync, list[int](), threading.Event()

        def may_fail(file: int) -> None:
            flushes.append(file)
            if fails.is_set() and Path(f"/proc/self/fd/{file}").readlink().name.startswith("segment-"):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            flush(file)

        async with collector(environment(tmp_path, ["a"])) as running:
            joined = await armed(running, PlayedPod("a"))
            await send_all(running, joined)
            monkeypatch.setattr(os, "fsync", may_fail)
            running.advance(600)
            await running.until(lambda: bool(flushes), "the flush of every five seconds")
            fails.set()
            await joined[0][0].finish(joined[0][1])
            failure = await running.failure()
        assert failure.reason == "VolumeFailed"

    async def test_limit_of_descriptors_is_raised(self, tmp_path: Path) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
        try:
            await publish(tmp_path, PlayedPod("a"))
            assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    async def test_segment_that_cannot_be_created_fails_capture(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        opened = os.open

        def fails(path: Any, *more: Any, **named: Any) -> int:
            if str(path).endswith(".jsonl"):
                raise OSError(errno.EROFS, os.strerror(errno.EROFS))
            return opened(path, *more, **named)

        async with collector(environment(tmp_path, ["a"])) as running:
            (peer,) = await running.join(PlayedPod("a"))
            with monkeypatch.context() as patch:
                patch.setattr(os, "open", fails)
                await peer.armed(PlayedPod("a"))
                failure = await running.failure()
        assert failure.reason == "VolumeReadOnly"

    async def test_published_capture_of_another_object_is_not_overwritten(self, tmp_path: Path) -> None:
        await publish(tmp_path, PlayedPod("a"))
        manifest = tmp_path / FOLDER / "manifest.json"
        found = msgspec.json.decode(manifest.read_bytes(), type=Manifest)
        manifest.write_bytes(msgspec.json.encode(msgspec.structs.replace(found, capture_uid="another")))
        async with collector(environment(tmp_path, ["a"])) as running:
            failure = await running.failure()
        assert failure.reason == "AlreadyPublished"
