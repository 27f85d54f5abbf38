"""What is to be sent when: the recorded requests, at their moments."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from specdecode_operator.capture.load.workload import WARMUP_PHASE
from specdecode_operator.problems import printable
from specdecode_operator.replay.drive.turns import earlier_turns
from specdecode_operator.replay.recording.read import RecordingError
from specdecode_operator.replay.recording.recording import RecordedRequest, Recording

_PHASE: Final = "replay"
_LONGEST_PROMPT: Final = 2**24
"""No engine takes more, and making it would only fill this machine's memory."""
_FOR_A_HEADER: Final = re.compile(r"[!-~]{1,128}")


@dataclass(frozen=True, slots=True)
class Planned:
    """A request that will be sent."""

    place: int  # in the order of arrival, which is also what the end of its id says
    request: RecordedRequest
    offset_s: float  # from the first request's moment
    after: int | None  # place of the turn that it goes on from
    is_gone_on_from: bool

    @property
    def request_id(self) -> str:
        """The recorded id, by which a replay server finds the record, if it has one that a header can carry."""
        recorded = self.request.request_id
        return recorded if recorded and _FOR_A_HEADER.fullmatch(recorded) else f"replay-{self.place}"

    @property
    def phase(self) -> str:
        """The recorded phase; none is taken for warm-up, which is left out everywhere."""
        recorded = self.request.phase
        return recorded if recorded and recorded != WARMUP_PHASE else _PHASE


def planned(recording: Recording, time_scale: float, most: int | None = None) -> Sequence[Planned]:
    """Return the requests with a moment, in order of arrival; with ``most``, the first so many.

    Raises
    ------
    RecordingError
        None has a moment, or a prompt is longer than any.
    """
    requests = [request for request in recording.requests if request.arrival_ms is not None][:most]
    if not requests:
        raise RecordingError(
            f"{printable(str(recording.trace))}: no record has arrival_ms, so nobody knows when to send them: name a"
            " trace of a capture"
        )
    longest = max(request.prompt_tokens for request in requests)
    if longest > _LONGEST_PROMPT:
        raise RecordingError(f"{printable(str(recording.trace))}: a prompt of {longest} tokens: leave its record out")
    first_ms = requests[0].arrival_ms or 0.0
    earlier = earlier_turns(requests)
    gone_on_from = set(earlier)
    return [
        Planned(
            place=place,
            request=request,
            offset_s=((request.arrival_ms or 0.0) - first_ms) / 1000 * time_scale,
            after=after,
            is_gone_on_from=place in gone_on_from,
        )
        for place, (request, after) in enumerate(zip(requests, earlier, strict=True))
    ]
