"""Rows whose prompts the engine tokenizes in the trainer's image."""

import ast
import json
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from specdecode_operator.training.job.pending_rows import finish_rows
from specdecode_operator.training.job.settings import StepError
from specdecode_operator.training.rows import write_rows
from tests.support.http_server import Quiet, serving
from tests.support.training_captures import (
    answer_of,
    read_rows,
    source_of,
    tokens,
    write_dataset,
    write_live,
    write_load,
)

TEXTS = [f"Prompt {number} of a dataset, ü" for number in range(60)]


class Tokenizer(Quiet, BaseHTTPRequestHandler):
    """vLLM's /tokenize over connections that stay open."""

    protocol_version = "HTTP/1.1"
    answer: tuple[int, bytes] | None = None
    closes = False  # without notice, as after a time without requests

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert (self.path, asked["model"]) == ("/tokenize", "target")
        body = json.dumps({"count": 1, "max_model_len": 64, "tokens": tokens(asked["prompt"])}).encode()
        status, body = self.answer or (200, body)
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        self.close_connection = self.closes


@pytest.fixture
def url() -> Iterator[str]:
    with serving(ThreadingHTTPServer(("127.0.0.1", 0), Tokenizer)) as server:
        yield f"http://127.0.0.1:{server.server_port}"


def finished(rows: Path, url: str) -> list[dict[str, Any]]:
    return list(finish_rows(rows / "training.jsonl", url, "target"))


def write(folder: Path, *rows: Any, holdout: Any = ()) -> Path:
    folder.mkdir(exist_ok=True)
    for name, lines in (("training.jsonl", rows), ("holdout.jsonl", holdout)):
        text = "".join(f"{each if isinstance(each, str) else json.dumps(each)}\n" for each in lines)
        (folder / name).write_text(text)
    return folder


def pending(text: str, **fields: Any) -> dict[str, Any]:
    usual = {"prompt": text, "prompt_tokens": len(tokens(text)), "block_hashes": [], "block_tokens": 4}
    return {**usual, "output_ids": [7, 8], **fields}


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Rows of a capture with a load, and of a live capture whose prompts are those of the load."""
    dataset = write_dataset(tmp_path / "dataset", TEXTS)
    load = source_of(write_load(tmp_path / "load", dataset, len(TEXTS)), dataset)
    write_rows([load], tmp_path / "rows", holdout_percent=20, max_tokens=10**6, min_rows=1, seed=0)
    return tmp_path / "rows"


def test_pending_rows_get_the_tokens_of_the_engine(rows: Path, url: str) -> None:
    held_out = [each["prompt"] for each in read_rows(rows / "holdout.jsonl")]
    found = finished(rows, url)
    prompts = [tokens(text) for text in TEXTS if text not in held_out]
    assert sorted(row["input_ids"] for row in found) == sorted([*each, *answer_of(each)] for each in prompts)
    assert all(row["loss_mask"] == [0] * (len(row["input_ids"]) - 4) + [1] * 4 for row in found)


@pytest.mark.parametrize(
    "change",
    [
        {"prompt": "Prompt 0 of another dataset"},
        {"prompt_tokens": 3},
        {"prompt_tokens": None},
        {"block_hashes": [1]},
        {"block_tokens": 8},
    ],
)
def test_prompt_with_other_tokens_is_refused(rows: Path, url: str, change: Any) -> None:
    first, *others = (rows / "training.jsonl").read_text().splitlines()
    write(rows, json.loads(first) | change, *others)
    with pytest.raises(StepError) as raised:
        finished(rows, url)
    assert raised.value.reason == "DatasetChanged"
    assert "training.jsonl: line 1: " in raised.value.message
    assert "Prompt" not in raised.value.message


@pytest.mark.parametrize("change", ["missing", "further"])
def test_prompt_with_another_number_of_hashes_is_refused(rows: Path, url: str, change: str) -> None:
    first, *others = (json.loads(line) for line in (rows / "training.jsonl").read_text().splitlines())
    hashes = first["block_hashes"]
    assert len(hashes) > 1
    first["block_hashes"] = hashes[:-1] if change == "missing" else [*hashes, 1]
    write(rows, first, *others)
    with pytest.raises(StepError) as raised:
        finished(rows, url)
    assert raised.value.reason == "DatasetChanged"


def test_held_out_prompt_is_left_out_in_each_form(tmp_path: Path, url: str) -> None:
    given = {"input_ids": [*tokens("b"), 9], "loss_mask": [0, 0, 1]}
    rows = write(tmp_path, pending("a"), given, pending("c"), holdout=[{"prompt": tokens("a")}, {"prompt": "b"}])
    assert [row["input_ids"] for row in finished(rows, url)] == [[*tokens("c"), 7, 8]]


def test_equal_rows_of_both_forms_are_written_once(tmp_path: Path, url: str) -> None:
    given = {"input_ids": [*tokens("a"), 7, 8], "loss_mask": [0, 0, 1, 1]}
    assert finished(write(tmp_path, pending("a"), given), url) == [given]


def test_text_and_token_ids_of_one_prompt_are_not_on_both_sides(tmp_path: Path, url: str) -> None:
    dataset = write_dataset(tmp_path / "dataset", TEXTS)
    load = source_of(write_load(tmp_path / "load", dataset, len(TEXTS)), dataset)
    live = source_of(write_live(tmp_path / "live", list(map(tokens, TEXTS))))
    write_rows([load, live], tmp_path / "rows", holdout_percent=20, max_tokens=10**6, min_rows=1, seed=0)
    held_out = [each["prompt"] for each in read_rows(tmp_path / "rows/holdout.jsonl")]
    held_out_ids = [tokens(each) if isinstance(each, str) else each for each in held_out]
    assert {type(each) for each in held_out} == {str, list}
    found = [row["input_ids"][:-4] for row in finished(tmp_path / "rows", url)]
    assert sorted(found) == sorted(ids for ids in map(tokens, TEXTS) if ids not in held_out_ids)


def test_closed_connection_is_opened_again(tmp_path: Path) -> None:
    handler = type("Closing", (Tokenizer,), {"closes": True})
    with serving(ThreadingHTTPServer(("127.0.0.1", 0), handler)) as server:
        rows = write(tmp_path, pending("a"), pending("b"))
        assert len(finished(rows, f"http://127.0.0.1:{server.server_port}")) == 2


@pytest.mark.parametrize(
    "answer",
    [
        (404, b""),
        (302, b""),
        (200, b"<html>"),
        (200, b"[]"),
        (200, b'{"tokens": [-1]}'),
        (200, b'{"tokens": "12"}'),
        (200, b'{"tokens": [true]}'),
        (200, b"[" * 100_000),
    ],
)
def test_engine_without_tokens_is_refused(tmp_path: Path, answer: tuple[int, bytes]) -> None:
    handler = type("Other", (Tokenizer,), {"answer": answer})
    with serving(ThreadingHTTPServer(("127.0.0.1", 0), handler)) as server, pytest.raises(StepError) as raised:
        finished(write(tmp_path, pending("a")), f"http://127.0.0.1:{server.server_port}")
    assert raised.value.reason == "HiddenStatesFailed"


def test_engine_that_does_not_answer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StepError) as raised:
        finished(write(tmp_path, pending("a")), "http://127.0.0.1:1")
    assert raised.value.reason == "HiddenStatesFailed"


@pytest.mark.parametrize(
    "row",
    [
        "{",
        "[]",
        "[" * 100_000,
        "\x00",
        {},
        pending("a", prompt=5),
        pending("a", block_tokens=0),
        pending("a", block_tokens=2**20),
        pending("a", block_tokens=True),
        pending("a", block_hashes=None),
        pending("a", output_ids=[-1]),
        pending("a", output_ids="7"),
        {"input_ids": [1, 2], "loss_mask": [0]},
        {"input_ids": [1, 2], "loss_mask": [0, "1"]},
        {"input_ids": [1, 2.5], "loss_mask": [0, 1]},
        {"input_ids": None, "loss_mask": []},
    ],
)
def test_malformed_row_is_refused(tmp_path: Path, url: str, row: Any) -> None:
    with pytest.raises(StepError) as raised:
        finished(write(tmp_path, pending("secret"), row), url)
    assert raised.value.reason == "InvalidRows"
    assert "training.jsonl: line 2: " in raised.value.message


@pytest.mark.parametrize("line", ["{", {"prompt": 5}, {"prompt": [True]}, {}])
def test_malformed_held_out_prompt_is_refused(tmp_path: Path, url: str, line: Any) -> None:
    with pytest.raises(StepError) as raised:
        finished(write(tmp_path, pending("a"), holdout=[line]), url)
    assert raised.value.reason == "InvalidRows"
    assert "holdout.jsonl: line 1: " in raised.value.message


@pytest.mark.parametrize("module", ["training/job/pending_rows.py", "capture/recorder/block_hashes.py"])
def test_modules_of_the_bundle_need_only_the_standard_library(module: str) -> None:
    tree = ast.parse(Path("operator", module).read_text())
    names = {alias.name for each in ast.walk(tree) if isinstance(each, ast.Import) for alias in each.names}
    names |= {str(each.module) for each in ast.walk(tree) if isinstance(each, ast.ImportFrom) and not each.level}
    # The fallback for a checkout, where the module is in another folder.
    names -= {"specdecode_operator.capture.recorder.block_hashes"}
    assert {name.partition(".")[0] for name in names} <= sys.stdlib_module_names
