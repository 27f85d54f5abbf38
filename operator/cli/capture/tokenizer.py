"""Tokenize prompts at a vLLM server."""

from functools import partial
from typing import Annotated, Final

import httpx
import msgspec

from specdecode_operator.capture.files.trace_requests import ExportError
from specdecode_operator.capture.load.rebuilt_prompts import Tokenize
from specdecode_operator.cluster.bounded_fetch import place_of
from specdecode_operator.problems import printable

_TIMEOUT_S: Final = 60


class _Tokenized(msgspec.Struct):
    tokens: list[Annotated[int, msgspec.Meta(ge=0, lt=2**32)]]


def tokenizer_at(url: str) -> Tokenize:
    """Return the tokenizer of a vLLM server, which adds special tokens as for a completion."""
    return partial(_tokenize, httpx.Client(timeout=_TIMEOUT_S, trust_env=False), url)


def _tokenize(client: httpx.Client, url: str, text: str) -> list[int]:
    where = f"--tokenizer-url: {place_of(url)}"
    try:
        answer = client.post(f"{url.rstrip('/')}/tokenize", json={"prompt": text})
        answer.raise_for_status()
        return msgspec.json.decode(answer.content, type=_Tokenized).tokens
    except httpx.HTTPStatusError as error:
        code = error.response.status_code
        raise ExportError(f"{where}: answers /tokenize with HTTP {code}: use a vLLM server") from error
    except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
        raise ExportError(f"{where}: does not answer: {printable(str(error))}: use a running vLLM server") from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise ExportError(f"{where}: /tokenize returns no tokens: use a vLLM server") from error
