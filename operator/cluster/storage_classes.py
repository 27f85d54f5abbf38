"""StorageClasses of a cluster, and the reasons why a claim for one of them would stay unbound."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from specdecode_operator.problems import shown
from specdecode_operator.untrusted import mapping, name_of

WAIT_FOR_FIRST_CONSUMER: Final = "WaitForFirstConsumer"
_IMMEDIATE: Final = "Immediate"
_DEFAULT: Final = "storageclass.kubernetes.io/is-default-class"
_MOST_NAMES: Final = 8


@dataclass(frozen=True)
class StorageClasses:
    """Names of StorageClasses, how they bind, and which ones are the default."""

    binding_modes: Mapping[str, str]
    defaults: tuple[str, ...] = ()

    @classmethod
    def of(cls, bodies: Iterable[Mapping[str, Any]]) -> "StorageClasses":
        """Return the StorageClasses among some objects of that kind."""
        found = [*bodies]
        return cls(
            {_name(each): str(each.get("volumeBindingMode") or _IMMEDIATE) for each in found},
            tuple(_name(each) for each in found if is_default(each)),
        )

    def missing(self, name: str | None) -> str | None:
        """Return why no class provides a volume for a claim of a class, or None; no name means the default class."""
        known = ", ".join(shown(each) for each in sorted(self.binding_modes)[:_MOST_NAMES])
        has = f"the cluster has {known}" if known else "the cluster has none"
        if name is None:
            return None if self.defaults else f"the cluster has no default StorageClass ({has})"
        return None if name in self.binding_modes else f"there is no StorageClass {shown(name)} ({has})"

    def binds_at_once(self, name: str | None) -> bool:
        """Return whether a claim of a class is bound before a pod uses it."""
        chosen = name if name is not None else next(iter(self.defaults), None)
        return self.binding_modes.get(chosen or "") != WAIT_FOR_FIRST_CONSUMER


def is_default(body: Mapping[str, Any]) -> bool:
    """Return whether a StorageClass is the cluster's default."""
    return mapping(mapping(body, "metadata"), "annotations").get(_DEFAULT) == "true"


def _name(body: Mapping[str, Any]) -> str:
    return name_of(mapping(body, "metadata"))
