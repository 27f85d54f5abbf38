"""Plan where the engines run, and report the plan in `status.plan` and the condition Planned.

Unusable nodes are listed with the reason. A plan in force is kept while the spec allows it and it fits.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

from pydantic import ValidationError

from specdecode_operator.api.base import Body
from specdecode_operator.api.crd_validation import object_problems
from specdecode_operator.api.deployment import Override, SpecDecodeDeploymentSpec
from specdecode_operator.api.deployment_status import GpuMemory, PlanStatus
from specdecode_operator.cluster.nodes import NodeFacts, NodesFrom
from specdecode_operator.deployment.advice import Advice, Workload, advise, advise_on_nodes, low_load_break_even
from specdecode_operator.deployment.conditions import FALSE, TRUE, Blocked, ConditionUpdate
from specdecode_operator.deployment.spec_facts import Facts
from specdecode_operator.deployment.validation import UNKNOWN_MEMORY, facts_problems
from specdecode_operator.enums import FP8_ELEMENT_BYTES, METHODS_WITH_DRAFT, METHODS_WITH_LAYERS, KvCacheDtype, Method
from specdecode_operator.problems import InvalidSpecError, Problem, shown_or_missing
from specdecode_operator.sizing.arithmetic import GIB
from specdecode_operator.sizing.devices import MEMORY_FIELD, find_device, known_products, uncalibrated_note
from specdecode_operator.sizing.errors import SizingError
from specdecode_operator.sizing.kernel_support import adaptive_doubt
from specdecode_operator.sizing.memory.budget import Verdict
from specdecode_operator.sizing.pair import Pair
from specdecode_operator.sizing.placement import GpuPool, nodes_needed, place_phrase
from specdecode_operator.sizing.plan import (
    Admit,
    Change,
    Changes,
    Plan,
    keep,
    pair_at,
    plan_on_cpu,
    plan_on_gpus,
    selection,
)
from specdecode_operator.sizing.quantization_matrix import MatrixRow, quantization_matrix

_DRAFT: Final = "speculation.draft"
_DRAFT_LENGTH: Final = "speculation.draft.maxModelLen"
_DRAFT_TENSOR: Final = "parallelism.draftTensor"


def admitted(facts: Facts, pair: Pair, changes: Changes) -> Changes | None:
    """Return changes with the changes that they require; None if the API server or the engine would reject the spec."""
    body = facts.spec.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    whole = tuple(each for change in changes for each in _with_required_changes(change, body))
    changed = facts.spec.model_dump(mode="json", by_alias=True, exclude_none=True)
    for change in whole:
        *parents, name = change.field.split(".")
        place: Body = changed
        for parent in parents:
            place = place.setdefault(parent, {})
        place[name] = change.value
    try:
        spec = SpecDecodeDeploymentSpec.parse(changed)
    except ValidationError:
        return None
    refused = object_problems(spec) or facts_problems(replace(facts, spec=spec, pair=pair))
    return None if refused else whole


def _with_required_changes(change: Change, spec: Body) -> Iterator[Change]:
    match change:
        case Change("speculation.method", Method.NONE.value):
            yield Change("speculation", {"method": Method.NONE.value})
            if _at(spec, _DRAFT_TENSOR) is not None:
                yield Change(_DRAFT_TENSOR, None)
        case Change("speculation.method", str(method)):
            yield change
            if method not in METHODS_WITH_DRAFT and _at(spec, _DRAFT) is not None:
                yield Change(_DRAFT, None)
        case Change("speculation.draft.model", str(model)) if set(_at(spec, _DRAFT)) - {"model"}:
            # The other fields describe the old draft.
            yield Change(_DRAFT, {"model": model})
        case Change("parallelism.tensor", int(tensor)):
            yield change
            if (_at(spec, _DRAFT_TENSOR) or 1) > 1:
                yield Change(_DRAFT_TENSOR, tensor)
        case Change("serving.maxModelLen", int(length)):
            yield change
            if (_at(spec, _DRAFT_LENGTH) or 0) > length:
                yield Change(_DRAFT_LENGTH, length)
        case _:
            yield change


def _at(spec: Body, field: str) -> Any:
    found: Any = spec
    for name in field.split("."):
        found = found.get(name) if isinstance(found, dict) else None
    return found


_NODES_NAMED: Final = 3  # Nodes named per reason; the rest is counted, because clusters may have thousands
_MOST_NODES: Final = 64  # Most nodes of one replica, which is the most GPUs that it may have in one group
LWS_MISSING: Final = "LeaderWorkerSetMissing"
_REASONS_NAMED: Final = 4
ASSUMED_PRODUCTS: Final = ("NVIDIA-H100-80GB-HBM3", "NVIDIA-H200")
ASSUMED_GPUS_PER_NODE: Final = 8
_ASSUMED_NODES: Final = 8


def assumed_nodes(facts: Facts, products: Sequence[str] = ()) -> tuple[NodeFacts, ...]:
    """Return made-up nodes with the given products, the products of the spec, or else H100 and H200."""
    accelerator = facts.spec.accelerator
    gpus = accelerator.per_node or ASSUMED_GPUS_PER_NODE
    products = products or accelerator.products or ASSUMED_PRODUCTS
    return tuple(
        NodeFacts(f"{product}-{number}", product, gpus) for product in products for number in range(_ASSUMED_NODES)
    )


def make_plan(
    facts: Facts,
    nodes: tuple[NodeFacts, ...],
    previous: PlanStatus | None,
    *,
    groups: bool = False,
    nodes_from: NodesFrom = NodesFrom.CLUSTER,
) -> Plan | Blocked:
    """Return the plan of a spec, or why no node of the cluster is usable yet.

    A plan in force is kept as long as the spec allows it, the spec leaves the same choice, and the plan fits. A better
    or a cordoned node therefore does not restart engines. Raises InvalidSpecError if no node could ever run the spec.

    Parameters
    ----------
    groups
        Whether the cluster has LeaderWorkerSets, which replicas on several nodes need.
    nodes_from
        Source of the nodes, used in the message if no node is usable.
    """
    accelerator = facts.spec.accelerator
    if facts.on_cpu:
        own = pair_at(facts.pair, facts.options.available, facts.pair.target_precision, facts.pair.draft_precision)
        memory_bytes, kv_cache_bytes = (accelerator.memory_gib or 0) * GIB, (accelerator.kv_cache_gib or 0) * GIB
        return plan_on_cpu(own, memory_bytes, kv_cache_bytes, facts.spec.parallelism.tensor or 1)
    if facts.replay is not None:
        nodes, groups = assumed_nodes(facts), True
    pools = _pools(facts, [node for node in nodes if node.schedulable])
    if kept := _kept_plan(facts, nodes, previous, groups=groups):
        return kept
    if not pools:
        return Blocked("NoMatchingNodes", _no_node_message(facts, nodes, nodes_from))
    if not _has_room(facts, pools):
        return _too_small(facts, pools)
    alone = [replace(pool, nodes=1) for pool in pools]
    plan = _plan(facts, alone, admit=None) if _has_room(facts, alone) else None
    if plan is None or plan.verdict is Verdict.DOES_NOT_FIT:
        plan = _plan(facts, pools, partial(admitted, facts))
    launched = plan.verdict is not Verdict.DOES_NOT_FIT or _ignored_by(facts) is not None
    if plan.chosen.nodes > 1 and launched and not groups:
        asked = f"spec.parallelism: {plan.chosen.gpus} GPUs per replica ({plan.chosen.split.label})"
        message = (
            f"{asked}: no usable node has that many, so a replica needs {plan.chosen.place} and a LeaderWorkerSet, but"
            " LeaderWorkerSet is not installed or the operator may not list it: install it"
            " (https://lws.sigs.k8s.io/docs/installation/), update the operator's role, or use fewer GPUs"
        )
        return Blocked(LWS_MISSING, message)
    return plan


def _has_room(facts: Facts, pools: Iterable[GpuPool]) -> bool:
    tensor = facts.spec.parallelism.tensor or 1
    return any(nodes_needed(pool, tensor, facts.options.spread) for pool in pools)


def _too_small(facts: Facts, pools: Sequence[GpuPool]) -> Blocked:
    tensor, spread = facts.spec.parallelism.tensor or 1, facts.options.spread
    asked = f"spec.parallelism: {tensor * spread.groups} GPUs per replica ({spread.at(tensor).label})"
    largest = max(pools, key=lambda pool: (pool.gpus_per_node, pool.nodes))
    most = largest.gpus_per_node
    needed = nodes_needed(replace(largest, nodes=_MOST_NODES), tensor, spread)
    if needed is not None:
        place = place_phrase(tensor * spread.groups, needed, largest.product)
        present = "node is" if largest.nodes == 1 else "nodes are"
        message = (
            f"{asked}: needs {place}, but only {largest.nodes} {present} large enough: add nodes, or use fewer GPUs"
        )
        return Blocked("NodesTooFew", message)
    message = f"{asked}: no usable node has more than {most} GPUs"
    why = f"nodes cannot share that many evenly: use at most tensor {most}, with whole stages on more nodes, such as"
    why = f"{why} tensor {most}, pipeline 2 for two"
    if spread.data > 1 and tensor * spread.pipeline > most:
        why = (
            f"each of the {spread.data} data-parallel replicas must fit on one node: use spec.replicas instead of"
            " spec.parallelism.data"
        )
    return Blocked("NodesTooSmall", f"{message}, and {why}, or add larger nodes")


def _kept_plan(facts: Facts, nodes: tuple[NodeFacts, ...], previous: PlanStatus | None, *, groups: bool) -> Plan | None:
    if previous is None or previous.chosen_by not in (None, chosen_by(facts)):
        return None
    pools = {pool.product: pool for pool in _pools(facts, [node for node in nodes if node.schedulable])}
    pools |= {pool.product: pool for pool in _pools(facts, nodes) if pool.product == previous.product}
    try:
        plan = plan_on_gpus(
            facts.pair, pools.values(), facts.spec.parallelism.tensor, facts.options, partial(admitted, facts)
        )
    except SizingError:
        return None
    place = (previous.product, previous.tensor, previous.gpus_per_replica, previous.nodes_per_replica)
    precisions = (previous.target_quantization, previous.draft_quantization)
    for row in plan.rows:
        its = (row.product, row.tensor, row.gpus, row.nodes)
        if (row.target_precision, row.draft_precision) == precisions and its == place:
            fits = row.budget.verdict is not Verdict.DOES_NOT_FIT or _ignored_by(facts) is not None
            return keep(plan, facts.pair, row) if fits and (row.nodes == 1 or groups) else None
    return None


def chosen_by(facts: Facts) -> str:
    """Return the objective and the allowed precisions: ``Quality among target BF16, FP8 and draft BF16``."""
    allowed = selection(facts.pair, facts.options)
    models = [("target", allowed.target), ("draft", allowed.draft)]
    named = [f"{role} {', '.join(sorted(precisions))}" for role, precisions in models if precisions]
    return f"{facts.options.objective} among {' and '.join(named)}"


def full_matrix(facts: Facts, nodes: tuple[NodeFacts, ...], plan: Plan) -> tuple[MatrixRow, ...]:
    """Return the matrix of all precisions and placements that the spec allows; empty on CPU.

    Without usable nodes, the placements assume the plan's product.
    """
    if facts.on_cpu:
        return ()
    chosen = plan.chosen
    present = nodes if facts.replay is None else assumed_nodes(facts)
    pools = _pools(facts, present) or [
        GpuPool(chosen.product, chosen.gpus_per_node, chosen.nodes, facts.spec.accelerator.memory_gib_per_gpu)
    ]
    return quantization_matrix(
        facts.pair, pools, facts.spec.parallelism.tensor, facts.options.available, spread=facts.options.spread
    )


def _plan(facts: Facts, pools: Sequence[GpuPool], admit: Admit | None) -> Plan:
    try:
        return plan_on_gpus(facts.pair, pools, facts.spec.parallelism.tensor, facts.options, admit)
    except SizingError as error:
        problem = Problem(f"spec.{error.field}", shown_or_missing(error.value), error.message)
        if error.field == "draft" and facts.pair.draft is not None:
            # Only planning finds out if the states of target and draft fit into one layout.
            problem = Problem("spec.speculation.draft.model", facts.pair.draft.name, error.message)
        raise InvalidSpecError([problem]) from error


def _pools(facts: Facts, nodes: Iterable[NodeFacts]) -> list[GpuPool]:
    wanted = facts.spec.accelerator.products
    sizes: dict[str, list[int]] = {}
    for node in nodes:
        if _problem(facts, node) is None and (not wanted or node.product in wanted):
            sizes.setdefault(node.product, []).append(node.gpus)
    largest = {product: (max(gpus), gpus.count(max(gpus))) for product, gpus in sizes.items()}
    if not largest and facts.spec.accelerator.per_node:
        # Node pools scaled to zero have no nodes, so use the numbers of the spec.
        largest = dict.fromkeys(wanted, (facts.spec.accelerator.per_node, _MOST_NODES))
    memory_gib = facts.spec.accelerator.memory_gib_per_gpu
    return [
        GpuPool(product, gpus, min(count, _MOST_NODES), memory_gib)
        for product, (gpus, count) in sorted(largest.items())
    ]


def passed_over(facts: Facts, nodes: tuple[NodeFacts, ...]) -> str:
    """Return the unusable nodes with reasons, without nodes of products that the spec does not name."""
    if facts.on_cpu or facts.replay is not None:
        return ""
    wanted = facts.spec.accelerator.products
    named: dict[str, list[str]] = {}
    for node in nodes:
        problem = _problem(facts, node)
        if problem and (not wanted or not node.product or any(node.product.startswith(product) for product in wanted)):
            named.setdefault(f"{node.product or 'unlabelled'}: {problem}", []).append(node.name)
    reasons = []
    for reason, names in sorted(named.items()):
        more, listed = len(names) - _NODES_NAMED, ", ".join(sorted(names)[:_NODES_NAMED])
        nodes_word = "node" if len(names) == 1 else "nodes"
        reasons.append(f"{nodes_word} {listed}{f' and {more} more' if more > 0 else ''}: {reason}")
    more = len(reasons) - _REASONS_NAMED
    return "; ".join([*reasons[:_REASONS_NAMED], *([f"and {more} more kinds of nodes"] if more > 0 else [])])


def _problem(facts: Facts, node: NodeFacts) -> str | None:
    if node.refusal:
        return node.refusal
    given = facts.spec.accelerator
    if find_device(node.product, given.memory_gib_per_gpu if node.product in given.products else None) is not None:
        return None
    base = next((product for product in known_products() if node.product.startswith(f"{product}-")), None)
    if base is not None:
        suffix = node.product.removeprefix(base)
        return f"suffix {suffix} marks a variant of {base}, and {UNKNOWN_MEMORY}"
    return f"{UNKNOWN_MEMORY}: name it in spec.accelerator.products and set spec.{MEMORY_FIELD}"


def _no_node_message(facts: Facts, nodes: tuple[NodeFacts, ...], nodes_from: NodesFrom) -> str:
    wanted = f"one of: {', '.join(products)}" if (products := facts.spec.accelerator.products) else "a known GPU"
    missing = "spec.accelerator.perNode" if facts.spec.accelerator.products else "spec.accelerator.products and perNode"
    if nodes_from is NodesFrom.NOWHERE:
        administrator = "ask its administrator to configure the nodes (fleet.nodes of the chart, --nodes)"
        return f"this operator serves selected namespaces and may not list nodes: set {missing}, or {administrator}"
    present = ", ".join(sorted({node.product for node in nodes if node.product})) or "none"
    refused = f"; {passed_over(facts, nodes)}".removesuffix("; ")
    if nodes_from is NodesFrom.FILE:
        return (
            f"no configured node (fleet.nodes of the chart, --nodes) has {wanted}"
            f" (GPUs configured: {present}); for other nodes, set {missing}{refused}"
        )
    return (
        f"no schedulable node has the label nvidia.com/gpu.product with {wanted} (GPUs found: {present});"
        f" waiting for one. For node pools that scale from zero, set {missing}{refused}"
    )


_REHEARSAL: Final = "spec.engine.replay replays a recording, so the planned nodes need not exist"
MOST_SENTENCES: Final = 16  # Most fixes, and most pieces of advice, in a status


def plan_status(facts: Facts, plan: Plan) -> PlanStatus:
    """Return `status.plan`: the chosen row with its memory terms, fixes and advice."""
    chosen, budget, doubts = plan.chosen, plan.chosen.budget, list[str | None]()
    device = find_device(chosen.product, facts.spec.accelerator.memory_gib_per_gpu)
    if device is not None and budget.calibration is None:
        # No public log or measurement confirms the figures on this GPU.
        doubts = [uncalibrated_note(device), adaptive_doubt(device.product, facts.pair)]
    return PlanStatus(
        verdict=plan.verdict,
        explanation=plan.explanation,
        product=chosen.product,
        tensor=chosen.tensor,
        pipeline=chosen.spread.pipeline,
        data=chosen.spread.data,
        expert=chosen.spread.expert,
        draft_tensor=chosen.tensor if facts.method in METHODS_WITH_LAYERS else None,
        gpus_per_replica=0 if facts.on_cpu else chosen.gpus,
        nodes_per_replica=chosen.nodes,
        target_quantization=facts.pair.target_precision,
        draft_quantization=facts.pair.draft_precision if facts.pair.draft else None,
        target_knowledge=facts.pair.target.knowledge,
        draft_knowledge=facts.pair.draft.knowledge if facts.pair.draft else None,
        kv_cache_dtype=kv_cache_dtype(facts),
        max_model_len=facts.pair.limits.max_model_len,
        per_gpu=GpuMemory(**{term: getattr(budget, term) for term in GpuMemory.model_fields}),
        kv_bytes_per_token=budget.kv_bytes_per_token,
        kv_cache_tokens=budget.kv_cache_tokens,
        max_concurrency=f"{budget.max_concurrency:.2f}",
        uncalibrated="; ".join(filter(None, doubts)) or None,
        chosen_by=chosen_by(facts) if not facts.on_cpu else None,
        fixes=[fix.sentence for fix in plan.fixes][:MOST_SENTENCES] or None,
        advice=[f"{each.sentence} [{each.code}]" for each in plan_advice(facts, plan)][:MOST_SENTENCES] or None,
    )


def kv_cache_dtype(facts: Facts) -> str:
    """Return the type of the KV cache: serving.kvCacheDtype, or ``fp8`` if the checkpoint sets it, or else ``auto``."""
    asked = facts.spec.serving.kv_cache_dtype
    if asked is not KvCacheDtype.AUTO:
        return asked.value
    held = facts.pair.target.cache_element_bytes
    return "fp8" if held == FP8_ELEMENT_BYTES else "auto"


def plan_advice(facts: Facts, plan: Plan) -> tuple[Advice, ...]:
    """Return the advice on the chosen row; empty on CPU or if it does not fit, because fixes are listed then."""
    device = find_device(plan.chosen.product, facts.spec.accelerator.memory_gib_per_gpu)
    if device is None or plan.verdict is Verdict.DOES_NOT_FIT:
        return ()
    given, workload = facts.spec.workload, Workload()
    if given is not None:
        temperature = float(given.temperature) if given.temperature else None
        tokens = (given.prompt_tokens, given.output_tokens)
        workload = Workload(given.kind, temperature, given.primary_slo, *tokens)
    return (*advise(facts.pair, device, plan.chosen.split, workload), *advise_on_nodes(plan.chosen))


def planned_break_even(facts: Facts, plan: Plan) -> float | None:
    """Return the acceptance at which the draft breaks even at low load on the chosen row; None if it is unknown."""
    device = find_device(plan.chosen.product, facts.spec.accelerator.memory_gib_per_gpu)
    return None if device is None else low_load_break_even(facts.pair, device, plan.chosen.split)


def _ignored_by(facts: Facts) -> Override | None:
    """Return the override if it ignores the plan; otherwise None."""
    override = facts.spec.override
    return override if override is not None and override.ignore_plan else None


def planned_condition(facts: Facts, plan: Plan, passed_over: str = "") -> ConditionUpdate:
    """Return the condition Planned; ``passed_over`` lists the unusable nodes."""
    rehearsal = "" if facts.replay is None else _REHEARSAL
    explanation = "; ".join(filter(None, [plan.explanation, rehearsal, passed_over]))
    if plan.verdict != "DoesNotFit":
        return ConditionUpdate("Planned", TRUE, plan.verdict, explanation)
    override = _ignored_by(facts)
    if override is not None:
        message = f"does not fit, but spec.override.ignorePlan is set ({override.reason!r}): {explanation}"
        return ConditionUpdate("Planned", TRUE, "Overridden", message)
    return ConditionUpdate("Planned", FALSE, "DoesNotFit", explanation)


def plan_change(old: PlanStatus | None, new: PlanStatus | None) -> str | None:
    """Return the change from one placement to another as text; None if it is the same or one is missing."""
    if old is None or new is None or _place(old) == _place(new):
        return None
    return f"{_place(old)} -> {_place(new)}: {new.explanation}"


def _place(plan: PlanStatus) -> str:
    precisions = " + ".join(filter(None, [plan.target_quantization, plan.draft_quantization]))
    return f"{precisions} on {place_phrase(plan.gpus_per_replica, plan.nodes_per_replica, plan.product)}"
