"""What the tests of the command line share: the command, and objects in files."""

import os
import sys
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import Result
from typer.testing import CliRunner

from specdecode_operator.cli.main import app
from tests.support.objects import HUB_TOKEN, pair_70b
from tests.unit.cli.capture.conftest import Cluster

Specdecode = Callable[..., Result]
WriteObject = Callable[..., Path]

FAKE = Path(__file__).parents[2] / "support" / "fake_kubectl.py"
PAIR: dict[str, Any] = pair_70b(models=HUB_TOKEN)
"""The article's case: Llama-3.1-70B with an 8B draft on two GPUs."""


@pytest.fixture
def specdecode() -> Specdecode:
    """Return the command: its arguments in, what it printed and its exit code out."""

    def run(*arguments: object, stdin: str | None = None) -> Result:
        return CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin)

    return run


def manifest(name: str, **spec: Any) -> dict[str, Any]:
    """Return the article's pair as an object, with parts of its spec replaced."""
    return {
        "apiVersion": "specdecode.io/v1alpha1",
        "kind": "SpecDecodeDeployment",
        "metadata": {"name": name},
        "spec": {**deepcopy(PAIR), **spec},
    }


@pytest.fixture
def write(tmp_path: Path) -> WriteObject:
    """Write objects, or text as it is, into one file of the test's folder."""

    def write_file(name: str, *documents: dict[str, Any] | str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        texts = [each if isinstance(each, str) else yaml.safe_dump(each) for each in documents]
        path.write_text("\n---\n".join(texts))
        return path

    return write_file


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """Return a cluster that a fake kubectl answers for."""
    program = tmp_path / "bin" / "kubectl"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\n" + FAKE.read_text())
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_CLUSTER", str(tmp_path))
    return Cluster(tmp_path)
