"""Generate the answers to one request, streamed or whole, in vLLM's format."""

import asyncio
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
from starlette.types import Message, Receive

from specdecode_operator.capture.recorder.block_hashes import chained_hashes
from specdecode_operator.replay.engine import Burst, Incoming, ReplayEngine
from specdecode_operator.replay.server.completion_requests import (
    Asked,
    Prompt,
    RejectedError,
    answer_ids,
    answer_text,
    text_of,
)
from specdecode_operator.replay.server.http_transport import Unread, Wire
from specdecode_operator.replay.server.served_answers import Answer, Meter

DONE: Final = b"data: [DONE]\n\n"

_encode: Final = msgspec.json.Encoder().encode
_CONTENT: Final = "\x00"  # placeholder for the text of an event: no generated text contains it


@dataclass(slots=True)
class Piece:
    """Part of one answer that one burst adds."""

    text: str
    ids: Sequence[int]
    finish_reason: str | None
    stop_reason: str | None = None


@dataclass(frozen=True)
class Head:
    """Fields that all events of one response begin with."""

    request_id: str
    created: int
    model: str
    chat: bool

    def document(self, *, chunk: bool) -> dict[str, Any]:
        """Return the fields."""
        kind = ("chat.completion.chunk" if chunk else "chat.completion") if self.chat else "text_completion"
        return {"id": self.request_id, "object": kind, "created": self.created, "model": self.model}


class Events:
    """Events of one answer; those in its middle are joined from parts that are encoded once."""

    __slots__ = ("_after", "_before", "_chat", "_head", "_index")

    def __init__(self, head: Head, index: int) -> None:
        self._head = head
        self._index = index
        self._chat = head.chat
        event = self.event(Piece(_CONTENT, (), None), with_ids=False)
        # Search from the end: values that a client chooses come before it.
        self._before, _, self._after = event.rpartition(_encode(_CONTENT)[1:-1])

    def words(self, begin: int, end: int) -> bytes:
        """Return an event with the made-up tokens of an answer from one position to another."""
        return self._before + answer_text(begin, end) + self._after

    def event(
        self,
        piece: Piece,
        *,
        with_ids: bool,
        prompt_ids: Sequence[int] | None = None,
        usage: dict[str, Any] | None = None,
    ) -> bytes:
        """Return an event with a choice."""
        text: dict[str, Any] = {"delta": {"content": piece.text}} if self._chat else {"text": piece.text}
        choice = {"index": self._index, **text, "logprobs": None, "finish_reason": piece.finish_reason}
        if not self._chat or piece.finish_reason is not None:
            choice["stop_reason"] = piece.stop_reason
        if not self._chat:
            choice["prompt_token_ids"] = list(prompt_ids) if prompt_ids is not None else None
        choice["token_ids"] = list(piece.ids) if with_ids else None
        return self._data([choice], usage)

    def role(self, prompt_ids: Sequence[int] | None, usage: dict[str, Any] | None) -> bytes:
        """Return the first event of a chat's answer, with the speaker's role."""
        delta = {"role": "assistant", "content": ""}
        choice = {"index": self._index, "delta": delta, "logprobs": None, "finish_reason": None}
        return self._data([choice], usage, prompt_token_ids=prompt_ids)

    def usage(self, usage: dict[str, Any]) -> bytes:
        """Return the last event, with the tokens of all answers."""
        return self._data([], usage)

    def _data(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None, **more: Any) -> bytes:
        document = self._head.document(chunk=True) | {"choices": choices}
        document |= {name: list(value) for name, value in more.items() if value is not None}
        if usage is not None:
            document["usage"] = usage
        return b"data: " + _encode(document) + b"\n\n"


def usage_of(prompt_tokens: int, completion_tokens: int, cached_tokens: int | None = None) -> dict[str, Any]:
    """Return token counts in the form of OpenAI."""
    total = prompt_tokens + completion_tokens
    usage = {"prompt_tokens": prompt_tokens, "total_tokens": total, "completion_tokens": completion_tokens}
    return usage if cached_tokens is None else usage | {"prompt_tokens_details": {"cached_tokens": cached_tokens}}


def error(status: int, kind: str, message: str, parameter: str | None = None) -> bytes:
    """Return an error in OpenAI's form."""
    return _encode({"error": {"message": message, "type": kind, "param": parameter, "code": status}})


_HASHED_AT_ONCE_S: Final = 0.0002
_ENGINE_ERROR: Final = (
    "the engine aborted the request: it is too large for the KV cache, or was aborted in the recording"
)


@dataclass(frozen=True, kw_only=True)
class Engines:
    """The engine behind the answers, and how they are counted and bounded."""

    engine: ReplayEngine
    meter: Meter
    hash_blocks_of: int | None = None  # tokens in a block; None if prompts need no hashes
    max_model_len: int | None = None
    unread: Unread = field(default_factory=Unread)
    hashing: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass(slots=True, eq=False)
class _Choice:
    """One answer and its progress."""

    generation: "Generation"
    prompt: Prompt
    events: Events
    answer: Answer | None = None
    tokens: int = 0
    cached_tokens: int = 0
    held: str = ""  # text that may be the beginning of a stop string
    wire: Wire | None = None  # for events with nothing but text, after the first

    def take(self, burst: Burst) -> None:
        """Take a burst. Most are words in the middle of a streamed answer, which needs the fast path."""
        if self.wire is not None and burst.finish_reason is None and not burst.token_ids:
            begin = self.tokens
            self.tokens = end = begin + burst.tokens
            self.wire.write(self.events.words(begin, end))
        else:
            self.generation.take(self, burst)


class Generation(ABC):
    """All answers to one request."""

    def __init__(self, engines: Engines, asked: Asked, model: str, request_id: str | None) -> None:
        self.asked = asked
        self._engines = engines
        self._name = request_id or uuid.uuid4().hex
        prefix = "chatcmpl-" if asked.chat else "cmpl-"
        self.head = Head(f"{prefix}{self._name}", int(time.time()), model, asked.chat)
        self.choices = [
            _Choice(self, prompt, Events(self.head, number * asked.n + sample))
            for number, prompt in enumerate(asked.prompts)
            for sample in range(asked.n)
        ]
        self._left = len(self.choices)
        self._longest_stop = max(map(len, asked.stop), default=0)

    async def begin(self, receive: Receive) -> bool:
        """Submit the request to the engine as a whole; return whether its client is still connected."""
        block = self._engines.hash_blocks_of
        hashes = [()] * len(self.asked.prompts) if block is None else await self._hashed(block, receive)
        if hashes is None:
            return False
        self._engines.meter.observe("request_params_n", self.asked.n)
        try:
            for place, choice in enumerate(self.choices):
                room = (self._engines.max_model_len or 2**31) - choice.prompt.tokens
                incoming = Incoming(
                    request_id=self._name,
                    prompt_tokens=choice.prompt.tokens,
                    max_tokens=room if self.asked.max_tokens is None else self.asked.max_tokens,
                    block_hashes=hashes[place // self.asked.n],
                    temperature=self.asked.temperature,
                    ignore_eos=self.asked.ignore_eos,
                )
                choice.answer = Answer(self._engines.meter, self._engines.engine, incoming, choice.take)
        except BaseException:
            self.abort()
            raise
        return True

    def abort(self) -> None:
        """Cancel the request in the engine."""
        for choice in self.choices:
            if choice.answer is not None:
                choice.answer.abort()

    def take(self, choice: _Choice, burst: Burst) -> None:
        """Take a burst of one of the answers."""
        if burst.finish_reason == "error":
            self.fail()
            return
        end = choice.tokens + burst.tokens
        if burst.token_ids:
            piece = Piece(text_of(burst.token_ids), burst.token_ids, burst.finish_reason)
        else:
            text, ids = answer_text(choice.tokens, end).decode(), answer_ids(choice.tokens, end)
            piece = Piece(text, ids, burst.finish_reason)
        if self._longest_stop:
            piece = self._up_to_stop(choice, piece)
        is_first = choice.tokens == 0
        if is_first:
            choice.cached_tokens = burst.cached_tokens
        choice.tokens = end
        self.add(choice, piece, is_first=is_first)
        if piece.stop_reason is not None and choice.answer is not None:
            choice.answer.stop(piece.stop_reason)
        if piece.finish_reason is not None:
            self._left -= 1
            if not self._left:
                self.finish()

    @abstractmethod
    def add(self, choice: _Choice, piece: Piece, *, is_first: bool) -> None:
        """Append a piece to an answer."""

    @abstractmethod
    def finish(self) -> None:
        """Complete the response."""

    @abstractmethod
    def fail(self) -> None:
        """Report that the engine gave up."""

    def usage(self) -> dict[str, Any]:
        """Return the tokens of all answers."""
        prompt_tokens = sum(each.tokens for each in self.asked.prompts)
        cached_tokens = self.choices[-1].cached_tokens
        return usage_of(prompt_tokens, sum(each.tokens for each in self.choices), cached_tokens)

    def _up_to_stop(self, choice: _Choice, piece: Piece) -> Piece:
        """End at a stop string, and hold back text that may be the beginning of one."""
        text = choice.held + piece.text
        found = [(place, each) for each in self.asked.stop if (place := text.find(each)) >= 0]
        if found:
            place, stop = min(found)
            return Piece(text[:place], piece.ids, "stop", stop)
        sent = len(text) if piece.finish_reason else max(0, len(text) - self._longest_stop + 1)
        choice.held = text[sent:]
        return Piece(text[:sent], piece.ids, piece.finish_reason)

    async def _hashed(self, block: int, receive: Receive) -> Sequence[Sequence[int]] | None:
        """Return the hashes of all prompts; None if the client disconnects meanwhile."""
        hashing = asyncio.create_task(self._hashes(block))
        try:
            async with _unless_gone(receive, hashing.cancel):
                await asyncio.wait([hashing])
        finally:
            hashing.cancel()
        return None if hashing.cancelled() else hashing.result()

    async def _hashes(self, block: int) -> Sequence[Sequence[int]]:
        """Hash one prompt at a time in short slices between tokens of other requests."""
        hashes = []
        for prompt in self.asked.prompts:
            found: list[int] = []
            async with self._engines.hashing:
                until_s = time.perf_counter() + _HASHED_AT_ONCE_S
                for each in chained_hashes(prompt.token_ids(), block):
                    found.append(each)
                    if time.perf_counter() > until_s:
                        await asyncio.sleep(0)
                        until_s = time.perf_counter() + _HASHED_AT_ONCE_S
            hashes.append(found)
        return hashes


class Streamed(Generation):
    """Answers as server-sent events, one for each burst."""

    def __init__(self, engines: Engines, asked: Asked, model: str, request_id: str | None, wire: Wire) -> None:
        super().__init__(engines, asked, model, request_id)
        self._wire = wire
        self._plain = not (asked.stop or asked.return_token_ids or asked.continuous_usage)

    async def respond(self, receive: Receive) -> None:
        """Respond until the end, or until the client disconnects."""
        await self._wire.open([(b"content-type", b"text/event-stream; charset=utf-8")])
        async with _unless_gone(receive, self._gone):
            await self._wire.closed()

    def add(self, choice: _Choice, piece: Piece, *, is_first: bool) -> None:
        """Write an event."""
        choice.wire = self._wire if self._plain else None
        asked, prompt = self.asked, choice.prompt
        prompt_ids = prompt.token_ids() if is_first and asked.return_token_ids else None
        data = b""
        if is_first and asked.chat:
            data = choice.events.role(prompt_ids, usage_of(prompt.tokens, 0) if asked.continuous_usage else None)
        usage = usage_of(prompt.tokens, choice.tokens) if asked.continuous_usage else None
        self._wire.write(
            data + choice.events.event(piece, with_ids=asked.return_token_ids, prompt_ids=prompt_ids, usage=usage)
        )

    def finish(self) -> None:
        """Write the last events."""
        usage = self.choices[-1].events.usage(self.usage()) if self.asked.include_usage else b""
        self._wire.write(usage + DONE)
        self._wire.end()

    def fail(self) -> None:
        """Write an error."""
        self.abort()
        self._wire.write(b"data: " + error(500, "InternalServerError", _ENGINE_ERROR) + b"\n\n" + DONE)
        self._wire.end()

    def _gone(self) -> None:
        self.abort()
        self._wire.drop()


class Whole(Generation):
    """Answers as one document."""

    def __init__(self, engines: Engines, asked: Asked, model: str, request_id: str | None) -> None:
        super().__init__(engines, asked, model, request_id)
        self._pieces: dict[_Choice, list[Piece]] = {choice: [] for choice in self.choices}
        self._over = asyncio.Event()
        self._failed = False

    async def document(self, receive: Receive) -> bytes:
        """Return the complete document, or raise RejectedError if the engine gave up."""
        async with _unless_gone(receive, self._gone):
            await self._over.wait()
        if self._failed:
            raise RejectedError(500, "InternalServerError", _ENGINE_ERROR)
        chat, choices = self.asked.chat, list[dict[str, Any]]()
        for index, (each, pieces) in enumerate(self._pieces.items()):
            text = "".join(piece.text for piece in pieces)
            choice: dict[str, Any] = {
                "index": index,
                **({"message": {"role": "assistant", "content": text}} if chat else {"text": text}),
                "logprobs": None,
                "finish_reason": pieces[-1].finish_reason if pieces else "abort",
                "stop_reason": pieces[-1].stop_reason if pieces else None,
            }
            if self.asked.return_token_ids:
                choice["token_ids"] = [token_id for piece in pieces for token_id in piece.ids]
                if not chat:
                    choice["prompt_token_ids"] = list(each.prompt.token_ids())
            choices.append(choice)
        document = self.head.document(chunk=False) | {"choices": choices, "usage": self.usage()}
        if self.asked.return_token_ids and chat:
            document["prompt_token_ids"] = list(self.choices[0].prompt.token_ids())
        return _encode(document)

    def add(self, choice: _Choice, piece: Piece, *, is_first: bool) -> None:  # noqa: ARG002  the other kind asks for it
        """Keep the piece."""
        self._pieces[choice].append(piece)

    def finish(self) -> None:
        """Release the document."""
        self._over.set()

    def fail(self) -> None:
        """Release an error in its place."""
        self._failed = True
        self._gone()

    def _gone(self) -> None:
        self.abort()
        self._over.set()


@asynccontextmanager
async def _unless_gone(receive: Receive, gone: Any) -> AsyncIterator[None]:
    """Call back if the client disconnects before the block has ended."""

    async def watch() -> None:
        message: Message = {"type": ""}
        while message["type"] != "http.disconnect":
            message = await receive()
        gone()

    watching = asyncio.get_running_loop().create_task(watch())
    try:
        yield
    finally:
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching
