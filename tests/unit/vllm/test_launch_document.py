"""docs/reference/launch.md and the table of arguments say what the code does."""

import re
from pathlib import Path

from bench.documents.launch_tables import with_version_rows
from specdecode_operator.vllm import profiles
from specdecode_operator.vllm.arguments import ARGUMENTS
from specdecode_operator.vllm.profiles import KNOWN_VERSIONS, find_profile
from specdecode_operator.vllm.speculative_config import DRAFT_HEAD_KEY, SPECULATIVE_KEYS, XPRESS_KEY

REFERENCE = Path(__file__).parents[3] / "docs/reference"
DOCUMENT, FIELDS = REFERENCE / "launch.md", REFERENCE / "deployment-fields.md"
ENGINE = Path(profiles.__file__).parent


def rows(columns: str, document: Path = DOCUMENT) -> list[list[str]]:
    """Cells of the table whose first columns have these names."""
    (table,) = re.findall(rf"^\| {columns} \|.*\n\| --- .*\n((?:\|.*\n)+)", document.read_text(), re.MULTILINE)
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines()]


def test_tables_are_as_generated() -> None:
    assert with_version_rows(DOCUMENT.read_text()) == DOCUMENT.read_text(), "stale: run ./just docs"


def test_every_argument_and_key_has_a_row() -> None:
    becomes = {row[1] for row in rows(r"field \| becomes", FIELDS)}
    for argument in ARGUMENTS:
        assert f"`{argument.flag}`" in becomes or argument.flag == "--speculative-config"
    for key in SPECULATIVE_KEYS:
        assert f"`{key.key}` in `--speculative-config`" in becomes


def test_every_key_is_one_that_every_version_has_or_that_is_refused_without_it() -> None:
    keys = {key.key for key in SPECULATIVE_KEYS}
    assert keys <= find_profile(KNOWN_VERSIONS[-1]).speculative_keys
    for version in KNOWN_VERSIONS:
        # test_methods.py shows that older versions are not told.
        assert keys - find_profile(version).speculative_keys <= {DRAFT_HEAD_KEY, XPRESS_KEY}


def test_every_version_has_a_row() -> None:
    assert [row[0] for row in rows("vLLM")] == list(reversed(KNOWN_VERSIONS))


def test_the_source_of_a_rule_told_early_is_named_in_the_code() -> None:
    """That the rule holds is seen in tests/unit/deployment/test_validation.py."""
    package = ENGINE.parent
    rules = (path for room in ("vllm", "deployment", "sizing") for path in package.glob(f"{room}/*.py"))
    told = (*rules, *package.glob("vllm/data/*.json"))
    code = "\n".join(path.read_text() for path in told)
    for *_, source in rows("told of"):
        assert source.strip("`") in code, source
