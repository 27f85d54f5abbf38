"""The models of a spec that neither it nor the catalogue describes: read from the hub, or told with what would help."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Protocol

from specdecode_operator.api.deployment import SpecDecodeDeploymentSpec
from specdecode_operator.api.models import ServedModel
from specdecode_operator.deployment.spec.checkpoints import config_of
from specdecode_operator.deployment.spec.model_sources import (
    DRAFT,
    KnownModels,
    ModelSource,
    model_source,
    served_models,
    undescribed_models,
)
from specdecode_operator.problems import InvalidSpecError, Problem, printable
from specdecode_operator.resolver.read_model_facts import Checkpoint, CheckpointError
from specdecode_operator.sizing.families.catalogue import same_beginning, similar_model
from specdecode_operator.vocabulary import Method

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
    for field, source in undescribed_models(spec).items():
        if source in known:
            continue
        if models is None or source.on_volume:
            unknown.append(UnknownModel(field, source, _not_in_the_catalogue(spec, field, source)))
            continue
        try:
            known[source] = models.find(source.model, source.revision)
        except CheckpointError as error:
            unknown.append(UnknownModel(field, source, printable(error.message)))
    return known, tuple(unknown)


def _contradictions(field: str, model: ServedModel, given: Checkpoint) -> Iterator[Problem]:
    """Yield the sizes in which facts of a model differ from the catalogue; a config in the spec is checked later."""
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
    """Return the model that a slip of the pen would have meant, of the kind that stands in this field."""
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
