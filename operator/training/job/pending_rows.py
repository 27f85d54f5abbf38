"""Read exported rows, and complete those whose prompt must be tokenized by the engine.

A pending row has the text of a prompt, and the length and the block hashes that the capture recorded. The tokens of the
text must have both. Rows are untrusted: no message quotes one.
"""

import http.client
import json
from collections.abc import Iterator
from hashlib import blake2b
from itertools import zip_longest
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from .settings import StepError

try:  # The bundle for the trainer's image has the module beside this one.
    from .block_hashes import chained_hashes  # type: ignore[import-not-found,unused-ignore]
except ImportError:
    from specdecode_operator.capture.recorder.block_hashes import chained_hashes

HOLDOUT = "holdout.jsonl"
_MOST_TOKEN = 2**32 - 1
_MOST_BLOCK_TOKENS = 2**16
_LARGEST_ANSWER_BYTES = 2**28
_TIMEOUT_S = 300


def finish_rows(path: Path, url: str, model: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file with input_ids and loss_mask.

    Rows of held-out prompts are omitted, because a text and a list of token ids can be the same prompt.

    Parameters
    ----------
    path
        File of rows; the held-out prompts are in the same folder.
    url
        vLLM server of the target.
    model
        Model name at the server.

    Raises
    ------
    StepError
        If the tokens of a prompt differ from the captured ones, or a row or a response of the server is malformed.
    """
    tokenizer = _Tokenizer(url, model)
    try:
        yield from _finish(path, tokenizer)
    finally:
        tokenizer.close()


def _finish(path: Path, tokenizer: "_Tokenizer") -> Iterator[dict[str, Any]]:
    held_out, seen = set[bytes](), set[bytes]()
    holdout = path.with_name(HOLDOUT)
    for place, found in _objects(holdout) if holdout.exists() else ():
        prompt = found.get("prompt")
        held_out.add(_digest(tokenizer.ids_of(prompt) if isinstance(prompt, str) else _ids(prompt, place, "prompt")))
    for place, found in _objects(path):
        row, prompt_ids = _finished(found, place) if "input_ids" in found else _tokenized(found, place, tokenizer)
        digest = _digest(row["input_ids"], row["loss_mask"])
        if _digest(prompt_ids) not in held_out and digest not in seen:
            seen.add(digest)
            yield row


def _finished(found: dict[str, Any], place: str) -> tuple[dict[str, Any], list[int]]:
    ids, mask = _ids(found["input_ids"], place, "input_ids"), found.get("loss_mask")
    if not isinstance(mask, list) or len(mask) != len(ids) or any(type(each) is not int for each in mask):
        raise _malformed(place, "loss_mask")
    return {"input_ids": ids, "loss_mask": mask}, ids[: mask.index(1) if 1 in mask else len(ids)]


def _tokenized(found: dict[str, Any], place: str, tokenizer: "_Tokenizer") -> tuple[dict[str, Any], list[int]]:
    text, tokens, block_tokens = (found.get(name) for name in ("prompt", "prompt_tokens", "block_tokens"))
    recorded, answer = found.get("block_hashes"), _ids(found.get("output_ids"), place, "output_ids")
    if not isinstance(text, str):
        raise _malformed(place, "prompt")
    if type(block_tokens) is not int or not 0 < block_tokens <= _MOST_BLOCK_TOKENS:
        raise _malformed(place, "block_tokens")
    if not isinstance(recorded, list):
        raise _malformed(place, "block_hashes")
    ids = tokenizer.ids_of(text)
    # A capture without block hashes has an empty list.
    hashes = zip_longest(chained_hashes(ids, block_tokens), recorded) if recorded else ()
    if len(ids) != tokens or any(one != two for one, two in hashes):
        shown = tokens if type(tokens) is int else "no"
        raise StepError(
            "DatasetChanged",
            f"{place}: the tokens of the prompt ({len(ids)}) differ from the captured ones ({shown}): dataset or"
            " tokenizer of the capture have changed; restore them, or capture again",
        )
    return {"input_ids": [*ids, *answer], "loss_mask": [0] * len(ids) + [1] * len(answer)}, ids


def _objects(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with path.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            place = f"{path.name}: line {number}"
            try:
                found = json.loads(line)
            except (ValueError, RecursionError):
                found = None
            if not isinstance(found, dict):
                raise StepError("InvalidRows", f"{place}: not a JSON object: create another training")
            yield place, found


def _ids(value: object, place: str, name: str) -> list[int]:
    if not isinstance(value, list) or any(type(each) is not int or not 0 <= each <= _MOST_TOKEN for each in value):
        raise _malformed(place, name)
    return value


def _malformed(place: str, name: str) -> StepError:
    return StepError("InvalidRows", f"{place}: {name} is malformed: create another training")


def _digest(*lists: list[int]) -> bytes:
    return blake2b(json.dumps(lists).encode(), digest_size=16).digest()


class _Tokenizer:
    """Client of a vLLM server on the loopback interface; it adds special tokens as for a completion."""

    def __init__(self, url: str, model: str) -> None:
        address = urlsplit(url)
        self._connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=_TIMEOUT_S)
        self._model = model

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def ids_of(self, text: str) -> list[int]:
        """Return the token ids of a text."""
        body = json.dumps({"model": self._model, "prompt": text})
        try:
            status, answer = self._ask(body)
        except (OSError, http.client.HTTPException):
            # The server may have closed an idle connection.
            self._connection.close()
            try:
                status, answer = self._ask(body)
            except (OSError, http.client.HTTPException) as error:
                message = f"request to /tokenize of the engine failed: {type(error).__name__}"
                raise StepError("HiddenStatesFailed", message) from error
        if status != http.HTTPStatus.OK:
            raise StepError("HiddenStatesFailed", f"/tokenize of the engine returned HTTP {status}")
        try:
            found = json.loads(answer)
            return _ids(found["tokens"], "/tokenize", "tokens")
        except (ValueError, RecursionError, LookupError, TypeError, StepError) as error:
            raise StepError("HiddenStatesFailed", "response of /tokenize has no tokens") from error

    def _ask(self, body: str) -> tuple[int, bytes]:
        self._connection.request("POST", "/tokenize", body, {"Content-Type": "application/json"})
        response = self._connection.getresponse()
        answer = response.read(_LARGEST_ANSWER_BYTES + 1)
        if len(answer) > _LARGEST_ANSWER_BYTES:
            self._connection.close()
        return response.status, answer
