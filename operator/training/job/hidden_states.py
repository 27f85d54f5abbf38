"""Write the target's hidden states for all rows: the step `hidden-states`.

vLLM runs on the loopback interface with the target of the deployment and without speculation. Output of vLLM and of
speculators goes to files on the claim that only this user can read, because it may quote rows.
"""

import hashlib
import http.client
import json
import math
import os
import shutil
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .pending_rows import finish_rows
from .processes import run, started, tail, wait
from .settings import FEWEST_LAYERS, Settings, StepError, disk_full, open_private
from .trainer_log import how_it_ended, is_disk_full

SERVED_NAME = "target"
_LAYERS = "target_layers.json"
_STATE_BYTES = 2  # bf16
_CONCURRENCY = 32
_HEALTH_TIMEOUT_S = 5
_SHOWN_EVERY_S = 30
_LARGEST_CONFIG_BYTES = 8 * 2**20
_ROW_FILES = ("training.jsonl", "validation.jsonl")
_OWN_LAYER_IDS = ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids")

CPU_CONNECTOR = {
    "kv_connector": "CpuHiddenStatesConnector",
    "kv_connector_module_path": f"{__name__.rpartition('.')[0]}.cpu_connector",
}
GPU_CONNECTOR = {"kv_connector": "ExampleHiddenStatesConnector"}


def layer_ids(settings: Settings) -> list[int]:
    """Return the layers of the target that the head reads: those of the head to continue from, or three others.

    The trainer's defaults are 2, n/2 and n-3, which are not distinct for a target with fewer than 7 layers.
    """
    layers = settings.target_layers
    if settings.head is not None:
        return _layer_ids_of(Path(settings.head), layers)
    if layers < FEWEST_LAYERS:
        message = f"the target has {layers} layers, and a head needs {FEWEST_LAYERS} or more: use another method"
        raise StepError("TargetTooSmall", message)
    defaults = [2, layers // 2, layers - 3]
    if sorted(set(defaults)) == defaults:
        return defaults
    return [1, layers // 2, layers - 1]


def _layer_ids_of(head: Path, layers: int) -> list[int]:
    config = head_config(head)
    ids = next((config[name] for name in _OWN_LAYER_IDS if name in config), None)
    if (
        not isinstance(ids, list)
        or not ids
        or not all(type(each) is int and 0 <= each < layers for each in ids)
        or len(set(ids)) != len(ids)
    ):
        raise StepError(
            "HeadUnreadable",
            f"config.json of spec.from does not name distinct layers below {layers}: use a head for this target",
        )
    return ids


def head_config(head: Path) -> dict[str, Any]:
    """Return config.json of the head to continue from; it must be in the format of speculators."""
    path = head / "config.json"
    try:
        with path.open("rb") as stream:
            config = json.loads(stream.read(_LARGEST_CONFIG_BYTES))
    except OSError as error:
        raise StepError("HeadUnreadable", f"config.json of spec.from cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise StepError("HeadUnreadable", "config.json of spec.from is invalid JSON") from error
    if not isinstance(config, dict) or "speculators_model_type" not in config:
        message = "config.json of spec.from has no speculators_model_type: convert the head with speculators convert"
        raise StepError("HeadUnreadable", message)
    return config


def read_layer_ids(settings: Settings) -> list[int]:
    """Return the layers whose hidden states were written, without the last one."""
    ids: list[int] = json.loads((settings.places.hidden_states / _LAYERS).read_text(encoding="utf-8"))
    return ids


def write_hidden_states(settings: Settings) -> dict[str, Any]:
    """Run the step; return the counts for the termination message."""
    places, ids = settings.places, layer_ids(settings)
    digest = _digest(settings, ids)
    if _is_complete(settings, digest):
        return {"rows": _count(places.states), "reused": True}
    places.hidden_states.mkdir(mode=0o700, parents=True, exist_ok=True)
    if _digest_before(settings) != digest:
        # Delete hidden states of other rows or layers, from an earlier attempt.
        _empty(places.hidden_states)
        _write_json(places.hidden_states / "begun.json", digest)
    _write_json(places.hidden_states / _LAYERS, ids)
    begun_s = time.monotonic()
    with _engine(settings, ids) as address:
        rows, tokens, cut = _write_data(settings, address)
        _check_room(settings, tokens, len(ids) + 1)
        _prepare(settings)
        _generate(settings, address)
    found = _count(places.states)
    if found != rows:
        message = (
            f"{found} of {rows} rows have hidden states; see {places.logs.relative_to(settings.root)}/generate.log"
        )
        raise StepError("HiddenStatesFailed", message)
    shutil.rmtree(places.hidden_states / "engine", ignore_errors=True)
    _write_json(places.complete, digest)
    _say({"hiddenStates": found, "tokens": tokens, "seconds": round(time.monotonic() - begun_s)})
    return {"rows": found, "tokens": tokens, "cut": cut}


def _digest(settings: Settings, ids: list[int]) -> str:
    """Return a digest of everything that the hidden states depend on."""
    found = hashlib.sha256(json.dumps([ids, settings.command, settings.sequence_length, settings.seed]).encode())
    for name in _ROW_FILES:
        path = settings.places.rows / name
        if path.exists():
            found.update(name.encode())
            with path.open("rb") as stream:
                while chunk := stream.read(2**20):
                    found.update(chunk)
    return found.hexdigest()


def _empty(folder: Path) -> None:
    """Delete the content of a folder, which is the root of a mount."""
    for each in folder.iterdir():
        if each.is_dir() and not each.is_symlink():
            shutil.rmtree(each)
        else:
            each.unlink()


def _is_complete(settings: Settings, digest: str) -> bool:
    places = settings.places
    try:
        return bool(json.loads(places.complete.read_text(encoding="utf-8")) == digest)
    except (OSError, ValueError):
        return False


def _digest_before(settings: Settings) -> Any:
    try:
        return json.loads((settings.places.hidden_states / "begun.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _write_json(path: Path, value: Any) -> None:
    part = path.with_name(f"{path.name}.part")
    with open_private(part) as stream:
        json.dump(value, stream)
    part.replace(path)


def _count(states: Path) -> int:
    return sum(1 for each in states.glob("hs_*.safetensors") if each.is_file()) if states.is_dir() else 0


def engine_command(settings: Settings, ids: list[int], port: int) -> list[str]:
    """Return the engine's command on the loopback interface that writes hidden states of these layers and the last."""
    layers = {"hf_config": {"eagle_aux_hidden_state_layer_ids": [*ids, settings.target_layers]}}
    speculation = {"method": "extract_hidden_states", "num_speculative_tokens": 1, "draft_model_config": layers}
    connector: dict[str, Any] = dict(GPU_CONNECTOR if settings.gpus else CPU_CONNECTOR)
    storage = str(settings.places.hidden_states / "engine")
    transfer = {**connector, "kv_role": "kv_producer", "kv_connector_extra_config": {"shared_storage_path": storage}}
    return [
        *settings.command,
        "--host=127.0.0.1",
        f"--port={port}",
        f"--served-model-name={SERVED_NAME}",
        "--no-enable-prefix-caching",
        f"--speculative-config={json.dumps(speculation)}",
        f"--kv-transfer-config={json.dumps(transfer)}",
    ]


@contextmanager
def _engine(settings: Settings, ids: list[int]) -> Iterator[tuple[str, int]]:
    """Start vLLM, wait until it serves, and stop it afterwards."""
    address = ("127.0.0.1", _free_port())
    log = settings.places.logs / "engine.log"
    until_s = time.monotonic() + settings.start_seconds
    _say({"engine": "starting"})
    with started(engine_command(settings, ids, address[1]), log, programs_environment(settings)) as process:
        shown_s = time.monotonic()
        while not _is_healthy(address):
            if not wait(process):
                message = f"the engine did not start: {how_it_ended(process.returncode, tail(log))}; see {log}"
                raise StepError("HiddenStatesFailed", message)
            if time.monotonic() > until_s:
                message = f"the engine did not serve within {settings.start_seconds} s; see {log}"
                raise StepError("HiddenStatesFailed", message)
            if time.monotonic() > shown_s + _SHOWN_EVERY_S:
                shown_s = time.monotonic()
                _say({"engine": "starting"})
        _say({"engine": "serving"})
        try:
            yield address
        except StepError as error:
            if process.poll() is None:
                raise
            message = f"the engine ended: {how_it_ended(process.returncode, tail(log))}; see {log}"
            raise StepError("DiskFull" if error.reason == "DiskFull" else "HiddenStatesFailed", message) from error


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def _is_healthy(address: tuple[str, int]) -> bool:
    connection = http.client.HTTPConnection(*address, timeout=_HEALTH_TIMEOUT_S)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def programs_environment(settings: Settings) -> Mapping[str, str]:
    """Return the variables of vLLM and speculators: offline, with caches that are deleted with the hidden states."""
    cache = str(settings.places.hidden_states / "cache")
    # The bundle has the modules that vLLM and the trainer import on a CPU. An image may have a PYTHONPATH of its own.
    bundle = sys.path[0] if sys.path[0].endswith(".zip") else str(Path(__file__).parents[1])
    path = os.pathsep.join(each for each in (os.environ.get("PYTHONPATH"), bundle) if each)
    # On a busy CPU, threads that wait for each other make a step up to 50 times as slow.
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "OMP_WAIT_POLICY": "passive"}
    return {
        **({} if settings.gpus else threads),
        "PYTHONPATH": path,
        "HF_HOME": cache,
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TQDM_DISABLE": "1",
        "NO_PROXY": "127.0.0.1,localhost",
        "no_proxy": "127.0.0.1,localhost",
        # Rich wraps lines at the width of the terminal.
        "COLUMNS": "4000",
    }


def _write_data(settings: Settings, address: tuple[str, int]) -> tuple[int, int, int]:
    """Write the rows for speculators, at most as long as a sequence; return numbers of rows, tokens and cut rows."""
    places, rows, tokens, cut = settings.places, 0, 0, 0
    with open_private(places.hidden_states / "data.jsonl") as out:
        for name in _ROW_FILES:
            path = places.rows / name
            if not path.exists():
                continue
            for row in finish_rows(path, f"http://{address[0]}:{address[1]}", SERVED_NAME):
                ids, mask = row["input_ids"], row["loss_mask"]
                cut += len(ids) > settings.sequence_length
                ids, mask = ids[: settings.sequence_length], mask[: settings.sequence_length]
                if not any(mask):
                    continue  # The trainer leaves out rows without an answer.
                out.write(json.dumps({"input_ids": ids, "loss_mask": mask}) + "\n")
                rows, tokens = rows + 1, tokens + len(ids)
    if not rows:
        raise StepError("TooFewRows", "no row has an answer within spec.trainer.sequenceLength: increase it")
    return rows, tokens, cut


def _check_room(settings: Settings, tokens: int, layers: int) -> None:
    needed = tokens * layers * settings.hidden_size * _STATE_BYTES
    existing = (
        sum(each.stat().st_size for each in settings.places.states.glob("hs_*"))
        if _count(settings.places.states)
        else 0
    )
    free = shutil.disk_usage(settings.places.hidden_states).free
    if needed - existing > free:
        message = (
            f"hidden states of {tokens} tokens need {_gib(needed - existing)}, and the volume at {settings.root} has"
            f" {_gib(free)} free: lower spec.maxTokens, or use a larger volume"
        )
        raise StepError("VolumeTooSmall", message)


def _gib(size: int) -> str:
    return f"{math.ceil(size / 2**30 * 10) / 10} GiB"


def _prepare(settings: Settings) -> None:
    """Create the dataset, and delete the output of the program, which contains a sample of the rows."""
    places = settings.places
    if any(places.dataset.glob("*.arrow")):
        return
    shutil.rmtree(places.dataset, ignore_errors=True)
    log = places.logs / "prepare.log"
    command = [
        *("python3", "-m", "speculators", "prepare-data"),
        *("--model", settings.target, "--data", str(places.hidden_states / "data.jsonl")),
        *("--output", str(places.dataset), "--seq-length", str(settings.sequence_length)),
        *("--seed", str(settings.seed), "--num-preprocessing-workers", "1", "--no-skip-token-freq"),
    ]
    try:
        code = run(command, log, programs_environment(settings))
        if code:
            shutil.rmtree(places.dataset, ignore_errors=True)
            raise failed("speculators prepare-data", code, tail(log), settings, "HiddenStatesFailed")
    finally:
        log.unlink(missing_ok=True)


def _generate(settings: Settings, address: tuple[str, int]) -> None:
    places = settings.places
    log = places.logs / "generate.log"
    command = [
        *("python3", "-m", "speculators", "generate-offline-data", "--model", SERVED_NAME),
        *("--preprocessed-data", str(places.dataset), "--output", str(places.states)),
        *("--endpoint", f"http://{address[0]}:{address[1]}/v1"),
        *("--concurrency", str(_CONCURRENCY), "--request-timeout", "600", "--validate-outputs"),
    ]
    with started(command, log, programs_environment(settings)) as process:
        shown_s = time.monotonic()
        while wait(process):
            if time.monotonic() > shown_s + _SHOWN_EVERY_S:
                shown_s = time.monotonic()
                _say({"hiddenStates": _count(places.states)})
    if process.returncode:
        raise failed("speculators generate-offline-data", process.returncode, tail(log), settings, "HiddenStatesFailed")


def failed(program: str, code: int, text: str, settings: Settings, reason: str) -> StepError:
    """Return the failure of a program, without its text."""
    if is_disk_full(text) or shutil.disk_usage(settings.places.hidden_states).free == 0:
        return disk_full(settings.root)
    return StepError(reason, f"{program} failed: {how_it_ended(code, text)}")


def _say(progress: dict[str, Any]) -> None:
    print(json.dumps({"progress": progress}), flush=True)  # noqa: T201  progress in the container's log
