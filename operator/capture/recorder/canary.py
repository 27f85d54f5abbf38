"""Ask the engine of this pod fixed questions, and check the answers against the target's own prefill.

A thread of the recorder's sidecar: python3 of the engine's image, standard library only. A question is answered at
temperature 0. Then prompt and answer together are sent as one prompt with ``prompt_logprobs``: the target computes the
logits of each position in a prefill, which does not speculate and does not read the prefix cache (SamplingParams,
skip_reading_prefix_cache). A token is wrong if it is less likely there than the best one by more than a margin, because
of two tokens that are equally likely up to rounding either may be chosen. An answer with a wrong token is confirmed by
asking the same prompt again at once.

This finds errors between prefill and decode: drafts accepted that the target rejects, KV cache corrupted by rejected
drafts or by another request, a corrupted prefix cache, and steps that depend on the batch. It does not find errors that
a prefill shares: wrong weights, a wrong quantization or chat template. It does not find errors at a temperature above
0, in adapters, or in prompts much longer than the questions. Of several data-parallel ranks, one is asked each time.
"""

import hashlib
import http.client
import json
import math
import secrets
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

RIGHT, WRONG, UNCONFIRMED, FAILED, UNSUPPORTED = VERDICTS = ("right", "wrong", "unconfirmed", "failed", "unsupported")
"""Verdicts: wrong was confirmed by a second wrong answer, unconfirmed was not; unsupported is a question that the
engine rejects, and failed one that it does not answer."""
REQUEST_ID_PREFIX = "specdecode-canary-"
"""Of the ids of all requests, after the prefix of vLLM's endpoint."""
LONGEST_REASON = 200
DIGEST_CHARACTERS = 8

MOST_PROMPTS, MOST_PROMPT_CHARACTERS, MOST_TOKENS = 16, 2000, 256
_LARGEST_SETTINGS_BYTES = 2**19
_LARGEST_RESPONSE_BYTES = 2**21  # twice the log probabilities of the longest prompt; the sidecar has 64 MiB
_TIMEOUT_S = 300.0
_HEALTH_TIMEOUT_S = 10.0
_TELL_TIMEOUT_S = 10.0
_POLL_S = 1.0
_REST_S = 10.0  # after an engine that is not healthy
_LARGEST_TOKEN_ID = 2**32 - 1
_LARGEST_FLOAT32 = 3.5e38
_DRAFTS = "vllm:spec_decode_num_drafts_total"
_TRY_AGAIN = frozenset({408, 429})  # client errors that another attempt may not get
# The raw logits decide, regardless of generation_config.json and the server's defaults.
_GREEDY: Mapping[str, Any] = {
    "temperature": 0,
    "top_p": 1,
    "top_k": 0,
    "min_p": 0,
    "repetition_penalty": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "seed": 0,
}


class BadSettingsError(ValueError):
    """A file is not valid settings."""


class FailedError(Exception):
    """The engine did not answer."""


class UnsupportedError(Exception):
    """The engine rejects the question."""


@dataclass(frozen=True)
class Settings:
    """Content of canaries.json, which the operator writes."""

    prompts: tuple[str, ...]
    max_tokens: int
    interval_s: float  # of one prompt; the prompts are spread evenly over it
    model: str  # name by which the engine serves its target
    margin_nats: float


def read_settings(text: bytes) -> Settings:
    """Parse settings; raise BadSettingsError with the field that is wrong."""
    if len(text) > _LARGEST_SETTINGS_BYTES:
        raise BadSettingsError(f"more than {_LARGEST_SETTINGS_BYTES} bytes")
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadSettingsError("invalid JSON") from error
    names = {"prompts", "max_tokens", "interval_s", "model", "margin_nats"}
    if not isinstance(document, dict) or document.keys() != names:
        raise BadSettingsError(f"not an object with {', '.join(sorted(names))}")
    prompts, model = document["prompts"], document["model"]
    if not isinstance(prompts, list) or not 1 <= len(prompts) <= MOST_PROMPTS:
        raise BadSettingsError(f"prompts: not a list of 1 to {MOST_PROMPTS}")
    if not all(isinstance(each, str) and 1 <= len(each) <= MOST_PROMPT_CHARACTERS for each in prompts):
        raise BadSettingsError(f"prompts: not texts of 1 to {MOST_PROMPT_CHARACTERS} characters")
    if not isinstance(model, str) or not model:
        raise BadSettingsError("model: not a name")
    most_tokens = _number(document, "max_tokens", 1, MOST_TOKENS)
    return Settings(
        prompts=tuple(prompts),
        max_tokens=int(most_tokens),
        interval_s=_number(document, "interval_s", 1, 86_400),
        model=model,
        margin_nats=_number(document, "margin_nats", 0, 100),
    )


def is_number(value: Any, least: float, most: float) -> bool:
    """Return whether a value from JSON is a number within bounds.

    The bounds also exclude NaN, infinity, and integers too large for a float, with which ``math.isfinite`` and
    ``float`` raise OverflowError.
    """
    return type(value) in (int, float) and least <= value <= most


def _number(document: Mapping[str, Any], name: str, least: float, most: float) -> float:
    value: float = document[name]
    if not is_number(value, least, most):
        raise BadSettingsError(f"{name}: not a number from {least} to {most}")
    return value


def digest(prompt: str) -> str:
    """Return the name of a prompt in metrics."""
    return hashlib.sha256(prompt.encode("utf-8", "surrogatepass")).hexdigest()[:DIGEST_CHARACTERS]


class Engine:
    """HTTP client of the engine in this pod."""

    def __init__(self, url: str, api_key: str | None = None, timeout_s: float = _TIMEOUT_S) -> None:
        self._place = urlsplit(url)
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._timeout_s = timeout_s

    def is_healthy(self) -> bool:
        """Return whether it serves."""
        try:
            return self._request("GET", "/health", None, _HEALTH_TIMEOUT_S)[0] == http.client.OK
        except FailedError:
            return False

    def drafts(self) -> float:
        """Return the number of drafts since it started; raise FailedError if its /metrics do not say."""
        status, body = self._request("GET", "/metrics", None, self._timeout_s)
        lines = [each.split() for each in body.decode("utf-8", "replace").splitlines() if each.startswith(_DRAFTS)]
        try:
            if status == http.client.OK and lines:
                return sum(float(each[-1]) for each in lines)
        except ValueError:
            pass
        raise FailedError(f"no {_DRAFTS} in /metrics")

    def complete(self, model: str, prompt: str | list[int], max_tokens: int, **more: Any) -> dict[str, Any]:
        """Return the only choice of a greedy completion.

        Raises UnsupportedError if the engine rejects the request, and FailedError if it does not answer it.
        """
        identity = {"model": model, "request_id": f"{REQUEST_ID_PREFIX}{secrets.token_hex(8)}"}
        document = {**_GREEDY, **identity, "prompt": prompt, "max_tokens": max_tokens, **more}
        status, body = self._request("POST", "/v1/completions", document, self._timeout_s)
        try:
            answer = json.loads(body)
        except (ValueError, RecursionError) as error:
            if status == http.client.OK:
                raise FailedError("unreadable response") from error
            answer = None
        if status != http.client.OK:
            reason = f"HTTP {status}: {_error_text(answer)}"
            is_rejected = 400 <= status < 500 and status not in _TRY_AGAIN  # noqa: PLR2004  classes of HTTP
            raise UnsupportedError(reason) if is_rejected else FailedError(reason)
        try:
            (choice,) = answer["choices"]
            return dict(choice)
        except (TypeError, KeyError, ValueError) as error:
            raise FailedError("response without exactly one choice") from error

    def _request(self, method: str, path: str, document: Any, timeout_s: float) -> tuple[int, bytes]:
        host, port = self._place.hostname or "", self._place.port
        connection: http.client.HTTPConnection
        if self._place.scheme == "https":
            # The certificate is for the Service's name, and the connection does not leave the pod.
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            connection = http.client.HTTPSConnection(host, port, timeout=timeout_s, context=context)
        else:
            connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
        try:
            body = None if document is None else json.dumps(document).encode()
            connection.request(method, path, body, self._headers)
            response = connection.getresponse()
            content = response.read(_LARGEST_RESPONSE_BYTES + 1)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise FailedError(f"{type(error).__name__}: {error}") from error
        finally:
            connection.close()
        if len(content) > _LARGEST_RESPONSE_BYTES:
            raise FailedError(f"response of more than {_LARGEST_RESPONSE_BYTES} bytes")
        return response.status, content


def _error_text(answer: Any) -> str:
    """Return the message of vLLM's error response, printable and short."""
    error = answer.get("error", answer) if isinstance(answer, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    return _short(str(message)) if message else "no message"


def _short(text: str) -> str:
    printable = "".join(each if each.isprintable() else " " for each in text)
    return printable[: LONGEST_REASON - 20]


@dataclass(frozen=True)
class Checked:
    """An answer, and how much less likely than the best token each of its tokens is in a prefill."""

    tokens: list[int]
    gaps_nats: list[float]

    def wrong_token(self, margin_nats: float) -> int | None:
        """Return the position of the first token that is wrong; None without one.

        Later tokens follow the wrong one, so they are right or wrong by their own prefix.
        """
        return next((position for position, gap in enumerate(self.gaps_nats) if gap > margin_nats), None)


def ask(engine: Engine, settings: Settings, prompt: str) -> Checked:
    """Ask one question and check the answer; raise as `Engine.complete` does."""
    # The answer goes on after its end, so that each has the same length and cost.
    wanted = {"return_token_ids": True, "ignore_eos": True}
    choice = engine.complete(settings.model, prompt, settings.max_tokens, **wanted)
    asked, tokens = choice.get("prompt_token_ids"), choice.get("token_ids")
    if asked is None or tokens is None:
        raise UnsupportedError("the engine does not return token ids")
    if not _are_token_ids(asked) or not _are_token_ids(tokens):
        raise FailedError("response without valid token ids")
    judged = engine.complete(settings.model, [*asked, *tokens], 1, prompt_logprobs=1)
    if judged.get("prompt_logprobs") is None:
        raise UnsupportedError("the engine does not return prompt_logprobs")
    return Checked(tokens, gaps_nats(judged["prompt_logprobs"], [*asked, *tokens])[len(asked) :])


def _are_token_ids(value: Any) -> bool:
    if not isinstance(value, list) or not value:
        return False
    return all(type(each) is int and 0 <= each <= _LARGEST_TOKEN_ID for each in value)


def gaps_nats(prompt_logprobs: Any, tokens: Sequence[int]) -> list[float]:
    """Return by how much each token's log probability is below the best one's; 0 for the first, which has none.

    Raises FailedError if these are not the log probabilities of these tokens.
    """
    # For each position: the token's own and the best ones by token id, as text (vllm/logprobs.py, Logprob).
    if not isinstance(prompt_logprobs, list) or len(prompt_logprobs) != len(tokens):
        raise FailedError("prompt_logprobs of another length than the prompt")
    gaps = [0.0]
    for token, position in zip(tokens[1:], prompt_logprobs[1:], strict=True):
        try:
            values = {int(each): its["logprob"] for each, its in position.items()}
            own = values[token]
        except (AttributeError, TypeError, KeyError, ValueError) as error:
            raise FailedError("unreadable prompt_logprobs") from error
        if not all(is_number(each, -_LARGEST_FLOAT32, _LARGEST_FLOAT32) for each in values.values()):
            raise FailedError("prompt_logprobs that are not finite 32-bit floats")
        gaps.append(float(max(values.values()) - own))
    return gaps


@dataclass(frozen=True)
class Verdict:
    """Verdict on one question, with details for the log and the reason of one that is not supported."""

    word: str
    details: str = ""


def judge(engine: Engine, settings: Settings, prompt: str) -> Verdict:
    """Ask a question, and once more if the answer is wrong."""
    try:
        first = ask(engine, settings, prompt)
    except UnsupportedError as error:
        return Verdict(UNSUPPORTED, str(error)[:LONGEST_REASON])
    except FailedError as error:
        return Verdict(FAILED, str(error)[:LONGEST_REASON])
    wrong = first.wrong_token(settings.margin_nats)
    if wrong is None:
        return Verdict(RIGHT)
    details = (
        f"token {wrong + 1} of {len(first.tokens)} (id {first.tokens[wrong]}) is {first.gaps_nats[wrong]:.2f} nats"
        " less likely than the target's own"
    )
    try:
        second = ask(engine, settings, prompt)
    except (UnsupportedError, FailedError) as error:
        return Verdict(UNCONFIRMED, f"{details}; asked again: {error}")
    again = second.wrong_token(settings.margin_nats)
    if again is None:
        return Verdict(UNCONFIRMED, f"{details}; right when asked again")
    return Verdict(WRONG, f"{details}; asked again: token {again + 1}, {second.gaps_nats[again]:.2f} nats")


def line_of(prompt: str, verdict: Verdict) -> dict[str, Any]:
    """Return the message about a verdict to the recorder, which `canary_metrics.publish` takes."""
    reason = verdict.details if verdict.word == UNSUPPORTED else None
    return {"canary": {"prompt": digest(prompt), "verdict": verdict.word, "reason": reason}}


def tell_recorder(sockets: Path, line: Mapping[str, Any]) -> None:
    """Send a line to one of the recorders of this pod, which all serve the same /metrics.

    Raises OSError if no socket of the folder accepts it.
    """
    failed: OSError = FileNotFoundError(f"no recorder has a socket in {sockets}")
    for path in sorted(sockets.glob("*.sock")):
        with socket.socket(socket.AF_UNIX) as recorder:
            recorder.settimeout(_TELL_TIMEOUT_S)
            try:
                recorder.connect(str(path))
                recorder.sendall(json.dumps(line).encode() + b"\n")
                recorder.shutdown(socket.SHUT_WR)
                while recorder.recv(4096):  # it closes the connection when it has read the line
                    pass
            except OSError as error:  # of a process that has ended
                failed = error
            else:
                return
    raise failed


def keep_stepping(step: Callable[[float], None], stopped: threading.Event, log: Callable[[str], None]) -> None:
    """Call a step with the monotonic time each second until ``stopped`` is set; log its errors and go on."""
    while not stopped.is_set():
        try:
            step(time.monotonic())
        except Exception as error:  # noqa: BLE001  a thread of the sidecar must not end
            log(f"unexpected error: {type(error).__name__}: {_short(str(error))}")
        stopped.wait(_POLL_S)


class Canaries:
    """Asks one question after the other, as long as a file of settings exists.

    Parameters
    ----------
    engine
        The engine of this pod.
    file
        Settings; the operator may change or remove the file at any time.
    tell
        Takes the `line_of` a verdict to the process that serves /metrics, as `tell_recorder` does. A verdict is lost
        if this raises OSError.
    """

    def __init__(self, engine: Engine, file: Path, tell: Callable[[dict[str, Any]], None]) -> None:
        self._engine, self._file, self._tell = engine, file, tell
        self._seen: tuple[int, int, int] | None = None
        self._settings: Settings | None = None
        self._due_s = -math.inf
        self._turn = 0
        self._said: dict[str, str] = {}

    def run(self, stopped: threading.Event) -> None:
        """Ask until ``stopped`` is set."""
        keep_stepping(self.step, stopped, lambda words: self._log("error", words))

    def step(self, now_s: float) -> None:
        """Ask the next question if it is due at a monotonic time and the engine serves."""
        settings = self._read()
        if settings is None or now_s < self._due_s:
            return
        if not self._engine.is_healthy():
            self._due_s = now_s + _REST_S
            return
        prompt = settings.prompts[self._turn % len(settings.prompts)]
        self._turn += 1
        self._due_s = now_s + settings.interval_s / len(settings.prompts)
        verdict = judge(self._engine, settings, prompt)
        if verdict.details:
            self._log(digest(prompt), f"{verdict.word}: {verdict.details}")
        try:
            self._tell(line_of(prompt, verdict))
        except OSError as error:
            self._log("tell", f"a verdict is lost: {error}")

    def _read(self) -> Settings | None:
        """Return the settings, parsed again if the file changed; a changed file is due at once."""
        try:
            found = self._file.stat()
            seen = (found.st_ino, found.st_mtime_ns, found.st_size)
            if seen == self._seen:
                return self._settings
            with self._file.open("rb") as stream:
                text = stream.read(_LARGEST_SETTINGS_BYTES + 1)
        except OSError:
            self._seen = self._settings = None
            return None
        self._seen, self._settings, self._due_s = seen, None, -math.inf
        try:
            self._settings = read_settings(text)
        except BadSettingsError as error:
            self._log("settings", f"{self._file.name} is ignored: {error}")
        return self._settings

    def _log(self, subject: str, words: str) -> None:
        if self._said.get(subject) != words:
            sys.stderr.write(f"canary: {subject}: {words}\n")
            sys.stderr.flush()
            self._said[subject] = words
