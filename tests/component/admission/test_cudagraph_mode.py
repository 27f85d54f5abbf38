"""The API server takes vLLM's modes of CUDA graphs, and refuses what contradicts them."""

import pytest
import yaml

from specdecode_operator.enums import CudagraphMode
from tests.support.kubectl import Kubectl

WITHOUT_GRAPHS = [
    ({"cudagraphMode": "NONE", "enforceEager": True}, "cudagraphMode", "with enforceEager: remove one of the two"),
    (
        {"cudagraphMode": "NONE", "maxCudagraphCaptureSize": 64},
        "maxCudagraphCaptureSize",
        "with cudagraphMode NONE: remove one of the two",
    ),
    ({"cudagraphMode": "full"}, "cudagraphMode", 'supported values: "NONE", "PIECEWISE", "FULL"'),
]


def graphs(**serving: object) -> str:
    """YAML of an object with these settings of its serving."""
    spec = {"target": {"model": "org/target"}, "serving": serving}
    kinds = {"apiVersion": "specdecode.io/v1alpha1", "kind": "SpecDecodeDeployment"}
    return yaml.safe_dump({**kinds, "metadata": {"name": "graphs"}, "spec": spec})


@pytest.mark.parametrize("mode", CudagraphMode)
def test_every_vllm_cudagraph_mode_is_accepted(kubectl: Kubectl, mode: CudagraphMode) -> None:
    answer = kubectl.write(graphs(cudagraphMode=mode.value))
    assert answer.returncode == 0, answer.stderr
    assert kubectl.object("sdd", "graphs")["spec"]["serving"]["cudagraphMode"] == mode.value


@pytest.mark.parametrize(("serving", "field", "fix"), WITHOUT_GRAPHS)
def test_settings_that_contradict_the_cudagraph_mode_are_refused(
    kubectl: Kubectl, serving: dict[str, object], field: str, fix: str
) -> None:
    answer = kubectl.create(graphs(**serving))
    assert answer.returncode != 0
    assert any(f"spec.serving.{field}:" in line and fix in line for line in answer.stderr.splitlines()), answer.stderr
