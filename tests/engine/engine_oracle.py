"""Ask the installed vLLM what it makes of command lines; runs in the engine's Python.

Reads a JSON object from standard input and writes the answers as JSON to the
file named by the first argument (standard output is full of log lines)::

    {"parse": {NAME: ARGV after "vllm serve"}, "start": {NAME: ARGV}, "schedules": [[RANGES, MAX_NUM_SEQS, K]],
     "cpu_block_sizes": [SIZE]}

``parse`` gives the options as parsed, ``start`` also builds the engine's whole
configuration, ``schedules`` expands K by batch size as the scheduler does,
``cpu_block_sizes`` asks which block sizes the CPU's attention can work with.
vLLM is imported once: it takes 15 to 30 seconds, each case milliseconds.
"""

import contextlib
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dump_engine_flags import serve_parser
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import validate_parsed_serve_args
from vllm.usage.usage_lib import UsageContext
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup
from vllm.v1.worker.utils import select_common_block_size


def answer(ask: Callable[[], Any]) -> dict[str, Any]:
    """Return what a question gives, or the error that it ends in."""
    complaints = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaints):
            return {"ok": True, "value": ask()}
    except SystemExit as stop:
        return {"ok": False, "error": f"exit {stop.code}: {complaints.getvalue()[-400:]}"}
    except Exception as error:  # noqa: BLE001 (any error is the answer)
        return {"ok": False, "error": f"{type(error).__name__}: {error}"}


def parse(parser: Any, argv: list[str]) -> Any:
    """Return the options of one command line."""
    options = parser.parse_args(argv)
    validate_parsed_serve_args(options)
    return options


def start(parser: Any, argv: list[str]) -> dict[str, Any]:
    """Return what the engine's configuration says, built as at start."""
    options = parse(parser, argv)
    options.model = options.model_tag  # as vllm/entrypoints/cli/serve.py does
    engine_args = AsyncEngineArgs.from_cli_args(options)
    config = engine_args.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
    speculative = config.speculative_config
    return {
        "method": speculative.method if speculative else None,
        "num_speculative_tokens": speculative.num_speculative_tokens if speculative else None,
        "tensor_parallel_size": config.parallel_config.tensor_parallel_size,
        "max_model_len": config.model_config.max_model_len,
        "kv_cache_memory_bytes": config.cache_config.kv_cache_memory_bytes,
        "block_size": config.cache_config.block_size,
    }


def main() -> None:
    """Answer everything that was asked."""
    questions = json.load(sys.stdin)
    parser = serve_parser()
    answers = {
        "parse": {
            name: answer(lambda argv=argv: json.loads(json.dumps(vars(parse(parser, argv)), default=repr)))
            for name, argv in questions["parse"].items()
        },
        "start": {name: answer(lambda argv=argv: start(parser, argv)) for name, argv in questions["start"].items()},
        "schedules": [
            answer(lambda asked=asked: build_dynamic_sd_schedule_lookup(*asked)[1:]) for asked in questions["schedules"]
        ],
        "cpu_block_sizes": {
            size: answer(lambda size=size: select_common_block_size(int(size), [CPUAttentionBackend]))
            for size in questions["cpu_block_sizes"]
        },
    }
    Path(sys.argv[1]).write_text(json.dumps(answers), encoding="utf-8")


if __name__ == "__main__":
    main()
