"""Which of many things belong to one object, without a look at each of them."""

from collections import defaultdict
from collections.abc import Hashable
from typing import Generic, TypeVar

from specdecode_operator.api.key import Key

Member = TypeVar("Member", bound=Hashable)


class Grouping(Generic[Member]):
    """Members by the object that they belong to, each to one at most."""

    def __init__(self) -> None:
        self._owners: dict[Member, Key] = {}
        self._members: defaultdict[Key, set[Member]] = defaultdict(set)

    def put(self, member: Member, owner: Key | None) -> None:
        """Say to whom a member belongs now, and to nobody else; to nobody at all with None."""
        if self._owners.get(member) == owner:
            return
        self.drop(member)
        if owner is not None:
            self._owners[member] = owner
            self._members[owner].add(member)

    def drop(self, member: Member) -> None:
        """Forget a member, which need not be known."""
        owner = self._owners.pop(member, None)
        if owner is None:
            return
        self._members[owner].discard(member)
        if not self._members[owner]:
            del self._members[owner]

    def members(self, owner: Key) -> frozenset[Member]:
        """Return what belongs to an object."""
        return frozenset(self._members.get(owner, ()))
