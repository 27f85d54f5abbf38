"""Answers the question of `plan` for one object: where it would run, and what to change where it would not.

All that the command line needs of sizing's rows passes through here.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from specdecode_operator.cli.input_files import (
    Document,
    Reading,
    read_calibration,
    read_nodes,
    refuse_unused,
    with_configs,
)
from specdecode_operator.cli.plan.given_facts import read_given
from specdecode_operator.cli.plan.unknown import NONE_GIVEN, Models, UnknownModel, look_up
from specdecode_operator.cli.text_files import DocumentError
from specdecode_operator.deployment.blocked import Blocked
from specdecode_operator.deployment.plan.planning import assumed_nodes, full_matrix, make_plan
from specdecode_operator.deployment.plan.status import plan_advice
from specdecode_operator.deployment.spec.admission import admitted_object
from specdecode_operator.deployment.spec.facts import Facts
from specdecode_operator.deployment.spec.model_sources import KnownModels
from specdecode_operator.deployment.spec.validation import check_without_models, refuse_pod_template, valid_facts
from specdecode_operator.deployment.spec.warnings import plan_notes, plan_warnings, version_doubts
from specdecode_operator.kube.nodes import NodeFacts
from specdecode_operator.problems import InvalidSpecError, Problem
from specdecode_operator.resolver.read_model_facts import Checkpoint
from specdecode_operator.sizing.base.devices import family_of, find_device, uncalibrated_note
from specdecode_operator.sizing.choice.adaptive_rules import adaptive_doubt
from specdecode_operator.sizing.choice.changes import product_change
from specdecode_operator.sizing.choice.node_placement import place_phrase
from specdecode_operator.sizing.choice.plan import Fix, Plan, Row
from specdecode_operator.sizing.choice.quantization_matrix import MatrixRow
from specdecode_operator.sizing.memory.budget import Budget
from specdecode_operator.sizing.pair.calibration import UNCALIBRATED, Calibration
from specdecode_operator.sizing.pair.pair import Parallelism
from specdecode_operator.vocabulary import Precision

_MATRIX_PRECISIONS: Final = (Precision.BF16, Precision.FP8, Precision.INT8, Precision.INT4)

FITS: Final = "Fits"
TIGHT: Final = "Tight"
DOES_NOT_FIT: Final = "DoesNotFit"
UNKNOWN: Final = "Unknown"
INVALID: Final = "Invalid"
FROM_BEST: Final = (FITS, TIGHT, UNKNOWN, DOES_NOT_FIT, INVALID)


@dataclass(frozen=True)
class Candidate:
    """One place where a pair could run."""

    label: str  # What to call it, such as ``2 x H100, TP 2``
    product: str  # GPU product, or CPU
    gpus: int  # GPUs that a replica takes; 0 on CPU
    nodes: int  # Over how many nodes they lie
    split: Parallelism  # Over which GPUs a replica is spread
    budget: Budget  # Memory of each GPU
    # What target and draft are served at; None where no model drafts
    target_precision: Precision
    draft_precision: Precision | None
    explanation: str = ""  # Whether it fits there and why, for the best split on each product
    fixes: tuple[Fix, ...] = ()  # Single changes that make it fit there, least harm first; empty where it fits

    @property
    def tensor(self) -> int:
        """GPUs that share each layer."""
        return self.split.tensor

    @property
    def verdict(self) -> str:
        """Fits, Tight or DoesNotFit."""
        return self.budget.verdict.value


@dataclass(frozen=True)
class Answer:
    """What one object comes to."""

    document: Document  # The object
    verdict: str  # Fits, Tight, Unknown, DoesNotFit or Invalid
    explanation: str  # Why, in one sentence without a full stop
    facts: Facts | None = None  # The spec with all that it refers to; None where it is invalid or unknown
    candidates: tuple[Candidate, ...] = ()  # The best split on each product, the one to choose first
    matrix: tuple[Candidate, ...] = ()  # All products and splits, the one to choose first
    # Target, draft and KV cache in every precision, on every product and split, where they were asked for
    precisions: tuple[MatrixRow, ...] = ()
    choice: str = ""  # Why these precisions; empty where there was nothing to choose
    warnings: tuple[str, ...] = ()  # What of it has no effect, or puts figures in doubt
    advice: tuple[str, ...] = ()  # What is worth knowing although it is no error, warnings too
    problems: tuple[Problem, ...] = ()  # What is invalid, or unknown
    unknown: tuple[UnknownModel, ...] = ()  # Models that only the cluster can read
    known: KnownModels = field(default_factory=dict)  # Models that were read from the hub


@dataclass(frozen=True)
class Answers:
    """What some files come to."""

    answers: tuple[Answer, ...]  # One for each object, in the order of reading
    errors: tuple[DocumentError, ...]  # What could not be read

    @property
    def verdict(self) -> str:
        """The worst of all; Invalid where a file could not be read or there is no object."""
        if self.errors or not self.answers:
            return INVALID
        return max((each.verdict for each in self.answers), key=FROM_BEST.index)

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """All places that were looked at."""
        return tuple(candidate for answer in self.answers for candidate in answer.matrix)

    @property
    def unknown(self) -> tuple[UnknownModel, ...]:
        """Models of all objects that only the cluster can read."""
        return tuple(each for answer in self.answers for each in answer.unknown)


def ask(  # noqa: PLR0913  each is an option
    reading: Reading,
    nodes_file: str | None,
    model_configs: Sequence[str],
    calibration_file: str | None = None,
    *,
    products: tuple[str, ...] = (),
    models: Models | None = None,
    facts: Sequence[str] = (),
    allowed: frozenset[str] | None = None,
    every_precision: bool = False,
) -> Answers:
    """Return what each object that was read comes to; model configs are given as ``ID=PATH``.

    ``products`` are planned for in the place of those that objects name.
    ``models`` are asked for what neither a spec nor the catalogue describes, after the files of ``facts``.
    ``allowed`` is what podTemplate may ask for; None: nobody wants that judged.
    Precisions that a spec does not ask for are sized only with ``every_precision``: it takes longer than the rest.
    """
    try:
        nodes = None if nodes_file is None else read_nodes(nodes_file)
        configs, given = read_given(model_configs, facts)
        refuse_unused(configs, reading.documents)
        calibration = read_calibration(calibration_file)
    except DocumentError as error:
        return Answers((), (error,))
    answers = tuple(
        answer(
            document,
            nodes,
            configs,
            calibration,
            products=products,
            models=models,
            given=given,
            allowed=allowed,
            every_precision=every_precision,
        )
        for document in reading.documents
    )
    return Answers(answers, reading.errors)


def answer(  # noqa: PLR0913  each is an option
    document: Document,
    nodes: tuple[NodeFacts, ...] | None,
    model_configs: Mapping[str, dict[str, Any]],
    calibration: Calibration = UNCALIBRATED,
    *,
    products: tuple[str, ...] = (),
    models: Models | None = None,
    given: Mapping[str, Checkpoint] = NONE_GIVEN,
    allowed: frozenset[str] | None = None,
    every_precision: bool = False,
) -> Answer:
    """Return what an object comes to on these nodes; None: on nodes of 8 of the products it names, or H100 and H200.

    ``model_configs`` has the content of config.json by model id, for models whose spec holds none.
    """
    try:
        spec = admitted_object({**document.body, "spec": with_configs(document.body.get("spec"), model_configs)})
        if products:
            spec = spec.model_copy(update={"accelerator": spec.accelerator.model_copy(update={"product": []})})
        if allowed is not None:
            refuse_pod_template(spec, allowed, document.namespace or "default")
        known, unknown = look_up(spec, models, given)
        if unknown:
            profile = check_without_models(spec, {each.field: each.source for each in unknown})
            warnings = tuple(map(str, version_doubts(spec, profile)))
            problems = tuple(each.problem for each in unknown)
            explanation = "; ".join(map(str, problems))
            return Answer(
                document, UNKNOWN, explanation, warnings=warnings, problems=problems, unknown=unknown, known=known
            )
        facts = valid_facts(spec, known, calibration)
        present = assumed_nodes(facts, products) if nodes is None else nodes
        plan = make_plan(facts, present, None, groups=True)
        if isinstance(plan, Blocked):
            return Answer(document, DOES_NOT_FIT, plan.message, facts)
        planned = replace(_planned(document, facts, plan, present, known), known=known)
        return replace(planned, precisions=full_matrix(facts, present, plan)) if every_precision else planned
    except InvalidSpecError as error:
        return Answer(document, INVALID, str(error), problems=tuple(error.problems))


def _planned(document: Document, facts: Facts, plan: Plan, nodes: tuple[NodeFacts, ...], known: KnownModels) -> Answer:
    labels = _labels(plan.rows, on_cpu=facts.on_cpu)
    chosen = facts.at(*plan.chosen.served)
    best: dict[str, Row] = {}
    for row in plan.rows:
        best.setdefault(row.product, row)
    warnings = plan_warnings(chosen, known, plan.chosen.tensor)
    candidates = tuple(_judged(_candidate(row, labels, facts), facts, plan, nodes) for row in best.values())
    return Answer(
        document=document,
        verdict=plan.verdict.value,
        explanation=plan.explanation,
        facts=chosen,
        candidates=candidates,
        matrix=tuple(_candidate(row, labels, facts) for row in plan.rows),
        choice=plan.choice,
        warnings=tuple(warnings),
        advice=(
            *(f"{each.sentence} [{each.code}]" for each in plan_advice(chosen, plan)),
            *warnings,
            *plan_notes(chosen),
            *_gpu_notes(best, facts),
        ),
    )


def _gpu_notes(products: Iterable[str], facts: Facts) -> Iterator[str]:
    """Yield what to know of the figures for each GPU without public logs."""
    for product in products:
        gpu = find_device(product, facts.spec.accelerator.memory_gib_per_gpu)
        if gpu is not None:
            yield from filter(None, [uncalibrated_note(gpu), adaptive_doubt(product, facts.pair)])


def _candidate(row: Row, labels: Mapping[Row, str], facts: Facts) -> Candidate:
    return Candidate(
        label=labels[row],
        product=row.product,
        gpus=0 if facts.on_cpu else row.gpus,
        nodes=row.nodes,
        split=row.split,
        budget=row.budget,
        target_precision=row.target_precision,
        draft_precision=row.draft_precision,
    )


def _labels(rows: Sequence[Row], *, on_cpu: bool) -> dict[Row, str]:
    """What to call each row: ``2 x H100, TP 2``, with the precisions where the plan may choose them."""
    names = short_names({row.product for row in rows})
    if on_cpu:
        return {row: names[row.product] + (f", {row.split.label}" if row.tensor > 1 else "") for row in rows}
    several = len({(row.target_precision, row.draft_precision) for row in rows}) > 1
    places = {row: place_phrase(row.gpus, row.nodes, names[row.product]) for row in rows}
    return {row: f"{places[row]}, {row.split.label}{f', {_precisions_of(row)}' if several else ''}" for row in rows}


def _precisions_of(row: Row) -> str:
    return " + ".join(str(each) for each in (row.target_precision, row.draft_precision) if each is not None)


def _judged(candidate: Candidate, facts: Facts, plan: Plan, nodes: tuple[NodeFacts, ...]) -> Candidate:
    """The candidate with the sentence and the fixes that it would have alone; products that are there are no fix."""
    if candidate.product != plan.chosen.product and candidate.verdict == DOES_NOT_FIT:
        alone = make_plan(facts, tuple(node for node in nodes if node.product == candidate.product), None, groups=True)
        if not isinstance(alone, Blocked):
            present = [(product_change(row.product),) for row in plan.rows]
            fixes = tuple(fix for fix in alone.fixes if fix.changes not in present)
            return replace(candidate, explanation=alone.explanation, fixes=fixes)
    same_product = candidate.product == plan.chosen.product
    return replace(candidate, explanation=plan.explanation, fixes=plan.fixes) if same_product else candidate


def shown_precisions(answer: Answer, facts: Facts) -> list[MatrixRow]:
    """Return the rows of all precisions but the small floats, which are there where a checkpoint holds them."""
    held = {model.checkpoint_precision for model in (facts.pair.target, facts.pair.draft) if model is not None}
    shown = {*_MATRIX_PRECISIONS, *held, None}
    return [row for row in answer.precisions if row.target_precision in shown and row.draft_precision in shown]


def short_names(products: set[str]) -> dict[str, str]:
    """What people call products: H100 for NVIDIA-H100-80GB-HBM3, unless two would have the same name."""
    short = {product: family_of(product) for product in products}
    names = list(short.values())
    return {product: name if names.count(name) == 1 else product for product, name in short.items()}
