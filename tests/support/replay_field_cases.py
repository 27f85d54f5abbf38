"""For every field of a replay, a value that makes a difference."""

from collections.abc import Mapping

from tests.support.field_cases import FieldCase, at
from tests.support.objects import Body, pair_70b

_IN_CONFIG_MAP = {"configMap": {"name": "recording"}, "path": "trace.jsonl"}
_ON_CLAIM = {"persistentVolumeClaim": {"claimName": "captures"}, "path": "team/nightly"}


def replaying(**fields: object) -> Body:
    """A pair whose engines replay a recording."""
    return pair_70b(engine={"replay": {"trace": _IN_CONFIG_MAP, **fields}})


REPLAY_FIELDS: Mapping[str, FieldCase] = {
    f"engine.replay.{field}": case
    for field, case in {
        "trace.configMap.name": at("other", on=replaying()),
        "trace.persistentVolumeClaim.claimName": at("other", on=replaying(trace=_ON_CLAIM)),
        "trace.path": at("other.jsonl", on=replaying()),
        "mode": at("Modelled", on=replaying()),
        "match": at("RequestId", on=replaying()),
        "unmatched": at("Refuse", on=replaying()),
        "acceptance[].fromSeconds": at(0, on=replaying(acceptance=[{"fromSeconds": 60, "percent": 50}])),
        "acceptance[].percent": at(40, on=replaying(acceptance=[{"percent": 50}])),
        "timeScalePercent": at(50, on=replaying()),
        "loadFactor": at(10, on=replaying()),
        "seed": at(1, on=replaying()),
        "failures.startSeconds": at(30, on=replaying()),
        "failures.errorPercent": at(5, on=replaying()),
        "failures.hangAfterSeconds": at(60, on=replaying()),
        "failures.crashAfterSeconds": at(60, on=replaying()),
    }.items()
}
