"""The cache under late, double and missing events."""

from typing import Any

from specdecode_operator.api.deployment import KIND
from specdecode_operator.api.key import Key
from specdecode_operator.cluster.cache import Cache

KEY = Key("default", "llama")


def body(uid: str, version: int, name: str = "llama", **metadata: Any) -> dict[str, Any]:
    labels = {"specdecode.io/deployment": "llama"}
    base = {"namespace": "default", "name": name, "uid": uid, "resourceVersion": str(version), "labels": labels}
    return {"metadata": {**base, **metadata}}


def versions(cache: Cache, kind: str = "Service") -> list[str]:
    return [found["metadata"]["resourceVersion"] for found in cache.belongings(KEY, kind)]


def test_an_older_version_does_not_replace_a_newer_one() -> None:
    cache = Cache()
    cache.put("Service", body("a", 9))
    cache.put("Service", body("a", 10))
    cache.put("Service", body("a", 9))
    assert versions(cache) == ["10"], "versions are numbers, not text"


def test_what_was_deleted_does_not_come_back_by_a_late_answer() -> None:
    cache = Cache()
    cache.put("Service", body("a", 1))
    cache.drop("Service", body("a", 2))
    cache.put("Service", body("a", 3))
    assert versions(cache) == []


def test_a_late_deletion_does_not_take_its_successor_with_it() -> None:
    cache = Cache()
    cache.put_parent(KIND, body("new", 5))
    cache.drop_parent(KIND, body("old", 4))
    found = cache.parent(KEY)
    assert found is not None
    assert found["metadata"]["uid"] == "new"
    cache.put("Service", body("new", 5))
    cache.drop("Service", body("old", 4))
    assert versions(cache) == ["5"]


def test_a_full_list_drops_what_it_lacks_but_nothing_newer() -> None:
    cache = Cache()
    for uid, version in (("kept", 1), ("missed", 2), ("newer", 9)):
        cache.put("Pod", body(uid, version, name=uid))
    cache.put("Service", body("other-kind", 1))
    cache.retain("Pod", [body("kept", 1, name="kept")], version=5)
    assert versions(cache, "Pod") == ["1", "9"]
    assert versions(cache) == ["1"]
    cache.put_parent(KIND, body("missed", 2))
    cache.retain_parents(KIND, [], version=5)
    assert cache.parent(KEY) is None


def test_only_what_plans_depend_on_makes_a_node_news() -> None:
    def node(version: int, gpus: str = "8", **spec: Any) -> dict[str, Any]:
        labels = {"nvidia.com/gpu.product": "NVIDIA-H200"}
        metadata = {"name": "n", "labels": labels, "resourceVersion": str(version)}
        return {"metadata": metadata, "spec": spec, "status": {"allocatable": {"nvidia.com/gpu": gpus}}}

    cache = Cache()
    assert cache.put_node(node(1))
    assert not cache.put_node(node(2)), "a heartbeat"
    assert cache.put_node(node(3, unschedulable=True))
    assert [found.schedulable for found in cache.nodes()] == [False]
    assert cache.put_node(node(4, gpus="8k")), "no count that a device plugin would give"
    assert [(found.gpus, found.refusal is None) for found in cache.nodes()] == [(0, False)]


def facts(uid: str, version: int, data: dict[str, str]) -> dict[str, Any]:
    labels = {"specdecode.io/model-facts": "true"}
    return {**body(uid, version, "specdecode-model-facts", labels=labels), "data": data}


def test_facts_of_models_belong_to_a_namespace_and_follow_the_same_rules() -> None:
    cache = Cache()
    assert cache.put("ConfigMap", facts("a", 9, {"one": "1"})) is None
    cache.put("ConfigMap", facts("a", 8, {}))
    assert cache.model_facts("default") == {"one": "1"}
    assert cache.model_facts("other") == {}
    assert cache.belongings(KEY, "ConfigMap") == []
    cache.retain("ConfigMap", [], 8)
    assert cache.model_facts("default") == {"one": "1"}, "newer than the list"
    cache.retain("ConfigMap", [], 9)
    assert cache.model_facts("default") == {}
    cache.put("ConfigMap", facts("b", 10, {"two": "2"}))
    cache.drop("ConfigMap", facts("b", 11, {}))
    cache.put("ConfigMap", facts("b", 10, {"two": "2"}))
    assert cache.model_facts("default") == {}, "a late event brings nothing back"


def test_a_pod_that_reads_a_model_belongs_to_who_asked() -> None:
    cache = Cache()
    pod = body("p", 1, "llama-facts-1", labels={"specdecode.io/reads-model-for": "llama"})
    assert cache.put("Pod", pod) == KEY
    assert [found["metadata"]["name"] for found in cache.belongings(KEY, "Pod")] == ["llama-facts-1"]


def test_of_a_plan_only_whether_it_changed_is_kept() -> None:
    cache = Cache()
    read_back = {"template": "{}"}
    kept = []
    for version, plan in enumerate(["x" * 50_000, "x" * 50_000, "y" * 50_000]):
        cache.put("ConfigMap", {**body("a", version), "data": {"plan.json": plan, "matrix.csv": plan, **read_back}})
        kept += [found["data"] for found in cache.belongings(KEY, "ConfigMap")]
    assert kept[0] == kept[1] != kept[2]
    assert all(len(str(data)) < 500 for data in kept)
    assert all(data["template"] == "{}" for data in kept)
