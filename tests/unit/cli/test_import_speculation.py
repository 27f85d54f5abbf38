"""`specdecode import`: who drafts, however it is written."""

import pytest
import yaml

from specdecode_operator.vllm.profiles import KNOWN_VERSIONS
from tests.unit.cli.conftest import Specdecode, WriteObject
from tests.unit.cli.old_deployments import INVALID, LLAMA_8B, asked, engine, imported

SPECULATIVE = {
    "JSON": ["--speculative-config", '{"method":"ngram","num_speculative_tokens":3,"prompt_lookup_min":2}'],
    "JSON after =": ['--speculative-config={"method":"ngram","num_speculative_tokens":3,"prompt_lookup_min":2}'],
    "alias": ["-sc", '{"model":"ngram","num-speculative-tokens":3,"prompt-lookup-min":2}'],
    "dotted": ["-sc.method=ngram", "-sc.num_speculative_tokens", "3", "-sc.prompt_lookup_min=2"],
    "short flags": ["--spec-method", "ngram", "--spec-tokens", "3", "-sc.prompt_lookup_min=2"],
    "2024": ["--speculative-model", "[ngram]", "--num_speculative_tokens=3", "--ngram-prompt-lookup-min", "2"],
}


@pytest.mark.parametrize("arguments", SPECULATIVE.values(), ids=SPECULATIVE)
def test_speculation_is_read_however_it_is_written(
    specdecode: Specdecode, write: WriteObject, arguments: list[str]
) -> None:
    spec, _ = imported(specdecode, write("d.yaml", engine(LLAMA_8B, *arguments)))
    assert spec["speculation"] == {"method": "ngram", "numSpeculativeTokens": 3, "ngram": {"promptLookupMin": 2}}
    assert "extraArgs" not in spec.get("engine", {})


HEADS = {
    "eagle3": ["-sc", '{"method":"eagle3","model":"yuhuili/EAGLE3-LLaMA3.1-Instruct-8B","num_speculative_tokens":3}'],
    "eagle": ["--speculative-model", "yuhuili/EAGLE-LLaMA3.1-Instruct-8B", "--num-speculative-tokens", "3"],
    "medusa": ["--speculative-model", "org/medusa-8b", "--num-speculative-tokens", "3"],
}


@pytest.mark.parametrize("method", HEADS)
def test_the_method_of_a_head_is_said_or_told_by_its_path(
    specdecode: Specdecode, write: WriteObject, method: str
) -> None:
    body = yaml.safe_load(specdecode("import", "-f", write("d.yaml", engine(LLAMA_8B, *HEADS[method]))).stdout)
    speculation = body["spec"]["speculation"]
    assert (speculation["method"], speculation["numSpeculativeTokens"]) == (method, 3)
    assert speculation["draft"]["model"] in " ".join(HEADS[method])


def test_a_method_that_ended_is_a_decision_where_no_model_is_known(specdecode: Specdecode, write: WriteObject) -> None:
    result = specdecode("import", "--engine-version", "0.33", "--", "vllm", "serve", "org/vicuna", *HEADS["medusa"])
    assert result.exit_code == INVALID
    assert "spec.speculation.method: medusa: vLLM 0.33 has it no more; use method eagle3" in result.stderr
    written = write("written.yaml", result.stdout)
    for command in ("plan", "lint"):
        refused = specdecode(command, "-f", written)
        assert (refused.exit_code, "has it no more" in refused.output) == (INVALID, True)


def test_old_names_of_mtp_are_mtp(specdecode: Specdecode, write: WriteObject) -> None:
    arguments = ["-sc", '{"method":"deepseek_mtp","num_speculative_tokens":1}']
    result = specdecode("import", "-f", write("d.yaml", engine(LLAMA_8B, *arguments)))
    assert yaml.safe_load(result.stdout)["spec"]["speculation"] == {"method": "mtp", "numSpeculativeTokens": 1}


def test_the_candidates_of_a_refiner_become_a_field(specdecode: Specdecode, write: WriteObject) -> None:
    arguments = ["-sc", '{"method":"dflash","model":"org/xpress","num_speculative_tokens":7,"xpress_topc":0}']
    result = specdecode("import", "-f", write("d.yaml", engine(LLAMA_8B, *arguments)))
    speculation = yaml.safe_load(result.stdout)["spec"]["speculation"]
    assert (speculation["method"], speculation["xpressTopC"]) == ("dflash", 0)


@pytest.mark.parametrize("value", ['"perhaps"', "2", "[true]"])
def test_what_says_neither_true_nor_false_of_drafts_in_one_pass_is_asked_for(
    specdecode: Specdecode, write: WriteObject, value: str
) -> None:
    config = f'{{"model":"amd/PARD-Llama-3.2-1B","num_speculative_tokens":3,"parallel_drafting":{value}}}'
    said = asked(specdecode, write("d.yaml", engine(LLAMA_8B, "-sc", config)))
    assert "parallel_drafting: " in said
    assert "must be true or false" in said


@pytest.mark.parametrize(
    ("version", "lacks"),
    [
        ("0.32", "vLLM 0.32 has no such"),
        ("0.99", f"vLLM 0.99 is newer than all that are known, and {KNOWN_VERSIONS[-1]} has no such"),
    ],
)
def test_a_key_and_a_flag_that_nobody_knows_are_said_of_the_version_that_was_asked_for(
    specdecode: Specdecode, write: WriteObject, version: str, lacks: str
) -> None:
    config = '{"method":"ngram","num_speculative_tokens":3,"xyzzy":1}'
    source = write("d.yaml", engine(LLAMA_8B, "-sc", config, "--speculative-xyzzy", "1"))
    said = asked(specdecode, source, "--engine-version", version)
    assert f"{lacks} key" in said
    assert f"{lacks} flag" in said
