"""Read config.json and the safetensors headers of a checkpoint.

`specdecode read-model` runs this in a Job with the operator's image: no vLLM, no GPU, no code of the model, no pickle,
and only the standard library. The answer is the container's termination message: ``{"facts": "<base64 of gzip of
JSON>"}`` or ``{"error": {"reason": "ModelNotFound", "message": "..."}}``.
"""

import base64
import gzip
import json
import math
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

# Kubernetes' limit of a termination message (kubernetes.io/docs, "Determine the reason for pod failure").
MESSAGE_LIMIT_BYTES = 4096
# The largest published file has 3.1 MB: nvidia/MiniMax-M3-NVFP4 names the format of each expert.
CONFIG_LIMIT_BYTES = 8 * 1024 * 1024
# Limit of the safetensors library (safetensors/src/tensor.rs, MAX_HEADER_SIZE).
HEADER_LIMIT_BYTES = 100_000_000
# ModelOpt writes the quantization here, not into config.json; vLLM also reads it (transformers_utils/config.py).
QUANTIZATION = "hf_quant_config.json"
INDEX = "model.safetensors.index.json"
INDEX_LIMIT_BYTES = 64 * 1024 * 1024
DEADLINE_S = 300
_LENGTH_BYTES = 8
# First read of each file. Most headers fit, so that one request to the hub is enough.
_FIRST_BYTES = 64 * 1024
ERROR_LIMIT = 600
_LONGEST_CAUSE = 200
_LONGEST_NAME = 100
_MOST_PARTS = 24
_LONG_VALUE = 400
_DECODER_LAYERS = ("model.layers", "model.language_model.layers", "language_model.model.layers", "backbone.layers")
# These determine sizes: parts of the model, lists by layer and modules that are not quantized.
_NEEDED_THOUGH_LONG = {
    "layer_types", "quantization_config", "compression_config", "text_config", "vision_config", "rope_scaling",
    "rope_parameters",
}  # fmt: skip
_MOST_SPACE = 2**60
_MOST_DIMENSIONS = 16
_QUANTIZATION_SECTIONS = ("quantization_config", "compression_config")
# Modules of experts after the first: all experts of a layer have one format (vLLM, FusedMoE).
_OTHER_EXPERTS = re.compile(r"experts\.[1-9]\d*(\.|$)")
# Pickles that vLLM never loads. It loads others if there are no safetensors files (weight_utils.py,
# filter_files_not_needed_for_inference).
_OF_TRAINING = {"training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt"}
# Element sizes by name in a header (safetensors/src/tensor.rs, Dtype). Sizes of unknown types are not checked.
_DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
    "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
}  # fmt: skip

# Keys without effect on memory: settings of generation and training, and lists of tokens and labels.
_IRRELEVANT = {
    "_name_or_path", "auto_map", "transformers_version", "id2label", "label2id", "task_specific_params", "use_cache",
    "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "suppress_tokens", "begin_suppress_tokens",
    "bad_words_ids", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "do_sample", "num_beams",
    "num_beam_groups", "num_return_sequences", "length_penalty", "no_repeat_ngram_size", "diversity_penalty",
    "early_stopping", "max_length", "min_length", "return_dict", "output_attentions", "output_hidden_states",
    "output_scores", "problem_type", "finetuning_task", "tf_legacy_loss", "torchscript", "initializer_range",
    "attention_dropout", "router_aux_loss_coef", "aux_loss_alpha", "pretraining_tp",
}  # fmt: skip


class CheckpointError(Exception):
    """A checkpoint cannot be read; `reason` is a CamelCase word for programs."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


@dataclass(frozen=True)
class Weights:
    """Bytes and number of all tensors, and the bytes by type and by part, from the safetensors headers.

    Small parts are under ``other``. A model stored as pickles has no headers, so it has no tensors here.
    """

    total_bytes: int
    tensors: int
    output_head: bool
    bytes_by_dtype: dict[str, int]
    bytes_by_part: dict[str, int]


@dataclass(frozen=True)
class Checkpoint:
    """Keys of config.json that affect memory, the weights, and the commit on the hub (None on a volume)."""

    config: dict[str, Any]
    weights: Weights
    commit: str | None = None


class Folder:
    """A model in a directory."""

    def __init__(self, path: str) -> None:
        self.where = path
        self.commit: str | None = None

    def sizes(self) -> dict[str, int | None]:
        """Return the sizes of regular files at the top level; reading a pipe would never end."""
        try:
            return {path.name: path.stat().st_size for path in Path(self.where).iterdir() if path.is_file()}
        except (FileNotFoundError, NotADirectoryError) as error:
            raise CheckpointError("ModelNotFound", f"there is no directory {self.where}") from error
        except OSError as error:
            raise _unreadable(self.where, error) from error

    def read(self, name: str, start: int, length: int) -> bytes:
        """Bytes of a file; fewer at its end."""
        path = Path(self.where, name)
        try:
            with path.open("rb") as stream:
                stream.seek(start)
                return stream.read(length)
        except OSError as error:
            raise _unreadable(str(path), error) from error


class FolderOfHeaders(Folder):
    """A model in a directory whose safetensors files may be truncated after their headers."""

    def sizes(self) -> dict[str, int | None]:
        """Return sizes like `Folder.sizes`, but None for files that end after their header."""
        sizes = super().sizes()
        for name in [name for name in sizes if name.endswith(".safetensors")]:
            length = int.from_bytes(self.read(name, 0, _LENGTH_BYTES), "little")
            sizes[name] = None if sizes[name] == _LENGTH_BYTES + length else sizes[name]
        return sizes


class Files(Protocol):
    """Files of a model in a directory or on the hub."""

    where: str
    commit: str | None

    def sizes(self) -> dict[str, int | None]:
        """Return the files at the top level, the only ones that vLLM loads, with their sizes if known."""

    def read(self, name: str, start: int, length: int) -> bytes:
        """Bytes of a file; fewer at its end."""


def read_checkpoint(files: Files) -> Checkpoint:
    """Read config.json and the safetensors headers. Raises CheckpointError."""
    sizes = files.sizes()
    if "config.json" not in sizes:
        raise CheckpointError("ModelNotFound", f"there is no config.json in {files.where}")
    config = _json_file(files, "config.json", CONFIG_LIMIT_BYTES, "ConfigUnreadable")
    if "quantization_config" not in config and QUANTIZATION in sizes:
        config["quantization_config"] = _json_file(files, QUANTIZATION, CONFIG_LIMIT_BYTES, "ConfigUnreadable")
    tensors, inner = _tensors(files, sizes), config.get("text_config")
    parts = (config, inner if isinstance(inner, dict) else {})
    layers = [part["num_hidden_layers"] for part in parts if type(part.get("num_hidden_layers")) is int]
    return Checkpoint(_relevant(config), _total(tensors, next(iter(layers), None)), files.commit)


def _tensors(files: Files, sizes: Mapping[str, int | None]) -> dict[str, tuple[str, int]]:
    # consolidated*.safetensors are second copies of the weights, in Mistral's format.
    names = sorted(n for n in sizes if n.endswith(".safetensors") and not n.startswith("consolidated"))
    named: Any = ()
    if INDEX in sizes:
        named = _json_file(files, INDEX, INDEX_LIMIT_BYTES, "WeightsUnreadable").get("weight_map")
        if not isinstance(named, dict) or not all(isinstance(name, str) for name in named.values()):
            raise _bad(INDEX, "must have a file name for each tensor in weight_map")
        names = sorted(set(named.values()))
    if not names and any(name.endswith((".bin", ".pt")) for name in sizes.keys() - _OF_TRAINING):
        return {}
    if not names:
        raise CheckpointError("WeightsNotFound", f"there are no weights in {files.where}")
    # Open only listed files, so that names in an index cannot lead to other paths.
    if lacking := [name for name in names if name not in sizes or not name.endswith(".safetensors")]:
        message = f"{len(lacking)} of {len(names)} files that {INDEX} names are not in {files.where}, such as"
        raise CheckpointError("WeightsNotFound", f"{message} {_clipped(lacking[0])}")
    with ThreadPoolExecutor(max_workers=8) as pool:
        headers = list(pool.map(lambda name: _header(files, name, sizes[name]), names))
    tensors = {name: tensor for header in headers for name, tensor in header.items()}
    if absent := [name for name in named if name not in tensors]:
        raise _bad(INDEX, f"names tensor {_clipped(absent[0])}, which no file holds")
    return tensors


def _header(files: Files, name: str, size: int | None) -> dict[str, tuple[str, int]]:
    """Return type and bytes of each tensor of one file. A header is its length followed by JSON."""
    first = files.read(name, 0, _FIRST_BYTES)
    length = int.from_bytes(first[:_LENGTH_BYTES], "little")
    if length > HEADER_LIMIT_BYTES:
        raise _bad(name, f"has a header of {length:,} bytes, more than {HEADER_LIMIT_BYTES:,}")
    text = first[_LENGTH_BYTES : _LENGTH_BYTES + length]
    if len(text) < length and len(first) == _FIRST_BYTES:
        text += files.read(name, _FIRST_BYTES, length - len(text))
    if len(first) < _LENGTH_BYTES or len(text) < length:
        raise _bad(name, "is truncated within its header")
    header = _json_object(text, f"the header of {name}", "WeightsUnreadable")
    space = _MOST_SPACE if size is None else size - _LENGTH_BYTES - length
    tensors = {key: _tensor(name, key, value, space) for key, value in header.items() if key != "__metadata__"}
    if sum(tensor_bytes for _, tensor_bytes in tensors.values()) > space:
        raise _bad(name, "has tensors that overlap")
    return tensors


def _tensor(name: str, key: str, value: object, space: int) -> tuple[str, int]:
    match value:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(begin), int(end)]} if (
            len(shape) <= _MOST_DIMENSIONS
            and all(type(edge) is int and 0 <= edge <= _MOST_SPACE for edge in shape)
            and 0 <= begin <= end
        ):
            if end > space:
                raise _bad(name, f"is truncated: tensor {_clipped(key)} ends at {end:,} of {space:,} bytes")
            elements, size = math.prod(shape), end - begin
            if dtype in _DTYPE_BITS and size * 8 != elements * _DTYPE_BITS[dtype]:
                raise _bad(name, f"gives tensor {_clipped(key)} {size:,} bytes for {elements:,} elements of {dtype}")
            return dtype[:16], size
    raise _bad(name, f"must describe tensor {_clipped(key)} by dtype, shape and data_offsets")


def _total(tensors: Mapping[str, tuple[str, int]], layers: int | None = None) -> Weights:
    by_dtype: Counter[str] = Counter()
    by_part: Counter[str] = Counter()
    for name, (dtype, tensor_bytes) in tensors.items():
        by_dtype[dtype] += tensor_bytes
        by_part[_part(name, layers)] += tensor_bytes
    kept = dict(by_part.most_common(_MOST_PARTS))
    other = sum(by_part.values()) - sum(kept.values())
    return Weights(
        total_bytes=sum(by_dtype.values()),
        tensors=len(tensors),
        output_head=any(part == "lm_head" or part.endswith(".lm_head") for part in by_part),
        bytes_by_dtype=dict(by_dtype.most_common(len(_DTYPE_BITS))),
        bytes_by_part={**kept, "other": other} if other else kept,
    )


def _part(name: str, layers: int | None) -> str:
    """Return the part of a tensor: its name up to the first number, at most three words.

    The part of ``model.layers.0.mlp.weight`` is ``model.layers``. Layers from index ``layers`` on are modules for
    multi-token prediction: ``model.layers.mtp``.
    """
    words = name.split(".")
    numbered = next((index for index, word in enumerate(words[:-1]) if word.isdecimal()), len(words))
    folder = words if len(words) == 1 else words[:-1]
    part = ".".join(folder[: min(numbered, 3)])[:64]
    if layers is None or numbered == len(words) or part not in _DECODER_LAYERS:
        return part
    return f"{part}.mtp" if int(words[numbered][:9]) >= layers else part


def _relevant(value: Any, levels: int = 64) -> Any:
    """Return the settings without keys that do not affect memory, at every level."""
    if not levels:
        raise CheckpointError("ConfigUnreadable", "config.json is nested more than 64 deep")
    if isinstance(value, dict):
        kept = {key: inner for key, inner in shortened(value).items() if key not in _IRRELEVANT and inner is not None}
        return {key: _relevant(inner, levels - 1) for key, inner in kept.items()}
    return [_relevant(inner, levels - 1) for inner in value] if isinstance(value, list) else value


def shortened(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json with shortened lists of modules in its quantization settings.

    Files may name 150,000 modules. Experts after the first, further targets of a scheme, and layers with the format of
    an earlier layer are removed, because no size depends on them.
    """
    sections = {key: _shorter(config[key]) for key in _QUANTIZATION_SECTIONS if isinstance(config.get(key), dict)}
    return {**config, **sections}


def _shorter(value: Any) -> Any:
    if isinstance(value, list):
        return [_shorter(each) for each in value if not (isinstance(each, str) and _OTHER_EXPERTS.search(each))]
    if not isinstance(value, dict):
        return value
    kept: dict[str, Any] = {}
    for key, inner in value.items():
        if key == "targets" and isinstance(inner, list):
            kept[key] = inner[:1]
        elif key == "quantized_layers" and isinstance(inner, dict):
            first = {json.dumps(layer, sort_keys=True): name for name, layer in reversed(inner.items())}
            kept[key] = {name: inner[name] for name in first.values()}
        elif not _OTHER_EXPERTS.search(key):
            kept[key] = _shorter(inner)
    return kept


def _json_file(files: Files, name: str, limit_bytes: int, reason: str) -> dict[str, Any]:
    text = files.read(name, 0, limit_bytes + 1)
    if len(text) > limit_bytes:
        raise CheckpointError(reason, f"{name} in {files.where} has more than {limit_bytes // 2**20} MiB")
    return _json_object(text, f"{name} in {files.where}", reason)


def _json_object(text: bytes, what: str, reason: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(reason, f"{what} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(reason, f"{what} is JSON, but not an object")
    return value


def _bad(name: str, what: str) -> CheckpointError:
    return CheckpointError("WeightsUnreadable", f"{name} {what}")


def _unreadable(path: str, error: OSError) -> CheckpointError:
    by = f"user {os.getuid()} and group {os.getgid()}"
    return CheckpointError("ModelNotReadable", f"{path} cannot be read by {by}: {error.strerror or error}")


def _clipped(text: str, limit: int = _LONGEST_NAME) -> str:
    """Shorten a text to whole words, at most ``limit`` characters.

    The operator masks secrets when it reads the answer, and recognizes only complete ones, so words are never cut.
    """
    if len(text) <= limit:
        return text
    return text[:limit].rpartition(" ")[0].rstrip() + "…"


def pack_facts(checkpoint: Checkpoint) -> str:
    """Return the termination message with a checkpoint's facts.

    If they do not fit, the least needed are removed first. Raises CheckpointError if the rest does not fit either.
    """
    long = {key for key, value in checkpoint.config.items() if len(json.dumps(value)) > _LONG_VALUE}
    short = {key: value for key, value in checkpoint.config.items() if key not in long - _NEEDED_THOUGH_LONG}
    in_total = replace(checkpoint, weights=replace(checkpoint.weights, bytes_by_part={}))
    for candidate in (checkpoint, in_total, replace(in_total, config=short)):
        packed = gzip.compress(json.dumps(asdict(candidate), separators=(",", ":")).encode(), mtime=0)
        message = json.dumps({"facts": base64.b64encode(packed).decode()})
        if len(message) <= MESSAGE_LIMIT_BYTES:
            return message
    raise CheckpointError("ConfigTooLong", "config.json does not fit into a termination message even when compressed")


def pack_error(error: CheckpointError) -> str:
    """Return the termination message for an error."""
    told = {"reason": error.reason, "message": _clipped(error.message, ERROR_LIMIT)}
    return json.dumps({"error": told}, ensure_ascii=False)


def leave_answer(message: Path, open_files: Callable[[], Files]) -> int:
    """Read a model and write the answer to the termination message file; return the exit code."""

    def answer(text: str) -> None:
        message.write_text(text, encoding="utf-8", errors="replace")

    def give_up(*_: object) -> None:
        answer(pack_error(CheckpointError("ReaderTimedOut", f"the model could not be read within {DEADLINE_S} s")))
        os._exit(1)  # threads may hang in a read that never returns

    signal.signal(signal.SIGALRM, give_up)
    signal.alarm(DEADLINE_S)
    try:
        found = read_checkpoint(open_files())
        answer(pack_facts(found))
    except CheckpointError as error:
        answer(pack_error(error))
        print(f"{error.reason}: {error.message}", file=sys.stderr)  # noqa: T201
        return 1
    finally:
        signal.alarm(0)  # the calling process may continue, as in tests
    print(f"{found.weights.tensors} tensors, {found.weights.total_bytes:,} bytes")  # noqa: T201
    return 0
