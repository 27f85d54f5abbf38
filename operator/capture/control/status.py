"""What a capture's status says, and when it has said it for long enough."""

from datetime import UTC, datetime, timedelta

from specdecode_operator.api.status.capture import CapturePhase, SpecDecodeCaptureStatus
from specdecode_operator.api.status.comparison import ArmVerdict
from specdecode_operator.capture.control.borrowing import due_at, is_unsettled
from specdecode_operator.capture.control.capture import Capture
from specdecode_operator.capture.control.golden.against import holds_condition
from specdecode_operator.capture.control.job import published_folder
from specdecode_operator.capture.control.outcome import Decision
from specdecode_operator.deployment.attention import Attention
from specdecode_operator.deployment.conditions import FALSE, TRUE, UNKNOWN, ConditionUpdate, stamp

_PAYS = {ArmVerdict.PAYS: TRUE, ArmVerdict.DOES_NOT_PAY: FALSE}
_TIME = "%Y-%m-%dT%H:%M:%SZ"
_LONG_ENOUGH_S = 3600


def compose_status(capture: Capture, decision: Decision, now: datetime) -> SpecDecodeCaptureStatus:
    """Say in the status what is decided."""
    words = decision.waiting_for_gpus
    waiting = ConditionUpdate("WaitingForGPUs", FALSE, "NotWaiting", "")
    if words is not None:
        waiting = ConditionUpdate("WaitingForGPUs", TRUE, "Unschedulable", words)
    findings = [*decision.readiness.conditions(), decision.accepted, waiting, decision.succeeded]
    if capture.compares:
        findings.append(_pays(decision))
    if capture.spec.get("against"):
        over = decision.succeeded.status is not UNKNOWN
        findings.append(holds_condition(decision.regression, over=over))
    has_files = decision.phase is CapturePhase.SUCCEEDED
    return SpecDecodeCaptureStatus(
        observed_generation=capture.generation,
        phase=decision.phase,
        conditions=stamp(findings, capture.status.conditions, capture.generation, now),
        job=capture.job_name if decision.accepted.status is TRUE else None,
        operator_image=decision.operator_image,
        claim=decision.claim,
        path=published_folder(capture) if has_files else None,
        started_at=decision.started_at,
        finished_at=decision.finished_at,
        summary=decision.result,
        comparison=decision.comparison,
        regression=decision.regression,
        borrow=decision.borrow,
        engine=decision.engine or capture.status.engine,
    )


def _pays(decision: Decision) -> ConditionUpdate:
    """Return whether the second arm pays, compared with the first; unknown while nobody can tell."""
    comparison = decision.comparison
    if comparison is None or not comparison.arms:
        over = decision.succeeded.status is not UNKNOWN
        message = "nothing was compared: the condition Succeeded tells more" if over else "arms are compared at its end"
        return ConditionUpdate("Pays", UNKNOWN, "NotCompared", message)
    arm = comparison.arms[0]
    message = f"{arm.name} against {comparison.baseline}: {arm.message}"
    return ConditionUpdate("Pays", _PAYS.get(arm.verdict, UNKNOWN), arm.verdict, message)


def is_outlived(capture: Capture, now: datetime, agreed_s: float) -> bool:
    """Whether a capture ended so long ago that it is to be deleted.

    Its end is when the operator wrote it down, if that is later: what its node or Job says may be of another clock.

    Parameters
    ----------
    capture
        The capture, without times in the future.
    now
        The API server's time.
    agreed_s
        For how many seconds the API server's answers have agreed on the time. A jump may make a capture look old, so
        these must be as many as the capture is kept for, and an hour is enough.
    """
    ttl_s, finished_at = capture.spec.get("ttlSecondsAfterFinished"), capture.status.finished_at
    if ttl_s is None or finished_at is None or capture.ended is None or agreed_s < min(ttl_s, _LONG_ENOUGH_S):
        return False
    ends = (finished_at, capture.ended.last_transition_time)
    finished = max(datetime.strptime(each, _TIME).replace(tzinfo=UTC) for each in ends)
    return now >= finished + timedelta(seconds=ttl_s)


def capture_attention(capture: Capture) -> Attention:
    """Return when a capture is to be looked at again without an event.

    It changes by itself until it has ended, until its deployment has been seen to serve again, and if it is to be
    deleted some time after its end.
    """
    goes_on = capture.ended is None or is_unsettled(capture.status.borrow)
    timeout_s = capture.spec.get("borrowTimeoutSeconds")
    due = due_at(capture.status.borrow, timeout_s if isinstance(timeout_s, int) else 0)
    return Attention(
        is_close=goes_on or capture.spec.get("ttlSecondsAfterFinished") is not None,
        due_at_s=due.timestamp() if due is not None and capture.ended is None else None,
    )
