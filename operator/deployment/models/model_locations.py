"""Locate the models of a spec: hub, PersistentVolumeClaim, host path or image; paths and volumes in pods."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from specdecode_operator.api.base import Body
from specdecode_operator.api.deployment import SpecDecodeDeploymentSpec
from specdecode_operator.api.speculation import Adapter, Draft, ModelCheckpoint, ServedModel
from specdecode_operator.deployment.conditions import Blocked
from specdecode_operator.deployment.models.checkpoint_reader import Checkpoint
from specdecode_operator.enums import Quantization
from specdecode_operator.sizing.arithmetic import MIB, gib_to_bytes
from specdecode_operator.sizing.catalogue import find_entry, similar_model
from specdecode_operator.sizing.families.assumed import Assumption
from specdecode_operator.untrusted import mapping, objects
from specdecode_operator.vllm.environment import manifest_variables

MODELS_PATH: Final = "/models"
# Layout of huggingface_hub below HF_HOME, so that a claim that was mounted there can be reused.
HUB_CACHE_PATH: Final = f"{MODELS_PATH}/hub"
COMMIT: Final = re.compile(r"[0-9a-f]{7,64}")
DRAFTS_PATH: Final = "/drafts"
ADAPTERS_PATH: Final = "/adapters"
COMPILED_PATH: Final = "/compiled"
COMPILE_CACHE_PATH: Final = "/tmp/vllm-cache"  # noqa: S108  the pod's own
_PROXIES: Final = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
_HUB_VARIABLES: Final = ("HF_ENDPOINT", *_PROXIES, *map(str.lower, _PROXIES))


def model_path(model: str) -> str:
    """Return the path of a model in the user's volume, or in the volume that its pod downloads to."""
    return _inside(MODELS_PATH, model)


def _inside(folder: str, path: str) -> str:
    """Return the path of a model in a volume that is mounted at a folder; ``.`` is the root of the volume."""
    return f"{folder}/{path.strip('/')}".removesuffix("/.")


def engine_model_path(spec: SpecDecodeDeploymentSpec, model: ServedModel | ModelCheckpoint | Adapter) -> str:
    """Return the path from which the engine loads a model; in a cache, the snapshot of one commit.

    The layout is the same as in huggingface_hub (file_download.py, repo_folder_name).
    """
    if (own := own_source(model)) is not None:
        return _inside(_mount_path(model, own), own.model)
    if not downloads_to_cache(spec):
        return model_path(model.model)
    folder = f"models--{model.model.replace('/', '--')}"
    commit = model.revision if model.revision and COMMIT.fullmatch(model.revision) else "not-downloaded-yet"
    return f"{HUB_CACHE_PATH}/{folder}/snapshots/{commit}"


def own_source(model: ServedModel | ModelCheckpoint | Adapter) -> "ModelSource | None":
    """Return the own claim or image of a draft or an adapter; None for a model in the same place as the target."""
    claim = model.persistent_volume_claim if isinstance(model, Draft | Adapter) else None
    image = model.image if isinstance(model, Draft) else None
    if claim is None and image is None:
        return None
    return ModelSource(
        model.model.strip("/"), claim=claim.claim_name if claim else None, image=image.reference if image else None
    )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _mount_path(model: ServedModel | ModelCheckpoint | Adapter, source: "ModelSource") -> str:
    folder = source.claim or f"image-{_digest(str(source.image))}"
    return f"{ADAPTERS_PATH if isinstance(model, Adapter) else DRAFTS_PATH}/{folder}"


def downloads_to_cache(spec: SpecDecodeDeploymentSpec) -> bool:
    """Whether a Job downloads models from the hub to a claim."""
    return spec.models.volume is None and spec.engine.replay is None and spec.models.cache is not None


def downloads_in_pods(spec: SpecDecodeDeploymentSpec) -> bool:
    """Whether each pod downloads its models from the hub."""
    return spec.models.volume is None and spec.engine.replay is None and spec.models.cache is None


def cache_claim(spec: SpecDecodeDeploymentSpec) -> str | None:
    """Return the name of the cache's claim."""
    return spec.models.cache.persistent_volume_claim.claim_name if spec.models.cache else None


def hub_environment(spec: SpecDecodeDeploymentSpec) -> list[Body]:
    """Return the variables of ``engine.env`` for access to the hub: its endpoint and proxies."""
    given = manifest_variables(spec.engine.env)
    return [given[name] for name in _HUB_VARIABLES if name in given]


def claims_named(spec: object) -> frozenset[str]:
    """Return the claims that an unparsed spec names for its models; the spec may be invalid."""
    if not isinstance(spec, dict):
        return frozenset()
    models, draft = mapping(spec, "models"), mapping(mapping(spec, "speculation"), "draft")
    places = (mapping(models, "volume"), mapping(models, "cache"), draft, *objects(spec, "adapters"))
    claims = [mapping(place, "persistentVolumeClaim").get("claimName") for place in places]
    return frozenset(claim for claim in claims if isinstance(claim, str))


def claim_fields(spec: SpecDecodeDeploymentSpec) -> dict[str, str]:
    """Return the claims with models and the compile cache, by the field that names each."""
    draft = spec.speculation.draft if spec.speculation else None
    places = {
        "spec.models.volume": spec.models.volume,
        CACHE: spec.models.cache,
        DRAFT: draft,
        **{f"{ADAPTERS}[{index}]": each for index, each in enumerate(spec.adapters)},
    }
    claims = {field: place.persistent_volume_claim if place else None for field, place in places.items()}
    return {field: claim.claim_name for field, claim in claims.items() if claim}


def claim_not_shared(field: str, claim: str, modes: Sequence[str], nodes: int) -> Blocked | None:
    """Return that pods on several nodes cannot use a claim with these access modes; None if they can.

    Engines write to the cache.
    """
    shared = ["ReadWriteMany"] if field == CACHE else ["ReadWriteMany", "ReadOnlyMany"]
    if not modes or set(shared) & set(modes):
        return None
    message = (
        f"{field}.persistentVolumeClaim.claimName: {claim}: a replica runs on {nodes} nodes, but the access mode of the"
        f" claim is {', '.join(modes)}: name a claim with {' or '.join(shared)}"
    )
    return Blocked("VolumeNotShared", message)


def engine_volumes(spec: SpecDecodeDeploymentSpec) -> list[Body]:
    """Return the volumes of an engine pod for models and the compile cache."""
    return _volumes_and_own_mounts(spec)[0]


def own_mounts(spec: SpecDecodeDeploymentSpec) -> list[Body]:
    """Return the mounts of the own claims and images of draft and adapters."""
    return _volumes_and_own_mounts(spec)[1]


def _volumes_and_own_mounts(spec: SpecDecodeDeploymentSpec) -> tuple[list[Body], list[Body]]:
    """Return all volumes, and the mounts of own claims and images.

    Paths of mounts and names of volumes depend on the claim or image, because one pod may run engines with several
    drafts. A pod that names a claim in two volumes does not start, so mounts share a volume.
    """
    draft = spec.speculation.draft if spec.speculation else None
    volumes, mounts = _common_volumes(spec), dict[str, Body]()
    models: list[ServedModel | Adapter] = [*([draft] if draft else []), *spec.adapters]
    for model in models:
        if (source := own_source(model)) is None:
            continue
        volume = next((each for each in volumes if _holds(each, source)), None)
        if volume is None:
            kind = "adapter" if isinstance(model, Adapter) else "draft"
            volume = {"name": f"{kind}-{_digest(source.claim or str(source.image))}", **volume_of(source)}
            volumes.append(volume)
        path = _mount_path(model, source)
        mounts[path] = {"name": volume["name"], "mountPath": path, "readOnly": True}
    return volumes, list(mounts.values())


def _common_volumes(spec: SpecDecodeDeploymentSpec) -> list[Body]:
    claim = cache_claim(spec)
    cache: Body = {"persistentVolumeClaim": {"claimName": claim}}
    if downloads_to_cache(spec):
        # One volume for both: a pod that names a claim twice does not start.
        return [{"name": "models", **cache}]
    return [{"name": "models", **models_volume(spec)}, *([{"name": "cache", **cache}] if claim else [])]


def _holds(volume: Body, source: "ModelSource") -> bool:
    """Whether a volume is the claim or the image of a source."""
    if source.claim is not None:
        return bool(mapping(volume, "persistentVolumeClaim").get("claimName") == source.claim)
    return bool(mapping(volume, "image").get("reference") == source.image)


def compiled_mount(spec: SpecDecodeDeploymentSpec, folder: str) -> Body | None:
    """Return the mount of the compile cache, the only part of the cache that engines may write; None without a cache.

    ``folder`` is unique per pod template, because the start-up plan is valid for one command line only.
    """
    if spec.models.cache is None:
        return None
    name = "models" if downloads_to_cache(spec) else "cache"
    safe = re.sub(r"[^-.A-Za-z0-9]+", "-", folder)
    return {"name": name, "mountPath": COMPILED_PATH, "subPath": f"specdecode/compiled/{safe}"}


def models_volume(spec: SpecDecodeDeploymentSpec) -> Body:
    """Return the source of the common volume of models; an empty directory for downloads."""
    source = model_source(spec, spec.target)
    return volume_of(source) if source.on_volume else {"emptyDir": {}}


def volume_of(source: "ModelSource") -> Body:
    """Return the volume source of a model that is on a volume."""
    if source.claim is not None:
        return {"persistentVolumeClaim": {"claimName": source.claim, "readOnly": True}}
    if source.image is not None:
        return {"image": {"reference": source.image}}
    return {"hostPath": {"path": source.host_path, "type": "Directory"}}


def image_fields(spec: SpecDecodeDeploymentSpec) -> list[str]:
    """Return the fields that name an image with models."""
    draft, volume = spec.speculation.draft if spec.speculation else None, spec.models.volume
    return [
        *(["spec.models.volume.image"] if volume is not None and volume.image is not None else []),
        *([f"{DRAFT}.image"] if draft is not None and draft.image is not None else []),
    ]


def image_volumes_missing(fields: Sequence[str]) -> Blocked:
    """Return that the API server does not support image volumes, which these fields need."""
    message = (
        f"{' and '.join(fields)}: the API server does not support image volumes: use Kubernetes 1.35 or newer, enable"
        " the feature gate ImageVolume (1.31 or newer), or copy the models to a claim and name it instead"
    )
    return Blocked("ImageVolumesMissing", message)


NOTHING_ASSUMED: Final = Assumption()
TARGET: Final = "spec.target"
DRAFT: Final = "spec.speculation.draft"
ADAPTERS: Final = "spec.adapters"
CACHE: Final = "spec.models.cache"


@dataclass(frozen=True)
class ModelSource:
    """Location of a model's files: the hub, a PersistentVolumeClaim, a directory of the nodes, or an image."""

    model: str
    revision: str | None = None  # Revision of the hub repository; None for its default, and on a volume
    claim: str | None = None
    host_path: str | None = None
    image: str | None = None

    @property
    def on_volume(self) -> bool:
        """Whether the model is on a volume, not on the hub."""
        return self.claim is not None or self.host_path is not None or self.image is not None

    @property
    def key(self) -> str:
        """Key of the model in ConfigMaps: readable, and unique per source."""
        place = [
            self.model,
            self.revision,
            self.claim,
            *filter(None, [self.host_path, self.image and f"image {self.image}"]),
        ]
        digest = hashlib.sha256(json.dumps(place).encode()).hexdigest()
        return f"{re.sub(r'[^-._a-zA-Z0-9]+', '.', self.model)[-180:].strip('.')}-{digest[:12]}"

    def __str__(self) -> str:
        if self.claim is not None:
            return f"{self.model} on PersistentVolumeClaim {self.claim}"
        if self.host_path is not None:
            return f"{self.model} in {self.host_path} of the node"
        if self.image is not None:
            return f"{self.model} in image {self.image}"
        return f"{self.model} on the hub" + (f" at revision {self.revision}" if self.revision else "")


KnownModels = Mapping[ModelSource, Checkpoint]
NO_MODELS: Final[KnownModels] = MappingProxyType({})


def served_models(spec: SpecDecodeDeploymentSpec) -> dict[str, ServedModel]:
    """Return the target and, if there is one, the draft, by field."""
    draft = spec.speculation.draft if spec.speculation else None
    return {TARGET: spec.target} | ({DRAFT: draft} if draft else {})


def fetched_models(spec: SpecDecodeDeploymentSpec) -> dict[str, ServedModel | Adapter]:
    """Return target, draft and adapters in the place that spec.models names, by field; none in its own place."""
    adapters = {f"{ADAPTERS}[{index}]": each for index, each in enumerate(spec.adapters)}
    models: dict[str, ServedModel | Adapter] = {**served_models(spec), **adapters}
    return {field: model for field, model in models.items() if own_source(model) is None}


def model_source(spec: SpecDecodeDeploymentSpec, model: ServedModel | ModelCheckpoint) -> ModelSource:
    """Return the location of a model of the spec."""
    if (own := own_source(model)) is not None:
        return own
    volume = spec.models.volume
    if volume is None:
        return ModelSource(model.model, model.revision)
    claim, host, image = volume.persistent_volume_claim, volume.host_path, volume.image
    return ModelSource(
        model.model.strip("/"),
        claim=claim.claim_name if claim else None,
        host_path=host.path if host else None,
        image=image.reference if image else None,
    )


def undescribed_models(spec: SpecDecodeDeploymentSpec) -> dict[str, ModelSource]:
    """Return the models that are not in the spec or the catalogue, by field."""
    found = models_without_config(spec).items()
    return {field: model_source(spec, model) for field, model in found if not assumption_of(model).is_complete}


def meant_model(field: str, source: ModelSource) -> str | None:
    """Return the id in the catalogue that a hub id probably misspells; None for other names and for volumes."""
    if source.on_volume or find_entry(source.model) is not None:
        return None
    kinds = (True, False) if field == DRAFT else (False,)
    found = (similar_model(source.model, heads=heads) for heads in kinds)
    return next((each for each in found if each is not None), None)


def models_without_config(spec: SpecDecodeDeploymentSpec) -> dict[str, ServedModel | ModelCheckpoint]:
    """Return the models without a config.json in spec or catalogue, even if ``assume`` describes them completely."""
    written = served_models(spec)
    models: dict[str, ServedModel | ModelCheckpoint] = {**written}
    for field, model in written.items():
        for index, checkpoint in enumerate(model.checkpoints):
            if may_be_served(model, checkpoint):
                models[f"{field}.checkpoints[{index}]"] = checkpoint
    return {name: each for name, each in models.items() if each.config is None and find_entry(each.model) is None}


def assumption_of(model: ServedModel | ModelCheckpoint) -> Assumption:
    """Return the numbers that the spec assumes for a model, but not for its further checkpoints."""
    given = model.assume if isinstance(model, ServedModel) else None
    if given is None:
        return NOTHING_ASSUMED
    return Assumption(
        weights_bytes=None if given.weights_gib is None else gib_to_bytes(float(given.weights_gib)),
        kv_bytes_per_token=given.kv_bytes_per_token,
        state_bytes_per_request=None if given.state_mib_per_request is None else given.state_mib_per_request * MIB,
    )


def may_be_served(model: ServedModel, checkpoint: ModelCheckpoint) -> bool:
    """Whether the spec requests a checkpoint, or lets the plan choose it."""
    return model.quantization.value in (Quantization.AUTO.value, checkpoint.quantization.value)
