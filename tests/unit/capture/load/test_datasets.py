"""Datasets of prompts."""

import codecs
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from specdecode_operator.api.capture import Dataset, DatasetFormat
from specdecode_operator.capture.load.datasets import BadDatasetError, DatasetPrompt, Part, read_dataset


def _read(mount: Path, path: str, kind: str, field: str = "prompt") -> list[DatasetPrompt]:
    return read_dataset(Dataset(path=path, format=DatasetFormat(kind), prompt_field=field), mount)


def _write_gsm8k(path: Path, *questions: str | None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.table({"question": list(questions), "answer": ["42"] * len(questions)}), path)


def test_jsonl_prompts_are_read(tmp_path: Path) -> None:
    lines = ['{"prompt": "one", "id": 1}', "", '  {"prompt": "zwölf\\n"}  ']
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
    assert _read(tmp_path, "a.jsonl", "JSONL") == ["one", "zwölf\n"]


def test_jsonl_prompts_are_read_from_named_field(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"question": "one"}\n')
    assert _read(tmp_path, "a.jsonl", "JSONL", "question") == ["one"]


def test_jsonl_prompts_may_be_token_ids(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": [1, 0, 4294967295]}\n{"prompt": "two"}\n')
    ids, text = _read(tmp_path, "a.jsonl", "JSONL")
    assert (list(ids), text) == ([1, 0, 2**32 - 1], "two")


def test_token_ids_are_read_in_bounded_memory(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(f'{{"prompt": {[100_000 + n] * 2000}}}\n' for n in range(300)))
    tracemalloc.start()
    try:
        assert len(_read(tmp_path, "a.jsonl", "JSONL")) == 300
        assert tracemalloc.get_traced_memory()[1] < (tmp_path / "a.jsonl").stat().st_size
    finally:
        tracemalloc.stop()


def test_dataset_in_config_map_mount_is_read(tmp_path: Path) -> None:
    (tmp_path / "..2026").mkdir()
    (tmp_path / "..2026" / "a.jsonl").write_text('{"prompt": "one"}\n')
    (tmp_path / "..data").symlink_to("..2026")
    (tmp_path / "a.jsonl").symlink_to("..data/a.jsonl")
    assert _read(tmp_path, "a.jsonl", "JSONL") == ["one"]


def test_gsm8k_file_is_read(tmp_path: Path) -> None:
    _write_gsm8k(tmp_path / "test.parquet", "one", "two")
    assert _read(tmp_path, "test.parquet", "GSM8K") == ["one", "two"]


def test_gsm8k_folder_takes_all_shards_of_the_test_split(tmp_path: Path) -> None:
    _write_gsm8k(tmp_path / "gsm8k/main/train-00000-of-00001.parquet", "train")
    _write_gsm8k(tmp_path / "gsm8k/main/test-00001-of-00002.parquet", "two")
    _write_gsm8k(tmp_path / "gsm8k/main/test-00000-of-00002.parquet", "one")
    assert _read(tmp_path, "gsm8k", "GSM8K") == ["one", "two"]


def test_gsm8k_configuration_folder_is_read(tmp_path: Path) -> None:
    _write_gsm8k(tmp_path / "main/train-00000-of-00001.parquet", "train")
    assert _read(tmp_path, "main", "GSM8K") == ["train"]


def test_share_gpt_prompts_are_first_user_turns(tmp_path: Path) -> None:
    conversations = [
        {"id": "a", "conversations": [{"from": "human", "value": "one"}, {"from": "gpt", "value": "answer"}]},
        {"id": "b", "conversations": []},
        {"id": "c", "conversations": [{"from": "human", "value": " "}]},
        {"id": "d", "conversations": [{"from": "human", "value": "two"}]},
    ]
    (tmp_path / "a.json").write_text(json.dumps(conversations))
    assert _read(tmp_path, "a.json", "ShareGPT") == ["one", "two"]


@pytest.mark.parametrize(
    "odd",
    [
        {"conversations": [{"from": "gpt", "value": "answer"}, {"from": "human"}]},
        {"conversations": [{"from": "human", "value": None}, {"from": "gpt", "value": "answer"}]},
        {"conversations": None},
        {"items": []},
        "text",
    ],
)
def test_share_gpt_skips_invalid_conversations(tmp_path: Path, odd: Any) -> None:
    first = [{"from": "human", "value": "one"}, {"from": "gpt", "value": None}]
    (tmp_path / "a.json").write_text(json.dumps([odd, {"conversations": first}]))
    assert _read(tmp_path, "a.json", "ShareGPT") == ["one"]


@pytest.mark.parametrize("speaker", ["system", "gpt"])
def test_share_gpt_prompt_skips_system_and_gpt_turns(tmp_path: Path, speaker: str) -> None:
    turns = [{"from": speaker, "value": "hello"}, {"from": "human", "value": "one"}]
    (tmp_path / "a.json").write_bytes(codecs.BOM_UTF8 + json.dumps([{"conversations": turns}]).encode())
    assert _read(tmp_path, "a.json", "ShareGPT") == ["one"]


def test_share_gpt_file_is_read_in_bounded_memory(tmp_path: Path) -> None:
    """One character beyond the 16-bit ones makes Python's text of the whole file four times as large."""
    answer = {"from": "gpt", "value": "word " * 20_000 + "\N{GRINNING FACE}"}
    conversation = {"conversations": [{"from": "human", "value": "one"}, answer]}
    (tmp_path / "a.json").write_text(json.dumps([conversation] * 100, ensure_ascii=False), encoding="utf-8")
    tracemalloc.start()
    try:
        assert len(_read(tmp_path, "a.json", "ShareGPT")) == 100
        assert tracemalloc.get_traced_memory()[1] < 1.5 * (tmp_path / "a.json").stat().st_size
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "a: is empty: add at least one prompt"),
        (b"\n\n", "a: holds no prompt"),
        (b'{"prompt": "one"}\n{"prompt"', "a: line 2: is not JSON"),
        (b'{"prompt": "one"}\n"two"\n', "a: line 2: is text, not an object"),
        (b'{"text": "one", "id": 1}\n', "a: line 1: has no field 'prompt'; its fields: id, text: set promptField"),
        (b"{}\n", "its fields: none"),
        (b'{"prompt": 5}\n', "a: line 1: field 'prompt': is a number: a prompt must be text"),
        (b'{"prompt": ["one"]}\n', "a: line 1: field 'prompt': is a list of other values than token ids"),
        (b'{"prompt": [1, true]}\n', "other values than token ids"),
        (b'{"prompt": [-1]}\n', "other values than token ids"),
        (b'{"prompt": [4294967296]}\n', "other values than token ids"),
        (b'{"prompt": []}\n', "is empty: remove it, or write a prompt"),
        (b'{"prompt": null}\n', "is null: a prompt must be text"),
        (b'{"prompt": ""}\n', "a: line 1: field 'prompt': is empty: remove it"),
        (b'{"prompt": "one"}\n{"prompt": "zw\xf6lf"}\n', "a: line 2: byte 15 is not UTF-8: convert the file to UTF-8"),
    ],
)
def test_invalid_jsonl_is_refused(tmp_path: Path, content: bytes, complaint: str) -> None:
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(BadDatasetError) as refused:
        _read(tmp_path, "a", "JSONL")
    assert f"{tmp_path}/" in str(refused.value)
    assert complaint in str(refused.value)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "is empty"),
        (b"[]", "holds no prompt"),
        (b'[{"conversations": []}]', "holds no prompt"),
        (b'{"conversations": []}', "is not ShareGPT (Expected `array`, got `object`)"),
        (b'[{"conversations": [{"text": "one"}]}]', "holds no prompt"),
        (b'[{"conversation": []}]', "missing required field `conversations`"),
        (b'[{"conversations": [{"value": 5}]}]', "holds no prompt"),
        (b'[{"conversations": ["one"]}]', "Expected `object`, got `str`"),
        (b'[{"conversations"', "is not ShareGPT (Input data was truncated)"),
        (b'[{"conversations": [{"value": "\xff"}]}]', "conversation 1: is not UTF-8"),
    ],
)
def test_invalid_share_gpt_is_refused(tmp_path: Path, content: bytes, complaint: str) -> None:
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(BadDatasetError) as refused:
        _read(tmp_path, "a", "ShareGPT")
    assert f"{tmp_path}/a: " in str(refused.value)
    assert complaint in str(refused.value)


def _bad_gsm8k(tmp_path: Path, path: str) -> str:
    with pytest.raises(BadDatasetError) as refused:
        _read(tmp_path, path, "GSM8K")
    return str(refused.value)


def test_gsm8k_without_question_column_is_refused(tmp_path: Path) -> None:
    parquet.write_table(pa.table({"text": ["one"], "label": [1]}), tmp_path / "a.parquet")
    assert f"{tmp_path}/a.parquet: has no column 'question'; its columns: text, label" in _bad_gsm8k(
        tmp_path, "a.parquet"
    )


def test_gsm8k_in_jsonl_is_refused_with_format_hint(tmp_path: Path) -> None:
    (tmp_path / "test.jsonl").write_text('{"question": "one"}\n' * 20)
    assert "use format JSONL with promptField question" in _bad_gsm8k(tmp_path, "test.jsonl")


def test_truncated_gsm8k_file_is_refused(tmp_path: Path) -> None:
    _write_gsm8k(tmp_path / "a.parquet", *map(str, range(500)))
    content = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(content[: len(content) // 2])
    assert f"{tmp_path}/a.parquet: is not parquet" in _bad_gsm8k(tmp_path, "a.parquet")


def test_gsm8k_row_without_question_is_refused(tmp_path: Path) -> None:
    _write_gsm8k(tmp_path / "a.parquet", "one", None)
    assert "a.parquet: row 2, column 'question': is null" in _bad_gsm8k(tmp_path, "a.parquet")


def test_empty_gsm8k_file_or_folder_is_refused(tmp_path: Path) -> None:
    parquet.write_table(pa.table({"question": pa.array([], pa.string())}), tmp_path / "a.parquet")
    assert "a.parquet: holds no prompt" in _bad_gsm8k(tmp_path, "a.parquet")
    (tmp_path / "folder").mkdir()
    assert "folder: has none of main/test-*.parquet" in _bad_gsm8k(tmp_path, "folder")


@pytest.mark.parametrize("kind", ["JSONL", "ShareGPT", "GSM8K"])
def test_missing_file_is_refused_and_existing_ones_listed(tmp_path: Path, kind: str) -> None:
    (tmp_path / "b.jsonl").touch()
    with pytest.raises(BadDatasetError, match=r"does not exist; .* has b.jsonl: correct prompts.dataset.path"):
        _read(tmp_path, "a.jsonl", kind)


def test_missing_dataset_mount_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadDatasetError, match="nothing is mounted at"):
        _read(tmp_path / "nowhere", "a.jsonl", "JSONL")


@pytest.mark.parametrize("path", ["../secret", "/etc/hostname", "link"])
def test_path_outside_volume_is_refused(tmp_path: Path, path: str) -> None:
    mount = tmp_path / "mount"
    mount.mkdir()
    (tmp_path / "secret").write_text('{"prompt": "one"}\n')
    (mount / "link").symlink_to(tmp_path / "secret")
    with pytest.raises(BadDatasetError, match="leads out of the dataset's volume"):
        _read(mount, path, "JSONL")


@pytest.mark.parametrize("kind", ["JSONL", "ShareGPT"])
def test_folder_instead_of_file_is_refused(tmp_path: Path, kind: str) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(BadDatasetError, match="folder: is a folder: name the file in it"):
        _read(tmp_path, "folder", kind)


# SPEED-Bench as its own script writes it and as the hub has it, and what is said of files that are not so.

PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"


def _question(category: str, *turns: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": turn} for turn in turns]
    return {"question_id": "q", "category": category, "messages": messages, "source": "s"}


QUESTIONS = [_question("coding", "one", "and then?"), _question("math", "two"), _question("coding", "three")]


def _write(path: Path, questions: list[Any]) -> None:
    path.write_text("".join(json.dumps(each) + "\n" for each in questions))


def _read_questions(mount: Path, path: str, category: str | None = None) -> list[str]:
    return read_dataset(Dataset(path=path, format=DatasetFormat.SPEED_BENCH), mount, Part(path, category))


def test_speed_bench_prompts_are_first_messages_of_category(tmp_path: Path) -> None:
    _write(tmp_path / "qualitative.jsonl", QUESTIONS)
    assert _read_questions(tmp_path, "qualitative.jsonl") == ["one", "two", "three"]
    assert _read_questions(tmp_path, "qualitative.jsonl", "coding") == ["one", "three"]


def test_speed_bench_parquet_prompts_are_first_turns(tmp_path: Path) -> None:
    table = {"category": ["coding", "math"], "turns": [["one", "and then?"], ["two"]], "source": ["s", "s"]}
    parquet.write_table(pa.table(table), tmp_path / "test.parquet")
    assert _read_questions(tmp_path, "test.parquet") == ["one", "two"]
    assert _read_questions(tmp_path, "test.parquet", "math") == ["two"]


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
def test_invalid_speed_bench_question_is_refused(tmp_path: Path, question: dict[str, Any], complaint: str) -> None:
    _write(tmp_path / "a.jsonl", [*QUESTIONS, question])
    with pytest.raises(BadDatasetError) as refused:
        _read_questions(tmp_path, "a.jsonl")
    assert f"{tmp_path}/a.jsonl: {complaint}" in str(refused.value)


def test_missing_category_is_refused(tmp_path: Path) -> None:
    _write(tmp_path / "a.jsonl", QUESTIONS)
    with pytest.raises(BadDatasetError, match=r"a.jsonl: has no category qa; its categories: coding, math: name one"):
        _read_questions(tmp_path, "a.jsonl", "qa")


def test_parquet_without_speed_bench_columns_is_refused(tmp_path: Path) -> None:
    parquet.write_table(pa.table({"question": ["one"]}), tmp_path / "a.parquet")
    with pytest.raises(BadDatasetError, match=r"its columns: question: not SPEED-Bench"):
        _read_questions(tmp_path, "a.parquet")
