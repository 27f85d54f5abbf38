"""Captures of a real vLLM while what they stand on breaks: nothing is lost, and nothing that is half is published."""

import json
import os
import signal
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from devcluster.cluster.cluster import Cluster
from devcluster.cluster.control_plane import NODE_NAME
from devcluster.cluster.kubectl import Kubectl as BaseKubectl
from devcluster.cluster.node import ctr
from devcluster.install import NAMESPACE, OPERATOR
from specdecode_operator.capture.files.formats import Manifest, PartialManifest, read_lines
from specdecode_operator.capture.files.merge import client_id
from specdecode_operator.capture.files.publish import verify
from specdecode_operator.capture.files.segments import RecordedRequestCount, list_segments, read_segment, segment_paths
from specdecode_operator.capture.files.validate import validate_capture
from specdecode_operator.capture.job.pod_files import Places
from specdecode_operator.capture.recorder.segment_format import Request
from tests.support.conditions import condition, wait_for
from tests.support.kubectl import Kubectl
from tests.support.small_pair import small_pair
from tests.support.waiting import eventually

Body = dict[str, Any]

EXAMPLES = Path(__file__).parents[3] / "examples"
LOAD_DEADLINE_S = 600
"""Until a capture's engine serves on a machine that is busy."""

END_DEADLINE_S = 600
DRAIN_DEADLINE_S = 400
SOME = 8
"""Requests after which a load is well under way."""

UNWRITTEN_MS = 1000
"""What ended so shortly before a kill may be on its way to the disk: the recorder writes 20 times a second."""

LONG = {"name": "long", "pattern": "Closed", "concurrency": 4, "durationSeconds": 300}
SHORT = {"name": "short", "pattern": "Closed", "concurrency": 4, "durationSeconds": 45}

pytestmark = pytest.mark.long


@pytest.fixture(scope="module", autouse=True)
def tiny(kubectl: Kubectl) -> Iterator[None]:
    """The tiny pair, suspended: all of the machine is for the captures."""
    kubectl.must("delete", "sdc,sdd", "--all", "--all-namespaces")  # what modules before have left
    kubectl.must("apply", f"--filename={EXAMPLES / 'tiny-models.yaml'}")
    kubectl.wait("job/tiny-models", "condition=Complete", 300)
    body: Body = small_pair()
    body["spec"]["suspend"] = True
    assert kubectl.apply(yaml.safe_dump(body)).returncode == 0
    wait_for(kubectl, "tiny", "Ready", "Suspended")
    yield
    kubectl.must("delete", "sdc,sdd", "--all")


def begin(kubectl: Kubectl, name: str, phase: Body, **spec: Any) -> None:
    """Apply a capture with one phase."""
    body: Body = yaml.safe_load((EXAMPLES / "capture-tiny.yaml").read_text())
    body["metadata"]["name"] = name
    body["spec"]["workload"]["phases"] = [phase]
    body["spec"] |= {"deploymentDuringCapture": "Keep", **spec}
    answer = kubectl.apply(yaml.safe_dump(body))
    assert answer.returncode == 0, answer.stderr


def pods_of(kubectl: Kubectl, name: str) -> list[Body]:
    pods = kubectl.objects("pods", f"--selector=specdecode.io/capture={name}")
    return sorted(pods, key=lambda pod: str(pod["metadata"]["creationTimestamp"]))


def places_of(cluster: Cluster, kubectl: Kubectl, name: str, attempt: str) -> Places:
    """Where an attempt is on its volume, as the node sees it."""
    capture = kubectl.object("sdc", name)
    claim = kubectl.object("pvc", capture["status"]["claim"])
    volume = kubectl.object("pv", claim["spec"]["volumeName"])["spec"]["hostPath"]["path"]
    node = cluster.component_pid("containerd")
    return Places(Path(f"/proc/{node}/root{volume}"), kubectl.namespace, name, attempt)


def under_load(cluster: Cluster, kubectl: Kubectl, name: str, earlier: Collection[str] = ()) -> tuple[Body, Places]:
    """Wait until an attempt has recorded some requests; return its pod and places."""

    def look() -> tuple[Body, Places] | None:
        told = condition(kubectl, name, "Succeeded", kind="sdc")
        if told[0] == "False":
            pytest.fail(f"capture {name}: {told}")
        pods = [pod for pod in pods_of(kubectl, name) if pod["metadata"]["uid"] not in earlier]
        assert pods, told
        places = places_of(cluster, kubectl, name, pods[-1]["metadata"]["uid"])
        assert RecordedRequestCount(places.segments).count() >= SOME, told
        return pods[-1], places

    return eventually(look, f"capture {name} is under load", LOAD_DEADLINE_S)


def kill(cluster: Cluster, pod: Body, container: str) -> None:
    """End the first process of a container as the kernel does when memory is short."""
    status = pod["status"]
    identifiers = [
        each["containerID"].removeprefix("containerd://")
        for each in [*status["initContainerStatuses"], *status["containerStatuses"]]
        if each["name"] == container
    ]
    done = cluster.in_namespace(ctr("tasks", "kill", "--signal", "SIGKILL", *identifiers))
    assert done.returncode == 0, done.stderr


def ended(kubectl: Kubectl, name: str) -> tuple[str, str, str]:
    """Wait for a capture's end; return its condition."""

    def look() -> tuple[str, str, str]:
        told = condition(kubectl, name, "Succeeded", kind="sdc")
        assert told[0] in {"True", "False"}, told
        return told

    return eventually(look, f"capture {name} has ended", END_DEADLINE_S)


def label(places: Places) -> PartialManifest:
    text = (places.folder / "manifest.partial.json").read_bytes()
    return msgspec.json.decode(text, type=PartialManifest)


def assert_nothing_is_lost(places: Places) -> None:
    """Fail unless every line can be read, but for a torn last one, and every answer before the end has its record."""
    lines = [line for path in segment_paths(places.segments) for line in read_segment(path)]
    recorded = {client_id(line.external_id or "") for line in lines if isinstance(line, Request)}
    clients = [json.loads(line.text) for line in read_lines(places.client_file) if line.whole]
    answers = {line["id"]: line["finished_ms"] for line in clients if line["outcome"] == "completed"}
    assert len(answers) >= SOME - 4, "some are still in flight"
    written_ms = max(answers.values()) - UNWRITTEN_MS
    assert {name for name, finished_ms in answers.items() if finished_ms < written_ms} <= recorded


def drain(kubectl: Kubectl) -> None:
    """Empty the one real node, and let pods come to it again."""
    options = ("--force", "--ignore-daemonsets", "--delete-emptydir-data", f"--timeout={DRAIN_DEADLINE_S}s")
    try:
        kubectl.must("drain", NODE_NAME, *options, timeout_s=DRAIN_DEADLINE_S + 10)
    finally:
        kubectl.must("uncordon", NODE_NAME)


def test_killed_load_or_engine_container_loses_no_records(cluster: Cluster, kubectl: Kubectl) -> None:
    """The load generator is killed in the first attempt, and the engine in the second."""
    begin(kubectl, "killed", LONG, backoffLimit=1)
    first, first_places = under_load(cluster, kubectl, "killed")
    kill(cluster, first, "load")
    second, places = under_load(cluster, kubectl, "killed", {first["metadata"]["uid"]})
    kill(cluster, second, "engine")
    status, reason, message = ended(kubectl, "killed")
    assert (status, reason) == ("False", "EngineExited"), message
    assert "the engine was restarted (1)" in message
    assert not places.final.exists(), "nothing is published"
    assert label(first_places).reason == "Unfinished"
    assert label(places).reason == "EngineExited"
    assert_nothing_is_lost(first_places)
    assert_nothing_is_lost(places)
    assert [each.closed.reason for each in list_segments(first_places.segments) if each.closed] == ["exit"]
    assert list_segments(places.segments)[0].closed is None, "it was killed"
    pods = pods_of(kubectl, "killed")
    assert {pod["status"]["phase"] for pod in pods} == {"Failed"}, "no engine holds a GPU"


def test_drained_node_fails_the_capture_without_retries(cluster: Cluster, kubectl: Kubectl) -> None:
    """Without another attempt it fails, and says that the node was the reason; the operator was on it as well."""
    begin(kubectl, "drained", LONG)
    _, places = under_load(cluster, kubectl, "drained")
    drain(kubectl)
    status, reason, message = ended(kubectl, "drained")
    assert (status, reason) == ("False", "NodeLost"), message
    assert label(places).reason == "Cancelled"
    assert_nothing_is_lost(places)
    assert not places.final.exists()


def test_capture_retries_after_drain_and_survives_killed_api_server(cluster: Cluster, kubectl: Kubectl) -> None:
    """With another attempt it begins anew; that one needs no API server while it runs."""
    begin(kubectl, "patient", SHORT, backoffLimit=1)
    first, first_places = under_load(cluster, kubectl, "patient")
    drain(kubectl)
    _, places = under_load(cluster, kubectl, "patient", {first["metadata"]["uid"]})
    recorded = RecordedRequestCount(places.segments)
    before = recorded.count()
    api_server = cluster.component_pid("kube-apiserver")
    assert api_server is not None
    os.kill(api_server, signal.SIGKILL)
    eventually(lambda: recorded.count() >= before + SOME, "the load goes on", LOAD_DEADLINE_S)
    cluster.up("real")
    assert ended(kubectl, "patient")[0] == "True"

    assert label(first_places).reason == "Cancelled"
    assert_nothing_is_lost(first_places)
    assert verify(places.final) == []
    assert validate_capture(places.final).problems == []
    manifest = msgspec.json.decode((places.final / "manifest.json").read_bytes(), type=Manifest)
    assert manifest.attempt == places.attempt
    assert manifest.config.speculative is not None
    assert manifest.config.speculative.method == "draft_model"
    assert manifest.engine_counters is not None
    assert manifest.engine_counters.accepted_tokens == manifest.summary["speculation"]["accepted_tokens"] > 0
    assert manifest.gates["engine_counters"].value == 0
    requests = kubectl.object("sdc", "patient")["status"]["summary"]["requests"]
    assert requests["sent"] == requests["completed"] == manifest.accounting.records


def restarts(kubectl: BaseKubectl, selector: str) -> list[int]:
    """How often the containers of some pods were started again."""
    statuses = [pod["status"] for pod in kubectl.objects("pods", f"--selector={selector}")]
    both = ("initContainerStatuses", "containerStatuses")
    return [each["restartCount"] for status in statuses for field in both for each in status.get(field, [])]


def test_too_small_volume_fails_before_the_engine_starts(
    kubectl: Kubectl, small_volume: Callable[[str, int], str]
) -> None:
    small_volume("small", 8)
    begin(kubectl, "small", SHORT, storage={"persistentVolumeClaim": {"claimName": "small"}})
    status, reason, message = ended(kubectl, "small")
    assert (status, reason) == ("False", "VolumeTooSmall")
    assert "has 8 MiB free" in message
    (pod,) = pods_of(kubectl, "small")
    (engine,) = (each for each in pod["status"]["initContainerStatuses"] if each["name"] == "engine")
    assert "containerID" not in engine, "no engine is started for it"


def test_full_volume_fails_the_capture_and_engines_return(
    cluster: Cluster, kubectl: Kubectl, small_volume: Callable[[str, int], str]
) -> None:
    """Engine and operator go on, and the deployment has its GPUs back."""
    system = kubectl.within(NAMESPACE)
    restarted_before = restarts(system, f"app.kubernetes.io/name={OPERATOR}")
    path = small_volume("full", 64)
    begin(
        kubectl,
        "full",
        LONG,
        storage={"persistentVolumeClaim": {"claimName": "full"}},
        deploymentDuringCapture="Suspend",
    )
    wait_for(kubectl, "full", "Accepted", "Valid", kind="sdc")
    kubectl.must("patch", "sdd", "tiny", "--type=merge", '--patch={"spec":{"suspend":false}}')
    _, places = under_load(cluster, kubectl, "full")
    wait_for(kubectl, "tiny", "Ready", "SuspendedForCapture")
    filled = cluster.in_namespace(["dd", "if=/dev/zero", f"of={path}/filler", "bs=4096"])
    assert "No space left" in filled.stderr
    status, reason, message = ended(kubectl, "full")
    assert (status, reason) == ("False", "DiskFull"), message
    assert label(places).reason == "DiskFull"
    assert not places.final.exists()
    assert_nothing_is_lost(places)
    assert set(restarts(kubectl, "specdecode.io/capture=full")) == {0}
    assert restarts(system, f"app.kubernetes.io/name={OPERATOR}") == restarted_before != []
    wait_for(kubectl, "tiny", "Ready", "Serving", LOAD_DEADLINE_S)
    kubectl.must("patch", "sdd", "tiny", "--type=merge", '--patch={"spec":{"suspend":true}}')
