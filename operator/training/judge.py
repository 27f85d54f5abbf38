"""Render the capture that measures a new head, and read its verdict.

The head is compared with the deployment's current speculation. The arms without speculation and with n-grams show
whether repetitive answers make any draft look good.

Goodput decides. If it is inconclusive, tokens per step decide, because they do not depend on the load of the machine.
More tokens per step are better if a step with the head costs no more than a step with the current draft.
"""

import hashlib
from collections.abc import Iterator
from typing import Any, Final

from pydantic import ValidationError

from specdecode_operator.api import base
from specdecode_operator.api import capture as capture_api
from specdecode_operator.api.base import Body
from specdecode_operator.api.capture import CaptureRun, Pattern, SpecDecodeCaptureSpec
from specdecode_operator.api.capture_status import (
    ArmVerdict,
    ComparedArm,
    ComparedLoad,
    ComparisonStatus,
    Outputs,
    StepCost,
    TokensPerStep,
)
from specdecode_operator.api.deployment import SpecDecodeDeploymentSpec
from specdecode_operator.api.deployment_rules import NAME_MAX_LENGTH
from specdecode_operator.api.training import SpecDecodeTrainingSpec, TrainingRun
from specdecode_operator.api.training_status import JudgedArm, TrainedHead, TrainingVerdict
from specdecode_operator.capture.job_manifest import load_deadline_s
from specdecode_operator.capture.observation import CapturedDeployment, read_capture
from specdecode_operator.capture.volumes import claim_of
from specdecode_operator.cluster.manifests import owner_reference
from specdecode_operator.cluster.resources import JUDGED_TARGET_ANNOTATION, MANAGED_BY_LABEL, MANAGER
from specdecode_operator.deployment.conditions import FALSE, TRUE, UNKNOWN, ConditionUpdate
from specdecode_operator.enums import METHODS_WITH_LOOKUP, Method
from specdecode_operator.training.observation import Training
from specdecode_operator.training.offers import head_folder, head_speculation, target_digest
from specdecode_operator.untrusted import mapping

BETTER: Final = "Better"
CURRENT, TRAINED, NONE, NGRAM = "current", "trained", "none", "ngram"
PHASE: Final = "held-out"
_JUDGE: Final = "-judge"
_LONGEST_NAME: Final = NAME_MAX_LENGTH - len(_JUDGE)
_MOST_ARMS: Final = 4
_LOAD_S: Final[int] = CaptureRun.model_fields["deadline_seconds"].default
_SHARED_OUTPUTS: Final = frozenset({Outputs.EQUAL, Outputs.EXPLAINED})


def judging_capture(
    training: Training,
    spec: SpecDecodeTrainingSpec,
    head: TrainedHead,
    written: SpecDecodeDeploymentSpec,
    served: Method,
) -> Body:
    """Return the SpecDecodeCapture that measures a head on held-out prompts.

    Parameters
    ----------
    written
        Spec of the deployment.
    served
        Method in force in the deployment, which a trained head may have replaced.
    """
    judgement, rows = spec.judgement, training.status.rows
    claim = {"claimName": claim_of(training, spec.storage)}
    requests = min(judgement.requests, max(1, rows.holdout)) if rows else judgement.requests
    dataset = {
        "persistentVolumeClaim": claim,
        "path": _holdout_path(training),
        "format": "JSONL",
        "outputTokens": judgement.output_tokens,
    }
    phase = {"name": PHASE, "pattern": Pattern.CLOSED.value, "concurrency": judgement.concurrency, "requests": requests}
    body: Body = {
        "deployment": spec.deployment,
        "arms": _arms(head_speculation(written.speculation, training, spec, head), served),
        "repetitions": judgement.repetitions,
        "workload": {
            "prompts": {"dataset": dataset},
            "phases": [phase],
            "temperatures": [{"temperature": "0.0", "sharePercent": 100}],
        },
        "seed": spec.seed,
        "storage": {"persistentVolumeClaim": claim},
        "deploymentDuringCapture": judgement.deployment_during_capture.value,
    }
    if judgement.slo is not None:
        body["slo"] = judgement.slo.model_dump(mode="json", by_alias=True, exclude_none=True)
    return {
        "apiVersion": base.API_VERSION,
        "kind": capture_api.KIND,
        "metadata": {
            "namespace": training.key.namespace,
            "name": judge_name(training),
            "labels": {MANAGED_BY_LABEL: MANAGER},
            "annotations": {JUDGED_TARGET_ANNOTATION: target_digest(written.target)},
            "ownerReferences": [owner_reference(training.key, training.uid)],
        },
        "spec": body,
    }


def longest_measurement_s(run: TrainingRun, source: CapturedDeployment) -> int:
    """Return the time limit of the capture that measures a head of a deployment; 0 if none does."""
    if not run.judgement.enabled:
        return 0
    return run.judgement.repetitions * _MOST_ARMS * load_deadline_s(_LOAD_S, source)


def judge_name(training: Training) -> str:
    """Return the name of the capture that measures the head of a training.

    Names of captures are shorter than those of trainings, and have no dots.
    """
    name = training.key.name
    if "." in name or len(name) > _LONGEST_NAME:
        digest = hashlib.sha256(name.encode()).hexdigest()[:8]
        name = f"{name[: _LONGEST_NAME - len(digest) - 1].replace('.', '-')}-{digest}"
    return f"{name}{_JUDGE}"


def _holdout_path(training: Training) -> str:
    return f"{training.key.namespace}/{training.key.name}/rows/holdout.jsonl"


def is_forged(capture: Body, training: Training, spec: SpecDecodeTrainingSpec) -> bool:
    """Whether a capture that names the training as its owner does not compare its head with the current draft.

    Anyone who can create captures can set any owner. Settings that depend on the deployment are not checked, because
    its spec may have changed since.
    """
    try:
        found = SpecDecodeCaptureSpec.parse(capture["spec"], newer=True)
    except ValidationError:
        return True
    arms = {each.name: each for each in found.arms}
    current, trained, dataset = arms.get(CURRENT), arms.get(TRAINED), found.workload.prompts.dataset
    if current is None or trained is None or dataset is None or found.arms[0] is not current:
        return True
    if any(each.target_quantization or each.kv_cache_dtype for each in (current, trained)):
        return True
    baseline, head = current.speculation, trained.speculation
    draft = head.draft if head else None
    claims = [each.persistent_volume_claim if each else None for each in (draft, dataset)]
    return (
        (baseline is not None and baseline.method is not Method.NONE)
        or draft is None
        or draft.model != head_folder(training.key)
        or [each.claim_name if each else None for each in claims] != [claim_of(training, spec.storage)] * 2
        or (found.deployment, dataset.path) != (spec.deployment, _holdout_path(training))
    )


def _arms(head: Body, served: Method) -> list[Body]:
    """Return the arms, the baseline first. Arms that equal the baseline are omitted."""
    none, k = {"method": Method.NONE.value}, head["numSpeculativeTokens"]
    arms: list[Body] = [{"name": CURRENT}, {"name": TRAINED, "speculation": head}]
    if served is Method.NONE:
        arms[0]["speculation"] = none
    else:
        arms.append({"name": NONE, "speculation": none})
    if served not in METHODS_WITH_LOOKUP:
        arms.append({"name": NGRAM, "speculation": {"method": Method.NGRAM.value, "numSpeculativeTokens": k}})
    return arms


def better(capture: Body) -> tuple[ConditionUpdate, TrainingVerdict]:
    """Return the condition Better and the verdict of a capture; its status is untrusted."""
    known = read_capture(capture)
    target = mapping(capture["metadata"], "annotations").get(JUDGED_TARGET_ANNOTATION)
    verdict = TrainingVerdict(capture=known.key.name, target=target if isinstance(target, str) else None)
    ended, comparison = known.ended, known.status.comparison
    if ended is None:
        return _told(UNKNOWN, "NotJudged", f"Capture {known.key.name} has not ended"), verdict
    if ended.status is not TRUE:
        message = f"Capture {known.key.name} failed ({ended.reason}: {ended.message})"
        return _told(UNKNOWN, "JudgementFailed", message), verdict
    arms = {each.name: each for each in comparison.arms} if comparison else {}
    trained = arms.get(TRAINED)
    if comparison is None or comparison.baseline != CURRENT or trained is None:
        message = f"Capture {known.key.name} has no comparison of arm {TRAINED} with arm {CURRENT}"
        return _told(UNKNOWN, "JudgementFailed", message), verdict
    load = next(iter(trained.loads), None)
    verdict = verdict.model_copy(
        update={
            "arms": _judged(comparison, load),
            **{name: getattr(load, name) if load else None for name in ("ratio", "low", "high")},
            "tokens_per_step": trained.tokens_per_step,
        }
    )
    notes = [trained.message, *_notes(trained, arms.get(NGRAM), arms.get(NONE))]
    status, reason = _verdict(trained, load)
    return _told(status, reason, "; ".join(notes)), verdict


def _told(status: Any, reason: str, message: str) -> ConditionUpdate:
    return ConditionUpdate(BETTER, status, reason, message)


def _verdict(trained: ComparedArm, load: ComparedLoad | None) -> tuple[Any, str]:
    if trained.verdict is ArmVerdict.INCORRECT:
        return FALSE, "Incorrect"
    verdict = _excludes_one(trained.verdict, load)
    if verdict is ArmVerdict.INCONCLUSIVE and (steps := trained.tokens_per_step) is not None:
        verdict = _excludes_one(_by_steps(steps), steps)
    if verdict is ArmVerdict.DOES_NOT_PAY:
        return FALSE, "NotBetter"
    if verdict is ArmVerdict.PAYS and trained.outputs in _SHARED_OUTPUTS:
        return TRUE, BETTER
    return UNKNOWN, "Inconclusive"


def _excludes_one(verdict: ArmVerdict, interval: ComparedLoad | TokensPerStep | None) -> ArmVerdict:
    """Return the verdict if its interval excludes 1, and Inconclusive otherwise."""
    low, high = (_decimal(getattr(interval, name, None)) for name in ("low", "high"))
    if verdict is ArmVerdict.DOES_NOT_PAY and high is not None and high < 1:
        return verdict
    return verdict if verdict is ArmVerdict.PAYS and low is not None and low > 1 else ArmVerdict.INCONCLUSIVE


def _by_steps(steps: TokensPerStep) -> ArmVerdict:
    ratio = _decimal(steps.ratio) or 1.0
    if ratio > 1 and steps.step_cost in {StepCost.EQUAL, StepCost.LOWER}:
        return ArmVerdict.PAYS
    costs = ratio < 1 and steps.step_cost in {StepCost.EQUAL, StepCost.HIGHER}
    return ArmVerdict.DOES_NOT_PAY if costs else ArmVerdict.INCONCLUSIVE


def _notes(trained: ComparedArm, ngram: ComparedArm | None, none: ComparedArm | None) -> Iterator[str]:
    if (steps := trained.tokens_per_step) is not None:
        interval = f" (ratio {steps.ratio}, 95 %: {steps.low} to {steps.high})" if steps.low and steps.high else ""
        cost = "" if steps.step_cost is StepCost.UNKNOWN else f" at {steps.step_cost.lower()} cost per step"
        yield f"{steps.arm} tokens per step instead of {steps.baseline}{interval}{cost}"
    if trained.outputs not in _SHARED_OUTPUTS and trained.verdict is not ArmVerdict.INCORRECT:
        yield f"the answers of {TRAINED} could not be compared with those of {CURRENT}"
    own = _goodput(trained)
    if own is not None and (its := _goodput(ngram)) is not None and its >= own:
        yield (
            "arm ngram is at least as fast, so the answers may be repetitive, and other requests may gain less: use"
            " method ngram"
        )
    if own is not None and (its := _goodput(none)) is not None and its >= own:
        yield "engines without speculation are at least as fast"


def _judged(comparison: ComparisonStatus, load: ComparedLoad | None) -> list[JudgedArm]:
    baseline = JudgedArm(
        name=CURRENT,
        acceptance_percent=comparison.baseline_acceptance_percent,
        goodput=load.baseline_goodput if load else None,
    )
    others = (
        JudgedArm(
            name=each.name,
            acceptance_percent=each.acceptance_percent,
            goodput=each.loads[0].goodput if each.loads else None,
        )
        for each in comparison.arms
    )
    return [baseline, *others]


def _goodput(arm: ComparedArm | None) -> float | None:
    return _decimal(arm.loads[0].goodput) if arm and arm.loads else None


def _decimal(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None
