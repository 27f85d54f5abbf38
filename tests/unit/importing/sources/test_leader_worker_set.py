"""How many pods a group of a LeaderWorkerSet may have."""

from typing import Any

import pytest

from specdecode_operator.importing.sources import read_leader_worker_set
from specdecode_operator.importing.spec_builder import MigrationError


def group(size: Any) -> dict[str, Any]:
    pod = {"spec": {"containers": [{"name": "vllm", "command": ["vllm", "serve", "a/b"]}]}}
    return {"metadata": {"name": "wide"}, "spec": {"leaderWorkerTemplate": {"size": size, "workerTemplate": pod}}}


@pytest.mark.parametrize("size", [1, 2, 1024])
def test_a_group_of_so_many_pods_is_read(size: int) -> None:
    assert read_leader_worker_set(group(size)).nodes == size


@pytest.mark.parametrize("size", [-1, 0, 1025, 1.5, "2", [2]])
def test_another_size_is_told_by_its_field(size: Any) -> None:
    with pytest.raises(MigrationError, match=r"spec\.leaderWorkerTemplate\.size: .*number of pods in a group"):
        read_leader_worker_set(group(size))
