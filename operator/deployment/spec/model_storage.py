"""Where models lie for the pods that use them: paths, the cache, and volumes."""

import re
from typing import Final

from specdecode_operator.api.base import Body
from specdecode_operator.api.deployment import SpecDecodeDeploymentSpec
from specdecode_operator.api.models import ModelCheckpoint, ServedModel

MODELS_PATH: Final = "/models"
HUB_CACHE_PATH: Final = f"{MODELS_PATH}/hub"
"""Where the hub's own libraries keep models below HF_HOME, so that a claim that was mounted there is taken as it is."""

COMMIT: Final = re.compile(r"[0-9a-f]{7,64}")
COMPILED_PATH: Final = "/compiled"
COMPILE_CACHE_PATH: Final = "/tmp/vllm-cache"  # noqa: S108  the pod's own
_PROXIES: Final = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
_HUB_VARIABLES: Final = ("HF_ENDPOINT", *_PROXIES, *map(str.lower, _PROXIES))
_COMPILED_FOLDER: Final = "specdecode/compiled"


def model_path(model: str) -> str:
    """Return the path of a model in the user's volume, or where the download of its pod puts it."""
    return f"{MODELS_PATH}/{model.strip('/')}"


def engine_model_path(spec: SpecDecodeDeploymentSpec, model: ServedModel | ModelCheckpoint) -> str:
    """Return the path from which the engine loads a model; in a cache it is the snapshot of one commit.

    The layout is that of huggingface_hub (file_download.py, repo_folder_name).
    Nothing is launched before the commit is known.
    """
    if not downloads_to_cache(spec):
        return model_path(model.model)
    folder = f"models--{model.model.replace('/', '--')}"
    commit = model.revision if model.revision and COMMIT.fullmatch(model.revision) else "not-downloaded-yet"
    return f"{HUB_CACHE_PATH}/{folder}/snapshots/{commit}"


def downloads_to_cache(spec: SpecDecodeDeploymentSpec) -> bool:
    """Whether models come from the hub by way of a claim."""
    return _are_downloaded(spec) and spec.models.cache is not None


def downloads_in_pods(spec: SpecDecodeDeploymentSpec) -> bool:
    """Whether each pod fetches its models from the hub."""
    return _are_downloaded(spec) and spec.models.cache is None


def _are_downloaded(spec: SpecDecodeDeploymentSpec) -> bool:
    return spec.models.volume is None and spec.engine.replay is None


def cache_claim(spec: SpecDecodeDeploymentSpec) -> str | None:
    """Return the claim of the cache."""
    return spec.models.cache.persistent_volume_claim.claim_name if spec.models.cache else None


def hub_environment(spec: SpecDecodeDeploymentSpec) -> list[Body]:
    """Return the variables of ``engine.env`` that say how the hub is reached, for whatever goes there."""
    given = {variable.name: variable.value for variable in spec.engine.env}
    return [{"name": name, "value": given[name]} for name in _HUB_VARIABLES if name in given]


def claims_named(spec: object) -> frozenset[str]:
    """Return the claims that a spec names for its models, as it is written: somebody else's may be invalid."""
    models = _inside(spec, "models")
    claims = [
        _inside(_inside(models, place), "persistentVolumeClaim").get("claimName") for place in ("volume", "cache")
    ]
    return frozenset(claim for claim in claims if isinstance(claim, str))


def _inside(body: object, field: str) -> Body:
    inner = body.get(field) if isinstance(body, dict) else None
    return inner if isinstance(inner, dict) else {}


def engine_volumes(spec: SpecDecodeDeploymentSpec) -> list[Body]:
    """Return the volumes of an engine pod that models and what engines compile come from."""
    claim = cache_claim(spec)
    cache: Body = {"persistentVolumeClaim": {"claimName": claim}}
    if downloads_to_cache(spec):
        # One volume for both: a pod that names a claim twice never starts.
        return [{"name": "models", **cache}]
    return [{"name": "models", **models_volume(spec)}, *([{"name": "cache", **cache}] if claim else [])]


def compiled_mount(spec: SpecDecodeDeploymentSpec, folder: str) -> Body | None:
    """Return the mount of what engines compile, which alone of the cache they may write; None without a cache.

    ``folder`` is that of one template: the start-up plan holds for one command line only.
    """
    if spec.models.cache is None:
        return None
    name = "models" if downloads_to_cache(spec) else "cache"
    safe = re.sub(r"[^-.A-Za-z0-9]+", "-", folder)
    return {"name": name, "mountPath": COMPILED_PATH, "subPath": f"{_COMPILED_FOLDER}/{safe}"}


def models_volume(spec: SpecDecodeDeploymentSpec) -> Body:
    """Return the volume that holds the models, or that each pod downloads them to."""
    volume = spec.models.volume
    if volume is not None and volume.host_path is not None:
        return {"hostPath": {"path": volume.host_path.path, "type": "Directory"}}
    if volume is not None and volume.persistent_volume_claim is not None:
        claim = volume.persistent_volume_claim.claim_name
        return {"persistentVolumeClaim": {"claimName": claim, "readOnly": True}}
    return {"emptyDir": {}}
