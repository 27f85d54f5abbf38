"""What `specdecode import` prints and calls complete, a real API server takes, and so does `specdecode plan`."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.kubectl import Kubectl
from tests.support.migrations import migrate
from tests.unit.cli.old_deployments import DATA, LLAMA_8B, LLAMA_70B, engine


def deployment_in(file: Path) -> dict[str, Any]:
    """The Deployment of a file."""
    (found,) = [each for each in yaml.safe_load_all(file.read_text()) if each["kind"] == "Deployment"]
    return dict(found)


def speculating(config: str, *arguments: str) -> dict[str, Any]:
    """A Deployment that is told of speculation by JSON."""
    return engine(LLAMA_70B, "-tp=2", f"--speculative-config={config}", *arguments)


RANGES = '"num_speculative_tokens": 5, "num_speculative_tokens_per_batch_size"'
OLD = {
    **{file.stem: deployment_in(file) for file in sorted(DATA.glob("*.yaml"))},
    "a limit": engine(LLAMA_8B, "--speculative-model=[ngram]", "--num-speculative-tokens=5")
    | {"metadata": {"name": "old.with.dots"}},
    "ranges with gaps": speculating(f'{{"method": "ngram", {RANGES}: [[1, 4, 5], [9, 16, 0]]}}'),
    "ranges beyond all": speculating(
        f'{{"method": "ngram", {RANGES}: [[1, 4, 9], [5, 512, 1], [513, 600, 0]]}}', "--max-num-seqs=64"
    ),
    "a limit of long ago": speculating(
        f'{{"model": "{LLAMA_8B}", "num_speculative_tokens": 5, "disable_by_batch_size": 1}}'
    ),
}


@pytest.mark.parametrize("old", OLD.values(), ids=OLD)
def test_imported_deployment_is_accepted_by_the_api_server(kubectl: Kubectl, old: dict[str, Any]) -> None:
    migration = migrate(old)
    assert not migration.decisions, migration.decisions
    body = migration.body
    body["metadata"].pop("namespace", None)
    answer = kubectl.apply(yaml.safe_dump(body), "--dry-run=server")
    assert answer.returncode == 0, answer.stderr
