"""A capture is made, played back, asked again as it was asked, and recorded once more: the same figures come out."""

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from specdecode_operator.capture.trace_reader import RecordedRequest, read_recording
from specdecode_operator.cli.main import app
from tests.support.replay_process import replaying


def specdecode(*arguments: str | Path) -> str:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, [*map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.stdout


def by_id(folder: Path) -> dict[str, RecordedRequest]:
    return {each.request_id or "": each for each in read_recording(folder).requests}


def test_a_replay_that_is_asked_as_the_engine_was_records_what_the_engine_did(tmp_path: Path) -> None:
    made, replayed = tmp_path / "made", tmp_path / "replayed"
    load = ("--arrivals", "multiturn:4x3", "--requests", "24", "--prompt-tokens", "20-60", "--output-tokens", "8-24")
    specdecode("replay", "synth", "-o", made, *load, "--step-ms", "2", "--seed", "5")
    with replaying(made, "--match", "request-id", "--unmatched", "refuse", "--record", replayed) as url:
        driven = json.loads(specdecode("replay", "drive", made, "--url", url, "-o", "json"))
    assert (driven["outcomes"], driven["other_lengths"]) == ({"completed": 24}, 0)
    assert driven["driven"]["output_tokens"] == driven["recorded"]["output_tokens"]

    before, after = by_id(made), by_id(replayed)
    assert after.keys() == before.keys()
    for name, each in before.items():
        assert after[name].prompt_tokens == each.prompt_tokens
        assert list(after[name].chunk_tokens) == list(each.chunk_tokens)
        # A busy machine makes it later, and nothing earlier.
        assert after[name].ttft_ms + sum(after[name].gaps_ms) >= each.ttft_ms + sum(each.gaps_ms) - 1

    compared: dict[str, Any] = json.loads(specdecode("replay", "compare", made, replayed, "-o", "json"))
    figures = {each["name"]: each for each in compared["figures"]}
    assert all(
        found["difference"] == 0 for name, found in figures.items() if name.startswith(("bursts of", "tokens per"))
    )
    assert figures["acceptance"]["difference"] == 0
