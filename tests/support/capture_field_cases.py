"""For every field of a SpecDecodeCapture, a value that makes a difference: see field_cases.py."""

from collections.abc import Mapping
from dataclasses import replace

from tests.support.captures import SHORT, capture_spec, live_spec
from tests.support.field_cases import DEPLOYMENT_FIELDS, FieldCase, at, refused
from tests.support.objects import TINY_CONFIG, Body, pair_70b, tiny_cpu


def _workload(**fields: object) -> Body:
    return capture_spec(workload={**SHORT, **fields})


def _phase(pattern: str, **fields: object) -> Body:
    return _workload(phases=[{"name": "one", "pattern": pattern, "durationSeconds": 20, **fields}])


def _dataset(**fields: object) -> Body:
    dataset = {"configMap": {"name": "prompts"}, "path": "a.jsonl", "format": "JSONL", "outputTokens": 64, **fields}
    return _workload(prompts={"dataset": dataset})


PLAIN = capture_spec()
JUDGED = capture_spec(against={"capture": "golden"})
SYNTHETIC = _workload(prompts={"synthetic": {"promptTokens": 256, "outputTokens": 64}})
ON_A_CLAIM = _dataset(configMap=None, persistentVolumeClaim={"claimName": "prompts"})
BURST = _phase("Burst", burstSize=8, burstIntervalSeconds=10)
STAIRCASE = _phase("Staircase", requestsPerSecond="1", stepSeconds=10, stepRequestsPerSecond="1")
MULTITURN = _phase("Multiturn", concurrency=2, turns=3, thinkSeconds=1, promptTokens=64, outputTokens=64)
TWO_TEMPERATURES = _workload(
    temperatures=[{"temperature": "0.0", "sharePercent": 60}, {"temperature": "1.0", "sharePercent": 40}]
)

LIVE = live_spec()
LIVE_BY_REQUESTS = live_spec(live={"requests": 10})

_SPECULATION = "speculation."
_OF_DEPLOYMENTS = ("speculation.trainedDrafts", "speculation.draftUpdate")


def _of_arm(field: str, case: FieldCase) -> tuple[str, FieldCase]:
    """The same case for an arm of a capture, whose deployment is the case's own."""
    on = capture_spec(arms=[{"name": "only", "speculation": case.on["speculation"]}])
    if case.refusal:  # rules of the CRD may say it in other words
        case = replace(case, refusal=f"spec.arms[0].{_SPECULATION}")
    return f"arms[].{field}", replace(case, on=on, deployment=case.on)


def _comparing(**fields: object) -> Body:
    return capture_spec(arms=[{"name": "plain", "speculation": {"method": "none"}}, {"name": "deployed"}], **fields)


def _of_pair(case: FieldCase) -> FieldCase:
    return replace(case, deployment=pair_70b())


CAPTURE_FIELDS: Mapping[str, FieldCase] = {
    "deployment": at("other", on=PLAIN),
    "source": refused("Live", "spec.live: ", on=PLAIN),
    "live.durationSeconds": at(60, on=LIVE),
    "live.requests": at(20, on=LIVE_BY_REQUESTS),
    "live.samplePercent": at(10, on=LIVE),
    "live.pods[]": at("llama-b", on=live_spec(live={"durationSeconds": 600, "pods": ["llama-a"]})),
    "deploymentDuringCapture": at("Suspend", on=PLAIN),
    "borrowTimeoutSeconds": at(60, on=PLAIN),
    "arms[].name": at("other", on=_comparing()),
    "arms[].targetQuantization": _of_pair(at("FP8", on=_comparing())),
    "arms[].kvCacheDtype": _of_pair(at("fp8", on=_comparing())),
    **dict(
        _of_arm(*each)
        for each in DEPLOYMENT_FIELDS.items()
        if each[0].startswith(_SPECULATION) and each[0] not in _OF_DEPLOYMENTS
    ),
    "arms[].speculation.draft.config": replace(
        _of_arm("", at({**TINY_CONFIG, "vocab_size": 2048}, on=tiny_cpu()))[1],
        refusal="spec.arms[0].speculation.draft",
    ),
    # Of an arm's numbers its plan alone depends on, and whether it fits.
    **{
        f"arms[].{field}": replace(_of_arm(field, DEPLOYMENT_FIELDS[field])[1], refusal="DoesNotFit")
        for field in ("speculation.draft.assume.kvBytesPerToken", "speculation.draft.assume.stateMiBPerRequest")
    },
    "repetitions": at(3, on=PLAIN),
    "slo.ttftMs": at(500, on=_comparing(slo={})),
    "slo.tpotMs": at(50, on=_comparing(slo={})),
    "slo.latencyMs": at(5000, on=_comparing(slo={})),
    "checks.greedyPrompts": at(4, on=_comparing(checks={})),
    "checks.structuredRequests": at(0, on=_comparing(checks={})),
    "workload.prompts.synthetic.promptTokens": at(128, on=SYNTHETIC),
    "workload.prompts.synthetic.outputTokens": at(32, on=SYNTHETIC),
    "workload.prompts.synthetic.sharedPrefixTokens": at(100, on=SYNTHETIC),
    "workload.prompts.dataset.configMap.name": at("others", on=_dataset()),
    "workload.prompts.dataset.persistentVolumeClaim.claimName": at("others", on=ON_A_CLAIM),
    "workload.prompts.dataset.path": at("b.jsonl", on=_dataset()),
    "workload.prompts.dataset.format": at("GSM8K", on=_dataset()),
    "workload.prompts.dataset.promptField": at("question", on=_dataset()),
    "workload.prompts.dataset.outputTokens": at(32, on=_dataset()),
    "workload.phases[].name": at("two", on=BURST),
    "workload.phases[].pattern": at("Poisson", on=_phase("Constant", requestsPerSecond="2")),
    "workload.phases[].concurrency": at(4, on=_phase("Closed", concurrency=2)),
    "workload.phases[].requestsPerSecond": at("4", on=_phase("Constant", requestsPerSecond="2")),
    "workload.phases[].durationSeconds": at(40, on=BURST),
    "workload.phases[].requests": at(16, on=PLAIN),
    "workload.phases[].burstSize": at(16, on=BURST),
    "workload.phases[].burstIntervalSeconds": at(20, on=BURST),
    "workload.phases[].stepSeconds": at(20, on=STAIRCASE),
    "workload.phases[].stepRequestsPerSecond": at("2", on=STAIRCASE),
    "workload.phases[].turns": at(5, on=MULTITURN),
    "workload.phases[].thinkSeconds": at(2, on=MULTITURN),
    "workload.phases[].temperature": at("0.7", on=PLAIN),
    "workload.phases[].promptTokens": at(128, on=SYNTHETIC),
    "workload.phases[].outputTokens": at(32, on=PLAIN),
    "workload.phases[].path": at("b.jsonl", on=_dataset()),
    "workload.phases[].category": at("coding", on=_dataset(format="SPEED-Bench")),
    "workload.temperatures[].temperature": at("0.5", on=TWO_TEMPERATURES),
    "workload.temperatures[].sharePercent": refused(50, "100", on=TWO_TEMPERATURES),
    "workload.warmupRequests": at(0, on=PLAIN),
    "workload.timeoutSeconds": at(60, on=PLAIN),
    "seed": at(7, on=PLAIN),
    "record.tokenIds": at(value=True, on=PLAIN),
    "record.promptTokenIds": at(value=True, on=LIVE),
    "record.stepStats": at(value=False, on=PLAIN),
    "storage.size": at("5Gi", on=PLAIN),
    "storage.storageClassName": at("fast", on=PLAIN),
    "storage.persistentVolumeClaim.claimName": at("mine", on=PLAIN),
    "storage.retain": at(value=False, on=PLAIN),
    "against.capture": at("other", on=JUDGED),
    "against.maxLossPercent.goodput": at(9, on=JUDGED),
    "against.maxLossPercent.acceptance": at(9, on=JUDGED),
    "against.maxLossPercent.stepTime": at(9, on=JUDGED),
    "against.maxLossPercent.latency": at(9, on=JUDGED),
    "suspend": at(value=True, on=PLAIN),
    "deadlineSeconds": at(1800, on=PLAIN),
    "backoffLimit": at(2, on=PLAIN),
    "ttlSecondsAfterFinished": at(60, on=PLAIN),
}
"""Fields of a SpecDecodeCapture's spec."""
