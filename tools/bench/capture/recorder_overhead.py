"""What the recorder costs a real engine: the same load on two of them in turns, one recording and one not.

Both run on this machine and are idle by turns, so what else the machine does hits both alike. The main figure is CPU
time for each 1000 tokens, of the API server alone, which the recorder is a part of, and of all processes of the engine:
unlike throughput it does not depend on who else wants the cores. A figure is the geometric mean of the ratios of the
pairs, with the interval that holds the true one with 95 % confidence: the recorder costs no more than its upper end.

The model is tiny and the tokens come fast, so the API server's work is a large part of all: with a real model the
share that the recorder takes is smaller.
"""

import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.figures import Figure, at_most
from devcluster.host.errors import ClusterError
from devcluster.images.engine_environment import install_engine_environment
from specdecode_operator.stats.verdict import student_quantile
from tests.engine.engine_process import Engine
from tests.engine.engine_versions import SERVED
from tests.engine.recorder_clients import ask_all, repetitive
from tests.engine.recorder_server import Server, make_models, serving

MEASURE_S: Final = 80
"""With the starts of both engines less than three minutes."""

WARM_UPS: Final = 2
REQUESTS: Final = 32
MAX_TOKENS: Final = 100
AT_ONCE: Final = 8
TICKS_A_SECOND: Final = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Round:
    """One round of the load on one engine.

    Attributes
    ----------
    server_ms, engine_ms
        CPU time for each 1000 tokens: of the API server, and of all processes of the engine.
    tokens_per_second
        How fast they came.
    """

    server_ms: float
    engine_ms: float
    tokens_per_second: float


@dataclass(frozen=True)
class CpuTime:
    """CPU seconds used so far, by every thread."""

    server_s: float
    engine_s: float

    @classmethod
    def of(cls, server: Server) -> "CpuTime":
        """Read it for the API server, and for its whole session: it was started as the first of one."""
        leader = server.process.pid
        own_s = engine_s = 0.0
        for folder in Path("/proc").iterdir():
            try:
                # Fields of proc(5), from the third on: the second, the name, may have blanks and brackets.
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # no process, or one that has just ended: its parent counts it
            if int(fields[3]) != leader:
                continue
            own, ended_children = sum(map(int, fields[11:13])), sum(map(int, fields[13:15]))
            engine_s += (own + ended_children) / TICKS_A_SECOND
            if folder.name == str(leader):
                own_s = own / TICKS_A_SECOND
        return cls(own_s, engine_s)


def one_round(server: Server) -> Round:
    """Send the load once; it is the same each time, and so are the answers."""
    questions = [repetitive(f"request-{number}", number, max_tokens=MAX_TOKENS) for number in range(REQUESTS)]
    before, start_s = CpuTime.of(server), time.perf_counter()
    answers = ask_all(server.url, questions, AT_ONCE)
    seconds, after = time.perf_counter() - start_s, CpuTime.of(server)
    if any(answer.finish_reasons != ["length"] for answer in answers.values()):
        raise RuntimeError(f"{server.url} did not answer all of {REQUESTS} requests")
    thousands = REQUESTS * MAX_TOKENS / 1000
    return Round(
        server_ms=1000 * (after.server_s - before.server_s) / thousands,
        engine_ms=1000 * (after.engine_s - before.engine_s) / thousands,
        tokens_per_second=1000 * thousands / seconds,
    )


def measure(engine: Engine, folder: Path) -> list[tuple[Round, Round]]:
    """Return rounds with and without the recorder, in pairs."""
    models = make_models(engine, folder / "models")
    with ExitStack() as running:
        recording = running.enter_context(serving(engine, models, folder / "on", OBSERVER_DIR=""))
        plain = running.enter_context(
            serving(engine, models, folder / "off", OBSERVER_DIR="", SPECDECODE_RECORD_DIR="")
        )
        for server in (recording, plain) * WARM_UPS:
            one_round(server)
        pairs: list[tuple[Round, Round]] = []
        end_s = time.monotonic() + MEASURE_S
        # An even number of pairs: neither engine is the first more often.
        while len(pairs) % 2 or len(pairs) == 0 or time.monotonic() < end_s:
            order = (recording, plain) if len(pairs) % 2 else (plain, recording)
            rounds = {server.url: one_round(server) for server in order}
            pairs.append((rounds[recording.url], rounds[plain.url]))
        return pairs


def change_percent(ratios: Sequence[float]) -> tuple[float, float, float]:
    """Return the geometric mean of ratios as a change in percent, and both ends of its 95 % interval."""
    logarithms = [math.log(ratio) for ratio in ratios]
    mean = statistics.mean(logarithms)
    margin = student_quantile(0.975, len(ratios) - 1) * statistics.stdev(logarithms) / len(ratios) ** 0.5
    return 100 * math.expm1(mean), 100 * math.expm1(mean - margin), 100 * math.expm1(mean + margin)


def _worse(name: str, unit: str, pairs: list[tuple[Round, Round]], of: Callable[[Round], float]) -> Figure:
    """Return by how much a cost of the engine is higher with the recorder."""
    on, off = (statistics.median(of(each) for each in column) for column in zip(*pairs, strict=True))
    change, low, high = change_percent([of(with_it) / of(without) for with_it, without in pairs])
    limit = at_most(max(1.0, (high - low) / 2), "our aim: 1 %, or the noise where that is more")
    remark = f"{on:.1f} {unit} on, {off:.1f} off; 95 % interval {low:+.1f} to {high:+.1f} %, {len(pairs)} pairs"
    return Figure(f"recorder on a real engine, more {name}", change, "%", limit, remark, (f"vLLM {SERVED} on the CPU",))


def figures() -> Iterator[Figure]:
    """Yield how much more CPU time and wall time the same load takes, each with its interval."""
    try:
        engine = Engine.at(install_engine_environment())
    except ClusterError as error:
        yield Figure("recorder on a real engine", None, remark=str(error))
        return
    with tempfile.TemporaryDirectory() as folder:
        pairs = measure(engine, Path(folder))
    yield _worse("CPU of the API server", "ms a 1000 tokens", pairs, lambda each: each.server_ms)
    yield _worse("CPU of all its processes", "ms a 1000 tokens", pairs, lambda each: each.engine_ms)
    yield _worse("time a token", "us", pairs, lambda each: 1e6 / each.tokens_per_second)
