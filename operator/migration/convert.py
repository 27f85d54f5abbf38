"""Makes of a vLLM Deployment the SpecDecodeDeployment that means the same, and says what differs."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, get_args

from pydantic import BaseModel, ValidationError

from specdecode_operator.api.base import API_VERSION, Body
from specdecode_operator.api.crd.admission import refusals
from specdecode_operator.api.crd.deployment_rules import NAME_MAX_LENGTH
from specdecode_operator.api.deployment import KIND, SpecDecodeDeploymentSpec
from specdecode_operator.api.values import Method
from specdecode_operator.deployment.spec.facts import check_without_models, gather_facts
from specdecode_operator.deployment.spec.parsing import spec_problems
from specdecode_operator.engine.settings import Platform
from specdecode_operator.kube.untyped import mapping, name_of, objects
from specdecode_operator.migration.defaults import note_defaults
from specdecode_operator.migration.engine_image import take_image
from specdecode_operator.migration.flags import decide_unknown, read_flags
from specdecode_operator.migration.hardware import find_platform, take_cpu
from specdecode_operator.migration.ledger import AdoptionError, Fate, Ledger, Note, required
from specdecode_operator.migration.models import take_models
from specdecode_operator.migration.pod import note_selecting, take_metadata, take_pod, take_product
from specdecode_operator.migration.serving import settle_precision, take_flags
from specdecode_operator.migration.speculation import read_speculation, take_speculation
from specdecode_operator.migration.start import Start, find_start
from specdecode_operator.migration.steps import Step, adoption_steps, selecting
from specdecode_operator.migration.tls import take_tls
from specdecode_operator.migration.variables import secret_keys, take_variables
from specdecode_operator.problems import InvalidSpecError, Problem

_CONTAINERS: Final = "spec.template.spec.containers"
_MODEL_UNKNOWN: Final = "ModelUnknown"
_NAME: Final = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_SUFFIX: Final = "-sdd"
_OF_ROLLOUT: Final = ("progressDeadlineSeconds", "minReadySeconds", "revisionHistoryLimit")
_NONE: Final = (0, "0", "0%")


@dataclass(frozen=True)
class Adoption:
    """What a Deployment becomes.

    Attributes
    ----------
    body
        The object; where something must be decided, as far as it goes.
    notes
        Where each setting went.
    decisions
        What people must decide before it is applied.
    steps
        How to adopt it without downtime.
    """

    body: Body
    notes: tuple[Note, ...]
    decisions: tuple[Problem, ...]
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class _Server:
    """The container that runs vLLM, how it starts it, and on what."""

    container: dict[str, Any]
    start: Start
    platform: Platform
    gpus: int


def adopt(
    deployment: Body,
    services: Iterable[Body] = (),
    *,
    name: str | None = None,
    engine_version: str | None = None,
) -> Adoption:
    """Return the object that means the same as a Deployment of vLLM.

    ``services`` are those of its namespace: the ones that select its pods are
    part of the steps. ``name`` is the object's, by default the Deployment's
    with a suffix. ``engine_version`` is for images that do not tell theirs.

    Raises
    ------
    AdoptionError
        When there is nothing to import.
    """
    old = _check_kind(deployment)
    new = _new_name(old, name)
    pod = required(deployment, "spec.template.spec")
    server = _find_server(pod)
    ledger = Ledger()
    _take_server(server, pod, engine_version, ledger)
    selected_by = _take_selection(deployment, services, ledger)
    _take_rollout(deployment["spec"], ledger)
    note_defaults(ledger, server.platform)
    _check(ledger)
    metadata = {"name": new} | _namespace(deployment)
    spec = _in_order(ledger.spec, SpecDecodeDeploymentSpec)
    body = {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": spec}
    replicas = spec.get("replicas", 1)
    needed = server.gpus * (replicas if isinstance(replicas, int) else 1)
    steps = adoption_steps(old, new, metadata.get("namespace"), selected_by, needed)
    return Adoption(body, tuple(ledger.notes), tuple(ledger.decisions), tuple(steps))


def _check_kind(deployment: Body) -> str:
    kind = deployment.get("kind")
    if kind != "Deployment":
        raise AdoptionError("kind", str(kind or "nothing"), "only a Deployment can be imported: name one")
    metadata = mapping(deployment, "metadata")
    for owner in objects(metadata, "ownerReferences"):
        if owner.get("kind") == KIND:
            fix = f"it belongs to {KIND} {owner.get('name')} already: nothing is to be imported"
            raise AdoptionError("metadata.ownerReferences", str(owner.get("kind")), fix)
    return str(metadata.get("name") or "vllm")


def _find_server(pod: Mapping[str, Any]) -> _Server:
    """Return the one container that runs vLLM's server."""
    containers = pod.get("containers")
    if not isinstance(containers, list) or not containers:
        shown = str(containers)[:64] if containers else "nothing"
        raise AdoptionError(_CONTAINERS, shown, "must be a list with the container of vLLM")
    found = []
    for index, container in enumerate(containers):
        where = f"{_CONTAINERS}[{index}]"
        if not isinstance(container, dict):
            raise AdoptionError(where, str(container)[:64], "must be an object")
        start = find_start(container, where)
        if start is not None:
            found.append((where, container, start))
    if not found:
        images = ", ".join(str(each.get("image")) for each in containers)
        raise AdoptionError(_CONTAINERS, images, "runs no vLLM server: name one whose container starts vllm serve")
    if len(found) > 1:
        names = ", ".join(name_of(container) for _, container, _ in found)
        raise AdoptionError(_CONTAINERS, names, "run vLLM each: split the Deployment, one server a pod")
    where, container, start = found[0]
    return _Server(container, start, *find_platform(container, where))


def _take_server(server: _Server, pod: Mapping[str, Any], engine_version: str | None, ledger: Ledger) -> None:
    """Take hardware, arguments, models, environment and the rest of the pod."""
    container, start = server.container, server.start
    if server.platform is Platform.CPU:
        take_cpu(container, ledger)
    profile = take_image(str(container.get("image") or ""), server.platform, engine_version, ledger)
    if start.program is not None:
        ledger.lose(f"program {start.program}", "the operator starts vllm, which must be on the image's PATH")
    for command in start.beside:
        ledger.lose(f"shell command {command}", "only the server is started: put it into the image or an initContainer")
    known = decide_unknown(start, read_flags(start.words, profile), ledger)
    given, certificate_volumes = take_tls(known, pod, container, ledger)
    flags = take_flags(given, ledger, profile, secret_keys(container))
    said = read_speculation(flags, ledger, profile)
    take_speculation(said, ledger, profile)
    dropped = take_models(flags, said.draft, pod, container, ledger)
    dropped.volumes |= certificate_volumes
    settle_precision(ledger)
    env = take_variables(container, start.env, start.variables, ledger)
    take_pod(pod, container, env, dropped, ledger)
    _take_split(server.gpus, ledger)
    take_product(pod, ledger)


def _take_selection(deployment: Body, services: Iterable[Body], ledger: Ledger) -> list[Mapping[str, Any]]:
    """Take labels and annotations; return the Services that select the pods."""
    metadata = mapping(required(deployment, "spec.template"), "metadata")
    selected_by = selecting(services, mapping(metadata, "labels"))
    selectors = [mapping(mapping(each, "spec"), "selector") for each in selected_by]
    selectors.append(mapping(mapping(deployment["spec"], "selector"), "matchLabels"))
    take_metadata(metadata, selectors, ledger)
    note_selecting(required(deployment, "spec.template.spec"), selectors, ledger)
    return selected_by


def _take_split(gpus: int, ledger: Ledger) -> None:
    """What nobody says is 1 for the engine, but the plan's choice for the operator."""
    if ledger.get("parallelism.tensor") is None:
        ledger.put("parallelism.tensor", 1)
        ledger.note(Fate.FIELD, "--tensor-parallel-size (absent)", "spec.parallelism.tensor: 1")
    ranks = [ledger.get(f"parallelism.{each}") or 1 for each in ("tensor", "pipeline", "data")]
    if gpus and all(isinstance(each, int) for each in ranks) and gpus != math.prod(ranks):
        what = f"resources nvidia.com/gpu {gpus}"
        ledger.lose(what, f"the server is spread over {math.prod(ranks)}: that is what a pod of the operator asks for")


def _take_rollout(spec: Mapping[str, Any], ledger: Ledger) -> None:
    if "replicas" in spec:
        ledger.take(f"replicas {spec['replicas']}", "replicas", spec["replicas"])
    _take_strategy(mapping(spec, "strategy"), ledger)
    if spec.get("paused") is True:
        ledger.take("paused", "rollout.paused", value=True)
    for key in _OF_ROLLOUT:
        if key in spec:
            ledger.note(Fate.OPERATOR, key, "the operator allows for a long start")


def _take_strategy(strategy: Mapping[str, Any], ledger: Ledger) -> None:
    """A further engine is started first only where somebody wanted that none is missing: GPUs are scarce."""
    if not strategy:
        return
    rolling = mapping(strategy, "rollingUpdate")
    surge, missing = rolling.get("maxSurge"), rolling.get("maxUnavailable")
    if missing in _NONE and surge not in (None, *_NONE):
        what = f"strategy with maxSurge {surge} and maxUnavailable {missing}"
        ledger.take(what, "rollout.strategy", "Surge", "one engine more than replicas is started first")
    else:
        why = "an old engine ends before its successor starts: spec.rollout.strategy Surge needs GPUs for one more"
        ledger.note(Fate.OPERATOR, "strategy", why)


def _check(ledger: Ledger) -> None:
    """Put the spec to the checks of `specdecode plan`."""
    decided = ledger.get("speculation.method") in {None, *(each.value for each in Method)}
    spec = ledger.spec if decided else {key: value for key, value in ledger.spec.items() if key != "speculation"}
    try:
        parsed = SpecDecodeDeploymentSpec.model_validate(spec)
    except ValidationError as error:
        _decide(spec_problems(error), ledger)
        return
    if refused := refusals(parsed):
        _decide(refused, ledger)
        return
    try:
        gather_facts(parsed)
    except InvalidSpecError as error:
        if error.reason != _MODEL_UNKNOWN:
            _decide(error.problems, ledger)
            return
        for problem in error.problems:
            why = "is not in the catalogue: the operator reads its config.json; for specdecode plan give --model-config"
            ledger.note(Fate.DEFAULT, f"{problem.field} {problem.value}", why)
        try:
            check_without_models(parsed)
        except InvalidSpecError as worse:
            _decide(worse.problems, ledger)


def _decide(problems: Iterable[Problem], ledger: Ledger) -> None:
    open_fields = {problem.field for problem in ledger.decisions}
    for problem in problems:
        if problem.field not in open_fields:
            ledger.decide(problem.field, problem.value, problem.message)


def _new_name(old: str, wanted: str | None) -> str:
    name = wanted or f"{old[: NAME_MAX_LENGTH - len(_SUFFIX)].rstrip('-.')}{_SUFFIX}".replace(".", "-")
    if wanted == old:
        fix = "the operator makes a Deployment of that name, which is taken: choose another with --name"
        raise AdoptionError("metadata.name", name, fix)
    if len(name) > NAME_MAX_LENGTH or not _NAME.fullmatch(name):
        fix = f"choose with --name at most {NAME_MAX_LENGTH} of a-z, 0-9 and -, beginning with a letter"
        raise AdoptionError("metadata.name", name, fix)
    return name


def _namespace(deployment: Body) -> dict[str, str]:
    namespace = mapping(deployment, "metadata").get("namespace")
    return {"namespace": str(namespace)} if namespace else {}


def _in_order(part: Mapping[str, Any], model: type[BaseModel]) -> dict[str, Any]:
    """The fields in the order of the API, also those of parts."""
    kinds = {field.alias or name: field.annotation for name, field in model.model_fields.items()}
    order = list(kinds)
    ordered: dict[str, Any] = {}
    for key in sorted(part, key=lambda key: order.index(key) if key in kinds else len(order)):
        inner = next((kind for kind in (kinds.get(key), *get_args(kinds.get(key))) if _is_model(kind)), None)
        ordered[key] = _in_order(part[key], inner) if inner and isinstance(part[key], dict) else part[key]
    return ordered


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)
