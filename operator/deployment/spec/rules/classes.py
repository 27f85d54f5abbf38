"""Model classes that the registry of a vLLM version does not have (vLLM, model_executor/models/registry.py)."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from specdecode_operator.api.deployment import SpecDecodeDeploymentSpec
from specdecode_operator.deployment.spec.model_sources import DRAFT, TARGET, served_models
from specdecode_operator.engine.profiles import EngineProfile
from specdecode_operator.engine.rules.extra_args import last_option
from specdecode_operator.problems import Problem
from specdecode_operator.sizing.base.registry import Unregistered
from specdecode_operator.sizing.families.heads import unregistered_model
from specdecode_operator.sizing.pair.pair import Pair

_TRUSTS: Final = "--trust-remote-code"


def class_problems(spec: SpecDecodeDeploymentSpec, pair: Pair, profile: EngineProfile) -> Iterator[Problem]:
    """Yield the models whose class the engine refuses."""
    for found, problem in _unregistered(spec, pair, profile):
        if _is_refused(spec, found, profile):
            yield replace(problem, message=f"{problem.message}: {found.fix}")


def class_doubts(spec: SpecDecodeDeploymentSpec, pair: Pair, profile: EngineProfile) -> Iterator[Problem]:
    """Yield the models whose class the engine does not have and may run through transformers, or in code of theirs."""
    for found, problem in _unregistered(spec, pair, profile):
        if not _is_refused(spec, found, profile):
            instead = "vLLM may run it through the image's transformers, or with code from the model's folder"
            yield replace(problem, message=f"{problem.message}; {instead}")


def _unregistered(
    spec: SpecDecodeDeploymentSpec, pair: Pair, profile: EngineProfile
) -> Iterator[tuple[Unregistered, Problem]]:
    geometries = {TARGET: pair.target, DRAFT: pair.draft}
    for field, served in served_models(spec).items():
        model = geometries[field]
        found = None if model is None else unregistered_model(model, profile.version)
        if found is None:
            continue
        if served.config is not None:
            yield found, Problem(f"{field}.config.architectures", found.architecture, found.why)
        else:
            yield found, Problem(f"{field}.model", served.model, f"its class {found.architecture} {found.why}")


def _is_refused(spec: SpecDecodeDeploymentSpec, found: Unregistered, profile: EngineProfile) -> bool:
    trusts = last_option(_TRUSTS, spec.engine.extra_args, profile)
    return found.refused and (trusts is None or trusts.negated)
