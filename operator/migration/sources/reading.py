"""From objects and text to the servers in them: which source reads what."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from specdecode_operator.api.deployment import KIND
from specdecode_operator.kube.untyped import mapping, objects
from specdecode_operator.migration.builder import MigrationError
from specdecode_operator.migration.sources.compose import is_compose, read_compose
from specdecode_operator.migration.sources.config_maps import with_values
from specdecode_operator.migration.sources.foreign import is_of_its_group
from specdecode_operator.migration.sources.kserve import read_inference_service
from specdecode_operator.migration.sources.kubernetes import read_deployment, read_pod, read_stateful_set
from specdecode_operator.migration.sources.leader_worker_set import read_leader_worker_set
from specdecode_operator.migration.sources.llm_inference_service import read_llm_inference_service
from specdecode_operator.migration.sources.production_stack import is_production_stack, read_production_stack
from specdecode_operator.migration.sources.workload import Workload

_Body = Mapping[str, Any]
_OF_KINDS: Final[Mapping[str, Callable[[_Body], Workload]]] = {
    "Deployment": read_deployment,
    "StatefulSet": read_stateful_set,
    "Pod": read_pod,
    "LeaderWorkerSet": read_leader_worker_set,
    "LLMInferenceService": read_llm_inference_service,
}
KINDS: Final = (*_OF_KINDS, "InferenceService")
"""Kinds of Kubernetes that can be imported."""

READABLE: Final = (
    f"{', '.join(KINDS[:-1])} or {KINDS[-1]}, docker compose, values of the production-stack chart,"
    " or a vllm serve or docker run command line"
)
"""What can be imported, in words."""


def read_workloads(body: _Body, others: Sequence[_Body] = ()) -> list[Workload]:
    """Return the servers of one object; ``others`` are those beside it. Nothing where the kind is none of these.

    Raises
    ------
    MigrationError
        When its parts are not what its kind has.
    """
    _refuse_own(body)
    if is_compose(body):
        return read_compose(body)
    if is_production_stack(body):
        return read_production_stack(body)
    kind = str(body.get("kind"))
    if not is_of_its_group(body):
        return []
    if kind == "InferenceService":
        return [with_values(read_inference_service(body, others), others)]
    return [with_values(_OF_KINDS[kind](body), others)] if kind in _OF_KINDS else []


def _refuse_own(body: _Body) -> None:
    for owner in objects(mapping(body, "metadata"), "ownerReferences"):
        if owner.get("kind") == KIND:
            fix = f"it belongs to {KIND} {owner.get('name')} already: nothing is to be imported"
            raise MigrationError("metadata.ownerReferences", str(owner.get("kind")), fix)
