"""What the command line of the operator refuses, before anything is started."""

from pathlib import Path

import pytest
import yaml

from specdecode_operator.cluster.nodes import NodeFacts
from specdecode_operator.enums import LiveTokenIds
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
        (["--allow-token-ids", "team"], "team: must be NS=WHAT"),
        (["--allow-token-ids", "team=prompts"], "team=prompts: must be NS=WHAT"),
        (["--allow-token-ids", "Team=answers"], "Team=answers: must be NS=WHAT"),
        (["--allow-token-ids", "team="], "team=: must be NS=WHAT"),
        (["--allow-token-ids=a=answers", "--allow-token-ids=a=answers,prompts"], "a: is given twice"),
    ],
)
def test_invalid_options_are_refused(specdecode: Specdecode, options: list[str], told: str) -> None:
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


def test_token_ids_are_allowed_by_namespace(specdecode: Specdecode, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Settings] = []
    monkeypatch.setattr(main, "run_operator", lambda settings, **_: started.append(settings))
    options = ("--allow-token-ids=a=answers", "--allow-token-ids=b=answers,prompts")
    assert specdecode("operator", *options).exit_code == 0
    found = [started[0].token_ids_allowed(namespace) for namespace in ("a", "b", "c")]
    assert found == [LiveTokenIds.ANSWERS, LiveTokenIds.PROMPTS, LiveTokenIds.NONE]
