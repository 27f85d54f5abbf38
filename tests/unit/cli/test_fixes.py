"""The changes that `plan` offers: each is applied to the object, and planned again."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.cli.conftest import Specdecode, WriteObject, manifest

EXAMPLES = Path(__file__).parents[3] / "examples"
H100 = "NVIDIA-H100-80GB-HBM3"
GPT_OSS: dict[str, Any] = {
    "target": {"model": "openai/gpt-oss-120b"},
    "speculation": {
        "method": "eagle3",
        "numSpeculativeTokens": 3,
        "draft": {"model": "lmsys/EAGLE3-gpt-oss-120b-bf16"},
    },
    "parallelism": {"tensor": 1},
    "accelerator": {"products": [H100]},
    "serving": {"minConcurrency": 2},
}


def fixes(specdecode: Specdecode, write: WriteObject, body: dict[str, Any]) -> list[dict[str, Any]]:
    """What is offered for the first place."""
    (answer,) = json.loads(specdecode("plan", write("a.yaml", body), "-o", "json").stdout)["objects"]
    assert answer["verdict"] == "DoesNotFit", answer["problems"]
    return next(iter(answer["fixes"].values()), [])


def changed(body: dict[str, Any], changes: list[dict[str, Any]]) -> dict[str, Any]:
    """The object with its fields as a fix says; None removes one."""
    body = deepcopy(body)
    for change in changes:
        *parents, name = change["field"].split(".")
        place = body
        for parent in parents:
            place = place.setdefault(parent, {})
        if change["value"] is None:
            del place[name]
        else:
            place[name] = change["value"]
    return body


def large(name: str, **spec: Any) -> dict[str, Any]:
    """An example that fits nowhere any more, on H100 alone."""
    (body,) = (each for each in yaml.safe_load_all((EXAMPLES / f"{name}.yaml").read_text()) if each)
    serving = {**body["spec"].get("serving", {}), **spec.pop("serving", {})}
    body["spec"] |= {"accelerator": {"products": [H100]}, "serving": serving, **spec}
    return dict(body)


def with_draft(**more: Any) -> dict[str, Any]:
    speculation = {
        "method": "draft_model",
        "numSpeculativeTokens": 5,
        "draft": {"model": "meta-llama/Llama-3.1-8B-Instruct"},
    }
    return {**speculation, **more}


QWEN_NEXT = {
    "target": {"model": "Qwen/Qwen3-Next-80B-A3B-Instruct"},
    "speculation": with_draft(draft={"model": "Qwen/Qwen3-8B", "quantization": "FP8", "maxModelLen": 8192}),
    "parallelism": {"tensor": 4, "draftTensor": 4},
    "accelerator": {"products": [H100]},
    "serving": {"maxModelLen": 131_072, "minConcurrency": 8},
}
QWEN = {
    "target": {"model": "Qwen/Qwen3-8B"},
    "speculation": with_draft(
        draft={"model": "Qwen/Qwen3-1.7B", "quantization": "FP8"},
        numSpeculativeTokensByBatchSize=[{"from": 1, "to": 64, "numSpeculativeTokens": 2}],
        draftSampling="probabilistic",
    ),
    "parallelism": {"tensor": 1},
    "accelerator": {"products": [H100]},
    "serving": {"maxModelLen": 8192, "maxNumSeqs": 64, "minConcurrency": 35},
}
WHOLE_PROMPTS = {
    **GPT_OSS,
    "serving": {"maxModelLen": 16_384, "maxNumBatchedTokens": 16_384, "minConcurrency": 10},
    "engine": {"extraArgs": ["--no-enable-chunked-prefill"]},
}
AUTO = {
    "target": {"model": "meta-llama/Llama-3.1-8B-Instruct", "quantization": "Auto"},
    "speculation": with_draft(method="eagle3", draft={"model": "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"}),
    "parallelism": {"tensor": 1},
    "accelerator": {"products": ["NVIDIA-H200"]},
    "serving": {"maxModelLen": 131_072, "minConcurrency": 32, "kvCacheDtype": "fp8"},
}
DO_NOT_FIT = {
    "gpt-oss": manifest("gpt-oss", **GPT_OSS),
    "gpt-oss, any split": manifest("gpt-oss", **{**GPT_OSS, "parallelism": {}, "serving": {"minConcurrency": 200}}),
    "70B": large("llama-70b"),
    "70B, the plan chooses": large("llama-70b-auto", parallelism={"tensor": 1}),
    "8B, the plan chooses again": manifest("auto", **AUTO),
    "70B in FP8": large("llama-70b-fp8", serving={"minConcurrency": 40, "kvCacheDtype": "fp8"}),
    "405B": large("llama-405b-two-nodes", parallelism={"tensor": 8}),
    "an own head": large(
        "qwen3-8b-eagle3", serving={"maxModelLen": 40_960, "minConcurrency": 60}, parallelism={"tensor": 1}
    ),
    "own layers": large("qwen3-next-mtp", parallelism={"tensor": 2}),
    "an n-gram": large("llama-8b-ngram", serving={"minConcurrency": 60}, parallelism={"tensor": 1}),
    "a draft beside own layers": manifest("next", **QWEN_NEXT),
    "a draft beside a head": manifest("qwen", **QWEN),
    "adapters": manifest("lora", **QWEN, engine={"extraArgs": ["--enable-lora"]}),
    "whole prompts": manifest("whole", **WHOLE_PROMPTS),
    "CPU": large("tiny-cpu", accelerator={"type": "CPU", "cpuCores": 2, "memoryGiB": 2, "kvCacheGiB": 1}),
}


@pytest.mark.parametrize("body", DO_NOT_FIT.values(), ids=DO_NOT_FIT.keys())
def test_what_is_offered_is_accepted_and_does_what_it_says(
    specdecode: Specdecode, write: WriteObject, body: dict[str, Any]
) -> None:
    offered = fixes(specdecode, write, body)
    assert offered
    for fix in offered:
        result = specdecode("plan", write("b.yaml", changed(body, fix["changes"])), "-o", "json")
        (answer,) = json.loads(result.stdout)["objects"]
        assert answer["verdict"] == fix["verdict"], (fix["change"], answer["explanation"])
        assert answer["candidates"][0]["kv_cache_tokens"] == fix["kv_cache_tokens"], fix["change"]


def test_a_draft_gets_no_longer_than_its_target(specdecode: Specdecode, write: WriteObject) -> None:
    speculation = with_draft(draft={"model": "Qwen/Qwen3-1.7B", "maxModelLen": 40_960})
    serving = {"maxModelLen": 40_960, "minConcurrency": 20}
    body = manifest("qwen", **{**QWEN, "speculation": speculation, "serving": serving})
    offered = fixes(specdecode, write, body)
    fields = [{change["field"]: change["value"] for change in fix["changes"]} for fix in offered]
    shorter = [each for each in fields if "spec.serving.maxModelLen" in each]
    assert shorter
    assert all(each["spec.speculation.draft.maxModelLen"] == each["spec.serving.maxModelLen"] for each in shorter)


def test_settings_come_before_hardware_and_say_what_ends_tight(specdecode: Specdecode, write: WriteObject) -> None:
    """gpt-oss-120b with an EAGLE-3 head, two long requests on one H100: no second GPU is needed."""
    body = {**GPT_OSS, "engine": {"version": "0.32"}}
    offered = {fix["change"]: fix for fix in fixes(specdecode, write, manifest("gpt-oss", **body))}
    both = offered["serving.gpuMemoryUtilizationPercent: 95, serving.maxNumBatchedTokens: 2048"]
    assert (both["verdict"], both["kv_cache_tokens"]) == ("Tight", 262_732)
    cache = offered["serving.kvCacheDtype: fp8"]
    assert cache["verdict"] == "Fits"
    order = list(offered)
    assert max(order.index(both["change"]), order.index(cache["change"])) < order.index("parallelism.tensor: 2")
    assert not [change for change in order if "quantization" in change], "MXFP4 is as small as it gets"
    text = specdecode("plan", write("a.yaml", manifest("gpt-oss", **body))).stdout
    (line,) = (line for line in text.splitlines() if line.startswith(f"  {both['change']}  "))
    assert line.endswith("(tight)")


def test_what_is_said_of_the_old_model_goes_with_it(specdecode: Specdecode, write: WriteObject) -> None:
    own = [fix["change"] for fix in fixes(specdecode, write, DO_NOT_FIT["a draft beside own layers"])]
    assert "speculation.method: mtp, no speculation.draft" in own
    assert "speculation: {method: none}, no parallelism.draftTensor" in own
    assert "parallelism.tensor: 8, parallelism.draftTensor: 8" in own
    head = [fix["change"] for fix in fixes(specdecode, write, DO_NOT_FIT["a draft beside a head"])]
    assert "speculation.method: eagle3, speculation.draft: {model: AngelSlim/Qwen3-8B_eagle3}" in head
