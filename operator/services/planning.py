"""Decides where and how a pair runs, from its facts and the GPUs of the cluster."""

from dataclasses import dataclass, replace

from specdecode_operator.api.problems import Problem
from specdecode_operator.api.status import PlanStatus
from specdecode_operator.cluster.fleet import NodeFacts
from specdecode_operator.services.facts import Facts, InvalidSpecError
from specdecode_operator.sizing.devices import find_device, known_products
from specdecode_operator.sizing.errors import PlanError
from specdecode_operator.sizing.plan import GpuPool, Plan, plan_on_cpu, plan_on_gpus
from specdecode_operator.sizing.units import GIB


@dataclass(frozen=True)
class WaitingForNodes:
    """No node of the cluster can be planned for yet."""

    message: str


def make_plan(facts: Facts, nodes: tuple[NodeFacts, ...], previous: PlanStatus | None) -> Plan | WaitingForNodes:
    """Return the plan for a spec.

    A plan that serves already is kept while it still fits: that a better node
    appeared is no reason to restart engines.

    Raises
    ------
    InvalidSpecError
        When the accelerator or the tensor parallelism can never be had.
    """
    accelerator = facts.spec.accelerator
    if facts.on_cpu:
        return plan_on_cpu(facts.pair, (accelerator.memory_gib or 0) * GIB, (accelerator.kv_cache_gib or 0) * GIB)
    _refuse_unknown_products(facts)
    pools = _pools(facts, nodes)
    if not pools:
        return WaitingForNodes(_no_node_message(facts, nodes))
    tensor = facts.spec.parallelism.tensor
    most = max(pool.gpus_per_node for pool in pools)
    if tensor is not None and tensor > most:
        message = (
            f"no node that may be used has more than {most} GPUs, and one replica cannot span nodes yet:"
            f" use {most} or less"
        )
        raise InvalidSpecError([Problem("spec.parallelism.tensor", str(tensor), message)])
    try:
        plan = plan_on_gpus(facts.pair, pools, tensor)
    except PlanError as error:
        raise InvalidSpecError([Problem(f"spec.{error.field}", str(error.value), error.message)]) from error
    return _kept_plan(facts, pools, plan, previous) or plan


def _kept_plan(facts: Facts, pools: tuple[GpuPool, ...], plan: Plan, previous: PlanStatus | None) -> Plan | None:
    """The choice of the previous plan, where it differs from the new one and still fits."""
    if previous is None or previous.verdict == "DoesNotFit":
        return None
    if (previous.product, previous.tensor) == (plan.chosen.product, plan.chosen.tensor):
        return None
    same_product = tuple(pool for pool in pools if pool.product == previous.product)
    if not same_product or previous.tensor > same_product[0].gpus_per_node:
        return None
    kept = plan_on_gpus(facts.pair, same_product, previous.tensor)
    return replace(kept, rows=plan.rows) if kept.verdict != "DoesNotFit" else None


def _pools(facts: Facts, nodes: tuple[NodeFacts, ...]) -> tuple[GpuPool, ...]:
    """Products that may be used, each with the GPUs of its largest node."""
    wanted = facts.spec.accelerator.product
    largest: dict[str, int] = {}
    for node in nodes:
        if find_device(node.product) is not None and (not wanted or node.product in wanted):
            largest[node.product] = max(node.gpus, largest.get(node.product, 0))
    if not largest and facts.spec.accelerator.per_node:
        # Node pools that scale from zero have no node to ask; the spec speaks for them.
        largest = dict.fromkeys(wanted, facts.spec.accelerator.per_node)
    return tuple(GpuPool(product, gpus) for product, gpus in sorted(largest.items()))


def _refuse_unknown_products(facts: Facts) -> None:
    problems = [
        Problem(
            f"spec.accelerator.product[{index}]",
            product,
            f"no memory figures are known for this product: use one of {', '.join(known_products())}",
        )
        for index, product in enumerate(facts.spec.accelerator.product)
        if find_device(product) is None
    ]
    if problems:
        raise InvalidSpecError(problems)


def _no_node_message(facts: Facts, nodes: tuple[NodeFacts, ...]) -> str:
    wanted = ", ".join(facts.spec.accelerator.product or known_products())
    present = ", ".join(sorted({node.product for node in nodes})) or "none"
    return (
        f"no schedulable node has the label nvidia.com/gpu.product with one of: {wanted} (GPUs seen: {present});"
        " waits for one, or set spec.accelerator.product and perNode for node pools that scale from zero"
    )
