"""`specdecode capture export`."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from specdecode_operator.cli.main import app
from tests.support.traces import META, record, write_trace
from tests.support.training_captures import read_rows, write_live

CAPTURE = Path("tests/data/captures/ngram")


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["capture", "export", *map(str, arguments)])


def test_export_reports_written_requests_and_omitted_data(tmp_path: Path) -> None:
    out = tmp_path / "load.jsonl"
    answer = run(CAPTURE, "--format", "vllm-bench", "--out", out)
    assert answer.exit_code == 0, answer.output
    requests = len(out.read_text().splitlines())
    *left_out, written = answer.stdout.splitlines()
    assert written == f"{out}: {requests} requests, 32 tokens per hash id"
    assert left_out
    assert all(each.startswith("left out: ") for each in left_out)


def test_an_existing_file_is_replaced_only_with_force(tmp_path: Path) -> None:
    out = tmp_path / "load.jsonl"
    out.write_text("mine")
    arguments = (CAPTURE, "--format", "aiperf", "--out", out)
    answer = run(*arguments)
    assert (answer.exit_code, out.read_text()) == (2, "mine")
    assert "--force" in answer.stderr
    assert run(*arguments, "--force").exit_code == 0
    assert json.loads(out.read_text().splitlines()[0])["timestamp"] == 0


@pytest.mark.parametrize("force", [[], ["--force"]])
def test_a_folder_is_never_replaced(tmp_path: Path, force: list[str]) -> None:
    answer = run(CAPTURE, "--format", "aiperf", "--out", tmp_path, *force)
    assert answer.exit_code == 2
    assert "is not a file" in answer.stderr


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--format", "mooncake", "--dataset", "."], "--dataset: only used with --format speculators"),
        (["--format", "aiperf", "--tokenizer-url", "http://x"], "--tokenizer-url: only used with"),
        (["--format", "mooncake", "--holdout-percent", "10"], "--holdout-percent: only used with"),
        (["--format", "speculators", "--holdout-percent", "51"], "--holdout-percent"),
        (["--format", "speculators"], "random tokens"),
        (["--format", "mooncake", "--phase", "none"], "--phase: none: is not a phase"),
    ],
)
def test_a_wrong_option_is_refused(tmp_path: Path, arguments: list[str], why: str) -> None:
    answer = run(CAPTURE, *arguments, "--out", tmp_path / "out.jsonl")
    assert answer.exit_code == 2
    assert why in answer.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("alone", ["--dataset", "--tokenizer-url"])
def test_dataset_and_tokenizer_options_require_each_other(tmp_path: Path, alone: str) -> None:
    write_trace(tmp_path / "trace.jsonl", [record()], META)
    answer = run(tmp_path, "--format", "speculators", "--out", tmp_path / "out.jsonl", alone, ".")
    assert answer.exit_code == 2
    assert "set both" in answer.stderr


def test_held_out_prompts_go_to_a_second_file_that_is_named(tmp_path: Path) -> None:
    live = write_live(tmp_path / "live", [[5, 6, number] for number in range(40)])
    out, held_out = tmp_path / "rows.jsonl", tmp_path / "rows.holdout.jsonl"
    arguments = (live, "--format", "speculators", "--out", out, "--holdout-percent", "20")
    answer = run(*arguments)
    assert answer.exit_code == 0, answer.output
    rows, prompts = len(read_rows(out)), len(read_rows(held_out))
    assert rows + prompts == 40
    assert answer.stdout.splitlines()[-2:] == [f"{out}: {rows} requests", f"{held_out}: {prompts} held-out prompts"]
    out.unlink()
    assert run(*arguments).exit_code == 2
    assert not out.exists()
    assert run(*arguments, "--force", "--seed", "1").exit_code == 0


def test_missing_capture_is_reported(tmp_path: Path) -> None:
    answer = run(tmp_path / "none", "--format", "mooncake", "--out", tmp_path / "out.jsonl")
    assert answer.exit_code == 2
    assert "holds no trace.jsonl" in answer.stderr
