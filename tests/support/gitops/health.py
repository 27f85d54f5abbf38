"""What GitOps tools say of objects: Argo CD by health.lua, Flux by the expressions of the example, and kstatus."""

import json
import subprocess
from collections.abc import Sequence
from typing import Any

import yaml

from tests.support.golden import EXAMPLES
from tests.support.kubectl import program

LUA = EXAMPLES / "argo-cd/health.lua"
SAID = {
    "wait": {"kstatus": "InProgress", "argo": "Progressing", "flux": "InProgress"},
    "good": {"kstatus": "Current", "argo": "Healthy", "flux": "Current"},
    "bad": {"kstatus": "Failed", "argo": "Degraded", "flux": "Failed"},
}
"""All three, for what is to be waited for, is well, and takes a person."""


def flux_checks() -> dict[str, Any]:
    """Return the expressions of the example, by kind."""
    (kustomization,) = (
        each
        for each in yaml.safe_load_all((EXAMPLES / "flux/pairs.yaml").read_text())
        if "healthCheckExprs" in each.get("spec", {})
    )
    return {each["kind"]: each for each in kustomization["spec"]["healthCheckExprs"]}


def ask(lua: str, check: dict[str, Any], objects: Sequence[Any]) -> list[dict[str, Any]]:
    """Return what each tool says of each object."""
    question = {"lua": lua, "cel": check, "objects": objects}
    answer = subprocess.run(
        [program("health")], input=json.dumps(question), capture_output=True, text=True, check=False
    )
    assert answer.returncode == 0, answer.stderr
    found: list[dict[str, Any]] = json.loads(answer.stdout)
    return found


def told(body: dict[str, Any]) -> str:
    """Return in one word what all tools say of an object: wait, good or bad; else what each says."""
    (said,) = ask(LUA.read_text(), flux_checks()[body["kind"]], [body])
    found = {**said, "argo": said["argo"]["status"]}
    return next((word for word, each in SAID.items() if each == found), json.dumps(found))
