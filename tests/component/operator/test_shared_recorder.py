"""The ConfigMap with the recorder on a real API server: shared, repaired, and deleted with the last object."""

import json
from typing import Any, Final

import pytest
import yaml

from specdecode_operator.deployment.live_recorder import is_recorder
from tests.support.conditions import wait_for
from tests.support.kubectl import Kubectl
from tests.support.objects import tiny_cpu
from tests.support.operator_process import OperatorProcess
from tests.support.rest import Rest
from tests.support.waiting import eventually

NAME: Final = "specdecode-recorder"
LAUNCHED: Final = "Unschedulable"


@pytest.fixture
def running(kubectl: Kubectl, operator: OperatorProcess) -> Kubectl:
    operator.ensure()
    return kubectl


def apply(kubectl: Kubectl, *names: str) -> None:
    head = {"apiVersion": "specdecode.io/v1alpha1", "kind": "SpecDecodeDeployment", "spec": tiny_cpu()}
    answer = kubectl.apply(yaml.safe_dump_all([{**head, "metadata": {"name": name}} for name in names]))
    assert answer.returncode == 0, answer.stderr


def launch(kubectl: Kubectl, *names: str) -> None:
    apply(kubectl, *names)
    for name in names:
        wait_for(kubectl, name, "Ready", LAUNCHED)


def recorder(kubectl: Kubectl) -> Any:
    found = kubectl.objects("configmaps", f"--field-selector=metadata.name={NAME}")
    return found[0] if found else None


def is_in_place(kubectl: Kubectl) -> bool:
    found = recorder(kubectl)
    return found is not None and is_recorder(found)


def test_two_objects_share_one_recorder_without_an_owner(running: Kubectl, rest: Rest) -> None:
    launch(running, "one", "two")
    assert is_in_place(running)
    assert "ownerReferences" not in recorder(running)["metadata"]
    rest.reach()
    version = recorder(running)["metadata"]["resourceVersion"]
    launch(running, "three")
    assert recorder(running)["metadata"]["resourceVersion"] == version
    names = {each["metadata"]["name"] for each in running.objects("configmaps")}
    assert {name for name in names if name.endswith("recorder")} == {NAME}


@pytest.mark.parametrize(
    "change",
    [
        {"binaryData": {"recorder.zip": "AA=="}},
        {"data": {"recorder.py": "x"}, "binaryData": {"more": "AA=="}},
        {"binaryData": None},
    ],
    ids=["other program", "more entries", "no program"],
)
def test_edited_recorder_is_repaired(running: Kubectl, change: Any) -> None:
    launch(running, "one", "two")
    uid = recorder(running)["metadata"]["uid"]
    running.must(
        "patch", "configmap", NAME, "--type=merge", f"--patch={json.dumps(change)}", "--field-manager=somebody"
    )
    eventually(lambda: is_in_place(running), "the recorder is as before")
    assert recorder(running)["metadata"]["uid"] == uid


def test_deleted_recorder_is_created_again(running: Kubectl) -> None:
    launch(running, "one")
    running.must("delete", "configmap", NAME)
    eventually(lambda: is_in_place(running), "the recorder is back")


def test_config_map_of_another_owner_blocks_until_it_is_gone(running: Kubectl) -> None:
    running.must("create", "configmap", NAME, "--from-literal=mine=yes")
    apply(running, "one")
    assert NAME in wait_for(running, "one", "Ready", "ChildNameConflict")
    assert recorder(running)["data"] == {"mine": "yes"}
    assert not running.objects("deployments")
    running.must("delete", "configmap", NAME)
    wait_for(running, "one", "Ready", LAUNCHED)
    assert is_in_place(running)


def test_recorder_without_its_label_belongs_to_another_owner(running: Kubectl) -> None:
    launch(running, "one")
    running.must("label", "configmap", NAME, "specdecode.io/recorder-")
    wait_for(running, "one", "Ready", "ChildNameConflict")
    running.must("delete", "configmap", NAME)
    eventually(lambda: is_in_place(running), "the recorder is back")


def test_recorder_is_deleted_with_the_last_object(running: Kubectl, rest: Rest) -> None:
    launch(running, "one", "two")
    running.must("delete", "sdd", "one")
    rest.reach()
    assert is_in_place(running)
    running.must("delete", "sdd", "two")
    eventually(lambda: recorder(running) is None, "the recorder is gone")
    launch(running, "one")
    assert is_in_place(running)


def test_recorder_of_objects_deleted_without_an_operator_goes_at_its_start(
    running: Kubectl, operator: OperatorProcess
) -> None:
    launch(running, "one")
    operator.kill()
    running.must("delete", "sdd", "one")
    operator.start()
    eventually(lambda: recorder(running) is None, "the recorder is gone")
