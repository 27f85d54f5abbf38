"""Models that nobody describes, against a real API server: Job, answer, ConfigMap, plan. Pods are answered for here."""

import json
import shutil
from typing import Any

import pytest
import yaml

from specdecode_operator.deployment.models.checkpoint_reader import (
    Checkpoint,
    CheckpointError,
    Weights,
    pack_error,
    pack_facts,
)
from tests.support.conditions import condition, wait_for
from tests.support.facts_files import write_facts
from tests.support.kubectl import Kubectl
from tests.support.objects import TINY_CONFIG, tiny_cpu
from tests.support.operator_process import OperatorProcess
from tests.support.waiting import eventually

FACTS = "specdecode-model-facts"
READERS = "--selector=specdecode.io/reads-model-for=tiny"
LAUNCHED = "Unschedulable"
NOT_FOUND = pack_error(CheckpointError("ModelNotFound", "there is no config.json in /models/pair/target"))


@pytest.fixture(autouse=True)
def _running(operator: OperatorProcess) -> None:
    pass


def undescribed(**changes: Any) -> dict[str, Any]:
    return {**tiny_cpu(), "target": {"model": "pair/target"}, **changes}


def apply(kubectl: Kubectl, name: str, spec: dict[str, Any]) -> None:
    body = {"apiVersion": "specdecode.io/v1alpha1", "kind": "SpecDecodeDeployment", "metadata": {"name": name}}
    answer = kubectl.write(yaml.safe_dump({**body, "spec": spec}))
    assert answer.returncode == 0, answer.stderr


def reader(kubectl: Kubectl, name: str) -> dict[str, Any]:
    """The pod that the Job controller has made for the object; that of an earlier Job goes later than its Job."""

    def look() -> dict[str, Any] | None:
        of_object = f"--selector=specdecode.io/reads-model-for={name}"
        jobs = {job["metadata"]["uid"] for job in kubectl.objects("jobs")}
        pods = [
            pod
            for pod in kubectl.objects("pods", of_object)
            if pod["metadata"]["ownerReferences"][0]["uid"] in jobs and pod["status"].get("phase") != "Succeeded"
        ]
        return pods[0] if pods else None

    return eventually(look, f"a pod reads a model for {name}")


def answer(kubectl: Kubectl, name: str, message: str, exit_code: int = 0) -> None:
    """Write into the reader's status what its kubelet would."""
    pod = reader(kubectl, name)
    ended = {"terminated": {"exitCode": exit_code, "message": message}}
    running = {"state": ended} if exit_code == 0 else {"state": {"waiting": {"reason": "CrashLoopBackOff"}}}
    container = {"name": "read-model", "ready": False, "restartCount": 0, "image": "i:1", "imageID": "", **running}
    if exit_code:
        container["lastState"] = ended
    conditions = [{"type": "PodScheduled", "status": "True"}]
    phase = "Running" if exit_code else "Succeeded"
    status = {"phase": phase, "conditions": conditions, "containerStatuses": [container]}
    kubectl.patch_pod_status(pod["metadata"]["name"], status)


def facts(config: dict[str, Any] | None = None) -> str:
    return pack_facts(Checkpoint(config or TINY_CONFIG, Weights(5_771_776, 39, True, {"BF16": 5_771_776}, {})))


def known(kubectl: Kubectl) -> list[str]:
    found = kubectl.objects("configmaps", f"--field-selector=metadata.name={FACTS}")
    return sorted(found[0].get("data") or {}) if found else []


def test_model_facts_from_reader_job_complete_the_plan_and_are_shared(
    kubectl: Kubectl, operator: OperatorProcess
) -> None:
    apply(kubectl, "tiny", undescribed())
    wait_for(kubectl, "tiny", "Planned", "ResolvingModel")
    assert condition(kubectl, "tiny", "Ready")[0] == "Unknown"
    assert condition(kubectl, "tiny", "Reconciling")[0] == "True"
    assert not kubectl.objects("deployments")
    (job,) = kubectl.objects("jobs")
    operator.kill()
    answer(kubectl, "tiny", facts())
    operator.start()
    wait_for(kubectl, "tiny", "Planned", "Fits")
    wait_for(kubectl, "tiny", "Ready", LAUNCHED)
    eventually(lambda: not kubectl.objects("jobs"), "the finished Job is removed")
    (entry,) = known(kubectl)
    assert entry.startswith("pair.target-")
    body = kubectl.object("configmap", FACTS)
    assert "ownerReferences" not in body["metadata"]
    assert job["metadata"]["ownerReferences"][0]["name"] == "tiny"

    apply(kubectl, "second", undescribed())
    wait_for(kubectl, "second", "Planned", "Fits")
    assert not kubectl.objects("jobs"), "what is known is not read again"
    version = kubectl.object("configmap", FACTS)["metadata"]["resourceVersion"]
    assert version == body["metadata"]["resourceVersion"]


def test_deleted_model_facts_are_read_again_while_engines_stay(kubectl: Kubectl) -> None:
    apply(kubectl, "tiny", undescribed())
    answer(kubectl, "tiny", facts())
    # Ready has that reason while the Job's pod waits, too.
    uid = eventually(lambda: kubectl.object("deployment", "tiny"), "engines are launched")["metadata"]["uid"]
    # The answer of a Job that is still there would be written into a new ConfigMap.
    eventually(lambda: not kubectl.objects("jobs"), "the finished Job is removed")
    eventually(lambda: not kubectl.objects("pods", READERS), "its pod, too")
    kubectl.must("delete", "configmap", FACTS)
    wait_for(kubectl, "tiny", "Planned", "ResolvingModel")
    assert kubectl.object("deployment", "tiny")["metadata"]["uid"] == uid
    answer(kubectl, "tiny", facts())
    wait_for(kubectl, "tiny", "Planned", "Fits")
    assert kubectl.object("deployment", "tiny")["metadata"]["uid"] == uid


def test_failed_reader_is_reported_and_replaced_after_spec_change(kubectl: Kubectl) -> None:
    apply(kubectl, "tiny", undescribed())
    (first,) = eventually(lambda: kubectl.objects("jobs"), "a Job reads the model")
    answer(kubectl, "tiny", NOT_FOUND, exit_code=1)
    message = wait_for(kubectl, "tiny", "Ready", "ModelNotFound")
    assert message.startswith("spec.target.model: pair/target on PersistentVolumeClaim tiny-models: there is no")
    assert condition(kubectl, "tiny", "Planned")[:2] == ("Unknown", "ResolvingModel")
    assert [job["metadata"]["uid"] for job in kubectl.objects("jobs")] == [first["metadata"]["uid"]], "people can look"
    apply(kubectl, "tiny", undescribed(target={"model": "pair/other"}))

    def replaced() -> bool:
        names = [job["metadata"]["name"] for job in kubectl.objects("jobs")]
        return len(names) == 1 and names != [first["metadata"]["name"]]

    eventually(replaced, "another Job takes its place")


def test_unreadable_model_config_sets_stalled_until_fixed(kubectl: Kubectl) -> None:
    apply(kubectl, "tiny", undescribed())
    unreadable = pack_error(CheckpointError("ConfigUnreadable", "config.json is not JSON"))
    answer(kubectl, "tiny", unreadable, exit_code=1)
    wait_for(kubectl, "tiny", "Planned", "ConfigUnreadable")
    assert condition(kubectl, "tiny", "Stalled")[0] == "True"
    answer(kubectl, "tiny", facts())
    wait_for(kubectl, "tiny", "Planned", "Fits")


def test_model_facts_config_map_of_other_owner_is_not_changed(kubectl: Kubectl) -> None:
    kubectl.must("create", "configmap", FACTS, "--from-literal=mine=yes")
    apply(kubectl, "tiny", undescribed())
    answer(kubectl, "tiny", facts())
    assert FACTS in wait_for(kubectl, "tiny", "Ready", "ChildNameConflict")
    assert kubectl.object("configmap", FACTS)["data"] == {"mine": "yes"}
    kubectl.must("delete", "configmap", FACTS)
    wait_for(kubectl, "tiny", "Planned", "Fits")


def test_full_model_facts_config_map_is_reported(kubectl: Kubectl) -> None:
    labels = {"app.kubernetes.io/managed-by": "specdecode-operator", "specdecode.io/model-facts": "true"}
    body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": FACTS, "labels": labels}}
    kubectl.must("create", "--filename=-", stdin=json.dumps({**body, "data": {"large": "x" * (2**20 - 200)}}))
    apply(kubectl, "tiny", undescribed())
    answer(kubectl, "tiny", facts())
    assert "delete the entries" in wait_for(kubectl, "tiny", "Ready", "ModelFactsFull")
    assert condition(kubectl, "tiny", "Stalled")[0] == "True"
    kubectl.must("patch", "configmap", FACTS, "--type=json", '--patch=[{"op": "remove", "path": "/data/large"}]')
    wait_for(kubectl, "tiny", "Planned", "Fits")


def test_deleting_deployment_removes_its_reader_and_keeps_model_facts(kubectl: Kubectl) -> None:
    apply(kubectl, "other", undescribed(target={"model": "pair/other"}))
    answer(kubectl, "other", facts())
    wait_for(kubectl, "other", "Planned", "Fits")
    (entry,) = known(kubectl)
    apply(kubectl, "tiny", undescribed())
    reader(kubectl, "tiny")
    kubectl.must("delete", "sdd", "tiny", "other")
    eventually(lambda: not kubectl.objects("jobs,pods"), "Job and pod go")
    assert known(kubectl) == [entry], "facts outlive who asked for them"


def test_facts_files_replace_reader_jobs_without_a_restart(kubectl: Kubectl, operator: OperatorProcess) -> None:
    try:
        write_facts(operator.facts, "first.json", "site/first")
        (operator.facts / "broken.json").write_text('{"kind": "ModelFacts"}')
        apply(kubectl, "first", undescribed(target={"model": "site/first"}))
        message = wait_for(kubectl, "first", "Planned", "Fits")
        assert "facts of site/first (exact) come from the operator's facts file first.json" in message
        wait_for(kubectl, "first", "Ready", LAUNCHED)
        assert kubectl.object("sdd", "first")["status"]["plan"]["targetKnowledge"] == "exact"
        assert not kubectl.objects("jobs")
        assert known(kubectl) == [], "the files are read each time, not copied"

        apply(kubectl, "second", undescribed(target={"model": "site/second"}))
        wait_for(kubectl, "second", "Planned", "ResolvingModel")
        write_facts(operator.facts, "second.json", "site/second")
        wait_for(kubectl, "second", "Planned", "Fits")
        eventually(lambda: not kubectl.objects("jobs"), "the Job that is not needed goes")
        assert "broken.json" in operator.tail(100_000)
    finally:
        shutil.rmtree(operator.facts)
