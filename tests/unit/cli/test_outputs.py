"""Data that commands print, and the schemas that describe it."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from specdecode_operator.cli.estimate import EstimateOutput
from specdecode_operator.cli.explain import ExplainOutput
from specdecode_operator.cli.plan.data import PlanOutput
from specdecode_operator.cli.text_files import replaced_whole
from tests.unit.cli.conftest import Specdecode, WriteObject, manifest
from tests.unit.cli.test_explain import figures

EXAMPLES = Path(__file__).parents[3] / "examples"
MODELS: dict[str, type[BaseModel]] = {"plan": PlanOutput, "explain": ExplainOutput}
LARGE = {"accelerator": {"products": ["NVIDIA-H100-80GB-HBM3"]}}
CASE = {"gpu": "H100", "model": "meta-llama/Llama-3.1-8B-Instruct"}


@pytest.mark.parametrize("command", MODELS)
def test_real_answers_are_what_the_schema_says(specdecode: Specdecode, write: WriteObject, command: str) -> None:
    """Those that fit, that do not, that are invalid or unknown, on CPU and in files that cannot be read."""
    unknown = manifest("unknown", target={"model": "nobody/knows"}, speculation=None)
    files = [
        write("a.yaml", manifest("a"), manifest("large", **LARGE), manifest("bad", replicas="many"), unknown),
        write("broken.yaml", "{a: [1"),
        EXAMPLES,
    ]
    text = specdecode(command, *files, "-o", "json").stdout
    answer = MODELS[command].model_validate_json(text, extra="forbid")
    # What the schema describes is what was printed, key by key.
    assert answer.model_dump(mode="json") == json.loads(text)
    as_yaml = specdecode(command, *files, "-o", "yaml").stdout
    assert yaml.safe_load(as_yaml) == json.loads(text)
    verdicts = {each["verdict"] for each in json.loads(text)["objects"]}
    assert verdicts == {"Fits", "DoesNotFit", "Invalid", "Unknown"}
    assert len(json.loads(text)["errors"]) == 1


@pytest.mark.parametrize(
    "case",
    [
        CASE,
        {**CASE, "id": 7, "tp": 2},
        {**CASE, "max_model_len": 131_072, "min_concurrency": 50},
        {"model": CASE["model"], "available_kv_gib": 10},
        {"model": "nobody/knows", "gpu": "H100"},
    ],
)
def test_a_line_of_estimate_is_what_the_schema_says(specdecode: Specdecode, case: dict[str, Any]) -> None:
    line = specdecode("estimate", "--in", "-", "--out", "-", stdin=json.dumps(case)).stdout
    result = EstimateOutput.model_validate_json(line, extra="forbid")
    assert result.model_dump(mode="json", exclude_unset=True) == json.loads(line)


@pytest.mark.parametrize("command", ["plan", "explain", "estimate", "advise", "verdict"])
def test_a_schema_says_what_each_key_means(specdecode: Specdecode, command: str) -> None:
    schema = json.loads(specdecode("schema", command).stdout)
    assert schema["$schema"].startswith("https://json-schema.org/")
    for name, part in schema["$defs"].items():
        for key, described in part["properties"].items():
            assert described.get("description"), f"{name}.{key}"


def test_explain_says_as_data_what_it_says_as_text(specdecode: Specdecode, write: WriteObject) -> None:
    path = write("a.yaml", manifest("a"))
    (answer,) = json.loads(specdecode("explain", path, "-o", "json").stdout)["objects"]
    text = specdecode("explain", path).stdout
    printed = figures(text)
    for term in (*answer["memory"], *answer["judged"]):
        assert printed[term["name"]] == term["bytes"]
        assert term["formula"] in text
        assert (term["source"] or "") in text
    taken = sum(term["bytes"] for term in answer["memory"] if term["name"].startswith("- "))
    sizes = {term["name"]: term["bytes"] for term in answer["memory"]}
    assert sizes["budget"] - taken == sizes["= left for KV cache"]
    assert [each["result"] for each in answer["kv_cache"] if each["name"] == "tokens"] == ["237,168"]
    assert answer["candidate"] == "2 x H200, TP 2"


def test_a_file_in_no_folder_is_called_by_its_own_name(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as raised, replaced_whole(tmp_path / "gone" / "model.json"):
        pass
    assert raised.value.filename == str(tmp_path / "gone" / "model.json")
