"""What a real API server does with good SpecDecodeDeployments."""

import json
import re
from typing import Any

import pytest
import yaml

from specdecode_operator.api.deployment import SpecDecodeDeploymentSpec
from specdecode_operator.api.deployment_status import SpecDecodeDeploymentStatus
from specdecode_operator.vllm.profiles import KNOWN_VERSIONS
from tests.component.admission.acceptance_cases import GOOD, LLAMA, MINIMAL
from tests.support.kubectl import Kubectl
from tests.support.releases import releases, snapshot

NOON = "2026-11-21T12:00:00Z"
HEADER = {"apiVersion": "specdecode.io/v1alpha1", "kind": "SpecDecodeDeployment"}


@pytest.mark.parametrize("spec", GOOD.values(), ids=GOOD.keys())
def test_valid_spec_is_stored_with_the_defaults_of_the_models(kubectl: Kubectl, spec: str) -> None:
    answer = kubectl.write(sdd(spec))
    assert answer.returncode == 0, answer.stderr
    stored = kubectl.object("sdd", "good")["spec"]
    parsed = SpecDecodeDeploymentSpec.model_validate(stored)
    # The API server and the models fill in the same defaults.
    assert parsed == SpecDecodeDeploymentSpec.model_validate(yaml.safe_load(spec))


def test_minimal_spec_gets_the_documented_defaults(kubectl: Kubectl) -> None:
    kubectl.write(sdd(MINIMAL))
    assert kubectl.object("sdd", "good")["spec"] == {
        "target": {"model": "org/target", "quantization": "AsCheckpoint"},
        "accelerator": {"type": "GPU"},
        "parallelism": {"pipeline": 1, "data": 1, "expert": False},
        "rollout": {"strategy": "Replace", "paused": False},
        "serving": {
            "maxNumSeqs": 256,
            "maxNumBatchedTokens": 8192,
            "dtype": "auto",
            "kvCacheDtype": "auto",
            "gpuMemoryUtilizationPercent": 92,
            "enforceEager": False,
            "minConcurrency": 1,
            "port": 8000,
        },
        "objective": "Quality",
        "replicas": 1,
        "engine": {"version": KNOWN_VERSIONS[-1], "recorder": True},
        "suspend": False,
    }


def test_new_object_has_observed_generation_minus_one(kubectl: Kubectl) -> None:
    kubectl.apply(sdd(LLAMA))
    assert kubectl.object("sdd", "good")["status"] == {"observedGeneration": -1}


def test_defaults_complete_a_partial_serving_section(kubectl: Kubectl) -> None:
    kubectl.write(sdd(MINIMAL + "\nserving: {port: 9000}"))
    assert kubectl.object("sdd", "good")["spec"]["serving"]["maxNumSeqs"] == 256


def test_second_server_side_apply_changes_nothing(kubectl: Kubectl) -> None:
    first = kubectl.apply(sdd(LLAMA), "--server-side")
    # Until the operator has written one, the first write of anybody stores the status that the CRD gives.
    kubectl.patch_status("good", {"observedGeneration": 1})
    before = kubectl.object("sdd", "good")["metadata"]
    second = kubectl.apply(sdd(LLAMA), "--server-side")
    after = kubectl.object("sdd", "good")["metadata"]
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert after["resourceVersion"] == before["resourceVersion"]
    assert after["generation"] == 1


@pytest.mark.parametrize("how", [(), ("--server-side",)], ids=["client-side", "server-side"])
def test_apply_without_replicas_leaves_them_to_the_autoscaler(kubectl: Kubectl, how: tuple[str, ...]) -> None:
    kubectl.apply(sdd(MINIMAL), *how)
    scaled = kubectl("scale", "sdd/good", "--replicas=3")
    assert scaled.returncode == 0, scaled.stderr
    again = kubectl.apply(sdd(MINIMAL + "\nserving: {port: 9000}"), *how)
    assert again.returncode == 0, again.stderr
    spec = kubectl.object("sdd", "good")["spec"]
    assert (spec["replicas"], spec["serving"]["port"]) == (3, 9000)


def test_scale_reports_pods_and_selector(kubectl: Kubectl) -> None:
    kubectl.write(sdd(MINIMAL))
    kubectl.patch_status("good", {"replicas": 2, "selector": "specdecode.io/deployment=good"})
    path = f"/apis/specdecode.io/v1alpha1/namespaces/{kubectl.namespace}/specdecodedeployments/good/scale"
    scale = json.loads(kubectl("get", "--raw", path).stdout)
    assert scale["spec"] == {"replicas": 1}
    assert scale["status"] == {"replicas": 2, "selector": "specdecode.io/deployment=good"}


def test_kubectl_get_prints_the_documented_columns(kubectl: Kubectl) -> None:
    kubectl.write(sdd(LLAMA))
    kubectl.patch_status("good", status())
    header, row = kubectl("get", "sdd").stdout.splitlines()
    assert header.split() == ["NAME", "READY", "STATUS", "MODEL", "METHOD", "K", "ACCEPTANCE", "AGE"]
    model = "meta-llama/Llama-3.1-70B-Instruct"
    assert row.split()[:8] == ["good", "1/2", "AllReplicasServe", model, "draft_model", "5", "was", "71%"]
    header, row = kubectl("get", "sdd", "-o", "wide").stdout.splitlines()
    assert header.split()[8:] == ["PLAN", "TP", "TRAINED", "STALE", "PRECISION", "PRODUCT", "TOKENS", "DRAFT"]
    plan, tensor, trained, stale, *rest = row.split()[9:]
    assert trained == "chat"
    assert re.fullmatch(r"[0-9]+[a-z].*", stale), row
    draft = "meta-llama/Llama-3.1-8B-Instruct"
    assert [plan, tensor, *rest] == ["Fits", "2", "BF16", "NVIDIA-H200", "238896", draft]


@pytest.mark.parametrize("kind", ["specdecodedeployment", "sdd", "specdecode", "all"])
def test_object_is_found_by_its_names_and_categories(kubectl: Kubectl, kind: str) -> None:
    kubectl.write(sdd(MINIMAL))
    assert "specdecodedeployment.specdecode.io/good" in kubectl("get", kind, "-o", "name").stdout


def test_status_patch_keeps_kopf_state_and_generation(kubectl: Kubectl) -> None:
    kubectl.write(sdd(MINIMAL))
    given = {**status(), "kopf": {"progress": {"reconcile": {"retries": 1}}}}
    kubectl.patch_status("good", given)
    stored = kubectl.object("sdd", "good")
    assert stored["status"] == given
    assert stored["metadata"]["generation"] == 1


def sdd(spec: str) -> str:
    """YAML of a SpecDecodeDeployment named good."""
    return yaml.safe_dump({**HEADER, "metadata": {"name": "good"}, "spec": yaml.safe_load(spec)})


def status() -> dict[str, Any]:
    """Status as the operator writes it, every field filled."""
    condition = {
        "type": "Ready",
        "status": "True",
        "reason": "AllReplicasServe",
        "message": "1 of 1 replicas serve.",
        "observedGeneration": 1,
        "lastTransitionTime": "2026-11-21T10:00:00Z",
    }
    memory = (
        *("total", "requested", "targetWeights", "draftWeights", "adapters", "state", "activation", "cudaGraphs"),
        "nonTorch",
    )
    plan = {
        "verdict": "Fits",
        "explanation": "2 GPUs.",
        "product": "NVIDIA-H200",
        "tensor": 2,
        "pipeline": 1,
        "data": 1,
        "expert": False,
        "draftTensor": 2,
        "gpusPerReplica": 2,
        "targetQuantization": "BF16",
        "draftQuantization": "BF16",
        "targetKnowledge": "exact",
        "draftKnowledge": "estimated",
        "kvCacheDtype": "auto",
        "maxModelLen": 8192,
        "perGpu": {f"{term}Bytes": 1 for term in (*memory, "availableKv", "margin")},
        "kvBytesPerToken": 229_376,
        "kvCacheTokens": 238_896,
        "maxConcurrency": "29.2",
        "uncalibrated": "No public log of this GPU confirms the figures.",
        "startup": {
            "preparation": {"fastestSeconds": 0, "slowestSeconds": 600},
            "engine": {"fastestSeconds": 20, "slowestSeconds": 840},
            "deadlineSeconds": 1080,
        },
        "chosenBy": "Quality among target BF16 and draft BF16",
        "fixes": ["none"],
        "advice": ["none"],
    }
    observed = {
        "engines": 1,
        "engineVersion": "0.32.0",
        "kvCacheTokens": 238_000,
        "kvCacheResidualBytes": 205_520_896,
        "kvCacheResidual": "+0.4%",
        "maxConcurrency": "29.1",
        "startup": {
            "pod": "good-0",
            **{
                f"{part}Seconds": 1
                for part in ("preparation", "download", "engine", "load", "compile", "warmUp", "graphs")
            },
        },
        "numSpeculativeTokens": 5,
        "draftTokens": 100,
        "acceptedTokens": 71,
        "acceptance": "71%",
        "acceptancePercent": 71,
        "meanAcceptanceLength": "4.55",
        "meanDraftLength": "5.00",
        "draftedStepsPercent": 98,
    }
    feature = {"feature": "method", "asked": "draft_model", "inForce": "True", "message": "acceptance 71%"}
    model = SpecDecodeDeploymentStatus.model_validate(
        {
            "observedGeneration": 1,
            "conditions": [condition],
            "plan": plan,
            "observed": observed,
            "acceptance": {
                "text": "was 71%",
                "percent": 71,
                "meanLength": "4.55",
                "measuredWith": "draft_model, K=5",
                "saidUntil": "2026-11-21T10:00:00Z",
            },
            "speculation": [feature],
            "figures": {
                "source": "Pods",
                "message": "http://prometheus:9090: does not answer",
                "overSeconds": 300,
                "values": [{"name": "time_to_first_token_p50", "value": "0.1"}],
            },
            "policy": {
                "mode": "Enforce",
                "action": "Keep",
                "outcome": "Kept",
                "reason": "BestMeasured",
                "message": "m",
                "target": "on",
                "evidence": "nightly",
                "arm": "off",
                "since": NOON,
                "asked": "1" * 16,
                "left": "on",
                "speculation": {"method": "ngram", "numSpeculativeTokens": 3},
                "acceptanceFactor": "0.5",
                "triedInVain": True,
                "failedArms": ["k8"],
                "restarts": [NOON],
                "decisions": [
                    {"at": NOON, "action": "TurnOff", "outcome": "Done", "target": "off", "message": "m"},
                ],
            },
            "trainedDraft": {
                "training": "chat",
                "claim": "chat-training",
                "path": "team/chat/head",
                "sha256": "ab" * 32,
                "since": NOON,
                "reason": "Promoted",
                "message": "m",
                "failed": ["1" * 16],
                "update": "InPlace",
                "updateMessage": "m",
                "startTraining": "older",
                "startSha256": "cd" * 32,
            },
            "canaries": {
                "right": 40,
                "wrong": 1,
                "unconfirmed": 0,
                "failed": 0,
                "unsupported": "max_logprobs is 0",
                "generatedTokensPerHour": 990,
                "promptTokensPerHour": 9000,
            },
            "canary": {
                "engines": "1/1",
                "blocks": 8,
                "loadRatio": "1.02",
                "tokensPerStep": "2.51",
                "earlierTokensPerStep": "2.40",
                "figures": [{"name": "tpot", "verdict": "Holds", "ratio": "1.01", "low": "0.98", "high": "1.04"}],
            },
            "kept": [{"entry": "good-last-good/workload", "sha256": "0" * 64}],
            "ready": "1/2",
            "replicas": 1,
            "readyReplicas": 1,
            "selector": "specdecode.io/deployment=good",
        }
    )
    dumped = model.model_dump(mode="json", by_alias=True)
    # What a method does not have: the API server drops it.
    speculation = dumped["policy"]["speculation"]
    dumped["policy"]["speculation"] = {name: value for name, value in speculation.items() if value is not None}
    return dumped


@pytest.mark.parametrize("release", releases())
def test_objects_of_earlier_releases_are_stored_without_losing_fields(kubectl: Kubectl, release: str) -> None:
    for entry in snapshot(release):
        body = entry["object"]
        answer = kubectl.create(json.dumps(body))
        assert answer.returncode == 0, answer.stderr
        stored = kubectl.object(body["kind"].lower(), body["metadata"]["name"])["spec"]
        assert _lost(body["spec"], stored) == []


def _lost(given: Any, stored: Any) -> list[Any]:
    """What an object had that the stored one has not, or has otherwise; new defaults are added to it."""
    if isinstance(given, dict) and isinstance(stored, dict):
        return [lost for name, each in given.items() for lost in _lost(each, stored.get(name))]
    if isinstance(given, list) and isinstance(stored, list) and len(given) == len(stored):
        return [lost for each, kept in zip(given, stored, strict=True) for lost in _lost(each, kept)]
    return [] if given == stored else [(given, stored)]
