"""What the installed vLLM's `serve` parser and --speculative-config accept; runs in the engine's Python.

flag_table.py asks every version and keeps the answers in
`operator/vllm/flags/`; the contract test asks again and says when they are
stale.
"""

import argparse
import contextlib
import dataclasses
import importlib
from typing import Any

FILLED_BY_THE_ENGINE = ("_model_config", "_parallel_config")
"""How the fields of SpeculativeConfig end that nobody can write in JSON."""


def value_count(action: argparse.Action) -> str:
    """Return how many values a flag takes: 0, 1, ? (0 or 1), * or + (1 or more)."""
    if action.nargs is None:
        return "1"
    return str(action.nargs)


def cli_args() -> Any:
    """Return the module that makes the parser; importing it takes 10 to 30 seconds."""
    for place in ("common", "launchers"):  # from 0.33 and 0.29 on
        with contextlib.suppress(ModuleNotFoundError):
            return importlib.import_module(f"vllm.entrypoints.{place}.cli_args")
    return importlib.import_module("vllm.entrypoints.openai.cli_args")


def serve_parser() -> Any:
    """Return the parser of `vllm serve`."""
    flexible = importlib.import_module("vllm.utils.argparse_utils").FlexibleArgumentParser
    return cli_args().make_arg_parser(flexible(prog="vllm serve"))


def flags() -> list[dict[str, Any]]:
    """Return every option of the parser, with its names and how many values it takes.

    From 0.33 on an option does not tell all of its names: --no-enable-x is taken, and no longer shown.
    """
    names = dict[argparse.Action, list[str]]()
    for name, action in serve_parser()._option_string_actions.items():
        names.setdefault(action, []).append(name)
    table = ({"names": spelled, "values": value_count(action)} for action, spelled in names.items())
    return sorted(table, key=lambda flag: flag["names"])


def speculative_keys() -> list[str]:
    """Return the keys that --speculative-config may have."""
    fields = dataclasses.fields(importlib.import_module("vllm.config").SpeculativeConfig)
    return sorted(field.name for field in fields if field.init and not field.name.endswith(FILLED_BY_THE_ENGINE))
