"""Read prompts of a dataset: JSONL, GSM8K (parquet), ShareGPT (JSON), SPEED-Bench (JSONL, parquet)."""

import codecs
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple, TypeAlias

import msgspec
from msgspec import Meta, Raw, Struct

from specdecode_operator.api.capture import CaptureWorkload, Dataset, DatasetFormat
from specdecode_operator.capture.load.run_settings import WARMUP_PHASE, needed
from specdecode_operator.problems import printable

DATASET_MOUNT = Path("/dataset")
_GSM8K_COLUMN = "question"
# Files of a GSM8K folder on Hugging Face, in order of preference; the first pattern with files counts.
_GSM8K_SHARDS = ("main/test-*.parquet", "test-*.parquet", "main/train-*.parquet", "train-*.parquet")
# Fields with the prompt of a SPEED-Bench line, as its own script and as the hub write it.
_SPEED_BENCH_TURNS = ("messages", "turns")
# Start of a prompt that the hub may not redistribute; half of them are.
_SPEED_BENCH_PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED"
_PERSONS = (None, "human", "user")  # speakers of prompts in ShareGPT; None is a turn without a speaker
_MOST_BYTES = 2**30  # half of the memory of the containers with the operator's image


class BadDatasetError(ValueError):
    """A dataset without usable prompts; the message has the file, the place in it and the fix."""


class Part(NamedTuple):
    """Part of a dataset that a phase uses."""

    path: str
    category: str | None = None  # of SPEED-Bench


def parts_of(workload: CaptureWorkload) -> Mapping[str, Part]:
    """Return the part of the dataset for each phase; warm-up uses the first phase's."""
    path = needed(workload.prompts.dataset).path
    parts = {phase.name: Part(phase.path or path, phase.category) for phase in workload.phases}
    return parts | {WARMUP_PHASE: parts[workload.phases[0].name]}


DatasetPrompt: TypeAlias = "str | array[int]"
"""Text, or token ids."""

_TokenIds = list[Annotated[int, Meta(ge=0, lt=2**32)]]


def read_dataset(settings: Dataset, mount: Path = DATASET_MOUNT, part: Part | None = None) -> list[DatasetPrompt]:
    """Return the prompts of a dataset, or of a part of it, in the order of its files."""
    part = part or Part(settings.path)
    path = inside(mount, part.path)
    try:
        match settings.format:
            case DatasetFormat.JSONL:
                prompts: list[DatasetPrompt] = list(_read_jsonl(path, settings.prompt_field))
            case DatasetFormat.GSM8K:
                prompts = list(_read_gsm8k(path))
            case DatasetFormat.SHAREGPT:
                prompts = list(_read_share_gpt(path))
            case DatasetFormat.SPEED_BENCH:
                prompts = list(_read_speed_bench(path, part.category))
            case DatasetFormat.TRACE:
                raise ValueError("a trace holds no prompts")
    except OSError as error:
        raise BadDatasetError(f"{path}: cannot be read: {error.strerror or error}") from error
    if not prompts:
        raise BadDatasetError(f"{path}: holds no prompt: add at least one")
    return prompts


def inside(mount: Path, path: str) -> Path:
    """Return the path in the mounted source; links may not leave it."""
    place = mount / path
    if not place.resolve().is_relative_to(mount.resolve()):
        raise BadDatasetError(f"{path}: leads out of the dataset's volume: write a path inside it, without ..")
    if not place.exists():
        folder = next(parent for parent in (*place.parents, mount) if parent.is_dir() or parent == mount)
        found = f"nothing is mounted at {mount}"
        if folder.is_dir():
            names, most = sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("..")), 10
            shown = ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
            found = f"{folder} has {shown}" if names else f"{folder} is empty"
        raise BadDatasetError(f"{place}: does not exist; {found}: correct prompts.dataset.path")
    return place


def _checked_file(path: Path) -> Path:
    if path.is_dir():
        raise BadDatasetError(f"{path}: is a folder: name the file in it")
    size_bytes = path.stat().st_size
    if size_bytes == 0:
        raise BadDatasetError(f"{path}: is empty: add at least one prompt")
    if size_bytes > _MOST_BYTES:
        raise BadDatasetError(
            f"{path}: is {size_bytes / 2**30:.1f} GiB, and is read into memory: cut it to {_MOST_BYTES / 2**30:.0f} GiB"
        )
    return path


def _read_jsonl(path: Path, field: str) -> Iterator[DatasetPrompt]:
    for place, record in _objects(path):
        if field not in record:
            fields = ", ".join(sorted(record)) or "none"
            raise BadDatasetError(
                f"{place}: has no field {field!r}; its fields: {fields}: set promptField to one of them"
            )
        value = record[field]
        yield (_token_ids if isinstance(value, list) else _text)(value, f"{place}: field {field!r}")


def _objects(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the objects of a JSONL file, each with its place for messages."""
    with _checked_file(path).open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            # Editors on Windows write a byte order mark, which JSON does not allow.
            text = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            if not text.strip():
                continue
            place = f"{path}: line {number}"
            try:
                record = msgspec.json.decode(text.decode())
            except UnicodeDecodeError as error:
                message = f"byte {error.start + 1} is not UTF-8: convert the file to UTF-8"
                raise BadDatasetError(f"{place}: {message}") from error
            except (msgspec.DecodeError, RecursionError) as error:
                raise BadDatasetError(f"{place}: is not JSON ({error}): write one object on each line") from error
            if not isinstance(record, dict):
                message = f"is {_kind(record)}, not an object: write one object on each line"
                raise BadDatasetError(f"{place}: {message}")
            yield place, record


def _token_ids(value: list[Any], place: str) -> "array[int]":
    if not value:
        raise BadDatasetError(f"{place}: is empty: remove it, or write a prompt")
    try:
        return array("I", msgspec.convert(value, _TokenIds))
    except msgspec.ValidationError as error:
        raise BadDatasetError(f"{place}: is a list of other values than token ids: write text or token ids") from error


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
    files = [path]
    if path.is_dir():
        files = next((found for each in _GSM8K_SHARDS if (found := sorted(path.glob(each)))), [])
        if not files:
            fix = "name the folder that was downloaded, or a parquet file"
            raise BadDatasetError(f"{path}: has none of {', '.join(_GSM8K_SHARDS)}: {fix}")
    for file in files:
        for place, row in _rows(_checked_file(file), [_GSM8K_COLUMN], "GSM8K"):
            yield _text(row[_GSM8K_COLUMN], f"{place}, column {_GSM8K_COLUMN!r}")


def _rows(path: Path, wanted: Sequence[str], name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the rows of a parquet file with the wanted columns that it has, each with its place for messages."""
    try:
        # An optional and large dependency.
        from pyarrow import ArrowInvalid, parquet  # type: ignore[import-untyped]  # noqa: PLC0415
    except ImportError as error:
        message = f"{path}: reading parquet needs pyarrow: pip install '.[parquet]' in a clone"
        raise BadDatasetError(message) from error
    try:
        with parquet.ParquetFile(path) as file:
            columns = file.schema_arrow.names
            if not (known := [column for column in wanted if column in columns]):
                missing = " or ".join(map(repr, wanted))
                raise BadDatasetError(f"{path}: has no column {missing}; its columns: {', '.join(columns)}: not {name}")
            number = 0
            for batch in file.iter_batches(columns=known):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}: row {number}", row
    except (ArrowInvalid, UnicodeDecodeError) as error:
        first_line = str(error).partition("\n")[0]
        raise BadDatasetError(
            f"{path}: is not parquet ({first_line}): name a .parquet file; for lines of JSON use format JSONL"
            f" with promptField {wanted[0]}"
        ) from error


def _read_speed_bench(path: Path, category: str | None) -> Iterator[str]:
    wanted = [*_SPEED_BENCH_TURNS, "category"]
    is_parquet = path.suffix == ".parquet"
    rows = _rows(_checked_file(path), wanted, "SPEED-Bench") if is_parquet else _objects(path)
    categories, has_prompts = set[str](), False
    for place, row in rows:
        categories.add(str(row.get("category")))
        if category is None or row.get("category") == category:
            has_prompts = True
            yield _speed_bench_prompt(row, place)
    if categories and not has_prompts:
        names = printable(", ".join(sorted(categories)[:12]))
        raise BadDatasetError(f"{path}: has no category {category}; its categories: {names}: name one of them")


def _speed_bench_prompt(row: dict[str, Any], place: str) -> str:
    field = next((name for name in _SPEED_BENCH_TURNS if row.get(name)), _SPEED_BENCH_TURNS[0])
    turns = row.get(field)
    if not isinstance(turns, list) or not turns:
        raise BadDatasetError(f"{place}: has no {' or '.join(_SPEED_BENCH_TURNS)}: name a file of SPEED-Bench")
    first = turns[0].get("content") if isinstance(turns[0], dict) else turns[0]
    text = _text(first, f"{place}: field {field!r}")
    if text.startswith(_SPEED_BENCH_PLACEHOLDER):
        raise BadDatasetError(
            f"{place}: names its source instead of a prompt: have SPEED-Bench's own prepare.py write the file, which"
            " fetches them"
        )
    return text


class _Turn(Struct, rename={"speaker": "from"}):
    """A turn of ShareGPT; some in the public files lack a field."""

    speaker: Any = None
    value: Any = None


class _Conversation(Struct):
    conversations: list[Raw]


_CONVERSATIONS: Final = msgspec.json.Decoder(list[Raw])
_CONVERSATION: Final = msgspec.json.Decoder(_Conversation)
_TURN: Final = msgspec.json.Decoder(_Turn)


def _read_share_gpt(path: Path) -> Iterator[str]:
    """Yield the first prompt of every conversation that has one."""
    # The file is held in memory once, and conversations are parsed only up to that turn.
    text = memoryview(_checked_file(path).read_bytes())
    if bytes(text[: len(codecs.BOM_UTF8)]) == codecs.BOM_UTF8:
        text = text[len(codecs.BOM_UTF8) :]
    odd: msgspec.DecodeError | None = None
    has_prompts, conversations = False, list[Raw]()
    try:
        conversations = _CONVERSATIONS.decode(text)
    except msgspec.DecodeError as error:
        odd = error
    for number, conversation in enumerate(conversations, start=1):
        try:
            turns = map(_TURN.decode, _CONVERSATION.decode(conversation).conversations)
            said = (each.value for each in turns if each.speaker in _PERSONS and isinstance(each.value, str))
            prompt = next((each for each in said if each.strip()), None)
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
        message = f"is not ShareGPT ({odd}): it must be a list of objects with conversations[].value"
        raise BadDatasetError(f"{path}: {message}") from odd
