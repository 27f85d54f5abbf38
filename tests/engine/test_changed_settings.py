"""Lines in which the real vLLM says that it changed a setting, as far as the condition that people see."""

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specdecode_operator.deployment.observed.observation import Observation
from specdecode_operator.vllm.engine_metrics import EngineReading, read_metrics
from specdecode_operator.vllm.logging_config import (
    CHANGED_SETTINGS,
    LOGGING_CONFIG_VARIABLE,
    STARTUP_TIMES,
    WATCH,
    logging_config,
)
from specdecode_operator.vllm.profiles import find_profile
from specdecode_operator.vllm.settings_watch import CORE_STARTS, LABEL, METRIC
from specdecode_operator.vllm.speculative_config import SPOKEN_KEYS
from tests.engine.engine_process import HERE, Engine
from tests.engine.engine_versions import SERVED, VERSIONS, find_packages
from tests.engine.recorder_server import Server, serving
from tests.support import plain_http
from tests.support.decisions import decide
from tests.support.objects import deployment, parent, tiny_cpu

SINCE = {"schedule_on_v1": "0.33", "max_model_len": "0.33", "max_num_seqs": "0.33"}
"""What not every known version changes."""

TIMED = (
    *("v1/engine/core.py", "v1/worker/gpu_model_runner.py", "v1/worker/gpu/model_runner.py"),
    *("entrypoints/openai/api_server.py", "entrypoints/launchers/api_server/entry.py"),
)
"""Files that log times of the start, as far as a version has them."""

SOURCES = (
    "config/vllm.py",
    "config/compilation.py",
    "v1/worker/gpu/spec_decode/dflash/speculator.py",
)


def test_settings_changed_by_vllm_are_reported(small_cache: Server) -> None:
    small_cache.wait_until_healthy()
    said = small_cache.log.read_text()
    assert "Async scheduling not supported with ngram-based speculative decoding and will be disabled." in said
    changed = changed_by(small_cache)
    assert changed == {"async_scheduling"}
    ngram = tiny_cpu(speculation={"method": "ngram", "numSpeculativeTokens": 3})
    assert told(changed, ngram) == ("True", "AsAsked"), "the plan counts with it"
    assert told(changed, tiny_cpu()) == ("False", "NotAsynchronous")


def test_speculation_settings_in_force_are_reported(small_cache: Server) -> None:
    small_cache.wait_until_healthy()
    said = read(small_cache).speculation_settings
    assert (said["method"], said["num_speculative_tokens"]) == ("ngram", "4")
    # Every key of this version, with what vLLM puts where nothing was asked for.
    assert said.keys() == set(SPOKEN_KEYS) & find_profile(SERVED).speculative_keys
    assert said["num_speculative_tokens_per_batch_size"] == "None"
    assert said["enable_adaptive_verification"] == "False"


@pytest.mark.long
def test_each_api_server_reports_changed_settings(engine: Engine, models: Path, tmp_path: Path) -> None:
    with serving(engine, models, tmp_path, "--api-server-count=2") as server:
        # Of vLLM's own gauges some are not there before the first request.
        pages = [plain_http.get(f"{server.url}/metrics", timeout=120).text for _ in range(8)]
    said = {line for page in pages for line in page.splitlines() if line.startswith(METRIC) and line.endswith(" 1.0")}
    assert said == {f'{METRIC}{{{LABEL}="async_scheduling"}} 1.0'}
    assert all(page.count(f"{METRIC}{{") == len(CHANGED_SETTINGS) for page in pages)


@pytest.mark.long
def test_dropped_schedule_is_reported_with_data_parallelism(engine: Engine, models: Path, tmp_path: Path) -> None:
    ranges = {"num_speculative_tokens_per_batch_size": [[1, 4, 3], [5, 16, 1]]}
    config = {"method": "ngram", "num_speculative_tokens": 3, **ranges}
    argv = [str(models / "target"), "--data-parallel-size=2", f"--speculative-config={json.dumps(config)}"]
    script, asked, logging = tmp_path / "watch.py", tmp_path / "asked.json", tmp_path / "logging.json"
    script.write_text(WATCH)
    asked.write_text(json.dumps([argv]))
    logging.write_text(logging_config("INFO", str(tmp_path / "last"), str(script), str(tmp_path / "noted")))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(LOGGING_CONFIG_VARIABLE, str(logging))
        printed = engine.run(str(HERE / "changed_settings_oracle.py"), str(asked))
    assert "Dynamic speculative decoding is not supported with data parallelism" in printed
    page = printed.partition("PAGE\n")[2]
    assert 'specdecode:engine_changed_setting{change="schedule_with_data_parallel"} 1.0' in page
    noted = frozenset((tmp_path / "noted").read_text().split())
    assert told(noted, tiny_cpu()) == ("False", "ScheduleDropped")


@pytest.mark.parametrize("version", VERSIONS)
def test_changed_setting_patterns_match_the_log_messages_of_each_version(engine: Engine, version: str) -> None:
    packages = engine.packages if version == SERVED else find_packages(version)
    if packages is None:
        pytest.skip(f"vLLM {version} is not installed here: ./just engine-versions")
    templates = [text for name in SOURCES for text in logged(packages / "vllm" / name)]
    found = {name for name, pattern in CHANGED_SETTINGS.items() if any(re.search(pattern, each) for each in templates)}
    assert found == {name for name in CHANGED_SETTINGS if float(version) >= float(SINCE.get(name, "0"))}
    core = ast.parse((packages / "vllm/v1/engine/core.py").read_text())
    calls = [node.args for node in ast.walk(core) if isinstance(node, ast.Call) and node.args]
    (begins,) = (given for given in calls if CORE_STARTS.search(str(getattr(given[0], "value", ""))))
    assert "vllm_config" in map(ast.unparse, begins), "the configuration is an argument, and not in the words"


SECONDS = {"load": "time_after_load - time_before_load", "graphs": "elapsed_time", "init": "elapsed"}
"""The argument with each time, as vLLM computes it."""


@pytest.mark.parametrize("version", VERSIONS)
def test_startup_time_patterns_match_the_log_messages_of_each_version(engine: Engine, version: str) -> None:
    packages = engine.packages if version == SERVED else find_packages(version)
    if packages is None:
        pytest.skip(f"vLLM {version} is not installed here: ./just engine-versions")
    found = dict[str, set[str]]()
    for source in TIMED:
        for path in sorted((packages / "vllm").glob(source)):
            for node in ast.walk(ast.parse(path.read_text())):
                if not isinstance(node, ast.Call) or not node.args or not isinstance(node.args[0], ast.Constant):
                    continue
                template, *arguments = node.args
                for phase, (pattern, argument) in STARTUP_TIMES.items():
                    if re.search(pattern, str(template.value)):
                        found.setdefault(phase, set()).add("" if argument is None else ast.unparse(arguments[argument]))
    assert found.pop("compile") <= {"compile_time", "compile_time + encoder_compile_time"}
    assert found == {**{phase: {text} for phase, text in SECONDS.items()}, "engine": {""}}


def test_start_of_the_real_engine_is_timed(small_cache: Server) -> None:
    small_cache.wait_until_healthy()
    seconds = read(small_cache).startup_seconds
    # On CPU, vLLM does not log how long it loads the model, and captures no graphs. A tiny model is ready in 0.00 s.
    assert {"init", "engine"} <= seconds.keys() <= {"init", "compile", "engine"}
    assert 0 <= seconds["init"] < seconds["engine"]


def logged(source: Path) -> Iterator[str]:
    """Every template that a file logs, and every string that it makes one of."""
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            yield "".join(str(each.value) if isinstance(each, ast.Constant) else "X" for each in node.values)


def read(server: Server) -> EngineReading:
    return read_metrics(plain_http.get(f"{server.url}/metrics", timeout=120).text, find_profile(SERVED))


def changed_by(server: Server) -> frozenset[str]:
    changed = read(server).changed_settings
    assert changed is not None
    return changed


def told(changed: frozenset[str], spec: dict[str, Any]) -> tuple[str, str]:
    """Return the condition of a deployment whose engine says that it changed this."""
    reading = EngineReading(None, None, None, None, None, 0, 0, 0, changed)
    seen = Observation(deployment(replicas=1, updated=1, available=1), readings={"tiny-0": reading})
    found = decide(parent(spec), seen)[2]["SettingsInForce"]
    return found.status, found.reason
