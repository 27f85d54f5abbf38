"""Run the contract and oracle tests for one version."""

import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree as ET

from devcluster.host.paths import REPOSITORY
from specdecode_operator.vllm.versions import release
from tests.engine.new_version.profile import TABLE

TESTS = tuple(
    f"tests/engine/test_{name}.py"
    for name in ("contract", "refusals", "refused_specs", "recorder_versions", "sizing_oracle", "kv_oracle")
)
"""What is asked of a version that need not serve."""


@dataclass(frozen=True)
class Outcome:
    """What the tests said."""

    summary: str
    failures: tuple[tuple[str, str], ...]  # test, and the first line of what it says


def run(version: str, folder: Path) -> Outcome:
    """Run every test that is asked of a version; their output is left in a folder."""
    report = folder / "tests.xml"
    report.unlink(missing_ok=True)
    # The newest is asked where no version is named; those before it where theirs is.
    chosen = ("-m", "not long") if version == newest() else ("-m", "", "-k", version)
    command = [sys.executable, "-m", "pytest", "-q", *chosen, *TESTS]
    with (folder / "tests.txt").open("w", encoding="utf-8") as output:
        done = subprocess.run(
            [*command, "--color=no", f"--junitxml={report}"], cwd=REPOSITORY, stdout=output, stderr=output, check=False
        )
    if not report.exists():
        return Outcome(f"they did not run (exit status {done.returncode}): see tests.txt", ())
    return read(report)


def newest() -> str:
    """Return the newest version that has its files, be they new."""
    return max((path.stem for path in (TABLE / "flags").glob("*.json")), key=release)


def read(report: Path) -> Outcome:
    """Return what a report of pytest says, in JUnit's form."""
    counted: Counter[str] = Counter()
    failures = []
    for case in ET.parse(report).iter("testcase"):
        said = next((each for each in case if each.tag in ("failure", "error", "skipped")), None)
        counted["passed" if said is None else "skipped" if said.tag == "skipped" else "failed"] += 1
        if said is not None and said.tag != "skipped":
            where = case.get("classname", "").rpartition(".")[2]
            failures.append((f"{where}.py {case.get('name')}", said.get("message") or said.tag))
    return Outcome(", ".join(f"{counted[word]} {word}" for word in ("passed", "failed", "skipped")), tuple(failures))
