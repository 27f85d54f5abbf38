import pytest

from devcluster.cluster.nodes import FakeNodes, NodePlan, manifests, parse
from devcluster.host.errors import ClusterError


@pytest.mark.parametrize(
    ("text", "plan"),
    [
        ("real", NodePlan(real=True)),
        ("none", NodePlan(real=False)),
        ("kwok=2xH100:8,1xH200:4", NodePlan(real=False, fake=(FakeNodes(2, "H100", 8), FakeNodes(1, "H200", 4)))),
        ("real,kwok=1xH100:8", NodePlan(real=True, fake=(FakeNodes(1, "H100", 8),))),
    ],
)
def test_understands(text: str, plan: NodePlan) -> None:
    assert parse(text) == plan


@pytest.mark.parametrize(
    "text",
    ["", "foo", "real,", "real,none", "none,kwok=1xH100:8", "realkwok=1xH100:8", "kwok", "kwok=", "kwok=2xH100",
     "kwok=0xH100:8", "kwok=2xH100:0", "kwok=2xA999:8", "kwok=2xH100:8,", "kwok=2xH100:8,,1xH200:8",
     "kwok=1xH100:8,real"],
)  # fmt: skip
def test_refuses_with_the_value_and_the_format(text: str) -> None:
    with pytest.raises(ClusterError) as refused:
        parse(text)
    assert repr(text) in str(refused.value)
    assert "kwok=<nodes>x<product>:<GPUs each>" in str(refused.value)


def test_names_the_part_that_is_wrong() -> None:
    with pytest.raises(ClusterError, match="'2xA999:8'"):
        parse("kwok=1xH100:8,2xA999:8")


def test_only_nodes_need_root() -> None:
    assert not parse("none").needs_root
    assert parse("real").needs_root
    assert parse("kwok=1xH100:8").needs_root


def test_simulated_nodes_look_like_gpu_machines() -> None:
    nodes = manifests([FakeNodes(2, "H100", 8), FakeNodes(1, "H200", 4)])
    assert list(nodes) == ["h100-0", "h100-1", "h200-0"]
    labels = nodes["h200-0"]["metadata"]["labels"]
    assert labels["nvidia.com/gpu.product"] == "NVIDIA-H200"
    assert labels["nvidia.com/gpu.memory"] == "143771"
    assert labels["nvidia.com/gpu.count"] == "4"
    assert nodes["h100-0"]["metadata"]["labels"]["nvidia.com/gpu.product"] == "NVIDIA-H100-80GB-HBM3"
    assert nodes["h100-0"]["status"]["allocatable"]["nvidia.com/gpu"] == "8"
    assert nodes["h100-0"]["spec"]["taints"][0]["effect"] == "NoSchedule"


def test_later_nodes_get_new_names() -> None:
    assert list(manifests([FakeNodes(2, "H100", 8)], taken=["h100-0", "h100-2", "node1"])) == ["h100-1", "h100-3"]
