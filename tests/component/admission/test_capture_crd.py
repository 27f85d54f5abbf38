"""A real API server and SpecDecodeCaptures: good ones, bad ones, and what may be changed."""

import json

import pytest
import yaml

from specdecode_operator.api.capture import SpecDecodeCaptureSpec
from tests.support.kubectl import Kubectl

HEADER = {"apiVersion": "specdecode.io/v1alpha1", "kind": "SpecDecodeCapture"}
PHASES = "spec.workload.phases[0]"
OFF = "{name: plain, speculation: {method: none}}"
ONE_REQUEST = "{name: a, pattern: Closed, concurrency: 1, requests: 1}"
SHORTER = "{name: a, pattern: Closed, concurrency: 1, requests: 1, promptTokens: 8}"


def phase(rest: str) -> str:
    return f"workload: {{phases: [{{name: a, {rest}}}]}}"


def dataset(kind: str, rest: str) -> str:
    source = f"{{configMap: {{name: p}}, path: a, format: {kind}}}"
    return f"workload: {{prompts: {{dataset: {source}}}, phases: [{{name: a, {rest}}}]}}"


LIVE = "live: {durationSeconds: 600}"
OF_LOADS = {
    "arms": f"[{OFF}]",
    "repetitions": "1",
    "slo": "{ttftMs: 1}",
    "checks": "{}",
    "against": "{capture: golden}",
    "workload": "{timeoutSeconds: 60}",
    "seed": "1",
    "deploymentDuringCapture": "Suspend",
    "borrowTimeoutSeconds": "60",
}
"""Fields that only a capture with a load has, with a value that is not the default."""


def live(rest: str) -> str:
    return f"{{source: Live, {rest}}}"


GOOD = {
    "minimal": "{}",
    "suspends": "{deploymentDuringCapture: Suspend, seed: 7, record: {tokenIds: true, stepStats: false}}",
    "against a golden one": "against: {capture: golden, maxLossPercent: {goodput: 3, stepTime: 10}}",
    "given claim": "storage: {persistentVolumeClaim: {claimName: mine}, retain: false}",
    "own claim": "storage: {size: 100Gi, storageClassName: fast}",
    "synthetic": "workload: {prompts: {synthetic: {promptTokens: 4096, sharedPrefixTokens: 4096, outputTokens: 64}}}",
    "GSM8K": "workload: {prompts: {dataset: {persistentVolumeClaim: {claimName: gsm8k}, path: gsm8k, format: GSM8K}}}",
    "patterns": """
workload:
  phases:
  - {name: closed, pattern: Closed, concurrency: 16, durationSeconds: 60}
  - {name: constant, pattern: Constant, requestsPerSecond: "4", requests: 100}
  - {name: poisson, pattern: Poisson, requestsPerSecond: "0.25", durationSeconds: 60}
  - {name: burst, pattern: Burst, burstSize: 32, burstIntervalSeconds: 10, requests: 320}
  - {name: stairs, pattern: Staircase, requestsPerSecond: "1", stepSeconds: 30, stepRequestsPerSecond: "0.5",
     durationSeconds: 300}
  - {name: talks, pattern: Multiturn, concurrency: 4, turns: 5, thinkSeconds: 2, durationSeconds: 120}
  temperatures:
  - {temperature: "0.0", sharePercent: 70}
  - {temperature: "0.7", sharePercent: 30}
""",
    "sweep of temperatures": """
workload:
  prompts: {dataset: {configMap: {name: p}, path: a.jsonl, format: JSONL}}
  phases:
  - {name: greedy, pattern: Closed, concurrency: 4, requests: 8, temperature: "0.0"}
  - {name: warm, pattern: Closed, concurrency: 4, requests: 8, temperature: "0.8", outputTokens: 64}
""",
    "sweep of contexts": """
workload:
  prompts: {synthetic: {promptTokens: 512, sharedPrefixTokens: 64}}
  phases:
  - {name: short, pattern: Closed, concurrency: 4, requests: 8}
  - {name: long, pattern: Closed, concurrency: 4, requests: 8, promptTokens: 32768}
""",
    "SPEED-Bench": """
workload:
  prompts: {dataset: {persistentVolumeClaim: {claimName: p}, path: speed/throughput_1k.jsonl, format: SPEED-Bench}}
  phases:
  - {name: code, pattern: Closed, concurrency: 4, requests: 8, path: speed/qualitative.jsonl, category: coding}
""",
    "recorded traffic": """
workload:
  prompts: {dataset: {persistentVolumeClaim: {claimName: p}, path: default/demo/as-deployed/1, format: Trace}}
  phases:
  - {name: as-it-was, pattern: Recorded, durationSeconds: 60}
  - {name: closed, pattern: Closed, concurrency: 4, requests: 8, temperature: "0.7"}
""",
    # As many as the schema takes: the rules over them must stay within the API server's cost limit.
    "many phases": "workload: {phases: ["
    + ", ".join(f"{{name: p{i}, pattern: Closed, concurrency: 1, requests: 1}}" for i in range(32))
    + "]}",
    "many arms": "arms: ["
    + ", ".join(
        f"{{name: k{k}, speculation: {{method: ngram, numSpeculativeTokens: {k}, ngram: {{promptLookupMax: {k}}},"
        f" numSpeculativeTokensByBatchSize: [{{from: 1, to: 8, numSpeculativeTokens: {k}}}]}}}}"
        for k in range(1, 9)
    )
    + "]",
    "arms": "{arms: [{name: plain, speculation: {method: none}}, {name: fp8, targetQuantization: FP8,"
    " kvCacheDtype: fp8}, {name: as-deployed}], repetitions: 3, slo: {ttftMs: 500, tpotMs: 50, latencyMs: 9000},"
    " checks: {greedyPrompts: 0, structuredRequests: 64}}",
    "one arm": "{arms: [{name: plain, speculation: {method: none}}], repetitions: 1}",
    "live": "{source: Live, live: {durationSeconds: 600, samplePercent: 10, pods: [llama-a, llama-b]},"
    " record: {tokenIds: true, promptTokenIds: true}, backoffLimit: 1}",
    "live by requests": "{source: Live, live: {requests: 1000}, deadlineSeconds: 600}",
    "live with what the defaults are": "{source: Live, live: {durationSeconds: 60}, deploymentDuringCapture: Keep,"
    " borrowTimeoutSeconds: 120, workload: {warmupRequests: 4, timeoutSeconds: 600}, seed: 0, deadlineSeconds: 3600}",
    "lives on": "{suspend: true, deadlineSeconds: 600, backoffLimit: 2, ttlSecondsAfterFinished: 0}",
}
BAD = {
    "no phases": ("workload: {phases: []}", "spec.workload.phases", "at least 1 item"),
    "unknown pattern": (phase("pattern: Sine, requests: 1"), f"{PHASES}.pattern", '"Staircase", "Multiturn"'),
    "closed without clients": (
        phase("pattern: Closed, requests: 1"),
        f"{PHASES}.concurrency",
        "pattern Closed needs it: set it, to 16 for example",
    ),
    "constant without a rate": (phase("pattern: Constant, requests: 1"), f"{PHASES}.requestsPerSecond", 'to "4"'),
    "burst without a size": (
        phase("pattern: Burst, burstIntervalSeconds: 1, requests: 1"),
        f"{PHASES}.burstSize",
        "needs it",
    ),
    "closed with a rate": (
        phase('pattern: Closed, concurrency: 1, requestsPerSecond: "1", requests: 1'),
        f"{PHASES}.requestsPerSecond",
        "pattern Closed does not use it: remove it",
    ),
    "thinking without turns": (
        phase('pattern: Constant, requestsPerSecond: "1", requests: 1, thinkSeconds: 1'),
        f"{PHASES}.thinkSeconds",
        "remove it",
    ),
    "never ends": (phase("pattern: Closed, concurrency: 1"), f"{PHASES}.durationSeconds", "set one of"),
    "ends twice": (
        phase("pattern: Closed, concurrency: 1, requests: 1, durationSeconds: 1"),
        f"{PHASES}.durationSeconds",
        "set one of",
    ),
    "a rate of nothing": (
        phase('pattern: Constant, requestsPerSecond: "0", requests: 1'),
        f"{PHASES}.requestsPerSecond",
        "should match",
    ),
    "a rate that is a float": (
        phase("pattern: Constant, requestsPerSecond: 0.5, requests: 1"),
        f"{PHASES}.requestsPerSecond",
        "must be of type string",
    ),
    "a phase called warmup": (
        "workload: {phases: [{name: warmup, pattern: Closed, concurrency: 1, requests: 1}]}",
        f"{PHASES}.name",
        "use another name",
    ),
    "two phases of one name": (
        f"workload: {{phases: [{ONE_REQUEST}, {ONE_REQUEST}]}}",
        "spec.workload.phases",
        "rename one",
    ),
    "shares of less": (
        'workload: {temperatures: [{temperature: "0.5", sharePercent: 99}]}',
        "spec.workload.temperatures",
        "the shares add up to 99: make their sharePercent 100 in all",
    ),
    "a temperature that is a float": (
        "workload: {temperatures: [{temperature: 0.5, sharePercent: 100}]}",
        "spec.workload.temperatures[0].temperature",
        "must be of type string",
    ),
    "no prompts": ("workload: {prompts: {}}", "spec.workload.prompts.synthetic", "set one of synthetic and dataset"),
    "prompts from two places": (
        "workload: {prompts: {synthetic: {}, dataset: {configMap: {name: p}, path: a, format: JSONL}}}",
        "spec.workload.prompts.synthetic",
        "set one of synthetic and dataset",
    ),
    "a dataset from nowhere": (
        "workload: {prompts: {dataset: {path: a, format: JSONL}}}",
        "spec.workload.prompts.dataset.configMap",
        "set one of configMap and persistentVolumeClaim",
    ),
    "a dataset outside": (
        "workload: {prompts: {dataset: {configMap: {name: p}, path: ../a, format: JSONL}}}",
        "spec.workload.prompts.dataset.path",
        "without leading / and without ..",
    ),
    "a prefix longer than the prompt": (
        "workload: {prompts: {synthetic: {promptTokens: 8, sharedPrefixTokens: 9}}}",
        "spec.workload.prompts.synthetic.sharedPrefixTokens",
        "raise promptTokens",
    ),
    "a length of prompts of a dataset": (
        dataset("JSONL", "pattern: Closed, concurrency: 1, requests: 1, promptTokens: 9"),
        "spec.workload.phases",
        "promptTokens is for synthetic prompts",
    ),
    "a file of synthetic prompts": (
        phase("pattern: Closed, concurrency: 1, requests: 1, path: a"),
        "spec.workload.phases",
        "path is a file of prompts.dataset",
    ),
    "a file outside": (
        dataset("JSONL", "pattern: Closed, concurrency: 1, requests: 1, path: ../a"),
        f"{PHASES}.path",
        "without leading / and without ..",
    ),
    "a category of something else": (
        dataset("JSONL", "pattern: Closed, concurrency: 1, requests: 1, category: coding"),
        "spec.workload.phases",
        "category needs a dataset of format SPEED-Bench",
    ),
    "moments of nothing": (
        phase("pattern: Recorded, requests: 1"),
        "spec.workload.phases",
        "takes its arrival times from a dataset of format Trace",
    ),
    "a length of recorded answers": (
        dataset("Trace", "pattern: Recorded, requests: 1, outputTokens: 9"),
        "spec.workload.phases",
        "sets the output lengths",
    ),
    "conversations of a trace": (
        dataset("Trace", "pattern: Multiturn, concurrency: 1, turns: 2, requests: 1"),
        "spec.workload.phases",
        "another pattern than Multiturn",
    ),
    "a phase shorter than the prefix": (
        f"workload: {{prompts: {{synthetic: {{sharedPrefixTokens: 9}}}}, phases: [{SHORTER}]}}",
        "spec.workload.phases",
        "raise it, or lower that",
    ),
    "a claim twice": (
        "storage: {persistentVolumeClaim: {claimName: mine}, size: 1Gi}",
        "spec.storage.persistentVolumeClaim",
        "remove it",
    ),
    "no size": ("storage: {size: much}", "spec.storage.size", "should match"),
    "two arms of one name": (f"arms: [{OFF}, {OFF}]", "spec.arms", "two arms have one name: rename one"),
    "an arm that is no folder": ("arms: [{name: ../a}]", "spec.arms[0].name", "should match"),
    "an arm that cannot speculate so": (
        f"arms: [{OFF}, {{name: ngram, speculation: {{method: ngram}}}}]",
        "spec.arms[1].speculation.numSpeculativeTokens",
        "method ngram needs it",
    ),
    "nine arms": (
        f"arms: [{', '.join(f'{{name: a{i}}}' for i in range(9))}]",
        "spec.arms",
        "must have at most 8 items",
    ),
    "arms that are started once": (
        f"{{arms: [{OFF}, {{name: other}}], repetitions: 1}}",
        "spec.repetitions",
        "several arms need 2 or more",
    ),
    "a golden capture and several arms": (
        f"{{arms: [{OFF}, {{name: plain}}], against: {{capture: golden}}}}",
        "spec.against",
        "remove it, or all arms but one",
    ),
    "an SLO without arms": ("slo: {ttftMs: 1}", "spec.slo", "list two arms or more"),
    "checks of one arm": (f"{{arms: [{OFF}], checks: {{}}}}", "spec.checks", "list two arms or more"),
    "live without an extent": ("source: Live", "spec.live", "set live.durationSeconds"),
    "an extent of a load": ("live: {requests: 1}", "spec.live", "remove it, or set source: Live"),
    "live without an end": ("{source: Live, live: {}}", "spec.live.durationSeconds", "set one of"),
    "live with two ends": (live("live: {durationSeconds: 1, requests: 1}"), "spec.live.durationSeconds", "set one of"),
    "nothing of live": (
        live("live: {requests: 1, samplePercent: 0}"),
        "spec.live.samplePercent",
        "greater than or equal to 1",
    ),
    "more than all of live": (
        live("live: {requests: 1, samplePercent: 101}"),
        "spec.live.samplePercent",
        "less than or equal to 100",
    ),
    "prompts of a load": ("record: {promptTokenIds: true}", "spec.record.promptTokenIds", "or set source: Live"),
    **{
        f"live with {field}": (live(f"{LIVE}, {field}: {value}"), f"spec.{field}", "remove it, or set source: Load")
        for field, value in OF_LOADS.items()
    },
    "live with two limits of time": (live(f"{LIVE}, deadlineSeconds: 60"), "spec.deadlineSeconds", "remove one"),
    "another source": ("source: Replay", "spec.source", '"Load", "Live"'),
    "no time": ("deadlineSeconds: 0", "spec.deadlineSeconds", "greater than or equal to 30"),
}


def body(spec: str, name: str = "demo") -> str:
    return yaml.safe_dump(
        {**HEADER, "metadata": {"name": name}, "spec": {"deployment": "llama", **yaml.safe_load(spec)}}
    )


@pytest.mark.parametrize("name", GOOD)
def test_valid_captures_are_stored_and_parse(kubectl: Kubectl, name: str) -> None:
    answer = kubectl.write(body(GOOD[name]))
    assert answer.returncode == 0, answer.stderr
    SpecDecodeCaptureSpec.model_validate(kubectl.object("sdc", "demo")["spec"])


@pytest.mark.parametrize("name", BAD)
def test_invalid_captures_are_refused_with_field_and_fix(kubectl: Kubectl, name: str) -> None:
    spec, field, fix = BAD[name]
    answer = kubectl.create(body(spec))
    assert answer.returncode != 0
    assert f"{field}:" in answer.stderr or f"{field} in body" in answer.stderr
    assert fix in answer.stderr


def test_spec_deployment_is_required(kubectl: Kubectl) -> None:
    answer = kubectl.create(yaml.safe_dump({**HEADER, "metadata": {"name": "demo"}, "spec": {}}))
    assert "spec.deployment: Required" in answer.stderr


@pytest.mark.parametrize("name", ["Demo", "a.b", "a" * 53])
def test_names_invalid_for_a_job_are_refused(kubectl: Kubectl, name: str) -> None:
    answer = kubectl.create(body("{}", name))
    assert "metadata.name" in answer.stderr


def test_defaults_are_filled_in(kubectl: Kubectl) -> None:
    kubectl.write(body("{}"))
    assert kubectl.object("sdc", "demo")["spec"] == {
        "deployment": "llama",
        "source": "Load",
        "deploymentDuringCapture": "Keep",
        "borrowTimeoutSeconds": 120,
        "workload": {"warmupRequests": 4, "timeoutSeconds": 600},
        "seed": 0,
        "record": {"tokenIds": False, "promptTokenIds": False, "stepStats": True},
        "storage": {"retain": True},
        "suspend": False,
        "deadlineSeconds": 3600,
        "backoffLimit": 0,
    }


MUTABLE = {
    "suspend": {"suspend": True},
    "retain": {"storage": {"retain": False}},
    "ttl": {"ttlSecondsAfterFinished": 60},
}
IMMUTABLE = {
    "deployment": {"deployment": "other"},
    "deploymentDuringCapture": {"deploymentDuringCapture": "Suspend"},
    "workload": {"workload": {"warmupRequests": 5}},
    "workload of one that had none": {"workload": {"prompts": {"synthetic": {}}}},
    "seed": {"seed": 1},
    "record": {"record": {"tokenIds": True}},
    "size": {"storage": {"size": "30Gi"}},
    "persistentVolumeClaim": {"storage": {"persistentVolumeClaim": {"claimName": "mine"}}},
    "deadlineSeconds": {"deadlineSeconds": 60},
    "backoffLimit": {"backoffLimit": 1},
    "arms": {"arms": [{"name": "as-deployed"}]},
    "repetitions": {"repetitions": 2},
    "against": {"against": {"capture": "golden"}},
    "source": {"source": "Live", "live": {"durationSeconds": 60}},
}


@pytest.mark.parametrize("name", MUTABLE)
def test_fields_not_used_by_the_job_are_mutable(kubectl: Kubectl, name: str) -> None:
    kubectl.write(body("{}"))
    answer = kubectl.write(body(json.dumps(MUTABLE[name])))
    assert answer.returncode == 0, answer.stderr


@pytest.mark.parametrize("name", IMMUTABLE)
def test_fields_used_by_the_job_are_immutable(kubectl: Kubectl, name: str) -> None:
    kubectl.write(body("{}"))
    answer = kubectl.write(body(json.dumps(IMMUTABLE[name])))
    assert answer.returncode != 0
    assert "cannot be changed: another run is another object" in answer.stderr


def test_live_settings_are_immutable(kubectl: Kubectl) -> None:
    kubectl.write(body(live(LIVE)))
    answer = kubectl.write(body(live("live: {durationSeconds: 60}")))
    assert "spec.live" in answer.stderr
    assert "cannot be changed: another run is another object" in answer.stderr


def test_kubectl_get_prints_progress_and_verdict(kubectl: Kubectl) -> None:
    kubectl.write(body("{}"))
    common = {"message": "", "observedGeneration": 1, "lastTransitionTime": "2026-01-01T00:00:00Z"}
    status = {
        "status": {
            "phase": "Succeeded",
            "summary": {"requests": {"sent": 9, "completed": 8}, "acceptance": "71%"},
            "conditions": [
                {"type": "Succeeded", "status": "True", "reason": "Captured", **common},
                {"type": "Pays", "status": "False", "reason": "DoesNotPay", **common},
            ],
        }
    }
    kubectl.must("patch", "sdc", "demo", "--subresource=status", "--type=merge", f"--patch={json.dumps(status)}")
    header, row = kubectl.must("get", "sdc").splitlines()
    assert header.split() == ["NAME", "STATUS", "REASON", "DEPLOYMENT", "REQUESTS", "ACCEPTANCE", "VERDICT", "AGE"]
    assert row.split()[:7] == ["demo", "Succeeded", "Captured", "llama", "8", "71%", "DoesNotPay"]
