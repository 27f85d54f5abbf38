"""What the status says of each error of the cluster, and which of them the queue tries again."""

import pytest

from specdecode_operator.cluster.client import (
    ClusterError,
    ConflictError,
    ForbiddenError,
    InvalidObjectError,
    NotFoundError,
    RefusedForNowError,
)
from specdecode_operator.deployment.conditions import Blocked
from specdecode_operator.handlers.apply_children import BlockedError, ChildNameTakenError, what_blocks

WAITS, STOPS = ("Unknown", True, False), ("False", False, True)


async def fail(error: Exception | None) -> None:
    if error is not None:
        raise error


@pytest.mark.parametrize("status_is_current", [False, True])
@pytest.mark.parametrize(
    ("error", "reason", "outcome"),
    [
        (ForbiddenError("may not"), "Forbidden", WAITS),
        (RefusedForNowError("quota"), "RefusedForNow", WAITS),
        (InvalidObjectError("wrong"), "ChildRefused", STOPS),
        (BlockedError(Blocked("ModelFactsFull", "full", permanent=True)), "ModelFactsFull", STOPS),
        (ChildNameTakenError("Service", "llama", leaving=True), "WaitingForCleanup", WAITS),
        (ChildNameTakenError("Service", "llama", leaving=False), "ChildNameConflict", STOPS),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_what_the_status_can_say_is_said_each_time(
    error: Exception, reason: str, outcome: tuple[str, bool, bool], *, status_is_current: bool
) -> None:
    found = await what_blocks(fail(error), hint="; see podTemplate", status_is_current=status_is_current)
    assert found is not None
    assert (found.reason, (found.status, found.reconciling, found.stalled)) == (reason, outcome)
    assert found.message == str(error) + ("; see podTemplate" if reason == "ChildRefused" else "")


@pytest.mark.parametrize("kind", [ClusterError, ConflictError, NotFoundError])
async def test_what_says_nothing_of_the_object_is_said_once_for_a_spec(kind: type[ClusterError]) -> None:
    found = await what_blocks(fail(kind("etcd is slow")), status_is_current=False)
    assert found is not None
    assert (found.reason, found.message, found.reconciling) == ("ApiServerError", "etcd is slow", True)
    with pytest.raises(kind):
        await what_blocks(fail(kind("etcd is slow")), status_is_current=True)


async def test_errors_of_the_operator_itself_are_none_of_the_cluster() -> None:
    with pytest.raises(KeyError):
        await what_blocks(fail(KeyError("x")), status_is_current=False)


async def test_nothing_is_said_of_what_is_written() -> None:
    assert await what_blocks(fail(None), status_is_current=False) is None
