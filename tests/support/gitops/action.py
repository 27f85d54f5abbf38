"""The GitHub Action of this repository, run as a runner does."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.support.golden import EXAMPLES, ROOT

ACTION = yaml.safe_load((ROOT / "action.yml").read_text())
INSTALL, CHECK = ACTION["runs"]["steps"]


@dataclass(frozen=True)
class Job:
    """What came of a run."""

    code: int
    summary: str
    folder: Path

    @property
    def refused(self) -> list[str]:
        """Rules of the findings for code scanning that are errors."""
        return [each["ruleId"] for each in self.errors]

    @property
    def said(self) -> list[str]:
        """What those findings say."""
        return [each["message"]["text"] for each in self.errors]

    @property
    def errors(self) -> list[dict[str, Any]]:
        """Findings for code scanning that are errors."""
        (run,) = json.loads((self.folder / "specdecode.sarif").read_text())["runs"]
        return [each for each in run["results"] if each["level"] == "error"]


def run_action(folder: Path, **given: str) -> Job:
    """Run the step that checks, in a checkout."""
    summary, output = folder / ".summary", folder / ".output"
    files = {"GITHUB_STEP_SUMMARY": str(summary), "GITHUB_OUTPUT": str(output), "RUNNER_TEMP": str(folder)}
    code = shell(CHECK["run"], folder, **files, **_environment(CHECK, _inputs(**given)))
    said = int(output.read_text().removeprefix("exit-code="))
    assert code == (0 if said == 5 and given.get("allow-unknown") == "true" else said)
    return Job(code, summary.read_text(), folder)


def example_inputs() -> dict[str, str]:
    """Return the inputs that the example of a workflow gives."""
    workflow = yaml.safe_load((EXAMPLES / "ci/github.yml").read_text())
    (step,) = (each for each in workflow["jobs"]["check"]["steps"] if "specdecode-operator" in each["uses"])
    found: dict[str, str] = step["with"]
    return found


def shell(script: str, folder: Path, **environment: str) -> int:
    """Run a step of a job; return its exit code."""
    variables = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HOME": str(folder), **environment}
    command = [shutil.which("bash") or "bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script]
    return subprocess.run(command, cwd=folder, env=variables, check=False).returncode


def _inputs(**given: str) -> dict[str, str]:
    return {name: each["default"] for name, each in ACTION["inputs"].items()} | given


def _environment(step: dict[str, Any], given: dict[str, str]) -> dict[str, str]:
    """The variables of a step, with what GitHub puts into them."""
    known = {f"inputs.{name}": value for name, value in given.items()} | {"github.action_path": str(ROOT)}
    return {name: re.sub(r"\$\{\{ (\S+) \}\}", lambda each: known[each[1]], text) for name, text in step["env"].items()}
