"""Judge engines of a new spec by the production traffic that they serve beside the engines of an earlier spec.

The comparison is kept in memory, so it starts again when the operator restarts. The verdict is stored with the last
good workload: a promotion by the template of its pods, and a canary that failed as a failed attempt.
"""

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from specdecode_operator.api.base import Body
from specdecode_operator.api.deployment import Canary, CanaryLimits, Key, OnUndecided, SpecDecodeDeploymentSpec
from specdecode_operator.api.deployment_status import CanaryFigure, CanaryStatus
from specdecode_operator.cluster.drift import content_hash
from specdecode_operator.cluster.manifests import owned
from specdecode_operator.cluster.resources import CANARY_POOL, DEPLOYMENT, POOL_LABEL, TEMPLATE_HASH_ANNOTATION
from specdecode_operator.deployment.conditions import FALSE, TRUE, UNKNOWN, WRONG_ANSWERS, Blocked, ConditionUpdate
from specdecode_operator.deployment.rollout.engine_workload import canary_name, serving_template
from specdecode_operator.deployment.rollout.readiness import Readiness, stalled, without_engines, working
from specdecode_operator.deployment.rollout.rollback import (
    Failure,
    LastGood,
    Promotion,
    attempt_of,
    has_failed,
    served_before,
)
from specdecode_operator.deployment.rollout.rollout_progress import Rollout, serving_hash
from specdecode_operator.enums import RolloutStrategy
from specdecode_operator.sizing.placement import Row
from specdecode_operator.stats.pool_comparison import (
    FEWEST_BLOCKS,
    PoolComparison,
    PoolFigure,
    PoolVerdict,
    figure_verdict,
    pool_verdict,
)
from specdecode_operator.stats.verdict import Finding

CANARY: Final = "Canary"
CANARY_FAILED: Final = "CanaryFailed"
_PROMOTED: Final = "Promoted"
_COMPARING: Final = "CanaryComparing"
JUDGED: Final = frozenset({(CANARY, CANARY_FAILED), (CANARY, _PROMOTED)})
"""Type and reason of the condition after a verdict."""

_NAMES: Final = {PoolFigure.TPOT: "TPOT", PoolFigure.TTFT: "TTFT per prompt token", PoolFigure.ERRORS: "errors"}


def is_canary(child: Body) -> bool:
    """Whether a child is the Deployment of its object's canary."""
    return (child["metadata"].get("labels") or {}).get(POOL_LABEL) == CANARY_POOL


def canary_settings(spec: SpecDecodeDeploymentSpec) -> Canary:
    """Return the settings of strategy Canary."""
    return spec.rollout.canary or Canary()


def limits_of(limits: CanaryLimits) -> dict[PoolFigure, int]:
    """Return the limit of each figure in percent."""
    return {PoolFigure.TPOT: limits.tpot, PoolFigure.TTFT: limits.ttft, PoolFigure.ERRORS: limits.errors}


def canary_attempt(spec: SpecDecodeDeploymentSpec, chosen: Row) -> str:
    """Return the ID of an attempt with a canary: other settings of the canary give another one."""
    return f"{attempt_of(spec, chosen)}-{content_hash(canary_settings(spec).model_dump(mode='json'))[:8]}"


def awaits_canary(spec: SpecDecodeDeploymentSpec, workload: Body, last_good: LastGood) -> bool:
    """Whether a canary must pass before the engines of a workload replace the serving ones."""
    template = serving_hash(workload)
    if spec.rollout.strategy is not RolloutStrategy.CANARY or template == serving_hash(last_good.workload):
        return False
    return last_good.promotion is None or last_good.promotion.template != template


def why_no_canary(spec: SpecDecodeDeploymentSpec, workload: Body, earlier: Body) -> Blocked | None:
    """Return why there is no canary at present; None if there should be one."""
    if workload["kind"] != DEPLOYMENT.kind or earlier["kind"] != DEPLOYMENT.kind:
        message = (
            "spec.rollout.strategy: Canary: engines on several nodes cannot be compared; use Surge or Replace, and"
            " spec.rollout.gate to compare engines on one node first"
        )
        return Blocked("CanaryNotSupported", message, permanent=True)
    if (off := without_engines(spec)) is not None:
        return Blocked("CanaryWaits", f"{off.message}; the canary starts when engines serve", waits=True)
    if spec.rollout.paused:
        return Blocked("CanaryWaits", "spec.rollout.paused is true; set it to false to start the canary", waits=True)
    return None


def canary_workload(key: Key, uid: str, workload: Body, replicas: int) -> Body:
    """Return the Deployment of the canary: the pods of the new workload, with a label and another template hash.

    The pods keep the labels that the Service selects by. Their own hash keeps them apart from those of the workload
    that replaces the earlier one.
    """
    template = serving_template(workload)
    pool = {POOL_LABEL: CANARY_POOL}
    labelled = {**template["metadata"], "labels": {**template["metadata"]["labels"], **pool}}
    annotations = {
        **labelled["annotations"],
        TEMPLATE_HASH_ANNOTATION: content_hash({**template, "metadata": labelled}),
    }
    selector = {"matchLabels": {**workload["spec"]["selector"]["matchLabels"], **pool}}
    spec = {
        **workload["spec"],
        "replicas": replicas,
        "selector": selector,
        "paused": False,
        "template": {**template, "metadata": {**labelled, "annotations": annotations}},
    }
    metadata = {"name": canary_name(key), "labels": pool}
    body = {"apiVersion": workload["apiVersion"], "kind": workload["kind"], "metadata": metadata, "spec": spec}
    return owned(body, key, uid)


@dataclass
class CanaryTrial:
    """Comparison of one canary with the earlier engines, kept between reconciles."""

    template: str | None  # Hash of the canary's pod template
    comparison: PoolComparison
    since_s: float | None = None  # Monotonic time at which a canary engine was first seen ready

    @classmethod
    def of(cls, workload: Body, before: "CanaryTrial | None" = None) -> "CanaryTrial":
        """Return the comparison of the engines of a canary, which is new if the one before was of other engines."""
        template = serving_hash(workload)
        if before is not None and before.template == template:
            return before
        return cls(template, PoolComparison(template or ""))


class CanaryStep(StrEnum):
    """What to do with a canary."""

    COMPARE = "compare"
    PROMOTE = "promote"
    ROLL_BACK = "roll back"


@dataclass(frozen=True)
class CanaryDecision:
    """What to do with a canary, why, and the figures for the status."""

    step: CanaryStep
    reason: str
    message: str
    stalled: bool = False
    status: CanaryStatus | None = None

    def condition(self) -> ConditionUpdate:
        """Return the condition Canary."""
        status = {CanaryStep.COMPARE: UNKNOWN, CanaryStep.PROMOTE: TRUE, CanaryStep.ROLL_BACK: FALSE}[self.step]
        return ConditionUpdate(CANARY, status, self.reason, self.message)

    def readiness(self, rollout: Rollout) -> Readiness:
        """Return the readiness of an object whose earlier engines serve; ``rollout`` is theirs."""
        counts = rollout.earlier_engines
        if self.stalled:
            return stalled(self.reason, f"{counts}; see condition {CANARY}")
        # After the verdict, the next reconcile rolls out or back.
        reason = self.reason if self.step is CanaryStep.COMPARE else _COMPARING
        return working(reason, f"{counts} until the canary is judged; see condition {CANARY}")


def waiting_decision(blocked: Blocked) -> CanaryDecision:
    """Return the decision while there is no canary."""
    return CanaryDecision(CanaryStep.COMPARE, blocked.reason, blocked.message, stalled=blocked.permanent)


def judge_canary(
    canary: Canary, trial: CanaryTrial, rollout: Rollout, now_s: float, wrong_answers: str | None = None
) -> CanaryDecision:
    """Return what to do with a canary.

    ``rollout`` is the progress of its own Deployment, ``now_s`` is monotonic, and ``wrong_answers`` describes confirmed
    wrong answers to canary prompts.
    """
    status = _status(canary, trial.comparison, rollout)
    if has_failed(rollout):
        return CanaryDecision(CanaryStep.ROLL_BACK, CANARY_FAILED, _why_failed(rollout), status=status)
    if wrong_answers is not None:
        message = f"{WRONG_ANSWERS}: {wrong_answers}"
        return CanaryDecision(CanaryStep.ROLL_BACK, CANARY_FAILED, message, status=status)
    if trial.since_s is None:
        return replace(_before_ready(rollout), status=status)
    figures, left_s = _figures_text(trial.comparison), trial.since_s + canary.max_seconds - now_s
    verdict = pool_verdict(trial.comparison, limits_of(canary.max_loss_percent))
    if verdict is PoolVerdict.NOT_WORSE:
        step, reason, message = CanaryStep.PROMOTE, _PROMOTED, f"All figures are within their limits: {figures}"
    elif verdict is PoolVerdict.WORSE:
        message = f"The canary is worse than the earlier engines: {figures}"
        step, reason = CanaryStep.ROLL_BACK, CANARY_FAILED
    elif left_s > 0:
        message = f"{figures}; decided after spec.rollout.canary.maxSeconds: {canary.max_seconds} at the latest"
        step, reason = CanaryStep.COMPARE, _COMPARING
    else:
        return replace(_after_time(canary, trial.comparison, figures), status=status)
    return CanaryDecision(step, reason, message, status=status)


def _before_ready(rollout: Rollout) -> CanaryDecision:
    if rollout.blocked is not None:
        return CanaryDecision(CanaryStep.COMPARE, "CanaryBlocked", _with_fix(rollout.blocked))
    message = f"{rollout.available} of {rollout.wanted} canary engines ready"
    return CanaryDecision(CanaryStep.COMPARE, "CanaryStarting", message)


def _after_time(canary: Canary, comparison: PoolComparison, figures: str) -> CanaryDecision:
    why = f"Undecided after spec.rollout.canary.maxSeconds: {canary.max_seconds}"
    if comparison.blocks < FEWEST_BLOCKS:
        fix = (
            "too few requests for each engine: send more, increase maxSeconds, or check that clients open new"
            " connections"
        )
    elif not comparison.comparable:
        fix = (
            f"canary engines got {comparison.load_ratio:.2f} times the requests of the others, so their figures cannot"
            " be compared; check how clients or gateways balance connections"
        )
    elif canary.on_undecided is OnUndecided.PROMOTE:
        message = f"{why}; promoted by spec.rollout.canary.onUndecided: {figures}"
        return CanaryDecision(CanaryStep.PROMOTE, _PROMOTED, message)
    else:
        fix = "increase maxSeconds, canary.replicas or maxLossPercent"
    return CanaryDecision(CanaryStep.ROLL_BACK, CANARY_FAILED, f"{why}: {figures}; {fix}")


def _why_failed(rollout: Rollout) -> str:
    if rollout.blocked is not None:
        return f"{rollout.blocked.reason}: {rollout.blocked.message}"
    return f"No canary engine became ready within {rollout.deadline_s} s"


def _with_fix(blocked: Blocked) -> str:
    message = f"{blocked.reason}: {blocked.message}"
    if blocked.reason != "Unschedulable":
        return message
    return (
        f"{message}. A canary needs GPUs in addition to those of the serving engines: add a node, lower spec.replicas"
        " or spec.rollout.canary.replicas, or use spec.rollout.strategy: Replace"
    )


def _percent(ratio: float) -> str:
    return f"{round(100 * (ratio - 1), 1) + 0.0:+.1f} %"  # not "-0.0"


def _figure_text(figure: PoolFigure, finding: Finding) -> str:
    ratio = "not known" if finding.ratio is None else _percent(finding.ratio)
    if finding.low is None or finding.high is None:
        return f"{_NAMES[figure]} {ratio} (too few blocks for an interval)"
    return f"{_NAMES[figure]} {ratio} (95 %: {_percent(finding.low)} to {_percent(finding.high)})"


def _figures_text(comparison: PoolComparison) -> str:
    found = [_figure_text(figure, finding) for figure, finding in comparison.findings.items()]
    told = [f"{comparison.blocks} block{'s' * (comparison.blocks != 1)} compared", *found]
    now, before = comparison.canary.tokens_per_step, comparison.stable.tokens_per_step
    if now is not None and before is not None:
        told.append(f"{now:.2f} tokens per step, {before:.2f} before")
    return ", ".join(told)


def _status(canary: Canary, comparison: PoolComparison, rollout: Rollout) -> CanaryStatus:
    limits = limits_of(canary.max_loss_percent)
    return CanaryStatus(
        engines=f"{rollout.available}/{rollout.wanted}",
        blocks=comparison.blocks,
        load_ratio=_decimal(comparison.load_ratio, 2),
        tokens_per_step=_decimal(comparison.canary.tokens_per_step, 2),
        earlier_tokens_per_step=_decimal(comparison.stable.tokens_per_step, 2),
        figures=[
            CanaryFigure(
                name=figure.value,
                verdict=figure_verdict(finding, limits[figure]).value,
                ratio=_decimal(finding.ratio, 3),
                low=_decimal(finding.low, 3),
                high=_decimal(finding.high, 3),
            )
            for figure, finding in comparison.findings.items()
        ],
    )


def _decimal(value: float | None, digits: int) -> str | None:
    return None if value is None else f"{value:.{digits}f}"


def after_canary(last_good: LastGood, decision: CanaryDecision, workload: Body, attempt: str) -> LastGood:
    """Return the record with the verdict on a canary; ``workload`` is the one that would replace the earlier one."""
    if decision.step is CanaryStep.PROMOTE:
        template = serving_hash(workload) or ""
        return replace(last_good, promotion=Promotion(template, decision.message), failure=None)
    if decision.step is CanaryStep.ROLL_BACK:
        return replace(last_good, failure=Failure(attempt, decision.reason, decision.message), promotion=None)
    return last_good


def promoted_condition(
    spec: SpecDecodeDeploymentSpec, workload: Body, last_good: LastGood | None
) -> list[ConditionUpdate]:
    """Return the condition Canary of engines that roll out or serve; empty with another strategy."""
    if spec.rollout.strategy is not RolloutStrategy.CANARY:
        return []
    promotion = None if last_good is None else last_good.promotion
    if promotion is not None and promotion.template == serving_hash(workload):
        return [ConditionUpdate(CANARY, TRUE, _PROMOTED, promotion.message)]
    return [ConditionUpdate(CANARY, TRUE, "NothingToCompare", f"No comparison needed: {served_before(last_good)}")]


def rolled_back_condition(failure: Failure) -> ConditionUpdate:
    """Return the condition Canary after a rollback of the canary."""
    return ConditionUpdate(CANARY, FALSE, failure.reason, failure.message)
