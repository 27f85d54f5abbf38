"""What is written into a status, and which Events are posted of conditions that changed."""

import asyncio
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, cast

import pytest

from specdecode_operator.api.deployment import KIND, Key
from specdecode_operator.api.deployment_status import ConditionStatus, SpecDecodeDeploymentStatus
from specdecode_operator.cluster.clock import ServerTime
from specdecode_operator.deployment.conditions import ConditionUpdate, stamp
from specdecode_operator.handlers.status_writer import Reporter


@pytest.mark.parametrize(
    ("type_", "status", "reason", "kinds"),
    [
        ("ChildrenInSync", "False", "RepairsUndone", ["Warning"]),
        ("SpeculationEffective", "False", "AcceptanceDecayed", ["Warning"]),
        ("Accepted", "True", "NewerThanKnown", ["Warning"]),
        ("Accepted", "True", "LossyRejectionSampling", ["Warning"]),
        ("Accepted", "True", "Valid", []),
        ("BudgetAccurate", "True", "AsPromised", ["Normal"]),
        ("BudgetAccurate", "False", "LessThanPromised", ["Warning"]),
    ],
)
def test_what_is_wrong_is_a_warning(type_: str, status: str, reason: str, kinds: list[str]) -> None:
    posted: list[dict[str, Any]] = []

    async def post(_: str, event: dict[str, Any]) -> None:
        posted.append(event)

    cluster = cast("Any", SimpleNamespace(post_event=post, clock=ServerTime()))
    reporter = Reporter(cluster, cast("Any", None), Key("team", "a", KIND), "uid")
    said = stamp([ConditionUpdate(type_, ConditionStatus(status), reason, "")], [], 1, datetime(2026, 1, 1, tzinfo=UTC))
    asyncio.run(reporter.post_changes([], said))
    assert [event["type"] for event in posted] == kinds


def test_a_list_that_is_empty_is_left_out_whatever_was_in_it_before() -> None:
    written: list[dict[str, Any]] = []

    async def apply(_: object, body: dict[str, Any]) -> dict[str, Any]:
        written.append(body)
        return body

    cluster, cache = SimpleNamespace(apply_status=apply), SimpleNamespace(put_parent=lambda *_: None)
    reporter = Reporter(cast("Any", cluster), cast("Any", cache), Key("team", "a", KIND), "uid")
    status = SpecDecodeDeploymentStatus(observed_generation=1, replicas=0, ready_replicas=0)
    assert asyncio.run(reporter.write_status(status))
    assert written[0]["status"] == {"observedGeneration": 1, "replicas": 0, "readyReplicas": 0}
