"""Build the ConfigMap that holds the newest attestations of one SpecDecodeDeployment, one per rollout."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace as changed

from specdecode_operator.api.base import Body
from specdecode_operator.api.deployment import Key
from specdecode_operator.api.deployment_status import ConditionStatus
from specdecode_operator.cluster.manifests import owned
from specdecode_operator.deployment.attestation.statement import (
    MOST_BYTES,
    AttestedObject,
    Image,
    Memory,
    Pods,
    Rollout,
    Served,
    Statement,
    UnverifiedError,
    Verdict,
    digest,
    opened,
    pods_of,
    read_statement,
    sealed,
    statement_of,
    statement_text,
)
from specdecode_operator.deployment.attestation.verify import images_of
from specdecode_operator.deployment.desired_state import DesiredState, InCanary, Launch, NotLaunched
from specdecode_operator.deployment.parsed_deployment import ParsedDeployment
from specdecode_operator.deployment.rollout.canary import is_canary
from specdecode_operator.deployment.rollout.engine_workload import pod_templates
from specdecode_operator.deployment.rollout.rollback import last_good_name, read_last_good
from specdecode_operator.deployment.rollout.rollout_progress import current_pods
from specdecode_operator.untrusted import mapping, objects
from specdecode_operator.version import __version__

if TYPE_CHECKING:
    # Importing cryptography takes 8 MB, and only signing needs it.
    from specdecode_operator.deployment.attestation.keys import PublicKey, SigningKey

ENTRY_SUFFIX: Final = ".intoto.json"
MOST_ROLLOUTS: Final = 4
"""Kept rollouts: pods of an earlier one run until the next is ready, or return if the next one fails."""

_MOST_LOOKED_AT: Final = 4 * MOST_ROLLOUTS

_MOST_REMEMBERED: Final = 256
"""Size of the cache of verified envelopes, of some kilobytes each."""

_MOST_IMAGES: Final = 64
"""Limit of images. A container has several if its tag was moved."""


def attestation_name(key: Key) -> str:
    """Return the name of the ConfigMap with the attestations of a deployment."""
    return f"{key.name}-attestation"


@dataclass(frozen=True)
class Seen:
    """Cluster objects of one SpecDecodeDeployment."""

    entries: Mapping[str, str]
    """Entries of its ConfigMap: untrusted input."""

    pods: Sequence[Body]
    captures: Sequence[Body]


def attested(
    parent: ParsedDeployment, desired: DesiredState, seen: Seen, key: "SigningKey", now: datetime
) -> DesiredState:
    """Return the desired state with the attestation of its rollout, which is written before the pods start.

    An existing entry counts only if the current key or a former one signed it.
    """
    outcome, workload = desired.outcome, desired.workload
    if isinstance(outcome, InCanary):
        # The earlier engines are attested already. The pods of their successor differ from the canary's by a label.
        outcome, workload = outcome.launch, next(filter(is_canary, desired.children), None)
    if isinstance(outcome, NotLaunched) or workload is None:
        return desired
    pods = _pods(workload)
    name = _entry(pods)
    # A rollback restores the workload that served last after any number of failed attempts.
    served_last = _served_last(parent, desired)
    needed = {name, _entry(_pods(served_last))} if served_last else {name}
    signed = _signed(parent, _looked_at(seen.entries, needed), key)
    if isinstance(outcome, Launch) and parent.suspended_for is None:
        before = signed[name][1].predicate if name in signed else None
        rollout = Rollout(
            now.isoformat(timespec="seconds"),
            __version__,
            AttestedObject(
                parent.key.namespace,
                parent.key.name,
                parent.uid,
                parent.generation,
                digest(parent.object_spec or parent.raw_spec),
                parent.draft_in_place or parent.trained_draft,
            ),
            outcome.plan_status.model_dump(mode="json", by_alias=True, exclude_none=True),
            pods,
            _served(parent, outcome, current_pods([*seen.pods], workload), seen.captures)
            or (before.served if before else None),
        )
        if before is None or changed(rollout, made_at=before.made_at) != before:
            statement = statement_of(rollout)
            text = sealed(statement_text(statement), key)
            # A longer one would be rejected when it is read, and signed again at each reconcile.
            if len(text) <= MOST_BYTES:
                signed[name] = (text, statement)
    order = sorted(signed, key=lambda each: (each in needed, signed[each][1].predicate.age), reverse=True)
    newest = order[:MOST_ROLLOUTS]
    if not newest:
        return desired
    body: Body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": attestation_name(parent.key)}}
    body["data"] = {each: signed[each][0] for each in newest}
    # First, so that the webhook finds the attestation when it reviews a pod.
    return replace(desired, children=[owned(body, parent.key, parent.uid), *desired.children])


def _served_last(parent: ParsedDeployment, desired: DesiredState) -> Body | None:
    name = last_good_name(parent.key)
    kept = next((each for each in desired.children if each["metadata"]["name"] == name), None)
    last_good = read_last_good(kept)
    return last_good.workload if last_good else None


def _pods(workload: Body) -> tuple[Pods, ...]:
    return tuple(pods_of(template) for template in pod_templates(workload))


def _entry(pods: tuple[Pods, ...]) -> str:
    return f"{digest(pods)[:16]}{ENTRY_SUFFIX}"


def _looked_at(entries: Mapping[str, str], needed: set[str]) -> Mapping[str, str]:
    """Return the needed entries and a few more: verifying all entries that other writers may add takes seconds."""
    names = sorted(entries, key=lambda name: name not in needed)[:_MOST_LOOKED_AT]
    return {name: entries[name] for name in names}


def _signed(
    parent: ParsedDeployment, entries: Mapping[str, str], key: "SigningKey"
) -> dict[str, tuple[str, Statement]]:
    """Return the entries that the operator signed for this very object: the ConfigMap is untrusted input."""
    found = {}
    for name, written in entries.items():
        with suppress(UnverifiedError):
            text = _renewed(written, key)
            statement = _own_statement(text, key.public)
            its = statement.predicate.object
            is_own = (its.namespace, its.name, its.uid) == (parent.key.namespace, parent.key.name, parent.uid)
            if is_own and name == _entry(statement.predicate.pods):
                found[name] = (text, statement)
    return found


def _renewed(text: str, key: "SigningKey") -> str:
    """Sign the payload again if a former key signed the envelope; return any other envelope unchanged."""
    try:
        _own_statement(text, key.public)
    except UnverifiedError:
        if key.former:
            return sealed(opened(text, *key.former), key)
    return text


@lru_cache(maxsize=_MOST_REMEMBERED)
def _own_statement(text: str, key: "PublicKey") -> Statement:
    """Return the statement of an envelope. Only valid ones are cached."""
    return read_statement(opened(text, key))


def _served(parent: ParsedDeployment, outcome: Launch, pods: Sequence[Body], captures: Sequence[Body]) -> Served | None:
    """Return the report of engines that all serve this spec; None while they do not."""
    status, observed = parent.status, parent.status.observed
    is_ready = any(
        (each.type, each.status, each.observed_generation) == ("Ready", ConditionStatus.TRUE, parent.generation)
        for each in status.conditions
    )
    images = {image for pod in pods for image in images_of(pod)}
    if not is_ready or not images or observed is None or status.plan != outcome.plan_status:
        return None
    return Served(
        observed.engines,
        observed.engine_version,
        Memory(outcome.plan_status.kv_cache_tokens, observed.kv_cache_tokens, observed.kv_cache_residual_bytes),
        tuple(Image(*each) for each in sorted(images)[:_MOST_IMAGES]),
        _verdict(captures),
    )


def _verdict(captures: Sequence[Body]) -> Verdict | None:
    """Return the verdict of the newest capture that compared arms; None without one."""
    told = []
    for capture in captures:
        status, metadata = mapping(capture, "status"), mapping(capture, "metadata")
        for each in objects(status, "conditions"):
            if each.get("type") == "Pays" and each.get("status") != "Unknown":
                words = (str(each.get(field)) for field in ("status", "reason", "message"))
                verdict = Verdict(str(metadata.get("name")), str(metadata.get("uid")), *words)
                told.append((str(status.get("finishedAt")), verdict))
    return max(told, key=lambda each: each[0])[1] if told else None
