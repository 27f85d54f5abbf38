"""Commands that `specdecode import` prints are copied to a shell: a name in a file of others is one word of them."""

import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from specdecode_operator.importing.convert import migrate_workload
from specdecode_operator.importing.sources import read_words, read_workloads
from specdecode_operator.importing.spec_builder import Workload

DATA = Path(__file__).parent / "data"
NAME = "chat'; touch here; echo $(id) '"
OBJECTS = (
    *("pod.yaml", "stateful-set.yaml", "leader-worker-set.yaml", "inference-service-containers.yaml"),
    "llm-inference-service.yaml",
)


def commands(workload: Workload, services: tuple[Any, ...] = ()) -> list[list[str]]:
    steps = migrate_workload(workload, services, name="new").steps
    return [shlex.split(step.command) for step in steps]


def with_name(file: str) -> Workload:
    bodies = list(yaml.safe_load_all((DATA / file).read_text()))
    for body in bodies:
        body["metadata"] |= {"name": NAME, "namespace": NAME}
    return next(workload for body in bodies for workload in read_workloads(body, bodies))


@pytest.mark.parametrize("file", OBJECTS)
def test_names_and_namespaces_of_objects(file: str) -> None:
    workload = with_name(file)
    ends = shlex.split(workload.end)
    assert any(word.endswith(f"/{NAME}") for word in ends)
    found = commands(workload)
    assert ends in found
    assert [command[command.index("-n") + 1] for command in found if "-n" in command] == [NAME] * (len(found) - 1)


def test_names_of_services() -> None:
    workload = with_name("pod.yaml")
    service = {"metadata": {"name": NAME}, "spec": {"selector": dict(list(workload.metadata["labels"].items())[:1])}}
    assert ["kubectl", "patch", "service", NAME] in [command[:4] for command in commands(workload, (service,))]


def test_names_of_containers() -> None:
    workload = read_words(
        ["docker", "run", "--gpus", "1", "--name", NAME, "vllm/vllm-openai:v0.33.0", "--model", "a/b"]
    )
    assert commands(workload)[-1] == ["docker", "stop", NAME]
    service = {"image": "vllm/vllm-openai:v0.33.0", "command": ["--model", "a/b"]}
    (workload,) = read_workloads({"services": {NAME: service}})
    assert shlex.split(workload.end) == ["docker", "compose", "stop", NAME]


def test_names_of_a_chart() -> None:
    values = yaml.safe_load((DATA / "production-stack.yaml").read_text())
    values["servingEngineSpec"]["modelSpec"][0]["name"] = NAME
    ends = shlex.split(read_workloads(values)[0].end)
    assert ends == ["kubectl", "scale", f"deployment/RELEASE-{NAME}-deployment-vllm", "--replicas=0"]


def test_a_name_that_begins_with_a_dash_is_no_option() -> None:
    name = "--all"
    workload = read_words(["docker", "run", "--gpus", "1", f"--name={name}", "vllm/vllm-openai:v0.33.0", "a/b"])
    assert workload.end == f"docker stop -- {name}"
    (workload,) = read_workloads({"services": {name: {"image": "vllm/vllm-openai:v0.33.0", "command": ["a/b"]}}})
    assert workload.end == f"docker compose stop -- {name}"
    workload = with_name("pod.yaml")
    service = {"metadata": {"name": name}, "spec": {"selector": dict(list(workload.metadata["labels"].items())[:1])}}
    assert ["kubectl", "patch", f"service/{name}"] in [each[:3] for each in commands(workload, (service,))]
