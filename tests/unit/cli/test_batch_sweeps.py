"""`specdecode plan --batch` sizes lines that differ in a few numbers together, with the results of each line alone."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specdecode_operator.cli.plan import batch
from specdecode_operator.sizing.catalogue import known_models
from specdecode_operator.sizing.estimate import SWEPT, Sized, Sizer, size_case
from specdecode_operator.sizing.memory.budget import Budget, Engine
from tests.support.imported_modules import run_and_see_imports
from tests.support.llama import LLAMA_8B_CONFIG

HEAD = {"method": "eagle3", "model": "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", "num_speculative_tokens": 3}
CASES: dict[str, dict[str, Any]] = {
    "pair": {"model": "meta-llama/Llama-3.1-70B-Instruct", "tp": 4, "gpu": "H100", "vllm_version": "0.28"},
    "head as long as requests": {"model": "meta-llama/Llama-3.1-8B-Instruct", "gpu": "H100", "speculative": HEAD},
    "latent attention": {"model": "deepseek-ai/DeepSeek-V3.1", "gpu": "H200", "tp": 8},
    "token table": {
        "model": "Qwen/Qwen3-8B",
        "gpu": "L40S",
        "speculative": {"method": "ngram", "num_speculative_tokens": 4},
    },
    "states": {"model": "Qwen/Qwen3-Next-80B-A3B-Instruct", "gpu": "H100", "tp": 4},
    "images": {"model": "Qwen/Qwen2.5-VL-7B-Instruct", "gpu": "A100-80"},
    "config": {"model_config": {**LLAMA_8B_CONFIG, "max_position_embeddings": 8192}, "gpu": "H100"},
    "longer tokenizer": {
        "model_config": {**LLAMA_8B_CONFIG, "max_position_embeddings": 4096, "model_max_length": 16_384},
        "gpu": "H100",
    },
    "no length": {
        "model_config": {key: value for key, value in LLAMA_8B_CONFIG.items() if key != "max_position_embeddings"},
        "gpu": "H100",
    },
    "given tokens": {"model": "Qwen/Qwen3-8B", "gpu": "H200", "max_num_batched_tokens": 512},
    "small GPU": {"model": "Qwen/Qwen3-8B", "gpu_total_gib": 24},
    "stages": {
        "model": "meta-llama/Llama-3.1-70B-Instruct",
        "gpu": "H200",
        "pp": 3,
        "compilation_config": {"level": 3},
    },
    "given KV cache": {"model": "Qwen/Qwen3-8B", "available_kv_gib": 20},
    "other spelling": {"model": "Qwen/Qwen3-8B", "gpu": "H200", "max_seq_len": 4096},
    "null in another spelling": {"model": "Qwen/Qwen3-8B", "gpu": "H200", "--max-num-seqs": None},
    "unknown model": {"model": "maker/none", "gpu": "H200"},
    "bad split": {"model": "meta-llama/Llama-3.1-8B-Instruct", "gpu": "H200", "tp": 3},
}
NUMBERS: dict[str, tuple[Any, ...]] = {
    "max_model_len": (1024, 4096, 4097, 8192, 16_384, 131_072, 10**6, 0, -1, 4096.0, "4096", True, None, [1], 10**400),
    "max_num_seqs": (1, 2, 64, 256, 513, 1024, 0, 70_000, 64.0, "64", False, None, {"a": 1}),
    "gpu_memory_utilization": (0.9, 0.29, 0.95, 1, 1.0, 1e-9, 0, 1.01, float("nan"), "0.9", True, None),
}
IDS = st.integers(-1, 3) | st.sampled_from(["a", "é\u2028", None, 1.5, True, [1], 10**30])
numbers = st.fixed_dictionaries({}, optional={key: st.sampled_from(values) for key, values in NUMBERS.items()})
forms = st.sampled_from([{}, {}, {"separators": (",", ":")}, {"separators": (" , ", " : ")}, {"ensure_ascii": False}])
# A busy machine is no failure.
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])


def results(folder: Path, lines: list[str]) -> list[str]:
    """Return the lines that a batch writes."""
    source, target = folder / "cases.jsonl", folder / "results.jsonl"
    source.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    batch.size_batch(str(source), str(target), hub=False, calibration=None, strict=False)
    return target.read_text(encoding="utf-8").splitlines()


def sized_together(folder: Path, lines: list[str]) -> list[str]:
    """Return the results of all lines, after comparing each with that of the line alone."""
    together = results(folder, lines)
    for number, (line, result) in enumerate(zip(lines, together, strict=True), start=1):
        (alone,) = results(folder, [line])
        assert result == alone.replace("line 1: ", f"line {number}: "), line
    return together


@pytest.fixture
def swept(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Return a list that each case is added to that is sized as one of a sweep."""
    found: list[object] = []
    size_swept = Sizer.size_swept

    def noted(self: Sizer, others: Any, values: Any) -> Sized | None:
        if (result := size_swept(self, others, values)) is not None:
            found.append(result)
        return result

    monkeypatch.setattr(Sizer, "size_swept", noted)
    return found


@pytest.mark.parametrize("name", CASES)
def test_each_number_of_a_sweep_has_the_result_of_the_line_alone(
    tmp_path: Path, name: str, swept: list[object]
) -> None:
    cases = [CASES[name]] + [{**CASES[name], key: value} for key, values in NUMBERS.items() for value in values]
    together = [json.loads(each) for each in sized_together(tmp_path, [json.dumps(each) for each in cases * 2])]
    valid = [each for each in together if each["error"] is None]
    spelled = any(key in CASES[name] for key in ("max_seq_len", "--max-num-seqs", "available_kv_gib"))
    # All but the first valid one.
    assert len(swept) == (0 if spelled or not valid else len(valid) - 1)


def test_long_lines_are_swept_and_told_apart(tmp_path: Path, swept: list[object]) -> None:
    long = {**CASES["pair"], "notes": "x" * 20_000}
    cases = [{**long, "max_num_seqs": requests, "tp": tensor} for requests in (16, 32) for tensor in (4, 8)]
    sized_together(tmp_path, [json.dumps(each) for each in cases])
    assert len(swept) == 2


def test_a_batch_imports_neither_the_planner_nor_the_schema(tmp_path: Path) -> None:
    source = tmp_path / "cases.jsonl"
    source.write_text(json.dumps(CASES["pair"]) + "\n", encoding="utf-8")
    heavy = ("cli.outputs", "cli.plan.answers", "cli.plan.batch_output", "deployment.models.checkpoint_reader")
    heavy += ("sizing.plan", "sizing.startup_time", "vllm.profiles")
    results, imported = run_and_see_imports(
        ["plan", "--batch", str(source)], [f"specdecode_operator.{each}" for each in heavy]
    )
    assert [json.loads(each)["error"] for each in results] == [None]
    assert imported == set()


@unhurried
@given(
    name=st.sampled_from(sorted(CASES)),
    given_numbers=st.lists(st.tuples(numbers, IDS, forms), min_size=2, max_size=6),
    data=st.data(),
)
def test_any_lines_of_a_sweep_have_the_results_of_each_line_alone(
    tmp_path: Path, name: str, given_numbers: list[tuple[dict[str, Any], Any, dict[str, Any]]], data: st.DataObject
) -> None:
    lines = []
    for values, identity, form in given_numbers:
        keys = data.draw(st.permutations([*CASES[name], *values, "id"]))
        case = {**CASES[name], **values, "id": identity}
        line = json.dumps({key: case[key] for key in keys}, **form)
        if data.draw(st.sampled_from([False, False, False, True])):
            position = data.draw(st.integers(0, len(line)))
            line = line[:position] + data.draw(st.sampled_from(["", '"', ",", "}", "0", '"id": 1, '])) + line[position:]
        lines.append(line)
    sized_together(tmp_path, lines)


def test_every_model_of_the_catalogue_is_swept_with_the_results_of_each_line_alone(swept: list[object]) -> None:
    sizer, sized = Sizer(), 0
    for model in known_models():
        case = {"model": str(model), "gpu": "H200", "tp": 8, "max_model_len": 2048}
        for change in ({}, {"max_num_seqs": 16}, {"max_model_len": 1024}, {"gpu_memory_utilization": 0.5}):
            changed = {**case, **change}
            alone = outcome(changed)
            values = {key: changed[key] for key in SWEPT if key in changed}
            like = sizer.size_swept(model, values)
            together = outcome(changed, sizer, model) if like is None else like.line
            assert json.dumps(together) == json.dumps(alone), changed
            sized += alone["error"] is None
    assert sized > 3 * len(known_models()) / 2
    assert len(swept) * 4 >= sized * 3


def outcome(case: dict[str, Any], sizer: Sizer | None = None, others: Any = None) -> dict[str, Any]:
    """Return the result line, which may be an error."""
    try:
        return size_case(case) if sizer is None else sizer.size(case, others)
    except ValueError as error:
        return {"error": str(error)}


def test_failure_of_a_swept_line_is_reported_for_this_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    budget = Engine.budget

    def failing(self: Engine, max_model_len: int, memory_utilization_percent: float) -> Budget:
        if max_model_len == 4096:
            raise ZeroDivisionError("broken")
        return budget(self, max_model_len, memory_utilization_percent)

    monkeypatch.setattr(Engine, "budget", failing)
    lines = [json.dumps({**CASES["pair"], "id": length, "max_model_len": length}) for length in (1024, 4096, 8192)]
    found = [json.loads(line) for line in results(tmp_path, lines)]
    assert [each["id"] for each in found] == [1024, 4096, 8192]
    assert [each["error"] is None for each in found] == [True, False, True]
    assert found[1]["error"].startswith("sizing failed (ZeroDivisionError: broken)")
