"""Reads the prompts of a dataset: JSONL, GSM8K in parquet, ShareGPT in JSON."""

import codecs
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Raw, Struct

from specdecode_operator.api.capture_workload import Dataset, DatasetFormat

DATASET_MOUNT = Path("/dataset")
"""Where the Job's pod has the ConfigMap or the volume with the dataset."""

_GSM8K_COLUMN = "question"
_GSM8K_SHARDS = ("main/test-*.parquet", "test-*.parquet", "main/train-*.parquet", "train-*.parquet")
"""Files of a GSM8K folder as Hugging Face has it, in order of preference: the first pattern with files counts."""

_PERSONS = (None, "human", "user")
"""Who says prompts in ShareGPT's turns; of one that names nobody, the first is taken for one."""

_MOST_BYTES = 2**30
"""Half of the memory that the containers with the operator's image have."""


class BadDatasetError(ValueError):
    """A dataset without prompts that could be sent; the message names the file, the place in it and what to do."""


def read_dataset(settings: Dataset, mount: Path = DATASET_MOUNT) -> list[str]:
    """Return the prompts of a dataset in the order of its files.

    Raises
    ------
    BadDatasetError
        A file is missing, empty, too large, not of the format that was said, or has no prompts where they should be.
    """
    path = _inside(mount, settings.path)
    try:
        prompts = list(_read(path, settings))
    except OSError as error:
        raise BadDatasetError(f"{path}: cannot be read: {error.strerror or error}") from error
    if not prompts:
        raise BadDatasetError(f"{path}: holds no prompt: put at least one in")
    return prompts


def _read(path: Path, settings: Dataset) -> Iterator[str]:
    match settings.format:
        case DatasetFormat.JSONL:
            return _read_jsonl(path, settings.prompt_field)
        case DatasetFormat.GSM8K:
            return _read_gsm8k(path)
        case DatasetFormat.SHAREGPT:
            return _read_share_gpt(path)


def _inside(mount: Path, path: str) -> Path:
    """Return the path in the mounted source; links may not lead out of it."""
    place = mount / path
    if not place.resolve().is_relative_to(mount.resolve()):
        raise BadDatasetError(f"{path}: leads out of the dataset's volume: write a path inside it, without ..")
    if not place.exists():
        raise BadDatasetError(f"{place}: does not exist; {_neighbours(place, mount)}: correct prompts.dataset.path")
    return place


def _neighbours(place: Path, mount: Path) -> str:
    folder = next(parent for parent in (*place.parents, mount) if parent.is_dir() or parent == mount)
    if not folder.is_dir():
        return f"nothing is mounted at {mount}"
    most = 10
    names = sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith(".."))
    shown = ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
    return f"{folder} has {shown}" if names else f"{folder} is empty"


def _checked_file(path: Path) -> Path:
    if path.is_dir():
        raise BadDatasetError(f"{path}: is a folder: name the file in it")
    size_bytes = path.stat().st_size
    if size_bytes == 0:
        raise BadDatasetError(f"{path}: is empty: put at least one prompt in")
    if size_bytes > _MOST_BYTES:
        raise BadDatasetError(
            f"{path}: is {size_bytes / 2**30:.1f} GiB, and is read into memory: cut it to {_MOST_BYTES / 2**30:.0f} GiB"
        )
    return path


def _read_jsonl(path: Path, field: str) -> Iterator[str]:
    with _checked_file(path).open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            # Editors on Windows begin a file with a byte order mark, which JSON does not know.
            text = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            if text.strip():
                yield _jsonl_prompt(text, field, f"{path}: line {number}")


def _jsonl_prompt(line: bytes, field: str, place: str) -> str:
    try:
        record = msgspec.json.decode(line.decode())
    except UnicodeDecodeError as error:
        raise BadDatasetError(f"{place}: byte {error.start + 1} is not UTF-8: convert the file to UTF-8") from error
    except msgspec.DecodeError as error:
        raise BadDatasetError(f"{place}: is not JSON ({error}): write one object on each line") from error
    if not isinstance(record, dict):
        raise BadDatasetError(f"{place}: is {_kind(record)}, not an object: write one object on each line")
    if field not in record:
        fields = ", ".join(sorted(record)) or "none"
        raise BadDatasetError(f"{place}: has no field {field!r}; its fields: {fields}: set promptField to one of them")
    return _text(record[field], f"{place}: field {field!r}")


def _text(value: Any, place: str) -> str:
    if not isinstance(value, str):
        raise BadDatasetError(f"{place}: is {_kind(value)}: a prompt must be text")
    if not value.strip():
        raise BadDatasetError(f"{place}: is empty: remove it, or write a prompt")
    return value


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "a truth value", type(None): "null"}
    return names.get(type(value), "a number")


def _read_gsm8k(path: Path) -> Iterator[str]:
    for file in _shards(path) if path.is_dir() else [path]:
        yield from _read_parquet(_checked_file(file), _GSM8K_COLUMN)


def _shards(folder: Path) -> list[Path]:
    for pattern in _GSM8K_SHARDS:
        files = sorted(folder.glob(pattern))
        if files:
            return files
    raise BadDatasetError(
        f"{folder}: has none of {', '.join(_GSM8K_SHARDS)}: name the folder that was downloaded, or a parquet file"
    )


def _read_parquet(path: Path, column: str) -> Iterator[str]:
    try:
        # Only parquet needs it, and it is large.
        from pyarrow import ArrowInvalid, parquet  # type: ignore[import-untyped]  # noqa: PLC0415
    except ImportError as error:
        message = f"{path}: reading parquet needs pyarrow: pip install '.[parquet]' in a clone"
        raise BadDatasetError(message) from error
    try:
        with parquet.ParquetFile(path) as file:
            columns = file.schema_arrow.names
            if column not in columns:
                raise BadDatasetError(f"{path}: has no column {column!r}; its columns: {', '.join(columns)}: not GSM8K")
            row = 0
            for batch in file.iter_batches(columns=[column]):
                for value in batch.column(0).to_pylist():
                    row += 1
                    yield _text(value, f"{path}: row {row}, column {column!r}")
    except (ArrowInvalid, UnicodeDecodeError) as error:
        first_line = str(error).partition("\n")[0]
        raise BadDatasetError(
            f"{path}: is not parquet ({first_line}): name a .parquet file; for lines of JSON use format JSONL"
            f" with promptField {column}"
        ) from error


class _Turn(Struct, rename={"speaker": "from"}):
    """What somebody says; the public files have turns without either."""

    speaker: Any = None
    value: Any = None

    @property
    def is_prompt(self) -> bool:
        """Whether a person says it, and says anything."""
        return self.speaker in _PERSONS and isinstance(self.value, str) and bool(self.value.strip())


class _Conversation(Struct):
    conversations: list[Raw]


_CONVERSATIONS: Final = msgspec.json.Decoder(list[Raw])
_CONVERSATION: Final = msgspec.json.Decoder(_Conversation)
_TURN: Final = msgspec.json.Decoder(_Turn)


def _read_share_gpt(path: Path) -> Iterator[str]:
    """Yield what a person says first in every conversation; those in which none does are passed over.

    The file's bytes are held once, and of each conversation only the turns up to that one are looked into.
    """
    text = memoryview(_checked_file(path).read_bytes())
    if bytes(text[: len(codecs.BOM_UTF8)]) == codecs.BOM_UTF8:
        text = text[len(codecs.BOM_UTF8) :]
    try:
        conversations = _CONVERSATIONS.decode(text)
    except msgspec.DecodeError as error:
        raise _no_share_gpt(path, error) from error
    odd: msgspec.DecodeError | None = None
    has_prompts = False
    for number, conversation in enumerate(conversations, start=1):
        try:
            prompt = _first_prompt(conversation)
        except UnicodeDecodeError as error:
            raise BadDatasetError(
                f"{path}: conversation {number}: is not UTF-8 ({error.reason}): convert the file to UTF-8"
            ) from error
        except msgspec.DecodeError as error:
            odd = odd or error
            continue
        if prompt is not None:
            has_prompts = True
            yield prompt
    if odd is not None and not has_prompts:
        raise _no_share_gpt(path, odd)


def _first_prompt(conversation: Raw) -> str | None:
    turns = map(_TURN.decode, _CONVERSATION.decode(conversation).conversations)
    return next((str(turn.value) for turn in turns if turn.is_prompt), None)


def _no_share_gpt(path: Path, error: msgspec.DecodeError) -> BadDatasetError:
    return BadDatasetError(
        f"{path}: is not ShareGPT ({error}): it must be a list of objects with conversations[].value"
    )
