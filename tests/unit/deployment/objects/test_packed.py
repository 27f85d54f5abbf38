"""Rendered objects are kept packed, and come back as they were."""

from specdecode_operator.deployment.rollout.engine_workload import pack_object, unpack_object


def test_equal_objects_are_equal_packed_however_their_fields_are_ordered() -> None:
    one, other = {"a": {"x": 1, "y": [2, "z"]}, "b": None}, {"b": None, "a": {"y": [2, "z"], "x": 1}}
    assert pack_object(one) == pack_object(other)
    assert unpack_object(pack_object(one)) == other
