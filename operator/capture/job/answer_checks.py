"""Send each arm the same questions after its load, to compare greedy answers and output formats.

The questions are sent one at a time and are not recorded. The complete answers are compared, not their timing.
"""

import hashlib
import heapq
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Annotated, Any, Final, Literal, Self, TypeVar

import httpx
import msgspec
from msgspec import Meta, Struct

from specdecode_operator.capture.files.formats import (
    MOST_CHECK_TOKENS,
    Checks,
    Count,
    GreedyAnswer,
    GreedyCheck,
    ParsingCheck,
    Word,
)
from specdecode_operator.capture.load.engine_client import Server, error_text, server_of
from specdecode_operator.capture.load.prompts import PromptSource
from specdecode_operator.capture.load.run_settings import CheckSettings, RunSettings
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
        tokens = choice.token_ids[:MOST_CHECK_TOKENS]
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
        document = {"prompt": prompt, "max_tokens": MOST_CHECK_TOKENS, "response_format": form}
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
            "max_tokens": MOST_CHECK_TOKENS,
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


BUDGET_S: Final = 180.0
"""How long each check may take; what was asked until then counts."""

_NONE_ASKED: Final = "spec.checks asks for none"
_NO_TIME: Final = "there was no time for any"
_SHOWN_FAILURES: Final = 5
_LONGEST_REASON: Final = 500
_QUESTION: Final = "Is {} an even number? Answer through the function."
"""For a workload of random token ids, which no chat template takes."""

_Subject = TypeVar("_Subject")


async def check_answers(
    settings: RunSettings, wanted: CheckSettings, source: PromptSource, budget_s: float = BUDGET_S
) -> Checks:
    """Ask an engine what all arms are asked; what it does not answer is told, and no error."""
    greedy = _asked(settings, source, wanted.greedy_prompts)
    prompts = [each.prompt for each in _asked(settings, source, wanted.structured_requests)]
    questions = [
        prompt if isinstance(prompt, str) else _QUESTION.format(number) for number, prompt in enumerate(prompts)
    ]
    async with CheckRequests(server_of(settings.engine), settings.workload.timeout_seconds) as requests:
        return Checks(
            greedy=await _greedy(requests, greedy, budget_s),
            structured=await _parsing(requests.structured, prompts, budget_s),
            tool_calls=await _parsing(requests.tool_call, questions, budget_s),
        )


@dataclass(frozen=True)
class _Asked:
    prompt: Sequence[int] | str
    most_tokens: int
    sha256: str


def _asked(settings: RunSettings, source: PromptSource, count: int) -> list[_Asked]:
    """Return prompts of the workload, by turns of its phases."""
    phases = [phase.name for phase in settings.workload.phases]
    found = []
    for number in range(count):
        phase, index = phases[number % len(phases)], number // len(phases)
        prompt = source.first(phase, index).content
        sha256 = hashlib.sha256(msgspec.json.encode(prompt)).hexdigest()
        found.append(_Asked(prompt, min(source.output_tokens(phase, index), MOST_CHECK_TOKENS), sha256))
    return found


async def _greedy(requests: CheckRequests, asked: Sequence[_Asked], budget_s: float) -> GreedyCheck:
    answers: list[GreedyAnswer] = []
    refused = _NONE_ASKED
    until_s = time.monotonic() + budget_s
    for each in asked:
        if time.monotonic() >= until_s:
            refused = _NO_TIME
            break
        try:
            answers.append(await requests.greedy(each.prompt, each.sha256, each.most_tokens))
        except NotAnsweredError as error:
            if not error.refused:
                return GreedyCheck(not_measured=clip(str(error), _LONGEST_REASON))
            # Every arm refuses it: the prompt is longer than the engine takes, say.
            refused = clip(str(error), _LONGEST_REASON)
    return GreedyCheck(answers=answers, not_measured=None if answers else refused)


async def _parsing(
    ask: Callable[[_Subject, str], Awaitable[str | None]], asked: Sequence[_Subject], budget_s: float
) -> ParsingCheck:
    failures: list[str] = []
    number = 0
    until_s = time.monotonic() + budget_s
    for subject in asked:
        if time.monotonic() >= until_s:
            break
        try:
            wrong = await ask(subject, str(number))
        except NotAnsweredError as error:
            if error.refused and number == len(failures):
                # It would refuse all of them: a tokenizer without a chat template, say.
                return ParsingCheck(not_measured=clip(str(error), _LONGEST_REASON))
            wrong = clip(str(error), _LONGEST_REASON)
        number += 1
        failures += [wrong] if wrong is not None else []
    return ParsingCheck(
        asked=number,
        parsed=number - len(failures),
        failures=failures[:_SHOWN_FAILURES],
        not_measured=None if number else _NO_TIME if asked else _NONE_ASKED,
    )
