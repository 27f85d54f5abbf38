"""Convert target and draft models and their locations to spec.target, draft and spec.models."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from specdecode_operator.deployment.models.checkpoints import short_name
from specdecode_operator.enums import METHODS_WITH_DRAFT, Method
from specdecode_operator.importing.engine_container import CACHE_VARIABLES, TOKEN_VARIABLES, secret_keys
from specdecode_operator.importing.pod_template import Omitted, mount_of
from specdecode_operator.importing.server_arguments import Argument
from specdecode_operator.importing.server_command import ScriptError, container_commands, plain_environment
from specdecode_operator.importing.spec_builder import MigrationError, Object, SpecBuilder
from specdecode_operator.importing.speculation import SpeculativeConfig
from specdecode_operator.problems import MISSING
from specdecode_operator.sizing.catalogue import find_entry, published_heads
from specdecode_operator.untrusted import mapping, name_of, objects, texts

USUAL_CACHES: Final = ("/root/.cache/huggingface", "/root/.cache/huggingface/hub")


_IN_TARGET: Final = frozenset({Method.MTP, Method.DSPARK})
"""Methods whose draft is in the target's checkpoint, or in a separate one (vllm/config/speculative.py)."""

_SPECULATORS: Final = "speculators_config"
_SPECULATORS_METHODS: Final = {"peagle": "eagle3", "dflash2": "dflash"}
"""vllm/transformers_utils/configs/speculators/base.py, build_vllm_speculative_config; others keep their name."""


_SWITCHES: Final = frozenset({"--quiet", "--force-download", "--resume-download", "--dry-run"})


@dataclass(frozen=True)
class Location:
    """Location of a model: the hub, a claim, or a directory of the nodes."""

    model: str
    """The name in the object: a hub id, or a path inside the volume."""
    claim: str | None = None
    host_path: str | None = None
    revision: str | None = None
    volume: str | None = None
    download: str | None = None
    token: dict[str, str] | None = None
    problem: str | None = None


def take_speculators(
    flags: Sequence[Argument], found: SpeculativeConfig, configs: Mapping[str, Object], builder: SpecBuilder
) -> list[Argument]:
    """Return the flags with the verifier as the model if the given model is a speculators checkpoint.

    The head goes to ``found``, with the method and the number of tokens of its config. Without a config, a draft head
    as the model is a decision (vllm/transformers_utils/config.py, maybe_override_with_speculators).
    """
    model = next((each for each in flags if not each.name), None)
    model = model or next((each for each in reversed(flags) if each.name == "--model" and each.values), None)
    if model is None:
        return list(flags)
    name = model.values[0]
    for other in sorted(configs.keys() - {name}):
        raise MigrationError("--model-config", other, f"the server serves {name}: write {name}=PATH")
    entry = find_entry(name)
    config = configs.get(name) or (entry.config if entry else {})
    section = mapping(config, _SPECULATORS)
    verifier = mapping(section, "verifier").get("name_or_path")
    if not isinstance(verifier, str) or not verifier:
        head = next((each for each in published_heads() if each.head == name), None)
        if head is not None:
            message = f"is a draft head: serve {head.targets[0]} with method {head.method} and this as its draft"
            builder.decide("spec.target.model", name, message)
        elif "speculator" in name.lower():
            # Such checkpoints are named org/model-speculator.eagle3.
            message = (
                "is a speculators head by its name: vLLM serves the model that its config.json names as verifier; give"
                f" the file by --model-config {name}=PATH, or name that model with this as its draft"
            )
            builder.decide("spec.target.model", name, message)
        return list(flags)
    for key in sorted(found.config.keys() & {"method", "model"}):
        builder.drop(found.written[key], f"vLLM uses {_SPECULATORS} of {name}")
    algorithm = str(config.get("speculators_model_type") or section.get("algorithm"))
    said: dict[str, Any] = {"method": _SPECULATORS_METHODS.get(algorithm, algorithm), "model": name}
    tokens = next(iter(objects(section, "proposal_methods")), {}).get("speculative_tokens")
    if "num_speculative_tokens" not in found.config and tokens is not None:
        said["num_speculative_tokens"] = tokens
    for key, value in said.items():
        found.config[key], found.written[key] = value, f"{key} in {_SPECULATORS} of {name}"
    if builder.get("serving.servedModelNames") is None:
        builder.take("the name that clients use", "serving.servedModelNames", [name])
    return [replace(each, values=(verifier,)) if each is model else each for each in flags]


def take_models(
    flags: Sequence[Argument], drafter: str | None, pod: Object, container: Object, builder: SpecBuilder
) -> Omitted:
    """Take the models; return the parts of the pod that held or fetched them."""
    named = _named_model(flags, builder)
    locations = []
    if named is None:
        builder.decide("spec.target.model", MISSING, "the command has no model: name one")
    else:
        locations.append(_take_target(named, flags, find_location(named.values[0], pod, container), builder))
    method = builder.get("speculation.method")
    if drafter and named is not None and method in _IN_TARGET and drafter == named.values[0]:
        builder.own(f"draft {drafter}", "is the target itself, whose checkpoint holds the draft")
    elif drafter and method in {*METHODS_WITH_DRAFT, *_IN_TARGET}:
        location = find_location(drafter, pod, container)
        locations.append(location)
        builder.take(f"draft {drafter}", "speculation.draft.model", location.model)
        if location.revision:
            builder.take(f"revision {location.revision}", "speculation.draft.revision", location.revision)
        if location.problem:
            builder.decide("spec.speculation.draft.model", drafter, location.problem)
    _take_volume(locations, builder)
    for location in locations:
        if location.token and builder.get("models.hubTokenSecret") is None:
            builder.take(f"env HF_TOKEN of {location.download}", "models.hubTokenSecret", location.token)
    env = plain_environment(container)
    caches = {env[name].rstrip("/") for name in CACHE_VARIABLES if env.get(name)} | set(USUAL_CACHES)
    _take_cache(env, caches, pod, container, builder)
    for location in locations:
        if location.download:
            builder.own(f"the download by {location.download}", "the operator downloads the models")
    return Omitted(
        volumes={location.volume for location in locations if location.volume and not location.problem},
        caches=caches,
        init_containers={location.download for location in locations if location.download},
        arguments=builder.get("engine.extraArgs") or [],
    )


def _named_model(flags: Sequence[Argument], builder: SpecBuilder) -> Argument | None:
    """Return the argument with the model: vLLM prefers the one by position (entrypoints/cli/serve.py)."""
    by_position = [given for given in flags if not given.name]
    for other in by_position[1:]:
        message = "belongs to no flag, and vLLM takes one model: correct the command line"
        builder.decide("spec.engine.extraArgs", other.text, message)
    flagged = [given for given in flags if given.name == "--model" and given.values]
    for other in flagged if by_position else flagged[:-1]:
        why = "vLLM prefers the model without a flag" if by_position else "another --model follows it"
        builder.drop(other.text, why)
    return next(iter((*by_position, *reversed(flagged))), None)


def _take_target(given: Argument, flags: Sequence[Argument], location: Location, builder: SpecBuilder) -> Location:
    written = given.values[0]
    builder.take(f"model {written}", "target.model", location.model)
    revision = next((each.values[0] for each in flags if each.name == "--revision" and each.values), location.revision)
    if revision and location.claim is None and location.host_path is None:
        builder.take(f"revision {revision}", "target.revision", revision)
    elif revision:
        builder.drop(f"revision {revision}", "only applies to the hub, and the model is on a volume")
    if location.problem:
        builder.decide("spec.target.model", written, location.problem)
    if builder.get("serving.servedModelNames") is None and written != short_name(location.model):
        builder.take("the name that clients use", "serving.servedModelNames", [written])
    return location


def _take_volume(locations: list[Location], builder: SpecBuilder) -> None:
    sources: dict[str, dict[str, Any] | None] = {}
    for location in locations:
        if location.problem:
            continue
        if location.claim is not None:
            sources[f"claim {location.claim}"] = {"persistentVolumeClaim": {"claimName": location.claim}}
        elif location.host_path is not None:
            sources[f"{location.host_path} of the node"] = {"hostPath": {"path": location.host_path}}
        else:
            sources["the hub"] = None
    if len(sources) > 1:
        fix = "target and draft must be on the same claim or both on the hub: copy one of them"
        builder.decide("spec.models.volume", ", ".join(sorted(sources)), fix)
    for name, source in sources.items():
        if source is not None:
            remark = "if the operator allows it (--allow-host-path)" if "hostPath" in source else ""
            builder.take(f"volume of {name}", "models.volume", source, remark)
            return


def _take_cache(env: Mapping[str, str], caches: set[str], pod: Object, container: Object, builder: SpecBuilder) -> None:
    home = env.get("HF_HOME", USUAL_CACHES[0]).rstrip("/")
    claims = {name_of(each): mapping(each, "persistentVolumeClaim") for each in objects(pod, "volumes")}
    for mount in objects(container, "volumeMounts"):
        claim = claims.get(name_of(mount), {}).get("claimName")
        path = str(mount.get("mountPath")).rstrip("/")
        if not claim or not any(f"{cache}/".startswith(f"{path}/") for cache in caches):
            continue
        what = f"claim {claim} at {path}"
        if builder.get("models.volume") is not None or builder.get("models.cache") is not None:
            builder.drop(what, "is a cache of the hub, which is not needed with a volume or another cache")
            continue
        there = path == home and not mount.get("subPath")
        remark = "models in it are not downloaded again" if there else "models are downloaded again to its folder hub"
        builder.take(what, "models.cache", {"persistentVolumeClaim": {"claimName": claim}}, remark)


def find_location(model: str, pod: Object, container: Object) -> Location:
    """Return where the pod has a model from, with the problem if the operator's pods could not have it."""
    copy = "copy it to a PersistentVolumeClaim and name that in spec.models, or use its hub id"
    if "://" in model:
        return Location(model, problem=f"is an address: {copy}")
    if not model.startswith(("/", "./", "~")):
        return Location(model)
    path = model.rstrip("/")
    mount = mount_of(path, container)
    name = None if mount is None else name_of(mount)
    if fetched := _download(path, [*objects(pod, "initContainers"), container]):
        return replace(fetched, volume=name)
    if mount is None:
        problem = (
            "is in the image, or on the machine: put it on a PersistentVolumeClaim and name that in spec.models,"
            " or use its hub id"
        )
        return Location(model, problem=problem)
    volume = next((each for each in objects(pod, "volumes") if name_of(each) == name), {})
    claim, host = mapping(volume, "persistentVolumeClaim").get("claimName"), mapping(volume, "hostPath").get("path")
    claim, host = (each if isinstance(each, str) else None for each in (claim, host))
    if claim is None and host is None:
        kind = next((key for key in volume if key != "name"), "a volume that the pod does not have")
        return Location(model, volume=name, problem=f"is on {kind}: {copy}")
    parts = (str(mount.get("subPath") or "").strip("/"), path[len(str(mount["mountPath"]).rstrip("/")) :].strip("/"))
    inside = "/".join(part for part in parts if part)
    if host is not None and not inside:
        host, _, inside = host.rstrip("/").rpartition("/")
    at_root = (
        None if inside else "is the root of the claim: put the model into a folder of the claim, and name the folder"
    )
    return Location(inside or model, claim=claim, host_path=host, volume=name, problem=at_root)


def _download(path: str, containers: Iterable[Object]) -> Location | None:
    for container in containers:
        name = name_of(container)
        token = next((key for each, key in secret_keys(container).items() if each in TOKEN_VARIABLES), None)
        # KServe's image (python/storage-initializer) takes pairs of address and folder.
        if "storage-initializer" in str(container.get("image")) and not container.get("command"):
            words = texts(container, "args")
            for address, folder in zip(words[::2], words[1::2], strict=False):
                if folder.rstrip("/") != path:
                    continue
                scheme, _, place = address.partition("://")
                if scheme != "hf":
                    fix = "copy it to a PersistentVolumeClaim, or use its hub id"
                    return Location(path, download=name, problem=f"is fetched by {name} from {scheme}: {fix}")
                model, _, tag = place.partition(":")
                return Location(model, revision=tag or None, download=name, token=token)
            continue
        try:
            commands = container_commands(container, "container")
        except ScriptError:
            continue
        for command in commands:
            found = _downloaded(command.words)
            if found is None or found[1].rstrip("/") != path:
                continue
            model, _, revision = found
            if model in command.unknown or revision in command.unknown:
                problem = f"is {model} of the hub, but {name} gets this value only when it runs: write the hub id"
                return Location(path, download=name, problem=problem)
            return Location(model, revision=revision, download=name, token=token)
    return None


def _downloaded(words: Sequence[str]) -> tuple[str, str, str | None] | None:
    for index in range(len(words) - 1):
        if words[index].rpartition("/")[2] not in ("hf", "huggingface-cli") or words[index + 1] != "download":
            continue
        options: dict[str, str] = {}
        positional: list[str] = []
        rest = [
            part for word in words[index + 2 :] for part in (word.split("=", 1) if word.startswith("--") else [word])
        ]
        while rest:
            word = rest.pop(0)
            if word.startswith("--"):
                has_value = word not in _SWITCHES and rest and not rest[0].startswith("--")
                options[word] = rest.pop(0) if has_value else ""
            else:
                positional.append(word)
        if positional and "--local-dir" in options:
            return positional[0], options["--local-dir"], options.get("--revision")
    return None
