"""`./just mutants` on one small file, the whole way: copy, change, and run the tests."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench import mutants
from bench.mutants import Mutant

ROOT = Path(__file__).parents[3]


def test_mutants_of_a_file_are_made_and_tested() -> None:
    arguments = [
        "operator/capture/files/accounting.py",
        "--tests=tests/unit/capture/files/test_validate.py",
        # It reads action.yml, a file at the top of the repository that the copy once lacked.
        "--tests=tests/unit/test_workflows.py",
        "--sample=2",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "bench.mutants", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    row = re.search(r"^capture accounting +(\d+) +(\d+) +(\d+) +(\d+) +([\d.]+)%$", done.stdout, re.MULTILINE)
    assert row is not None, done.stdout + done.stderr
    made, killed, equivalent, survived = map(int, row.groups()[:4])
    assert made == 2
    assert killed + equivalent + survived == made


def _fails_for_the_queue(files: list[Path], tests: list[str], sample: int | None, seed: str) -> list[Mutant]:
    if files == [Path("handlers/queue.py")]:
        raise SystemExit(1)  # as mutmut ends
    return [Mutant("f", "killed")]


def test_an_area_that_fails_leaves_the_shares_of_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ("deployment/rollout/readiness.py", "handlers/queue.py", "capture/gpu_sharing.py")
    monkeypatch.setattr(mutants, "mutants_of", _fails_for_the_queue)
    monkeypatch.setattr(sys, "argv", ["mutants", *(str(ROOT / "operator" / file) for file in files)])
    with pytest.raises(SystemExit) as ended:
        mutants.main()
    assert ended.value.code
    rows = re.findall(r"^(readiness|queue|preemption) +(1|not measured)", capsys.readouterr().out, re.MULTILINE)
    assert rows == [("readiness", "1"), ("queue", "not measured"), ("preemption", "1")]
