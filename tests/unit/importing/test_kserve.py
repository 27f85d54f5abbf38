"""KServe's objects."""

from typing import Any

import pytest

from specdecode_operator.importing.kserve import read_llm_inference_service
from specdecode_operator.importing.spec_builder import Workload


def read(**spec: Any) -> Workload:
    body = {"metadata": {"name": "chat"}, "spec": {"model": {"uri": "hf://a/b", "name": "a/b"}, **spec}}
    (workload,) = read_llm_inference_service(body)
    return workload


def asked(workload: Workload) -> str:
    return " ".join(map(str, workload.remarks.decisions))


@pytest.mark.parametrize(("given", "asks"), [([], False), ([{"name": "base"}], True)])
def test_only_non_empty_base_refs_are_a_decision(given: list[Any], *, asks: bool) -> None:
    assert ("spec.baseRefs" in asked(read(baseRefs=given))) is asks


def test_base_configuration_of_the_same_input_is_merged() -> None:
    base = {"replicas": 3, "template": {"containers": [{"name": "main", "image": "a:1", "args": ["--enable-lora"]}]}}
    config = {"kind": "LLMInferenceServiceConfig", "metadata": {"name": "base"}, "spec": base}
    limits = {"resources": {"limits": {"nvidia.com/gpu": "1"}}}
    spec = {"model": {"uri": "hf://a/b"}, "baseRefs": [{"name": "base"}], "replicas": 2}
    body = {
        "metadata": {"name": "chat"},
        "spec": {**spec, "template": {"containers": [{"name": "main", **limits}, {"name": "sidecar"}]}},
    }
    (found,) = read_llm_inference_service(body, [config])
    main, sidecar = found.pod["containers"]
    assert (main["image"], main["args"][-1], main["resources"]) == ("a:1", "--enable-lora", limits["resources"])
    assert (sidecar["name"], found.spec["replicas"]) == ("sidecar", 2)
    assert "baseRefs" not in asked(found)


def words(workload: Workload) -> list[str]:
    """The command line of the server, behind the model and the port."""
    args: list[str] = workload.pod["containers"][0]["args"]
    return args[args.index("--port") + 2 :]


def main(**more: Any) -> dict[str, Any]:
    return {"containers": [{"name": "main", **more}]}


def test_container_args_come_last() -> None:
    env = [{"name": "VLLM_ADDITIONAL_ARGS", "value": "--seed 1"}]
    found = read(template=main(args=["--", "--seed", "2"], env=env), parallelism={"tensor": 2})
    assert words(found) == ["--tensor-parallel-size", "2", "--seed", "1", "--seed", "2"]
    assert found.pod["containers"][0]["env"] == []


@pytest.mark.parametrize(("expert", "flags"), [(True, ["--enable-expert-parallel"]), (False, []), (None, [])])
def test_expert_parallelism_is_set_only_if_requested(expert: bool | None, flags: list[str]) -> None:
    assert words(read(parallelism={"expert": expert})) == flags


def test_arguments_from_a_secret_are_a_decision() -> None:
    secret = {"secretKeyRef": {"name": "a", "key": "b"}}
    found = read(template=main(env=[{"name": "VLLM_ADDITIONAL_ARGS", "valueFrom": secret}]))
    assert "VLLM_ADDITIONAL_ARGS" in asked(found)
    assert not words(found)


@pytest.mark.parametrize(
    ("parallelism", "nodes", "asks"),
    [
        ({"pipeline": 2}, 2, False),
        ({"pipeline": 2, "data": 4}, 1, True),
        ({"data": 16, "dataLocal": 8}, 2, False),
        ({"data": 16, "dataLocal": 0}, 1, True),
        ({"tensor": 8}, 1, True),
        ({"pipeline": 0}, 1, False),
        ({"pipeline": "2"}, 1, False),
    ],
)
def test_node_count_follows_pipeline_parallelism(parallelism: dict[str, Any], nodes: int, *, asks: bool) -> None:
    found = read(worker={"hostname": "x"}, parallelism=parallelism)
    assert found.nodes == nodes
    assert ("spec.worker" in asked(found)) is asks


def test_model_is_served_under_its_name() -> None:
    args = read().pod["containers"][0]["args"]
    assert args[args.index("--served-model-name") + 1] == "a/b"
