"""The public start-up logs: where each was published is told, or that it is not known."""

import json
import re
from pathlib import Path

FOLDER = Path(__file__).parent / "groundtruth"
RUNS = [json.loads(line) for file in sorted(FOLDER.glob("*.jsonl")) for line in file.read_text().splitlines()]


def has_source(run: dict[str, str | None]) -> bool:
    if run["source_url"] is None:
        return (run["source"] or "").endswith("its address is not known")
    return re.fullmatch(r"https://\S+", run["source_url"]) is not None


def test_every_run_has_an_address_or_says_that_it_has_none() -> None:
    assert len({run["id"] for run in RUNS}) == len(RUNS) > 0
    assert [run["id"] for run in RUNS if not has_source(run)] == []


def test_the_readme_counts_those_without_an_address() -> None:
    without = sum(run["source_url"] is None for run in RUNS)
    assert without == 9 + 7
    readme = (FOLDER / "README.md").read_text()
    assert "Nine lines of `cases.jsonl` have no `source_url`, and seven of the\nfiles that were added later" in readme
