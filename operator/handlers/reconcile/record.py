"""What the operator remembers of one SpecDecodeDeployment."""

from dataclasses import dataclass, field

from specdecode_operator.cluster.figures_source import KeptFigures
from specdecode_operator.deployment.pods.group_history import GroupHistory
from specdecode_operator.deployment.pods.rollback import LastGood
from specdecode_operator.deployment.proof.decay import NOTHING_DECAYED, Decay
from specdecode_operator.deployment.proof.recent import NOTHING_RECENT, Recent
from specdecode_operator.handlers.reconcile.decision_cache import DecisionCache


@dataclass
class Record:
    """What the operator remembers of one object from one look to the next; it is lost with the process."""

    uid: str
    decisions: DecisionCache = field(default_factory=DecisionCache)
    written: DecisionCache = field(default_factory=DecisionCache)
    """Those for the spec as it is written, where a policy has put another speculation in force."""

    candidates: DecisionCache = field(default_factory=DecisionCache)
    """Those for what its policy would put in force."""

    figures_written_s: float | None = None
    """When the status got its observed figures, on the monotonic clock."""

    silent_since_s: float | None = None
    """When no engine answered any more, on the monotonic clock; None where one does."""

    recent: Recent = NOTHING_RECENT
    decay: Decay = NOTHING_DECAYED
    figures: KeptFigures = field(default_factory=KeptFigures)
    groups: GroupHistory | None = None

    kept: dict[str, str] | None = None
    """Digests of what is kept in ConfigMaps; None before the first look, when only the status knows them."""

    last_good: LastGood | None = None
    """What is kept of earlier engines, should somebody take its ConfigMap away."""

    last_good_digests: dict[str, str] = field(default_factory=dict)
    """Those of its entries: to write it as text takes a millisecond, at every look at every object."""

    last_good_due: bool = True
    """Whether another workload may serve, or fail, since it was last looked at for that."""
