"""References to other objects of the same namespace."""

from typing import Annotated

from pydantic import StringConstraints

from specdecode_operator.api.base import ApiModel

ObjectName = Annotated[str, StringConstraints(max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")]
SecretKeyName = Annotated[str, StringConstraints(max_length=253, pattern=r"^[-._a-zA-Z0-9]+$")]


class SecretKey(ApiModel):
    """One key of a Secret in the same namespace."""

    name: ObjectName
    """Name of the Secret."""

    key: SecretKeyName
    """Key in it."""


class TlsSecret(ApiModel):
    """A Secret of type kubernetes.io/tls in the same namespace."""

    name: ObjectName
    """Name of the Secret; its keys are tls.crt and tls.key."""


class PersistentVolumeClaimRef(ApiModel):
    """A claim in the same namespace."""

    claim_name: ObjectName
    """Name of the PersistentVolumeClaim."""
