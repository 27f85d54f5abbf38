"""What the kubelet kept of a container's last words, without what people asked it.

Where a container has left no message of its own, the kubelet takes the end of its log, and vLLM's log may hold prompts
and answers (``--enable-log-requests``), which are not for all who read a status or an Event. They stand in records of
the levels INFO and DEBUG, which say nothing of why an engine ended.
"""

import re
from typing import Final

_CUT_AT_BYTES: Final = 2048
"""So much of a log the kubelet keeps (MaxContainerTerminationMessageLogLength): it may begin within a line."""

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
    lines = _COLOURS.sub("", last_words).split("\n")
    if len(last_words.encode()) >= _CUT_AT_BYTES:
        lines = lines[1:]
    kept, of_one_request = [], False
    for line in lines:
        of_one_request = not _OF_THE_ENGINE.search(line) and (of_one_request or bool(_OF_ONE_REQUEST.search(line)))
        if not (of_one_request or _CHATTER.match(line)):
            kept.append(_PREFIX.sub("", line))
    return kept
