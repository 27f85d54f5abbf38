"""What clients read: events of streams and whole answers, as vLLM writes them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from specdecode_operator.replay.engines.engine import Burst
from specdecode_operator.replay.server.text import answer_ids, answer_text, text_of

DONE: Final = b"data: [DONE]\n\n"

_encode: Final = msgspec.json.Encoder().encode
_CONTENT: Final = "\x00"
"""Where the text of an event comes in: no text that is written has it."""


@dataclass(slots=True)
class Piece:
    """What one burst adds to one answer."""

    text: str
    ids: Sequence[int]
    finish_reason: str | None
    stop_reason: str | None = None


def piece_of(burst: Burst, begin: int) -> Piece:
    """Return text and ids of a burst that begins at that token of its answer."""
    if burst.token_ids:
        return Piece(text_of(burst.token_ids), burst.token_ids, burst.finish_reason)
    end = begin + burst.tokens
    return Piece(answer_text(begin, end).decode(), answer_ids(begin, end), burst.finish_reason)


@dataclass(frozen=True)
class Head:
    """What all events of one response begin with."""

    request_id: str
    created: int
    model: str
    chat: bool

    def document(self, *, chunk: bool) -> dict[str, Any]:
        """Return its fields."""
        kind = ("chat.completion.chunk" if chunk else "chat.completion") if self.chat else "text_completion"
        return {"id": self.request_id, "object": kind, "created": self.created, "model": self.model}


class Events:
    """The events of one answer; those in its middle are put together from parts that are made once."""

    __slots__ = ("_after", "_before", "_chat", "_head", "_index")

    def __init__(self, head: Head, index: int) -> None:
        self._head = head
        self._index = index
        self._chat = head.chat
        event = self.event(Piece(_CONTENT, (), None), with_ids=False)
        # From the end, where nothing is that a client may name.
        self._before, _, self._after = event.rpartition(_encode(_CONTENT)[1:-1])

    def words(self, begin: int, end: int) -> bytes:
        """Return an event with nothing but made-up tokens of an answer, from one place to another."""
        return self._before + answer_text(begin, end) + self._after

    def event(
        self,
        piece: Piece,
        *,
        with_ids: bool,
        prompt_ids: Sequence[int] | None = None,
        usage: dict[str, Any] | None = None,
    ) -> bytes:
        """Return any event."""
        ids = list(piece.ids) if with_ids else None
        if self._chat:
            choice: dict[str, Any] = {"index": self._index, "delta": {"content": piece.text}, "logprobs": None}
        else:
            choice = {"index": self._index, "text": piece.text, "logprobs": None}
        choice["finish_reason"] = piece.finish_reason
        if not self._chat or piece.finish_reason is not None:
            choice["stop_reason"] = piece.stop_reason
        if not self._chat:
            choice["prompt_token_ids"] = list(prompt_ids) if prompt_ids is not None else None
        choice["token_ids"] = ids
        return self._data([choice], usage)

    def role(self, prompt_ids: Sequence[int] | None, usage: dict[str, Any] | None) -> bytes:
        """Return what a chat's answer begins with: who speaks."""
        choice = {
            "index": self._index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        return self._data([choice], usage, prompt_token_ids=prompt_ids)

    def usage(self, usage: dict[str, Any]) -> bytes:
        """Return the event with the tokens of all answers, which comes last."""
        return self._data([], usage)

    def _data(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None, **more: Any) -> bytes:
        document = self._head.document(chunk=True) | {"choices": choices}
        document |= {name: list(value) for name, value in more.items() if value is not None}
        if usage is not None:
            document["usage"] = usage
        return b"data: " + _encode(document) + b"\n\n"


def usage_of(prompt_tokens: int, completion_tokens: int, cached_tokens: int | None = None) -> dict[str, Any]:
    """Return a count of tokens."""
    usage: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
    }
    if cached_tokens is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": cached_tokens}
    return usage


def whole_answer(
    head: Head, pieces: Sequence[Piece], usage: dict[str, Any], prompt_ids: Sequence[Sequence[int]] | None
) -> bytes:
    """Return an answer that is not streamed; ids of the prompt of each piece where ids are asked for."""
    choices: list[dict[str, Any]] = []
    for index, piece in enumerate(pieces):
        content: dict[str, Any] = {"text": piece.text}
        if head.chat:
            content = {"message": {"role": "assistant", "content": piece.text}}
        choice = {
            "index": index,
            **content,
            "logprobs": None,
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }
        if prompt_ids is not None:
            choice["token_ids"] = list(piece.ids)
            if not head.chat:
                choice["prompt_token_ids"] = list(prompt_ids[index])
        choices.append(choice)
    document = head.document(chunk=False) | {"choices": choices, "usage": usage}
    if prompt_ids is not None and head.chat:
        document["prompt_token_ids"] = list(prompt_ids[0])
    return _encode(document)


def error(status: int, kind: str, message: str, parameter: str | None = None) -> bytes:
    """Return an error in OpenAI's form."""
    return _encode({"error": {"message": message, "type": kind, "param": parameter, "code": status}})
