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
        return Side(role, workload.flag_fields.get(KV_TRANSFER, arguments), f"{KV_TRANSFER} {transfer.connector}", transfer)
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


def split_problems(prefill: Object, decode: Object, name: str) -> Iterator[str]:
    """Yield the settings in which the two sides of a split must agree and do not.

    ``prefill`` and ``decode`` are their specs, and ``name`` is the name of the prefill side.
    """
    of_prefill, of_decode = mapping(prefill, "speculation"), mapping(decode, "speculation")
    methods = [str(each.get("method") or Method.NONE.value) for each in (of_prefill, of_decode)]
    if methods[0] != methods[1] and any(method in _DRAFT_KEEPS_CACHE for method in methods):
        yield (
            f"speculates with {methods[1]}, and its prefill side {name} with {methods[0]}: the draft's KV cache is"
            " transferred, so vLLM's NIXL connector rejects the other side (vllm-project/vllm#49230) or counts another"
            f" number of layers (#48221): use the same --speculative-config on both sides ({PAGE})"
        )
        return
    compared = [("serving.kvCacheDtype", "--kv-cache-dtype"), ("serving.dtype", "--dtype")]
    if methods[1] in _DRAFT_KEEPS_CACHE:
        compared += [
            ("speculation.draft.model", "the draft"),
            ("speculation.draft.revision", "the revision of the draft"),
            ("speculation.draft.quantization", "the quantization of the draft"),
            ("speculation.extraConfig.kv_cache_dtype", "the type of the draft's KV cache"),
        ]
    for path, words in compared:
        theirs, own = _at(prefill, path), _at(decode, path)
        if theirs != own:
            yield (
                f"{words} is {_said(own)}, but {_said(theirs)} on its prefill side {name}: both sides must have the same"
                f" layout of the KV cache ({PAGE})"
            )


def _said(value: Any) -> str:
    return "not set" if value is None else shown(value)


def _at(spec: Object, path: str) -> Any:
    found: Any = spec
    for key in path.split("."):
        found = found.get(key) if isinstance(found, dict) else None
    return found
