"""The index of things by their owners."""

from specdecode_operator.api.deployment import Key
from specdecode_operator.cluster.cache import OwnerIndex


def test_of_owners_without_members_nothing_is_kept() -> None:
    index: OwnerIndex[str] = OwnerIndex()
    owner = Key("default", "llama")
    index.put("member", owner)
    assert index.members(owner) == {"member"}
    index.drop("member")
    assert not index.members(owner)
    assert not index._members
