"""What a policy sees of the engines: their work, whether all are there, how long they take to start."""

from collections.abc import Sequence
from datetime import UTC, datetime

from specdecode_operator.api.base import Body
from specdecode_operator.deployment.desired_state import DesiredState, Launch
from specdecode_operator.deployment.observation import Observation, rollout_of
from specdecode_operator.deployment.proof.observed import answering_engines
from specdecode_operator.policy.decision import Seen
from specdecode_operator.policy.window import Drafting, Sample, Window


def see(desired: DesiredState, observation: Observation, window: Window, now_s: float) -> Seen:
    """Return what is seen now, with the window of what was seen before; looks at engines of a rollout do not count."""
    settled = _settled(desired, observation)
    engines = answering_engines(observation.readings)
    if settled and engines:
        drafting = {
            name: Drafting(its.drafts, its.draft_tokens, its.accepted_tokens)
            for name, engine in engines.items()
            if (its := engine.speculation) is not None
        }
        running = sum(engine.requests_running for engine in engines.values()) / len(engines)
        window = window.add(Sample(now_s, running, drafting))
    speculation = desired.outcome.facts.spec.speculation if isinstance(desired.outcome, Launch) else None
    adapts = speculation is not None and bool(speculation.adaptive_verification)
    return Seen(now_s, window, settled, start_s(observation.pods), counts_all=not adapts)


def _settled(desired: DesiredState, observation: Observation) -> bool:
    """Whether every wanted engine serves, and all are of the setting in force."""
    if observation.blocked or not isinstance(desired.outcome, Launch):
        return False
    rollout = rollout_of(desired.outcome, observation)
    return rollout.complete and rollout.wanted > 0


def start_s(pods: Sequence[Body]) -> float:
    """Return how long the slowest of these pods took from its start to ready; 0 where none is."""
    taken = [0.0]
    for pod in pods:
        status = pod.get("status") or {}
        ready = [
            each for each in status.get("conditions") or [] if each["type"] == "Ready" and each["status"] == "True"
        ]
        moments = [_moment(status.get("startTime")), *(_moment(each.get("lastTransitionTime")) for each in ready)]
        begun, *ended = moments
        taken += [(each - begun).total_seconds() for each in ended if begun is not None and each is not None]
    return max(taken)


def _moment(text: object) -> datetime | None:
    try:
        return datetime.strptime(str(text), "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
    except ValueError:
        return None
