"""Build the engine's logging configuration, and match log lines that report changed settings or times of the start.

The kubelet keeps the last 2048 bytes of a failed container's log, and the API server's traceback is longer. So errors
of the engine core and its workers also go to the termination log, which keeps 4096 bytes. A killed core cannot log:
the API server logs one warning and exits with code 0.

Patterns in `CHANGED_SETTINGS` come from vLLM 0.28 to 0.33, vllm/config/vllm.py unless a comment names another file.
They match the template of a log record, not its arguments, which requests and models can influence.
"""

import ast
import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from specdecode_operator.vllm import settings_watch
from specdecode_operator.vllm.speculative_config import SPOKEN_KEYS

CHANGED_SETTINGS: Final[Mapping[str, str]] = MappingProxyType(
    {
        # From _maybe_disable_dynamic_sd_for_data_parallel.
        "schedule_with_data_parallel": r"^Dynamic speculative decoding is not supported with data parallelism",
        # From _maybe_disable_dynamic_sd_for_v1, as of 0.33.
        "schedule_on_v1": r"^Dynamic speculative decoding is not supported with the '%s' speculative method",
        # From _limit_max_model_len_to_draft, as of 0.33.
        "max_model_len": r"^The draft model's max_model_len \(%d\) is smaller than the target model's",
        # From _set_max_num_scheduled_tokens, as of 0.33.
        "max_num_seqs": r"^The %s draft pass needs %d query tokens per request",
        # From use_v2_model_runner.
        "model_runner": r"^Model Runner V2 does not yet support %s",
        # From __post_init__, up to 0.32 and in 0.33.
        "async_scheduling": r"^Async scheduling (?:not supported with %s-based speculative decoding"
        r"|is not compatible with disable_padded_drafter_batch|is disabled because the V1 model runner does not)",
        # From _maybe_override_dynamic_sd_cudagraph_mode.
        "cudagraph_mode_with_schedule": r"^Dynamic speculative decoding changes the target verification length",
        # vllm/config/compilation.py, resolve_cudagraph_mode_and_sizes: its arguments are in the template
        "cudagraph_mode_with_drafts": r"^CUDAGraphMode\.\w+ is not supported with spec-decode for attention backend",
        # vllm/v1/worker/gpu/spec_decode/dflash/speculator.py, init_cudagraph_manager
        "draft_graphs": r"^%s draft attention \(%s\) does not support full CUDA graphs",
    }
)


STARTUP_TIMES: Final[Mapping[str, tuple[str, int | None]]] = MappingProxyType(
    {
        # v1/worker/gpu_model_runner.py and v1/worker/gpu/model_runner.py: target and draft together
        "load": (r"^Model loading took %s GiB memory and %.6f seconds", 1),
        "graphs": (r"^Graph capturing finished in %.0f secs", 0),
        # v1/engine/core.py: all that follows, up to the warm-up, and torch.compile in it
        "init": (r"^init engine \(profile, create kv cache, warmup model\) took %.2f s", 0),
        "compile": (r"^init engine \(profile, create kv cache, warmup model\) took %.2f s \(compilation: %.2f s", 1),
        # entrypoints: the end of the start
        "engine": (r"^Starting vLLM server on %s", None),
    }
)
"""Log lines with a time of the start, by phase, and which argument is the time in seconds; None for the time since the
container started. From vLLM 0.28 to 0.33."""


LOGGING_CONFIG_VARIABLE: Final = "VLLM_LOGGING_CONFIG_PATH"
LOGGING_LEVEL_VARIABLE: Final = "VLLM_LOGGING_LEVEL"
ENGINE_CONFIG_PATH: Final = "/etc/specdecode"
LOGGING_FILE: Final = "logging.json"
LOGGING_CONFIG_PATH: Final = f"{ENGINE_CONFIG_PATH}/{LOGGING_FILE}"

WATCH_FILE: Final = "settings_watch.py"


def without_comments(source: str) -> str:
    """Return a Python module without docstrings, comments on their own lines and empty lines.

    The module must not contain other strings of several lines.
    """
    lines = source.splitlines(keepends=True)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            last = node.end_lineno or node.lineno
            lines[node.lineno - 1 : last] = [""] * (last - node.lineno + 1)
    return "".join(line for line in lines if line.strip() and not line.lstrip().startswith("#"))


WATCH: Final = f"# {WATCH_FILE} of specdecode-operator, without comments.\n" + without_comments(
    Path(settings_watch.__file__).read_text(encoding="utf-8")
)
"""Content of the file in each pod template. Without comments, so that a change of one does not restart engines."""

_NOTED: Final = "/tmp/specdecode-changed-settings"  # noqa: S108  the pod's own
_WATCHED_LEVELS: Final = ("DEBUG", "INFO", "WARNING")
"""Levels at which vLLM logs the settings that it changes. At other levels, a log without a match proves no setting."""

_TERMINATION_LOG: Final = "/dev/termination-log"
_SPEAKERS: Final = ("vllm.v1.engine.core", "vllm.v1.executor", "vllm.v1.worker")
"""Loggers that log errors only when an engine fails, and not for a client's invalid request."""

_CORE_CLIENT: Final = "vllm.v1.engine.core_client"
"""Logger whose only warning is about a dead engine core (vLLM 0.28 to 0.32)."""


def logging_config(
    level: str = "INFO",
    termination_log: str = _TERMINATION_LOG,
    watch: str = f"{ENGINE_CONFIG_PATH}/{WATCH_FILE}",
    noted: str = _NOTED,
) -> str:
    """Return the content of the file that VLLM_LOGGING_CONFIG_PATH names, with the format of vllm/logger.py."""
    made_by = f"{settings_watch.MODULE}.{settings_watch.Watch.__name__}"
    handler: dict[str, object] = {"()": made_by, "changes": dict(CHANGED_SETTINGS), "keys": SPOKEN_KEYS, "path": noted}
    handler["times"] = dict(STARTUP_TIMES)
    watch_handler = {"settingsWatch": handler} if level in _WATCHED_LEVELS else {}
    # With delay, the file is not opened before the first record.
    last_words = {"class": "logging.FileHandler", "formatter": "lastWords", "filename": termination_log, "delay": True}
    config = {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {
            "console": {
                "class": "vllm.logging_utils.NewLineFormatter",
                "format": "%(levelname)s %(asctime)s [%(filename)s:%(lineno)d] %(message)s",
                "datefmt": "%m-%d %H:%M:%S",
            },
            "lastWords": {"format": "%(message)s"},
        },
        "handlers": {
            "console": {
                "class": "logging.StreamHandler",
                "formatter": "console",
                "level": level,
                "stream": "ext://sys.stdout",
            },
            "lastWords": last_words | {"level": "ERROR"},
            "coreDeath": last_words | {"level": "WARNING"},
            **watch_handler,
        },
        # Not a filter: logging creates filters first, before the module with the handler's class exists.
        "filters": {"runSettingsWatch": {"()": "runpy.run_path", "path_name": watch}} if watch_handler else {},
        "loggers": {
            "vllm": {"handlers": ["console", *watch_handler], "level": level, "propagate": False},
            **{speaker: {"handlers": ["lastWords"]} for speaker in _SPEAKERS},
            _CORE_CLIENT: {"handlers": ["coreDeath"]},
        },
    }
    return json.dumps(config, sort_keys=True)
