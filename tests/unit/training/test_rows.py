"""Rows that a draft is trained with."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdecode_operator.api.training_status import RowCounts
from specdecode_operator.capture.files.training_rows import TrainingError
from specdecode_operator.training.rows import (
    CaptureSource,
    FileSource,
    RowSource,
    Target,
    compatible,
    read_counts,
    write_rows,
)
from tests.support.training_captures import (
    DATASET,
    TARGET,
    answer_of,
    manifest_of,
    read_rows,
    source_of,
    tokens,
    workload_of,
    write_capture,
    write_dataset,
    write_live,
    write_load,
)

TEXTS = [f"Prompt {number} of a dataset" for number in range(60)]


def written(out: Path, *sources: RowSource, **options: Any) -> RowCounts:
    usual: dict[str, Any] = {"holdout_percent": 20, "max_tokens": 10**6, "min_rows": 1, "seed": 0}
    return write_rows(sources, out, **usual | options)


def refusal(out: Path, *sources: RowSource, **options: Any) -> TrainingError:
    with pytest.raises(TrainingError) as raised:
        written(out, *sources, **options)
    assert not list(out.glob("*.jsonl*"))
    assert read_counts(out) is None
    return raised.value


def held_out_prompts(out: Path) -> list[str | list[int]]:
    return [each["prompt"] for each in read_rows(out / "holdout.jsonl")]


def prompts_of(out: Path) -> list[list[int]]:
    """Return the token ids of the prompts in the training file."""
    return [each["input_ids"][: each["loss_mask"].index(1)] for each in read_rows(out / "training.jsonl")]


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    return write_dataset(tmp_path / "dataset", TEXTS)


@pytest.fixture
def load(tmp_path: Path, dataset: Path) -> CaptureSource:
    return source_of(write_load(tmp_path / "load", dataset, len(TEXTS)), dataset)


class TestCapturesWithALoad:
    def test_rows_have_rebuilt_prompts_and_recorded_answers(self, tmp_path: Path, load: CaptureSource) -> None:
        counts = written(tmp_path / "rows", load, tokenize=tokens)
        held_out = {text for text in held_out_prompts(tmp_path / "rows") if isinstance(text, str)}
        expected = [tokens(text) for text in TEXTS if text not in held_out]
        assert sorted(prompts_of(tmp_path / "rows")) == sorted(expected)
        for row in read_rows(tmp_path / "rows/training.jsonl"):
            prompt = row["input_ids"][: row["loss_mask"].index(1)]
            assert row["input_ids"] == [*prompt, *answer_of(prompt)]
            assert row["loss_mask"] == [0] * len(prompt) + [1] * 4
        assert (counts.training, counts.holdout, counts.duplicates) == (len(expected), len(held_out), 0)
        assert counts.tokens == sum(len(each) + 4 for each in expected)
        assert counts.left_out is None
        assert read_counts(tmp_path / "rows") == counts

    def test_prompts_without_tokenizer_are_pending(self, tmp_path: Path, load: CaptureSource) -> None:
        with_ids = written(tmp_path / "with", load, tokenize=tokens)
        assert written(tmp_path / "rows", load) == with_ids
        assert held_out_prompts(tmp_path / "rows") == held_out_prompts(tmp_path / "with")
        for row, finished in zip(
            read_rows(tmp_path / "rows/training.jsonl"), read_rows(tmp_path / "with/training.jsonl"), strict=True
        ):
            ids = tokens(row["prompt"])
            assert [*ids, *row["output_ids"]] == finished["input_ids"]
            assert (row["prompt_tokens"], row["block_tokens"]) == (len(ids), 4)
            assert len(row["block_hashes"]) == len(ids) // 4

    def test_token_ids_of_a_dataset_need_no_tokenizer(self, tmp_path: Path) -> None:
        prompts = [[number, 7, 8, 9, 10] for number in range(40)]
        dataset = write_dataset(tmp_path / "dataset", prompts)
        written(tmp_path / "rows", source_of(write_load(tmp_path / "load", dataset, 40), dataset))
        assert sorted([*prompts_of(tmp_path / "rows"), *held_out_prompts(tmp_path / "rows")]) == prompts

    @pytest.mark.parametrize("tokenize", [tokens, None])
    def test_changed_token_ids_are_refused_also_without_tokenizer(self, tmp_path: Path, tokenize: Any) -> None:
        prompts = [[number, 7, 8, 9, 10] for number in range(40)]
        dataset = write_dataset(tmp_path / "dataset", prompts)
        source = source_of(write_load(tmp_path / "load", dataset, 40), dataset)
        write_dataset(dataset, [[number, 7, 8, 11, 10] for number in range(40)])
        assert refusal(tmp_path / "rows", source, tokenize=tokenize).reason == "DatasetChanged"

    def test_changed_text_is_refused(self, tmp_path: Path, load: CaptureSource, dataset: Path) -> None:
        write_dataset(dataset, [text.upper() for text in TEXTS])
        assert refusal(tmp_path / "rows", load, tokenize=tokens).reason == "DatasetChanged"

    def test_later_turns_are_left_out(self, tmp_path: Path, dataset: Path) -> None:
        folder = write_load(tmp_path / "load", dataset, 9, pattern="Multiturn")
        assert refusal(tmp_path / "rows", source_of(folder, dataset)).reason == "NoTokenIds"

    def test_removed_dataset_is_refused(self, tmp_path: Path, load: CaptureSource, dataset: Path) -> None:
        (dataset / "prompts.jsonl").unlink()
        assert refusal(tmp_path / "rows", load).reason == "InvalidDataset"
        without = source_of(tmp_path / "load")
        assert refusal(tmp_path / "rows", without).reason == "DatasetNotFound"

    def test_all_repetitions_of_compatible_arms_are_used(self, tmp_path: Path, dataset: Path) -> None:
        capture, workload = tmp_path / "arms", workload_of(30)
        other = {"target": {"model": TARGET.model, "revision": "main"}, "plan": {"targetQuantization": "BF16"}}
        for arm, repetition, context in (("a", 1, {}), ("a", 2, {}), ("b", 1, {"context": other})):
            manifest = manifest_of(workload=workload, arm=arm, **context)
            write_load(capture / arm / str(repetition), dataset, 30, manifest=manifest)
        write_load(capture / "a" / "3.part-uid", dataset, 60)
        counts = written(tmp_path / "rows", source_of(capture, dataset))
        assert counts.training + counts.holdout == 30
        assert counts.duplicates == 30
        assert counts.left_out is not None
        assert "BF16" in counts.left_out[0]
        recorded = json.loads((tmp_path / "rows/rows.json").read_text())["sources"]
        assert [each["path"] for each in recorded] == ["arms/a/1", "arms/a/2"]


class TestLiveCaptures:
    def test_rows_have_recorded_prompts(self, tmp_path: Path) -> None:
        prompts = [[5, 6, number] for number in range(50)]
        counts = written(tmp_path / "rows", source_of(write_live(tmp_path / "live", prompts)))
        assert sorted([*prompts_of(tmp_path / "rows"), *held_out_prompts(tmp_path / "rows")]) == prompts
        assert counts.tokens == 7 * counts.training

    def test_prompt_is_on_the_same_side_in_each_capture(self, tmp_path: Path) -> None:
        first = [[5, 6, number] for number in range(60)]
        second = [[9], *first[30:], *[[7, number] for number in range(40)]]
        for name, prompts in (("a", first), ("b", second)):
            written(tmp_path / f"rows-{name}", source_of(write_live(tmp_path / name, prompts)))
        a, b = (set(map(str, held_out_prompts(tmp_path / f"rows-{name}"))) for name in "ab")
        shared = {str(each) for each in first[30:]}
        assert a & shared == b & shared != set()

    def test_another_seed_holds_out_other_prompts(self, tmp_path: Path) -> None:
        source = source_of(write_live(tmp_path / "live", [[5, number] for number in range(60)]))
        written(tmp_path / "one", source)
        written(tmp_path / "two", source, seed=1)
        assert set(map(str, held_out_prompts(tmp_path / "one"))) != set(map(str, held_out_prompts(tmp_path / "two")))


REQUESTS = st.lists(
    st.tuples(st.lists(st.integers(0, 3), min_size=1, max_size=3), st.lists(st.integers(0, 1), min_size=2, max_size=2)),
    min_size=1,
    max_size=60,
)


@given(requests=REQUESTS, percent=st.integers(1, 50), seed=st.integers(0, 2**31 - 1))
@settings(deadline=None, max_examples=60)
def test_no_prompt_is_on_both_sides_and_each_is_on_one(
    tmp_path_factory: pytest.TempPathFactory, requests: list[tuple[list[int], list[int]]], percent: int, seed: int
) -> None:
    folder = tmp_path_factory.mktemp("drawn")
    prompts, answers = [prompt for prompt, _ in requests], [answer for _, answer in requests]
    source = source_of(write_live(folder / "live", prompts, answers))
    refused = ""
    try:
        counts = written(folder / "rows", source, holdout_percent=percent, seed=seed)
    except TrainingError as error:
        refused = error.reason
    if refused:
        assert refused == "TooFewRows"
        return
    trained, held_out = prompts_of(folder / "rows"), held_out_prompts(folder / "rows")
    assert not {*map(str, trained)} & {*map(str, held_out)}
    assert {*map(str, trained), *map(str, held_out)} == {*map(str, prompts)}
    distinct = {str(each): each[0] for each in requests}
    assert sorted(map(str, trained)) == sorted(str(each) for each in distinct.values() if each not in held_out)
    assert len({*map(str, held_out)}) == len(held_out)
    assert (counts.training, counts.holdout) == (len(trained), len(held_out))
    assert counts.duplicates == len(requests) - len(distinct)


def test_share_of_held_out_prompts_is_as_requested(tmp_path: Path) -> None:
    source = source_of(write_live(tmp_path / "live", [[number] for number in range(2000)]))
    assert 150 < written(tmp_path / "rows", source, holdout_percent=10).holdout < 250


class TestCapOfTokens:
    def test_rows_over_the_cap_are_left_out_by_the_seed(self, tmp_path: Path) -> None:
        source = source_of(write_live(tmp_path / "live", [[5, 6, number] for number in range(100)]))
        whole = written(tmp_path / "whole", source)
        assert written(tmp_path / "full", source, max_tokens=196).tokens == 196
        counts = written(tmp_path / "rows", source, max_tokens=200)
        assert (counts.training, counts.tokens, counts.holdout) == (28, 196, whole.holdout)
        assert counts.left_out == [
            f"{whole.training - 28} requests over the limit of 200 tokens, chosen at random by the seed"
        ]
        kept = prompts_of(tmp_path / "rows")
        assert kept == sorted(kept) != prompts_of(tmp_path / "whole")[:28]
        written(tmp_path / "again", source, max_tokens=200)
        assert prompts_of(tmp_path / "again") == kept
        written(tmp_path / "other", source, max_tokens=200, seed=1)
        assert prompts_of(tmp_path / "other") != kept

    def test_cap_below_the_fewest_rows_is_refused(self, tmp_path: Path) -> None:
        source = source_of(write_live(tmp_path / "live", [[5, 6, number] for number in range(100)]))
        assert refusal(tmp_path / "rows", source, max_tokens=200, min_rows=29).reason == "TooFewRows"
        assert refusal(tmp_path / "rows", source, min_rows=101).reason == "TooFewRows"


def test_counts_of_an_earlier_export_do_not_describe_a_failed_one(tmp_path: Path) -> None:
    source = source_of(write_live(tmp_path / "live", [[5, 6, number] for number in range(100)]))
    written(tmp_path / "rows", source)
    with pytest.raises(TrainingError):
        written(tmp_path / "rows", source, min_rows=101)
    assert read_counts(tmp_path / "rows") is None


def test_too_few_prompts_to_hold_one_out_are_refused(tmp_path: Path) -> None:
    source = source_of(write_live(tmp_path / "live", [[5, 6]] * 100))
    error = refusal(tmp_path / "rows", source, holdout_percent=1)
    assert error.reason == "TooFewRows"
    assert "spec.holdoutPercent: 1" in error.message


class TestGivenRows:
    def source(self, tmp_path: Path, lines: Sequence[Any]) -> FileSource:
        (tmp_path / "given.jsonl").write_text(
            "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines)
        )
        return FileSource(mount=tmp_path, path="given.jsonl")

    def test_rows_keep_their_masks(self, tmp_path: Path) -> None:
        rows = [{"input_ids": [9, 9, n, 1, 2, 3], "loss_mask": [0, 0, 0, 1, 0, 1]} for n in range(40)]
        counts = written(tmp_path / "rows", self.source(tmp_path, [*rows, rows[3]]))
        kept = read_rows(tmp_path / "rows/training.jsonl")
        assert all(row in rows for row in kept)
        assert (len(kept), counts.duplicates) == (40 - counts.holdout, 1)

    def test_rows_with_other_masks_are_no_duplicates(self, tmp_path: Path) -> None:
        masks = [[0, 0, 1, 1, 1], [0, 0, 1, 0, 1]]
        rows = [{"input_ids": [9, n, 1, 2, 3], "loss_mask": mask} for n in range(40) for mask in masks]
        counts = written(tmp_path / "rows", self.source(tmp_path, rows))
        assert (counts.duplicates, counts.training) == (0, 80 - 2 * counts.holdout)

    def test_same_prompt_in_a_capture_is_on_the_same_side(self, tmp_path: Path) -> None:
        prompts = [[5, 6, number] for number in range(60)]
        rows = [{"input_ids": [*each, 1], "loss_mask": [0, 0, 0, 1]} for each in prompts]
        written(tmp_path / "given", self.source(tmp_path, rows))
        written(tmp_path / "live-rows", source_of(write_live(tmp_path / "live", prompts)))
        given, live = (set(map(str, held_out_prompts(tmp_path / each))) for each in ("given", "live-rows"))
        assert given == live

    def test_rows_without_prompt_or_answer_are_left_out(self, tmp_path: Path) -> None:
        rows: list[Any] = [{"input_ids": [9, n, 1], "loss_mask": [0, 0, 1]} for n in range(40)]
        odd = [{"input_ids": [1], "loss_mask": [1]}, {"input_ids": [1], "loss_mask": [0]}]
        counts = written(tmp_path / "rows", self.source(tmp_path, [*rows, *odd]))
        assert counts.training + counts.holdout == 40
        assert len(counts.left_out or ()) == 2

    @pytest.mark.parametrize(
        "line",
        [
            "{",
            "[]",
            {"input_ids": [1, 2]},
            {"input_ids": [], "loss_mask": []},
            {"input_ids": [1, 2], "loss_mask": [0]},
            {"input_ids": [1, 2], "loss_mask": [0, 2]},
            {"input_ids": [1, -2], "loss_mask": [0, 1]},
            {"input_ids": [1, 2**32], "loss_mask": [0, 1]},
            {"input_ids": [1, True], "loss_mask": [0, 1]},
            {"input_ids": "12", "loss_mask": [0, 1]},
            '{"input_ids": ' + "[" * 100_000,
        ],
    )
    def test_malformed_row_is_refused_with_its_line(self, tmp_path: Path, line: Any) -> None:
        source = self.source(tmp_path, [{"input_ids": [1, 2], "loss_mask": [0, 1]}, line])
        error = refusal(tmp_path / "rows", source)
        assert error.reason == "InvalidRows"
        assert "given.jsonl: line 2: " in error.message

    def test_missing_file_or_folder_is_refused(self, tmp_path: Path) -> None:
        for path in ("none.jsonl", "."):
            assert refusal(tmp_path / "rows", FileSource(mount=tmp_path, path=path)).reason == "DatasetNotFound"

    def test_path_out_of_the_volume_is_refused(self, tmp_path: Path) -> None:
        mount = tmp_path / "mount"
        mount.mkdir()
        self.source(tmp_path, [{"input_ids": [1, 2], "loss_mask": [0, 1]}])
        (mount / "link.jsonl").symlink_to(tmp_path / "given.jsonl")
        for path in ("../given.jsonl", "link.jsonl", str(tmp_path / "given.jsonl")):
            assert refusal(tmp_path / "rows", FileSource(mount=mount, path=path)).reason == "UnreadableCapture"


def differing(**fields: Any) -> dict[str, Any]:
    target = {"model": TARGET.model, "revision": TARGET.revision, **fields}
    quantization = target.pop("quantization", TARGET.quantization)
    return {"target": target, "plan": {"targetQuantization": quantization}}


class TestCompatible:
    @pytest.mark.parametrize(
        ("fields", "reason"),
        [
            ({"context": differing(model="org/other")}, "CaptureOfOtherTarget"),
            ({"context": differing(revision="v2")}, "CaptureOfOtherTarget"),
            ({"context": differing(revision=None)}, "CaptureOfOtherTarget"),
            ({"context": differing(quantization="BF16")}, "CaptureOfOtherTarget"),
            ({"context": {}}, "CaptureOfOtherTarget"),
            ({"experiment": {"lossy": {"as-deployed": "fly"}}}, "CaptureOfOtherTarget"),
            ({"record": {}}, "NoTokenIds"),
            ({"record": {"tokenIds": False}}, "NoTokenIds"),
            ({"record": {"tokenIds": True}, "source": "live"}, "NoTokenIds"),
            ({"workload": {"prompts": {"synthetic": {"promptTokens": 4}}}}, "RandomPrompts"),
            ({"workload": {"prompts": {"dataset": {**DATASET, "format": "Trace"}}}}, "RandomPrompts"),
            ({"gpu": "emulated H200"}, "EmulatedAnswers"),
        ],
    )
    def test_unsuitable_capture_is_refused(self, tmp_path: Path, dataset: Path, fields: Any, reason: str) -> None:
        manifest = manifest_of(**{"workload": workload_of(9)} | fields)
        with pytest.raises(TrainingError) as raised:
            compatible("my-capture", manifest, TARGET)
        assert raised.value.reason == reason
        assert raised.value.message.startswith("my-capture: ")
        folder = write_load(tmp_path / "load", dataset, 9, manifest=manifest)
        assert refusal(tmp_path / "rows", source_of(folder, dataset)).reason == reason

    def test_difference_names_both_values(self) -> None:
        with pytest.raises(TrainingError) as raised:
            compatible("my-capture", manifest_of(context=differing(revision="v2")), TARGET)
        assert all(each in raised.value.message for each in ("target.revision", "v2", "main"))

    def test_suitable_captures_are_accepted(self) -> None:
        compatible("my-capture", manifest_of(workload=workload_of(9)), TARGET)
        live = {"tokenIds": True, "promptTokenIds": True}
        compatible("my-capture", manifest_of(source="live", workload={}, record=live), TARGET)
        unpinned = Target(model="org/model", revision=None, quantization="FP8")
        compatible("my-capture", manifest_of(context=differing(revision=None)), unpinned)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
KEYS = st.sampled_from(["arm", "gpu", "source", "seed", "record", "context", "workload", "experiment"])


@given(changes=st.dictionaries(KEYS, JSON, min_size=1, max_size=4))
@settings(deadline=None, max_examples=100)
def test_hostile_manifest_is_accepted_or_refused(
    tmp_path_factory: pytest.TempPathFactory, changes: dict[str, Any]
) -> None:
    folder = tmp_path_factory.mktemp("hostile")
    dataset = write_dataset(folder / "dataset", TEXTS[:9])
    manifest = manifest_of(**{"workload": workload_of(9)} | changes)
    source = source_of(write_load(folder / "load", dataset, 9, manifest=manifest), dataset)
    said = "Complete"
    try:
        written(folder / "rows", source, holdout_percent=50)
    except TrainingError as error:
        said = f"{error.reason}: {error.message}"
    assert said.isprintable()


class TestHostileVolumes:
    @pytest.mark.parametrize("text", ["", "[", "[]", "{}", '{"record": 1}', "\x00", '{"a": ' * 2000])
    def test_unreadable_manifest_is_refused(self, tmp_path: Path, load: CaptureSource, text: str) -> None:
        (tmp_path / "load/manifest.json").write_text(text)
        assert refusal(tmp_path / "rows", load).reason in {"UnreadableCapture", "NoTokenIds"}

    def test_missing_files_are_refused(self, tmp_path: Path, load: CaptureSource) -> None:
        (tmp_path / "load/manifest.json").unlink()
        assert refusal(tmp_path / "rows", load).reason == "UnreadableCapture"
        (tmp_path / "load/trace.jsonl").unlink()
        assert refusal(tmp_path / "rows", load).reason == "UnreadableCapture"
        assert refusal(tmp_path / "rows", source_of(tmp_path / "none")).reason == "UnreadableCapture"

    @pytest.mark.parametrize("name", ["manifest.json", "trace.jsonl"])
    def test_links_out_of_the_volume_are_refused(self, tmp_path: Path, load: CaptureSource, name: str) -> None:
        outside = tmp_path / "outside"
        outside.mkdir()
        (tmp_path / "claim").mkdir()
        (tmp_path / "load" / name).rename(outside / name)
        (tmp_path / "load" / name).symlink_to(outside / name)
        (tmp_path / "load").rename(tmp_path / "claim" / "load")
        source = source_of(tmp_path / "claim" / "load", load.dataset)
        assert refusal(tmp_path / "rows", source).reason == "UnreadableCapture"

    def test_pipes_are_not_opened(self, tmp_path: Path, load: CaptureSource) -> None:
        (tmp_path / "load/manifest.json").unlink()
        os.mkfifo(tmp_path / "load/manifest.json")
        assert refusal(tmp_path / "rows", load).reason == "UnreadableCapture"
        (tmp_path / "load/trace.jsonl").unlink()
        os.mkfifo(tmp_path / "load/trace.jsonl")
        assert refusal(tmp_path / "rows", load).reason == "UnreadableCapture"

    def test_malformed_trace_is_refused(self, tmp_path: Path, load: CaptureSource) -> None:
        with (tmp_path / "load/trace.jsonl").open("a") as trace:
            trace.write('{"prompt_tokens": -1}\n')
        assert refusal(tmp_path / "rows", load).reason == "UnreadableCapture"

    def test_links_in_the_folder_of_rows_are_replaced(self, tmp_path: Path, load: CaptureSource) -> None:
        out, victim = tmp_path / "rows", tmp_path / "victim"
        out.mkdir()
        victim.write_text("kept")
        for name in ("training.jsonl", "training.jsonl.part", "training.jsonl.part.scratch", "rows.json"):
            (out / name).symlink_to(victim)
        written(out, load)
        assert victim.read_text() == "kept"

    def test_rows_are_private(self, tmp_path: Path, load: CaptureSource) -> None:
        written(tmp_path / "rows", load)
        modes = {each.name: each.stat().st_mode & 0o777 for each in (tmp_path / "rows").iterdir()}
        assert modes == dict.fromkeys(("training.jsonl", "holdout.jsonl", "rows.json"), 0o600)


def test_capture_without_usable_request_is_refused(tmp_path: Path, dataset: Path) -> None:
    folder = write_load(tmp_path / "load", dataset, 9, answer_ids=False)
    assert refusal(tmp_path / "rows", source_of(folder, dataset)).reason == "NoTokenIds"
    write_capture(tmp_path / "empty", [], manifest_of(workload=workload_of(9)))
    assert refusal(tmp_path / "rows", source_of(tmp_path / "empty", dataset)).reason == "UnreadableCapture"


def test_rows_of_equal_input_are_equal(tmp_path: Path, load: CaptureSource) -> None:
    for name in ("one", "two"):
        written(tmp_path / name, load)
    for name in ("training.jsonl", "holdout.jsonl", "rows.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
