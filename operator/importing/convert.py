"""Convert a vLLM server to an equivalent SpecDecodeDeployment, with differences and migration steps."""

import json
import math
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, get_args

from pydantic import BaseModel

from specdecode_operator.api.base import API_VERSION, Body
from specdecode_operator.api.deployment import KIND, SpecDecodeDeploymentSpec
from specdecode_operator.api.deployment_rules import NAME_MAX_LENGTH
from specdecode_operator.api.spec_problems import admitted_spec
from specdecode_operator.cluster.resources import selector_labels
from specdecode_operator.deployment.models.checkpoints import MODEL_UNKNOWN
from specdecode_operator.deployment.validation import check_without_models, valid_facts
from specdecode_operator.enums import Method, Platform
from specdecode_operator.importing.adapters import split_adapters, take_adapters
from specdecode_operator.importing.engine_container import (
    find_platform,
    note_defaults,
    note_user,
    secret_keys,
    take_cpu,
    take_image,
    take_variables,
    take_whole_prompts,
)
from specdecode_operator.importing.engine_fields import take_flags, take_tls
from specdecode_operator.importing.model_sources import take_models, take_speculators
from specdecode_operator.importing.pod_template import (
    ask_for_files,
    note_selecting,
    take_metadata,
    take_pod,
    take_product,
)
from specdecode_operator.importing.prefill_decode import Side, find_side, side_problem
from specdecode_operator.importing.server_arguments import (
    ask_for_unknown,
    last_of_each,
    read_arguments,
    say_as_now,
    without_group,
)
from specdecode_operator.importing.server_command import NO_VLLM, ServerCommand, find_server_command
from specdecode_operator.importing.spec_builder import (
    MigrationError,
    Object,
    Outcome,
    Setting,
    SpecBuilder,
    Workload,
    in_namespace,
    withhold_secrets,
)
from specdecode_operator.importing.speculation import read_speculation, take_speculation
from specdecode_operator.problems import MISSING, InvalidSpecError, Problem
from specdecode_operator.untrusted import mapping, name_of, objects

_FILE: Final = "OBJECT.yaml"


@dataclass(frozen=True)
class Step:
    """One step of a migration."""

    purpose: str
    command: str


def migration_steps(workload: Workload, new: str, services: Sequence[Object], gpus: int) -> list[Step]:
    """Return the steps, first to last, that replace a server without downtime."""
    within = in_namespace(workload.namespace)
    need = f"{gpus} more GPUs" if gpus else "room for the same number of pods"
    start = "start it" if workload.outside else f"start it while the old server runs; this temporarily needs {need}"
    steps = [
        Step("see where it would run, and what to change if it does not fit", f"specdecode plan -f {_FILE}"),
        Step(start, f"kubectl apply{within} -f {_FILE}"),
        Step("wait until it serves", f"kubectl wait --for=condition=Ready sdd/{new}{within} --timeout=45m"),
    ]
    if workload.outside:
        end = workload.end or f"kubectl get service {new}{within}"
        return [*steps, Step("send requests to it, then stop the old server", end)]
    for service in services:
        name = str(mapping(service, "metadata").get("name"))
        # After the slash, a leading dash does not make the name an option.
        which = f"service/{shlex.quote(name)}" if name.startswith("-") else f"service {shlex.quote(name)}"
        selector = json.dumps(mapping(mapping(service, "spec"), "selector"), separators=(",", ":"))
        patch = _patch(new, objects(mapping(service, "spec"), "ports"))
        purpose = f"send new requests to the new engines (the selector was {selector})"
        steps.append(Step(purpose, f"kubectl patch {which}{within} --type=json -p '{patch}'"))
    if not services:
        purpose = (
            "send new requests to the new engines (replace SERVICE; no Service was found that selects the old pods)"
        )
        steps.append(Step(purpose, f"kubectl patch service SERVICE{within} --type=json -p '{_patch(new, [])}'"))
    steps.append(Step("stop the old pods once vllm:num_requests_running at their /metrics is 0", workload.end))
    if workload.remove:
        purpose = "when you are satisfied; until then, restore the Service's old selector and scale up to go back"
        steps.append(Step(purpose, workload.remove))
    return steps


def _patch(new: str, ports: Sequence[Object]) -> str:
    """Return a JSON patch: a merge patch would leave the old labels in the selector."""
    changes: list[dict[str, Any]] = [{"op": "replace", "path": "/spec/selector", "value": selector_labels(new)}]
    if len(ports) == 1:
        changes.append({"op": "replace", "path": "/spec/ports/0/targetPort", "value": "http"})
    return json.dumps(changes, separators=(",", ":"))


_NAME: Final = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_SUFFIX: Final = "-sdd"
_TENSOR: Final = "--tensor-parallel-size"


@dataclass(frozen=True)
class Migration:
    """A server as a SpecDecodeDeployment, with the report."""

    body: Body
    settings: tuple[Setting, ...]
    decisions: tuple[Problem, ...]
    steps: tuple[Step, ...]


def migrate_workload(
    workload: Workload,
    services: Iterable[Body] = (),
    *,
    name: str | None = None,
    engine_version: str | None = None,
    configs: Mapping[str, Object] = MappingProxyType({}),
) -> Migration:
    """Return the object equivalent to a vLLM server; raise MigrationError if there is no server to import.

    The steps move those ``services`` of the server's namespace that select its pods. ``engine_version`` is for an image
    whose tag has no version, ``configs`` are contents of config.json by the model name that the server uses.
    """
    builder = SpecBuilder(settings=[*workload.remarks.settings], decisions=[*workload.remarks.decisions])
    platform, gpus, side = take_server(workload, engine_version, configs, builder)
    if side is not None:
        problem = side_problem(side)
        builder.decide(problem.field, problem.value, problem.message)
    new = _new_name(workload, name, builder)
    labels, by_service = mapping(workload.metadata, "labels"), list[tuple[Object, Object]]()
    for service in services:
        selector = mapping(mapping(service, "spec"), "selector")
        if selector and all(labels.get(key) == value for key, value in selector.items()):
            by_service.append((service, selector))
    selectors = [*(selector for _, selector in by_service), workload.match_labels]
    take_metadata(workload.metadata, selectors, builder)
    note_selecting(workload.pod, selectors, builder)
    _take_rollout(workload.spec, builder)
    note_defaults(builder, platform)
    note_user(builder)
    if workload.outside:
        volumes = builder.get("podTemplate.spec.volumes")
        held = [("spec.models.volume", builder.get("models.volume"))]
        held += [("spec.podTemplate.spec.volumes", each) for each in (volumes if isinstance(volumes, list) else [])]
        message = "is on the machine that runs it: copy it to a PersistentVolumeClaim and name that, or use a hub id"
        for field, volume in held:
            if path := mapping(volume or {}, "hostPath").get("path"):
                builder.decide(field, str(path), message)
    withhold_secrets(builder)
    asked = {decision.field for decision in builder.decisions}
    for problem in _problems(builder):
        if problem.field not in asked:
            builder.decide(problem.field, problem.value, problem.message)
    metadata = {"name": new} | ({"namespace": workload.namespace} if workload.namespace else {})
    spec = _in_order(builder.spec, SpecDecodeDeploymentSpec)
    made = {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": spec}
    sizes = [mapping(spec, "parallelism").get(key) for key in ("tensor", "pipeline", "data")]
    by_fields = math.prod(size for size in sizes if isinstance(size, int))
    replicas = spec.get("replicas", 1)
    # The GPUs of the old server, or those of the fields, if more; 0 on CPU.
    needed = (max(gpus, by_fields) if gpus else 0) * (replicas if isinstance(replicas, int) else 1)
    steps = migration_steps(workload, new, [service for service, _ in by_service], needed)
    return Migration(made, tuple(builder.settings), tuple(builder.decisions), tuple(steps))


def runs_server(workload: Workload) -> bool:
    """Test whether one of the containers starts vLLM; assume so if its command cannot be read."""
    try:
        return bool(find_server(workload))
    except MigrationError as error:
        return not error.problem.message.startswith(NO_VLLM)


def find_server(workload: Workload) -> tuple[str, dict[str, Any], ServerCommand]:
    """Return path, container and command of the one server."""
    if workload.error is not None:
        raise workload.error
    containers = workload.pod.get("containers")
    if not isinstance(containers, list) or not containers:
        shown = str(containers) if containers else MISSING
        raise MigrationError(workload.where, shown, "must be a list with the container of vLLM")
    found = []
    for index, container in enumerate(containers):
        where = workload.container_field(index)
        if not isinstance(container, dict):
            raise MigrationError(where, str(container), "must be an object")
        command = find_server_command(container, where)
        if command is not None:
            found.append((where, container, command))
    if not found:
        images = ", ".join(str(each.get("image") or "no image") for each in containers)
        fix = (
            "write vllm serve MODEL, or an image of vLLM" if workload.outside else "name one whose container starts it"
        )
        raise MigrationError(workload.where, images, f"{NO_VLLM}: {fix}")
    if len(found) > 1:
        names = ", ".join(name_of(container) for _, container, _ in found)
        raise MigrationError(workload.where, names, "each run vLLM: split them into one server per pod")
    return found[0]


def take_server(
    workload: Workload, engine_version: str | None, configs: Mapping[str, Object], builder: SpecBuilder
) -> tuple[Platform, int, Side | None]:
    """Take hardware, arguments, models, environment and the rest of the pod.

    Return the platform, all GPUs, and the side of a prefill/decode split. Raise MigrationError if there is no server.
    """
    (where, container, command), pod = find_server(workload), workload.pod
    platform, gpus = find_platform(container, where, command.env, says_gpus=workload.says_gpus)
    if platform is Platform.CPU:
        take_cpu(container, builder)
    profile = take_image(str(container.get("image") or ""), platform, engine_version, builder)
    if command.program is not None:
        builder.drop(f"program {command.program}", "the operator starts vllm, which must be on the image's PATH")
    for other in command.harmless:
        builder.drop(f"shell command {other}", "the operator starts vllm without a shell")
    if command.others:
        fix = (
            "the operator only starts the server: do it in the image or in an init container, remove it here, and"
            " import again"
        )
        builder.decide(f"{where}.args", "; ".join(command.others), fix)
    known = ask_for_unknown(command, read_arguments(command.arguments, profile), builder)
    known = without_group(last_of_each(say_as_now(known, builder, profile), builder), workload.nodes, builder)
    given, certificate_volumes = take_tls(known, pod, container, builder)
    of_adapters, given = split_adapters(given)
    flags = take_flags(given, builder, profile, secret_keys(container))
    speculative = read_speculation(flags, builder, profile)
    flags = take_speculators(flags, speculative, configs, builder)
    take_speculation(speculative, builder, profile)
    omitted = take_models(flags, speculative.draft, pod, container, builder)
    omitted.volumes |= certificate_volumes | take_adapters(of_adapters, pod, container, builder)
    ask_for_files(read_arguments(omitted.arguments, profile), container, builder)
    take_variables(container, command, builder, profile)
    take_pod(pod, container, omitted, builder)
    _take_split(gpus * workload.nodes, builder)
    take_product(pod, builder)
    take_whole_prompts(builder, profile)
    extra = builder.get("engine.extraArgs") or []
    return platform, gpus * workload.nodes, find_side(workload, where, command.role, extra, profile)


def _take_split(gpus: int, builder: SpecBuilder) -> None:
    """Write the tensor parallelism: vLLM's default is 1, the operator's is the choice of the plan."""
    taken = builder.get("parallelism.tensor") is None and _TENSOR in builder.unsaid
    if taken:
        what = f"resources nvidia.com/gpu {gpus}" if gpus else _TENSOR
        builder.take(what, "parallelism.tensor", gpus or 1, f"the value of {_TENSOR} is not known")
    elif builder.get("parallelism.tensor") is None:
        builder.take(f"{_TENSOR} (absent)", "parallelism.tensor", 1)
    ranks = [builder.get(f"parallelism.{each}") or 1 for each in ("tensor", "pipeline", "data")]
    what = f"resources nvidia.com/gpu {gpus}"
    if gpus and all(isinstance(each, int) for each in ranks) and gpus != math.prod(ranks):
        builder.drop(what, f"the server uses {math.prod(ranks)} GPUs, so the operator requests {math.prod(ranks)}")
    elif gpus and not taken:
        builder.own(what, "follows from spec.parallelism")


def _take_rollout(spec: Object, builder: SpecBuilder) -> None:
    if "replicas" in spec:
        builder.take(f"replicas {spec['replicas']}", "replicas", spec["replicas"])
    rolling = mapping(mapping(spec, "strategy"), "rollingUpdate")
    surge, missing = rolling.get("maxSurge"), rolling.get("maxUnavailable")
    none = (0, "0", "0%")
    if missing in none and surge not in (None, *none):
        # GPUs are scarce: start a further engine first only if the old server could not miss one.
        what = f"strategy with maxSurge {surge} and maxUnavailable {missing}"
        builder.take(what, "rollout.strategy", "Surge", "the operator first starts one engine more than replicas")
    elif mapping(spec, "strategy"):
        why = "an old engine stops before a new one starts: spec.rollout.strategy Surge needs GPUs for one more replica"
        builder.own("strategy", why)
    if spec.get("paused") is True:
        builder.take("paused", "rollout.paused", value=True)
    for key in ("progressDeadlineSeconds", "minReadySeconds", "revisionHistoryLimit"):
        if key in spec:
            builder.own(key, "the operator sets a longer timeout for the start")


def _problems(builder: SpecBuilder) -> list[Problem]:
    """Return the problems that `specdecode plan` would report."""
    spec = builder.spec
    if builder.get("speculation.method") not in {None, *(each.value for each in Method)}:
        spec = {key: value for key, value in spec.items() if key != "speculation"}
    try:
        parsed = admitted_spec(spec)
        valid_facts(parsed)
    except InvalidSpecError as error:
        if error.reason != MODEL_UNKNOWN:
            return error.problems
        for problem in error.problems:
            why = "is not in the catalogue: the operator reads its config.json; plan takes --hub or --model-config"
            builder.note(Outcome.DEFAULT, f"{problem.field} {problem.value}", why)
        try:
            check_without_models(parsed)
        except InvalidSpecError as other:
            return other.problems
    return []


def _new_name(workload: Workload, wanted: str | None, builder: SpecBuilder) -> str:
    old = workload.name
    if wanted:
        name = wanted
    elif not old or workload.outside:
        model = str(builder.get("target.model") or "vllm").rstrip("/").rpartition("/")[2]
        name = re.sub(r"[^a-z0-9]+", "-", (old or model).lower())[:NAME_MAX_LENGTH].strip("-")
    else:
        name = f"{old[: NAME_MAX_LENGTH - len(_SUFFIX)].rstrip('-.')}{_SUFFIX}".replace(".", "-")
    if wanted and wanted == old and not workload.outside:
        fix = "the operator creates a Deployment of that name, which already exists: choose another name with --name"
        raise MigrationError("metadata.name", name, fix)
    if len(name) > NAME_MAX_LENGTH or not _NAME.fullmatch(name):
        fix = f"choose a name with --name: at most {NAME_MAX_LENGTH} of a-z, 0-9 and -, beginning with a letter"
        raise MigrationError("metadata.name", name, fix)
    return name


def _in_order(part: Object, model: type[BaseModel]) -> dict[str, Any]:
    kinds = {field.alias or name: field.annotation for name, field in model.model_fields.items()}
    ordered: dict[str, Any] = {}
    for key in [*(key for key in kinds if key in part), *(key for key in part if key not in kinds)]:
        candidates = (kinds.get(key), *get_args(kinds.get(key)))
        inner = next((kind for kind in candidates if isinstance(kind, type) and issubclass(kind, BaseModel)), None)
        ordered[key] = _in_order(part[key], inner) if inner and isinstance(part[key], dict) else part[key]
    return ordered
