"""What the event loop hands to the writer thread, without ever waiting for it."""

from collections import deque

from .samples import RequestSample, StepSample

Sample = RequestSample | StepSample

CAPACITY_BYTES = 256 * 2**20
"""Minutes of steps on a disk that does not answer, or all requests of a large batch that end at once."""


class BoundedQueue:
    """A queue that drops and counts what it has no room for.

    The room is in bytes: a request with a long prompt takes as much as hundreds of steps. The writer asks for what
    there is some times a second: waking it for every item would cost the event loop more than all the rest.
    """

    def __init__(self, capacity_bytes: int = CAPACITY_BYTES) -> None:
        self.dropped = 0
        self._capacity_bytes = capacity_bytes
        self._items: deque[Sample] = deque()
        # One for either thread: a sum that both change would go wrong.
        self._put_bytes = 0
        self._got_bytes = 0

    def put(self, item: Sample) -> None:
        """Append an item, or count it as dropped."""
        size_bytes = item.size_bytes
        if self._put_bytes + size_bytes - self._got_bytes <= self._capacity_bytes:
            self._put_bytes += size_bytes
            self._items.append(item)
        else:
            self.dropped += 1

    def get(self) -> Sample | None:
        """Return the oldest item, or None."""
        try:
            item = self._items.popleft()
        except IndexError:
            return None
        self._got_bytes += item.size_bytes
        return item

    def __len__(self) -> int:
        return len(self._items)
