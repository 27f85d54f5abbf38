"""Rebuild the token ids of prompts that a capture sent, from its workload, its seed and its dataset."""

from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from specdecode_operator.api.capture import CaptureWorkload, DatasetFormat, Pattern
from specdecode_operator.capture.files.formats import MANIFEST
from specdecode_operator.capture.files.training_rows import RebuiltPrompt, TrainingError
from specdecode_operator.capture.load.datasets import BadDatasetError, parts_of, read_dataset
from specdecode_operator.capture.load.prompts import DatasetSource
from specdecode_operator.capture.recorder.block_hashes import chained_hashes
from specdecode_operator.capture.trace_reader import RecordedRequest
from specdecode_operator.problems import printable
from specdecode_operator.untrusted import MAX_BYTES, UnreadableTextError, mapping, parse_json, whole_number

Tokenize = Callable[[str], Sequence[int]]
"""Tokenizer of the target, which adds special tokens as the engine does."""

_MOST_SEED: Final = 2**31 - 1


def refuse_random_prompts(capture: Path, manifest: Mapping[str, Any]) -> None:
    """Reject a capture with random prompts, if its manifest shows that."""
    prompts = mapping(mapping(manifest, "workload"), "prompts")
    dataset = mapping(prompts, "dataset")
    if "synthetic" in prompts or dataset.get("format") == DatasetFormat.TRACE:
        raise TrainingError(
            "RandomPrompts",
            f"{printable(str(capture))}: its prompts are random tokens, which do not train a draft: use a "
            "capture with prompts from a dataset of another format than Trace",
        )


class RebuiltPrompts:
    """Prompts of a capture with a dataset. Each is checked against its recorded length and block hashes.

    Prompts of later turns contain answers as text, which a capture does not have, so that phases with pattern
    Multiturn cannot be rebuilt.
    """

    def __init__(self, capture: Path, dataset: Path, tokenize: Tokenize | None) -> None:
        """Read the workload of a capture and the files of its dataset, which lie below ``dataset``.

        Without ``tokenize``, prompts that are text have no token ids and are not checked.

        Raises
        ------
        TrainingError
            If the capture has no prompts from a dataset, or the dataset cannot be read.
        """
        manifest = read_manifest(capture)
        try:
            workload = CaptureWorkload.parse(mapping(manifest, "workload"), newer=True)
        except ValidationError as error:
            message = f"{printable(str(capture))}: {MANIFEST}: workload: is invalid: fetch the capture again"
            raise TrainingError("UnreadableCapture", message) from error
        seed, settings = whole_number(manifest.get("seed"), _MOST_SEED), workload.prompts.dataset
        if settings is None or seed is None:
            raise TrainingError(
                "NoTokenIds",
                f"{printable(str(capture))}: its {MANIFEST} names no dataset and seed: use a capture with a dataset",
            )
        try:
            texts = {part: read_dataset(settings, dataset, part) for part in set(parts_of(workload).values())}
            self._source = DatasetSource(texts, workload, seed)
        except BadDatasetError as error:
            raise TrainingError("InvalidDataset", f"dataset: {printable(str(error))}") from error
        self._phases = {each.name for each in workload.phases if each.pattern is not Pattern.MULTITURN}
        self._tokenize = tokenize

    def __call__(self, request: RecordedRequest, block_tokens: int) -> RebuiltPrompt | None:
        """Return a request's prompt, or None if it cannot be rebuilt.

        Raises
        ------
        TrainingError
            If the rebuilt prompt differs from the recorded one.
        """
        # Request ids are CAPTURE-PHASE-INDEX.
        index = whole_number((request.request_id or "").rpartition("-")[2])
        if request.phase not in self._phases or index is None:
            return None
        content = self._source.first(request.phase, index).content
        if not isinstance(content, str):
            ids: Sequence[int] | None = content
        else:
            ids = self._tokenize(content) if self._tokenize else None
        if ids is not None:
            _check(ids, request, block_tokens)
        return RebuiltPrompt(content, ids)


def _check(ids: Sequence[int], request: RecordedRequest, block_tokens: int) -> None:
    recorded = request.block_hashes
    hashes = zip_longest(chained_hashes(ids, block_tokens), recorded if recorded is not None else ())
    if len(ids) != request.prompt_tokens or (recorded is not None and any(one != two for one, two in hashes)):
        raise TrainingError(
            "DatasetChanged",
            f"{printable(request.request_id or '')}: the prompt from the dataset has other tokens ({len(ids)}) "
            f"than the captured one ({request.prompt_tokens}): use the dataset and the tokenizer of the capture",
        )


def read_manifest(capture: Path) -> dict[str, Any]:
    """Return the manifest of a capture's folder, or next to a trace; empty if there is none."""
    path = (capture if capture.is_dir() else capture.parent) / MANIFEST
    if not path.is_file():
        return {}
    try:
        with path.open("rb") as stream:
            found = parse_json(stream.read(MAX_BYTES + 1))
    except (OSError, UnreadableTextError) as error:
        message = f"{printable(str(path))}: {printable(str(error))}: fetch the capture again"
        raise TrainingError("UnreadableCapture", message) from error
    return found if isinstance(found, dict) else {}
