"""Parse a SpecDecodeDeployment."""

from typing import Any

import pytest

from specdecode_operator.deployment.parsed_deployment import parse_deployment
from tests.support.objects import pair_70b, parent

HOURLY = {"name": "hourly", "schedule": "0 * * * *"}


@pytest.mark.parametrize(("captures", "names"), [([HOURLY], ["hourly"]), ([], [])])
def test_schedules_are_parsed_from_spec_captures(captures: list[Any], names: list[str]) -> None:
    schedules = parse_deployment(parent(pair_70b(captures=captures))).schedules
    assert schedules is not None
    assert [each.name for each in schedules] == names


@pytest.mark.parametrize(
    "spec",
    [pair_70b(captures=[{**HOURLY, "schedule": "0 0 30 2 *"}]), pair_70b(captures=[HOURLY], replicas="many")],
    ids=["a time that never comes", "a spec that cannot be read"],
)
def test_invalid_spec_has_no_known_schedules(spec: dict[str, Any]) -> None:
    assert parse_deployment(parent(spec)).schedules is None, "not the same as none: the status keeps what it says"


@pytest.mark.parametrize("spec", [pair_70b(suspend=True), pair_70b(replicas=0)], ids=["suspended", "scaled to zero"])
def test_deployment_without_engines_is_not_suspended_for_a_capture(spec: dict[str, Any]) -> None:
    assert parse_deployment(parent(spec), preempted_by="demo").suspended_for is None
