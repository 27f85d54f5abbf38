"""A whole capture of a real vLLM: what its Job publishes is what happened in the engine."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from specdecode_operator.capture.files.validate import validate_capture
from specdecode_operator.capture.job.entrypoint import Job
from tests.engine.engine_process import Engine
from tests.engine.recorder_server import NGRAM, Line, Server, serving
from tests.support.recordings import read_lines_of

REQUESTS = 26
OUTPUT_TOKENS = 240

OF_ITS_OWN: Line = {"promptTokens": 90}
"""What a phase of a sweep asks otherwise than the workload."""

DRAFT_MODEL: Line = {"method": "draft_model", "num_speculative_tokens": 3}


def settings(volume: Path, url: str, models: Path) -> dict[str, Any]:
    config = json.loads((models / "target" / "config.json").read_text())
    return {
        "namespace": "team",
        "capture": "demo",
        "root": str(volume),
        "engine": {"url": url, "model": "tiny", "max_model_len": 1024, "vocab_size": config["vocab_size"]},
        "workload": {
            "prompts": {"synthetic": {"promptTokens": 60, "outputTokens": OUTPUT_TOKENS, "sharedPrefixTokens": 40}},
            "phases": [
                {"name": "single", "pattern": "Closed", "concurrency": 1, "requests": 2, **OF_ITS_OWN},
                {"name": "closed", "pattern": "Closed", "concurrency": 8, "requests": REQUESTS - 2},
            ],
        },
        "seed": 5,
        "deadline_seconds": 300,
        "context": {"image": "test"},
    }


def job(volume: Path, url: str, models: Path) -> Job:
    return Job({"SPECDECODE_CAPTURE": json.dumps(settings(volume, url, models)), "SPECDECODE_ATTEMPT": "uid-1"})


def chunks_of(record: Line) -> list[int]:
    later = record.get("itl_tokens", [1] * len(record["itl_ms"]))
    return [record["output_tokens"] - sum(later), *later]


def assert_published_as_observed(server: Server, folder: Path) -> None:
    """Fail unless every chunk of every measured request is what an observer inside the engine saw."""
    records = read_lines_of(folder / "trace.jsonl")[1:]
    observed = {
        name.removeprefix("cmpl-").rsplit("-", 2)[0]: [tokens for _, tokens in chunks]
        for name, chunks in server.observed().items()
    }
    assert len(records) == REQUESTS
    for record in records:
        assert chunks_of(record) == observed[record["request_id"]]
    assert Counter(record["phase"] for record in records) == {"single": 2, "closed": REQUESTS - 2}
    assert any(size > 1 for record in records for size in chunks_of(record))
    asked = {(record["phase"], record["temperature"], record["prompt_tokens"]) for record in records}
    assert asked == {("single", 0.0, 90), ("closed", 0.0, 60)}


@pytest.mark.parametrize(
    ("speculation", "options"),
    # With n-grams the target loops: acceptance must not depend on what a model of random weights happens to repeat.
    [
        pytest.param(NGRAM, (), id="ngram"),
        pytest.param(DRAFT_MODEL, (), id="draft_model", marks=pytest.mark.long),
        pytest.param(NGRAM, ("--api-server-count=2",), id="servers", marks=pytest.mark.long),
        pytest.param(NGRAM, ("--data-parallel-size=2",), id="data", marks=pytest.mark.long),
    ],
)
def test_published_capture_files_match_the_observer(
    engine: Engine, request: pytest.FixtureRequest, tmp_path: Path, speculation: Line, options: tuple[str, ...]
) -> None:
    if speculation is DRAFT_MODEL:
        models: Path = request.getfixturevalue("models")
        speculation = speculation | {"model": str(models / "draft")}
    else:
        models = request.getfixturevalue("heads") / "loop"
    volume = tmp_path / "volume"
    volume.mkdir()
    prepared = job(volume, "http://127.0.0.1:1", models)
    prepared.prepare(tmp_path / "bundle")
    segments = str(prepared.places.segments)
    with serving(
        engine, models, tmp_path / "engine", *options, speculation=speculation, SPECDECODE_RECORD_DIR=segments
    ) as server:
        published = job(volume, server.url, models).run()
        assert_published_as_observed(server, prepared.places.final)

    manifest = published.manifest
    assert manifest.accounting.equation == (
        f"{REQUESTS} sent = 0 HTTP-rejected + 0 never admitted + {REQUESTS} in the engine (completed {REQUESTS})"
    )
    assert manifest.engine_counters is not None
    assert manifest.gates["engine_counters"].passed
    found = validate_capture(prepared.places.final)
    assert found.problems == []
    assert published.summary.speculation is not None
    assert published.summary.output_tokens == REQUESTS * OUTPUT_TOKENS
    assert {path.name for path in prepared.places.final.iterdir()} == {
        "trace.jsonl",
        "step-stats.jsonl",
        "client.jsonl",
        "manifest.json",
    }
