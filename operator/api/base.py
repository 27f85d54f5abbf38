"""Base of all API models: group and version, field patterns, references, bounds of free-form objects.

`MEANINGS` explains each pattern in words for error messages, so that users need not read regular expressions.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Final, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints
from pydantic.alias_generators import to_camel
from pydantic.config import JsonDict
from pydantic_core import PydanticCustomError

from specdecode_operator.untrusted import inner_values

OBJECT_NAME: Final = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"
DATA_KEY: Final = r"^[-._a-zA-Z0-9]+$"
LABEL_VALUE: Final = r"^[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$"
VARIABLE_NAME: Final = r"^[-._a-zA-Z][-._a-zA-Z0-9]*$"
ENGINE_VERSION: Final = r"^[0-9]+\.[0-9]+$"
SERVED_NAME: Final = r"^[^\s-]( *\S)*$"
MODULE_NAME: Final = r"^[A-Za-z0-9_][A-Za-z0-9_.]*$"
TEMPERATURE: Final = r"^[0-2](\.[0-9]{1,2})?$"
STRETCH: Final = r"^[1-9][0-9]{0,3}(\.[0-9]{1,3})?$"
RATE: Final = r"^(0\.[0-9]{0,2}[1-9]|[1-9][0-9]{0,5}(\.[0-9]{1,3})?)$"
LEARNING_RATE: Final = r"^[0-9](\.[0-9]{1,6})?(e-?[0-9]{1,2})?$"
GIBIBYTES: Final = r"^(0\.[0-9]{0,2}[1-9]|[1-9][0-9]{0,4}(\.[0-9]{1,3})?)$"
SIZE: Final = r"^[1-9][0-9]{0,8}(\.[0-9]{1,3})?(Ki|Mi|Gi|Ti|Pi|k|M|G|T|P)$"
PHASE_NAME: Final = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
SCHEDULE_NAME: Final = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"
CRON_LINE: Final = r"^\S+ +\S+ +\S+ +\S+ +\S+$"
TIME_ZONE: Final = r"^[A-Za-z0-9_+/-]+$"
HOSTNAME: Final = r"^(\*\.)?[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"
HTTP_URL: Final = r"^https?://[^\s/@]+(/[^\s@]*)?$"
HEADER_NAME: Final = r"^[A-Za-z0-9!#$%&'*+.^_`|~-]+$"
HEADER_VALUE: Final = r"^[!-~]([ -~]*[!-~])?$"

FIELD_PATH: Final = (
    r"^(metadata\.(name|namespace|uid|(labels|annotations)\['[-._/a-zA-Z0-9]+'\])"
    r"|spec\.(nodeName|serviceAccountName)|status\.(hostIPs?|podIPs?))$"
)
RESOURCE: Final = r"^(limits|requests)\.(cpu|memory|ephemeral-storage|hugepages-[a-zA-Z0-9]+)$"
DIVISOR: Final = r"^(0|1(m|[kMGTPE]|[KMGTPE]i)?)$"

CRON_FIX: Final = "write minute, hour, day, month and weekday, such as 0 3 * * 1-5"

MEANINGS: Final[Mapping[str, str]] = {
    OBJECT_NAME: "an object's name: use a-z, 0-9, - and ., with a letter or digit at both ends",
    DATA_KEY: "a key of a Secret or ConfigMap: use letters, digits, -, _ and .",
    LABEL_VALUE: "a label's value: use letters, digits, -, _ and ., with a letter or digit at both ends",
    VARIABLE_NAME: "an environment variable's name: use letters, digits, _, - and ., not beginning with a digit",
    ENGINE_VERSION: 'a version of vLLM: write two numbers and a dot in quotes, such as "0.32"',
    SERVED_NAME: "a model's name: use no tabs and line ends, no spaces at its ends, and do not begin with -",
    MODULE_NAME: "a module's name: use letters, digits, _ and ., such as q_proj",
    TEMPERATURE: "a temperature: write a decimal below 3 in quotes, with two places at most, such as '0.7'",
    STRETCH: "a factor: write a decimal from 1 to below 10000 in quotes, with three places at most, such as '4.0'",
    RATE: "a rate: write a decimal above 0 and below 1000000 in quotes, with three places at most, such as '0.5'",
    LEARNING_RATE: "a learning rate: write a decimal below 10 in quotes, such as '1e-4' or '0.0001'",
    GIBIBYTES: "a size in GiB: write a decimal above 0 and below 100000 in quotes, with three places at most, such as"
    " '14.5'",
    SIZE: "a size: write a number with its unit, such as 20Gi",
    PHASE_NAME: "a phase's name: use a-z, 0-9 and -, with a letter or digit at both ends",
    SCHEDULE_NAME: "a schedule's name: use a-z, 0-9 and -, beginning with a letter and not ending with -",
    CRON_LINE: f"a cron line: {CRON_FIX}",
    FIELD_PATH: "a field of the pod: use metadata.name, metadata.namespace, metadata.uid, one label or one"
    " annotation, spec.nodeName, spec.serviceAccountName, status.hostIP or status.podIP",
    RESOURCE: "a resource of a container: write limits. or requests. and cpu, memory or ephemeral-storage",
    DIVISOR: "a unit: write 1, or 1 with a suffix, such as 1m or 1Mi",
    TIME_ZONE: "a time zone: write its IANA name, such as Europe/Berlin",
    HOSTNAME: "a hostname: use a-z, 0-9, - and ., such as llm.example.com or *.example.com",
    HTTP_URL: "a URL: write http:// or https:// and a host, without a user name, such as http://prometheus.monitoring:9090",
    HEADER_NAME: "a header's name: use letters, digits and -, such as X-Gateway-Model-Name",
    HEADER_VALUE: "a header's value: use printable ASCII without spaces at its ends",
}
"""Text that follows ``must match the pattern of``, by pattern. A test checks that it is complete."""


GROUP = "specdecode.io"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"

PART_OF_LABEL, PART_OF = "app.kubernetes.io/part-of", "specdecode"
VERSION_LABEL = "app.kubernetes.io/version"
"""On a CRD: version of the operator that generated it."""

Body = dict[str, Any]
"""An object of the Kubernetes API, as the API server has it."""


def map_by(key: str) -> JsonDict:
    """Return the schema entries of a list whose items server-side apply merges by a key."""
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}


TimeText = Annotated[str, StringConstraints(max_length=64)]
Timestamp = Annotated[TimeText, Field(json_schema_extra={"format": "date-time"})]


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
    """Key of a Secret in the same namespace."""

    name: ObjectName
    """Name of the Secret, in the namespace of this object."""

    key: SecretKeyName
    """Key in the Secret that holds the value."""


class TlsSecret(ApiModel):
    """Secret of type kubernetes.io/tls in the same namespace."""

    name: ObjectName
    """Name of the Secret, with the keys tls.crt and tls.key."""


class PersistentVolumeClaimRef(ApiModel):
    """PersistentVolumeClaim in the same namespace."""

    claim_name: ObjectName
    """Name of the PersistentVolumeClaim, in the namespace of this object."""


class ConfigMapRef(ApiModel):
    """ConfigMap in the same namespace."""

    name: ObjectName
    """Name of the ConfigMap, in the namespace of this object."""


_MOST_VALUES: Final = 10_000
"""Limit of values. The largest config.json in use, with a list of unquantized layers, has a few thousand."""

_DEEPEST: Final = 32
"""Limit of nesting. The deepest field of a pod, an affinity, has 10 levels."""


def _bounded(whole: dict[str, Any]) -> dict[str, Any]:
    """Return the object; raise if it has too many values, because later steps take time per value."""
    count = 0
    level: list[Any] = [whole]
    for _ in range(_DEEPEST):
        level = inner_values(level)
        count += len(level)
        if count > _MOST_VALUES:
            raise PydanticCustomError("too_large", f"has more than {_MOST_VALUES:,} values: remove some")
        if not level:
            return whole
    raise PydanticCustomError("too_deep", f"is nested more than {_DEEPEST} deep: reduce it")


BOUNDED: Final = AfterValidator(_bounded)
"""Annotation of a free-form object with these limits."""
