"""Rendered objects are kept packed, and come back as they were."""

from specdecode_operator.deployment.objects.packed import pack, unpack


def test_equal_objects_are_equal_packed_however_their_fields_are_ordered() -> None:
    one, other = {"a": {"x": 1, "y": [2, "z"]}, "b": None}, {"b": None, "a": {"y": [2, "z"], "x": 1}}
    assert pack(one) == pack(other)
    assert unpack(pack(one)) == other
