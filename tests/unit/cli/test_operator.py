"""What the command line of the operator refuses, before anything is started."""

from pathlib import Path

import pytest
import yaml

from specdecode_operator.cluster.nodes import NodeFacts
from specdecode_operator.handlers import main
from specdecode_operator.handlers.settings import Settings
from tests.support.objects import H100
from tests.unit.cli.conftest import Specdecode

NODE = {
    "kind": "Node",
    "metadata": {"name": "n", "labels": {"nvidia.com/gpu.product": H100}},
    "status": {"allocatable": {"nvidia.com/gpu": "8"}},
}


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--namespace", "a,b"], "a,b: must be the name of one namespace; repeat --namespace for several"),
        (["--namespace", "../kube-system"], "../kube-system: must be the name of one namespace"),
        (["--nodes", "nodes.yaml"], "requires --namespace"),
        (["--namespace", "team", "--nodes", "missing.yaml"], "missing.yaml"),
    ],
)
def test_namespaces_and_nodes_that_cannot_be_meant(specdecode: Specdecode, options: list[str], told: str) -> None:
    done = specdecode("operator", *options)
    assert done.exit_code == 2
    said = " ".join(done.stderr.replace("│", " ").split())
    assert told in said


def test_named_namespaces_are_served_with_the_nodes_of_a_file(
    specdecode: Specdecode, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started: list[Settings] = []
    monkeypatch.setattr(main, "run_operator", lambda settings, **_: started.append(settings))
    (tmp_path / "nodes.yaml").write_text(yaml.safe_dump({"kind": "List", "apiVersion": "v1", "items": [NODE]}))
    options = ("--namespace=a", "--namespace=b", "--namespace=a", f"--nodes={tmp_path / 'nodes.yaml'}")
    assert specdecode("operator", *options).exit_code == 0
    assert specdecode("operator").exit_code == 0
    assert [(each.namespaces, each.nodes) for each in started] == [(("a", "b"), (NodeFacts("n", H100, 8),)), ((), None)]
