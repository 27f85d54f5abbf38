"""Recording of each arm."""

import asyncio
import errno
import json
import os
import signal
from collections import Counter
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import msgspec
import pytest

from devcluster.cluster.settings import free_ports
from specdecode_operator.api.capture_status import CaptureSummary, ComparisonStatus
from specdecode_operator.capture.comparison.comparison_file import COMPARISON, Comparison
from specdecode_operator.capture.files.formats import CaptureError, Checks
from specdecode_operator.capture.files.publish import verify
from specdecode_operator.capture.files.validate import validate_capture
from specdecode_operator.capture.job import entrypoint
from specdecode_operator.capture.job.entrypoint import comparison_report, success_message
from specdecode_operator.capture.job.pod_files import Places
from specdecode_operator.capture.job.record_part import Recorders, order_of_arms
from specdecode_operator.capture.load.run_settings import RunSettings
from specdecode_operator.capture.load.runner import LoadResult, run_load
from specdecode_operator.capture.load.shutdown import Stop
from tests.support.arm_pods import ArmPod, arm
from tests.support.capture_pods import PATIENT
from tests.support.recordings import closed, header, write_lines

ORDER = [f"{name}/{number}" for number, names in enumerate(order_of_arms(["off", "ngram"], 2, 3), 1) for name in names]
"""Of the arms `off` and `ngram` with the seed of all captures here."""


def failure_of(pod: ArmPod, load: object = run_load) -> CaptureError:
    with pod.containers(), pytest.raises(CaptureError) as failure:
        pod.job.run(load)  # type: ignore[arg-type]
    return failure.value


@pytest.fixture
def port() -> int:
    return free_ports(1)[0]


class TestPublished:
    def test_every_arm_is_published_in_every_repetition(self, tmp_path: Path, port: int) -> None:
        arms = [arm("off", port), arm("ngram", port, env={"NAME": "a"}, lossy="it guesses")]
        pod = ArmPod(tmp_path, arms=arms, slo={"ttftMs": 200})
        with pod.containers():
            pod.job.run()
        assert pod.published() == ["ngram/1", "ngram/2", "off/1", "off/2"]
        for path in ORDER:
            name, repetition = path.split("/")
            manifest = pod.manifest(name, int(repetition))
            assert (manifest.arm, manifest.repetition) == (name, int(repetition))
            assert manifest.context["command"] == ["vllm", "serve", name]
            assert (manifest.accounting.sent, manifest.accounting.warmup) == (3, 2)
            assert validate_capture(pod.volume / "team/demo" / path).problems == []
            experiment = manifest.experiment
            assert experiment is not None
            assert (experiment.arms, experiment.baseline, experiment.repetitions) == (["off", "ngram"], "off", 2)
            assert [f"{arm}/{number}" for number, arms in enumerate(experiment.order, 1) for arm in arms] == ORDER
            assert (experiment.slo, experiment.lossy) == ({"ttftMs": 200}, {"ngram": "it guesses"})
        times = [pod.manifest(*_split(path)).zero_monotonic_s for path in ORDER]
        assert times == sorted(times)

    def test_checks_run_once_per_arm_and_arms_are_compared(self, tmp_path: Path, port: int) -> None:
        asked = {"greedyPrompts": 2, "structuredRequests": 1}
        pod = ArmPod(tmp_path, arms=[arm("off", port), arm("ngram", port)], checks=asked)
        with pod.containers():
            published = pod.job.run()
        folder = pod.volume / "team/demo"
        assert sorted(str(path.relative_to(folder)) for path in folder.glob("*/*/checks.json")) == [
            "ngram/1/checks.json",
            "off/1/checks.json",
        ]
        found = msgspec.json.decode((folder / "ngram/1/checks.json").read_bytes(), type=Checks)
        assert [each.tokens for each in found.greedy.answers] == [list(range(1000, 1006))] * 2
        assert (found.structured.asked, found.structured.parsed) == (1, 0)
        assert "checks.json" in pod.manifest("ngram", 1).files
        assert verify(folder / "ngram/1") == []

        comparison = pod.job.compare()
        assert comparison is not None
        assert msgspec.json.decode((folder / COMPARISON).read_bytes(), type=Comparison) == comparison
        message = success_message(published, comparison)
        assert len(message) <= 4096
        said = json.loads(message)
        assert CaptureSummary.parse(said["summary"]).path == "team/demo/ngram/2", "of the first that is compared"
        status = ComparisonStatus.parse(said["comparison"])
        assert (status.baseline, [each.name for each in status.arms]) == ("off", ["ngram"])
        assert comparison_report(comparison).startswith("ngram: ")

        baseline, one = comparison.arms
        seven = [msgspec.structs.replace(one, name=f"arm-{number}", message="ü" * 900) for number in range(7)]
        many = msgspec.structs.replace(comparison, arms=[baseline, *seven])
        message = success_message(published, many)
        assert len(message) <= 4096
        assert len(ComparisonStatus.parse(json.loads(message)["comparison"]).arms) == 7

    def test_failed_comparison_keeps_published_arms(
        self, tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pod = ArmPod(tmp_path, arms=[arm("off", port), arm("ngram", port)])
        with pod.containers():
            pod.job.run()

        def fails(_folder: Path) -> None:
            raise ZeroDivisionError("division by zero")

        with monkeypatch.context() as patch:
            patch.setattr(entrypoint, "compare_capture", fails)
            with pytest.raises(CaptureError, match="the arms are published") as failure:
                pod.job.compare()
        assert failure.value.reason == "InternalError"
        assert pod.published() == sorted(ORDER)
        assert pod.job.compare() is not None, "a later attempt compares them"

    def test_single_arm_is_repeated_without_comparison(self, tmp_path: Path, port: int) -> None:
        """To see how far starts differ; there is nothing to compare."""
        pod = ArmPod(tmp_path, arms=[arm("as-deployed", port)])
        with pod.containers():
            pod.job.run()
        assert pod.published() == ["as-deployed/1", "as-deployed/2"]
        assert pod.manifest("as-deployed", 2).experiment is None
        assert pod.job.compare() is None

    def test_later_attempt_continues_after_failed_part(self, tmp_path: Path, port: int) -> None:
        arms = [arm("off", port), arm("ngram", port)]
        sent: list[str] = []

        async def fails_in_third(settings: RunSettings, folder: Path, stop: Stop) -> LoadResult:
            sent.append(folder.parent.name)
            if len(sent) == 3:
                raise OSError(errno.EIO, "Input/output error")
            return await run_load(settings, folder, stop)

        first = ArmPod(tmp_path, arms=arms)
        assert failure_of(first, fails_in_third).message.startswith(f"arm {ORDER[2].replace('/', ', repetition ')}: ")
        assert first.published() == sorted(ORDER[:2])
        before = first.manifest(*_split(ORDER[0]))
        second = ArmPod(tmp_path, "uid-2", arms=arms)
        with second.containers():
            second.job.run(fails_in_third)
        assert sent[3:] == [path.split("/")[0] for path in ORDER[2:]]
        assert second.published() == sorted(ORDER)
        assert second.manifest(*_split(ORDER[0])) == before
        assert second.manifest(*_split(ORDER[3])).attempt == "uid-2"

    def test_later_attempt_of_published_arms_starts_no_engine(self, tmp_path: Path, port: int) -> None:
        arms = [arm("off", port), arm("ngram", port)]
        first = ArmPod(tmp_path, arms=arms)
        with first.containers():
            first.job.run()
        second = ArmPod(tmp_path, "uid-2", arms=arms)
        second.job.prepare(second.root / "bundle")
        # No container starts an engine: there is nothing to ask one.
        assert second.job.run().manifest.attempt == "uid-1"

    def test_arms_of_another_capture_are_not_overwritten(self, tmp_path: Path, port: int) -> None:
        first = ArmPod(tmp_path, arms=[arm("off", port), arm("ngram", port)])
        with first.containers():
            first.job.run()
        other = ArmPod(tmp_path, "uid-2", arms=[arm("new", port), arm("off", port)], capture_uid="capture-2")
        with pytest.raises(CaptureError) as failure:
            other.job.prepare(other.root / "bundle")
        assert failure.value.reason == "AlreadyPublished"
        assert "off/1" in failure.value.message


def _split(path: str) -> tuple[str, int]:
    name, repetition = path.split("/")
    return name, int(repetition)


class TestFailures:
    """Each names the arm; what was published before stays."""

    @staticmethod
    def second(pod: ArmPod, failure: CaptureError) -> str:
        """Return the message of a failure in the second part."""
        name, repetition = _split(ORDER[1])
        whose = f"arm {name}, repetition {repetition}: "
        assert failure.message.startswith(whose)
        assert pod.published() == [ORDER[0]]
        label = pod.label(name, repetition)
        assert (label.reason, label.message) == (failure.reason, failure.message)
        return failure.message.removeprefix(whose)

    @staticmethod
    def arms(port: int, *arguments: str, **changes: object) -> list[dict[str, object]]:
        """Return two arms of which the second to be measured is another."""
        other = ORDER[1].split("/")[0]
        return [
            arm(name, port, *arguments, **changes) if name == other else arm(name, port) for name in ("off", "ngram")
        ]

    def test_engine_exit_at_start_fails_its_arm(self, tmp_path: Path, port: int) -> None:
        pod = ArmPod(tmp_path, arms=self.arms(port, command=["sh", "-c", "exit 3"]))
        failure = failure_of(pod)
        assert failure.reason == "EngineExited"
        assert self.second(pod, failure) == "the engine ended with exit code 3 without an order to stop: see its log"
        assert pod.switcher.wait(60) == 3, "so Kubernetes keeps the engine's last words"

    def test_engine_never_ready_fails_its_arm(self, tmp_path: Path, port: int) -> None:
        pod = ArmPod(tmp_path, arms=self.arms(port, command=["sleep", "1000"], start_seconds=0.001))
        failure = failure_of(pod)
        assert failure.reason == "EngineNotReady"
        assert "not ready after 0.001 s" in self.second(pod, failure)

    def test_engine_exit_under_load_fails_its_arm(self, tmp_path: Path, port: int) -> None:
        pod = ArmPod(tmp_path, arms=self.arms(port, "--exit-code-in", "4:single"))
        failure = failure_of(pod)
        assert failure.reason == "EngineExited"
        self.second(pod, failure)
        assert pod.switcher.wait(60) == 4

    def test_missing_recorder_fails_its_arm(self, tmp_path: Path, port: int) -> None:
        pod = ArmPod(
            tmp_path,
            timeouts=replace(PATIENT, recording_s=0),
            arms=self.arms(port, env={"SPECDECODE_RECORD_DIR": str(tmp_path)}, command=_elsewhere(port, tmp_path)),
        )
        failure = failure_of(pod)
        assert failure.reason == "RecorderMissing"
        self.second(pod, failure)

    def test_full_volume_fails_its_arm(self, tmp_path: Path, port: int) -> None:
        sent: list[Path] = []

        async def fills(settings: RunSettings, folder: Path, stop: Stop) -> LoadResult:
            sent.append(folder)
            if len(sent) == 2:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return await run_load(settings, folder, stop)

        pod = ArmPod(tmp_path, arms=self.arms(port))
        failure = failure_of(pod, fills)
        assert failure.reason == "DiskFull"
        self.second(pod, failure)

    def test_load_beyond_deadline_fails_its_arm(self, tmp_path: Path, port: int) -> None:
        async def hangs(settings: RunSettings, folder: Path, stop: Stop) -> LoadResult:
            async with asyncio.timeout(60):
                await stop.wait()
            return await run_load(settings, folder, stop)

        sent: list[Path] = []

        async def once(settings: RunSettings, folder: Path, stop: Stop) -> LoadResult:
            sent.append(folder)
            if len(sent) == 2:
                raise OSError(errno.EIO, "Input/output error")
            return await run_load(settings, folder, stop)

        failure_of(ArmPod(tmp_path, arms=self.arms(port)), once)
        pod = ArmPod(tmp_path, "uid-2", arms=self.arms(port), deadline_seconds=0.001)
        failure = failure_of(pod, hangs)
        assert failure.reason == "DeadlineExceeded"
        assert failure.message.startswith(f"arm {ORDER[1].replace('/', ', repetition ')}: the load did not end within")
        assert pod.published() == [ORDER[0]]

    def test_sigterm_cancels_running_arm(self, tmp_path: Path, port: int) -> None:
        sent: list[Path] = []

        async def told(settings: RunSettings, folder: Path, stop: Stop) -> LoadResult:
            sent.append(folder)
            if len(sent) == 2:
                os.kill(os.getpid(), signal.SIGTERM)
                async with asyncio.timeout(60):
                    await stop.wait()
            return await run_load(settings, folder, stop)

        pod = ArmPod(tmp_path, arms=self.arms(port))
        failure = failure_of(pod, told)
        assert failure.reason == "Cancelled"
        assert "SIGTERM" in self.second(pod, failure)

    def test_engine_container_without_python3_fails_its_arm(
        self, tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its image has no python3, say."""
        monkeypatch.setattr("specdecode_operator.capture.job.record_part.EngineSwitch.__init__.__defaults__", (0.0,))
        pod = ArmPod(tmp_path, arms=self.arms(port))
        pod.job.prepare(pod.root / "bundle")
        with pytest.raises(CaptureError, match=f"arm {ORDER[0].replace('/', ', repetition ')}: .* must have python3"):
            pod.job.run()
        assert pod.published() == []


def _elsewhere(port: int, folder: Path) -> list[str]:
    """Return an engine that records where nobody looks."""
    command: list[str] = arm("any", port)["command"]
    return ["env", f"SPECDECODE_RECORD_DIR={folder}", *command]


# The order in which arms are measured.


@pytest.mark.parametrize("repetitions", [1, 2, 5, 20])
@pytest.mark.parametrize("arms", [["a"], ["a", "b"], [f"arm-{number}" for number in range(8)]], ids=len)
def test_every_repetition_has_every_arm_once(arms: list[str], repetitions: int) -> None:
    order = order_of_arms(arms, repetitions, seed=3)
    assert len(order) == repetitions
    assert all(sorted(each) == sorted(arms) for each in order)


@pytest.mark.parametrize("seed", range(10))
def test_all_arms_come_equally_early_over_two_repetitions(seed: int) -> None:
    """Over each two repetitions all arms come equally early."""
    order = order_of_arms(["a", "b", "c"], 4, seed)
    for pair in (order[:2], order[2:]):
        assert {sum(each.index(arm) for each in pair) for arm in "abc"} == {2}


def test_every_order_of_arms_is_equally_likely() -> None:
    drawn = Counter(tuple(order_of_arms(["a", "b", "c"], 1, seed)[0]) for seed in range(1200))
    assert drawn.keys() == set(permutations("abc"))
    assert all(150 < count < 250 for count in drawn.values())


# Recorders begin and end in their own time, and are waited for.


async def test_all_api_servers_are_awaited_to_begin_and_to_close(tmp_path: Path) -> None:
    places = Places(tmp_path, "team", "demo", "uid-1")
    places.segments.mkdir(parents=True)
    files = [places.segments / f"segment-a-{server}.jsonl" for server in range(2)]
    first = [header(server, 2, boot="a") for server in range(2)]
    recorders = Recorders(places)

    write_lines(files[0], first[:1])
    beginning = asyncio.create_task(recorders.wait_until_recording(60))
    await asyncio.sleep(0)  # it has looked
    assert not beginning.done()
    write_lines(files[1], first[1:])
    await beginning
    assert [segment.path for segment in recorders.segments()] == files

    write_lines(files[0], [first[0], closed(0, 0)])
    ending = asyncio.create_task(recorders.close(60))
    await asyncio.sleep(0)
    assert places.close_file.exists()
    assert not ending.done()
    write_lines(files[1], [first[1], closed(0, 0)])
    await ending
