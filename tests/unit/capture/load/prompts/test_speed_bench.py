"""SPEED-Bench as its own script writes it and as the hub has it, and what is said of files that are not so."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from specdecode_operator.api.capture import Dataset, DatasetFormat
from specdecode_operator.capture.load.datasets import BadDatasetError, Part, read_dataset

PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"


def _question(category: str, *turns: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": turn} for turn in turns]
    return {"question_id": "q", "category": category, "messages": messages, "source": "s"}


QUESTIONS = [_question("coding", "one", "and then?"), _question("math", "two"), _question("coding", "three")]


def _write(path: Path, questions: list[Any]) -> None:
    path.write_text("".join(json.dumps(each) + "\n" for each in questions))


def _read(mount: Path, path: str, category: str | None = None) -> list[str]:
    return read_dataset(Dataset(path=path, format=DatasetFormat.SPEED_BENCH), mount, Part(path, category))


def test_prompts_are_what_is_asked_first(tmp_path: Path) -> None:
    _write(tmp_path / "qualitative.jsonl", QUESTIONS)
    assert _read(tmp_path, "qualitative.jsonl") == ["one", "two", "three"]
    assert _read(tmp_path, "qualitative.jsonl", "coding") == ["one", "three"]


def test_parquet_has_turns(tmp_path: Path) -> None:
    table = {"category": ["coding", "math"], "turns": [["one", "and then?"], ["two"]], "source": ["s", "s"]}
    parquet.write_table(pa.table(table), tmp_path / "test.parquet")
    assert _read(tmp_path, "test.parquet") == ["one", "two"]
    assert _read(tmp_path, "test.parquet", "math") == ["two"]


@pytest.mark.parametrize(
    ("question", "complaint"),
    [
        (_question("coding", f"{PLACEHOLDER}\n\n{{question}}"), "line 4: names its source instead of a prompt: have"),
        (_question("coding"), "line 4: has no messages or turns: name a file of SPEED-Bench"),
        ({"prompt": "one"}, "line 4: has no messages or turns"),
        ({"turns": "one"}, "line 4: has no messages or turns"),
        ({"turns": [5]}, "line 4: field 'turns': is a number: a prompt must be text"),
        ({"messages": [{"role": "user"}]}, "line 4: field 'messages': is null"),
    ],
)
def test_bad_questions(tmp_path: Path, question: dict[str, Any], complaint: str) -> None:
    _write(tmp_path / "a.jsonl", [*QUESTIONS, question])
    with pytest.raises(BadDatasetError) as refused:
        _read(tmp_path, "a.jsonl")
    assert f"{tmp_path}/a.jsonl: {complaint}" in str(refused.value)


def test_a_category_that_is_not_there(tmp_path: Path) -> None:
    _write(tmp_path / "a.jsonl", QUESTIONS)
    with pytest.raises(BadDatasetError, match=r"a.jsonl: has no category qa; its categories: coding, math: name one"):
        _read(tmp_path, "a.jsonl", "qa")


def test_parquet_of_something_else(tmp_path: Path) -> None:
    parquet.write_table(pa.table({"question": ["one"]}), tmp_path / "a.parquet")
    with pytest.raises(BadDatasetError, match=r"its columns: question: not SPEED-Bench"):
        _read(tmp_path, "a.parquet")
