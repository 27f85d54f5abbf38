"""What a streamed answer of /v1/completions says, read as its bytes arrive."""

from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Struct

from specdecode_operator.capture.files.formats import Word
from specdecode_operator.capture.load.prompts.prompt import Prompt
from specdecode_operator.redaction import clip

_EVENT_END = b"\n\n"
_DATA = b"data: "
_DONE = b"[DONE]"
_ERROR = b'{"error"'
_USAGE = b'"usage"'
_LONGEST_ERROR = 200
_LONGEST_EVENT_BYTES = 1024 * 1024
_LARGEST_KEPT_BYTES: Final = 2**27
"""Of the events of an answer that is kept: an engine's longest answers have less."""

_Count = Annotated[int, Meta(ge=0, le=2**53)]


class _Usage(Struct):
    prompt_tokens: _Count | None = None
    completion_tokens: _Count | None = None


class _Choice(Struct):
    text: str | None = None
    token_ids: list[Word] | None = None


class _Event(Struct):
    usage: _Usage | None = None
    choices: list[_Choice] | None = None


_EVENT: Final = msgspec.json.Decoder(_Event)


class UnreadableStreamError(Exception):
    """What arrives is no stream of events."""


class CompletionStream:
    """The server-sent events of one answer.

    Events with tokens are only counted, unless the answer itself is wanted:
    taking hundreds of streams apart would make the load generator late.
    """

    def __init__(self, *, keep_answer: bool) -> None:
        self.chunks = 0  # events with tokens
        # When the first and the last of them arrived, on the monotonic clock.
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        # What the engine's usage report says, at the end.
        self.prompt_tokens: int | None = None
        self.completion_tokens: int | None = None
        self.done = False
        self.error: str | None = None  # what the engine said went wrong after it had begun to answer
        self._keep_answer = keep_answer
        self._ids: list[int] = []
        self._texts: list[str] = []
        self._kept_bytes = 0
        self._tail = bytearray()  # of an event whose end has not arrived

    def feed(self, data: bytes, now_s: float) -> None:
        """Read what arrived now.

        Raises
        ------
        UnreadableStreamError
            An event, or an answer that is kept, is longer than any of an engine.
        msgspec.DecodeError, UnicodeDecodeError, RecursionError
            An event is not what an engine sends.
        """
        # Only what is new is searched, and nothing is copied: an event may arrive in very many pieces.
        searched = max(len(self._tail) - len(_EVENT_END) + 1, 0)
        self._tail += data
        if self._tail.find(_EVENT_END, searched) < 0:
            if len(self._tail) > _LONGEST_EVENT_BYTES:
                raise UnreadableStreamError(f"an event has no end after {_LONGEST_EVENT_BYTES} bytes")
            return
        *events, self._tail = self._tail.split(_EVENT_END)
        for event in events:
            if event.startswith(_DATA):
                self._read(event[len(_DATA) :], now_s)

    def answer(self, *, as_text: bool) -> Prompt:
        """Return what was answered; only of a stream that was to keep it."""
        return Prompt("".join(self._texts) if as_text else self._ids)

    def _read(self, payload: bytearray, now_s: float) -> None:
        if payload == _DONE:
            self.done = True
        elif payload.startswith(_ERROR):
            self.error = error_text(payload)
        elif self._keep_answer or _USAGE in payload:
            self._read_document(payload, now_s)
        else:
            self._count_chunk(now_s)

    def _read_document(self, payload: bytearray, now_s: float) -> None:
        if self._keep_answer:
            self._kept_bytes += len(payload)
            if self._kept_bytes > _LARGEST_KEPT_BYTES:
                raise UnreadableStreamError(f"the answer has no end after {_LARGEST_KEPT_BYTES} bytes")
        event = _EVENT.decode(payload)
        if event.usage is not None:
            self.prompt_tokens = event.usage.prompt_tokens
            self.completion_tokens = event.usage.completion_tokens
        for choice in event.choices or ():
            self._count_chunk(now_s)
            if self._keep_answer:
                self._ids += choice.token_ids or ()
                self._texts.append(choice.text or "")

    def _count_chunk(self, now_s: float) -> None:
        self.chunks += 1
        if self.first_token_s is None:
            self.first_token_s = now_s
        self.last_token_s = now_s


def error_text(body: bytes | bytearray) -> str:
    """Return the short reason in an engine's error document, without anything of the prompt that it may repeat.

    vLLM says ``{"error": {"message": ...}}``, FastAPI ``{"detail": ...}``;
    a document on a field that it does not take ends with the field's input.
    """
    try:
        return shortened(_reason(msgspec.json.decode(body)))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):  # no JSON, or nested too deep
        return shortened(body.decode(errors="replace"))


def _reason(document: Any) -> str:
    if isinstance(document, dict):
        error = document.get("error", document.get("detail", document))
        document = error.get("message", error) if isinstance(error, dict) else error
    return document if isinstance(document, str) else msgspec.json.encode(document).decode()


def shortened(text: str) -> str:
    """Return the beginning of a text from the engine, without anything of the prompt that it may repeat."""
    for mark in ("'input'", '"input"'):
        text = text.partition(mark)[0]
    return clip(" ".join(text.split()), _LONGEST_ERROR)
