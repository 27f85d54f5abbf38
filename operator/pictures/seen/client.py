"""What the load generator's log comes to."""

from array import array
from collections import Counter
from typing import Final

from specdecode_operator.capture.files.formats import ClientRecord

_LONGEST_MS: Final = 86_400_000.0
"""A day: nobody waits so long for a token, and what is longer was no time."""


class ClientSums:
    """TTFT of whole answers over HTTP, and what became of all requests; without warm-up."""

    def __init__(self) -> None:
        self.ttft_ms = array("d")
        self.outcomes: Counter[str] = Counter()

    def add(self, record: ClientRecord) -> None:
        """Take a request in."""
        if record.warmup:
            return
        self.outcomes[record.outcome] += 1
        if record.outcome == "completed" and record.ttft_ms is not None and 0 <= record.ttft_ms <= _LONGEST_MS:
            self.ttft_ms.append(record.ttft_ms)
