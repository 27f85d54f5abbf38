"""What the operator makes of seven examples is what is checked in."""

import difflib
import os
import subprocess
import sys

import pytest

from tests.support.golden import GOLDEN, KEPT, ROOT, golden_texts, rendered_examples


@pytest.fixture(scope="module")
def fresh() -> dict[str, str]:
    return golden_texts()


def test_every_example_renders_objects() -> None:
    assert [name for name, objects in rendered_examples().items() if not objects] == []


def test_only_rendered_examples_are_checked_in(fresh: dict[str, str]) -> None:
    assert {path.name for path in GOLDEN.glob("*.yaml")} == set(fresh), "renew them: ./just golden"


@pytest.mark.parametrize("name", [f"{name}.yaml" for name in KEPT])
def test_rendered_objects_match_the_golden_file(fresh: dict[str, str], name: str) -> None:
    known = (GOLDEN / name).read_text() if (GOLDEN / name).exists() else ""
    difference = difflib.unified_diff(
        known.splitlines(), fresh[name].splitlines(), "checked in", "made now", lineterm="", n=6
    )
    assert "\n".join(difference) == "", "if it is meant so, renew it: ./just golden"


PRINT_ALL = """
import json
from specdecode_operator.api.crds import crds
from tests.support.golden import rendered_examples, statuses
print(json.dumps([rendered_examples(), statuses(), crds()], indent=1))
"""


def test_rendered_objects_do_not_depend_on_the_hash_seed() -> None:
    """Or each restart would write all of them anew, and pods would start anew: sets have an order for each process."""
    path = os.pathsep.join(sys.path)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PRINT_ALL],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for seed in ("1", "2")
    ]
    one, other = (process.communicate()[0].splitlines() for process in processes)
    assert [process.returncode for process in processes] == [0, 0]
    assert one
    assert "\n".join(difflib.unified_diff(one, other, "one", "another", lineterm="", n=2)) == ""
