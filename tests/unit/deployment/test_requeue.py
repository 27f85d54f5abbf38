"""When an object is reconciled again after its status was written."""

from typing import Any

import pytest

from specdecode_operator.deployment.requeue import needs_another

BEFORE: dict[str, Any] = {
    "metadata": {"name": "llama", "generation": 1, "resourceVersion": "1"},
    "spec": {"replicas": 1},
    "status": {"policy": {"action": "Keep"}},
}


@pytest.mark.parametrize(
    ("change", "needs"),
    [
        ({"metadata": {**BEFORE["metadata"], "resourceVersion": "2"}}, False),
        ({"status": {**BEFORE["status"], "conditions": []}}, False),
        ({"spec": {"replicas": 2}}, True),
        ({"metadata": {**BEFORE["metadata"], "annotations": {"a": "b"}}}, True),
        ({"metadata": {**BEFORE["metadata"], "deletionTimestamp": "2026-01-01T00:00:00Z"}}, True),
        ({"status": {"policy": {"action": "TurnOff"}}}, True),
        ({"status": {**BEFORE["status"], "trainedDraft": {"training": "head"}}}, True),
        ({"status": {**BEFORE["status"], "captures": [{"name": "hourly"}]}}, True),
    ],
)
def test_inputs_that_changed_during_a_reconcile_need_another(change: dict[str, Any], *, needs: bool) -> None:
    assert needs_another(BEFORE, {**BEFORE, **change}) is needs
