"""Captures as sources of training rows."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from specdecode_operator.api.capture import CaptureWorkload
from specdecode_operator.capture.load.datasets import parts_of, read_dataset
from specdecode_operator.capture.load.prompts import DatasetSource
from specdecode_operator.capture.load.run_settings import needed
from specdecode_operator.capture.recorder.block_hashes import chained_hashes
from specdecode_operator.training.rows import CaptureSource, Target
from tests.support.traces import META, record, write_trace

SEED = 5
BLOCK_TOKENS = 4
TARGET = Target(model="org/model", revision="main", quantization="FP8")
DATASET = {"configMap": {"name": "prompts"}, "path": "prompts.jsonl", "format": "JSONL"}


def tokens(text: str) -> list[int]:
    """Tokenize as the target does: one token per byte, after a BOS token."""
    return [1, *text.encode()]


def write_dataset(folder: Path, prompts: Iterable[str | Sequence[int]]) -> Path:
    """Write the prompts of a load."""
    folder.mkdir(exist_ok=True)
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": each}) + "\n" for each in prompts))
    return folder


def manifest_of(**fields: Any) -> dict[str, Any]:
    """Return the manifest of a capture of the target."""
    usual = {
        "arm": "as-deployed",
        "gpu": "NVIDIA H200",
        "source": "load",
        "seed": SEED,
        "record": {"tokenIds": True},
        "context": {
            "target": {"model": TARGET.model, "revision": TARGET.revision},
            "plan": {"targetQuantization": TARGET.quantization},
        },
    }
    return usual | fields


def workload_of(requests: int, pattern: str = "Closed", **dataset: Any) -> dict[str, Any]:
    """Return a workload that sends prompts of the dataset."""
    phase = {"name": "one", "pattern": pattern, "concurrency": 1, "requests": requests}
    if pattern == "Multiturn":
        phase["turns"] = 2
    return {"prompts": {"dataset": {**DATASET, **dataset}}, "phases": [phase]}


def answer_of(prompt: Sequence[int], length: int = 4) -> list[int]:
    """Return the greedy answer of the target."""
    return [sum(prompt) % 1000 + number for number in range(length)]


def write_load(
    folder: Path,
    dataset: Path,
    requests: int,
    *,
    answer_ids: bool = True,
    manifest: dict[str, Any] | None = None,
    **workload: Any,
) -> Path:
    """Write a capture whose prompts come from a dataset, as the load generator sends them."""
    given = workload_of(requests, **workload)
    parsed = CaptureWorkload.parse(given)
    parts = set(parts_of(parsed).values())
    texts = {part: read_dataset(needed(parsed.prompts.dataset), dataset, part) for part in parts}
    source = DatasetSource(texts, parsed, SEED)
    lines = []
    for index in range(requests):
        content = source.first("one", index).content
        ids = tokens(content) if isinstance(content, str) else content
        answer = answer_of(ids)
        lines.append(
            record(
                arrival_ms=float(index),
                request_id=f"my-capture-one-{index}",
                phase="one",
                prompt_tokens=len(ids),
                output_tokens=len(answer),
                itl_ms=[10.0],
                itl_tokens=[len(answer) - 1],
                block_hashes=list(chained_hashes(ids, BLOCK_TOKENS)),
                **({"output_token_ids": answer} if answer_ids else {}),
            )
        )
    return write_capture(folder, lines, manifest or manifest_of(workload=given))


def write_live(folder: Path, prompts: Sequence[Sequence[int]], answers: Sequence[list[int]] | None = None) -> Path:
    """Write a live capture with the token ids of prompts and answers."""
    lines = [
        record(
            arrival_ms=float(number),
            request_id=f"{number:x}",
            prompt_tokens=len(prompt),
            output_tokens=len(answer),
            itl_ms=[10.0],
            itl_tokens=[len(answer) - 1],
            prompt_token_ids=list(prompt),
            output_token_ids=answer,
        )
        for number, (prompt, answer) in enumerate(zip(prompts, answers or map(answer_of, prompts), strict=True))
    ]
    record_ids = {"tokenIds": True, "promptTokenIds": True}
    return write_capture(folder, lines, manifest_of(source="live", workload={}, seed=0, record=record_ids))


def write_capture(folder: Path, lines: Iterable[dict[str, Any]], manifest: dict[str, Any]) -> Path:
    """Write the files of a published capture."""
    folder.mkdir(parents=True, exist_ok=True)
    write_trace(folder / "trace.jsonl", lines, {**META, "block_size": BLOCK_TOKENS})
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def source_of(folder: Path, dataset: Path | None = None, target: Target = TARGET) -> CaptureSource:
    """Return a capture in a claim that is mounted at the parent of its folder."""
    return CaptureSource(name=folder.name, mount=folder.parent, path=folder.name, target=target, dataset=dataset)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file of rows."""
    return [json.loads(line) for line in path.read_text().splitlines()]
