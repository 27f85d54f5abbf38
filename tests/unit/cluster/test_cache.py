"""The cache under late, double and missing events."""

import json
import sys
from typing import Any

import pytest

from specdecode_operator.api import capture
from specdecode_operator.api.deployment import KIND, Key
from specdecode_operator.cluster.cache import Cache, SharedValues, slim
from specdecode_operator.cluster.drift import changed_fields, content_digest
from specdecode_operator.cluster.resources import CAPTURE_LABEL, CAPTURED_DEPLOYMENT_LABEL
from specdecode_operator.deployment.rollout.blocked_pods import blocked_pod
from tests.support.objects import pod, waiting

KEY = Key("default", "llama")


def body(uid: str, version: int, name: str = "llama", **metadata: Any) -> dict[str, Any]:
    labels = {"specdecode.io/deployment": "llama"}
    base = {"namespace": "default", "name": name, "uid": uid, "resourceVersion": str(version), "labels": labels}
    return {"metadata": {**base, **metadata}}


def versions(cache: Cache, kind: str = "Service") -> list[str]:
    return [found["metadata"]["resourceVersion"] for found in cache.children_of(KEY, kind)]


def test_older_version_does_not_replace_newer_one() -> None:
    cache = Cache()
    cache.put("Service", body("a", 9))
    cache.put("Service", body("a", 10))
    cache.put("Service", body("a", 9))
    assert versions(cache) == ["10"], "versions are numbers, not text"


def test_object_reported_as_missing_returns_if_an_event_has_it() -> None:
    """The report may be an error page of a proxy. If the object is gone, its deletion follows."""
    cache, gone = Cache(), body("a", 1)
    cache.put("Service", body("a", 1))
    del gone["metadata"]["resourceVersion"]
    cache.drop("Service", gone)
    assert versions(cache) == []
    cache.put("Service", body("a", 1))
    assert versions(cache) == ["1"]


@pytest.mark.parametrize("labels", [{"specdecode.io/deployment": "other"}, {}], ids=["another", "none"])
def test_child_moves_to_the_owner_of_its_changed_label(labels: dict[str, str]) -> None:
    cache, other = Cache(), Key("default", "other")
    assert cache.put("Service", body("a", 1)) == [KEY]
    moved = body("a", 2, labels=labels)
    assert cache.put("Service", moved) == ([other, KEY] if labels else [KEY]), "both are to be looked at"
    assert versions(cache) == []
    assert len(cache.children_of(other, "Service")) == len(labels)
    cache.put("Service", body("a", 1))
    assert versions(cache) == [], "an older version moves nothing back"
    cache.drop("Service", body("a", 3))
    assert cache.all_children(other) == {}


def test_late_event_of_a_predecessor_does_not_replace_its_successor() -> None:
    cache = Cache()
    for uid, version in (("first", 3), ("new", 5), ("old", 4)):
        cache.put_parent(KIND, body(uid, version))
        cache.put("Service", body(uid, version))
        cache.put("ConfigMap", facts(uid, version, {"of": uid}))
    assert (cache.parent(KEY) or {})["metadata"]["uid"] == "new"
    assert versions(cache) == ["5"]
    assert cache.model_facts("default") == {"of": "new"}


def test_late_deletion_does_not_drop_the_successor() -> None:
    cache = Cache()
    cache.put_parent(KIND, body("new", 5))
    cache.drop_parent(KIND, body("old", 4))
    found = cache.parent(KEY)
    assert found is not None
    assert found["metadata"]["uid"] == "new"
    cache.put("Service", body("new", 5))
    cache.drop("Service", body("old", 4))
    assert versions(cache) == ["5"]


def test_full_list_drops_missing_objects_but_not_newer_ones() -> None:
    cache = Cache()
    for uid, version in (("kept", 1), ("missed", 2), ("newer", 9)):
        cache.put("Pod", body(uid, version, name=uid))
    cache.put("Service", body("other-kind", 1))
    cache.retain("Pod", ["kept"], version=5)
    assert versions(cache, "Pod") == ["1", "9"]
    assert versions(cache) == ["1"]
    cache.put_parent(KIND, body("missed", 2))
    cache.retain_parents(KIND, [], version=5)
    assert cache.parent(KEY) is None


def node(version: int, gpus: str = "8", name: str = "n", **spec: Any) -> dict[str, Any]:
    labels = {"nvidia.com/gpu.product": "NVIDIA-H200"}
    metadata = {"name": name, "uid": f"uid-{name}", "labels": labels, "resourceVersion": str(version)}
    return {"metadata": metadata, "spec": spec, "status": {"allocatable": {"nvidia.com/gpu": gpus}}}


def test_full_list_drops_missing_nodes_but_not_newer_ones() -> None:
    cache = Cache()
    for name, version in (("kept", 1), ("missed", 5), ("joined", 6)):
        cache.put_node(node(version, name=name))
    cache.retain_nodes([node(1, name="kept")], version=5)
    assert [found.name for found in cache.nodes()] == ["joined", "kept"]


def test_node_deleted_during_a_list_is_not_restored() -> None:
    cache = Cache()
    cache.put_node(node(1))
    cache.drop_node(node(3))
    assert not cache.put_node(node(1)), "as the list has it"
    assert cache.nodes() == ()
    assert cache.put_node({**node(4), "metadata": {**node(4)["metadata"], "uid": "another"}}), "it joined again"


def test_node_update_is_reported_only_if_plans_depend_on_it() -> None:
    cache = Cache()
    assert cache.put_node(node(1))
    assert not cache.put_node(node(2)), "a heartbeat"
    assert cache.put_node(node(3, unschedulable=True))
    assert [found.schedulable for found in cache.nodes()] == [False]
    assert not cache.put_node(node(2)), "a list that came late"
    assert [found.schedulable for found in cache.nodes()] == [False]
    assert cache.put_node(node(4, gpus="8k")), "no count that a device plugin would give"
    assert [(found.gpus, found.refusal is None) for found in cache.nodes()] == [(0, False)]


def facts(uid: str, version: int, data: dict[str, str]) -> dict[str, Any]:
    labels = {"specdecode.io/model-facts": "true"}
    return {**body(uid, version, "specdecode-model-facts", labels=labels), "data": data}


def test_model_facts_are_kept_per_namespace_by_version() -> None:
    cache = Cache()
    assert cache.put("ConfigMap", facts("a", 9, {"one": "1"})) == []
    cache.put("ConfigMap", facts("a", 8, {}))
    assert cache.model_facts("default") == {"one": "1"}
    assert cache.model_facts("other") == {}
    assert cache.children_of(KEY, "ConfigMap") == []
    cache.retain("ConfigMap", [], 8)
    assert cache.model_facts("default") == {"one": "1"}, "newer than the list"
    cache.retain("ConfigMap", [], 9)
    assert cache.model_facts("default") == {}
    cache.put("ConfigMap", facts("b", 10, {"two": "2"}))
    cache.drop("ConfigMap", facts("b", 11, {}))
    cache.put("ConfigMap", facts("b", 10, {"two": "2"}))
    assert cache.model_facts("default") == {}, "a late event brings nothing back"


def test_shared_config_maps_of_a_namespace_are_separate() -> None:
    cache = Cache()
    cache.put("ConfigMap", facts("a", 1, {"one": "1"}))
    recorder = body("b", 2, "specdecode-recorder", labels={"specdecode.io/recorder": "true"})
    assert cache.put("ConfigMap", {**recorder, "binaryData": {"recorder.zip": "x" * 50_000}}) == []
    found = cache.shared_config_map("default", "specdecode-recorder") or {}
    assert found["metadata"]["uid"] == "b"
    assert len(str(found)) < 1_000, "only a digest is kept"
    cache.put("ConfigMap", body("b", 3, "specdecode-recorder", labels={}))
    assert cache.shared_config_map("default", "specdecode-recorder") is None, "it lost its label"
    cache.put("ConfigMap", {**recorder, "metadata": {**recorder["metadata"], "resourceVersion": "4"}})
    cache.drop("ConfigMap", recorder)
    assert cache.shared_config_map("default", "specdecode-recorder") is None
    assert cache.model_facts("default") == {"one": "1"}


def test_plan_config_map_is_cached_in_reduced_form() -> None:
    cache = Cache()
    read_back = {"template": "{}"}
    kept = []
    for version, plan in enumerate(["x" * 50_000, "x" * 50_000, "y" * 50_000]):
        compared = dict.fromkeys(("plan.json", "matrix.csv", "canaries.json"), plan)
        cache.put("ConfigMap", {**body("a", version), "data": {**compared, **read_back}})
        kept += [found["data"] for found in cache.children_of(KEY, "ConfigMap")]
    assert kept[0] == kept[1] != kept[2]
    assert all(len(str(data)) < 500 for data in kept)
    assert all(data["template"] == "{}" for data in kept)


def test_recorder_config_map_is_cached_in_reduced_form() -> None:
    texts = ("x" * 50_000, "x" * 50_000, "y" * 50_000)
    kept = [slim("ConfigMap", {**body("a", 1), "binaryData": {"recorder.zip": text}}) for text in texts]
    assert kept[0] == kept[1] != kept[2]
    assert all(len(str(each)) < 1_000 for each in kept)


def captured(
    version: int, name: str = "c", *, of: str = "llama", uid: str | None = None, namespace: str = "default"
) -> dict[str, Any]:
    metadata = {"namespace": namespace, "labels": {}}
    return {**body(uid or name, version, name, **metadata), "spec": {"deployment": of}}


def claim(version: int, name: str = "c", *, of: str = "llama", uid: str = "claim") -> dict[str, Any]:
    return body(uid, version, name, labels={CAPTURE_LABEL: name, CAPTURED_DEPLOYMENT_LABEL: of})


def names(bodies: list[dict[str, Any]]) -> list[str]:
    return [found["metadata"]["name"] for found in bodies]


class TestCapturesOfADeployment:
    """They are found by what the newest version of each says."""

    def test_captures_are_found_by_deployment_and_namespace_sorted_by_name(self) -> None:
        cache = Cache()
        for each in (
            captured(1, "b"),
            captured(1, "a"),
            captured(1, "of-another", of="other"),
            captured(1, "elsewhere", namespace="other"),
        ):
            cache.put_parent(capture.KIND, each)
        cache.put_parent(KIND, {**body("d", 1, "names-one-too"), "spec": {"deployment": "llama"}})
        assert names(cache.captures_of(KEY)) == ["a", "b"]
        assert names(cache.captures_of(Key("other", "llama"))) == ["elsewhere"]
        assert cache.captures_of(Key("default", "nobody")) == []

    def test_capture_moves_to_the_deployment_that_it_names_now(self) -> None:
        cache, other = Cache(), Key("default", "other")
        cache.put_parent(capture.KIND, captured(1))
        cache.put_parent(capture.KIND, captured(3, of="other"))
        cache.put_parent(capture.KIND, captured(2))
        assert (names(cache.captures_of(KEY)), names(cache.captures_of(other))) == ([], ["c"]), "the latest word holds"
        cache.put_parent(capture.KIND, {**captured(4), "spec": {}})
        assert (cache.captures_of(KEY), cache.captures_of(other)) == ([], [])

    def test_changed_deployment_of_a_capture_notifies_both_deployments(self) -> None:
        cache, told = Cache(), list[Key]()
        cache.put_parent(capture.KIND, captured(1))
        cache.on_change = told.append
        cache.put_parent(capture.KIND, captured(2, of="other"))
        assert {*told} == {KEY, Key("default", "other")}

    def test_deleted_capture_is_dropped_and_recreated_one_is_kept(self) -> None:
        cache = Cache()
        for each in (captured(1, "a"), captured(1, "b")):
            cache.put_parent(capture.KIND, each)
        cache.drop_parent(capture.KIND, captured(3, "a"))
        assert names(cache.captures_of(KEY)) == ["b"]
        cache.put_parent(capture.KIND, captured(2, "a"))
        assert names(cache.captures_of(KEY)) == ["b"], "what was deleted does not come back"
        cache.put_parent(capture.KIND, captured(4, "b", uid="anew"))
        cache.drop_parent(capture.KIND, captured(5, "b"))
        assert names(cache.captures_of(KEY)) == ["b"]


class TestClaimsCapturedFromADeployment:
    """They are found by their label, whether their capture is there or not."""

    def test_claims_are_found_by_deployment_label_and_namespace(self) -> None:
        cache = Cache()
        for each in (claim(1, "b"), claim(1, "a"), claim(1, "of-another", of="other")):
            cache.put("PersistentVolumeClaim", each)
        cache.put("Job", claim(1, "job"))
        unlabelled = claim(1, "unlabelled")
        del unlabelled["metadata"]["labels"][CAPTURED_DEPLOYMENT_LABEL]
        cache.put("PersistentVolumeClaim", unlabelled)
        cached_models = body("models", 1, "models")
        cached_models["metadata"]["labels"][CAPTURED_DEPLOYMENT_LABEL] = "llama"
        cache.put("PersistentVolumeClaim", cached_models)
        assert names(cache.claims_captured_from(KEY)) == ["a", "b"]
        assert cache.claims_captured_from(Key("other", "llama")) == []

    def test_claim_outlives_its_capture_until_its_own_deletion(self) -> None:
        cache = Cache()
        cache.put_parent(capture.KIND, captured(1))
        cache.put("PersistentVolumeClaim", claim(1))
        cache.drop_parent(capture.KIND, captured(2))
        assert names(cache.claims_captured_from(KEY)) == ["c"]
        cache.put("PersistentVolumeClaim", claim(3, uid="anew"))
        cache.drop("PersistentVolumeClaim", claim(4))
        assert names(cache.claims_captured_from(KEY)) == ["c"], "made anew under its name"
        cache.drop("PersistentVolumeClaim", claim(5, uid="anew"))
        assert cache.claims_captured_from(KEY) == []


def workload(name: str, version: int, replicas: int = 1) -> dict[str, Any]:
    env = [{"name": "PORT", "value": "8000"}, {"name": "SIZE", "value": 1}, {"name": "FLAG", "value": True}]
    template = {"metadata": {"labels": {"app": "engine"}}, "spec": {"containers": [{"name": "engine", "env": env}]}}
    metadata = body(f"uid of {name}", version, name)
    return {**metadata, "spec": {"replicas": replicas, "template": template}, "status": {"replicas": replicas}}


def test_equal_parts_of_objects_share_memory() -> None:
    cache = Cache()
    for name in ("a", "b", "c"):
        cache.put("Deployment", workload(name, 1))
    found = cache.children_of(KEY, "Deployment")
    assert found == [workload(name, 1) for name in ("a", "b", "c")]
    assert found[1]["spec"]["template"] is found[2]["spec"]["template"], "texts of the first one were new"
    flags = [each["value"] for each in found[2]["spec"]["template"]["spec"]["containers"][0]["env"]]
    assert [type(each) for each in flags] == [str, int, bool]


def test_new_version_keeps_the_unchanged_parts_of_the_earlier_one() -> None:
    cache = Cache()
    cache.put("Deployment", workload("a", 1))
    (before,) = cache.children_of(KEY, "Deployment")
    cache.put("Deployment", workload("a", 2, replicas=2))
    (after,) = cache.children_of(KEY, "Deployment")
    assert after == workload("a", 2, replicas=2)
    assert before == workload("a", 1), "readers may still have it"
    assert after["spec"]["template"] is before["spec"]["template"]


def test_memory_of_shared_values_is_bounded() -> None:
    values = SharedValues()
    for number in range(30_000):
        value = {"text": f"{number:0100}", "parts": [{"number": number % 7, "other": each} for each in range(3)]}
        assert values.share(value) == value
    assert values.known_bytes <= 2**20
    assert values.share("x" * 2**21) == "x" * 2**21


def test_last_good_workload_is_cached_in_compressed_form() -> None:
    cache, text = Cache(), json.dumps({"containers": ["engine"] * 1000})
    config_map = {**body("a", 1), "data": {"engines.json": text, "groups.json": "[]"}}
    cache.put("ConfigMap", config_map)
    (found,) = cache.children_of(KEY, "ConfigMap")
    assert found == config_map
    assert not isinstance(found["data"], dict)
    desired = {"metadata": {"labels": {}}}
    assert content_digest(found, desired) == content_digest(config_map, desired)
    changed = {**config_map, "data": {**config_map["data"], "groups.json": "[1]"}}
    assert changed_fields(found, changed) == "data.groups.json"


def test_pod_spec_is_cached_with_only_node_secrets_and_gpus() -> None:
    secret = {"name": "VLLM_API_KEY", "valueFrom": {"secretKeyRef": {"name": "clients", "key": "api-key"}}}
    env = [{"name": "A", "value": "1"}, secret, {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "x"}}}]
    gpus = {"resources": {"limits": {"nvidia.com/gpu": "8"}}}
    takes = {"requests": {"cpu": "1"}, "limits": {"memory": "1Gi", "nvidia.com/gpu": "8"}}
    engine = {"name": "engine", "image": "i", "env": env, "resources": takes}
    before = {"name": "before", "env": [secret], "resources": {"limits": {"cpu": "1"}}}
    spec = {"nodeName": "n1", "initContainers": [before], "containers": [engine, {"name": "other"}]}
    waits = waiting("CreateContainerConfigError", 'secret "clients" not found')
    kept = slim("Pod", {**pod(containerStatuses=[waits]), "spec": spec})
    assert kept["spec"] == {"nodeName": "n1", "containers": [{"env": [secret]}, {"env": [secret], **gpus}]}
    assert "(spec.serving.apiKeySecret)" in getattr(blocked_pod(kept), "message", "")


def test_listing_keys_tolerates_concurrent_additions() -> None:
    """As metrics are collected: at each turn of Python's, another object comes."""
    cache, before = Cache(), sys.gettrace()
    for number in range(3):
        cache.put_parent(KIND, body(str(number), 1, f"there-{number}"))

    def bring(*_: object) -> Any:
        number = len(seen)
        seen.append(number)
        cache.put_parent(KIND, body(f"new-{number}", 1, f"new-{number}"))
        return bring

    seen: list[int] = []
    sys.settrace(bring)
    try:
        found = cache.parents(KIND)
    finally:
        sys.settrace(before)
    assert seen
    assert {f"there-{number}" for number in range(3)} <= {key.name for key in found}
