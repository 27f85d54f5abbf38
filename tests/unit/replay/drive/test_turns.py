"""Which recorded requests go on from which."""

from array import array
from typing import Any

import pytest

from specdecode_operator.capture.trace_reader import RecordedRequest
from specdecode_operator.replay.drive import earlier_turns


def request(arrival_ms: float | None, *blocks: int, lasts_ms: float = 100) -> RecordedRequest:
    return RecordedRequest(
        arrival_ms=arrival_ms,
        prompt_tokens=16 * len(blocks) + 5,
        cached_tokens=0,
        ttft_ms=lasts_ms,
        chunk_tokens=array("I", [1]),
        gaps_ms=array("d"),
        block_hashes=array("Q", blocks) if blocks else None,
    )


@pytest.mark.parametrize(
    ("requests", "expected"),
    [
        ([request(0, 1), request(200, 1, 2)], [None, 0]),
        ([request(0, 1), request(99.95, 1, 2)], [None, 0]),
        ([request(0, 1), request(200, 1, 2), request(400, 1, 2, 3)], [None, 0, 1]),
        ([request(0, 1), request(200, 3, 4)], [None, None]),
        ([request(0, 1, 2), request(200, 1, 2)], [None, None]),
        ([request(0, 1, 2), request(200, 1, 3)], [None, None]),
        ([request(0, 1), request(10, 1), request(200, 1, 2)], [None, None, 1]),
        ([request(0, 1), request(200, 1, 2), request(210, 1, 3)], [None, 0, 0]),
        ([request(0), request(200), request(None, 1), request(None, 1, 2)], [None] * 4),
    ],
    ids=[
        "turn",
        "no-thinking",
        "third turn",
        "another conversation",
        "said again",
        "changed",
        "the one that ended last",
        "two go on",
        "no hashes and no moments",
    ],
)
def test_a_turn_has_all_that_was_said_before_and_more(requests: list[Any], expected: list[int | None]) -> None:
    assert earlier_turns(requests) == expected


def test_what_came_before_the_other_had_ended_does_not_go_on_from_it() -> None:
    assert earlier_turns([request(0, 1), request(99, 1, 2)]) == [None, None]


def test_a_prefix_that_many_share_is_no_conversation() -> None:
    """The first prompt is the prefix alone, and others have it while it is being answered."""
    assert earlier_turns([request(0, 1), request(50, 1, 2), request(200, 1, 3)]) == [None, None, None]
