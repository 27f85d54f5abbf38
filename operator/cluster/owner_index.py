"""An index of things by the object that owns them."""

from collections import defaultdict
from collections.abc import Hashable
from typing import Generic, TypeVar

from specdecode_operator.api.key import Key

Member = TypeVar("Member", bound=Hashable)


class OwnerIndex(Generic[Member]):
    """Members by their owner; each has one at most."""

    def __init__(self) -> None:
        self._owners: dict[Member, Key] = {}
        self._members: defaultdict[Key, set[Member]] = defaultdict(set)

    def put(self, member: Member, owner: Key | None) -> None:
        """Set the owner of a member, in place of any before; None: it has none."""
        if self._owners.get(member) == owner:
            return
        self.drop(member)
        if owner is not None:
            self._owners[member] = owner
            self._members[owner].add(member)

    def drop(self, member: Member) -> None:
        """Remove a member, which need not be there."""
        owner = self._owners.pop(member, None)
        if owner is None:
            return
        self._members[owner].discard(member)
        if not self._members[owner]:
            del self._members[owner]

    def owner(self, member: Member) -> Key | None:
        """Return the owner of a member, if it has one."""
        return self._owners.get(member)

    def members(self, owner: Key) -> frozenset[Member]:
        """Return the members of an owner."""
        return frozenset(self._members.get(owner, ()))
