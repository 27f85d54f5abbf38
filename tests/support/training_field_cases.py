"""For every field of a SpecDecodeTraining, a value that makes a difference: see field_cases.py."""

from collections.abc import Mapping

from tests.support.field_cases import FieldCase, at
from tests.support.objects import tiny_cpu
from tests.support.trainings import training_spec

PLAIN = training_spec()
ROWS = {"configMap": {"name": "rows"}, "path": "rows.jsonl"}
ROWS_ON_A_CLAIM = {"persistentVolumeClaim": {"claimName": "rows"}, "path": "rows.jsonl"}
WITH_ROWS = {**training_spec(), "captures": [], "dataset": ROWS}
WITH_CLAIM = {**WITH_ROWS, "dataset": ROWS_ON_A_CLAIM}
CONTINUED = training_spec(**{"from": {"model": "team/head", "revision": "main"}})
FROM_A_CLAIM = training_spec(**{"from": {"model": "old/head", "persistentVolumeClaim": {"claimName": "heads"}}})
FROM_THE_HUB = tiny_cpu(models={})
JUDGED = training_spec(judgement={"slo": {"ttftMs": 100, "tpotMs": 20, "latencyMs": 1000}})

TRAINING_FIELDS: Mapping[str, FieldCase] = {
    "deployment": at("other", PLAIN),
    "captures[]": at("morning", PLAIN),
    "dataset.configMap.name": at("others", WITH_ROWS),
    "dataset.persistentVolumeClaim.claimName": at("others", WITH_CLAIM),
    "dataset.path": at("more.jsonl", WITH_ROWS),
    "method": at("peagle", PLAIN),
    "from.model": FieldCase("team/other", CONTINUED, deployment=FROM_THE_HUB),
    "from.revision": FieldCase("v2", CONTINUED, deployment=FROM_THE_HUB),
    "from.persistentVolumeClaim.claimName": at("others", FROM_A_CLAIM),
    "trainer.image": at("localhost/trainer:2", PLAIN),
    "trainer.args[]": at("--weight-decay=0.1", PLAIN),
    "trainer.epochs": at(5, PLAIN),
    "trainer.learningRate": at("1e-4", PLAIN),
    "trainer.sequenceLength": at(512, PLAIN),
    "trainer.gpus": FieldCase(1, PLAIN, refusal="runs on CPUs"),
    "holdoutPercent": at(20, PLAIN),
    "minRows": at(300, PLAIN),
    "maxTokens": at(1_000_000, PLAIN),
    "judgement.enabled": at(False, PLAIN),
    "judgement.numSpeculativeTokens": at(5, PLAIN),
    "judgement.requests": at(50, PLAIN),
    "judgement.concurrency": at(8, PLAIN),
    "judgement.outputTokens": at(64, PLAIN),
    "judgement.repetitions": at(4, PLAIN),
    "judgement.slo.ttftMs": at(200, JUDGED),
    "judgement.slo.tpotMs": at(40, JUDGED),
    "judgement.slo.latencyMs": at(2000, JUDGED),
    "judgement.deploymentDuringCapture": at("Suspend", PLAIN),
    "promote": at("OnBetter", PLAIN),
    "seed": at(7, PLAIN),
    "storage.size": at("300Gi", PLAIN),
    "storage.storageClassName": at("fast", PLAIN),
    "storage.persistentVolumeClaim.claimName": at("mine", PLAIN),
    "storage.retain": at(False, PLAIN),
    "deadlineSeconds": at(7200, PLAIN),
    "backoffLimit": at(3, PLAIN),
    "suspend": at(True, PLAIN),
}
"""Fields of a SpecDecodeTraining's spec."""
