"""Decide whether a pod may start: it must match an attested rollout of its deployment."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from specdecode_operator.api import deployment
from specdecode_operator.api.base import Body
from specdecode_operator.api.deployment import Key
from specdecode_operator.cluster.resources import COMPUTES_FOR_LABEL, DEPLOYMENT_LABEL
from specdecode_operator.deployment.attestation.attest import ENTRY_SUFFIX, MOST_ROLLOUTS, attestation_name
from specdecode_operator.deployment.attestation.statement import (
    Rollout,
    UnverifiedError,
    opened,
    pods_of,
    read_statement,
)
from specdecode_operator.deployment.attestation.verify import Difference, pod_differences
from specdecode_operator.problems import printable, shown
from specdecode_operator.redaction import clip
from specdecode_operator.untrusted import mapping, name_of, objects

if TYPE_CHECKING:
    # Importing cryptography takes 8 MB, and only signing needs it.
    from specdecode_operator.deployment.attestation.keys import PublicKey

_MOST_DIFFERENCES: Final = 4
_LONGEST_REASON: Final = 200
_CONTAINERS: Final = ("initContainers", "containers", "ephemeralContainers")


@dataclass(frozen=True)
class Gate:
    """Compares pods with attestations."""

    keys: "tuple[PublicKey, ...]"
    """Accepted public keys: several while one replaces another."""

    others: frozenset[tuple[str, str]] = frozenset()
    """Containers that other tools add to pods, by name and image: they are not compared."""

    def is_unchanged(self, pod: Body, before: Body) -> bool:
        """Return whether a change of a pod leaves all attested content the same."""
        return pods_of(pod) == pods_of(before)

    def refusal_of_change(self, pod: Body, before: Body, key: Key, config_map: Body | None) -> str | None:
        """Return why a running pod may not be changed into this one; None if it may.

        An earlier content that was not attested has run in the pod, and a new image finds the files that it left.
        """
        if refusal := self.refusal(pod, key, config_map):
            return refusal
        earlier = self.refusal(before, key, config_map)
        return f"before the change, the pod {earlier}: delete the pod" if earlier else None

    def refusal(self, pod: Body, key: Key, config_map: Body | None) -> str | None:
        """Return why a pod of this deployment may not start, by the ConfigMap with its attestations; None if it may."""
        name = f"ConfigMap {printable(attestation_name(key))}"
        if config_map is None:
            return f"{name} does not exist: an operator with a signing key writes it before it starts engines"
        entries = [text for entry, text in mapping(config_map, "data").items() if entry.endswith(ENTRY_SUFFIX)]
        if len(entries) > MOST_ROLLOUTS:
            return f"{name} has {len(entries)} attestations, but an operator writes at most {MOST_ROLLOUTS}"
        rollouts, reasons = self._verified(entries, key, _owners(config_map))
        if not rollouts:
            return f"{name} has no valid attestation{': ' if reasons else ''}{'; '.join(sorted({*reasons}))}"
        own = pods_of(self._without_others(pod))
        found = min((pod_differences(each, own) for each in rollouts), key=len)
        return f"is not as attested in {name}: {'; '.join(_told(found))}" if found else None

    def _verified(self, entries: list[str], key: Key, owners: set[str]) -> tuple[list[Rollout], list[str]]:
        """Return the rollouts of the valid entries, and reasons for the others: the ConfigMap is untrusted input."""
        rollouts, reasons = [], []
        for text in entries:
            try:
                rollout = read_statement(opened(str(text), *self.keys)).predicate
            except UnverifiedError as error:
                reasons.append(f"one {clip(printable(str(error)), _LONGEST_REASON)}")
                continue
            if (rollout.object.namespace, rollout.object.name) != (key.namespace, key.name):
                reasons.append(f"one is of {rollout.object.namespace}/{rollout.object.name}")
            elif rollout.object.uid not in owners:
                reasons.append("one is of an earlier object of this name, with another uid")
            else:
                rollouts.append(rollout)
        return rollouts, reasons

    def _without_others(self, pod: Body) -> Body:
        spec = mapping(pod, "spec")
        kept = {
            field: [each for each in objects(spec, field) if (name_of(each), str(each.get("image"))) not in self.others]
            for field in _CONTAINERS
        }
        return {**pod, "spec": {**spec, **kept}}


def owner_of(pod: Mapping[str, Any]) -> str | None:
    """Return the deployment that the labels of a pod name; None without such a label."""
    serves, computes = engine_labels(pod)
    return serves if serves is not None else computes


def engine_labels(pod: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Return the deployments that a pod's labels name: as an engine that clients reach, and as a worker of one."""
    labels = mapping(mapping(pod, "metadata"), "labels")
    return labels.get(DEPLOYMENT_LABEL), labels.get(COMPUTES_FOR_LABEL)


def _owners(config_map: Body) -> set[str]:
    """Return the UIDs of the owning deployments: the garbage collector deletes the ConfigMap with its owner."""
    owners = objects(mapping(config_map, "metadata"), "ownerReferences")
    return {str(each.get("uid")) for each in owners if each.get("kind") == deployment.KIND}


def _told(differences: tuple[Difference, ...]) -> Iterator[str]:
    """Yield the differing fields without the attested values, because any client may call the webhook."""
    for each in differences[:_MOST_DIFFERENCES]:
        yield f"{printable(each.field)}: {shown(each.found)}" if each.field.endswith("image") else printable(each.field)
    if (left := len(differences) - _MOST_DIFFERENCES) > 0:
        yield f"and {left} more"
