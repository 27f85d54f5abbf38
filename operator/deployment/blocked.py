"""Why something that should run does not, as a reason for programs and a sentence for people."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Blocked:
    """What keeps an engine, a Job or a capture from running; reason and message go into a condition."""

    reason: str
    message: str

    permanent: bool = False
    """True where only a person can help: the object is Stalled. Otherwise it may pass by itself."""

    waits: bool = False
    """True where a pod waits for something outside of it, which may appear."""


OPERATOR_IMAGE_UNKNOWN: Final = Blocked(
    "OperatorImageUnknown",
    "the operator does not know its own image, which load generators, replays and readers of models run from: set"
    " SPECDECODE_OPERATOR_IMAGE in its environment, or POD_NAME and POD_NAMESPACE as its manifests do",
)
