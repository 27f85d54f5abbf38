"""Parse and validate completion and chat requests as vLLM's API server does.

Without a tokenizer, four bytes of text count as one token.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from sys import getsizeof
from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec import Meta, Struct

from specdecode_operator.problems import printable
from specdecode_operator.redaction import clip

BYTES_PER_TOKEN: Final = 4

_WORDS: Final = tuple(
    f" {first}{vowel}{last}" for first in "bdfgklmnprstvz" for vowel in "aeiou" for last in "bdgklmnprst"
)[:512]
_ROUND: Final = len(_WORDS)
_LONGEST_SLICE: Final = 1024
_TEXT: Final = "".join(_WORDS).encode() * (_LONGEST_SLICE // _ROUND + 2)


def count_tokens(text: str) -> int:
    """Return the number of tokens of a text."""
    return -(-len(text.encode(errors="replace")) // BYTES_PER_TOKEN)


def token_ids(text: str) -> "array[int]":
    """Return the ids of a text's tokens: texts with equal beginnings share ids, as a prefix cache needs."""
    data = text.encode(errors="replace")
    return array("I", data + bytes(-len(data) % BYTES_PER_TOKEN))


def answer_text(begin: int, end: int) -> bytes:
    """Return an answer's tokens from one position to another, in ASCII that JSON does not escape."""
    if end - begin > _LONGEST_SLICE:
        return "".join(_WORDS[place % _ROUND] for place in range(begin, end)).encode()
    start = begin % _ROUND
    return _TEXT[start * BYTES_PER_TOKEN : (start + end - begin) * BYTES_PER_TOKEN]


def text_of(ids: Sequence[int]) -> str:
    """Return a text for recorded token ids: a word for each."""
    return "".join([_WORDS[token_id % _ROUND] for token_id in ids])


def answer_ids(begin: int, end: int) -> Sequence[int]:
    """Return the ids of made-up tokens of an answer."""
    return token_ids(answer_text(begin, end).decode())


_MOST_ANSWERS: Final = 1024
_MOST_STOPS: Final = 1024
_MOST_TOLD_IDS: Final = 2**24  # prompt ids in one response: a short request could fill gigabytes otherwise
_SHOWN: Final = 200


class RejectedError(Exception):
    """A request that is answered with an error in OpenAI's form."""

    def __init__(self, status: int, kind: str, message: str, parameter: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.parameter = parameter


def bad_request(message: str, parameter: str | None = None) -> RejectedError:
    """Return the error for a field with an invalid value."""
    return RejectedError(400, "BadRequestError", message, parameter)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as text or token ids, and its number of tokens."""

    given: str | Sequence[int]
    tokens: int

    def token_ids(self) -> Sequence[int]:
        """Return its token ids."""
        return token_ids(self.given) if isinstance(self.given, str) else self.given


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A valid request."""

    chat: bool
    model: str | None
    prompts: Sequence[Prompt]
    n: int
    max_tokens: int | None  # None for no limit
    stop: Sequence[str]
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    temperature: float | None
    ignore_eos: bool

    @property
    def held_bytes(self) -> int:
        """Memory of the prompts and stop texts: up to four times the bytes of the body, if it is not plain ASCII."""
        return sum(map(getsizeof, (*(prompt.given for prompt in self.prompts), *self.stop)))


class _StreamOptions(Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


_Positive = Annotated[int, Meta(ge=1, le=2**31)]
_Penalty = Annotated[float, Meta(ge=-2, le=2)]


class _Body(Struct, kw_only=True):
    """Fields that completions and chats share; others have no effect without a model.

    Sampling parameters are only checked against vLLM's bounds.
    """

    model: str | None = None
    n: Annotated[int, Meta(ge=1, le=_MOST_ANSWERS)] | None = None
    max_tokens: _Positive | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    return_token_ids: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    ignore_eos: bool | None = None
    echo: bool | None = None
    logprobs: Any = None
    prompt_logprobs: Any = None
    response_format: Any = None
    structured_outputs: Any = None


class _CompletionBody(_Body):
    prompt: msgspec.Raw = msgspec.Raw(b"null")
    suffix: str | None = None
    best_of: int | None = None


class _Message(Struct):
    role: str
    content: str | list[Any] | None = None


class _ChatBody(_Body):
    messages: list[_Message]
    max_completion_tokens: _Positive | None = None
    tool_choice: Any = None


_BodyT = TypeVar("_BodyT", bound=_Body)

_COMPLETION: Final = msgspec.json.Decoder(_CompletionBody)
_CHAT: Final = msgspec.json.Decoder(_ChatBody)

# Chosen by the first character, so that token ids, which may be millions, are checked while they are parsed.
_TokenIds = list[Annotated[int, Meta(ge=0, lt=2**32)]]
_IDS: Final = msgspec.json.Decoder(_TokenIds)
_PROMPTS: Final = msgspec.json.Decoder(list[str | _TokenIds])
_REQUESTS_TEXT: Final = msgspec.json.Decoder(str | None)


def read_completion(data: bytes) -> Asked:
    """Parse the body of /v1/completions, or raise RejectedError."""
    body = _decoded(_COMPLETION, data)
    if body.suffix:
        raise bad_request("suffix: a replay has no model that could lead up to it: remove it", "suffix")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise bad_request(
            f"best_of: a replay has no model that could choose {body.n or 1} of {body.best_of} answers: remove it",
            "best_of",
        )
    # 16 is vLLM's default for completions.
    return _asked(body, _prompts(body.prompt), body.max_tokens or 16, chat=False)


def read_chat(data: bytes) -> Asked:
    """Parse the body of /v1/chat/completions, or raise RejectedError."""
    body = _decoded(_CHAT, data)
    if not body.messages:
        raise bad_request("messages must not be empty", "messages")
    if body.tool_choice not in (None, "auto", "none"):
        # vLLM would constrain the answer to the tool's schema.
        raise bad_request("tool_choice: a replay has no model that could call a tool: remove it", "tool_choice")
    text = "".join(f"{message.role}\n{_content(message.content)}\n" for message in body.messages)
    return _asked(body, [Prompt(text, count_tokens(text))], body.max_completion_tokens or body.max_tokens, chat=True)


def _asked(body: _Body, prompts: Sequence[Prompt], max_tokens: int | None, *, chat: bool) -> Asked:
    for name in ("echo", "logprobs", "prompt_logprobs", "structured_outputs"):
        if getattr(body, name) not in (None, False):
            raise bad_request(f"{name}: a replay has no model that could answer it: remove it", name)
    kind = body.response_format.get("type") if isinstance(body.response_format, dict) else body.response_format
    if kind not in (None, "text"):
        raise bad_request("response_format: a replay has no model that could keep to it: remove it")
    options = body.stream_options
    if options is not None and not body.stream:
        raise bad_request("Stream options can only be defined when `stream=True`.", "stream_options")
    n = body.n or 1
    if n * len(prompts) > _MOST_ANSWERS:
        raise bad_request(f"n: {n} answers to {len(prompts)} prompts: at most {_MOST_ANSWERS} in one request", "n")
    if max_tokens is not None and (body.min_tokens or 0) > max_tokens:
        raise bad_request(
            f"min_tokens must be less than or equal to max_tokens={max_tokens}, got {body.min_tokens}.", "min_tokens"
        )
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if not all(stop):
        raise bad_request("stop cannot contain an empty string.", "stop")
    if len(stop) > _MOST_STOPS:
        raise bad_request(f"stop: {len(stop)} texts: at most {_MOST_STOPS}", "stop")
    if body.return_token_ids and n * sum(prompt.tokens for prompt in prompts) > _MOST_TOLD_IDS:
        raise bad_request(
            f"return_token_ids: has more than {_MOST_TOLD_IDS} tokens of prompts: ask for fewer answers",
            "return_token_ids",
        )
    return Asked(
        chat=chat,
        model=body.model,
        prompts=prompts,
        n=n,
        max_tokens=max_tokens,
        stop=stop,
        stream=bool(body.stream),
        include_usage=bool(options and options.include_usage),
        continuous_usage=bool(options and options.include_usage and options.continuous_usage_stats),
        return_token_ids=bool(body.return_token_ids),
        temperature=body.temperature,
        ignore_eos=bool(body.ignore_eos),
    )


def _decoded(decoder: "msgspec.json.Decoder[_BodyT]", data: bytes) -> _BodyT:
    try:
        return decoder.decode(data)
    except RecursionError as error:
        raise bad_request("the body is nested too deeply") from error
    except UnicodeDecodeError as error:
        raise bad_request(f"the body is not UTF-8 at byte {error.start}") from error
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at `$.")
        parameter = where.rstrip("`") or None
        raise bad_request(clip(printable(f"{parameter}: {what}" if parameter else what), _SHOWN), parameter) from error
    except msgspec.DecodeError as error:
        raise bad_request(f"the body is not valid JSON: {clip(printable(str(error)), _SHOWN)}") from error


def _prompts(raw: msgspec.Raw) -> Sequence[Prompt]:
    """Return the prompts: one or several, each as text or as token ids."""
    data = bytes(raw).strip()
    inner = data[1:].lstrip()[:1]
    try:
        if not data.startswith(b"["):
            given: Sequence[str | list[int] | None] = [_REQUESTS_TEXT.decode(data)]
        elif inner in (b'"', b"["):
            given = _PROMPTS.decode(data)
        else:
            given = [_IDS.decode(data)]
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise bad_request(
            "prompt: must be a string, token ids (whole numbers from 0 to 2^32 - 1), or a list of these", "prompt"
        ) from error
    if not all(given):
        raise bad_request("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")
    return [
        Prompt(each, count_tokens(each)) if isinstance(each, str) else Prompt(array("I", each), len(each))
        for each in given
        if each
    ]


def _content(content: str | list[Any] | None) -> str:
    """Return the text of a message; images and other parts are ignored."""
    if isinstance(content, list):
        return "".join(str(part.get("text") or "") for part in content if isinstance(part, dict))
    return content or ""
