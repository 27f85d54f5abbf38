"""HTTP responses and event streams, however the network cuts them."""

from itertools import pairwise

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdecode_operator.capture.load.engine_client import (
    CompletionStream,
    HttpResponse,
    UnreadableStreamError,
    error_text,
)
from specdecode_operator.capture.load.prompts import Prompt
from tests.support.completion_server import OK_HEAD, chunk, token_event, usage_event

BODY = token_event([5, 6]) + token_event([7]) + usage_event(3, 3) + b"data: [DONE]\n\n"
CHUNKED = OK_HEAD + chunk(BODY[:50]) + chunk(BODY[50:51]) + b"%X;ext=1\r\n%s\r\n" % (len(BODY) - 51, BODY[51:])
CHUNKED += b"0\r\ntrailer: x\r\n\r\n"
SIZED = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(BODY), BODY)
INFORMED = b"HTTP/1.1 100 Continue\r\n\r\n" + SIZED
TO_THE_END = b"HTTP/1.0 200 OK\r\n\r\n" + BODY

CUTS = st.lists(st.integers(0, len(CHUNKED)), max_size=40)


def _pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    return [data[start:end] for start, end in pairwise(edges)]


@given(cuts=CUTS, data=st.sampled_from([CHUNKED, SIZED, INFORMED, TO_THE_END]))
def test_a_response_is_the_same_however_it_is_cut(cuts: list[int], data: bytes) -> None:
    response = HttpResponse()
    body = b"".join(response.feed(piece) for piece in _pieces(data, cuts))
    assert response.complete == (data is not TO_THE_END)
    response.end_of_connection()
    assert (response.status, body, response.complete) == (200, BODY, True)


@pytest.mark.parametrize("data", [CHUNKED, SIZED, INFORMED])
def test_a_response_that_lacks_its_last_byte_is_not_complete(data: bytes) -> None:
    response = HttpResponse()
    response.feed(data[:-1])
    response.end_of_connection()
    assert not response.complete


def test_a_response_without_a_body_is_complete() -> None:
    response = HttpResponse()
    assert response.feed(b"HTTP/1.1 204 No Content\r\n\r\n") == b""
    assert response.complete
    sized = HttpResponse()
    sized.feed(b"HTTP/1.1 500 Oops\r\ncontent-length: 0\r\n\r\n")
    assert sized.complete


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"SSH-2.0-server\r\n\r\n", "illegal status line"),
        (b"HTTP/1.1 abc\r\n\r\n", "illegal status line"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: -4\r\n\r\n", "bad Content-Length"),
        (OK_HEAD + b"zz\r\n", "illegal chunk header"),
        (OK_HEAD + b"2\r\nabcd\r\n", "malformed chunk footer"),
        (OK_HEAD + b"1" * 70_000, "too long"),
        (b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 20_000, "too long"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" * 17, "too many informational"),
    ],
)
def test_what_is_not_http_is_refused(data: bytes, complaint: str) -> None:
    with pytest.raises(h11.RemoteProtocolError, match=complaint):
        HttpResponse().feed(data)


def test_what_follows_the_end_is_passed_over() -> None:
    response = HttpResponse()
    assert response.feed(SIZED + b"HTTP/1.1 500 Oops\r\n\r\n") == BODY
    assert response.feed(b"more") == b""
    assert (response.status, response.complete) == (200, True)


@given(cuts=CUTS, keep=st.booleans())
def test_a_stream_is_the_same_however_it_is_cut(cuts: list[int], *, keep: bool) -> None:
    stream = CompletionStream(keep_answer=keep)
    first = len(token_event([5, 6]))
    for now, piece in enumerate(_pieces(BODY, [*cuts, first])):
        stream.feed(piece, float(now))
        if stream.chunks == 1 and stream.first_token_s is not None and not stream.done:
            assert stream.first_token_s <= now
    assert (stream.chunks, stream.prompt_tokens, stream.completion_tokens, stream.done) == (2, 3, 3, True)
    if keep:
        assert stream.answer(as_text=False) == Prompt([5, 6, 7])
        assert stream.answer(as_text=True) == Prompt(" t5 t6 t7")


def test_the_first_token_has_the_time_of_its_arrival() -> None:
    stream = CompletionStream(keep_answer=False)
    event = token_event([5])
    stream.feed(event[:-1], 1.0)
    assert stream.first_token_s is None
    stream.feed(event[-1:], 2.0)
    stream.feed(event, 3.0)
    assert (stream.first_token_s, stream.chunks) == (2.0, 2)


def test_comments_between_events_are_not_counted() -> None:
    stream = CompletionStream(keep_answer=False)
    stream.feed(b": ping\n\n" + usage_event(3, 0), 1.0)
    assert (stream.chunks, stream.first_token_s, stream.completion_tokens) == (0, None, 0)


def test_an_event_that_never_ends_is_refused_at_once() -> None:
    stream = CompletionStream(keep_answer=False)
    stream.feed(b"x" * 1024 * 1024, 1.0)
    with pytest.raises(UnreadableStreamError, match="no end after 1048576 bytes"):
        stream.feed(b"x", 2.0)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b'{"error": {"message": "too  long\\n", "code": 400}}', "too long"),
        (b'{"error": "no such model"}', "no such model"),
        (b'{"detail": "Not Found"}', "Not Found"),
        (b'{"detail": [{"loc": ["body"], "input": "my secret"}]}', '[{"loc":["body"],'),
        (b"Unauthorized", "Unauthorized"),
        (b"[1]", "[1]"),
        (b"", ""),
        (b"[" * 60_000, "[" * 199 + "…"),
        (b"x" * 300, "x" * 199 + "…"),
    ],
)
def test_the_reason_of_a_refusal_is_short_and_without_the_prompt(body: bytes, text: str) -> None:
    assert error_text(body) == text
