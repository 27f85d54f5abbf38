"""Accounting of tokens."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdecode_operator.capture.files.accounting import Accounting, EngineSide, account
from specdecode_operator.capture.files.formats import ClientRecord
from tests.support.recordings import write_lines


def client(name: str, outcome: str = "completed", **changes: Any) -> dict[str, Any]:
    line = {"id": name, "phase": "p", "index": 0, "outcome": outcome, "chunks": 2, "completion_tokens": 5}
    return line | changes


def record(name: str, **changes: Any) -> dict[str, Any]:
    return {"request_id": name, "output_tokens": 5, "ended_by": "engine"} | changes


Lines = list[dict[str, Any]]


def accounted(folder: Path, clients: Lines, records: Lines, aborted: Lines | None = None) -> Accounting:
    write_lines(folder / "client", clients)
    write_lines(folder / "trace", [{"meta": {}}, *records])
    write_lines(folder / "aborted", aborted or [])
    return account(folder / "client", folder / "trace", folder / "aborted" if aborted else None, folder)


def test_requests_with_every_outcome_add_up(tmp_path: Path) -> None:
    found = accounted(
        tmp_path,
        [
            client("a"),
            client("b", "http_rejected", completion_tokens=None),
            client("c", "disconnected", completion_tokens=None),
            client("d", "timed_out", first_token_ms=1.0),
            client("e", "cancelled"),
            client("f", "not_sent"),
            client("w", warmup=True),
            client("n", n=2, completion_tokens=10),
            client("s", completion_tokens=3),
        ],
        [
            record("a"),
            record("d", ended_by="abort"),
            record("n"),
            record("n"),
            record("s", ended_by="stop_string"),
        ],
        [record("e", output_tokens=0, ended_by="abort")],
    )
    assert found.holds
    assert found.equation == (
        "7 sent = 1 HTTP-rejected + 1 never admitted + 5 in the engine (cancelled 1, completed 3, timed_out 1)"
    )
    assert (found.records, found.not_sent, found.warmup, found.token_mismatches) == (6, 1, 1, 0)


@pytest.mark.parametrize(
    ("clients", "records", "what"),
    [
        ([client("a")], [], "completed with 2 chunks, but the engine has no record"),
        ([client("a", "disconnected", first_token_ms=5.0)], [], "the engine has no record"),
        ([], [record("a")], "no client sent it"),
        ([client("a")], [record("a"), record("a")], "2 records for n = 1"),
        ([client("a", n=3)], [record("a"), record("a")], "2 records for n = 3"),
        ([client("a"), client("a")], [record("a")], "2 lines of the client"),
        ([client("a", "not_sent")], [record("a")], "recorded it as not sent"),
        ([client("a")], [record("a", ended_by="abort")], "received the whole answer, but the engine recorded abort"),
        ([client("a")], [record("a", ended_by="unfinished")], "the engine recorded unfinished"),
    ],
)
def test_mismatch_is_named_with_its_request(
    tmp_path: Path, clients: list[dict[str, Any]], records: list[dict[str, Any]], what: str
) -> None:
    found = accounted(tmp_path, [*clients, client("good")], [*records, record("good")])
    assert found.mismatches == 1
    assert found.shown[0].request_id == "a"
    assert what in found.shown[0].what
    assert " != " in found.equation


def test_every_line_of_the_client_counts_as_sent(tmp_path: Path) -> None:
    found = accounted(tmp_path, [client("a"), client("a"), client("good")], [record("a"), record("good")])
    assert found.equation == "3 sent != 0 HTTP-rejected + 0 never admitted + 1 in the engine (completed 1)"


def test_only_first_20_mismatches_are_shown(tmp_path: Path) -> None:
    found = accounted(tmp_path, [client(f"{n:03}") for n in range(50)], [])
    assert (found.mismatches, len(found.shown)) == (50, 20)


@pytest.mark.parametrize(
    ("ended_by", "mismatches"), [(["engine"], 1), (["stop_string"], 0), (["engine", "stop_string"], 0)]
)
def test_token_counts_are_compared_unless_stop_string_ended_an_answer(
    tmp_path: Path, ended_by: list[str], mismatches: int
) -> None:
    answers = [record("a", ended_by=each) for each in ended_by]
    found = accounted(tmp_path, [client("a", n=len(answers), completion_tokens=4)], answers)
    assert found.token_mismatches == mismatches


OUTCOMES = ["completed", "http_rejected", "disconnected", "timed_out", "cancelled", "not_sent"]
FEW = st.integers(min_value=0, max_value=3)


def fits(outcome: str, records: int, n: int) -> bool:
    """Whether the engine may have so many records of a request that asked for n answers and got no token."""
    match outcome:
        case "completed":
            return records == n
        case "not_sent":
            return records == 0
        case _:
            return records in (0, n)


@given(st.lists(st.tuples(st.sampled_from(OUTCOMES), FEW, FEW.map(lambda n: n + 1))))
def test_every_request_is_in_one_term_or_a_mismatch(requests: list[tuple[str, int, int]]) -> None:
    accounting = Accounting()
    for index, (outcome, records, n) in enumerate(requests):
        line = ClientRecord(id=str(index), phase="p", index=index, outcome=outcome, n=n)  # type: ignore[arg-type]
        accounting.add(str(index), [line], [EngineSide(str(index), 5, "engine")] * records)
    sent = [request for request in requests if request[0] != "not_sent"]
    lost = [outcome for outcome, records, _ in sent if outcome == "completed" and records == 0]
    terms = accounting.http_rejected + accounting.never_admitted + sum(accounting.engine.values())
    assert accounting.mismatches == sum(not fits(*request) for request in requests)
    assert accounting.holds == all(fits(*request) for request in requests)
    assert accounting.sent == len(sent) == terms + len(lost)
    assert accounting.not_sent == len(requests) - len(sent)
    assert accounting.engine == Counter(outcome for outcome, records, _ in sent if records)
    assert accounting.records == sum(records for _, records, _ in requests)
