"""Prompts rebuilt from workload, seed and dataset."""

import json
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from specdecode_operator.api.capture import CaptureWorkload
from specdecode_operator.capture.files.trace_requests import ExportError
from specdecode_operator.capture.load.datasets import parts_of, read_dataset
from specdecode_operator.capture.load.prompts import DatasetSource
from specdecode_operator.capture.load.rebuilt_prompts import RebuiltPrompts, read_manifest, refuse_random_prompts
from specdecode_operator.capture.load.run_settings import needed
from specdecode_operator.capture.recorder.block_hashes import chained_hashes
from specdecode_operator.capture.trace_reader import RecordedRequest, read_recording
from specdecode_operator.cli.capture.tokenizer import tokenizer_at
from tests.support.http_server import Quiet, serving
from tests.support.traces import META, record, write_trace

SEED = 5
DATASET = {"configMap": {"name": "prompts"}, "path": "prompts.jsonl", "format": "JSONL"}
WORKLOAD = {
    "prompts": {"dataset": DATASET},
    "phases": [
        {"name": "one", "pattern": "Closed", "concurrency": 1, "requests": 9},
        {"name": "two-2", "pattern": "Closed", "concurrency": 1, "requests": 9},
        {"name": "talk", "pattern": "Multiturn", "concurrency": 1, "turns": 2, "requests": 9},
    ],
}


def tokens(text: str) -> list[int]:
    return [1, *text.encode()]


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    folder = tmp_path / "dataset"
    folder.mkdir()
    lines = [json.dumps({"prompt": f"Prompt {number} of a dataset"}) for number in range(7)]
    (folder / "prompts.jsonl").write_text("\n".join(lines))
    return folder


def captured(folder: Path, dataset: Path, workload: dict[str, Any] = WORKLOAD) -> list[RecordedRequest]:
    """Write a capture of three requests as the load generator sends them, and return its requests."""
    parsed = CaptureWorkload.parse(workload)
    texts = {
        part: read_dataset(needed(parsed.prompts.dataset), dataset, part) for part in set(parts_of(parsed).values())
    }
    source = DatasetSource(texts, parsed, SEED)
    lines = []
    for phase, index in (("one", 3), ("two-2", 7), ("talk", 0)):
        content = source.first(phase, index).content
        assert isinstance(content, str)
        ids = tokens(content)
        lines.append(
            record(
                arrival_ms=float(index),
                request_id=f"my-capture-{phase}-{index}",
                phase=phase,
                prompt_tokens=len(ids),
                block_hashes=list(chained_hashes(ids, 4)),
            )
        )
    folder.mkdir(exist_ok=True)
    write_trace(folder / "trace.jsonl", lines, {**META, "block_size": 4})
    (folder / "manifest.json").write_text(json.dumps({"workload": workload, "seed": SEED}))
    return list(read_recording(folder).requests)


def test_rebuilt_prompts_equal_sent_ones(tmp_path: Path, dataset: Path) -> None:
    requests = captured(tmp_path / "capture", dataset)
    rebuild = RebuiltPrompts(tmp_path / "capture", dataset, tokens)
    found = {each.phase: rebuild(each, 4) for each in requests}
    for each in requests:
        if each.phase != "talk":
            prompt = found[each.phase]
            assert prompt is not None
            assert isinstance(prompt.content, str)
            assert prompt.ids == tokens(prompt.content)
            assert list(chained_hashes(prompt.ids, 4)) == list(each.block_hashes or ())
    assert found["one"] != found["two-2"]
    assert found["talk"] is None


@pytest.mark.parametrize("same_length", [True, False])
def test_changed_dataset_is_refused(tmp_path: Path, dataset: Path, same_length: bool) -> None:
    _, one, _ = captured(tmp_path / "capture", dataset)
    file = dataset / "prompts.jsonl"
    file.write_text(file.read_text().replace("dataset", "DATASET" if same_length else "set"))
    with pytest.raises(ExportError, match=r"my-capture-.*: .* other tokens .*: use the dataset"):
        RebuiltPrompts(tmp_path / "capture", dataset, tokens)(one, 4)


def test_requests_with_foreign_ids_have_no_prompt(tmp_path: Path, dataset: Path) -> None:
    captured(tmp_path / "capture", dataset)
    rebuild = RebuiltPrompts(tmp_path / "capture", dataset, tokens)
    write_trace(tmp_path / "others.jsonl", [record(request_id="cmpl-1"), record(phase="one", request_id="x-one-y")])
    assert [rebuild(each, 4) for each in read_recording(tmp_path / "others.jsonl").requests] == [None, None]


@pytest.mark.parametrize(
    ("manifest", "why"),
    [
        ({"workload": {"prompts": {"synthetic": {}}}, "seed": 1}, "names no dataset"),
        ({"workload": WORKLOAD}, "names no dataset and seed"),
        ({"workload": {"phases": 1}, "seed": 1}, "workload: is invalid"),
        (None, "names no dataset"),
        ("[", "not valid JSON"),
        ({"workload": {"prompts": {"dataset": {**DATASET, "path": "../x"}}}, "seed": 1}, "leads out"),
    ],
)
def test_a_capture_without_a_dataset_is_refused(tmp_path: Path, dataset: Path, manifest: Any, why: str) -> None:
    folder = tmp_path / "capture"
    folder.mkdir()
    if manifest is not None:
        (folder / "manifest.json").write_text(manifest if isinstance(manifest, str) else json.dumps(manifest))
    with pytest.raises(ExportError, match=why):
        RebuiltPrompts(folder, dataset, tokens)


@pytest.mark.parametrize("prompts", [{"synthetic": {"promptTokens": 4}}, {"dataset": {**DATASET, "format": "Trace"}}])
def test_random_prompts_are_refused_for_training(tmp_path: Path, prompts: Any) -> None:
    (tmp_path / "manifest.json").write_text(json.dumps({"workload": {"prompts": prompts}}))
    with pytest.raises(ExportError, match="random tokens"):
        refuse_random_prompts(tmp_path, read_manifest(tmp_path))
    (tmp_path / "manifest.json").unlink()
    refuse_random_prompts(tmp_path, read_manifest(tmp_path))


class Tokenizer(Quiet, BaseHTTPRequestHandler):
    """vLLM's /tokenize, or a server that is none."""

    answer: tuple[int, bytes] | None = None

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.path == "/tokenize"
        status, body = self.answer or (200, json.dumps({"count": 1, "tokens": tokens(asked["prompt"])}).encode())
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def test_prompt_is_tokenized_by_server_at_url() -> None:
    with serving(HTTPServer(("127.0.0.1", 0), Tokenizer)) as server:
        assert tokenizer_at(f"http://127.0.0.1:{server.server_port}/")("hé") == tokens("hé")


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ((404, b""), "HTTP 404"),
        ((302, b""), "HTTP 302"),
        ((200, b"<html>"), "no tokens"),
        ((200, b'{"tokens": [-1]}'), "no tokens"),
        ((200, b"[" * 100_000), "no tokens"),
    ],
)
def test_server_without_tokenize_answer_is_refused(answer: tuple[int, bytes], why: str) -> None:
    handler = type("Other", (Tokenizer,), {"answer": answer})
    with serving(HTTPServer(("127.0.0.1", 0), handler)) as server, pytest.raises(ExportError, match=why):
        tokenizer_at(f"http://user:secret@127.0.0.1:{server.server_port}")("x")


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "localhost:8000", "http://[", "file:///etc"])
def test_an_unusable_url_is_refused(url: str) -> None:
    with pytest.raises(ExportError, match=r"--tokenizer-url: .*: does not answer"):
        tokenizer_at(url)("x")
