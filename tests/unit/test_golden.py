"""What the operator makes of seven examples is what is checked in."""

import difflib
import json
import os
import subprocess
import sys

import pytest

from specdecode_operator.api.crds import crds
from tests.support.golden import GOLDEN, KEPT, ROOT, golden_texts, rendered_examples, statuses


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
    # The seed of this process is random, unless the variable is set.
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", PRINT_ALL]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, cwd=ROOT, check=True)
    one = json.dumps([rendered_examples(), statuses(), crds()], indent=1).splitlines()
    assert "\n".join(difflib.unified_diff(one, done.stdout.splitlines(), "one", "another", lineterm="", n=2)) == ""
