"""Send each arm the same questions after its load, to compare greedy answers and output formats.

The questions are sent one at a time and are not recorded. The complete answers are compared, not their timing.
"""

import hashlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Annotated, Any, Final, Literal, Self, TypeVar

import httpx
import msgspec
from msgspec import Meta, Struct

from specdecode_operator.capture.files import formats
from specdecode_operator.capture.load.engine_client import Server, error_text, server_of
from specdecode_operator.capture.load.prompts import PromptSource
from specdecode_operator.capture.load.run_settings import CheckSettings, RunSettings
from specdecode_operator.redaction import clip

_LARGEST_ANSWER_BYTES: Final = 2**22
_SEED: Final = 0
_TOOL: Final = "answer"
# Every member has few values, so that the answer of any model ends.
_PROPERTIES: Final[Mapping[str, Any]] = {
    "answer": {"type": "string", "enum": ["yes", "no", "unknown"]},
    "certain": {"type": "boolean"},
    "score": {"type": "integer", "enum": [1, 2, 3, 4, 5]},
}
_SCHEMA: Final[Mapping[str, Any]] = {
    "type": "object",
    "properties": _PROPERTIES,
    "required": list(_PROPERTIES),
    "additionalProperties": False,
}


class NotAnsweredError(Exception):
    """A request got no readable answer."""

    def __init__(self, message: str, *, refused: bool = False) -> None:
        super().__init__(message)
        self.refused = refused  # rejected by the engine, which would reject it again


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
    token_ids: list[formats.Word] | None = None
    logprobs: _Logprobs | None = None
    message: _Message | None = None
    finish_reason: str | None = None


class _Usage(Struct, frozen=True):
    prompt_tokens: formats.Count = 0


class _Answer(Struct):
    choices: Annotated[list[_Choice], Meta(min_length=1)]
    usage: _Usage = _Usage()


_ANSWER: Final = msgspec.json.Decoder(_Answer)
_FORM: Final = msgspec.json.Decoder(_Form)


class CheckRequests:
    """Client that sends one request at a time to one engine."""

    def __init__(self, server: Server, timeout_s: float) -> None:
        headers = {"authorization": f"Bearer {server.api_key}"} if server.api_key else {}
        # The engine is in the same pod, so proxy variables do not apply.
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

    async def __aexit__(self, *error: object) -> None:
        await self._client.aclose()

    async def greedy(
        self, prompt: Sequence[int] | str, sha256: str, most_tokens: int, *, ignore_eos: bool
    ) -> formats.GreedyAnswer:
        """Return the greedy continuation of a prompt."""
        wanted = {"ignore_eos": ignore_eos, "logprobs": 2, "return_token_ids": True}
        # Different tokens may have the same text, so token ids are returned.
        wanted |= {"return_tokens_as_token_ids": True}
        answer = await self._ask("/completions", {"prompt": prompt, "max_tokens": most_tokens, **wanted}, sha256)
        choice = answer.choices[0]
        if choice.token_ids is None:
            raise NotAnsweredError("the engine does not return the token ids of its answer", refused=True)
        likeliest = (choice.logprobs.top_logprobs if choice.logprobs else None) or []
        # How far the most likely token is ahead of the second.
        best = [sorted((each or {}).values(), reverse=True) for each in likeliest]
        margins = [each[0] - each[1] if len(each) > 1 else None for each in best]
        tokens = choice.token_ids[: formats.MOST_CHECK_TOKENS]
        missing: list[float | None] = [None] * len(tokens)
        return formats.GreedyAnswer(
            prompt_sha256=sha256,
            prompt_tokens=len(prompt) if not isinstance(prompt, str) else answer.usage.prompt_tokens,
            tokens=tokens,
            top2_margin=(margins + missing)[: len(tokens)],
        )

    async def structured(self, prompt: Sequence[int] | str, salt: str) -> str | None:
        """Request JSON of the schema; return None if it is valid, or the problem without the content."""
        form = {"type": "json_schema", "json_schema": {"name": _TOOL, "schema": _SCHEMA}}
        document = {"prompt": prompt, "max_tokens": formats.MOST_CHECK_TOKENS, "response_format": form}
        choice = (await self._ask("/completions", document, salt)).choices[0]
        return _wrong_form(choice.text or "", choice.finish_reason)

    async def tool_call(self, question: str, salt: str) -> str | None:
        """Request a call of a named function; return as `structured` does."""
        # Without `strict`, some parsers accept any JSON.
        function = {"name": _TOOL, "parameters": _SCHEMA, "strict": True}
        document = {
            "messages": [{"role": "user", "content": question}],
            "max_tokens": formats.MOST_CHECK_TOKENS,
            "tools": [{"type": "function", "function": function}],
            "tool_choice": {"type": "function", "function": {"name": _TOOL}},
        }
        choice = (await self._ask("/chat/completions", document, salt)).choices[0]
        calls = (choice.message.tool_calls if choice.message else None) or []
        if [call.function.name for call in calls] != [_TOOL]:
            return f"{len(calls)} calls instead of one call of the named function"
        return _wrong_form(calls[0].function.arguments, choice.finish_reason)

    async def _ask(self, path: str, document: Mapping[str, Any], salt: str) -> _Answer:
        # The prefix cache of the load was computed in batches, so a salt excludes it.
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
            raise NotAnsweredError("an unreadable answer") from error


def _wrong_form(text: str, finish_reason: str | None) -> str | None:
    try:
        _FORM.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return f"{len(text)} characters that do not match the schema, ended by {clip(str(finish_reason), 20)}"
    return None


_BUDGET_S: Final = 180.0  # time limit of each check; requests answered by then count
_NONE_ASKED: Final = "spec.checks requests none"
_NO_TIME: Final = "there was no time for any"
_SHOWN_FAILURES: Final = 5
_LONGEST_REASON: Final = 500
# Replaces random token ids, which no chat template accepts.
_QUESTION: Final = "Is {} an even number? Answer through the function."

_Subject = TypeVar("_Subject")


async def check_answers(
    settings: RunSettings, wanted: CheckSettings, source: PromptSource, budget_s: float = _BUDGET_S
) -> formats.Checks:
    """Send an engine the questions for all arms; missing answers are reported and not raised."""
    phases = [phase.name for phase in settings.workload.phases]

    def asked(count: int) -> list[tuple[Sequence[int] | str, int]]:
        """Return prompts and output limits, by turns of the workload's phases."""
        places = [(phases[number % len(phases)], number // len(phases)) for number in range(count)]
        return [
            (source.first(*place).content, min(source.output_tokens(*place), formats.MOST_CHECK_TOKENS))
            for place in places
        ]

    prompts = [prompt for prompt, _ in asked(wanted.structured_requests)]
    questions = [
        prompt if isinstance(prompt, str) else _QUESTION.format(number) for number, prompt in enumerate(prompts)
    ]
    async with CheckRequests(server_of(settings.engine), settings.workload.timeout_seconds) as requests:
        return formats.Checks(
            greedy=await _greedy(requests, asked(wanted.greedy_prompts), budget_s, ignore_eos=source.ignore_eos),
            structured=await _parsing(requests.structured, prompts, budget_s),
            tool_calls=await _parsing(requests.tool_call, questions, budget_s),
        )


async def _greedy(
    requests: CheckRequests, asked: Sequence[tuple[Sequence[int] | str, int]], budget_s: float, *, ignore_eos: bool
) -> formats.GreedyCheck:
    answers: list[formats.GreedyAnswer] = []
    rejected = _NONE_ASKED
    until_s = time.monotonic() + budget_s
    for prompt, most_tokens in asked:
        if time.monotonic() >= until_s:
            rejected = _NO_TIME
            break
        sha256 = hashlib.sha256(msgspec.json.encode(prompt)).hexdigest()
        try:
            answers.append(await requests.greedy(prompt, sha256, most_tokens, ignore_eos=ignore_eos))
        except NotAnsweredError as error:
            reason = clip(str(error), _LONGEST_REASON)
            if not error.refused:
                return formats.GreedyCheck(not_measured=reason)
            # Every arm rejects it, for example because the prompt is too long.
            rejected = reason
    return formats.GreedyCheck(answers=answers, not_measured=None if answers else rejected)


async def _parsing(
    ask: Callable[[_Subject, str], Awaitable[str | None]], asked: Sequence[_Subject], budget_s: float
) -> formats.ParsingCheck:
    failures: list[str] = []
    number = 0
    until_s = time.monotonic() + budget_s
    for subject in asked:
        if time.monotonic() >= until_s:
            break
        try:
            wrong = await ask(subject, str(number))
        except NotAnsweredError as error:
            wrong = clip(str(error), _LONGEST_REASON)
            if error.refused and number == len(failures):
                # It would reject all of them, for example because the tokenizer has no chat template.
                return formats.ParsingCheck(not_measured=wrong)
        number += 1
        failures += [wrong] if wrong is not None else []
    return formats.ParsingCheck(
        asked=number,
        parsed=number - len(failures),
        failures=failures[:_SHOWN_FAILURES],
        not_measured=None if number else _NO_TIME if asked else _NONE_ASKED,
    )
