"""What an engine's log says of settings that it changed, as its /metrics tells of it.

The configuration is the one that pods have; a process of its own takes vLLM's place, for it configures all logging.
"""

import ast
import json
import os
import subprocess
import sys
from enum import Enum
from pathlib import Path

import pytest

from specdecode_operator.vllm import settings_watch
from specdecode_operator.vllm.engine_metrics import read_metrics
from specdecode_operator.vllm.logging_config import CHANGED_SETTINGS, WATCH, logging_config, without_comments
from specdecode_operator.vllm.profiles import find_profile
from tests.unit.vllm.test_engine_metrics import SCRAPE

ENGINE = """
import json, logging, logging.config, sys
config = json.loads(sys.argv[1])
del config["formatters"]["console"]["class"]  # vLLM's own
for _ in range(int(sys.argv[2])):
    logging.config.dictConfig(config)
class Config:
    def __init__(self, **fields):
        self.__dict__.update(fields)
for name, template, arguments in json.loads(sys.argv[3]):
    given = [Config(speculative_config=Config(**each)) if isinstance(each, dict) else each for each in arguments]
    level = logging.INFO if template.startswith("Initializing") else logging.WARNING
    logging.getLogger(name).log(level, template, *given)
from prometheus_client import CollectorRegistry, REGISTRY, generate_latest, multiprocess
registry = REGISTRY
if len(sys.argv) > 4:  # as vllm/v1/metrics/prometheus.py does for several API servers
    multiprocess.MultiProcessCollector(registry := CollectorRegistry())
print(generate_latest(registry).decode())
"""
RANKS = (
    "vllm.config.vllm",
    "Dynamic speculative decoding is not supported with data parallelism because of %d.",
    [3],
)
EAGER = ("vllm.v1.worker", "%s draft attention (%s) does not support full CUDA graphs; eagerly.", ["DFlash", "X"])
CORE = "vllm.v1.engine.core"
STARTS = "Initializing a V1 LLM engine (v%s) with config: %s"


SOURCE = Path(settings_watch.__file__).read_text()


def is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def code(source: str) -> str:
    """Return the statements of a module without docstrings."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        for body in (each for _, each in ast.iter_fields(node) if isinstance(each, list)):
            body[:] = [
                each for each in body if not (isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant))
            ]
    return ast.dump(tree)


def test_pods_get_the_code_without_comments() -> None:
    assert code(WATCH) == code(SOURCE)
    assert '"""' not in WATCH
    assert [line for line in WATCH.splitlines() if line.lstrip().startswith("#")] == WATCH.splitlines()[:1]


def test_engines_do_not_restart_after_a_change_of_comments() -> None:
    edited = SOURCE.replace('"""Reports settings', '"""Report all settings').replace("# Another rank", "\n    # A rank")
    assert edited.count("Report all settings") == edited.count("# A rank") == 1
    assert without_comments(edited) == without_comments(SOURCE)
    assert without_comments(SOURCE.replace("10**6", "10**7")) != without_comments(SOURCE)


def page(
    folder: Path, *records: object, level: str = "INFO", times: int = 1, shared: Path | None = None, full: bool = False
) -> str:
    """Return what a process serves at /metrics that has logged these records, on a disk that may be full."""
    script = folder / "settings_watch.py"
    script.write_text(WATCH)
    config = logging_config(level, str(folder / "termination-log"), str(script), str(folder / "noted"))
    given = [config, str(times), json.dumps(records)]
    more, variables = (["shared"], {"PROMETHEUS_MULTIPROC_DIR": str(shared)}) if shared else ([], {})
    command = [sys.executable, "-c", ENGINE, *given, *more]
    limit = ["prlimit", "--fsize=0"] if full else []
    environment = os.environ | variables
    # An engine's first process leads its group, in a pod as process 1.
    done = subprocess.run(
        [*limit, *command], env=environment, capture_output=True, text=True, check=True, timeout=60, process_group=0
    )
    assert "Error" not in done.stderr
    return done.stdout[done.stdout.index("# HELP") :]


def changed(text: str) -> frozenset[str] | None:
    return read_metrics(SCRAPE + text, find_profile("0.32")).changed_settings


def test_logged_change_is_in_metrics_by_name_only(tmp_path: Path) -> None:
    said = page(tmp_path, RANKS)
    assert changed(said) == {"schedule_with_data_parallel"}
    assert "Dynamic" not in said


def test_unchanged_engine_reports_no_changes(tmp_path: Path) -> None:
    harmless = ("vllm.config", "Using max model len %d", [1024])
    assert changed(page(tmp_path, harmless)) == frozenset()


def test_changes_logged_by_other_processes_are_reported(tmp_path: Path) -> None:
    page(tmp_path, EAGER)  # a worker, which answers nobody
    assert changed(page(tmp_path, RANKS)) == {"draft_graphs", "schedule_with_data_parallel"}


def test_every_api_server_reports_changes_of_all_processes(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    page(tmp_path, RANKS)  # the process that starts the others
    page(tmp_path, EAGER, shared=shared)
    said = page(tmp_path, shared=shared)
    assert changed(said) == {"draft_graphs", "schedule_with_data_parallel"}
    assert said.count("max_model_len") == 1
    assert said.count(" 1.0\n") == 2, "each is 1, however many processes tell of it"


def test_request_text_is_not_read_as_a_change(tmp_path: Path) -> None:
    quoted = ("vllm.entrypoints", "Received request %s", [RANKS[1]])
    assert changed(page(tmp_path, quoted)) == frozenset()


def test_repeated_logging_setup_still_reports_changes(tmp_path: Path) -> None:
    assert changed(page(tmp_path, RANKS, times=2)) == {"schedule_with_data_parallel"}


@pytest.mark.parametrize("level", ["ERROR", "CRITICAL"])
def test_changes_are_unknown_if_warnings_are_not_logged(tmp_path: Path, level: str) -> None:
    assert changed(page(tmp_path, level=level)) is None


def test_changes_are_unknown_without_the_log_handler() -> None:
    assert read_metrics(SCRAPE, find_profile("0.32")).changed_settings is None


def test_unknown_change_names_are_dropped() -> None:
    lines = [f'{settings_watch.METRIC}{{change="{name}"}} 1.0' for name in ("<script>", "max_model_len")]
    assert changed("\n".join(lines) + "\n") == {"max_model_len"}


def test_changes_are_unknown_if_the_notes_file_is_not_writable(tmp_path: Path) -> None:
    (tmp_path / "noted").mkdir()
    assert changed(page(tmp_path, RANKS)) is None


@pytest.mark.parametrize("make", ["pipe", "link"])
def test_pipe_or_symlink_as_notes_file_is_not_used(tmp_path: Path, make: str) -> None:
    noted, other = tmp_path / "noted", tmp_path / "other"
    other.touch()
    if make == "pipe":
        os.mkfifo(noted)
    else:
        noted.symlink_to(other)
    assert changed(page(tmp_path, RANKS)) is None
    assert not other.read_text()


def test_changes_are_unknown_after_a_full_disk(tmp_path: Path) -> None:
    assert changed(page(tmp_path)) == frozenset()
    page(tmp_path, RANKS, full=True)  # a worker, which could not note it
    assert changed(page(tmp_path)) is None


@pytest.mark.parametrize(
    "content",
    [
        b"\0" * 32,
        b"draft_gra",
        b"max_model_len\n\xff\xfe\n",
        # What is read of it ends with a whole line.
        b"draft_graphs_too\n" * 400,
        b"two words\n",
    ],
    ids=["zeros", "torn", "no text", "too much", "no note"],
)
def test_changes_are_unknown_with_a_corrupt_notes_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "noted").write_bytes(content)
    assert changed(page(tmp_path, RANKS)) is None


def test_every_change_name_is_an_identifier(tmp_path: Path) -> None:
    assert all(name.isidentifier() for name in CHANGED_SETTINGS)


def speculates(text: str) -> dict[str, str]:
    return dict(read_metrics(SCRAPE + text, find_profile("0.32")).speculation_settings)


def starting(**speculative_config: object) -> tuple[str, str, list[object]]:
    return (CORE, STARTS, ["0.33.0", speculative_config])


def test_speculative_config_of_the_core_is_in_metrics(tmp_path: Path) -> None:
    core = starting(
        method="eagle3",
        num_speculative_tokens=5,
        enable_adaptive_verification=True,
        num_speculative_tokens_per_batch_size=[[1, 4, 5]],
        draft_lm_head_quantization=None,
    )
    page(tmp_path, core)  # the core, which answers nobody
    said = page(tmp_path)
    assert speculates(said) == {
        "method": "eagle3",
        "num_speculative_tokens": "5",
        "enable_adaptive_verification": "True",
        "num_speculative_tokens_per_batch_size": "set",
        "draft_lm_head_quantization": "None",
    }
    assert changed(said) == frozenset()


def test_enum_setting_is_reported_by_its_value() -> None:
    method = Enum("method", {"EAGLE": "eagle"}, type=str)
    assert settings_watch.word(method["EAGLE"]) == "eagle"


def test_free_text_settings_are_not_exported(tmp_path: Path) -> None:
    said = page(tmp_path, starting(model="/models/secret", method="a b", quantization="/models/secret"))
    assert "secret" not in said
    assert speculates(said) == {"method": "set", "quantization": "set"}


def test_every_api_server_reports_the_speculation_settings(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    page(tmp_path, starting(quantization="fp8"))  # noted before there were several
    page(tmp_path, starting(method="eagle"), shared=shared)
    said = page(tmp_path, shared=shared)
    assert speculates(said) == {"method": "eagle", "quantization": "fp8"}
    assert said.count('value="eagle"') == said.count('value="fp8"') == 1


def test_equal_settings_of_ranks_are_noted_once(tmp_path: Path) -> None:
    for _ in range(3):
        page(tmp_path, starting(method="eagle"))
    assert (tmp_path / "noted").read_text() == "method=eagle\n"


@pytest.mark.parametrize(
    "record",
    [
        (CORE, STARTS, ["0.33.0", "config"]),
        (CORE, STARTS, ["0.33.0", {}]),
        ("vllm.entrypoints", "Received %s", [STARTS]),
    ],
    ids=["another configuration", "nothing of it", "a request's words"],
)
def test_unknown_startup_records_give_no_speculation_settings(
    tmp_path: Path, record: tuple[str, str, list[object]]
) -> None:
    assert speculates(page(tmp_path, record)) == {}


def test_speculation_settings_are_unknown_at_log_level_warning(tmp_path: Path) -> None:
    assert speculates(page(tmp_path, starting(method="eagle"), level="WARNING")) == {}


def test_speculation_settings_of_a_hostile_page_are_bounded() -> None:
    def line(key: str, value: str) -> str:
        return f'{settings_watch.SPECULATION}{{key="{key}",value="{value}"}} 1.0\n'

    words = [f"w{number:03}" for number in range(100)]
    untrue = line("method", "eagle").replace(" 1.0", " 0.0")
    hostile = [
        line("model", "x"),
        line("method", "<script>"),
        line("method", "ngram <b>"),
        untrue,
        *(line("quantization", word) for word in words),
    ]
    assert speculates("".join(hostile)) == {"quantization": "w000 or w001 or w002"}


RUNNER = "vllm.v1.worker.gpu.model_runner"
LOADED = (RUNNER, "Model loading took %s GiB memory and %.6f seconds", ["15.8", 15.249416])
CAPTURED = (RUNNER, "Graph capturing finished in %.0f secs, took %.2f GiB", [6.4, 0.88])
INITIALIZED = (
    CORE,
    "init engine (profile, create kv cache, warmup model) took %.2f s (compilation: %.2f s)",
    [64.5, 33.04],
)
SERVES = ("vllm.entrypoints", "Starting vLLM server on %s", ["http://0.0.0.0:8000"])


def times(text: str) -> dict[str, float]:
    return dict(read_metrics(SCRAPE + text, find_profile("0.32")).startup_seconds)


def test_times_of_the_start_are_in_metrics_by_phase(tmp_path: Path) -> None:
    page(tmp_path, LOADED, CAPTURED)  # a worker, which answers nobody
    page(tmp_path, INITIALIZED)
    said = page(tmp_path)
    assert times(said) == {"load": 15.2, "graphs": 6.4, "init": 64.5, "compile": 33.0}
    assert changed(said) == frozenset()
    assert speculates(said) == {}


def test_time_until_the_engine_serves_counts_from_its_first_process(tmp_path: Path) -> None:
    (seconds,) = times(page(tmp_path, SERVES)).values()
    assert 0 <= seconds < 24 * 60 * 60


def test_time_of_the_slowest_rank_is_reported(tmp_path: Path) -> None:
    for seconds in (15.2, 20.0, 7.5):
        page(tmp_path, (RUNNER, LOADED[1], ["15.8", seconds]))
    assert times(page(tmp_path)) == {"load": 20.0}
    assert (tmp_path / "noted").read_text() == "startup_load=15.2\nstartup_load=20.0\n"


def test_every_api_server_reports_the_longest_time(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    page(tmp_path, LOADED)
    page(tmp_path, (RUNNER, LOADED[1], ["15.8", 150.0]), shared=shared)
    said = page(tmp_path, INITIALIZED, shared=shared)
    assert times(said) == {"load": 150.0, "init": 64.5, "compile": 33.0}


@pytest.mark.parametrize("seconds", [-1.0, 1e300, float("nan"), float("inf")])
def test_impossible_time_is_not_noted(tmp_path: Path, seconds: float) -> None:
    said = page(tmp_path, (RUNNER, LOADED[1], ["15.8", seconds]), RANKS)
    assert times(said) == {}
    assert changed(said) == {"schedule_with_data_parallel"}


def test_record_without_a_number_is_not_noted(tmp_path: Path) -> None:
    template = LOADED[1].replace("%.6f", "%s")
    pattern = LOADED[1].replace("%.6f", "%.6s")
    for changed_template, arguments in ((template, ["15.8", "slow"]), (pattern, ["15.8", "slow"])):
        assert times(page(tmp_path, (RUNNER, changed_template, arguments))) == {}


def test_times_of_a_hostile_page_are_bounded() -> None:
    def line(phase: str, value: str) -> str:
        return f'{settings_watch.TIMES}{{phase="{phase}"}} {value}\n'

    hostile = [
        line("<script>", "1.0"),
        line("load", "NaN"),
        line("graphs", "-3"),
        line("init", "1e300"),
        line("compile", "+Inf"),
    ]
    assert times("".join(hostile)) == {}
    assert times("".join([*hostile, line("load", "2.5")])) == {"load": 2.5}
