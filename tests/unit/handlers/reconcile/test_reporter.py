"""Which Events are posted of conditions that changed."""

import asyncio
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, cast

import pytest

from specdecode_operator.api.deployment import KIND
from specdecode_operator.api.key import Key
from specdecode_operator.api.status.deployment import ConditionStatus
from specdecode_operator.deployment.conditions import ConditionUpdate, stamp
from specdecode_operator.handlers.reconcile.reporter import Reporter


@pytest.mark.parametrize(
    ("type_", "status", "kind"),
    [
        ("EngineDiffers", "True", "Warning"),
        ("Decayed", "True", "Warning"),
        ("EngineUntested", "True", "Warning"),
        ("DriftContested", "True", "Warning"),
        ("OutputsDiffer", "True", "Warning"),
        ("BudgetAccurate", "True", "Normal"),
        ("BudgetAccurate", "False", "Warning"),
    ],
)
def test_what_is_wrong_is_a_warning(type_: str, status: str, kind: str) -> None:
    posted: list[dict[str, Any]] = []

    async def post(_: str, event: dict[str, Any]) -> None:
        posted.append(event)

    reporter = Reporter(cast("Any", SimpleNamespace(post_event=post)), cast("Any", None))
    said = stamp([ConditionUpdate(type_, ConditionStatus(status), "Why", "")], [], 1, datetime(2026, 1, 1, tzinfo=UTC))
    asyncio.run(reporter.post_changes(Key("team", "a", KIND), "uid", [], said))
    assert [event["type"] for event in posted] == [kind]
