"""What all models of the API share: group and version, their form, and references to other objects."""

from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, StringConstraints
from pydantic.alias_generators import to_camel

from specdecode_operator.api.patterns import DATA_KEY, OBJECT_NAME

GROUP = "specdecode.io"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"

PART_OF_LABEL, PART_OF = "app.kubernetes.io/part-of", "specdecode"
VERSION_LABEL = "app.kubernetes.io/version"
"""Of a CRD: which version has made it."""

Body = dict[str, Any]
"""An object of the Kubernetes API, as the API server has it."""


class ApiModel(BaseModel):
    """A part of a spec: camelCase outside, immutable, no unknown fields."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        frozen=True,
        # A plan needs few of all models; each is built when it is first used.
        defer_build=True,
        extra="forbid",
    )

    @classmethod
    def parse(cls, document: Any, *, newer: bool = False) -> Self:
        """Return the model of a document, whose fields have the API's names and not Python's.

        ``newer`` passes over unknown fields, which a newer CRD or operator has written.

        Raises
        ------
        ValidationError
            When a field is wrong, missing or unknown.
        """
        return cls.model_validate(document, extra="ignore" if newer else "forbid", by_alias=True, by_name=False)


ObjectName = Annotated[str, StringConstraints(max_length=253, pattern=OBJECT_NAME)]
FilePath = Annotated[str, StringConstraints(min_length=1, max_length=1024)]
SecretKeyName = Annotated[str, StringConstraints(max_length=253, pattern=DATA_KEY)]


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


class ConfigMapRef(ApiModel):
    """A ConfigMap in the same namespace."""

    name: ObjectName
    """Name of the ConfigMap."""
