"""Every code block of the documents that can run is run or checked, and what is left out has a reason."""

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from specdecode_operator.cli.main import app
from tests.support.code_blocks import PAIR, Block, Check, blocks, blocks_for, check_of, json_of, objects_with
from tests.support.documented_commands import NOT_HERE, NOT_RUN, PAGES
from tests.support.page_run import run_page, same_output

OFFLINE = sorted(page for page, how in PAGES.items() if not how.cluster)
ALLOWED = {"docs/how-to/multi-node.md": ["--allow-pod-template=capabilities.IPC_LOCK"]}
"""What the page says that the operator must be told to allow."""


def test_somebody_has_said_of_each_block_what_becomes_of_it() -> None:
    unknown = [f"{block} ```{block.language}: {block.first_line}" for block in blocks() if check_of(block) is None]
    assert unknown == [], (
        "commands stand in `sh` blocks, with output in `console` ones; a page whose commands run has a line in PAGES "
        "of tests/support/documented_commands.py, and a block that cannot run one in NOT_RUN, with the reason"
    )


def test_no_line_of_the_tables_is_left_over() -> None:
    run = blocks_for(Check.RUN_OFFLINE, Check.RUN_ON_API_SERVER)
    assert set(PAGES) == {block.document for block in run}
    for page, how in PAGES.items():
        texts = [block.text for block in run if block.document == page]
        for start in (*how.before, *how.exits):
            assert any(text.startswith(start) for text in texts), f"{page} has no block that begins so: {start}"
        for name in how.names:
            assert any(name in text for text in texts), f"{page}: {name}"
    for page, start in NOT_RUN:
        found = [block for block in blocks() if block.document == page and block.text.startswith(start)]
        assert found, f"{page} has no block that begins so: {start}"
    assert {name for name in NOT_HERE if not any(name in block.text for block in run)} == set()


@pytest.mark.parametrize("page", OFFLINE)
def test_commands_that_need_no_cluster_run(page: str, tmp_path: Path) -> None:
    printed = run_page(page, tmp_path / "reader")
    if PAGES[page].shows_output:
        everything = "".join(printed.values())
        shown = [block for block in blocks_for(Check.SHOWN) if block.document == page]
        assert shown
        for block in shown:
            assert same_output(block.text, everything), f"{block}: that is not what comes out now"


@pytest.mark.parametrize("block", blocks_for(Check.OUR_OBJECTS, Check.FRAGMENT), ids=str)
def test_lint_has_nothing_against_what_is_shown(block: Block, tmp_path: Path) -> None:
    whole = check_of(block) is Check.OUR_OBJECTS
    said = [_lint(text, tmp_path / "shown.yaml", block) for text in ([block.text] if whole else objects_with(block))]
    assert None in said, "".join(filter(None, said))


def _lint(text: str, file: Path, block: Block) -> str | None:
    """What lint says against objects, beside the pair that captures are of; None where it says nothing."""
    file.write_text(text)
    own = any(body["metadata"]["name"] == "llama-70b" for body in yaml.safe_load_all(text))
    files = [f"--file={each}" for each in ([file] if own else [file, PAIR])]
    answer = CliRunner().invoke(app, ["lint", *files, *ALLOWED.get(block.document, ())])
    return answer.output if answer.exit_code else None


@pytest.mark.parametrize("block", blocks_for(Check.JSON), ids=str)
def test_json_is_json(block: Block) -> None:
    assert json_of(block)
