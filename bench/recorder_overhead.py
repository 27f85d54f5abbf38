"""What the recorder costs a real engine: the same load on two of them in turns, one recording and one not.

    .venv/bin/python -m bench.recorder_overhead

Both run at the same time on this machine and are idle by turns, so what else the machine does hits both alike.
The spread of the pairs says how small a difference could have been seen.
"""

import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from devcluster.errors import ClusterError
from devcluster.images.engine_environment import install_engine_environment
from tests.engine.engine_process import Engine
from tests.engine.recorder_clients import ask_all, repetitive
from tests.engine.recorder_server import Server, make_models, serving

PAIRS: Final = 16
REQUESTS: Final = 48
MAX_TOKENS: Final = 100
AT_ONCE: Final = 8


def tokens_per_second(server: Server) -> float:
    """Return the rate of one round of the load."""
    questions = [repetitive(f"request-{number}", number, max_tokens=MAX_TOKENS) for number in range(REQUESTS)]
    start = time.perf_counter()
    answers = ask_all(server.url, questions, AT_ONCE)
    seconds = time.perf_counter() - start
    complete = sum(answer.finish_reasons == ["length"] for answer in answers.values())
    return complete * MAX_TOKENS / seconds


def measure(engine: Engine, folder: Path) -> list[tuple[float, float]]:
    """Return the rates with and without the recorder, in pairs."""
    models = make_models(engine, folder / "models")
    with ExitStack() as running:
        recording = running.enter_context(serving(engine, models, folder / "on", OBSERVER_DIR=""))
        plain = running.enter_context(
            serving(engine, models, folder / "off", OBSERVER_DIR="", SPECDECODE_RECORD_DIR="")
        )
        for server in (recording, plain):
            tokens_per_second(server)
        pairs = []
        for turn in range(PAIRS):
            # Neither is always the first.
            order = (recording, plain) if turn % 2 else (plain, recording)
            rates = {server.url: tokens_per_second(server) for server in order}
            pairs.append((rates[recording.url], rates[plain.url]))
        return pairs


def main() -> None:
    """Print the figures."""
    try:
        engine = Engine.at(install_engine_environment())
    except ClusterError as error:
        sys.stdout.write(f"recorder on a real engine: not measured, {error}\n")
        return
    with tempfile.TemporaryDirectory() as folder:
        pairs = measure(engine, Path(folder))
    changes = [100 * (on / off - 1) for on, off in pairs]
    noise = statistics.stdev(changes) / len(changes) ** 0.5
    on, off = (statistics.median(column) for column in zip(*pairs, strict=True))
    sys.stdout.write(
        f"recorder on a real engine (CPU, ngram, {AT_ONCE} at once): {on:.0f} tokens/s on, {off:.0f} off; "
        f"{statistics.mean(changes):+.1f} % +- {noise:.1f} (mean and its standard error of {PAIRS} pairs, "
        f"each within {min(changes):+.0f} to {max(changes):+.0f} %)\n"
    )


if __name__ == "__main__":
    main()
