"""Recognise servers that are one side of a prefill/decode split, and compare speculation on the two sides."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from specdecode_operator.enums import METHODS_WITH_HIDDEN_STATES, Method
from specdecode_operator.importing.spec_builder import Object, Workload
from specdecode_operator.problems import Problem, shown
from specdecode_operator.untrusted import mapping
from specdecode_operator.vllm.kv_transfer import KV_TRANSFER, KvTransfer, ServingRole, split_transfer
from specdecode_operator.vllm.profiles import EngineProfile

PAGE: Final = 'documentation: "Prefill/decode split"'

_CONFIG: Final = "--speculative-config"
_ROLE_LABEL: Final = "llm-d.ai/role"
"""Label of the pods of llm-d's modelservice chart."""
_DRAFT_KEEPS_CACHE: Final = (Method.DRAFT_MODEL, *METHODS_WITH_HIDDEN_STATES)
"""Methods whose draft has KV cache, which both sides allocate and transfer."""


@dataclass(frozen=True)
class Side:
    """One side of a prefill/decode split."""

    role: ServingRole | None
    """None if the engine sends and receives KV cache, and the object does not name its side."""
    field: str
    value: str
    transfer: KvTransfer | None
    """None if the arguments leave the connector to a controller."""

    @property
    def phrase(self) -> str:
        """The side in words."""
        return f"the {self.role} side" if self.role else "one side"


def find_side(
    workload: Workload, container: str, flagged: ServingRole | None, extra_args: list[str], profile: EngineProfile
) -> Side | None:
    """Return the side of a split that a server is; None if it serves both phases.

    ``container`` is the field of its container, and ``flagged`` the role that Dynamo's own flags name.
    """
    transfer = split_transfer(extra_args, profile)
    label = mapping(workload.metadata, "labels").get(_ROLE_LABEL)
    labelled = ServingRole(label) if isinstance(label, str) and label in set(ServingRole) else None
    arguments = f"{container}.args"
    if workload.role is not None:
        is_set = workload.role_field.endswith(".prefill")
        return Side(workload.role, workload.role_field, "is set" if is_set else workload.role.value, transfer)
    if flagged is not None:
        return Side(flagged, arguments, f"a {flagged} worker", transfer)
    if transfer is not None:
        role = transfer.role or labelled
        return Side(
            role, workload.flag_fields.get(KV_TRANSFER, arguments), f"{KV_TRANSFER} {transfer.connector}", transfer
        )
    if labelled is not None:
        return Side(labelled, f"metadata.labels.{_ROLE_LABEL}", labelled.value, None)
    return None


def side_problem(side: Side) -> Problem:
    """Return the problem that the operator does not serve a split."""
    message = (
        f"this server is {side.phrase} of a prefill/decode split, which the operator does not create: keep it, or serve"
        f" both phases in one engine, without {KV_TRANSFER} ({PAGE})"
    )
    return Problem(side.field, side.value, message)


def split_problems(prefill: Object, decode: Object, name: str) -> Iterator[Problem]:
    """Yield the settings of the decode side in which both sides of a split must agree and do not.

    ``prefill`` and ``decode`` are their specs, and ``name`` is the name of the prefill side.
    """
    method, theirs = (_at(each, "speculation.method") or Method.NONE.value for each in (decode, prefill))
    if method != theirs and (method in _DRAFT_KEEPS_CACHE or theirs in _DRAFT_KEEPS_CACHE):
        message = (
            f"the prefill side {name} has {theirs}: a draft has KV cache, which is transferred, so vLLM's NIXL"
            " connector rejects the other side (vllm-project/vllm#49230), or the numbers of layers differ (#48221); use"
            f" the same {_CONFIG} on both sides ({PAGE})"
        )
        yield Problem("spec.speculation.method", str(method), message)
        return
    compared = ["serving.kvCacheDtype", "serving.dtype"]
    if method in _DRAFT_KEEPS_CACHE:
        compared += ["speculation.draft.model", "speculation.draft.revision", "speculation.draft.quantization"]
        compared += ["speculation.extraConfig.kv_cache_dtype"]
    for path in compared:
        own, other = _at(decode, path), _at(prefill, path)
        if own != other:
            message = (
                f"the prefill side {name} has {_said(other)}: both sides need the same layout of the KV cache; use the"
                f" same value on both sides ({PAGE})"
            )
            yield Problem(f"spec.{path}", _said(own), message)


def _said(value: Any) -> str:
    return "no value" if value is None else shown(value)


def _at(spec: Object, path: str) -> Any:
    found: Any = spec
    for key in path.split("."):
        found = found.get(key) if isinstance(found, dict) else None
    return found
