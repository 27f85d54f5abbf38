"""`specdecode replay synth` on a command line."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from specdecode_operator.cli.main import app


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["replay", "synth", *arguments])
    return result.exit_code, " ".join(result.output.split())


def test_a_folder_is_made_that_validates(tmp_path: Path) -> None:
    code, text = run(
        "-o", str(tmp_path / "made"), "--requests", "20", "--arrivals", "closed:2", "--arrivals", "burst:5x1"
    )
    assert (code, text.split(": ")[1].split(" in ")[0]) == (0, "40 requests")
    validated = CliRunner().invoke(app, ["capture", "validate", str(tmp_path / "made")])
    assert validated.exit_code == 0, validated.output
    assert [each.name for each in tmp_path.iterdir()] == ["made"]


def test_nothing_is_drafted_without_acceptance(tmp_path: Path) -> None:
    code, _ = run("-o", str(tmp_path / "made"), "--requests", "3", "--acceptance", "none")
    assert code == 0
    assert "itl_tokens" not in (tmp_path / "made" / "trace.jsonl").read_text()
    assert "speculative" not in (tmp_path / "made" / "trace.jsonl").read_text()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--acceptance", "0.5,0.6"], "write shares from 1 to 0 that do not rise"),
        (["--acceptance", "much"], "write shares from 1 to 0 that do not rise"),
        (["--arrivals", "often"], "often: write constant:4"),
        (["--prompt-tokens", "long"], "long: write 512, 100-900"),
        (["--requests", "3", "--duration", "3"], "give --requests or --duration, not both"),
        (["--num-gpu-blocks", "2"], "no request fits into so many: give more"),
    ],
)
def test_what_cannot_be_made_is_refused_and_leaves_nothing(tmp_path: Path, arguments: list[str], says: str) -> None:
    code, text = run("-o", str(tmp_path / "made"), *arguments)
    assert code == 2
    assert says in text.replace("│ ", "").replace(" │", "")
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_already_stays(tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "mine").write_text("x")
    code, text = run("-o", str(tmp_path / "made"), "--requests", "3")
    assert code == 2
    assert "is there already: name a new folder" in text.replace("│ ", "").replace(" │", "")
    assert (tmp_path / "made" / "mine").read_text() == "x"
