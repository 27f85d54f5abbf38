"""Rebuild the token ids of prompts that a capture sent, from its workload, its seed and its dataset."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any, Final

import httpx
import msgspec
from pydantic import ValidationError

from specdecode_operator.api.capture import CaptureWorkload, DatasetFormat, Pattern
from specdecode_operator.capture.files.export import ExportError
from specdecode_operator.capture.files.formats import MANIFEST
from specdecode_operator.capture.load.datasets import BadDatasetError, parts_of, read_dataset
from specdecode_operator.capture.load.prompts import DatasetSource
from specdecode_operator.capture.recorder.block_hashes import chained_hashes
from specdecode_operator.capture.trace_reader import RecordedRequest
from specdecode_operator.cluster.bounded_fetch import place_of
from specdecode_operator.problems import printable
from specdecode_operator.untrusted import MAX_BYTES, UnreadableTextError, mapping, parse_json, whole_number

Tokenize = Callable[[str], Sequence[int]]
"""Tokenizer of the target, which adds special tokens as the engine does."""

_MOST_SEED: Final = 2**31 - 1
_TOKENIZE_TIMEOUT_S: Final = 60


def refuse_random_prompts(capture: Path) -> None:
    """Reject a capture with random prompts, if its manifest shows that."""
    prompts = mapping(mapping(_manifest(capture), "workload"), "prompts")
    dataset = mapping(prompts, "dataset")
    if "synthetic" in prompts or dataset.get("format") == DatasetFormat.TRACE:
        raise ExportError(
            f"{printable(str(capture))}: its prompts are random tokens, which do not train a draft: use a "
            "capture with prompts from a dataset of another format than Trace"
        )


class RebuiltPrompts:
    """Prompts of a capture with a dataset. Each is checked against its recorded length and block hashes.

    Prompts of later turns contain answers as text, which a capture does not have, so that phases with pattern
    Multiturn cannot be rebuilt.
    """

    def __init__(self, capture: Path, dataset: Path, tokenize: Tokenize) -> None:
        """Read the workload of a capture and the files of its dataset, which lie below ``dataset``.

        Raises
        ------
        ExportError
            If the capture has no prompts from a dataset, or the dataset cannot be read.
        """
        manifest = _manifest(capture)
        try:
            workload = CaptureWorkload.parse(mapping(manifest, "workload"), newer=True)
        except ValidationError as error:
            raise ExportError(f"{MANIFEST}: workload: is invalid: fetch the capture again") from error
        seed, settings = whole_number(manifest.get("seed"), _MOST_SEED), workload.prompts.dataset
        if settings is None or seed is None:
            raise ExportError(
                f"{printable(str(capture))}: its {MANIFEST} names no dataset and seed: use a capture with a dataset"
            )
        try:
            texts = {part: read_dataset(settings, dataset, part) for part in set(parts_of(workload).values())}
        except BadDatasetError as error:
            raise ExportError(f"--dataset: {printable(str(error))}") from error
        self._source = DatasetSource(texts, workload, seed)
        self._phases = {each.name for each in workload.phases if each.pattern is not Pattern.MULTITURN}
        self._tokenize = tokenize

    def __call__(self, request: RecordedRequest, block_tokens: int) -> Sequence[int] | None:
        """Return the token ids of a request's prompt, or None if it cannot be rebuilt.

        Raises
        ------
        ExportError
            If the rebuilt prompt differs from the recorded one.
        """
        # Request ids are CAPTURE-PHASE-INDEX.
        index = whole_number((request.request_id or "").rpartition("-")[2])
        if request.phase not in self._phases or index is None:
            return None
        content = self._source.first(request.phase, index).content
        ids = self._tokenize(content) if isinstance(content, str) else content
        recorded = request.block_hashes
        hashes = zip_longest(chained_hashes(ids, block_tokens), recorded if recorded is not None else ())
        if len(ids) != request.prompt_tokens or (recorded is not None and any(one != two for one, two in hashes)):
            raise ExportError(
                f"{printable(request.request_id or '')}: the prompt from the dataset has other tokens ({len(ids)}) "
                f"than the captured one ({request.prompt_tokens}): use the dataset and the tokenizer of the capture"
            )
        return ids


class _Tokenized(msgspec.Struct):
    tokens: list[Annotated[int, msgspec.Meta(ge=0, lt=2**32)]]


def tokenizer_at(url: str) -> Tokenize:
    """Return the tokenizer of a vLLM server, which adds special tokens as for a completion."""
    return partial(_tokenize, httpx.Client(timeout=_TOKENIZE_TIMEOUT_S, trust_env=False), url)


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


def _manifest(capture: Path) -> dict[str, Any]:
    """Return the manifest of a capture's folder, or next to a trace; empty if there is none."""
    path = (capture if capture.is_dir() else capture.parent) / MANIFEST
    try:
        with path.open("rb") as stream:
            found = parse_json(stream.read(MAX_BYTES + 1))
    except FileNotFoundError:
        return {}
    except (OSError, UnreadableTextError) as error:
        raise ExportError(f"{printable(str(path))}: {printable(str(error))}: fetch the capture again") from error
    return found if isinstance(found, dict) else {}
