"""Fields that other managers own, how drift is named, and how often it is repaired."""

import copy
import json
from typing import Any

import pytest

from specdecode_operator.cluster.cache import slim
from specdecode_operator.cluster.drift import (
    changed_fields,
    foreign_entries,
    foreign_managers,
    with_fields_taken_over,
    without_kept_fields,
)
from specdecode_operator.handlers.apply_children import Repairs
from specdecode_operator.untrusted import read_json
from tests.support.objects import Body

ENGINE = 'k:{"name":"engine"}'


def entry(manager: str, fields: Any, operation: str = "Update", **more: str) -> Body:
    typed = {"apiVersion": "apps/v1", "fieldsType": "FieldsV1", "time": "2026-01-01T00:00:00Z"}
    return {"manager": manager, "operation": operation, **typed, "fieldsV1": fields, **more}


def pod(fields: Any) -> Body:
    return {"f:spec": {"f:template": {"f:spec": fields}}}


OURS = entry(
    "specdecode-operator",
    {
        "f:metadata": {"f:annotations": {"f:specdecode.io/applied-hash": {}}, "f:labels": {"f:a": {}}},
        **pod({"f:containers": {ENGINE: {".": {}, "f:name": {}, "f:command": {}}}}),
    },
    "Apply",
)


def live(*others: Body, kind: str = "Deployment") -> Body:
    metadata = {"name": "llama", "namespace": "team", "managedFields": [OURS, *others]}
    return {"apiVersion": "apps/v1", "kind": kind, "metadata": metadata}


@pytest.mark.parametrize(
    "fields",
    [
        pod({"f:hostNetwork": {}}),
        pod({"f:containers": {ENGINE: {"f:args": {}}}}),
        pod({"f:containers": {'k:{"name":"miner"}': {".": {}, "f:name": {}}}}),
        pod({"f:securityContext": {".": {}, "f:runAsUser": {}}}),
        {"f:data": {".": {}, "f:extra": {}}},
        {"f:metadata": {"f:ownerReferences": {'k:{"uid":"1"}': {}}}},
        {"f:spec": {"f:template": {"f:metadata": {"f:annotations": {"f:inject": {}}}}}},
    ],
)
def test_manager_of_drifted_fields_is_found_among_other_fields(fields: Body) -> None:
    noise = {"f:metadata": {"f:labels": {"f:x": {}}}, "f:status": {"f:replicas": {}}}
    assert foreign_managers(live(entry("vim", {**noise, **fields}))) == ["vim"]
    assert foreign_managers(live(entry("specdecode-operator", {**noise, **fields}))) == ["specdecode-operator"]


@pytest.mark.parametrize(
    "fields",
    [
        {"f:metadata": {"f:annotations": {"f:deployment.kubernetes.io/revision": {}}, "f:finalizers": {"v:x": {}}}},
        {"f:status": {"f:replicas": {}}},
        pod({"f:containers": {ENGINE: {".": {}, "f:command": {}}}}),
        pod({"f:containers": {".": {}, ENGINE: {"f:command": {}}}}),
        {"f:spec": {"f:template": {"f:metadata": {"f:annotations": {"f:kubectl.kubernetes.io/restartedAt": {}}}}}},
    ],
    ids=["marks", "status", "what is ours too", "a list that is ours too", "a restart"],
)
def test_fields_left_to_others_are_no_drift(fields: Body) -> None:
    assert foreign_managers(live(entry("vim", fields))) == []


@pytest.mark.parametrize("kind", ["Job", "PersistentVolumeClaim", "Pod"])
def test_jobs_claims_and_pods_have_no_drift(kind: str) -> None:
    assert foreign_entries(kind, live(entry("kueue", {"f:spec": {"f:suspend": {}}}), kind=kind)["metadata"]) == []


def test_fields_are_taken_over_except_from_kept_managers() -> None:
    added = pod({"f:hostNetwork": {}, "f:containers": {ENGINE: {"f:args": {}}}})
    body = live(entry("vim", added), entry("injector", pod({"f:hostPID": {}})))
    ours, *others = with_fields_taken_over(body, {"injector"})
    fields = ours["fieldsV1"]["f:spec"]["f:template"]["f:spec"]
    assert fields == {
        "f:hostNetwork": {},
        "f:containers": {ENGINE: {".": {}, "f:name": {}, "f:command": {}, "f:args": {}}},
    }
    assert others == body["metadata"]["managedFields"][2:], "a field with two owners would stay"
    assert foreign_managers({**body, "metadata": {"managedFields": [ours, *others]}}, {"injector"}) == []


def test_manager_without_remaining_fields_is_removed() -> None:
    body = live(entry("vim", pod({"f:containers": {ENGINE: {".": {}, "f:args": {}}}})))
    assert len(with_fields_taken_over(body, ())) == 1, "who holds an element of a list keeps it from going"


def test_status_entry_of_the_operator_is_kept_separate() -> None:
    body = live()
    status = entry("specdecode-operator", {"f:status": {"f:replicas": {}}}, "Apply", subresource="status")
    body["metadata"]["managedFields"] = [status, OURS]
    ours, other = with_fields_taken_over(body, ())
    assert (ours, other) == (OURS, status)


def test_fields_of_kept_managers_are_not_applied() -> None:
    theirs = {"f:replicas": {}, **pod({"f:containers": {ENGINE: {"f:image": {}}}})["f:spec"]}
    body = live(entry("scaler", {"f:spec": theirs}), entry("vim", pod({"f:hostNetwork": {}})))
    engine, other = {"name": "engine", "image": "i:1", "command": ["x"]}, {"name": "other", "image": "i:1"}
    desired = {"spec": {"replicas": 1, "paused": False, "template": {"spec": {"containers": [engine, other]}}}}
    assert without_kept_fields(desired, body, {"scaler"}) == {
        "spec": {
            "paused": False,
            "template": {"spec": {"containers": [{"name": "engine", "command": ["x"]}, other]}},
        }
    }
    assert without_kept_fields(desired, body, ()) == desired


def test_object_with_wiped_managed_fields_is_taken_over_completely() -> None:
    body = live()
    body["metadata"]["managedFields"] = [entry("before-first-apply", pod({"f:hostNetwork": {}}))]
    (ours,) = with_fields_taken_over(body, ())
    assert (ours["manager"], ours["operation"], ours["apiVersion"]) == ("specdecode-operator", "Apply", "apps/v1")
    assert ours["fieldsV1"]["f:spec"] == {"f:template": {"f:spec": {"f:hostNetwork": {}}}}


def test_cache_keeps_managed_fields_only_for_drift() -> None:
    assert "managedFields" not in slim("Deployment", live(entry("vim", {"f:status": {}})))["metadata"]
    kept = slim("Deployment", live(entry("vim", pod({"f:hostNetwork": {}}))))
    assert foreign_managers(kept) == ["vim"]


def test_first_repairs_are_immediate_and_later_ones_back_off() -> None:
    repairs, now_s, waits = Repairs(), 0.0, []
    for _ in range(12):
        asked_s = now_s
        while not repairs.may_repair("uid", now_s):
            now_s += 1.0
        waits.append(now_s - asked_s)
        repairs.record("uid", "what", now_s)
    assert waits[:3] == [0, 0, 0]
    assert waits[3:8] == [8, 16, 32, 64, 128]
    assert set(waits[8:]) <= {256, 300}
    assert repairs.contested(now_s) == ["what"]
    assert repairs.may_repair("other", now_s)


def test_contested_repairs_reset_after_half_an_hour() -> None:
    repairs = Repairs()
    for _ in range(9):
        repairs.record("uid", "what", 0.0)
    assert repairs.contested(1799.0)
    assert not repairs.contested(1800.0)
    assert repairs.may_repair("uid", 1800.0)


BEFORE: Any = {
    "kind": "Deployment",
    "metadata": {"labels": {"a": "b"}},
    "spec": {"template": {"containers": [{"name": "engine", "image": "i:1", "env": [{"name": "A", "value": "1"}]}]}},
}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda pod: pod["containers"][0].update(image="i:2"), "spec.template.containers[engine].image"),
        (lambda pod: pod["containers"][0].update(args=["x"]), "spec.template.containers[engine].args"),
        (lambda pod: pod["containers"].append({"name": "miner"}), "spec.template.containers[miner]"),
        (
            lambda pod: pod["containers"][0]["env"].append({"name": "LD_PRELOAD"}),
            "spec.template.containers[engine].env[LD_PRELOAD]",
        ),
        (lambda pod: pod["containers"].clear(), "spec.template.containers[engine]"),
        (lambda pod: pod.update(hostNetwork=True, hostPID=True), "spec.template.hostNetwork, spec.template.hostPID"),
        (
            lambda pod: pod.update(dict.fromkeys("abcdefg", 1)),
            "spec.template.a, spec.template.b, spec.template.c, spec.template.d, spec.template.e and 2 more",
        ),
        (lambda _: None, ""),
    ],
)
def test_changed_fields_are_named_and_limited(change: Any, named: str) -> None:
    after = copy.deepcopy(BEFORE)
    change(after["spec"]["template"])
    assert changed_fields(BEFORE, after) == changed_fields(after, BEFORE) == named


def test_owner_references_count_as_drift_and_annotations_do_not() -> None:
    marked = {**BEFORE, "metadata": {"labels": {}, "annotations": {"x": "y"}}, "status": {}}
    assert changed_fields(BEFORE, marked) == ""
    owned = {**BEFORE, "metadata": {"ownerReferences": [{"uid": "1"}]}}
    assert changed_fields(BEFORE, owned) == "metadata.ownerReferences"


def test_fields_inside_too_many_others_are_ignored() -> None:
    # Anybody who may edit a child can write such entries for any manager.
    deep = '{"f:a":' * 200 + "{}" + "}" * 200
    entries = [entry("specdecode-operator", "DEEP", "Apply"), entry("vim", "DEEP")]
    body = live()
    body["metadata"]["managedFields"] = entries
    body = read_json(json.dumps(body).replace('"DEEP"', deep).encode())
    assert foreign_entries("Deployment", body["metadata"]) == []
    assert [each["manager"] for each in with_fields_taken_over(body, set())] == ["specdecode-operator", "vim"]
    assert without_kept_fields(body, body, {"vim"}) == body
