"""Objects in the examples and the documents are valid, and the README shows one that exists."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from specdecode_operator.api.base import API_VERSION
from specdecode_operator.api.capture import KIND as CAPTURE
from specdecode_operator.api.capture import SpecDecodeCaptureSpec
from specdecode_operator.api.deployment import KIND, SpecDecodeDeploymentSpec
from specdecode_operator.api.training import KIND as TRAINING
from specdecode_operator.api.training import SpecDecodeTrainingSpec
from specdecode_operator.capture.load.arrivals import arrival_offsets_s
from specdecode_operator.deployment.validation import valid_facts
from tests.support.documents import DOCUMENTS, ROOT, fenced_blocks, relative, table

EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))


def deployments(text: str) -> Iterator[dict[str, Any]]:
    for document in yaml.safe_load_all(text):
        if document and document.get("kind") == KIND:
            yield document


def check_deployment(body: dict[str, Any]) -> None:
    """Its fields are those of the models, and its spec holds together."""
    assert body["apiVersion"] == API_VERSION
    assert set(body) == {"apiVersion", "kind", "metadata", "spec"}
    valid_facts(SpecDecodeDeploymentSpec.model_validate(body["spec"]))


def test_deployments_in_the_readme_are_valid() -> None:
    found = [body for block in fenced_blocks(ROOT / "README.md", "yaml") for body in deployments(block)]
    assert found, "the README shows a deployment"
    for body in found:
        check_deployment(body)


def test_every_yaml_block_in_the_documents_parses() -> None:
    for document in DOCUMENTS:
        for block in fenced_blocks(document, "yaml"):
            assert list(yaml.safe_load_all(block))


def test_captures_in_the_documents_and_examples_have_fields_that_exist() -> None:
    texts = [block for document in DOCUMENTS for block in fenced_blocks(document, "yaml")]
    texts += [example.read_text() for example in EXAMPLES]
    bodies = [body for text in texts for body in yaml.safe_load_all(text) if body and body.get("kind") == CAPTURE]
    assert bodies
    for body in bodies:
        assert SpecDecodeCaptureSpec.model_validate(body["spec"]).deployment


def test_trainings_in_the_documents_and_examples_have_fields_that_exist() -> None:
    texts = [block for document in DOCUMENTS for block in fenced_blocks(document, "yaml")]
    texts += [example.read_text() for example in EXAMPLES]
    bodies = [body for text in texts for body in yaml.safe_load_all(text) if body and body.get("kind") == TRAINING]
    assert len(bodies) > 2
    for body in bodies:
        spec = SpecDecodeTrainingSpec.parse(body["spec"])
        assert spec.captures or spec.dataset


def test_tiny_training_has_enough_prompts_to_judge() -> None:
    capture, training = (
        yaml.safe_load((ROOT / f"examples/{name}.yaml").read_text()) for name in ("capture-language", "training-tiny")
    )
    spec = SpecDecodeTrainingSpec.parse(training["spec"])
    assert spec.captures == [capture["metadata"]["name"]]
    requests = sum(phase["requests"] for phase in capture["spec"]["workload"]["phases"])
    assert requests * spec.holdout_percent / 100 >= spec.judgement.requests


@pytest.mark.parametrize("example", EXAMPLES, ids=relative)
def test_examples_are_valid_and_named_like_their_files(example: Path) -> None:
    text = example.read_text()
    assert all(body.get("kind") for body in yaml.safe_load_all(text))
    bodies = [*deployments(text)]
    model = "-".join(example.stem.split("-")[:2])
    for body in bodies:
        name = body["metadata"]["name"]
        assert name in example.stem or (len(bodies) > 1 and name.startswith(f"{model}-")), "named like its file"
        check_deployment(body)


def test_the_readme_shows_the_example_that_its_commands_apply() -> None:
    (shown,) = (body for block in fenced_blocks(ROOT / "README.md", "yaml") for body in deployments(block))
    assert shown == yaml.safe_load((ROOT / "examples/qwen3-8b-eagle3.yaml").read_text())
    (commands, _) = fenced_blocks(ROOT / "README.md", "sh")
    assert "kubectl apply -f examples/qwen3-8b-eagle3.yaml\n" in commands


def test_readme_has_at_most_150_lines() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_documents_show_the_request_count_of_the_demo_capture() -> None:
    capture = yaml.safe_load((ROOT / "examples/capture-tiny.yaml").read_text())
    spec = SpecDecodeCaptureSpec.model_validate(capture["spec"])
    sent = sum(
        each.requests if each.duration_seconds is None else len([*arrival_offsets_s(each, spec.seed)])
        for each in spec.workload.phases
    )
    page = (ROOT / "docs/measure/captures.md").read_text()
    shown = re.findall(r"^demo +Succeeded +Captured +tiny +(\d+) ", page, re.MULTILINE)
    assert shown == [str(sent)]
    assert f"{sent} requests" in (ROOT / "docs/get-started/first-deployment.md").read_text()


def test_the_list_of_examples_is_complete() -> None:
    listed = {re.findall(r"\((.+?)\)", row[0])[0] for row in table(ROOT / "examples/README.md", "file")}
    assert listed == {path.name for path in EXAMPLES}
