"""Whether an object changes by itself, with time or in its engines, so that no watch would tell of it."""

from specdecode_operator.deployment.desired_state import DesiredState
from specdecode_operator.deployment.observation import Observation
from specdecode_operator.deployment.pods.rejected_pods import rejections
from specdecode_operator.deployment.spec.parent import Parent
from specdecode_operator.kube.resources import JOB, LEADER_WORKER_SET
from specdecode_operator.problems import InvalidSpecError


def changes_by_itself(parent: Parent, desired: DesiredState, observation: Observation) -> bool:
    """Whether there is something to ask or to wait for.

    Pods that do not run yet, nodes and captures are told of by watches.
    """
    if observation.readings or observation.blocked or observation.contested:
        return True
    if any(child["kind"] in {JOB.kind, LEADER_WORKER_SET.kind} for child in desired.children):
        return True  # a model is fetched, or groups are given up after a time
    return _acts_by_itself(parent) or bool(rejections(observation.pods))


def _acts_by_itself(parent: Parent) -> bool:
    """Whether the spec has the operator act without another change of it: by a clock, or by what is measured."""
    spec = parent.written_spec or parent.spec
    if isinstance(spec, InvalidSpecError):
        return False
    return bool(spec.captures or spec.policy or spec.rollout.gate)
