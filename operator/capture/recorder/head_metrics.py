"""Publish the result of the last update of the draft head at the /metrics of the engine."""

from functools import lru_cache

KEPT, REFUSED, FAILED, REVERTED = RESULTS = ("kept", "refused", "failed", "reverted")
"""Results. kept: the new head serves. refused: the head does not fit this engine, which did not change. failed: loading
or checking the head failed, and the old head serves. reverted: answers were wrong, and the old head serves again."""

HEAD = "specdecode:draft_head_update"
"""Gauge: 1 for the last update since the engine started, by checksum of the head, result and reason."""
PAUSE = "specdecode:draft_head_update_pause_seconds"
"""Gauge: time that requests waited for the last update."""
SHA256, RESULT, REASON = "sha256", "result", "reason"
LONGEST_REASON = 200


def publish(sha256: str, result: str, reason: str, pause_s: float) -> None:
    """Replace the published result."""
    printable = "".join(each if each.isprintable() else " " for each in reason)
    _metrics().set((sha256, result, printable[:LONGEST_REASON]), pause_s)


@lru_cache(maxsize=1)
def _metrics() -> "_Metrics":
    return _Metrics()


class _Metrics:
    def __init__(self) -> None:
        # Only an engine has the library. Each of several API servers writes its own files, which one page aggregates.
        from prometheus_client import Gauge  # noqa: PLC0415

        labels = [SHA256, RESULT, REASON]
        self._head = Gauge(HEAD, "1 for the last update of the draft head.", labels, multiprocess_mode="mostrecent")
        text = "Time that requests waited for the last update of the draft head."
        self._pause = Gauge(PAUSE, text, multiprocess_mode="mostrecent")
        self._last: tuple[str, str, str] | None = None

    def set(self, labels: tuple[str, str, str], pause_s: float) -> None:
        if self._last is not None and self._last != labels:
            self._head.labels(*self._last).set(0)
        self._last = labels
        self._head.labels(*labels).set(1)
        self._pause.set(pause_s)
