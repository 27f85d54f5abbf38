"""Write statuses, Events and log lines without secrets and line breaks."""

import asyncio
import io
import logging
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, cast

import pytest

from specdecode_operator.api.deployment import KIND, Key
from specdecode_operator.api.deployment_status import ConditionStatus, SpecDecodeDeploymentStatus
from specdecode_operator.cluster.cache import Cache
from specdecode_operator.cluster.client import NotFoundError
from specdecode_operator.cluster.clock import ServerTime
from specdecode_operator.deployment.conditions import ConditionUpdate, stamp
from specdecode_operator.handlers.status_writer import Reporter
from specdecode_operator.problems import OneLine
from tests.unit.cluster.test_cache import body


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
def test_event_type_follows_the_condition(type_: str, status: str, reason: str, kinds: list[str]) -> None:
    posted: list[dict[str, Any]] = []

    def post(event: dict[str, Any]) -> None:
        posted.append(event)

    cluster = cast("Any", SimpleNamespace(post_event=post, clock=ServerTime()))
    reporter = Reporter(cluster, cast("Any", None), Key("team", "a", KIND), "uid")
    said = stamp([ConditionUpdate(type_, ConditionStatus(status), reason, "")], [], 1, datetime(2026, 1, 1, tzinfo=UTC))
    reporter.post_changes([], said)
    assert [event["type"] for event in posted] == kinds


def test_empty_lists_are_left_out_of_the_status() -> None:
    written: list[dict[str, Any]] = []

    async def apply(_: object, body: dict[str, Any]) -> dict[str, Any]:
        written.append(body)
        return body

    cluster, cache = SimpleNamespace(apply_status=apply), SimpleNamespace(put_parent=lambda *_: None)
    reporter = Reporter(cast("Any", cluster), cast("Any", cache), Key("team", "a", KIND), "uid")
    status = SpecDecodeDeploymentStatus(observed_generation=1, replicas=0, ready_replicas=0)
    assert asyncio.run(reporter.write_status(status))
    assert written[0]["status"] == {"observedGeneration": 1, "replicas": 0, "readyReplicas": 0}


TOKEN = "hf_" + "aB3" * 8
FOREIGN = "boom\n2026-01-01 [INFO] all is well\x1b[31m\u202e\x00"
ESCAPED = r"boom\n2026-01-01 [INFO] all is well\x1b[31m\u202e\x00"


@pytest.fixture
def log() -> tuple[logging.Logger, io.StringIO]:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.addFilter(OneLine())
    logger = logging.getLogger("specdecode.test_foreign_text")
    logger.propagate = False
    logger.addHandler(handler)
    return logger, stream


def test_line_breaks_in_log_values_are_escaped(log: tuple[logging.Logger, io.StringIO]) -> None:
    logger, stream = log
    logger.warning("%s: %d %% of it", FOREIGN, 7)
    assert stream.getvalue() == f"{ESCAPED}: 7 % of it\n"


def test_traceback_lines_are_indented_and_escaped(log: tuple[logging.Logger, io.StringIO]) -> None:
    logger, stream = log
    with pytest.raises(OSError, match="boom") as raised:
        raise OSError(FOREIGN)
    logger.error("failed", exc_info=raised.value)
    first, *traceback = stream.getvalue().splitlines()
    assert first == "failed"
    assert all(line.startswith("  ") and line.isprintable() for line in traceback)


def test_conditions_and_events_are_one_line() -> None:
    update = ConditionUpdate("Ready", ConditionStatus.FALSE, f"Bad {FOREIGN}", FOREIGN)
    (condition,) = stamp([update], [], 1, datetime(2026, 1, 1, tzinfo=UTC))
    assert condition.message == ESCAPED
    assert condition.reason.isalnum()
    posted: list[dict[str, Any]] = []

    def post(event: dict[str, Any]) -> None:
        posted.append(event)

    cluster = cast("Any", SimpleNamespace(post_event=post, clock=ServerTime()))
    reporter = Reporter(cluster, cast("Any", None), Key("team", "a", KIND), "uid")
    reporter.post_changes([], [condition])
    reporter.post_event("PlanChanged", FOREIGN)
    assert [event["message"] for event in posted] == [f"Ready is False: {ESCAPED}", ESCAPED]


def test_token_is_removed_from_conditions_events_and_log(log: tuple[logging.Logger, io.StringIO]) -> None:
    """As huggingface_hub and httpx may say it: of the headers that they sent, in a message and in a traceback."""
    posted: list[dict[str, Any]] = []

    def post(event: dict[str, Any]) -> None:
        posted.append(event)

    said = f"403 Forbidden for request with Authorization: Bearer {TOKEN}"
    update = ConditionUpdate("Ready", ConditionStatus.FALSE, "DownloadFailed", said)
    conditions = stamp([update], [], 1, datetime(2026, 1, 1, tzinfo=UTC))
    cluster = cast("Any", SimpleNamespace(post_event=post, clock=ServerTime()))
    reporter = Reporter(cluster, cast("Any", None), Key("team", "a", KIND), "uid")
    reporter.post_changes([], conditions)
    logger, stream = log
    logger.error("%s", said, exc_info=OSError(said))
    for told in (conditions[0].message, posted[0]["message"], stream.getvalue()):
        assert "403 Forbidden" in told
        assert TOKEN not in told


async def test_object_returns_after_a_status_write_failed_with_404() -> None:
    """The response may come from a proxy."""

    async def fails(*_: Any) -> Any:
        raise NotFoundError("HTTP 404")

    cache = Cache()
    key = cache.put_parent(KIND, body("a", 5))
    reporter = Reporter(cast("Any", SimpleNamespace(apply_status=fails)), cache, key, "a")
    assert not await reporter.write_status(SpecDecodeDeploymentStatus())
    assert cache.parent(key) is None
    cache.put_parent(KIND, body("a", 5))
    assert cache.parent(key) is not None
