"""Answer `plan` for one object: where it would run, and what to change if it does not fit.

Models that neither the spec nor the catalogue describes are read from the hub, or reported with a fix.
"""

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final, Protocol

from specdecode_operator.api.deployment import SpecDecodeDeploymentSpec
from specdecode_operator.api.spec_problems import admitted_object
from specdecode_operator.api.speculation import ServedModel
from specdecode_operator.cli.input_files import (
    Document,
    Reading,
    read_calibration,
    read_given,
    read_nodes,
    refuse_unused,
    with_configs,
)
from specdecode_operator.cli.options import ExitCode
from specdecode_operator.cli.terminal import say, say_line
from specdecode_operator.cli.text_files import DocumentError
from specdecode_operator.cluster.nodes import NodeFacts
from specdecode_operator.deployment.conditions import Blocked
from specdecode_operator.deployment.models.checkpoint_reader import Checkpoint, CheckpointError
from specdecode_operator.deployment.models.checkpoints import config_of
from specdecode_operator.deployment.models.model_locations import (
    DRAFT,
    KnownModels,
    ModelSource,
    model_source,
    served_models,
    undescribed_models,
)
from specdecode_operator.deployment.planning import assumed_nodes, full_matrix, make_plan, plan_advice
from specdecode_operator.deployment.spec_facts import Facts
from specdecode_operator.deployment.validation import check_without_models, refuse_pod_template, valid_facts
from specdecode_operator.deployment.warnings import plan_notes, plan_warnings, version_doubts
from specdecode_operator.enums import Method, Precision
from specdecode_operator.problems import InvalidSpecError, Problem, printable
from specdecode_operator.sizing.calibration import UNCALIBRATED, Calibration
from specdecode_operator.sizing.catalogue import same_beginning, similar_model
from specdecode_operator.sizing.devices import family_of, find_device, uncalibrated_note
from specdecode_operator.sizing.kernel_support import adaptive_doubt
from specdecode_operator.sizing.memory.budget import Budget
from specdecode_operator.sizing.pair import Parallelism
from specdecode_operator.sizing.placement import place_phrase
from specdecode_operator.sizing.plan import Fix, Plan, Row, product_change
from specdecode_operator.sizing.quantization_matrix import MatrixRow

_MOST_NAMED: Final = 3
"""Models of the catalogue that are told beside one that it lacks."""


NONE_GIVEN: Final[Mapping[str, Checkpoint]] = MappingProxyType({})
"""No facts of models beside those of the catalogue and the hub."""


class Models(Protocol):
    """Where facts of models may be had, such as the hub."""

    def find(self, model: str, revision: str | None) -> Checkpoint:
        """Return what is known of a model, or raise CheckpointError."""


@dataclass(frozen=True)
class UnknownModel:
    """A model of which nothing is known here; in a cluster the operator reads it."""

    field: str  # Where the spec names it
    source: ModelSource
    why: str  # Why it could not be had, without a full stop

    @property
    def problem(self) -> Problem:
        """What to tell of it."""
        return Problem(f"{self.field}.model", self.source.model, self.why)


def look_up(
    spec: SpecDecodeDeploymentSpec, models: Models | None, given: Mapping[str, Checkpoint] = NONE_GIVEN
) -> tuple[KnownModels, tuple[UnknownModel, ...]]:
    """Return what can be known of the models that need it, and those that stay unknown.

    ``given`` is what was read of models in folders, by their ids.
    """
    sources = {model.model: model_source(spec, model) for model in served_models(spec).values()}
    known = {source: given[name] for name, source in sources.items() if name in given}
    problems = [
        problem
        for field, model in served_models(spec).items()
        if model.model in given
        for problem in _contradictions(field, model, given[model.model])
    ]
    if problems:
        raise InvalidSpecError(problems)
    unknown = []
    for path, source in undescribed_models(spec).items():
        if source in known:
            continue
        if models is None or source.on_volume:
            unknown.append(UnknownModel(path, source, _not_in_the_catalogue(spec, path, source)))
            continue
        try:
            known[source] = models.find(source.model, source.revision)
        except CheckpointError as error:
            unknown.append(UnknownModel(path, source, printable(error.message)))
    return known, tuple(unknown)


def _contradictions(field: str, model: ServedModel, given: Checkpoint) -> Iterator[Problem]:
    known = {} if model.config is not None else config_of(model, None)
    for key, value in (known or {}).items():
        other = given.config.get(key)
        if type(value) is int and type(other) is int and value != other:
            message = (
                f"the facts given for {model.model} say {key} {other}, and its config.json says {value}: remove one"
            )
            yield Problem(f"{field}.model", model.model, message)


def how_to_resolve(unknown: Sequence[UnknownModel], *, asked_hub: bool) -> str:
    """Return all unknown models at once, and the options that would make them known."""
    sources: Mapping[ModelSource, None] = dict.fromkeys(each.source for each in unknown)
    names = list(dict.fromkeys(source.model for source in sources))
    on_hub = any(not source.on_volume for source in sources)
    many = f"{len(names)} models are" if len(names) > 1 else "1 model is"
    by_hand = " ".join(f"--model-config {shlex.quote(name)}=PATH" for name in map(printable, names))
    lines = [
        f"{many} unknown here: {printable(', '.join(names))}",
        "In a cluster the operator reads what it needs. Here, add",
    ]
    if on_hub and not asked_hub:
        lines += ["  --hub, to read config.json and the headers of the weights from the model hub, or"]
    fields = ", ".join(dict.fromkeys(f"{each.field}.config" for each in unknown))
    assumed = fields.replace(".config", ".assume")
    return "\n".join(
        [
            *lines,
            f"  {by_hand}, or",
            "  --facts FILE, which specdecode models add writes where the model can be read, or",
            f"  the content of its config.json as {fields}, or",
            f"  weightsGiB and kvBytesPerToken in {assumed}, which nothing checks",
        ]
    )


def _not_in_the_catalogue(spec: SpecDecodeDeploymentSpec, field: str, source: ModelSource) -> str:
    place = "" if not source.on_volume else " and it lies on a volume"
    return f"is not in the catalogue{place}{_meant(spec, field)}"


def _meant(spec: SpecDecodeDeploymentSpec, field: str) -> str:
    models = served_models(spec)
    if field not in models:
        return ""
    method = spec.speculation.method if spec.speculation else Method.NONE
    wants_head = field == DRAFT and method is not Method.DRAFT_MODEL
    found = similar_model(models[field].model, heads=wants_head)
    if found not in (None, spec.target.model):
        return f", did you mean {found}?"
    return others_named(models[field].model, heads=wants_head)


def others_named(model: str, *, heads: bool) -> str:
    """Return which models the catalogue has whose names begin so, without a word on whether one of them is meant."""
    known = same_beginning(model, heads=heads)
    more = len(known) - _MOST_NAMED
    return f", which has {', '.join(known[:_MOST_NAMED])}{f' and {more} more' if more > 0 else ''}" if known else ""


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


def say_what_is_missing(errors: "Iterable[DocumentError]", unknown: "Sequence[UnknownModel]", *, hub: bool) -> None:
    """Say on standard error what could not be read, and all models at once that are unknown, even to the hub."""
    for error in errors:
        say_line(f"error: {error}", err=True)
    if unknown:
        say(how_to_resolve(unknown, asked_hub=hub), err=True)


def exit_code(result: "Answers", *, strict: bool) -> ExitCode:
    """Return what the shell gets; says on standard error what is tight, and all warnings."""
    for answer in result.answers:
        if answer.verdict == TIGHT:
            say_line(f"warning: {answer.document.name} is tight: {answer.explanation}", err=True)
    warnings = [(answer.document.name, warning) for answer in result.answers for warning in answer.warnings]
    for name, warning in warnings:
        say_line(f"{'error: --strict' if strict else 'warning'}: {name}: {warning}", err=True)
    codes = {
        FITS: ExitCode.OK,
        TIGHT: ExitCode.TIGHT if strict else ExitCode.OK,
        DOES_NOT_FIT: ExitCode.DOES_NOT_FIT,
        UNKNOWN: ExitCode.UNKNOWN,
        INVALID: ExitCode.INVALID,
    }
    code = codes[result.verdict]
    return ExitCode.TIGHT if strict and warnings and code is ExitCode.OK else code
