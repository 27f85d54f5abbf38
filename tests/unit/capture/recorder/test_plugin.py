"""Start of the recorder."""

import ast
import importlib.metadata
import json
import logging
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from specdecode_operator.capture.recorder import hooks
from specdecode_operator.capture.recorder.segment_format import Settings
from specdecode_operator.capture.recorder.vllm_internals import start_id
from specdecode_operator.vllm.plugin_bundle import RECORDER
from tests.support.engine_standins import ApiServer, EngineCoreOutputs, engine_classes, last_chunk
from tests.support.waiting import eventually
from tests.unit.capture.conftest import HEADER


@pytest.fixture
def classes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """An engine in whose process nothing is recorded yet."""
    found = engine_classes()
    monkeypatch.setenv("SPECDECODE_RECORD_DIR", str(tmp_path))
    monkeypatch.setattr(hooks, "_first", threading.Lock())
    monkeypatch.setattr(hooks, "find_classes", lambda: found)
    monkeypatch.setattr(hooks, "header", lambda *_: HEADER)
    return found


def segment_lines(folder: Path) -> list[Any]:
    (path,) = folder.glob("segment-*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def is_hooked(classes: Any) -> bool:
    return hasattr(classes.output_processor.add_request, "__wrapped__")


def test_reserve_file_is_removed_at_close(classes: Any, tmp_path: Path) -> None:
    hooks.start(None, [0])
    assert len(list(tmp_path.glob("*.reserve"))) == 1
    (tmp_path / "close").touch()
    eventually(lambda: not is_hooked(classes), "closed")
    assert [path.suffix for path in sorted(tmp_path.iterdir())] == ["", ".jsonl"]


async def test_recorder_records_until_close_file_appears(classes: Any, tmp_path: Path) -> None:
    hooks.start(None, [0])
    server = ApiServer(classes)
    server.add("a")
    await server.step(last_chunk("a"))
    eventually(lambda: len(segment_lines(tmp_path)) == 3, "header, step and request are there while it records")
    (tmp_path / "close").touch()
    eventually(lambda: segment_lines(tmp_path)[-1]["k"] == "closed", "closed")
    eventually(lambda: not is_hooked(classes), "the engine has its own methods again")
    closed = segment_lines(tmp_path)[-1]
    assert (closed["reason"], closed["requests"], closed["steps"]) == ("ordered", 1, 1)


def test_start_without_record_folder_does_nothing(
    classes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SPECDECODE_RECORD_DIR")
    threads = threading.active_count()
    hooks.start(None, [0])
    assert threading.active_count() == threads
    assert not is_hooked(classes)
    assert list(tmp_path.iterdir()) == []


def test_second_start_in_a_process_is_ignored(classes: Any, tmp_path: Path) -> None:
    hooks.start(None, [0])
    hooks.start(None, [1])
    assert len(list(tmp_path.glob("segment-*.jsonl"))) == 1
    assert not hasattr(classes.output_processor.add_request.__wrapped__, "__wrapped__")
    (tmp_path / "close").touch()
    eventually(lambda: not is_hooked(classes), "closed")


def test_unknown_engine_is_not_hooked(
    classes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hooks, "find_classes", lambda: replace(classes, event_type=()))
    with caplog.at_level(logging.WARNING):
        hooks.start(None, [0])
    first, off, closed = segment_lines(tmp_path)
    assert first["k"] == "header"
    assert off == {"k": "off", "reason": "EngineCoreEventType is {}"}
    assert (closed["reason"], closed["dropped"]) == ("unknown_shape", 0)
    assert not is_hooked(classes)
    assert "EngineCoreEventType is {}" in caplog.text


def test_engine_with_uninspectable_classes_is_not_hooked(
    classes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hooks, "find_classes", lambda: replace(classes, messages={}))
    hooks.start(None, [0])
    assert segment_lines(tmp_path)[1]["reason"] == "KeyError: 'EngineCoreOutputs'"
    assert not is_hooked(classes)


async def test_untested_version_with_known_classes_is_recorded(
    classes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first = msgspec.structs.replace(HEADER, vllm="0.99.0", recorder_tried=False)
    monkeypatch.setattr(hooks, "header", lambda *_: first)
    with caplog.at_level(logging.WARNING):
        hooks.start(None, [0])
    server = ApiServer(classes)
    server.add("a")
    await server.step(last_chunk("a"))
    (tmp_path / "close").touch()
    eventually(lambda: segment_lines(tmp_path)[-1]["k"] == "closed", "closed")
    written, *_, closed = segment_lines(tmp_path)
    assert (written["vllm"], written["recorder_tried"]) == ("0.99.0", False)
    assert (closed["reason"], closed["requests"]) == ("ordered", 1)
    assert "not tested with vLLM 0.99.0" in caplog.text


def test_engine_with_missing_class_is_not_hooked(classes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Any:
        raise ImportError("cannot import name 'EngineCoreEvent'")

    monkeypatch.setattr(hooks, "find_classes", fail)
    hooks.start(None, [0])
    assert segment_lines(tmp_path)[1]["reason"] == "cannot import name 'EngineCoreEvent'"
    assert not is_hooked(classes)


def test_unwritable_folder_leaves_engine_unhooked(
    classes: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SPECDECODE_RECORD_DIR", "/proc/nowhere")
    hooks.start(None, [0])
    assert not is_hooked(classes)
    assert "could not start" in caplog.text


async def test_failing_writer_closes_segment_and_removes_hooks(
    classes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Any) -> None:
        raise RuntimeError("bug")

    monkeypatch.setattr(hooks.Writer, "turn", fail)
    hooks.start(None, [0])
    eventually(lambda: not is_hooked(classes), "hooks are removed")
    *_, off, closed = segment_lines(tmp_path)
    assert (off["reason"], closed["reason"]) == ("RuntimeError: bug", "write_error")
    server = ApiServer(classes)
    server.add("a")
    await server.deliver(EngineCoreOutputs(0, [last_chunk("a")], None, 1.0))


PROCESS = """
import asyncio, sys
from tests.support.engine_standins import ApiServer, engine_classes, last_chunk, chunk
from tests.unit.capture.conftest import HEADER
from specdecode_operator.capture.recorder import hooks

classes = engine_classes()
hooks.find_classes = lambda: classes
hooks.header = lambda *_: HEADER
hooks.start(None, [0])

async def serve():
    server = ApiServer(classes)
    server.add("a")
    server.add("b")
    await server.step(chunk("a"), last_chunk("b"))

asyncio.run(serve())
"""


def test_process_end_closes_segment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDECODE_RECORD_DIR", str(tmp_path))
    repository = Path(__file__).parents[4]
    subprocess.run([sys.executable, "-c", PROCESS], check=True, cwd=repository, timeout=300)
    lines = segment_lines(tmp_path)
    assert {line["id"]: line["ended_by"] for line in lines if line["k"] == "request"} == {
        "a": "unfinished",
        "b": "engine",
    }
    assert (lines[-1]["reason"], lines[-1]["unfinished"], lines[-1]["dropped"]) == ("exit", 1, 0)


@pytest.mark.parametrize(
    ("variables", "settings"),
    [
        ({}, None),
        ({"SPECDECODE_RECORD_DIR": ""}, None),
        ({"SPECDECODE_RECORD_DIR": "/c"}, Settings(Path("/c"), token_ids=False, steps=True)),
        (
            {"SPECDECODE_RECORD_DIR": "/c", "SPECDECODE_RECORD_TOKEN_IDS": "1", "SPECDECODE_RECORD_STEPS": "0"},
            Settings(Path("/c"), token_ids=True, steps=False),
        ),
    ],
)
def test_settings_come_from_environment(variables: dict[str, str], settings: Settings | None) -> None:
    assert Settings.from_environment(variables) == settings


def test_header_has_engine_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    from specdecode_operator.capture.recorder import vllm_internals

    platform = SimpleNamespace(
        is_cpu=lambda: False, get_device_name=lambda: "NVIDIA H200", get_device_uuid=lambda rank: f"GPU-{rank}"
    )
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.31.0"))
    monkeypatch.setitem(sys.modules, "vllm.platforms", SimpleNamespace(current_platform=platform))
    config = SimpleNamespace(
        model_config=SimpleNamespace(model="org/model", max_model_len=4096, enforce_eager=False),
        cache_config=SimpleNamespace(block_size=16, gpu_memory_utilization=0.9, enable_prefix_caching=True),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=2,
            pipeline_parallel_size=1,
            data_parallel_size=4,
            _api_process_rank=3,
            _api_process_count=4,
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=64, max_num_batched_tokens=8192, async_scheduling=True),
        speculative_config=SimpleNamespace(
            method="eagle3", num_speculative_tokens=3, model="org/head", parallel_drafting=True
        ),
    )
    header = vllm_internals.header(config, [0, 1], "b007", Settings(Path("/c"), token_ids=True))
    assert header.gpu_uuids == [f"GPU-{rank}" for rank in range(2 * 4)]
    assert (header.vllm, header.client_index, header.client_count, header.engines) == ("0.31.0", 3, 4, [0, 1])
    assert (header.model, header.gpu, header.token_ids, header.steps) == ("org/model", "NVIDIA H200", True, True)
    assert msgspec.to_builtins(header.config) == {
        "max_num_seqs": 64,
        "block_size": 16,
        "max_model_len": 4096,
        "max_num_batched_tokens": 8192,
        "tensor_parallel": 2,
        "pipeline_parallel": 1,
        "data_parallel": 4,
        "gpu_memory_utilization": 0.9,
        "enforce_eager": False,
        "enable_prefix_caching": True,
        "async_scheduling": True,
        "speculative": {
            "method": "eagle3",
            "num_speculative_tokens": 3,
            "model": "org/head",
            "parallel_drafting": True,
        },
    }


@pytest.mark.parametrize("refusal", [NotImplementedError, ValueError])
def test_header_has_no_gpu_if_driver_refuses(monkeypatch: pytest.MonkeyPatch, refusal: type[Exception]) -> None:
    from specdecode_operator.capture.recorder import vllm_internals

    def refuse(*_: object) -> str:
        raise refusal

    platform = SimpleNamespace(is_cpu=lambda: False, get_device_name=refuse, get_device_uuid=refuse)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.31.0"))
    monkeypatch.setitem(sys.modules, "vllm.platforms", SimpleNamespace(current_platform=platform))
    header = vllm_internals.header(SimpleNamespace(), [0], "b007", Settings(Path("/c")))
    assert (header.gpu, header.gpu_uuids) == (None, [])


TWO_SERVERS = """
import multiprocessing
import sys
from specdecode_operator.capture.recorder.vllm_internals import start_id

def serve(told):
    told.put(start_id(2))

if __name__ == "__main__":
    spawning = multiprocessing.get_context("spawn")
    told = spawning.Queue()
    servers = [spawning.Process(target=serve, args=(told,)) for _ in range(2)]
    for server in servers:
        server.start()
    print(told.get(), told.get(), start_id(1))
    for server in servers:
        server.join()
"""


def test_api_servers_of_one_start_share_start_id(tmp_path: Path) -> None:
    (tmp_path / "launch.py").write_text(TWO_SERVERS)
    command = [sys.executable, str(tmp_path / "launch.py")]
    starts = [
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout.split()
        for _ in range(2)
    ]
    (first,), (second,) = map(set, starts)
    assert first != second


def test_start_id_distinguishes_processes_with_equal_pid(tmp_path: Path) -> None:
    """As in a container that was started anew; the name of a process may hold anything."""
    (tmp_path / str(os.getpid())).mkdir()
    stat = tmp_path / str(os.getpid()) / "stat"
    found = []
    for started in (100, 900):
        stat.write_text(f"7 (a) b (c) S 1 {' '.join('0' * 17)} {started} 0 0\n")
        found.append(start_id(1, tmp_path))
    assert found == [f"{os.getpid()}-100", f"{os.getpid()}-900"]
    assert start_id(1, tmp_path / "absent") is None
    stat.write_text("7 (a)")
    assert start_id(1, tmp_path) is None


def test_bundle_is_a_distribution_with_one_plugin(tmp_path: Path) -> None:
    written = RECORDER.write(tmp_path)
    assert all(path.is_file() and path.stat().st_mode & 0o444 == 0o444 for path in written)
    (distribution,) = importlib.metadata.distributions(path=[str(tmp_path)])
    (plugin,) = distribution.entry_points
    assert (plugin.group, plugin.value) == ("vllm.stat_logger_plugins", "specdecode_recorder.plugin:RecorderPlugin")
    assert distribution.version in next(path.parent.name for path in written if path.name == "METADATA")
    assert RECORDER.write(tmp_path) == written


def test_bundle_imports_nothing_of_the_operator(tmp_path: Path) -> None:
    modules = [path for path in RECORDER.write(tmp_path) if path.suffix == ".py"]
    for module in modules:
        for node in ast.walk(ast.parse(module.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                top = name.partition(".")[0]
                known = {"msgspec", "vllm", "prometheus_client", "safetensors", "torch"} | sys.stdlib_module_names
                assert top in known, f"{module.name}: {name}"
    everything = "import " + ", ".join(
        f"specdecode_recorder.{module.stem}" for module in modules if module.stem != "plugin"
    )
    subprocess.run([sys.executable, "-c", everything], check=True, cwd=tmp_path, timeout=300)
