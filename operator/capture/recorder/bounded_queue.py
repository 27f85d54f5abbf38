"""What the event loop hands to the writer thread, without ever waiting for it."""

from collections import deque

from .samples import RequestSample, StepSample

Sample = RequestSample | StepSample

CAPACITY = 65_536
"""Minutes of steps on a disk that does not answer; about 100 MB."""


class BoundedQueue:
    """A queue that drops and counts what it has no room for.

    The writer asks for what there is some times a second: waking it for every item would cost the
    event loop more than all the rest.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        self.dropped = 0
        self._capacity = capacity
        self._items: deque[Sample] = deque()

    def put(self, item: Sample) -> None:
        """Append an item, or count it as dropped."""
        if len(self._items) < self._capacity:
            self._items.append(item)
        else:
            self.dropped += 1

    def get(self) -> Sample | None:
        """Return the oldest item, or None."""
        try:
            return self._items.popleft()
        except IndexError:
            return None

    def __len__(self) -> int:
        return len(self._items)
