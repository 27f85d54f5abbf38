"""How often drift is repaired, and how it is named."""

import copy
from typing import Any

import pytest

from specdecode_operator.cluster.drift import changed_fields
from specdecode_operator.handlers.apply_children import Repairs


def test_hands_that_try_something_out_are_answered_at_once_and_a_loop_ever_more_rarely() -> None:
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


def test_after_half_an_hour_of_peace_nothing_is_contested() -> None:
    repairs = Repairs()
    for _ in range(9):
        repairs.record("uid", "what", 0.0)
    assert repairs.contested(1799.0)
    assert not repairs.contested(1800.0)
    assert repairs.may_repair("uid", 1800.0)


def test_each_repair_is_told_once() -> None:
    repairs = Repairs()
    repairs.record("uid", "one", 0.0)
    assert repairs.untold() == ["one"]
    assert repairs.untold() == []


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
def test_drift_is_named_by_its_fields(change: Any, named: str) -> None:
    after = copy.deepcopy(BEFORE)
    change(after["spec"]["template"])
    assert changed_fields(BEFORE, after) == changed_fields(after, BEFORE) == named


def test_owners_count_and_marks_of_tools_do_not() -> None:
    marked = {**BEFORE, "metadata": {"labels": {}, "annotations": {"x": "y"}}, "status": {}}
    assert changed_fields(BEFORE, marked) == ""
    owned = {**BEFORE, "metadata": {"ownerReferences": [{"uid": "1"}]}}
    assert changed_fields(BEFORE, owned) == "metadata.ownerReferences"
