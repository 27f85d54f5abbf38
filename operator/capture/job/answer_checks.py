"""Single requests to an engine whose whole answers count, and not when they come."""

import heapq
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Annotated, Any, Final, Literal, Self

import httpx
import msgspec
from msgspec import Meta, Struct

from specdecode_operator.capture.files.checks import MOST_TOKENS, GreedyAnswer
from specdecode_operator.capture.files.formats import Count, Word
from specdecode_operator.capture.load.client import Server
from specdecode_operator.capture.load.completion_stream import error_text
from specdecode_operator.redaction import clip

_LARGEST_ANSWER_BYTES: Final = 2**22
_SEED: Final = 0
_TOOL: Final = "answer"

# Every member has few values, so that an answer of it ends, whatever the model.
_PROPERTIES: Final[Mapping[str, Any]] = {
    "answer": {"type": "string", "enum": ["yes", "no", "unknown"]},
    "certain": {"type": "boolean"},
    "score": {"type": "integer", "enum": [1, 2, 3, 4, 5]},
}
SCHEMA: Final[Mapping[str, Any]] = {
    "type": "object",
    "properties": _PROPERTIES,
    "required": list(_PROPERTIES),
    "additionalProperties": False,
}


class NotAnsweredError(Exception):
    """A request without an answer that can be read."""

    def __init__(self, message: str, *, refused: bool = False) -> None:
        super().__init__(message)
        self.refused = refused  # by the engine, which would refuse it again


class _Form(Struct, forbid_unknown_fields=True):
    answer: Literal["yes", "no", "unknown"]
    certain: bool
    score: Annotated[int, Meta(ge=1, le=5)]


class _Logprobs(Struct):
    top_logprobs: list[dict[str, float] | None] | None = None


class _Function(Struct):
    name: str
    arguments: str


class _ToolCall(Struct):
    function: _Function


class _Message(Struct):
    tool_calls: list[_ToolCall] | None = None


class _Choice(Struct):
    text: str | None = None
    token_ids: list[Word] | None = None
    logprobs: _Logprobs | None = None
    message: _Message | None = None
    finish_reason: str | None = None


class _Usage(Struct, frozen=True):
    prompt_tokens: Count = 0


class _Answer(Struct):
    choices: Annotated[list[_Choice], Meta(min_length=1)]
    usage: _Usage = _Usage()


_ANSWER: Final = msgspec.json.Decoder(_Answer)
_FORM: Final = msgspec.json.Decoder(_Form)


class CheckRequests:
    """Asks one engine, one request at a time."""

    def __init__(self, server: Server, timeout_s: float) -> None:
        headers = {"authorization": f"Bearer {server.api_key}"} if server.api_key else {}
        # The engine is in the same pod: proxies of the environment do not apply.
        self._client = httpx.AsyncClient(
            base_url=f"http{'s' if server.tls else ''}://{server.host}:{server.port}{server.path}",
            headers=headers,
            timeout=timeout_s,
            trust_env=False,
            verify=server.tls or True,
        )
        self._model = server.model

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.aclose()

    async def greedy(self, prompt: Sequence[int] | str, sha256: str, most_tokens: int) -> GreedyAnswer:
        """Return the likeliest tokens after a prompt.

        Raises
        ------
        NotAnsweredError
            The engine gave none.
        """
        wanted = {"ignore_eos": not isinstance(prompt, str), "logprobs": 2, "return_token_ids": True}
        # Two tokens may be the same text: only their ids tell them apart.
        wanted |= {"return_tokens_as_token_ids": True}
        answer = await self._ask("/completions", {"prompt": prompt, "max_tokens": most_tokens, **wanted}, sha256)
        choice = answer.choices[0]
        if choice.token_ids is None:
            raise NotAnsweredError("the engine does not say which tokens it answered", refused=True)
        likeliest = (choice.logprobs.top_logprobs if choice.logprobs else None) or []
        margins = [_margin(each) for each in likeliest]
        tokens = choice.token_ids[:MOST_TOKENS]
        missing: list[float | None] = [None] * len(tokens)
        return GreedyAnswer(
            prompt_sha256=sha256,
            prompt_tokens=len(prompt) if not isinstance(prompt, str) else answer.usage.prompt_tokens,
            tokens=tokens,
            top2_margin=(margins + missing)[: len(tokens)],
        )

    async def structured(self, prompt: Sequence[int] | str, salt: str) -> str | None:
        """Ask for JSON of the schema; return None where it came, else what is wrong, without its content.

        Raises
        ------
        NotAnsweredError
            The engine gave no answer.
        """
        form = {"type": "json_schema", "json_schema": {"name": _TOOL, "schema": SCHEMA}}
        document = {"prompt": prompt, "max_tokens": MOST_TOKENS, "response_format": form}
        choice = (await self._ask("/completions", document, salt)).choices[0]
        return _wrong_form(choice.text or "", choice.finish_reason)

    async def tool_call(self, question: str, salt: str) -> str | None:
        """Ask for a call of a named function; return as `structured` does.

        Raises
        ------
        NotAnsweredError
            The engine gave no answer.
        """
        # Without `strict` some parsers let the model answer any JSON.
        function = {"name": _TOOL, "parameters": SCHEMA, "strict": True}
        document = {
            "messages": [{"role": "user", "content": question}],
            "max_tokens": MOST_TOKENS,
            "tools": [{"type": "function", "function": function}],
            "tool_choice": {"type": "function", "function": {"name": _TOOL}},
        }
        choice = (await self._ask("/chat/completions", document, salt)).choices[0]
        calls = (choice.message.tool_calls if choice.message else None) or []
        if [call.function.name for call in calls] != [_TOOL]:
            return f"{len(calls)} calls of other functions or none"
        return _wrong_form(calls[0].function.arguments, choice.finish_reason)

    async def _ask(self, path: str, document: Mapping[str, Any], salt: str) -> _Answer:
        # What the load left in the prefix cache was computed in batches: nothing of it counts here.
        always = {"model": self._model, "temperature": 0, "seed": _SEED, "cache_salt": f"specdecode-{salt}"}
        try:
            async with self._client.stream("POST", path, json={**always, **document}) as response:
                body = bytearray()
                async for piece in response.aiter_bytes():
                    body += piece
                    if len(body) > _LARGEST_ANSWER_BYTES:
                        raise NotAnsweredError(f"an answer of more than {_LARGEST_ANSWER_BYTES} bytes")
        except httpx.HTTPError as error:
            raise NotAnsweredError(f"{type(error).__name__}: {error}") from error
        if response.status_code != httpx.codes.OK:
            status = f"HTTP {response.status_code}: {error_text(body)}"
            raise NotAnsweredError(status, refused=response.is_client_error)
        try:
            return _ANSWER.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise NotAnsweredError("an answer that nobody can read") from error


def _margin(likeliest: Mapping[str, float] | None) -> float | None:
    """Return how far the likeliest token is before the next."""
    best = heapq.nlargest(2, (likeliest or {}).values())
    return best[0] - best[1] if len(best) == 2 else None  # noqa: PLR2004


def _wrong_form(text: str, finish_reason: str | None) -> str | None:
    try:
        _FORM.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return f"{len(text)} characters that are not of the schema, ended by {clip(str(finish_reason), 20)}"
    return None
