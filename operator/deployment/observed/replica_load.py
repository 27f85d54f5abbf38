"""Load of an object's engines in replicas that it would keep at their capacity."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ReplicaLoad:
    """Capacity of one replica, and the load of all of them."""

    capacity: float | None  # Requests at a time with the highest goodput; None if it was not measured
    replicas: float | None  # Running and waiting requests over the capacity; None if either is unknown
    message: str  # Source of the capacity, or why it is unknown
