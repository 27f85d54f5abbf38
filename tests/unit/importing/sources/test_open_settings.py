"""What objects and values say that cannot be carried, or not be read: each is named."""

from typing import Any

import pytest

from tests.unit.cli.conftest import Specdecode, WriteObject
from tests.unit.cli.old_deployments import LLAMA_8B, engine
from tests.unit.importing.sources.test_sources import INVALID


def inference_service(predictor: dict[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": "serving.kserve.io/v1beta1",
        "kind": "InferenceService",
        "metadata": {"name": "llama"},
        "spec": {"predictor": predictor},
    }


GPU = {"limits": {"nvidia.com/gpu": "1"}}
HUGGINGFACE = {"modelFormat": {"name": "huggingface"}, "args": [f"--model_id={LLAMA_8B}"], "resources": GPU}
LLM = {
    "apiVersion": "serving.kserve.io/v1alpha1",
    "kind": "LLMInferenceService",
    "metadata": {"name": "llama"},
    "spec": {"model": {"uri": f"hf://{LLAMA_8B}"}, "template": {"containers": [{"name": "main", "resources": GPU}]}},
}
STACK = {"name": "m", "repository": "vllm/vllm-openai", "tag": "v0.33.0", "modelURL": LLAMA_8B, "requestGPU": 1}


def stack(**model: Any) -> dict[str, Any]:
    return {"servingEngineSpec": {"modelSpec": [{**STACK, **model}]}}


def llm(**spec: Any) -> dict[str, Any]:
    return {**LLM, "spec": {**LLM["spec"], **spec}}  # type: ignore[dict-item]


def claiming() -> dict[str, Any]:
    """A StatefulSet whose model lies on a claim of each pod's own."""
    body = engine("/m/llama", volumeMounts=[{"name": "m", "mountPath": "/m"}])
    body["spec"]["volumeClaimTemplates"] = [{"metadata": {"name": "m"}}]
    return {**body, "kind": "StatefulSet"}


OPEN = {
    "a runtime that is elsewhere": (
        inference_service({"model": {**HUGGINGFACE, "runtime": "ours"}}),
        "spec.predictor.model.runtime: ours: is not beside it",
    ),
    "an autoscaler": (
        inference_service({"model": HUGGINGFACE, "minReplicas": 1, "maxReplicas": 5}),
        "spec.replicas: minReplicas 1, maxReplicas 5",
    ),
    "a canary": (
        inference_service({"model": HUGGINGFACE, "canaryTrafficPercent": 10}),
        "spec.predictor.canaryTrafficPercent",
    ),
    "workers": (inference_service({"model": HUGGINGFACE, "workerSpec": {"size": 2}}), "spec.predictor.workerSpec"),
    "a bucket": (
        inference_service({"model": {**HUGGINGFACE, "args": [], "storageUri": "s3://bucket/llama?sig=sk-secret"}}),
        "spec.target.model: s3://bucket/llama: lies at an address",
    ),
    "prefill apart": (llm(prefill={"replicas": 2}), "spec.prefill: is set: no field of the object means it"),
    "other configurations": (llm(baseRefs=[{"name": "shared"}]), "spec.baseRefs: is set"),
    "adapters": (llm(model={"uri": f"hf://{LLAMA_8B}", "lora": {"adapters": [{"name": "a"}]}}), "spec.model.lora"),
    "workers of data": (llm(worker={"containers": [{}]}, parallelism={"data": 2}), "spec.worker: is set"),
    "a size in quotes": (llm(parallelism={"tensor": "2"}), 'spec.parallelism.tensor: "2": must be a whole number'),
    "a switch for a size": (llm(parallelism={"data": True}), "spec.parallelism.data: true: must be a whole number"),
    "replicas in quotes": (llm(replicas="3"), 'spec.replicas: "3": must be a whole number, without quotes'),
    "far too many replicas in quotes": (llm(replicas=str(2**60)), "must be at most 1,000"),
    "LMCache": (stack(lmcacheConfig={"enabled": True}), "modelSpec[0].lmcacheConfig: enabled: helm template"),
    "Ray": (stack(raySpec={"headNode": {}}), "servingEngineSpec.modelSpec[0].raySpec"),
    "autoscaling by KEDA": (stack(keda={"enabled": True}), "servingEngineSpec.modelSpec[0].keda"),
    "a setting that came later": (stack(vllmConfig={"newest": 1}), "vllmConfig.newest"),
    "a Secret as variables": (stack(envFromSecret={"name": "s3"}), "envFromSecret: s3"),
    "a claim for each pod": (claiming(), "spec.models: volumeClaimTemplates m"),
}


@pytest.mark.parametrize(("body", "words"), OPEN.values(), ids=OPEN)
def test_what_cannot_be_carried_is_named(
    specdecode: Specdecode, write: WriteObject, body: dict[str, Any], words: str
) -> None:
    result = specdecode("import", "-f", write("f.yaml", body))
    assert result.exit_code == INVALID
    assert words in " ".join(result.stderr.split())
    assert "sk-secret" not in result.output
