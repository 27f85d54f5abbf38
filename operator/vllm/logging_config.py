"""How the engine logs: as vLLM does by itself, and its last words where the kubelet looks for them.

The kubelet keeps the last 2048 bytes of a failed container's log. When vLLM's
engine core fails, the API server's traceback that follows is longer than that,
and the cause is lost. So errors of the core and its workers go to the
container's termination log too, of which 4096 bytes are kept. A core that is killed says nothing: then
the API server's only word of it is a warning, and it ends with exit code 0, of which no log is kept at all.

Of settings that vLLM changes by itself, and of how it speculates in the end, it tells in its log alone, which the
operator may not read. So a handler notes what is known by name, and it stands at /metrics (settings_watch.py).
https://kubernetes.io/docs/tasks/debug/debug-application/determine-reason-pod-failure/
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from specdecode_operator.engine import settings_watch
from specdecode_operator.engine.changed_settings import CHANGED_SETTINGS
from specdecode_operator.engine.speculative_config import SPOKEN_KEYS

LOGGING_CONFIG_VARIABLE: Final = "VLLM_LOGGING_CONFIG_PATH"
LOGGING_LEVEL_VARIABLE: Final = "VLLM_LOGGING_LEVEL"
ENGINE_CONFIG_PATH: Final = "/etc/specdecode"
LOGGING_FILE: Final = "logging.json"
LOGGING_CONFIG_PATH: Final = f"{ENGINE_CONFIG_PATH}/{LOGGING_FILE}"
"""Where the engine finds the configuration in its pod."""

WATCH_FILE: Final = "settings_watch.py"
WATCH: Final = Path(settings_watch.__file__).read_text(encoding="utf-8")
"""The script that the configuration runs from beside it."""

_NOTED: Final = "/tmp/specdecode-changed-settings"  # noqa: S108  the pod's own
_WATCHED_LEVELS: Final = ("DEBUG", "INFO", "WARNING")
"""Levels at which vLLM tells of what it changes: with others, that nothing was said would prove nothing."""

_TERMINATION_LOG: Final = "/dev/termination-log"
_SPEAKERS: Final = ("vllm.v1.engine.core", "vllm.v1.executor", "vllm.v1.worker")
"""Who logs errors only when an engine fails, and not for a client's bad request."""

_CORE_CLIENT: Final = "vllm.v1.engine.core_client"
"""Who warns of nothing else than a core that has died (vLLM 0.28 to 0.32)."""


def logging_config(
    level: str = "INFO",
    termination_log: str = _TERMINATION_LOG,
    watch: str = f"{ENGINE_CONFIG_PATH}/{WATCH_FILE}",
    noted: str = _NOTED,
) -> str:
    """Return the content of the file that VLLM_LOGGING_CONFIG_PATH names, with the format of vllm/logger.py."""
    watch_handler = _watch(noted) if level in _WATCHED_LEVELS else {}
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
            "lastWords": _written_to(termination_log, "ERROR"),
            "coreDeath": _written_to(termination_log, "WARNING"),
            **watch_handler,
        },
        # Not a filter: what makes filters is called first, so that the handler's class is there.
        "filters": {"runSettingsWatch": {"()": "runpy.run_path", "path_name": watch}} if watch_handler else {},
        "loggers": {
            "vllm": {"handlers": ["console", *watch_handler], "level": level, "propagate": False},
            **{speaker: {"handlers": ["lastWords"]} for speaker in _SPEAKERS},
            _CORE_CLIENT: {"handlers": ["coreDeath"]},
        },
    }
    return json.dumps(config, sort_keys=True)


def _written_to(termination_log: str, level: str) -> Mapping[str, object]:
    """Return a handler for last words, which opens no file before the first of them."""
    handler = {"class": "logging.FileHandler", "formatter": "lastWords", "level": level}
    return {**handler, "filename": termination_log, "delay": True}


def _watch(noted: str) -> Mapping[str, object]:
    """Return the handler that notes what vLLM changes, and how it speculates."""
    made_by = f"{settings_watch.MODULE}.{settings_watch.Watch.__name__}"
    return {"settingsWatch": {"()": made_by, "changes": dict(CHANGED_SETTINGS), "keys": SPOKEN_KEYS, "path": noted}}
