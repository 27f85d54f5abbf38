"""What the load generator's log comes to."""

from array import array
from collections import Counter

from specdecode_operator.capture.files.formats import ClientRecord


class ClientSums:
    """Times of whole answers over HTTP, and what became of all requests; without warm-up."""

    def __init__(self) -> None:
        self.ttft_ms = array("d")
        self.latency_ms = array("d")
        self.outcomes: Counter[str] = Counter()

    def add(self, record: ClientRecord) -> None:
        """Take a request in."""
        if record.warmup:
            return
        self.outcomes[record.outcome] += 1
        if record.outcome == "completed" and record.ttft_ms is not None:
            self.ttft_ms.append(record.ttft_ms)
        if record.outcome == "completed" and record.latency_ms is not None:
            self.latency_ms.append(record.latency_ms)
