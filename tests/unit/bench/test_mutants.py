"""`./just mutants` on one small file, the whole way: copy, change, and run the tests."""

import re
import subprocess
import sys
from pathlib import Path

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
