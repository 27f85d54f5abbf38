"""What is observed of the engines after the children were applied, and how far their rollout is."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from specdecode_operator.api.base import Body
from specdecode_operator.api.status.deployment import FiguresStatus
from specdecode_operator.deployment.desired_state import DesiredState, Gated, Launch, RolledBack
from specdecode_operator.deployment.objects.children import wanted_replicas
from specdecode_operator.deployment.objects.engine_pod import engine_timeouts
from specdecode_operator.deployment.pods.group_history import UNSEEN, GroupHistory
from specdecode_operator.deployment.pods.group_rollout import read_group_rollout
from specdecode_operator.deployment.pods.readiness import Lending, Readiness
from specdecode_operator.deployment.pods.rollout import Rollout, read_rollout, with_replaced
from specdecode_operator.deployment.proof.decay import NOTHING_DECAYED, Decay
from specdecode_operator.deployment.proof.recent import NOTHING_RECENT, Recent
from specdecode_operator.deployment.proof.residual import BudgetResidual, budget_residual
from specdecode_operator.engine.metrics import Reading
from specdecode_operator.kube.resources import LEADER_WORKER_SET

_SILENCE_BELIEVED_S = 25.0
"""How long no engine answers before that is news: at three looks in a row where engines are asked each 15 s."""


@dataclass(frozen=True)
class Observation:
    """What is observed of the engines of one object."""

    workload: Body | None = None
    pods: list[Body] = field(default_factory=list)
    readings: Mapping[str, Reading] = field(default_factory=dict)
    figures_due: bool = True
    """Whether the observed figures may be written into the status again: they change with every request."""

    silent_s: float | None = None
    """How long no engine has answered; None where one does, or none was asked."""

    lending: Lending | None = None
    """The capture that has the GPUs of the engines, and when it should give them back."""

    claim_users: tuple[str, ...] = ()
    """Other objects of the namespace whose models are on a claim of this one."""

    recent: Recent = NOTHING_RECENT
    """What the engines did lately."""

    decay: Decay = NOTHING_DECAYED
    """Whether they do it worse than before."""

    figures: FiguresStatus | None = None
    """What they did in the last minutes."""

    groups: GroupHistory = UNSEEN
    """What was observed of engines on several nodes since their template is in force."""

    replaced_workload: Body | None = None
    """The workload of another kind that ran the engines before, while it is there."""

    blocked: Readiness | None = None
    """Why the API server did not take what is desired."""

    contested: tuple[str, ...] = ()
    """Children that somebody changes again after each repair, with the fields."""

    @property
    def missed(self) -> bool:
        """Whether the engines missed a question, as busy ones may: what they proved stands until they stay silent."""
        return self.silent_s is not None and self.silent_s < _SILENCE_BELIEVED_S


def observed_residual(desired: DesiredState, observation: Observation) -> BudgetResidual | None:
    """Return what the engines' KV cache lacks of the plan in force; None while there is nothing to compare."""
    outcome = desired.outcome
    if observation.blocked:
        return None
    return budget_residual(outcome.facts, outcome.plan, observation.readings) if isinstance(outcome, Launch) else None


def rollout_of(outcome: Launch | RolledBack | Gated, observation: Observation) -> Rollout:
    """Return how far the rollout is."""
    workload, wanted = observation.workload, wanted_replicas(outcome.facts)
    if workload is None or workload.get("kind") != LEADER_WORKER_SET.kind:
        return with_replaced(read_rollout(workload, observation.pods, wanted), observation.replaced_workload)
    deadline_s = (
        engine_timeouts(outcome.facts, outcome.plan).progress_deadline_s if isinstance(outcome, Launch) else None
    )
    rollout = read_group_rollout(workload, observation.pods, wanted, observation.groups, deadline_s)
    return with_replaced(rollout, observation.replaced_workload)
