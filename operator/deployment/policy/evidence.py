"""The arms that captures of a deployment compared, as settings of its policy."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pydantic import ValidationError

from specdecode_operator.api.base import Body
from specdecode_operator.api.capture_workload import CaptureWorkload
from specdecode_operator.api.speculation import Speculation
from specdecode_operator.api.status.comparison import ArmVerdict, ComparedArm, ComparisonStatus, Outputs
from specdecode_operator.api.values import RejectionSampling
from specdecode_operator.deployment.proof.observed import decimal
from specdecode_operator.policy.decision import NoEvidence
from specdecode_operator.policy.evidence import Evidence, Point, Setting
from specdecode_operator.vocabulary import Method

_OFF: Final = Speculation(method=Method.NONE)
_NONE: Final = "no SpecDecodeCapture of this deployment compared arms: create one with spec.arms"


@dataclass(frozen=True)
class Measured:
    """What one capture compared."""

    evidence: Evidence
    speculations: Mapping[str, Speculation]
    """Of each arm, by its name."""

    written: Speculation
    """What the spec says."""

    in_force: str
    """Name of the arm that is."""


def read_measured(
    captures: Sequence[Body], name: str | None, engine: str, asked: Speculation | None, in_force: Speculation | None
) -> Measured | NoEvidence:
    """Return what the capture of a name compared, or the newest of all; or why nothing can be decided by it.

    ``engine`` tells the engines of the spec as it is written, ``asked`` is its speculation and ``in_force`` that of the
    engines.
    """
    capture = _chosen(captures, name)
    if isinstance(capture, NoEvidence):
        return capture
    found, status = capture["metadata"]["name"], capture["status"]
    if status.get("engine") != engine:
        return NoEvidence("EvidenceOutdated", f"{found} measured engines of another spec or place: capture again")
    try:
        comparison = ComparisonStatus.parse(status["comparison"], newer=True)
    except ValidationError:
        return NoEvidence("EvidenceUnusable", f"the comparison of {found} cannot be read: capture again")
    speculations = _speculations(capture["spec"].get("arms") or [], asked)
    arm = next((each for each, its in speculations.items() if its == (in_force or _OFF)), None)
    if arm is None:
        return NoEvidence("EvidenceOutdated", f"no arm of {found} speculates as the engines do: capture again with one")
    evidence = _evidence(found, comparison, speculations, capture["spec"].get("arms") or [])
    if evidence is None:
        return NoEvidence("EvidenceUnusable", f"{found} has no interval at any load: capture again, for longer")
    return Measured(evidence, speculations, asked or _OFF, arm)


def _chosen(captures: Sequence[Body], name: str | None) -> Body | NoEvidence:
    if name is not None:
        captures = [each for each in captures if each["metadata"]["name"] == name]
        if not captures:
            return NoEvidence("NoEvidence", f"spec.policy.evidence: {name}: no SpecDecodeCapture of this deployment")
    compared = [each for each in captures if (each.get("status") or {}).get("comparison")]
    ended = [each for each in compared if not _is_sweep(each)]
    if ended:
        return max(ended, key=lambda each: (str(each["status"].get("finishedAt")), each["metadata"]["name"]))
    if name is not None and compared:
        why = "is a sweep: its phases ask different things, and are no loads of one traffic: name another"
        return NoEvidence("EvidenceUnusable", f"{name} {why}")
    phase = (captures[-1].get("status") or {}).get("phase") if name is not None else None
    return NoEvidence("NoEvidence", f"{name} compared no arms, it is {phase}" if name else _NONE)


def _is_sweep(capture: Body) -> bool:
    """Whether its phases are no loads of one traffic, but ask for other temperatures, lengths or prompts each."""
    try:
        workload = CaptureWorkload.parse(capture["spec"].get("workload") or {}, newer=True)
    except ValidationError:
        return False
    return len({phase.asks for phase in workload.phases}) > 1


def _speculations(arms: Sequence[Any], asked: Speculation | None) -> dict[str, Speculation]:
    """Return how each arm speculates that differs from the deployment in that alone."""
    found = {}
    for arm in arms:
        if arm.get("targetQuantization") or arm.get("kvCacheDtype"):
            continue
        try:
            given = arm.get("speculation")
            found[str(arm.get("name"))] = Speculation.parse(given, newer=True) if given else asked or _OFF
        except ValidationError:
            continue
    return found


def _evidence(
    name: str, comparison: ComparisonStatus, speculations: Mapping[str, Speculation], arms: Sequence[Any]
) -> Evidence | None:
    as_asked = {str(arm.get("name")) for arm in arms if not arm.get("speculation")}
    loads = {
        running: goodput
        for arm in comparison.arms
        for load in arm.loads
        if (running := decimal(load.running))
        and running > 0
        and (goodput := decimal(load.baseline_goodput))
        and goodput > 0
    }
    settings = []
    for arm in comparison.arms:
        points = _points(arm)
        if points and arm.name in speculations:
            its = speculations[arm.name]
            refused = "" if arm.name in as_asked else _refusal(arm, its)
            settings.append(_setting(arm.name, points, its, arm.acceptance_percent, refused))
    if not settings or not loads:
        return None
    if comparison.baseline in speculations:
        points = [Point(load, load) for load in sorted(loads)]
        its = speculations[comparison.baseline]
        settings.append(_setting(comparison.baseline, points, its, comparison.baseline_acceptance_percent))
    return Evidence(name, settings, sorted(loads.items()))


def _points(arm: ComparedArm) -> list[Point]:
    points = []
    for load in arm.loads:
        texts = (load.running, load.arm_running or load.running, load.ratio, load.low, load.high)
        numbers = [number for number in map(decimal, texts) if number is not None and number > 0]
        if len(numbers) == len(texts):
            points.append(Point(*numbers))
    return sorted(points, key=lambda point: point.load)


def _refusal(arm: ComparedArm, its: Speculation) -> str:
    """Return why an arm is not chosen, whatever it brings: its answers may be others than were asked for.

    That a way of rejection sampling is lossy its speculation says itself, whatever the files of a capture say.
    """
    if its.rejection_sampling is RejectionSampling.FLY:
        return "its answers may be others than the target's own (rejectionSampling fly)"
    if arm.verdict is ArmVerdict.INCORRECT or arm.outputs in {Outputs.DIFFERENT, Outputs.LOSSY}:
        return "its answers are others than the baseline's"
    return ""


def _setting(
    name: str, points: Sequence[Point], speculation: Speculation, percent: int | None, refused: str = ""
) -> Setting:
    drafts = 0 if speculation.method is Method.NONE else speculation.num_speculative_tokens or 0
    # By batch size K moves with the load: acceptance then says nothing of tokens a step.
    by_batch = bool(speculation.num_speculative_tokens_by_batch_size)
    acceptance = None if percent is None or by_batch else percent / 100
    return Setting(name, points, drafts, acceptance, refused)
