"""A model of an engine, fitted to captures: one small JSON document, of which each section is used by itself.

A section says on which values it was fitted, so that whoever uses it outside of them can be told how far.
"""

from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, Struct

from specdecode_operator.documents.json_text import parse_json
from specdecode_operator.documents.limits import UnreadableTextError
from specdecode_operator.problems import printable, shown
from specdecode_operator.replay.emulated.acceptance import acceptance_from_json
from specdecode_operator.replay.emulated.step_time import step_time_from_json
from specdecode_operator.replay.fitted.donors import Clients, Donors, Ttft

SCHEMA: Final = 1

MAX_BYTES: Final = 8 * 2**20
"""Of a model file: fitting writes 2 MiB at most."""

Count = Annotated[int, Meta(ge=0, le=2**40)]
Positive = Annotated[int, Meta(ge=1, le=2**40)]


class FittedCapture(Struct, kw_only=True, frozen=True):
    """A capture that a model was fitted to."""

    name: str  # of its folder
    config_hash: str | None = None
    requests: Count = 0
    steps: Count = 0


class Limits(Struct, kw_only=True, frozen=True, omit_defaults=True):
    """What an engine takes at once, in vLLM's words; null where the capture does not say it."""

    max_num_seqs: Positive | None = None
    max_num_batched_tokens: Positive | None = None
    max_model_len: Positive | None = None
    block_size: Positive | None = None
    num_gpu_blocks: Positive | None = None  # of the KV cache
    enable_prefix_caching: bool | None = None
    async_scheduling: bool | None = None  # the next step is planned while one runs
    draft_slots: Count | None = (
        None  # of a step's tokens, taken by each request in it beside its own: drafting needs them
    )


class Origin(Struct, kw_only=True, frozen=True, omit_defaults=True):
    """Whose behaviour it is."""

    model: str | None = None
    gpu: str | None = None
    tp: Positive | None = None
    vllm_version: str | None = None
    speculative: dict[str, Any] | None = None  # as a trace's header has it; absent without speculation
    limits: Limits = Limits()
    captures: list[FittedCapture] = []


class FittedModel(Struct, kw_only=True, frozen=True, omit_defaults=True):
    """All that is known of an engine."""

    schema: Literal[1]
    origin: Origin
    donors: Donors | None = None
    ttft: Ttft | None = None
    clients: Clients | None = None
    step_time: dict[str, Any] | None = None  # as replay/emulated/step_time.py evaluates it
    acceptance: dict[str, Any] | None = None  # as replay/emulated/acceptance.py evaluates it


class ModelFileError(Exception):
    """A model file that cannot be used: the file, what is wrong, and what to do, in one line."""


def read_model(path: Path) -> FittedModel:
    """Return the model in a file.

    Raises
    ------
    ModelFileError
        It is not there, is none, or says what no model can.
    """
    name = printable(str(path))
    try:
        if path.is_fifo() and path.parts[1:2] not in (("dev",), ("proc",)):
            # Who never writes would keep us waiting; a shell's <(command) lies below /dev or /proc.
            raise ModelFileError(f"{name}: is a FIFO: name a file that `specdecode replay fit` wrote")
        with path.open("rb") as stream:
            text = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise ModelFileError(f"{name}: {error.strerror}: name a file that `specdecode replay fit` wrote") from error
    try:
        return decode_model(text)
    except UnreadableTextError as error:
        raise ModelFileError(f"{name}: {printable(str(error))}") from error


def decode_model(text: bytes) -> FittedModel:
    """Return the model that a text says.

    Raises
    ------
    UnreadableTextError
        When it says none.
    """
    document = parse_json(text, MAX_BYTES)
    if not isinstance(document, dict) or "origin" not in document:
        raise UnreadableTextError("is no fitted model: name a file that `specdecode replay fit` wrote")
    if document.get("schema") != SCHEMA:
        found = shown(document.get("schema"))
        raise UnreadableTextError(f"schema: {found}: this specdecode reads {SCHEMA}: fit it again")
    try:
        model = msgspec.convert(document, FittedModel)
        if model.step_time is not None:
            step_time_from_json(model.step_time)
        if model.acceptance is not None:
            acceptance_from_json(model.acceptance)
    except (msgspec.ValidationError, ValueError) as error:
        raise UnreadableTextError(f"{error}: fit it again") from error
    return model


def encode_model(model: FittedModel) -> bytes:
    """Return the document of a model, with a line for each of its sections."""
    sections = msgspec.to_builtins(model)
    lines = (f'"{name}": '.encode() + msgspec.json.encode(section) for name, section in sections.items())
    return b"{\n" + b",\n".join(lines) + b"\n}\n"
