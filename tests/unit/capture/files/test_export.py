"""Captures as input of other tools."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from specdecode_operator.capture.files.export import Exported, ExportFormat, export_capture
from specdecode_operator.capture.files.trace_requests import ExportError
from specdecode_operator.capture.files.training_rows import RebuiltPrompt, Split
from specdecode_operator.capture.trace_reader import RecordedRequest, RecordingError
from tests.support.traces import META, record, write_trace

LOADS = [each for each in ExportFormat if each is not ExportFormat.SPECULATORS]
DATA = Path("tests/data/captures")


def export(folder: Path, form: ExportFormat, **options: Any) -> tuple[list[dict[str, Any]], Exported]:
    out = folder / "out.jsonl"
    exported = export_capture(folder, form, out, **options)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == exported.requests
    return rows, exported


def capture(folder: Path, *records: dict[str, Any], block_size: int = 16, **meta: Any) -> Path:
    write_trace(folder / "trace.jsonl", records, {**META, "block_size": block_size, **meta})
    return folder


TWO = (
    record(arrival_ms=1250.5, prompt_tokens=40, block_hashes=[7, 8], temperature=0.5, finish_reason="stop"),
    record(arrival_ms=1000.0, prompt_tokens=33, block_hashes=[7, 9], temperature=0.0),
)
TIMES = {"input_length": 33, "output_length": 6}
"""Of the request that arrives first."""


@pytest.mark.parametrize(
    ("form", "rows"),
    [
        (
            ExportFormat.VLLM_BENCH,
            [
                {"timestamp": 0.0, "input_length": 33, "output_length": 6, "hash_ids": [0, 1, 2]},
                {"timestamp": 0.2505, "input_length": 40, "output_length": 6, "hash_ids": [0, 3, 4]},
            ],
        ),
        (
            ExportFormat.GUIDELLM,
            [
                {"timestamp": 0.0, "input_length": 33, "output_length": 6, "duration": 0.0525, "hash_ids": [0, 1, 2]},
                {
                    "timestamp": 0.2505,
                    "input_length": 40,
                    "output_length": 6,
                    "duration": 0.0525,
                    "hash_ids": [0, 3, 4],
                },
            ],
        ),
        (
            ExportFormat.AIPERF,
            [
                {
                    "timestamp": 0.0,
                    "input_length": 33,
                    "output_length": 6,
                    "extra": {"temperature": 0.0},
                    "hash_ids": [0, 1, 2],
                },
                {
                    "timestamp": 250.5,
                    "input_length": 40,
                    "output_length": 6,
                    "extra": {"temperature": 0.5},
                    "hash_ids": [0, 3, 4],
                },
            ],
        ),
        (
            ExportFormat.MOONCAKE,
            [
                {"timestamp": 0, "input_length": 33, "output_length": 6, "hash_ids": [0]},
                {"timestamp": 250, "input_length": 40, "output_length": 6, "hash_ids": [1]},
            ],
        ),
    ],
)
def test_exported_load_has_times_lengths_and_shared_blocks(
    tmp_path: Path, form: ExportFormat, rows: list[dict[str, Any]]
) -> None:
    assert export(capture(tmp_path, *TWO), form)[0] == rows


@pytest.mark.parametrize("form", LOADS)
@pytest.mark.parametrize("name", ["draft_model", "ngram"])
def test_export_of_real_capture_is_complete_and_deterministic(tmp_path: Path, form: ExportFormat, name: str) -> None:
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    exported = export_capture(DATA / name, form, first)
    assert exported == export_capture(DATA / name, form, second)
    assert first.read_bytes() == second.read_bytes()
    rows = [json.loads(line) for line in first.read_text().splitlines()]
    assert (
        len(rows) == exported.requests == json.loads((DATA / name / "manifest.json").read_text())["accounting"]["sent"]
    )
    times = [row["timestamp"] for row in rows]
    assert times == sorted(times)
    assert times[0] == 0
    tokens = exported.block_tokens or 0
    assert all(len(row["hash_ids"]) == -(-row["input_length"] // tokens) for row in rows)


def ids_of(
    folder: Path, *prompts: tuple[int, Sequence[int]], block_size: int = 16, form: str = "mooncake"
) -> list[Any]:
    records = [
        record(arrival_ms=float(place), prompt_tokens=tokens, block_hashes=list(hashes))
        for place, (tokens, hashes) in enumerate(prompts)
    ]
    return [row["hash_ids"] for row in export(capture(folder, *records, block_size=block_size), ExportFormat(form))[0]]


class TestBlocksOf512:
    """Mooncake's blocks have 512 tokens, those of a capture the engine's size."""

    def test_captured_blocks_are_grouped_to_512_tokens(self, tmp_path: Path) -> None:
        shared = list(range(100, 132))
        first, second = ids_of(tmp_path, (1024, [*shared, *range(200, 232)]), (1024, [*shared, *range(300, 332)]))
        assert first == [0, 1]
        assert second == [0, 2]

    def test_groups_with_different_last_block_are_not_shared(self, tmp_path: Path) -> None:
        first, second = ids_of(tmp_path, (512, range(100, 132)), (512, [*range(100, 131), 999]))
        assert (first, second) == ([0], [1])

    def test_equal_prompts_ending_at_a_captured_block_share_it(self, tmp_path: Path) -> None:
        assert ids_of(tmp_path, (32, [1, 2]), (32, [1, 2])) == [[0], [0]]

    def test_prompts_with_unknown_last_tokens_share_no_block(self, tmp_path: Path) -> None:
        assert ids_of(tmp_path, (33, [1, 2]), (33, [1, 2])) == [[0], [1]]

    def test_blocks_of_different_size_have_different_ids(self, tmp_path: Path) -> None:
        # The first 32 tokens are equal, but a block of 32 tokens is another one than a block of 512.
        assert ids_of(tmp_path, (32, [1, 2]), (512, [1, 2, *range(3, 33)])) == [[0], [1]]

    def test_block_ends_at_next_captured_block_if_512_is_no_multiple(self, tmp_path: Path) -> None:
        # Blocks of 48 tokens end at 528 and 1056: the first ends after 512 tokens, the other after 1024.
        shared = list(range(22))
        first, second, third = ids_of(
            tmp_path, (1100, shared), (1100, [*shared[:11], *range(50, 61)]), (1100, [*shared[:10], 98]), block_size=48
        )
        assert first == [0, 1, 2]
        assert second == [0, 3, 4]
        assert third == [5, 6, 7]

    def test_larger_captured_block_is_split_into_blocks_of_512(self, tmp_path: Path) -> None:
        assert ids_of(tmp_path, (1056, [1]), (1056, [1]), block_size=1056) == [[0, 1, 2], [0, 1, 2]]

    def test_shared_tokens_lost_by_grouping_are_counted(self, tmp_path: Path) -> None:
        both = [record(arrival_ms=float(n), prompt_tokens=600, block_hashes=[*range(36), 90 + n]) for n in range(2)]
        capture(tmp_path, *both)
        assert any("64 of 576 tokens in shared" in each for each in export(tmp_path, ExportFormat.MOONCAKE)[1].left_out)
        assert not any("shared" in each for each in export(tmp_path, ExportFormat.VLLM_BENCH)[1].left_out)


def test_block_hashes_beyond_prompt_are_ignored(tmp_path: Path) -> None:
    assert ids_of(tmp_path, (16, [1, 2, 3]), (32, [1, 2]), form="aiperf") == [[0], [0, 1]]
    assert ids_of(tmp_path, (20, [1, 2, 3]), (20, [1, 2, 3]), form="aiperf") == [[0, 1], [0, 2]]


def test_omitted_requests_and_fields_are_listed(tmp_path: Path) -> None:
    (tmp_path / "aborted.jsonl").write_text('{"request_id": "a"}\n{"request_id": "b"}\n')
    unended = record(arrival_ms=2000.0, finish_reason=None)
    capture(tmp_path, *TWO, unended, record(arrival_ms=None), record(prompt_tokens=0))
    rows, exported = export(tmp_path, ExportFormat.GUIDELLM)
    assert len(rows) == 3
    said = "\n".join(exported.left_out)
    for part in ("2 requests without a token", "1 request without arrival_ms", "1 request with an empty prompt"):
        assert part in said
    assert "temperature (0, 0.5)" in said
    assert "why 1 answer ended early" in said
    assert "temperature" not in "\n".join(export(tmp_path, ExportFormat.AIPERF)[1].left_out)


def test_trace_without_block_hashes_shares_no_blocks(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.jsonl", [record(), record()], None)
    rows, exported = export(tmp_path, ExportFormat.VLLM_BENCH)
    assert [row["hash_ids"] for row in rows] == [[0, 1], [2, 3]]
    assert exported.block_tokens == 16
    assert any("no block hashes" in each for each in exported.left_out)


def test_phases_can_be_chosen(tmp_path: Path) -> None:
    capture(tmp_path, record(phase="a", arrival_ms=5.0), record(phase="b", prompt_tokens=21), record())
    rows, exported = export(tmp_path, ExportFormat.MOONCAKE, phases=["a"])
    assert [(row["timestamp"], row["input_length"]) for row in rows] == [(0, 20)]
    assert "2 requests of other phases" in exported.left_out
    with pytest.raises(ExportError, match=r"--phase: c: .*: a, b"):
        export(tmp_path, ExportFormat.MOONCAKE, phases=["c"])


def trained(**fields: Any) -> dict[str, Any]:
    return record(prompt_tokens=3, output_token_ids=[11, 12, 13, 14, 15, 16], request_id="x", **fields)


class TestTrainingData:
    def test_loss_mask_excludes_the_prompt(self, tmp_path: Path) -> None:
        capture(tmp_path, trained(prompt_token_ids=[1, 2, 3]), trained(), record(), gpu="H200")
        rows, exported = export(tmp_path, ExportFormat.SPECULATORS)
        assert rows == [{"input_ids": [1, 2, 3, 11, 12, 13, 14, 15, 16], "loss_mask": [0, 0, 0, 1, 1, 1, 1, 1, 1]}]
        assert exported.block_tokens is None
        assert "1 request whose prompt has no token ids" in exported.left_out
        assert "1 request whose answer has no token ids" in exported.left_out

    def test_rebuilt_prompts_are_used(self, tmp_path: Path) -> None:
        def rebuild(request: RecordedRequest, block_tokens: int) -> RebuiltPrompt | None:
            assert block_tokens == 16
            return RebuiltPrompt("text", [4, 5, 6]) if request.request_id == "x" else None

        rows, _ = export(capture(tmp_path, trained()), ExportFormat.SPECULATORS, rebuild=rebuild)
        assert rows[0]["input_ids"][:4] == [4, 5, 6, 11]

    def test_equal_requests_are_exported_once(self, tmp_path: Path) -> None:
        capture(tmp_path, *[trained(prompt_token_ids=[1, 2, 3])] * 3, trained(prompt_token_ids=[1, 2, 4]))
        rows, exported = export(tmp_path, ExportFormat.SPECULATORS)
        assert [row["input_ids"][:3] for row in rows] == [[1, 2, 3], [1, 2, 4]]
        assert "2 requests with the prompt and the answer of another request" in exported.left_out

    def test_held_out_prompts_are_in_a_second_file(self, tmp_path: Path) -> None:
        prompts = [[1, 2, number] for number in range(40)]
        capture(tmp_path, *(trained(prompt_token_ids=each) for each in prompts))
        split = Split(holdout_percent=25)
        rows, exported = export(tmp_path, ExportFormat.SPECULATORS, split=split)
        held_out = [json.loads(line) for line in (tmp_path / "out.holdout.jsonl").read_text().splitlines()]
        assert len(held_out) == exported.held_out > 0
        assert sorted([*(row["input_ids"][:3] for row in rows), *(row["prompt"] for row in held_out)]) == prompts
        for row in held_out:
            assert row["input_ids"] == [*row["prompt"], 11, 12, 13, 14, 15, 16]
            assert row["loss_mask"] == [0, 0, 0, 1, 1, 1, 1, 1, 1]
        assert export(tmp_path, ExportFormat.SPECULATORS, split=split)[0] == rows
        assert export(tmp_path, ExportFormat.SPECULATORS, split=Split(holdout_percent=25, seed=1))[0] != rows

    @pytest.mark.parametrize("percent", [1, 50])
    def test_split_without_rows_on_both_sides_is_refused(self, tmp_path: Path, percent: int) -> None:
        capture(tmp_path, trained(prompt_token_ids=[1, 2, 3]))
        with pytest.raises(ExportError, match=f"--holdout-percent: {percent}: holds out (no|every) prompt"):
            export(tmp_path, ExportFormat.SPECULATORS, split=Split(holdout_percent=percent))
        assert [each.name for each in tmp_path.iterdir()] == ["trace.jsonl"]

    def test_answers_ended_by_repetition_are_left_out(self, tmp_path: Path) -> None:
        capture(
            tmp_path,
            trained(prompt_token_ids=[1, 2, 3], finish_reason="repetition"),
            trained(prompt_token_ids=[1, 2, 3]),
        )
        assert "1 request whose answer is broken off" in export(tmp_path, ExportFormat.SPECULATORS)[1].left_out

    @pytest.mark.parametrize(
        ("made", "meta", "why"),
        [
            (record(), {}, "record.tokenIds: true"),
            (trained(), {}, "--dataset and --tokenizer-url"),
            (trained(prompt_token_ids=[1]), {}, "prompt_token_ids: has 1 ids for prompt_tokens 3"),
            (trained(prompt_token_ids=[1, 2, 3]), {"gpu": "emulated H200"}, "emulated"),
        ],
    )
    def test_unsuitable_capture_is_refused_with_reason(self, tmp_path: Path, made: Any, meta: Any, why: str) -> None:
        with pytest.raises(ExportError) as raised:
            export(capture(tmp_path, made, **meta), ExportFormat.SPECULATORS)
        assert why in str(raised.value)


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("{", RecordingError),
        ('{"prompt_tokens": 1, "output_tokens": 1, "ttft_ms": 1.0}', ExportError),
        ("", RecordingError),
    ],
)
def test_failed_export_keeps_earlier_file(tmp_path: Path, line: str, error: type[Exception]) -> None:
    (tmp_path / "trace.jsonl").write_text(f"{line}\n")
    out = tmp_path / "out.jsonl"
    out.write_text("earlier")
    with pytest.raises(error):
        export_capture(tmp_path, ExportFormat.MOONCAKE, out)
    assert out.read_text() == "earlier"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["out.jsonl", "trace.jsonl"]


def test_oversized_block_size_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="block_size: 1000000"):
        export(capture(tmp_path, record(), block_size=10**6), ExportFormat.AIPERF)
