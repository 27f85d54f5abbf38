"""The golden capture that another one is held against: whether it can be, and how its files come into the pod."""

import json
from typing import Any, Final

from pydantic import ValidationError

from specdecode_operator.api.base import Body
from specdecode_operator.api.capture import SpecDecodeCaptureSpec
from specdecode_operator.api.golden import Regressed, RegressionStatus
from specdecode_operator.api.status.deployment import ConditionStatus
from specdecode_operator.capture.control.capture import Capture, read_capture
from specdecode_operator.capture.control.volume import claim_of
from specdecode_operator.capture.job.against import AGAINST_MOUNT, AGAINST_VARIABLE
from specdecode_operator.deployment.blocked import Blocked
from specdecode_operator.deployment.conditions import FALSE, TRUE, UNKNOWN, ConditionUpdate
from specdecode_operator.kube.manifests import with_new_hash

HOLDS: Final = "Holds"
_VOLUME: Final = "specdecode-against"
OWN_VOLUME: Final = "specdecode-capture"


def golden_blocked(spec: SpecDecodeCaptureSpec, golden: Body | None) -> Blocked | None:
    """Return what blocks holding a capture against another one; its object tells where the files are.

    It is looked at before a GPU is taken.
    """
    if spec.against is None:
        return None
    field = f"spec.against.capture: {spec.against.capture}"
    if golden is None:
        message = f"{field}: there is no SpecDecodeCapture of this name in the namespace; goes on when it succeeded"
        return Blocked("GoldenNotFound", message)
    known = read_capture(golden)
    ended = known.ended
    if ended is None:
        return Blocked("GoldenNotReady", f"{field}: it has not ended; goes on when it succeeded")
    if ended.status is not ConditionStatus.TRUE or known.status.claim is None:
        message = f"{field}: it failed ({ended.reason}): take another golden capture"
        return Blocked("GoldenFailed", message, permanent=True)
    if other := _differences(spec, known):
        message = f"{field}: {other}: take another golden capture, or use its workload and seed here"
        return Blocked("GoldenDiffers", message, permanent=True)
    return None


def _differences(spec: SpecDecodeCaptureSpec, golden: Capture) -> str | None:
    """Return what of a golden capture is not as here; None where all is."""
    try:
        other = SpecDecodeCaptureSpec.parse(golden.spec, newer=True)
    except ValidationError:
        return "this operator cannot read its spec"
    if len(golden.spec.get("arms") or ()) > 1:
        return "it has several arms"
    if other.workload != spec.workload:
        return "it has another workload"
    return f"its seed is {other.seed}, not {spec.seed}" if other.seed != spec.seed else None


def with_golden(job: Body, capture: Capture, spec: SpecDecodeCaptureSpec, golden: Body | None) -> Body:
    """Return the Job of a capture with the golden files in its load generator, to be read alone."""
    if spec.against is None or golden is None:
        return job
    known = read_capture(golden)
    limits = spec.against.max_loss_percent
    told: dict[str, Any] = {
        "capture": known.key.name,
        "folder": f"{known.key.namespace}/{known.key.name}",
        "limits": limits.model_dump(mode="json"),
    }
    pod = job["spec"]["template"]["spec"]
    load = pod["containers"][0]
    # A pod that has one claim as two volumes may wait for the second one for good.
    is_own = known.status.claim == claim_of(capture, spec.storage)
    claim = {"claimName": known.status.claim, "readOnly": True}
    added = [] if is_own else [{"name": _VOLUME, "persistentVolumeClaim": claim}]
    name = OWN_VOLUME if is_own else _VOLUME
    with_files = {
        **load,
        "env": [*load["env"], {"name": AGAINST_VARIABLE, "value": json.dumps(told, sort_keys=True)}],
        "volumeMounts": [*load["volumeMounts"], {"name": name, "mountPath": AGAINST_MOUNT, "readOnly": True}],
    }
    changed = {
        **pod,
        "containers": [with_files, *pod["containers"][1:]],
        "volumes": [*pod["volumes"], *added],
    }
    template = {**job["spec"]["template"], "spec": changed}
    return with_new_hash({**job, "spec": {**job["spec"], "template": template}})


def holds_condition(regression: RegressionStatus | None, *, over: bool) -> ConditionUpdate:
    """Return whether a capture's engine serves as well as that of the golden one; unknown while nobody can tell."""
    if regression is None:
        message = "nothing was judged: the condition Succeeded tells more" if over else "it is judged at its end"
        return ConditionUpdate(HOLDS, UNKNOWN, "NotJudged", message)
    status = {Regressed.HOLDS: TRUE, Regressed.REGRESSED: FALSE}.get(regression.verdict, UNKNOWN)
    return ConditionUpdate(HOLDS, status, regression.verdict, f"against {regression.against}: {regression.message}")
