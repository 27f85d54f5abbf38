"""A quota that is full because of pods that are about to end keeps nothing waiting."""

from decimal import Decimal

import pytest

from specdecode_operator.handlers.reconcile_capture import has_room_without, quantity, quota_usage

REFUSAL = 'pods "demo-x" is forbidden: exceeded quota: gpus, requested: {}, used: {}, limited: {}'
GPUS = "requests.nvidia.com/gpu"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4", 4),
        ("250m", Decimal("0.25")),
        ("1Gi", 2**30),
        ("1.5k", 1500),
        ("2e3", 2000),
        (3, 3),
        ("1X", None),
        ("", None),
        ("9" * 5000, None),
        ("1..2", None),
        (None, None),
    ],
)
def test_quantities(text: object, value: object) -> None:
    assert quantity(text) == value


def test_what_a_pod_counts_for() -> None:
    engine = {"resources": {"limits": {"nvidia.com/gpu": "2", "memory": "8Gi"}, "requests": {"memory": "4Gi"}}}
    beside = {"resources": {"requests": {"memory": "1Gi"}}}
    found = quota_usage({"containers": [engine, beside]})
    assert found[GPUS] == 2
    assert (found["requests.memory"], found["limits.memory"]) == (5 * 2**30, 8 * 2**30)
    assert found["memory"] == found["requests.memory"]
    assert found["pods"] == found["count/pods"] == 1


@pytest.mark.parametrize(
    ("requested", "used", "limited", "room"),
    [
        (f"{GPUS}=4", f"{GPUS}=8", f"{GPUS}=8", True),
        (f"{GPUS}=5", f"{GPUS}=8", f"{GPUS}=8", False),
        (f"{GPUS}=4,pods=1", f"{GPUS}=8,pods=10", f"{GPUS}=8,pods=10", True),
        (f"{GPUS}=4,pods=1", f"{GPUS}=8,pods=11", f"{GPUS}=8,pods=10", True),
        (f"{GPUS}=4,pods=1", f"{GPUS}=8,pods=12", f"{GPUS}=8,pods=10", False),
        ("requests.memory=1Gi", "requests.memory=9Gi", "requests.memory=9Gi", False),
        (f"{GPUS}=4", f"{GPUS}=8", "", None),
        (f"{GPUS}=many", f"{GPUS}=8", f"{GPUS}=8", None),
    ],
)
def test_room_without_the_engines(requested: str, used: str, limited: str, room: bool | None) -> None:
    freed = {GPUS: Decimal(4), "pods": Decimal(2)}
    assert has_room_without(REFUSAL.format(requested, used, limited), freed) is room


def test_other_words_tell_nothing() -> None:
    assert has_room_without("namespace team is being terminated", {}) is None
