"""Answer `plan` for one object: where it would run, and what to change if it does not fit.

Models that neither the spec nor the catalogue describes are read from the hub, or reported with a fix.
"""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from specdecode_operator.api.deployment import Key, SpecDecodeDeploymentSpec
from specdecode_operator.api.spec_problems import admitted_object
from specdecode_operator.cli.input_files import (
    THE_OPTIONS,
    Document,
    InputOptions,
    Inputs,
    Models,
    Reading,
    with_configs,
)
from specdecode_operator.cli.options import ExitCode
from specdecode_operator.cli.terminal import say, say_line
from specdecode_operator.cli.text_files import DocumentError
from specdecode_operator.cluster.nodes import NodeFacts
from specdecode_operator.deployment.conditions import Blocked
from specdecode_operator.deployment.engine_pod import engine_timeouts
from specdecode_operator.deployment.models import model_locations
from specdecode_operator.deployment.models.checkpoint_reader import Checkpoint, CheckpointError
from specdecode_operator.deployment.models.checkpoints import config_of
from specdecode_operator.deployment.planning import assumed_nodes, full_matrix, make_plan, plan_advice, without_devices
from specdecode_operator.deployment.resource_claim import usable_gpus
from specdecode_operator.deployment.spec_facts import Facts
from specdecode_operator.deployment.startup_estimate import planned_startup
from specdecode_operator.deployment.validation import check_without_models, refuse_pod_template, valid_facts
from specdecode_operator.deployment.warnings import plan_notes, plan_warnings, spec_doubts, token_doubts
from specdecode_operator.enums import Method, Precision
from specdecode_operator.problems import MISSING, InvalidSpecError, Problem, printable
from specdecode_operator.sizing.catalogue import same_beginning, similar_model
from specdecode_operator.sizing.devices import family_of, find_device, uncalibrated_note
from specdecode_operator.sizing.kernel_support import adaptive_doubt
from specdecode_operator.sizing.memory.budget import Budget
from specdecode_operator.sizing.pair import Parallelism
from specdecode_operator.sizing.placement import place_phrase
from specdecode_operator.sizing.plan import Fix, Plan, Row, product_change
from specdecode_operator.sizing.quantization_matrix import MatrixRow
from specdecode_operator.sizing.startup_time import Rates, StartupTime
from specdecode_operator.untrusted import mapping

if TYPE_CHECKING:
    from specdecode_operator.importing.foreign import ForeignServer

_MOST_NAMED: Final = 3
"""Number of models of the catalogue that a message suggests."""
_SECONDS_UNTIL_S: Final = 120
_MATRIX_PRECISIONS: Final = (Precision.BF16, Precision.FP8, Precision.INT8, Precision.INT4)

FITS: Final = "Fits"
TIGHT: Final = "Tight"
DOES_NOT_FIT: Final = "DoesNotFit"
UNKNOWN: Final = "Unknown"
INVALID: Final = "Invalid"
_FROM_BEST: Final = (FITS, TIGHT, UNKNOWN, DOES_NOT_FIT, INVALID)


@dataclass(frozen=True)
class UnknownModel:
    """A model without known facts. In a cluster, the operator reads it."""

    field: str  # Field of the spec that names it; empty for an object of another project
    source: model_locations.ModelSource
    problem: Problem


@dataclass(frozen=True)
class Candidate:
    """GPUs, split and precisions with which a pair could run."""

    label: str  # ``2 x H100, TP 2``
    product: str  # GPU product, or CPU
    gpus: int  # GPUs of a replica; 0 on CPU
    nodes: int
    split: Parallelism
    budget: Budget  # Memory of each GPU
    target_precision: Precision
    draft_precision: Precision | None  # None if no model drafts
    explanation: str = ""  # Set for the best split on each product
    fixes: tuple[Fix, ...] = ()  # Changes that make it fit on this product, least disruptive first

    @property
    def verdict(self) -> str:
        """Fits, Tight or DoesNotFit."""
        return self.budget.verdict.value


@dataclass(frozen=True)
class PlannedStartup:
    """Estimated start-up time, and the time that the pod has for it."""

    time: StartupTime
    deadline_s: int | None  # Of the startup probe; None for an object of another project

    @property
    def is_late(self) -> bool:
        """Whether the startup probe may end a start that makes progress."""
        return self.deadline_s is not None and self.time.engine_s.slowest > self.deadline_s


@dataclass(frozen=True)
class Answer:
    """The plan of one object."""

    document: Document
    verdict: str  # Fits, Tight, Unknown, DoesNotFit or Invalid
    explanation: str  # One sentence without a full stop
    facts: Facts | None = None  # None if the object is invalid or a model is unknown
    candidates: tuple[Candidate, ...] = ()  # The best split on each product, best first
    matrix: tuple[Candidate, ...] = ()  # All products and splits, best first
    precisions: tuple[MatrixRow, ...] = ()  # Every precision on every product and split, if requested
    choice: str = ""  # Reason for these precisions; empty if there was no choice
    warnings: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()  # Includes the warnings
    problems: tuple[Problem, ...] = ()  # Invalid fields and unknown models
    unknown: tuple[UnknownModel, ...] = ()
    known: model_locations.KnownModels = field(default_factory=dict)  # Models that were read from the hub
    startup: PlannedStartup | None = None  # At the best place; None if it is not estimated


@dataclass(frozen=True)
class Answers:
    """The plans of all objects of some files, in the order of reading."""

    answers: tuple[Answer, ...]
    errors: tuple[DocumentError, ...]

    @property
    def verdict(self) -> str:
        """The worst verdict of all objects; Invalid if a file could not be read or there is no object."""
        if self.errors or not self.answers:
            return INVALID
        return max((each.verdict for each in self.answers), key=_FROM_BEST.index)

    @property
    def unknown(self) -> tuple[UnknownModel, ...]:
        """Unknown models of all objects."""
        return tuple(each for answer in self.answers for each in answer.unknown)


def look_up(
    spec: SpecDecodeDeploymentSpec, models: Models | None, given: Mapping[str, Checkpoint]
) -> tuple[model_locations.KnownModels, tuple[UnknownModel, ...]]:
    """Return the facts of models that the catalogue or the spec does not describe, and the models that stay unknown.

    ``given`` has facts by model id. Raise InvalidSpecError if they contradict the catalogue. A config in the spec is
    checked later.
    """
    served = model_locations.served_models(spec)
    known = {
        model_locations.model_source(spec, model): given[model.model]
        for model in served.values()
        if model.model in given
    }
    problems = []
    for path, model in served.items():
        config = None if model.config is not None or model.model not in given else config_of(model, None)
        for key, value in (config or {}).items():
            other = given[model.model].config.get(key)
            if type(value) is int and type(other) is int and value != other:
                message = f"has {key} {other} in its facts, but {value} in its config.json; remove one of the two"
                problems.append(Problem(f"{path}.model", model.model, message))
    if problems:
        raise InvalidSpecError(problems)
    unknown = []
    for path, source in model_locations.undescribed_models(spec).items():
        if source in known:
            continue
        if models is None or source.on_volume:
            place = " and is on a volume" if source.on_volume else ""
            why = f"is not in the catalogue{place}{_meant(spec, path)}"
        else:
            try:
                known[source] = models.find(source.model, source.revision)
                continue
            except CheckpointError as error:
                why = printable(error.message)
        unknown.append(UnknownModel(path, source, Problem(f"{path}.model", source.model, why)))
    return known, tuple(unknown)


def _meant(spec: SpecDecodeDeploymentSpec, field: str) -> str:
    models = model_locations.served_models(spec)
    if field not in models:
        return ""
    method = spec.speculation.method if spec.speculation else Method.NONE
    wants_head = field == model_locations.DRAFT and method is not Method.DRAFT_MODEL
    found = similar_model(models[field].model, heads=wants_head)
    if found not in (None, spec.target.model):
        return f", did you mean {found}?"
    return others_named(models[field].model, heads=wants_head)


def others_named(model: str, *, heads: bool) -> str:
    """Return a phrase that lists models of the catalogue whose names begin like this one."""
    known = same_beginning(model, heads=heads)
    more = len(known) - _MOST_NAMED
    return f", which has {', '.join(known[:_MOST_NAMED])}{f' and {more} more' if more > 0 else ''}" if known else ""


def ask(
    reading: Reading,
    options: InputOptions,
    *,
    products: tuple[str, ...] = (),
    every_precision: bool = False,
) -> Answers:
    """Plan each object that was read.

    ``products`` replace the products that the objects name. Precisions that a spec does not request are sized only with
    ``every_precision``, because that takes longer than the rest.
    """
    try:
        inputs = options.read(reading.documents)
    except DocumentError as error:
        return Answers((), (error,))
    planned = (answer(each, inputs, products=products, every_precision=every_precision) for each in reading.documents)
    return Answers(tuple(planned), reading.errors)


def answer(
    document: Document, inputs: Inputs, *, products: tuple[str, ...] = (), every_precision: bool = False
) -> Answer:
    """Plan an object. Without nodes, assume nodes of 8 GPUs of the products that it names, or of H100 and H200."""
    server = document.foreign
    if server is not None and server.error is not None:
        return Answer(document, UNKNOWN, str(server.error), problems=(server.error,))
    planned = _answer(document, inputs, products=products, every_precision=every_precision)
    if server is None:
        return planned
    engine = dict(mapping(server.spec, "engine"))
    if planned.verdict == INVALID and all(each.field.startswith("spec.engine.env") for each in planned.problems):
        # Variables change no memory: report them, and plan the rest.
        found = tuple(map(server.in_its_fields, planned.problems))
        spec = {**server.spec, "engine": {key: value for key, value in engine.items() if key != "env"}}
        server = replace(server, spec=spec, warnings=(*server.warnings, *found))
        document = replace(document, body={**document.body, "spec": spec}, foreign=server)
        planned = _answer(document, inputs, products=products, every_precision=every_precision)
    return _in_its_words(planned, server)


def _in_its_words(answer: Answer, server: "ForeignServer") -> Answer:
    """Return the answer about an object of another project, with its fields and vLLM's flags."""
    problems = tuple(map(server.in_its_fields, answer.problems))
    warnings = (*map(str, (*server.unread, *server.warnings)), *map(server.in_flags, answer.warnings))
    advice = (each for each in answer.advice if each not in answer.warnings)
    return replace(
        answer,
        explanation="; ".join(map(str, problems)) if problems else server.in_flags(answer.explanation),
        candidates=tuple(
            replace(
                each,
                explanation=server.in_flags(each.explanation),
                fixes=tuple(
                    replace(
                        fix, changes=tuple(map(server.flag_change, fix.changes)), effect=server.in_flags(fix.effect)
                    )
                    for fix in each.fixes
                ),
            )
            for each in answer.candidates
        ),
        choice=server.in_flags(answer.choice),
        warnings=warnings,
        advice=(*map(server.in_flags, advice), *map(str, server.notes), *warnings),
        problems=problems,
        # The object has no field for the facts of a model.
        unknown=tuple(replace(each, field="") for each in answer.unknown),
    )


def _answer(document: Document, inputs: Inputs, *, products: tuple[str, ...], every_precision: bool) -> Answer:
    try:
        spec = admitted_object({**document.body, "spec": with_configs(document.body.get("spec"), inputs.configs)})
        if products:
            spec = spec.model_copy(update={"accelerator": spec.accelerator.model_copy(update={"products": []})})
        if inputs.allowed is not None:
            refuse_pod_template(spec, inputs.allowed, document.namespace or "default")
        known, unknown = look_up(spec, inputs.models, inputs.given)
        if unknown:
            profile = check_without_models(spec, {each.field: each.source for each in unknown})
            problems = tuple(each.problem for each in unknown)
            return Answer(
                document,
                UNKNOWN,
                "; ".join(map(str, problems)),
                warnings=tuple(map(str, spec_doubts(spec, profile))),
                problems=problems,
                unknown=unknown,
                known=known,
            )
        facts = _replayed_on(products, valid_facts(spec, known, inputs.calibration))
        nodes = assumed_nodes(facts, products)
        if inputs.nodes is not None:
            nodes = usable_gpus(spec, inputs.nodes, inputs.devices)
        plan = make_plan(facts, nodes, None, groups=True)
        if isinstance(plan, Blocked):
            return Answer(document, DOES_NOT_FIT, without_devices(spec, plan, inputs.devices).message, facts)
        planned = _with_refreshes(_planned(document, facts, plan, nodes, known), plan)
        planned = _with_startup(planned, plan, inputs.rates)
        return replace(planned, precisions=full_matrix(facts, nodes, plan)) if every_precision else planned
    except InvalidSpecError as error:
        problems = tuple(error.problems)
        if document.file == THE_OPTIONS:
            problems = tuple(map(_with_option, problems))
        return Answer(document, INVALID, "; ".join(map(str, problems)), problems=problems)


def _with_option(problem: Problem) -> Problem:
    """Return a missing field with its option on the command line."""
    if (problem.field, problem.value) != ("spec.speculation.numSpeculativeTokens", MISSING):
        return problem
    return replace(problem, message=f"{problem.message} (option -K)")


def _replayed_on(products: tuple[str, ...], facts: Facts) -> Facts:
    """Return facts whose replay is planned for these products, if any: it takes them from its spec, not from nodes."""
    if facts.replay is None or not products:
        return facts
    accelerator = facts.spec.accelerator.model_copy(update={"products": list(products)})
    return replace(facts, spec=facts.spec.model_copy(update={"accelerator": accelerator}))


def _planned(
    document: Document, facts: Facts, plan: Plan, nodes: tuple[NodeFacts, ...], known: model_locations.KnownModels
) -> Answer:
    names = short_names({row.product for row in plan.rows})
    several = len({(row.target_precision, row.draft_precision) for row in plan.rows}) > 1

    def candidate(row: Row) -> Candidate:
        name = names[row.product]
        if facts.on_cpu:
            label = f"{name}, {row.split.label}" if row.tensor > 1 else name
        else:
            precisions = f", {precision_pair(row, ' + ')}" if several else ""
            label = f"{place_phrase(row.gpus, row.nodes, name)}, {row.split.label}{precisions}"
        return Candidate(
            label,
            row.product,
            0 if facts.on_cpu else row.gpus,
            row.nodes,
            row.split,
            row.budget,
            row.target_precision,
            row.draft_precision,
        )

    best: dict[str, Row] = {}
    for row in plan.rows:
        best.setdefault(row.product, row)
    chosen = facts.at(*plan.chosen.served)
    warnings = plan_warnings(chosen, known, plan.chosen.tensor)
    if document.number is not None and document.foreign is None:
        warnings += map(str, token_doubts(chosen.spec))
    # Caveats of GPUs without public logs
    gpus = ((product, find_device(product, facts.spec.accelerator.memory_gib_per_gpu)) for product in best)
    notes = (
        note for product, gpu in gpus if gpu for note in (uncalibrated_note(gpu), adaptive_doubt(product, facts.pair))
    )
    return Answer(
        document=document,
        verdict=plan.verdict.value,
        explanation=plan.explanation,
        facts=chosen,
        candidates=tuple(_judged(candidate(row), facts, plan, nodes) for row in best.values()),
        matrix=tuple(map(candidate, plan.rows)),
        choice=plan.choice,
        warnings=tuple(warnings),
        advice=(
            *(f"{each.sentence} [{each.code}]" for each in plan_advice(chosen, plan)),
            *warnings,
            *plan_notes(chosen),
            *filter(None, notes),
        ),
        known=known,
    )


def _with_refreshes(planned: Answer, plan: Plan) -> Answer:
    """Return the answer with the largest cost of each scheduled training, or that a budget is too small for one."""
    facts, document = planned.facts, planned.document
    if facts is None or not any(each.training for each in facts.spec.captures):
        return planned
    from specdecode_operator.training.refresh_cost import planned_refreshes  # noqa: PLC0415  takes numpy

    refreshes = [*planned_refreshes(Key(document.namespace or "default", document.name), facts, plan)]
    if problems := tuple(each.problem for each in refreshes if each.problem):
        return Answer(document, INVALID, "; ".join(map(str, problems)), problems=problems)
    return replace(planned, advice=(*planned.advice, *(each.note for each in refreshes)))


def _with_startup(planned: Answer, plan: Plan, rates: Rates) -> Answer:
    """Return the answer with its start-up time, and a warning if the startup probe may end a slow start."""
    facts = planned.facts
    if (
        facts is None
        or planned.verdict == DOES_NOT_FIT
        or (found := planned_startup(facts, plan.chosen, rates)) is None
    ):
        return planned
    deadline_s = engine_timeouts(facts, plan).startup_s if planned.document.foreign is None else None
    startup = PlannedStartup(found, deadline_s)
    if not startup.is_late:
        return replace(planned, startup=startup)
    warning = (
        f"a start may take {duration(found.engine_s.slowest)}, but the startup probe restarts the engine after"
        f" {duration(deadline_s or 0)}; read the weights from faster storage (spec.models) [slow-start]"
    )
    return replace(planned, startup=startup, warnings=(*planned.warnings, warning), advice=(*planned.advice, warning))


def duration(seconds: int) -> str:
    """Return a duration in seconds, or in minutes from 2 minutes on."""
    return f"{seconds} s" if seconds < _SECONDS_UNTIL_S else f"{round(seconds / 60)} min"


def _judged(candidate: Candidate, facts: Facts, plan: Plan, nodes: tuple[NodeFacts, ...]) -> Candidate:
    """Return the candidate with the explanation and fixes of a plan for its product only."""
    if candidate.product == plan.chosen.product:
        return replace(candidate, explanation=plan.explanation, fixes=plan.fixes)
    if candidate.verdict == DOES_NOT_FIT:
        those = tuple(node for node in nodes if node.product == candidate.product)
        alone = make_plan(_replayed_on((candidate.product,), facts), those, None, groups=True)
        if not isinstance(alone, Blocked):
            # Changing to a product that was also planned is not a fix.
            present = [(product_change(row.product),) for row in plan.rows]
            fixes = tuple(fix for fix in alone.fixes if fix.changes not in present)
            return replace(candidate, explanation=alone.explanation, fixes=fixes)
    return candidate


def precision_pair(row: Row | MatrixRow, between: str) -> str:
    """Return the precisions of target and draft, such as ``FP8 / BF16``."""
    return between.join(str(each) for each in (row.target_precision, row.draft_precision) if each is not None)


def shown_precisions(answer: Answer, facts: Facts) -> list[MatrixRow]:
    """Return the rows of all precisions; small floats only if a checkpoint holds them."""
    held = {model.checkpoint_precision for model in (facts.pair.target, facts.pair.draft) if model is not None}
    shown = {*_MATRIX_PRECISIONS, *held, None}
    return [row for row in answer.precisions if row.target_precision in shown and row.draft_precision in shown]


def short_names(products: set[str]) -> dict[str, str]:
    """Return short names, such as H100 for NVIDIA-H100-80GB-HBM3, unless two products would share one."""
    short = {product: family_of(product) for product in products}
    names = list(short.values())
    return {product: name if names.count(name) == 1 else product for product, name in short.items()}


def say_what_is_missing(errors: Iterable[DocumentError], unknown: Sequence[UnknownModel], *, hub: bool) -> None:
    """Print errors of reading on standard error, and how to describe each unknown model."""
    for error in errors:
        say_line(f"error: {error}", err=True)
    if not unknown:
        return
    names = list(dict.fromkeys(each.source.model for each in unknown))
    by_hand = " ".join(f"--model-config {shlex.quote(name)}=PATH" for name in map(printable, names))
    lines = [
        f"{f'{len(names)} models are' if len(names) > 1 else '1 model is'} unknown here: {printable(', '.join(names))}",
        "In a cluster, the operator reads the files of a model. Here, add one of these:",
    ]
    if not hub and not all(each.source.on_volume for each in unknown):
        lines.append("  --hub, to read config.json and the headers of the weights from the model hub")
    lines += [
        f"  {by_hand}",
        "  --facts FILE, written by specdecode models add on a machine that can read the model",
    ]
    if fields := ", ".join(dict.fromkeys(f"{each.field}.config" for each in unknown if each.field)):
        lines += [
            f"  {fields} in the object: the content of its config.json",
            f"  {fields.replace('.config', '.assume')} in the object: weightsGiB and kvBytesPerToken, unchecked",
        ]
    say("\n".join(lines), err=True)


def exit_code(result: Answers, *, strict: bool) -> ExitCode:
    """Return the exit code, and print tight objects and warnings on standard error."""
    for answer in result.answers:
        if answer.verdict == TIGHT:
            say_line(f"warning: {answer.document.name} is tight", err=True)
    warnings = [(answer.document.name, warning) for answer in result.answers for warning in answer.warnings]
    for name, warning in warnings:
        say_line(f"{'error: --strict' if strict else 'warning'}: {name}: {warning}", err=True)
    codes = {
        FITS: ExitCode.TIGHT if strict and warnings else ExitCode.OK,
        TIGHT: ExitCode.TIGHT if strict else ExitCode.OK,
        DOES_NOT_FIT: ExitCode.DOES_NOT_FIT,
        UNKNOWN: ExitCode.UNKNOWN,
        INVALID: ExitCode.INVALID,
    }
    return codes[result.verdict]
