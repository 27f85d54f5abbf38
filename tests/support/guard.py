"""The chart's guard: a policy that holds the operator's account to what the operator does."""

import json
from functools import cache
from typing import Any

import yaml

from devcluster import chart
from tests.support.kubectl import Kubectl
from tests.support.operator_process import USER
from tests.support.waiting import eventually


def guard(*options: str) -> list[dict[str, Any]]:
    """Return the policy and its binding, as the chart makes them."""
    return [each for each in yaml.safe_load_all(_rendered(*options)) if each]


@cache
def _rendered(*options: str) -> str:
    """Run Helm once per set of options, because most tests use the same ones."""
    return chart.template("--set=operatorGuard.enabled=true", "--show-only=templates/operator-guard.yaml", *options)


def put_guard_in_force(kubectl: Kubectl) -> None:
    """Install it, and wait until the API server asks it."""
    kubectl.must("apply", "--server-side", "--filename=-", stdin=yaml.safe_dump_all(guard()))
    not_ours = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "not-ours"}}
    eventually(lambda: "its own children" in refusal(kubectl, not_ours), "the guard is in force")


def refusal(kubectl: Kubectl, *bodies: dict[str, Any]) -> str:
    """What whoever has the operator's token is told about what they apply; empty where all of it goes through."""
    options = ("apply", "--server-side", "--force-conflicts", "--dry-run=server", "--filename=-", f"--as={USER}")
    # JSON in YAML: "n" stays a text, and what is wrong with one object keeps no other from being asked about.
    answer = kubectl(*options, stdin="".join(f"---\n{json.dumps(body)}\n" for body in bodies))
    return answer.stderr if answer.returncode else ""
