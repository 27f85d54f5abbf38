"""The GitOps drill with a real vLLM: a pair of a repository serves, gets another draft, and bad changes get no further.

What the webhook and drift do to it is seen in tests/component/operator/test_gitops.py, where engines are played.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.serving.test_lifecycle import ENGINE_DEADLINE_S, EXAMPLES, drafted, engines
from tests.support.gitops.drill import Drill
from tests.support.gitops.repository import Repository
from tests.support.gitops.sync import ServerSideApply
from tests.support.kubectl import Kubectl
from tests.support.small_pair import small_pair
from tests.support.traffic import Traffic
from tests.support.waiting import eventually

pytestmark = pytest.mark.long


@pytest.fixture
def drill(kubectl: Kubectl, tmp_path: Path) -> Drill:
    kubectl.must("apply", f"--filename={EXAMPLES / 'tiny-models.yaml'}")
    kubectl.wait("job/tiny-models", "condition=Complete", 300)
    tool = ServerSideApply(kubectl)
    return Drill(kubectl, Repository(tmp_path / "repository"), tool, "tiny", deadline_s=2 * ENGINE_DEADLINE_S)


def pair(**speculation: Any) -> dict[str, str]:
    """The example's file, with some of its speculation changed, or without what is None."""
    body = small_pair()
    changed = {**body["spec"]["speculation"], **speculation}
    body["spec"]["speculation"] = {name: value for name, value in changed.items() if value is not None}
    return {"pairs/tiny.yaml": yaml.safe_dump(body)}


def kv_tokens(summary: str) -> int:
    """Tokens of KV cache in the plan of a summary."""
    (row,) = re.findall(r"^\| `tiny` \| `CPU` \| `Fits` .* \| `([\d,]+) / [\d.]+` \|$", summary, re.MULTILINE)
    return int(row.replace(",", ""))


def test_gitops_drill_serves_changes_draft_and_reverts(drill: Drill, kubectl: Kubectl) -> None:
    nodes = kubectl.must("get", "nodes", "--output=yaml")
    first = drill.propose("first", {"nodes.yaml": nodes, **pair()})
    assert first.code == 0
    served = drill.roll_out("first")
    assert served["status"]["plan"]["kvCacheTokens"] == kv_tokens(first.summary)

    # The target drafts for itself: four layers in the place of one.
    larger = yaml.safe_load(pair()["pairs/tiny.yaml"])["spec"]["target"]
    proposed = drill.propose("larger-draft", pair(draft=larger, numSpeculativeTokens=2))
    assert proposed.code == 0
    assert kv_tokens(proposed.summary) < kv_tokens(first.summary)
    changed = drill.roll_out("larger-draft")
    assert changed["status"]["plan"]["kvCacheTokens"] == kv_tokens(proposed.summary)
    eventually(
        lambda: {drafted(each) for each in engines(kubectl)} == {2}, "the engines with the earlier draft are gone"
    )

    before = drill.engines
    worse = drill.propose("worse", pair(draft=None))
    assert worse.code == 2
    with answered(kubectl) as requests:
        refused = drill.merge("worse")
        (said,) = worse.said
        assert said.split(": ", 2)[2] in refused
        assert drill.revert() == ""
        drill.be_healthy()
        drill.be_in_sync()
        eventually(lambda: requests.complete > 1, "requests are answered")
    assert requests.failures == []
    assert drill.engines == before


def answered(kubectl: Kubectl) -> Traffic:
    """Requests one after the other, for as long as it is open."""
    question = {"model": "target", "prompt": "Once upon a time", "temperature": 0, "max_tokens": 32}
    return Traffic(f"http://{kubectl.service_address('tiny')}/v1/completions", [question])
