"""Which pairs each model runner of vLLM can run."""

from typing import Any

import pytest

from tests.unit.deployment.spec.test_pairing import QWEN, SPECFORGE, config_of, head, problems


def beside(target: str, draft: str, version: str, **more: Any) -> dict[str, Any]:
    """A spec with a draft model, for an engine version."""
    speculation = {"method": "draft_model", "numSpeculativeTokens": 3, "draft": {"model": draft}}
    return {"target": {"model": target}, "speculation": speculation, "engine": {"version": version}, **more}


GEMMAS = ("google/gemma-3-27b-it", "google/gemma-3-4b-it")
VISION = ("Qwen/Qwen3-VL-32B-Instruct", "Qwen/Qwen3-VL-2B-Instruct")


@pytest.mark.parametrize(
    ("pair", "version", "complaint"),
    [
        (("openai/gpt-oss-120b", "openai/gpt-oss-20b"), "0.30", "2 groups of the KV cache"),
        (GEMMAS, "0.28", "groups of the KV cache"),
        (GEMMAS, "0.31", None),
        (VISION, "0.30", "M-RoPE"),
        (VISION, "0.31", None),
        ((QWEN, "Qwen/Qwen3-0.6B"), "0.30", None),
    ],
)
def test_drafts_that_model_runner_v1_cannot_run(pair: tuple[str, str], version: str, complaint: str | None) -> None:
    found = problems(beside(*pair, version))
    assert [problem.field for problem in found] == ([] if complaint is None else ["spec.speculation.draft.model"])
    assert all(complaint in problem.message for problem in found if complaint)


def test_the_cpu_always_runs_model_runner_v1() -> None:
    cpu = {"type": "CPU", "memoryGiB": 120, "cpuCores": 8, "kvCacheGiB": 8}
    found = problems(beside(*GEMMAS, "0.32", accelerator=cpu, engine={"image": "registry.example/vllm-cpu:v0.32.0"}))
    assert ["groups of the KV cache" in problem.message for problem in found] == [True]


@pytest.mark.parametrize(("version", "refused"), [("0.28", True), ("0.29", False)])
def test_targets_with_experts_run_on_v1_up_to_0_28(version: str, *, refused: bool) -> None:
    shape = config_of(f"{SPECFORGE}/qwen3-30B-A3B-eagle3.json")
    spec = head("eagle3", shape, target="Qwen/Qwen3-30B-A3B", engine={"version": version})
    spec["speculation"]["rejectionSampling"] = "block"
    assert [problem.field for problem in problems(spec)] == ["spec.speculation.rejectionSampling"] * refused
