"""Figures of data-parallel engines are those of one copy, and every place says so."""

import json
from typing import Any

import pytest
from pydantic.alias_generators import to_camel

from specdecode_operator.api.base import ApiModel
from specdecode_operator.api.crds import structural_schema
from specdecode_operator.api.deployment import Parallelism, Serving
from specdecode_operator.api.deployment_status import PlanStatus
from specdecode_operator.cli.estimate import CaseOutput
from specdecode_operator.cli.plan.data import CandidateOutput, FixOutput, PrecisionOutput
from tests.support.objects import Body
from tests.unit.cli.conftest import Specdecode, WriteObject, manifest

FEW, MANY = {"maxModelLen": 8192}, {"maxModelLen": 8192, "minConcurrency": 100}


def copies(data: int, serving: Body) -> Body:
    """A pair in copies, with what is known of its requests."""
    workload = {"kind": "Chat", "promptTokens": 4000, "outputTokens": 400}
    return manifest("one", parallelism={"tensor": 2, "data": data}, serving=serving, workload=workload)


@pytest.mark.parametrize("serving", [FEW, MANY], ids=["fits", "does not fit"])
@pytest.mark.parametrize("command", [["plan"], ["plan", "--matrix"], ["explain"]], ids=" ".join)
def test_every_text_says_of_what_its_figures_are(
    specdecode: Specdecode, write: WriteObject, command: list[str], serving: Body
) -> None:
    several, one = (specdecode(*command, "-f", write(f"{data}.yaml", copies(data, serving))).stdout for data in (4, 1))
    assert "per copy" not in one
    for line in several.splitlines():
        capacity = " requests of " in line or line.strip().startswith(("tokens", "full requests"))
        if capacity and "KV cache per copy" not in line:
            assert "per copy" in line, line
    assert "per copy" in several


def test_sentences_in_data_say_so_too(specdecode: Specdecode, write: WriteObject) -> None:
    answer: dict[str, Any] = json.loads(specdecode("plan", "-o", "json", "-f", write("a.yaml", copies(4, FEW))).stdout)
    (found,) = answer["objects"]
    assert "tokens per copy" in found["explanation"]
    assert found["candidates"][0]["data"] == 4


def test_a_copy_holds_the_same_whatever_their_number(specdecode: Specdecode, write: WriteObject) -> None:
    tokens = []
    for data in (1, 4):
        said = specdecode("plan", "-o", "json", "-f", write(f"{data}.yaml", copies(data, FEW))).stdout
        tokens.append(json.loads(said)["objects"][0]["candidates"][0]["kv_cache_tokens"])
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize(
    ("model", "fields"),
    [
        (PlanStatus, ["kv_cache_tokens", "max_concurrency", "data"]),
        (Serving, ["max_num_seqs", "max_num_batched_tokens", "min_concurrency"]),
        (Parallelism, ["data"]),
        (CandidateOutput, ["kv_cache_tokens", "max_concurrency"]),
        (PrecisionOutput, ["kv_cache_tokens", "max_concurrency"]),
        (FixOutput, ["kv_cache_tokens", "max_concurrency"]),
        (CaseOutput, ["kv_cache_tokens", "max_concurrency"]),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_every_description_says_so(model: Any, fields: list[str]) -> None:
    for field in fields:
        assert "cop" in description(model, field).lower(), field


def description(model: Any, field: str) -> str:
    """What is said of a field where people read it: of an object's in its CRD, of a command's output in its schema."""
    if not issubclass(model, ApiModel):
        return str(model.model_fields[field].description)
    return str(structural_schema(model, {})["properties"][to_camel(field)]["description"])
