"""Train the head: the step `train`.

speculators writes one checkpoint per epoch. A retry continues from the newest complete one. Its own output goes to a
file that only this user can read; the container's log has progress lines.
"""

import json
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

from .hidden_states import failed, head_config, programs_environment, read_layer_ids
from .processes import started, tail, wait
from .settings import Settings, StepError, open_private
from .trainer_log import Progress, progress_line

_ON_CPU = f"{__name__.rpartition('.')[0]}.train_on_cpu"
_BEST = "checkpoint_best"
# Written last for an epoch, so a checkpoint without it is incomplete (speculators, train/trainer.py).
_WRITTEN_LAST = "training_state.json"
_CHECKPOINT_FILES = ("config.json", "model.safetensors", "optimizer_state_dict.pt", _WRITTEN_LAST)
_LAYERS_OF_DFLASH = 5  # speculators' default
_LAYERS_ON_CPU = 1
_TRAIN_SHARE = 0.9
_FIGURE = re.compile(r"[a-z_0-9]{1,40}", re.ASCII)
_MOST_FIGURES = 48  # as many as fit into a termination message
_LOG_EVERY_STEPS = 10
_SHOWN_EVERY_S = 10
_ANCHORS_ON_CPU = 32


def train(settings: Settings) -> dict[str, Any]:
    """Run the step, and return its metrics for the termination message."""
    places = settings.places
    places.checkpoints.mkdir(mode=0o700, parents=True, exist_ok=True)
    _drop_incomplete(places.checkpoints)
    log = places.logs / "train.log"
    progress = Progress(settings.epochs)
    shown_s = 0.0
    with started(trainer_command(settings), log, _environment(settings)) as process, log.open("rb") as stream:
        running = True
        while running and progress.diverged_at is None:
            running = wait(process)
            for line in _lines(stream, ended=not running):
                report = progress.feed(line)
                if report and (progress.ends_epoch or time.monotonic() > shown_s + _SHOWN_EVERY_S):
                    shown_s = time.monotonic()
                    print(progress_line(report), flush=True)  # noqa: T201  progress in the container's log
            if progress.take_saved():
                _drop_old(places.checkpoints)
    code = process.returncode
    if progress.diverged_at is not None:
        message = (
            f"the loss at step {progress.diverged_at} is not a finite number: lower spec.trainer.learningRate, and"
            " check that the hidden states of the target are finite"
        )
        _drop_all(places.checkpoints)
        raise StepError("TrainerDiverged", message)
    if code:
        raise failed("speculators train", code, tail(log), settings, "TrainerFailed")
    best = best_checkpoint(places.checkpoints)
    if best is None:
        raise StepError("TrainerSilent", "speculators train ended without an error and without a checkpoint")
    figures = _validation(best)
    if progress.loss is None and not figures:
        raise StepError("TrainerSilent", "speculators train reported no loss")
    return {"checkpoint": best.name, "steps": progress.step, **figures}


def trainer_command(settings: Settings) -> list[str]:
    """Return the command of the trainer, with the arguments of the user at the end."""
    places, ids = settings.places, read_layer_ids(settings)
    program = ["python3", "-m", "speculators.train"]
    if not settings.gpus:
        program = ["python3", "-m", _ON_CPU]
    elif settings.gpus > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={settings.gpus}"]
        program = ["python3", *launcher, "-m", "speculators.train"]
    return [
        *program,
        *("--speculator-type", settings.method),
        *("--verifier-name-or-path", settings.target),
        *("--data-path", str(places.dataset), "--save-path", str(places.checkpoints)),
        *("--target-layer-ids", *map(str, ids)),
        *_decoder(settings),
        *("--epochs", str(settings.epochs), "--seed", str(settings.seed)),
        *(("--lr", settings.learning_rate) if settings.learning_rate else ()),
        *("--total-seq-len", str(settings.sequence_length)),
        *("--train-data-ratio", str(_train_share(settings)), "--on-missing", "raise"),
        *("--log-freq", str(_LOG_EVERY_STEPS if settings.gpus else 1)),
        *(() if settings.gpus else _cpu_flags()),
        *settings.args,
    ]


def _decoder(settings: Settings) -> list[str]:
    """Return the flags for the shape of the head, without the sliding window that speculators uses by default."""
    if settings.head is not None:
        return ["--from-pretrained", str(_head_to_continue(settings))]
    if any(
        each.startswith(("--draft-config", "--sliding-window", "--full-attention-indices")) for each in settings.args
    ):
        return []
    layers = _asked_layers(settings.args)
    if layers is None:
        layers = (_LAYERS_OF_DFLASH if settings.gpus else _LAYERS_ON_CPU) if settings.method == "dflash" else 1
    return ["--num-layers", str(layers), "--full-attention-indices", *map(str, range(layers))]


def _asked_layers(args: Sequence[str]) -> int | None:
    words = [word for each in args for word in each.split("=", 1)]
    asked = [after for word, after in pairwise(words) if word == "--num-layers"]
    return int(asked[-1]) if asked and asked[-1].isdecimal() else None


def _cpu_flags() -> list[str]:
    return [
        *("--draft-attn-impl", "sdpa", "--loss-implementation", "eager"),
        *("--hidden-states-dtype", "float32", "--num-workers", "0", "--max-anchors", str(_ANCHORS_ON_CPU)),
    ]


def _head_to_continue(settings: Settings) -> Path:
    """Copy the head to continue from, with the path of the target and, on a CPU, with float32; return its path.

    speculators loads the target by the name in the config of the head, which is a Hub ID. A CPU cannot train bf16.
    """
    assert settings.head is not None  # noqa: S101  or there is none
    given, config = Path(settings.head), head_config(Path(settings.head))
    copy = settings.places.hidden_states / "from"
    copy.mkdir(mode=0o700, parents=True, exist_ok=True)
    config.pop("auto_map", None)  # names Python files
    described = config.get("speculators_config")
    if not isinstance(described, dict) or not isinstance(described.get("verifier"), dict):
        raise StepError("HeadUnreadable", "config.json of spec.from has no speculators_config.verifier")
    described["verifier"]["name_or_path"] = settings.target
    if not settings.gpus:
        config["dtype"] = "float32"
    with open_private(copy / "config.json") as stream:
        json.dump(config, stream)
    weights = copy / "model.safetensors"
    weights.unlink(missing_ok=True)
    weights.symlink_to((given / "model.safetensors").resolve())
    return copy


def _train_share(settings: Settings) -> float:
    """Return the share of rows to train on; the trainer validates on the rest."""
    counts = []
    for name in ("training.jsonl", "validation.jsonl"):
        path = settings.places.rows / name
        with suppress(FileNotFoundError), path.open("rb") as stream:
            counts.append(sum(1 for _ in stream))
    if len(counts) > 1 and all(counts):
        return round(counts[0] / sum(counts), 4)
    return _TRAIN_SHARE


def _environment(settings: Settings) -> dict[str, str]:
    # Python buffers output to a file by default.
    return {**programs_environment(settings), "PYTHONUNBUFFERED": "1"}


def _lines(stream: IO[bytes], *, ended: bool) -> Iterator[str]:
    """Yield the complete lines that were written since the last call, and the last incomplete one at the end."""
    while True:
        start = stream.tell()
        line = stream.readline(2**16)
        if not line:
            return
        if not line.endswith(b"\n") and len(line) < 2**16 and not ended:
            stream.seek(start)
            return
        yield line.decode("utf-8", "replace").rstrip()


def _epochs(checkpoints: Path) -> list[Path]:
    found = [each for each in checkpoints.iterdir() if each.name.isdecimal() and not each.is_symlink()]
    return sorted(found, key=lambda each: int(each.name))


def _drop_incomplete(checkpoints: Path) -> None:
    """Delete incomplete checkpoints of a killed trainer, because a retry would continue from them and fail."""
    for each in _epochs(checkpoints):
        if not _is_complete(each):
            shutil.rmtree(each)
    shutil.rmtree(checkpoints / "interrupted", ignore_errors=True)


def _drop_old(checkpoints: Path) -> None:
    """Delete complete checkpoints except the newest and the best: optimizer states are large."""
    # The newest checkpoint may be incomplete while the trainer writes it.
    best, complete = best_checkpoint(checkpoints), [each for each in _epochs(checkpoints) if _is_complete(each)]
    for each in complete[:-1]:
        if each != best:
            shutil.rmtree(each, ignore_errors=True)


def _is_complete(checkpoint: Path) -> bool:
    return all((checkpoint / name).is_file() for name in _CHECKPOINT_FILES)


def _drop_all(checkpoints: Path) -> None:
    """Delete all checkpoints of a training that diverged, so that a retry does not continue from them."""
    shutil.rmtree(checkpoints, ignore_errors=True)


def best_checkpoint(checkpoints: Path) -> Path | None:
    """Return the checkpoint with the lowest validation loss, or the newest one without validation."""
    epochs = _epochs(checkpoints)
    with suppress(OSError):
        named = checkpoints / (checkpoints / _BEST).readlink()
        if named in epochs:
            return named
    return epochs[-1] if epochs else None


def _validation(checkpoint: Path) -> dict[str, float]:
    """Return the losses and accuracies that the trainer measured on its validation rows."""
    try:
        found = json.loads((checkpoint / "val_metrics.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    given = found.items() if isinstance(found, dict) else ()
    figures = {name: value for name, value in given if _FIGURE.fullmatch(name) and type(value) in (int, float)}
    return dict(sorted(figures.items())[:_MOST_FIGURES])
