"""`-o markdown`: what a CI job shows of `lint` and `plan`, whatever others wrote into the objects."""

import json
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

from specdecode_operator.cli.outputs import code
from tests.support.golden import EXAMPLES
from tests.unit.cli.conftest import Specdecode, WriteObject, manifest

HARMLESS = {"text", "code_inline", "strong_open", "strong_close", "softbreak"}
EVIL = (
    "`|\\|\n# x\n<img src=x onerror=y> ![p](https://e.example/p) @everyone [a](javascript:x) `` www.e.example \x1b[2J"
)
CASES = [EVIL, "`", "``", "a`", "", " ", "\\`", "|", "\\|", "a\\", "```\nb"]


def inline(markdown: str) -> list[Token]:
    """What stands in the paragraphs, lists and tables of a text, as a reader with tables and links takes it."""
    parser = MarkdownIt("commonmark").enable(["table"])
    return [child for token in parser.parse(markdown) for child in token.children or []]


def row_widths(markdown: str) -> set[int]:
    """How many cells the rows of a table have."""
    widths, width = set(), 0
    for token in MarkdownIt("commonmark").enable(["table"]).parse(markdown):
        if token.type in ("td_open", "th_open"):
            width += 1
        elif token.type == "tr_close":
            widths.add(width)
            width = 0
    return widths


@pytest.mark.parametrize("text", CASES)
def test_any_text_is_one_span_of_code(text: str) -> None:
    (found,) = inline(f"- {code(text)}")
    assert found.type == "code_inline"
    assert found.content.isprintable()


def test_a_plan_has_a_row_for_each_place(specdecode: Specdecode) -> None:
    result = specdecode("plan", EXAMPLES / "llama-70b.yaml", "-o", "markdown")
    heading, _, *lines = result.stdout.splitlines()
    assert (result.exit_code, heading) == (0, "### specdecode plan: Fits")
    assert [each.split("|")[2:4] for each in lines[2:4]] == [
        [" `2 x H200, TP 2` ", " `Fits` "],
        [" `2 x H100, TP 2` ", " `DoesNotFit` "],
    ]
    assert row_widths(result.stdout) == {6}


def test_a_matrix_has_every_split(specdecode: Specdecode) -> None:
    best, every = (
        specdecode("plan", EXAMPLES / "qwen3-8b-eagle3.yaml", "-o", "markdown", *option).stdout
        for option in ((), ("--matrix",))
    )
    assert "TP 4" in every
    assert "TP 4" not in best


def test_what_does_not_fit_says_what_helps(specdecode: Specdecode, write: WriteObject) -> None:
    path = write("a.yaml", manifest("a", parallelism={"tensor": 1}, accelerator={"products": ["NVIDIA-H200"]}))
    result = specdecode("plan", path, "-o", "markdown")
    assert result.exit_code == 4
    reason, *fixes = (each for each in result.stdout.splitlines() if each.lstrip().startswith("- "))
    assert reason.startswith(f"- **DoesNotFit** `a` (`{path}, document 1`): `1 x NVIDIA-H200 per replica")
    assert any(each.startswith("  - `1 x H200, TP 1`: `parallelism.tensor: 2`, then `") for each in fixes)


def test_findings_begin_with_what_is_refused(specdecode: Specdecode, write: WriteObject) -> None:
    doubtful = write("a.yaml", manifest("a", target={"model": "nobody/knows"}))
    wrong = write("b.yaml", manifest("b", target={}))
    result = specdecode("lint", doubtful, wrong, "-o", "markdown")
    assert result.exit_code == 2
    first, *_, last = (each for each in result.stdout.splitlines() if each.startswith("- "))
    assert first.startswith(f"- **error** `{wrong}:")
    assert last.startswith(f"- **warning** `{doubtful}:")
    assert "objects: 2, errors: 1, warnings: 1" in result.stdout.splitlines()


def test_a_clean_file_says_so(specdecode: Specdecode) -> None:
    result = specdecode("lint", EXAMPLES / "llama-70b.yaml", "-o", "markdown")
    assert result.stdout == "### specdecode lint\n\nobjects: 1, errors: 0, warnings: 0\n"


@pytest.mark.parametrize("command", ["lint", "plan"])
@pytest.mark.parametrize(
    "change",
    [{"spec": {EVIL: 1}}, {"metadata": {"name": EVIL}}, {"metadata": {"name": "a", "namespace": EVIL}}],
    ids=str,
)
def test_what_others_wrote_is_shown_and_not_done(
    specdecode: Specdecode, write: WriteObject, command: str, change: dict[str, object]
) -> None:
    path = write("a.yaml", json.dumps({**manifest("a"), **change}))
    shown = specdecode(command, path, "-o", "markdown").stdout
    assert shown.replace("\n", "").isprintable()
    assert {each.type for each in inline(shown)} <= HARMLESS
    assert all("onerror" not in each.content for each in inline(shown) if each.type == "text")
    assert row_widths(shown) <= {6}


def test_a_file_that_cannot_be_read_is_told(specdecode: Specdecode, tmp_path: Path) -> None:
    for command in ("lint", "plan"):
        result = specdecode(command, tmp_path / f"{EVIL.replace('/', '')}.yaml", "-o", "markdown")
        assert result.exit_code == 2
        assert {each.type for each in inline(result.stdout)} <= HARMLESS


def test_a_long_list_is_cut(specdecode: Specdecode, write: WriteObject) -> None:
    path = write("a.yaml", *(manifest(f"a{number}", target={}) for number in range(130)))
    lines = specdecode("lint", path, "-o", "markdown").stdout.splitlines()
    assert sum(each.startswith("- ") for each in lines) == 100
    assert lines[-1] == "and 30 more"
