"""Live captures of two real engines under the load of their users: no restart, no failed request, no lost record."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from devcluster.cluster.cluster import Cluster
from devcluster.install import NAMESPACE
from specdecode_operator.api.capture_status import ArmVerdict
from specdecode_operator.capture.files.formats import Live, Manifest
from specdecode_operator.capture.trace_reader import Recording, read_recording
from tests.e2e.serving.test_capture import EXAMPLES, specdecode
from tests.e2e.serving.test_capture_robustness import kill, places_of
from tests.support import plain_http
from tests.support.conditions import condition, wait_for
from tests.support.kubectl import Kubectl
from tests.support.live_users import LiveUsers
from tests.support.small_pair import small_pair
from tests.support.waiting import eventually

Body = dict[str, Any]

ENGINES = "--selector=specdecode.io/deployment=tiny"
ENGINE_DEADLINE_S = 900
END_DEADLINE_S = 900
PORT = 8000
USERS = 4
REQUESTS = 40
WHILE_S = 90
"""Long enough for a part to fail and to come back."""

ENDLESS = 10**6
SOME = 12
"""Requests after which a recording is well under way."""

KILL_SIDECAR = """
import os, pathlib, signal
for each in pathlib.Path("/proc").glob("[0-9]*"):
    if int(each.name) not in (1, os.getpid()) and b"recorder.zip" in (each / "cmdline").read_bytes():
        os.kill(int(each.name), signal.SIGKILL)
"""
COUNTERS = ("vllm:request_success_total", "vllm:generation_tokens_total", "vllm:prompt_tokens_total")


def engine_pods(kubectl: Kubectl) -> list[Body]:
    return sorted(kubectl.objects("pods", ENGINES), key=lambda pod: str(pod["metadata"]["name"]))


def share_two_cores(kubectl: Kubectl) -> None:
    """Lower what running engines request, so that a node with two cores has room for both and for a collector."""
    for pod in engine_pods(kubectl):
        (engine,) = (each for each in pod["spec"]["containers"] if each["name"] == "engine")
        if pod["status"]["phase"] == "Running" and engine["resources"]["requests"]["cpu"] != "400m":
            resources = {"containers": [{"name": "engine", "resources": {"requests": {"cpu": "400m"}}}]}
            patch = json.dumps({"spec": resources})
            kubectl.must("patch", "pod", pod["metadata"]["name"], "--subresource=resize", f"--patch={patch}")


@pytest.fixture(scope="module")
def serving(kubectl: Kubectl) -> Iterator[Kubectl]:
    """Two engines of the tiny pair."""
    kubectl.must("apply", f"--filename={EXAMPLES / 'tiny-models.yaml'}")
    kubectl.wait("job/tiny-models", "condition=Complete", 300)
    body: Body = small_pair()
    body["spec"]["replicas"] = 2
    assert kubectl.apply(yaml.safe_dump(body)).returncode == 0

    def is_ready() -> bool:
        share_two_cores(kubectl)
        return kubectl.object("sdd", "tiny").get("status", {}).get("ready") == "2/2"

    eventually(is_ready, "both engines serve", ENGINE_DEADLINE_S)
    yield kubectl
    kubectl.must("delete", "sdc,sdd", "--all")


def live_capture(name: str, *, storage: Body | None = None, deadline_seconds: int | None = None, **live: Any) -> Body:
    """Return a live capture of these engines."""
    spec = {"deployment": "tiny", "source": "Live", "live": live, "storage": storage or {"size": "1Gi"}}
    more = {} if deadline_seconds is None else {"deadlineSeconds": deadline_seconds}
    return {
        "apiVersion": "specdecode.io/v1alpha1",
        "kind": "SpecDecodeCapture",
        "metadata": {"name": name},
        "spec": spec | more,
    }


def ended(kubectl: Kubectl, name: str) -> Body:
    """Wait for the end of a capture; return it."""

    def look() -> Body:
        body = kubectl.object("sdc", name)
        assert body.get("status", {}).get("phase") in {"Succeeded", "Failed"}, condition(kubectl, name, "Ready", "sdc")
        return body

    return eventually(look, f"capture {name} has ended", END_DEADLINE_S)


def identities(pods: list[Body]) -> list[tuple[str, str, list[int]]]:
    """Return what tells whether pods were replaced or restarted."""
    both = ("initContainerStatuses", "containerStatuses")
    return [
        (
            pod["metadata"]["uid"],
            pod["metadata"]["labels"]["pod-template-hash"],
            [each["restartCount"] for field in both for each in pod["status"].get(field, [])],
        )
        for pod in pods
    ]


def counters(pods: list[Body]) -> dict[str, float]:
    """Return the sums of vLLM's own counters of some engines."""
    totals = dict.fromkeys(COUNTERS, 0.0)
    for pod in pods:
        page = plain_http.get(f"http://{pod['status']['podIP']}:{PORT}/metrics", timeout=60).text
        for line in page.splitlines():
            name = line.partition("{")[0]
            if name in totals:
                totals[name] += float(line.rpartition(" ")[2])
    return totals


@dataclass(frozen=True)
class Captured:
    """A capture that has ended, and its files."""

    status: Body
    folder: Path

    @property
    def manifest(self) -> Manifest:
        return msgspec.json.decode((self.folder / "manifest.json").read_bytes(), type=Manifest)

    @property
    def live(self) -> Live:
        live = self.manifest.live
        assert live is not None
        return live

    @property
    def recording(self) -> Recording:
        return read_recording(self.folder)


def captured(cluster: Cluster, kubectl: Kubectl, name: str) -> Captured:
    """Return a capture that must have succeeded, with the files on its volume."""
    body = ended(kubectl, name)
    assert body["status"]["phase"] == "Succeeded", condition(kubectl, name, "Succeeded", "sdc")
    return Captured(body["status"], places_of(cluster, kubectl, name, "").final)


def completions(pod: Body) -> str:
    return f"http://{pod['status']['podIP']}:{PORT}/v1/completions"


def begin(kubectl: Kubectl, name: str, **options: Any) -> None:
    assert kubectl.write(yaml.safe_dump(live_capture(name, **options))).returncode == 0


def under_way(kubectl: Kubectl, name: str) -> None:
    """Wait until a live capture has recorded some requests of both engines."""

    def look() -> bool:
        log = kubectl.must("logs", f"job/{kubectl.object('sdc', name)['status']['job']}", "--container=collect")
        last = json.loads(log.splitlines()[-1])
        assert (last["phase"], last["joined"]) == ("live", 2), last
        return bool(last["recorded"] >= SOME)

    eventually(look, f"capture {name} has recorded {SOME} requests", END_DEADLINE_S)


def assert_records_again(cluster: Cluster, kubectl: Kubectl, name: str) -> None:
    """Fail unless another live capture records both engines."""
    begin(kubectl, name, requests=SOME)
    found = captured(cluster, kubectl, name)
    assert found.live.lost == []
    assert [pod.missing for pod in found.live.pods] == [None, None]


@dataclass(frozen=True)
class Story:
    """Three live captures of the same engines, while their users went on."""

    command: "subprocess.CompletedProcess[str]"
    fetched: Path
    captures: dict[str, Captured]
    users: LiveUsers
    before: list[tuple[str, str, list[int]]]
    after: list[tuple[str, str, list[int]]]
    grown: dict[str, float]


@pytest.fixture(scope="module")
def story(cluster: Cluster, serving: Kubectl, tmp_path_factory: pytest.TempPathFactory) -> Story:
    """The command records first; then two captures are created at once, of which one records a sample."""
    kubectl, fetched = serving, tmp_path_factory.mktemp("captures") / "first"
    url = f"http://{kubectl.service_address('tiny')}/v1/completions"
    before, counted = identities(engine_pods(kubectl)), counters(engine_pods(kubectl))
    with LiveUsers([url] * USERS) as users:
        command = specdecode(kubectl, "live", "tiny", f"--requests={REQUESTS}", "--name=first", f"--out={fetched}")
        assert command.returncode == 0, command.stdout + command.stderr
        both = [live_capture("second", requests=REQUESTS, samplePercent=50), live_capture("third", requests=REQUESTS)]
        for each in both:
            assert kubectl.write(yaml.safe_dump(each)).returncode == 0
        waited = wait_for(kubectl, "third", "Ready", "WaitingForDeployment", kind="sdc")
        assert "second" in waited
        captures = {name: captured(cluster, kubectl, name) for name in ("first", "second", "third")}
    pods = engine_pods(kubectl)
    grown = {name: value - counted[name] for name, value in counters(pods).items()}
    return Story(command, fetched, captures, users, before, identities(pods), grown)


NAMES = ("first", "second", "third")


def test_users_and_engines_do_not_notice(story: Story) -> None:
    assert story.users.failed == []
    assert story.after == story.before
    assert len(story.before) == 2
    assert {count for _, _, counts in story.after for count in counts} == {0}
    assert len({template for _, template, _ in story.after}) == 1


@pytest.mark.parametrize("name", NAMES)
def test_every_request_is_accounted_for_by_recorders_and_vllm(story: Story, name: str) -> None:
    capture = story.captures[name]
    accounting = capture.live.accounting
    assert accounting.admitted == accounting.recorded + accounting.sampled_out + accounting.dropped
    assert (accounting.dropped, accounting.records) == (0, accounting.recorded)
    assert accounting.recorded >= REQUESTS
    assert capture.live.lost == []
    gates = capture.manifest.gates
    for gate in ("accounting", "finished_requests", "generated_tokens", "engine_counters"):
        assert (gates[gate].value, gates[gate].passed) == (0, True), gates[gate]
    assert gates["dropped"].value == 0
    assert [(pod.api_servers, pod.missing) for pod in capture.live.pods] == [(1, None)] * 2
    told = capture.status["summary"]["live"]
    assert (told["pods"], told["recorded"], told["sampledOut"]) == (2, accounting.recorded, accounting.sampled_out)


def window(capture: Captured) -> tuple[float, float]:
    """Return the time in which each engine recorded for certain, in seconds since 1970."""
    opened_s, firsts_s = capture.live.window.started_wall_s, {}
    for request in capture.recording.requests:
        assert request.arrival_ms is not None
        arrival_s = opened_s + request.arrival_ms / 1000
        firsts_s[request.engine] = min(arrival_s, firsts_s.get(request.engine, arrival_s))
    assert len(firsts_s) == 2, "both engines have recorded"
    return max(firsts_s.values()), opened_s + capture.live.window.seconds


def lengths(capture: Captured) -> list[tuple[int, int]]:
    """Return the tokens of prompt and answer of each record."""
    return [(each.prompt_tokens, each.output_tokens) for each in capture.recording.requests]


@pytest.mark.parametrize("name", NAMES)
def test_records_are_the_requests_of_the_users(story: Story, name: str) -> None:
    capture, users = story.captures[name], story.users
    found = lengths(capture)
    assert len(found) == len({*found}) == capture.live.accounting.recorded
    assert {*found} <= users.lengths_of(users.answered)
    certain = users.within(*window(capture))
    assert len(certain) > REQUESTS / 2, "most requests were in the middle of the window"
    if name == "second":
        accounting = capture.live.accounting
        assert accounting.sampled_out > 0
        assert len(certain) <= accounting.admitted
    else:
        assert certain <= {*found}


def test_vllm_has_counted_the_requests_of_the_users_alone(story: Story) -> None:
    users = story.users
    prompts = sum(each.lengths[0] for each in users.answered)
    answers = sum(each.lengths[1] for each in users.answered)
    assert story.grown == dict(zip(COUNTERS, (len(users.answered), answers, prompts), strict=True))


def test_captures_of_one_deployment_take_turns(story: Story) -> None:
    second, third = (story.captures[name].live.window for name in ("second", "third"))
    assert second.started_wall_s + second.seconds <= third.started_wall_s


def test_the_command_shows_what_is_recorded(story: Story) -> None:
    lines = [line.split() for line in story.command.stdout.splitlines()]
    (joining,) = (line for line in lines if line[0] == "joining")
    (recording,) = (line for line in lines if line[0] == "live")
    assert joining[2:6] == ["of", "2", "engine", "pods"]
    seen, recorded = (int(recording[recording.index(word) + 1]) for word in ("seen", "recorded"))
    assert seen >= recorded > 0


def specdecode_in(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run a command that needs no cluster."""
    command = [str(Path(sys.executable).with_name("specdecode")), *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, check=False)


def test_files_feed_the_commands(serving: Kubectl, story: Story, tmp_path: Path) -> None:
    assert {path.name for path in story.fetched.iterdir()} == {"manifest.json", "trace.jsonl", "step-stats.jsonl"}
    validated = specdecode(serving, "validate", str(story.fetched))
    assert validated.returncode == 0, validated.stdout + validated.stderr
    for command in (
        ["capture", "report", str(story.fetched)],
        ["replay", "fit", str(story.fetched), "--out=model.json"],
    ):
        done = specdecode_in(tmp_path, *command)
        assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((tmp_path / "model.json").read_text())["acceptance"]


@pytest.mark.long
class TestDisturbed:
    """What a live capture stands on breaks while users go on; runs after the others, on the same engines.

    Each test records after the failure of the one before.
    """

    @pytest.fixture
    def users(self, serving: Kubectl) -> Iterator[LiveUsers]:
        """Two users of each engine, by the address of its pod."""
        with LiveUsers([completions(pod) for pod in engine_pods(serving) for _ in range(2)]) as users:
            yield users

    def test_killed_sidecar(self, cluster: Cluster, serving: Kubectl, users: LiveUsers) -> None:
        """It starts again and connects again: the gap has a size."""
        before = identities(engine_pods(serving))
        begin(serving, "sidecar", durationSeconds=WHILE_S)
        hurt = engine_pods(serving)[0]["metadata"]["name"]
        under_way(serving, "sidecar")
        serving.must("exec", hurt, "--container=recorder", "--", "python3", "-c", KILL_SIDECAR)
        found = captured(cluster, serving, "sidecar")
        (loss,) = found.live.lost
        assert loss.pod == hurt
        assert loss.requests is not None
        assert (found.status["summary"]["live"]["gaps"], found.status["summary"]["live"]["lostRequests"]) == (
            1,
            loss.requests,
        )
        assert found.manifest.gates["accounting"].passed
        assert users.failed == []
        assert identities(engine_pods(serving)) == before

    def test_killed_engine(self, cluster: Cluster, serving: Kubectl, users: LiveUsers) -> None:
        """Only its own users notice; the number of lost requests is unknown."""
        begin(serving, "engine", durationSeconds=WHILE_S)
        hurt = engine_pods(serving)[0]
        under_way(serving, "engine")
        kill(cluster, hurt, "engine")
        found = captured(cluster, serving, "engine")
        losses = [loss for loss in found.live.lost if loss.pod == hurt["metadata"]["name"]]
        assert losses == found.live.lost
        assert losses[0].requests is None
        assert found.status["summary"]["live"]["gaps"] == len(losses)
        assert {url for url, _ in users.failed} <= {completions(hurt)}
        wait_for(serving, "tiny", "Ready", "Serving", ENGINE_DEADLINE_S)

    def test_killed_operator(self, cluster: Cluster, serving: Kubectl, users: LiveUsers) -> None:
        begin(serving, "operator", durationSeconds=WHILE_S)
        under_way(serving, "operator")
        serving.within(NAMESPACE).must("delete", "pod", "--all", "--grace-period=0", "--force")
        found = captured(cluster, serving, "operator")
        assert found.live.lost == []
        assert users.failed == []

    def test_full_volume(
        self, cluster: Cluster, serving: Kubectl, users: LiveUsers, small_volume: Callable[[str, int], str]
    ) -> None:
        path = small_volume("full", 64)
        begin(serving, "full", storage={"persistentVolumeClaim": {"claimName": "full"}}, requests=ENDLESS)
        under_way(serving, "full")
        filled = cluster.in_namespace(["dd", "if=/dev/zero", f"of={path}/filler", "bs=4096"])
        assert "No space left" in filled.stderr
        assert ended(serving, "full")["status"]["phase"] == "Failed"
        assert condition(serving, "full", "Succeeded", "sdc")[1] == "DiskFull"
        assert users.failed == []

    def test_deleted_collector(self, cluster: Cluster, serving: Kubectl, users: LiveUsers) -> None:
        begin(serving, "collector", requests=ENDLESS)
        under_way(serving, "collector")
        serving.must("delete", "pods", "--selector=specdecode.io/capture=collector")
        assert ended(serving, "collector")["status"]["phase"] == "Failed"
        assert condition(serving, "collector", "Succeeded", "sdc")[1] == "NodeLost"
        assert users.failed == []
        assert_records_again(cluster, serving, "after-collector")


@pytest.mark.long
def test_arms_are_compared_under_the_recorded_traffic(serving: Kubectl, story: Story) -> None:
    """Runs last: it takes the place of the engines."""
    body: Body = yaml.safe_load((EXAMPLES / "does-it-pay-tiny.yaml").read_text())
    body["spec"]["repetitions"] = 2
    recorded = {"claimName": story.captures["first"].status["claim"]}
    dataset = {"persistentVolumeClaim": recorded, "path": story.captures["first"].status["path"], "format": "Trace"}
    body["spec"]["workload"] = {
        "prompts": {"dataset": dataset},
        "phases": [{"name": "as-it-came", "pattern": "Recorded", "requests": 16}],
        "warmupRequests": 2,
    }
    body["spec"]["checks"] = {"greedyPrompts": 1, "structuredRequests": 0}
    body["spec"]["slo"] = {"ttftMs": 60_000, "tpotMs": 60_000}  # requests come at the same rate in all arms
    assert serving.write(yaml.safe_dump(body)).returncode == 0
    found = ended(serving, "does-it-pay")
    assert found["status"]["phase"] == "Succeeded", condition(serving, "does-it-pay", "Succeeded", "sdc")
    (arm,) = found["status"]["comparison"]["arms"]
    assert condition(serving, "does-it-pay", "Pays", "sdc")[1] == arm["verdict"] in {*ArmVerdict}
