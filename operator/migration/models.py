"""Takes target and draft, and where they lie, into ``spec.target``, ``spec.speculation.draft`` and ``spec.models``."""

from collections.abc import Iterable, Mapping
from typing import Any, Final

from specdecode_operator.api.values import METHODS_WITH_DRAFT
from specdecode_operator.deployment.spec.checkpoints import short_name
from specdecode_operator.kube.untyped import mapping, name_of, objects
from specdecode_operator.migration.builder import Outcome, SpecBuilder
from specdecode_operator.migration.flags import Given
from specdecode_operator.migration.model_places import Place, find_place
from specdecode_operator.migration.pod import Dropped
from specdecode_operator.migration.server_command import plain_environment

_CACHE_VARIABLES: Final = ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "TRANSFORMERS_CACHE")
_USUAL_CACHES: Final = ("/root/.cache/huggingface", "/root/.cache/huggingface/hub")


def take_models(
    flags: Iterable[Given],
    drafter: str | None,
    pod: Mapping[str, Any],
    container: Mapping[str, Any],
    builder: SpecBuilder,
) -> Dropped:
    """Take the models; return what of the pod they leave behind."""
    flags = list(flags)
    named = _named_model(flags, builder)
    places = []
    if named is None:
        builder.decide("spec.target.model", "nothing", "name the model: the server is given none")
    else:
        places.append(_take_target(named, flags, find_place(named.values[0], pod, container), builder))
    if drafter and builder.get("speculation.method") in METHODS_WITH_DRAFT:
        places.append(_take_draft(drafter, find_place(drafter, pod, container), builder))
    _take_volume(places, builder)
    for place in places:
        if place.token and builder.get("models.hubTokenSecret") is None:
            builder.take(f"env HF_TOKEN of {place.download}", "models.hubTokenSecret", place.token)
    return _dropped(places, pod, container, builder)


def _named_model(flags: Iterable[Given], builder: SpecBuilder) -> Given | None:
    """Return the argument with the model: the one by position, which vLLM prefers (entrypoints/cli/serve.py)."""
    flags = list(flags)
    by_position = [given for given in flags if not given.name]
    for other in by_position[1:]:
        message = "stands where no flag takes it, and vLLM takes one model: correct the command line"
        builder.decide("spec.engine.extraArgs", " ".join(other.words), message)
    flagged = [given for given in flags if given.name == "--model" and given.values]
    if by_position and flagged:
        builder.drop(" ".join(flagged[-1].words), "vLLM prefers the model that is given without a flag")
    return next(iter((*by_position, *reversed(flagged))), None)


def _take_target(given: Given, flags: Iterable[Given], place: Place, builder: SpecBuilder) -> Place:
    written = given.values[0]
    builder.take(f"model {written}", "target.model", place.model)
    revision = next((each.values[0] for each in flags if each.name == "--revision" and each.values), place.revision)
    if revision and place.source is None:
        builder.take(f"revision {revision}", "target.revision", revision)
    if place.problem:
        builder.decide("spec.target.model", written, place.problem)
    if builder.get("serving.servedModelNames") is None and written != short_name(place.model):
        builder.take("the name that clients ask for", "serving.servedModelNames", [written])
    return place


def _take_draft(written: str, place: Place, builder: SpecBuilder) -> Place:
    builder.take(f"draft {written}", "speculation.draft.model", place.model)
    if place.revision:
        builder.take(f"revision {place.revision}", "speculation.draft.revision", place.revision)
    if place.problem:
        builder.decide("spec.speculation.draft.model", written, place.problem)
    return place


def _take_volume(places: list[Place], builder: SpecBuilder) -> None:
    """All models lie on one claim, or all on the hub."""
    sources = {_named(place): place.source for place in places if not place.problem}
    if len(sources) > 1:
        fix = "target and draft must lie together, on one claim or on the hub: copy one of them"
        builder.decide("spec.models.volume", ", ".join(sorted(sources)), fix)
    for name, source in sources.items():
        if source is not None:
            remark = "where the operator allows it: --allow-host-path" if "hostPath" in source else ""
            builder.take(f"volume of {name}", "models.volume", source, remark)
            return


def _named(place: Place) -> str:
    if place.claim is not None:
        return f"claim {place.claim}"
    return "the hub" if place.host_path is None else f"{place.host_path} of the node"


def _take_cache(
    env: Mapping[str, str], caches: set[str], pod: Mapping[str, Any], container: Mapping[str, Any], builder: SpecBuilder
) -> None:
    """Keep the claim that holds the hub's cache, also for what engines compile."""
    homes = {env.get("HF_HOME", _USUAL_CACHES[0]).rstrip("/")}
    claims = {name_of(each): mapping(each, "persistentVolumeClaim") for each in objects(pod, "volumes")}
    for mount in objects(container, "volumeMounts"):
        claim = claims.get(name_of(mount), {}).get("claimName")
        path = str(mount.get("mountPath")).rstrip("/")
        if not claim or not any(f"{cache}/".startswith(f"{path}/") for cache in caches):
            continue
        what = f"claim {claim} at {path}"
        if builder.get("models.volume") is not None or builder.get("models.cache") is not None:
            builder.drop(what, "is the hub's cache, which is not needed beside the volume, or a second one")
            continue
        there = path in homes and not mount.get("subPath")
        remark = "what it holds is not fetched again" if there else "its folder hub is used: fetched once more there"
        builder.take(what, "models.cache", {"persistentVolumeClaim": {"claimName": claim}}, remark)


def _dropped(
    places: list[Place], pod: Mapping[str, Any], container: Mapping[str, Any], builder: SpecBuilder
) -> Dropped:
    env = plain_environment(container)
    caches = {env[name].rstrip("/") for name in _CACHE_VARIABLES if env.get(name)} | set(_USUAL_CACHES)
    _take_cache(env, caches, pod, container, builder)
    for place in places:
        if place.download:
            builder.note(Outcome.OPERATOR, f"the download by {place.download}", "the operator downloads the models")
    texts = [f"{text}/" for text in builder.get("engine.extraArgs") or []]
    return Dropped(
        volumes={place.volume for place in places if place.volume and not place.problem},
        caches=caches,
        init_containers={place.download for place in places if place.download},
        needed_paths=texts,
    )
