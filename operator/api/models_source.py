"""Where an object's models come from: the ``models`` field."""

from typing import Annotated

from pydantic import StringConstraints

from specdecode_operator.api.base import ApiModel
from specdecode_operator.api.references import PersistentVolumeClaimRef, SecretKey

HostDirectory = Annotated[str, StringConstraints(min_length=2, max_length=1024)]


class HostPath(ApiModel):
    """A directory of the node."""

    path: HostDirectory
    """The same directory on every node that engines may run on. The operator must be started with --allow-host-path
    for it, or for a directory above it."""


class ModelVolume(ApiModel):
    """Where models lie: on a claim, or on the nodes."""

    persistent_volume_claim: PersistentVolumeClaimRef | None = None
    """Claim that holds the models; mounted read-only."""

    host_path: HostPath | None = None
    """Directory of the nodes that holds the models; mounted read-only."""


class ModelCache(ApiModel):
    """What is kept for all replicas and for the next start."""

    persistent_volume_claim: PersistentVolumeClaimRef
    """Claim that a Job downloads the models to, once, in the layout of the hub's own cache; engines mount it read-only.
    What engines compile is kept there too. Several objects may name the same claim."""


class Models(ApiModel):
    """Where models come from: a volume that holds them, or else the hub, with a cache or without."""

    volume: ModelVolume | None = None
    """A volume that already holds them. Absent: they are downloaded from the hub."""

    cache: ModelCache | None = None
    """A claim to download to once, and for what engines compile. Absent: each pod downloads into an emptyDir of its
    own, and compiles anew."""

    hub_token_secret: SecretKey | None = None
    """Token for the hub; only the download sees it."""
