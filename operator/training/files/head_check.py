"""Check a trained head before it is published.

Its files are untrusted, because containers of the trainer's image wrote them. Only config.json and model.safetensors
are read, never pickles or Python files. vLLM must be able to serve the head for the target: the checks cover its class,
vocabulary, width, the layers of the target, and whether all weights are finite.
"""

import errno
import math
import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np

from specdecode_operator.api.training import TrainingMethod
from specdecode_operator.capture.files.formats import CaptureError
from specdecode_operator.problems import printable, shown
from specdecode_operator.redaction import clip
from specdecode_operator.sizing.errors import GeometryError
from specdecode_operator.sizing.families.architectures import geometry_from_config
from specdecode_operator.sizing.families.draft_heads import missing_class
from specdecode_operator.training.files.pod_settings import Target
from specdecode_operator.untrusted import UnreadableTextError, mapping, parse_json

CONFIG: Final = "config.json"
WEIGHTS: Final = "model.safetensors"
INVALID_HEAD: Final = "InvalidHead"
EMBEDDING, OUTPUT, DRAFT_TO_TARGET, TARGET_TO_DRAFT = "embed_tokens.weight", "lm_head.weight", "d2t", "t2d"

_CLASSES: Final[Mapping[str, str]] = {
    TrainingMethod.EAGLE3: "Eagle3DraftModel",
    TrainingMethod.PEAGLE: "PEagleDraftModel",
    TrainingMethod.DFLASH: "DFlashDraftModel",
}
"""Class that speculators names in config.json, by method."""

_LAYER_IDS: Final = ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids")
_STATES_OF_EAGLE: Final = 3  # vLLM joins three hidden states of the target unless eagle_config says otherwise
_MOST_CONFIG_BYTES: Final = 256 * 1024
_MOST_HEADER_BYTES: Final = 4 * 2**20
_MOST_TENSORS: Final = 4096
_MOST_DIMENSIONS: Final = 4
_LARGEST_DIMENSION: Final = 2**31
_LENGTH_BYTES: Final = 8
_MOST_LAYERS: Final = 64
_PIECE_BYTES: Final = 2**24
_LONGEST_DETAIL: Final = 300
_NAME: Final = re.compile(r"[A-Za-z_][\w.]{0,199}", re.ASCII)
# Size of an element, its type, and the bits of the exponent, which are all 1 in an infinity and in NaN.
_TYPES: Final[Mapping[str, tuple[int, str, int]]] = {
    "BF16": (2, "<u2", 0x7F80),
    "F16": (2, "<u2", 0x7C00),
    "F32": (4, "<u4", 0x7F800000),
    "I64": (8, "<i8", 0),
    "BOOL": (1, "u1", 0),
}
_LEFT_OUT: Final = ("auto_map", "_name_or_path", "_commit_hash", "trust_remote_code", "custom_pipelines")


@dataclass(frozen=True)
class Tensor:
    """Type, shape and place of one tensor in the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int  # from the start of the file
    end: int


@dataclass(frozen=True)
class CheckedHead:
    """Head that passed the checks."""

    config: dict[str, Any]  # as it is published
    tensors: Mapping[str, Tensor]


def check_head(folder: Path, method: TrainingMethod, target: Target, version: str) -> CheckedHead:
    """Check that vLLM can serve a head for a target, and return the head.

    Raises
    ------
    CaptureError
        If it cannot. The reason is InvalidHead, and the message names the field or tensor.
    """
    with open_regular(folder / CONFIG) as stream:
        text = stream.read(_MOST_CONFIG_BYTES + 1)
    if len(text) > _MOST_CONFIG_BYTES:
        raise invalid(f"{CONFIG} has more than {_MOST_CONFIG_BYTES // 1024} KiB")
    try:
        config = parse_json(text)
    except UnreadableTextError as error:
        raise invalid(f"{CONFIG}: {error}") from error
    if not isinstance(config, dict):
        raise invalid(f"{CONFIG} is not an object")
    draft_vocabulary = _check_config(config, method, target, version)
    with open_regular(folder / WEIGHTS) as stream:
        tensors = read_header(stream)
        _check_shapes(tensors, method, target, draft_vocabulary)
        _check_vocabulary(stream, tensors, target.vocabulary, draft_vocabulary)
        _check_finite(stream, tensors)
    return CheckedHead(_published(config, target.name), tensors)


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file. Links are rejected, because they can lead out of the folder."""
    try:
        opened = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        why = "is a symbolic link" if error.errno == errno.ELOOP else f"cannot be read: {error.strerror}"
        raise invalid(f"{path.name} {why}") from error
    if not stat.S_ISREG(os.fstat(opened).st_mode):
        os.close(opened)
        raise invalid(f"{path.name} is not a regular file")
    return os.fdopen(opened, "rb")


def invalid(problem: str) -> CaptureError:
    """Return the error for a head that fails a check."""
    message = f"the trained head is invalid and was not published: {clip(printable(problem), _LONGEST_DETAIL)}"
    return CaptureError(INVALID_HEAD, message)


def _check_config(config: dict[str, Any], method: TrainingMethod, target: Target, version: str) -> int:
    """Check that vLLM accepts config.json, and return the size of the draft's vocabulary."""

    def expect(field: str, found: object, wanted: object) -> None:
        if found != wanted or type(found) is not type(wanted):
            raise invalid(f"{CONFIG}: {field} is {shown(found)}, and must be {shown(wanted)}")

    expect("speculators_model_type", config.get("speculators_model_type"), str(method))
    expect("architectures", config.get("architectures"), [_CLASSES[method]])
    layers = mapping(config, "transformer_layer_config")
    expect("transformer_layer_config.vocab_size", layers.get("vocab_size"), target.vocabulary)
    _whole("transformer_layer_config.num_hidden_layers", layers.get("num_hidden_layers"), 1, _MOST_LAYERS)
    # The hidden states of the target have its width; the layers of the head may have another one.
    width = config.get("target_hidden_size")
    expect("target_hidden_size", layers.get("hidden_size") if width is None else width, target.hidden_size)
    ids = next((config[name] for name in _LAYER_IDS if name in config), None)
    if not isinstance(ids, list) or not ids:
        raise invalid(f"{CONFIG}: {_LAYER_IDS[0]} is {shown(ids)}, and must name layers of the target")
    for each in ids:
        _whole("layers of the target", each, 0, target.layers - 1)
    if len(set(ids)) != len(ids):
        raise invalid(f"{CONFIG}: layers of the target are {shown(ids)}: one is listed twice")
    if method is not TrainingMethod.DFLASH:
        expect("number of layers of the target", len(ids), _STATES_OF_EAGLE)
    try:
        geometry = geometry_from_config("head", config)
    except GeometryError as error:
        raise invalid(f"{CONFIG}: {error}") from error
    if geometry.head is None or geometry.estimated_because:
        raise invalid(f"{CONFIG}: does not describe a head that vLLM {version} serves")
    if remedy := missing_class(geometry.architecture, "eagle3" if method == "peagle" else str(method), version):
        raise invalid(f"{CONFIG}: {remedy}")
    found = config.get("draft_vocab_size", target.vocabulary)
    return _whole("draft_vocab_size", target.vocabulary if found is None else found, 1, target.vocabulary)


def _whole(field: str, value: object, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise invalid(f"{CONFIG}: {field} is {shown(value)}, and must be a whole number from {least} to {most}")
    return value


def read_header(stream: BinaryIO) -> dict[str, Tensor]:
    """Parse the header of a safetensors file, whose tensors must fill it without gaps or overlaps."""
    size = os.fstat(stream.fileno()).st_size
    length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
    if size < _LENGTH_BYTES or not 0 < length <= min(_MOST_HEADER_BYTES, size - _LENGTH_BYTES):
        raise invalid(f"{WEIGHTS}: header of {length} bytes in a file of {size}")
    try:
        header = parse_json(stream.read(length), _MOST_HEADER_BYTES)
    except UnreadableTextError as error:
        raise invalid(f"{WEIGHTS}: header: {error}") from error
    if not isinstance(header, dict) or not 0 < len(header) <= _MOST_TENSORS:
        raise invalid(f"{WEIGHTS}: header is not an object with at most {_MOST_TENSORS} tensors")
    start = _LENGTH_BYTES + length
    tensors = {name: _tensor(name, value, start) for name, value in header.items() if name != "__metadata__"}
    place = start
    for name, tensor in sorted(tensors.items(), key=lambda each: (each[1].begin, each[1].end)):
        if tensor.begin != place:
            raise invalid(f"{WEIGHTS}: tensor {name} begins at byte {tensor.begin} instead of {place}")
        place = tensor.end
    if place != size:
        raise invalid(f"{WEIGHTS}: tensors end at byte {place} of {size}")
    return tensors


def _tensor(name: str, value: object, start: int) -> Tensor:
    if not _NAME.fullmatch(name):
        raise invalid(f"{WEIGHTS}: {shown(name)} is not the name of a tensor")
    match value:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(begin), int(end)]} if (
            dtype in _TYPES
            and len(shape) <= _MOST_DIMENSIONS
            and all(type(edge) is int and 0 < edge <= _LARGEST_DIMENSION for edge in shape)
            and type(begin) is type(end) is int
            and 0 <= begin <= end
        ):
            if end - begin != math.prod(shape) * _TYPES[dtype][0]:
                raise invalid(f"{WEIGHTS}: tensor {name} has {end - begin} bytes for shape {shape} of {dtype}")
            return Tensor(dtype, tuple(shape), start + begin, start + end)
    types = ", ".join(_TYPES)
    raise invalid(f"{WEIGHTS}: tensor {name} must have a type ({types}), a shape and offsets: {shown(value)}")


def _check_shapes(tensors: Mapping[str, Tensor], method: TrainingMethod, target: Target, draft_vocabulary: int) -> None:
    wanted = {
        EMBEDDING: (target.vocabulary, None),
        OUTPUT: (draft_vocabulary, None),
        DRAFT_TO_TARGET: (draft_vocabulary,),
        TARGET_TO_DRAFT: (target.vocabulary,),
    }
    for name, shape in wanted.items():
        if (tensor := tensors.get(name)) is None:
            continue
        fits = len(tensor.shape) == len(shape) and all(
            edge in (None, found) for edge, found in zip(shape, tensor.shape, strict=True)
        )
        if not fits:
            rows = shape[0]
            raise invalid(f"{WEIGHTS}: {name} has shape {list(tensor.shape)}, and must have {rows} rows")
    if method is not TrainingMethod.DFLASH and OUTPUT not in tensors:
        raise invalid(f"{WEIGHTS}: {OUTPUT} is missing")
    for name, tensor in tensors.items():
        whole = {DRAFT_TO_TARGET: "I64", TARGET_TO_DRAFT: "BOOL"}.get(name)
        if (tensor.dtype != whole) if whole else not _TYPES[tensor.dtype][2]:
            raise invalid(f"{WEIGHTS}: tensor {name} has type {tensor.dtype}")


def _check_vocabulary(stream: BinaryIO, tensors: Mapping[str, Tensor], vocabulary: int, draft_vocabulary: int) -> None:
    """Check that each token of a smaller vocabulary is mapped to a distinct token of the target."""
    mapped = [name for name in (DRAFT_TO_TARGET, TARGET_TO_DRAFT) if name in tensors]
    if draft_vocabulary == vocabulary and not mapped:
        return
    if len(mapped) != 2:  # noqa: PLR2004  both directions
        missing = next(name for name in (DRAFT_TO_TARGET, TARGET_TO_DRAFT) if name not in tensors)
        raise invalid(f"{WEIGHTS}: {missing} is missing for a vocabulary of {draft_vocabulary} of {vocabulary} tokens")
    offsets = np.concatenate([*_pieces(stream, tensors[DRAFT_TO_TARGET])])
    used = np.concatenate([*_pieces(stream, tensors[TARGET_TO_DRAFT])])
    # Sums could overflow, so the offsets are checked first.
    if offsets.min() < 0 or offsets.max() >= vocabulary:
        raise invalid(f"{WEIGHTS}: {DRAFT_TO_TARGET} has offsets beyond the target's {vocabulary} tokens")
    tokens = offsets + np.arange(draft_vocabulary)
    if tokens.max() >= vocabulary or len(np.unique(tokens)) != draft_vocabulary:
        raise invalid(f"{WEIGHTS}: {DRAFT_TO_TARGET} does not map to {draft_vocabulary} tokens of {vocabulary}")
    expected = np.zeros(vocabulary, dtype=np.uint8)
    expected[tokens] = 1
    if not np.array_equal(used, expected):
        raise invalid(f"{WEIGHTS}: {DRAFT_TO_TARGET} and {TARGET_TO_DRAFT} name different tokens")


def _check_finite(stream: BinaryIO, tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        exponent = _TYPES[tensor.dtype][2]
        if exponent and any(((piece & exponent) == exponent).any() for piece in _pieces(stream, tensor)):
            raise invalid(f"{WEIGHTS}: tensor {name} has values that are not finite: lower spec.trainer.learningRate")


def _pieces(stream: BinaryIO, tensor: Tensor) -> Iterator["np.ndarray[Any, Any]"]:
    stream.seek(tensor.begin)
    left = tensor.end - tensor.begin
    while left:
        piece = stream.read(min(left, _PIECE_BYTES))
        if not piece or len(piece) % _TYPES[tensor.dtype][0]:
            raise invalid(f"{WEIGHTS}: file is shorter than its header states")
        left -= len(piece)
        yield np.frombuffer(piece, dtype=_TYPES[tensor.dtype][1])


def _published(config: dict[str, Any], target: str) -> dict[str, Any]:
    """Remove names of Python files and paths of the trainer's pod from config.json."""
    kept = {name: value for name, value in config.items() if name not in _LEFT_OUT}
    layers = mapping(kept, "transformer_layer_config")
    kept["transformer_layer_config"] = {name: value for name, value in layers.items() if name not in _LEFT_OUT}
    described = mapping(kept, "speculators_config")
    verifier = {**mapping(described, "verifier"), "name_or_path": target}
    kept["speculators_config"] = {**described, "verifier": verifier}
    return kept
