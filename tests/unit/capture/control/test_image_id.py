"""What image the engine of a capture runs, on its way from the pod's status to the load generator."""

from pathlib import Path
from typing import Any

from specdecode_operator.capture.decision import decide
from specdecode_operator.capture.job.pod_files import IMAGE_ID_FILE, engine_image_id
from specdecode_operator.capture.observation import read_capture
from tests.support.capture_decisions import NOW, decided
from tests.support.captures import capture, capture_pod, capture_spec, job, running, surroundings
from tests.support.objects import Body

DIGEST = "docker.io/vllm/vllm-openai@sha256:" + "0" * 64


def engine(image_id: str) -> dict[str, Any]:
    return {**running("engine"), "imageID": image_id}


def note(*pods: Body, **seen: Any) -> Body | None:
    decision, _ = decided(capture(), surroundings(**{"job": job(), "pods": pods, **seen}))
    return decision.writes.image_id


def test_it_is_told_of_the_pod_that_runs_now() -> None:
    first = capture_pod(name="a", created="1", phase="Failed", initContainerStatuses=[engine("sha256:1")])
    second = capture_pod(name="b", created="2", initContainerStatuses=[running("prepare"), engine(DIGEST)])
    told = note(first, second)
    assert told is not None
    assert told["data"] == {"engine-image-id": f"b-uid {DIGEST}\n"}
    assert told["metadata"]["name"] == "demo-capture"
    assert [owner["uid"] for owner in told["metadata"]["ownerReferences"]] == ["capture-uid"], (
        "it goes with the capture"
    )


async def test_the_load_generator_understands_it(tmp_path: Path) -> None:
    told = note(capture_pod(initContainerStatuses=[engine(DIGEST)]))
    assert told is not None
    ((name, text),) = told["data"].items()
    (tmp_path / name).write_text(text)
    assert await engine_image_id(tmp_path / name, "demo-capture-x-uid", until_s=0) == DIGEST
    assert await engine_image_id(tmp_path / name, "another-uid", until_s=0) is None, "it is of another attempt"


def test_an_image_that_the_node_does_not_name_yet_is_not_told() -> None:
    assert note() is None
    assert note(capture_pod(phase="Pending", initContainerStatuses=[{**running("prepare"), "imageID": DIGEST}])) is None
    assert note(capture_pod(phase="Pending", initContainerStatuses=[engine("")])) is None


def test_nothing_is_told_when_nobody_listens_any_more() -> None:
    for end, phase in (("Complete", "Succeeded"), ("Failed", "Failed")):
        ended = capture_pod(phase=phase, initContainerStatuses=[engine(DIGEST)])
        assert note(ended, job=job(end)) is None
    pod = capture_pod(initContainerStatuses=[engine(DIGEST)])
    cancelled, _ = decided(capture(capture_spec(suspend=True)), surroundings(job=job(), pods=[pod]))
    assert cancelled.writes.image_id is None


def test_the_load_generator_sees_it_as_a_file() -> None:
    decision = decide(read_capture(capture()), surroundings(), NOW)
    assert decision.writes.job is not None
    pod = decision.writes.job["spec"]["template"]["spec"]
    (load,) = pod["containers"]
    (mount,) = (each for each in load["volumeMounts"] if each["mountPath"] == "/specdecode/podinfo")
    (volume,) = (each for each in pod["volumes"] if each["name"] == mount["name"])
    told = note(capture_pod(initContainerStatuses=[engine(DIGEST)]))
    assert told is not None
    assert f"{mount['mountPath']}/engine-image-id" == str(IMAGE_ID_FILE)
    assert volume["configMap"] == {
        "name": told["metadata"]["name"],
        "items": [{"key": "engine-image-id", "path": "engine-image-id"}],
        "optional": True,
    }, "the pod starts before there is anything to tell"
    others = [each for each in pod["initContainers"] if mount["name"] in {it["name"] for it in each["volumeMounts"]}]
    assert not others
