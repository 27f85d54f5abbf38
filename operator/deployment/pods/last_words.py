"""What the kubelet kept of a container's last words, without what people asked it.

Where a container has left no message of its own, the kubelet takes the end of its log, and vLLM's log may hold prompts
and answers (``--enable-log-requests``), which are not for all who read a status or an Event. They stand in records of
the levels INFO and DEBUG, which say nothing of why an engine ended.
"""

import re
from typing import Final

from specdecode_operator.redaction import after_cut, before_cut, redact

_KEPT_OF_A_LOG_BYTES: Final = 2048
"""The kubelet keeps the end of a log (MaxContainerTerminationMessageLogLength): its first line may be cut."""
_KEPT_OF_A_POD_BYTES: Final = 12_288
"""Containers share this evenly, and the kubelet cuts the end of a message that is longer (normalizeStatus in
pkg/kubelet/status/status_manager.go, MaxPodTerminationMessageLogLength)."""
_CONTAINERS: Final = range(4, 25)
"""With fewer, each may have more than the 4,096 bytes of any message; a pod with more would be unusual."""
_SHARES: Final = frozenset(_KEPT_OF_A_POD_BYTES // containers for containers in _CONTAINERS)

_COLOURS: Final = re.compile(r"\x1b\[[0-9;]*m")
"""Around the process, where VLLM_LOGGING_COLOR asks for them (vllm/logging_utils/formatter.py)."""

_PREFIX: Final = re.compile(r"^\([\w-]+ pid=\d+\)(?: \w+ [\d-]+ [\d:]+ \[[^\]]+\])? ?")
"""What vLLM puts before each line: the process, and for log records level, time and place."""

_CHATTER: Final = re.compile(r"(?:\([\w-]+ pid=\d+\) ?)?(?:TRACE|DEBUG|INFO)\b")
_OF_ONE_REQUEST: Final = re.compile(r"pre-processing request|Chat template rejected the request")
"""What vLLM tells with the error that a client's own request made, of which no engine ends (vllm/v1/engine/core.py,
vllm/renderers/hf.py)."""

_OF_THE_ENGINE: Final = re.compile(
    r"EngineCore (?:encountered|failed)|engine core|core proc|WorkerProc|Worker proc|\bdied\b"
)
"""What its core and workers say when they end: from there on the words are about them."""


def lines_of(last_words: str) -> list[str]:
    """Return the lines that say how a container ended, as they were written but for what vLLM puts before them."""
    # Not where Unicode ends a line: JSON of a request may hold such marks, and nothing stands before what follows them.
    lines = _COLOURS.sub("", _without_cut_edges(last_words)).split("\n")
    kept, of_one_request = [], False
    for line in lines:
        of_one_request = not _OF_THE_ENGINE.search(line) and (of_one_request or bool(_OF_ONE_REQUEST.search(line)))
        if not (of_one_request or _CHATTER.match(line)):
            kept.append(_PREFIX.sub("", line))
    return kept


def _without_cut_edges(last_words: str) -> str:
    """Return last words without the half words, and half secrets, that the kubelet has left at their edges."""
    size = len(last_words.encode())
    # A character of several bytes may be cut, too.
    sizes = {size} if last_words.isascii() else {*range(size, size + 4)}
    end_is_cut = not sizes.isdisjoint(_SHARES) and not last_words.endswith("\n")
    if size >= _KEPT_OF_A_LOG_BYTES or end_is_cut:
        last_words = after_cut(last_words)
    return before_cut(last_words) if end_is_cut else redact(last_words)
