"""What the segments of a recorder say, and whether that is what happened in the engine."""

from collections import Counter

from tests.engine.recorder_server import Line, Server

SPECULATION = "vllm:spec_decode_num_"


def lines_of(server: Server, kind: str) -> list[Line]:
    """Return the lines of one kind, of all segments."""
    return [line for segment in server.segments() for line in segment if line["k"] == kind]


def requests_by_name(server: Server) -> dict[str, Line]:
    """Return the records by the X-Request-Id of their question."""
    return {line["external_id"].removeprefix("cmpl-").rsplit("-", 1)[0]: line for line in lines_of(server, "request")}


def chunks_of(request: Line) -> list[tuple[float, int]]:
    """Return stamp and size of each chunk of a record."""
    return list(zip(request["chunk_s"], request["chunk_tokens"], strict=True))


def speculation(steps: list[Line]) -> Counter[str]:
    """Return the counters that the steps add up to, under the names of /metrics."""
    found: Counter[str] = Counter()
    for stats in (step["scheduler"]["spec_decoding_stats"] for step in steps):
        if stats:
            for what in ("drafts", "draft_tokens", "accepted_tokens"):
                found[f"{SPECULATION}{what}_total"] += stats[f"num_{what}"]
            for position, accepted in enumerate(stats["num_accepted_tokens_per_pos"]):
                found[f"{SPECULATION}accepted_tokens_per_pos_total[{position}]"] += accepted
    return found


def speculation_of(counters: Counter[str]) -> Counter[str]:
    """Return the counters of /metrics that are about drafts."""
    return Counter({name: value for name, value in counters.items() if name.startswith(SPECULATION)})


def assert_whole(server: Server, reason: str = "ordered") -> None:
    """Fail unless every segment has its first and last line, and nothing was lost."""
    for segment in server.segments():
        assert (segment[0]["k"], segment[-1]["k"]) == ("header", "closed")
        closed = segment[-1]
        assert (closed["reason"], closed["dropped"], closed["first_error"]) == (reason, 0, None)
        assert closed["requests"] == sum(line["k"] == "request" for line in segment)
        assert closed["steps"] == sum(line["k"] == "step" for line in segment)


def assert_as_observed(server: Server, records: dict[str, Line]) -> None:
    """Fail unless every chunk is what the scheduler handed out, by size and to the last digit of its stamp."""
    observed = server.observed()
    for name, record in records.items():
        assert chunks_of(record) == observed[record["id"]], name
