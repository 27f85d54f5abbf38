"""Publish the verdicts on canary answers at the /metrics of the engine, in a process that serves requests."""

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from .canary import DIGEST_CHARACTERS, LONGEST_REASON, UNSUPPORTED, VERDICTS

ANSWERS = "specdecode:canary_answers"
"""Counter, with _total: answers by prompt and verdict since the engine started."""
REFUSED = "specdecode:canary_unsupported"
"""Gauge: 1 for the reason why the engine cannot be asked."""
PROMPT, VERDICT, REASON = "prompt", "verdict", "reason"

_DIGEST = re.compile(rf"[0-9a-f]{{{DIGEST_CHARACTERS}}}")


def publish(canary: Any) -> None:
    """Count one verdict: the value of ``canary`` in a line of `canary.line_of`.

    Raises ValueError if it is not one.
    """
    if not isinstance(canary, Mapping) or canary.keys() != {"prompt", "verdict", "reason"}:
        raise ValueError("canary: not an object with prompt, verdict and reason")
    prompt, verdict, reason = canary["prompt"], canary["verdict"], canary["reason"]
    if not isinstance(prompt, str) or not _DIGEST.fullmatch(prompt):
        raise ValueError("canary.prompt: not the digest of a prompt")
    if verdict not in VERDICTS:
        raise ValueError(f"canary.verdict: not one of {', '.join(VERDICTS)}")
    is_reason = isinstance(reason, str) and len(reason) <= LONGEST_REASON and reason.isprintable()
    if not is_reason if verdict == UNSUPPORTED else reason is not None:
        raise ValueError("canary.reason: not a printable reason of a verdict that is unsupported")
    _metrics().count(prompt, verdict, reason)


@lru_cache(maxsize=1)
def _metrics() -> "_Metrics":
    return _Metrics()


class _Metrics:
    def __init__(self) -> None:
        # Only an engine has the library. Of several API servers, each has its own files, which one page sums up.
        from prometheus_client import Counter, Gauge  # noqa: PLC0415

        self._answers = Counter(ANSWERS, "Answers to canary prompts since the engine started.", [PROMPT, VERDICT])
        text = "Why the engine cannot be asked canary prompts, if 1."
        self._refused = Gauge(REFUSED, text, [REASON], multiprocess_mode="mostrecent")
        self._reason: str | None = None

    def count(self, prompt: str, verdict: str, reason: str | None) -> None:
        self._answers.labels(prompt, verdict).inc()
        if self._reason is not None and self._reason != reason:
            self._refused.labels(self._reason).set(0)
        self._reason = reason
        if reason is not None:
            self._refused.labels(reason).set(1)
