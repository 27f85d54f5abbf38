"""Start-up time against public logs, and its dependence on models, caches and rates."""

from dataclasses import dataclass, replace
from typing import Any

import pytest

from bench.sizing.accuracy import read_runs, run_pair
from specdecode_operator.enums import Precision
from specdecode_operator.sizing.arithmetic import MIB
from specdecode_operator.sizing.catalogue import find_geometry
from specdecode_operator.sizing.devices import find_device
from specdecode_operator.sizing.memory.budget import estimate
from specdecode_operator.sizing.pair import Pair, Parallelism
from specdecode_operator.sizing.startup_time import (
    Phase,
    Rates,
    Seconds,
    StartConditions,
    StartupTime,
    estimate_startup,
)
from tests.support.llama import ARTICLE_LIMITS

RUNS = [run for name in ("h100_v019.jsonl", "later_runs.jsonl") for run in read_runs(name)]
TIMED = [run for run in RUNS if "startup_s" in run["observed"]]


@dataclass(frozen=True)
class Measured:
    """Times in a log in seconds, by phase; ``total`` is without the download."""

    phases: dict[Phase, float]
    total: float


def measured(run: dict[str, Any]) -> Measured:
    times = run["observed"]["startup_s"]
    download, compiled, graphs = (times.get(name, 0) for name in ("download", "compile", "graphs"))
    phases = {
        Phase.PROCESS: times["total"] - times["model_loading"] - times["init_engine"],
        # vLLM downloads while it loads the model.
        Phase.LOAD: times["model_loading"] - download,
        Phase.WARM_UP: times["init_engine"] - compiled - graphs,
    }
    given = {Phase.DOWNLOAD: "download", Phase.COMPILE: "compile", Phase.GRAPHS: "graphs"}
    phases |= {phase: times[name] for phase, name in given.items() if name in times}
    return Measured(phases, times["total"] - download)


def estimated(run: dict[str, Any]) -> StartupTime:
    times = run["observed"]["startup_s"]
    downloaded = times.get("downloaded", [])
    conditions = StartConditions(
        downloads_target="target" in downloaded,
        downloads_draft="draft" in downloaded,
        keeps_compiled=times.get("compile_cached", False),
    )
    sized = run_pair(run)
    return estimate_startup(sized.pair, estimate(sized.pair, sized.device, sized.split), sized.split, conditions)


def test_all_logs_but_one_have_times() -> None:
    assert len(TIMED) == 45
    assert [run["id"] for run in RUNS if run not in TIMED] == ["later-gb200-v026-glm52-nvfp4-tp4-ep"]


@pytest.mark.parametrize("run", TIMED, ids=lambda run: run["id"])
def test_each_measured_phase_lies_in_its_range(run: dict[str, Any]) -> None:
    found, log = estimated(run), measured(run)
    ranges = {**found.before, **found.engine}
    outside = {
        phase: (seconds, ranges.get(phase))
        for phase, seconds in log.phases.items()
        if phase not in ranges or not ranges[phase].fastest <= seconds <= ranges[phase].slowest
    }
    assert outside == {}
    assert found.engine_s.fastest <= log.total <= found.engine_s.slowest


LLAMA_8B = find_geometry("meta-llama/Llama-3.1-8B-Instruct")


USUAL = StartConditions()


def startup(conditions: StartConditions = USUAL, **changes: Any) -> StartupTime:
    assert LLAMA_8B is not None
    pair = replace(Pair(LLAMA_8B, Precision.BF16, None, None, "none", 0, ARTICLE_LIMITS), **changes)
    device = find_device("NVIDIA-H100-80GB-HBM3")
    assert device is not None
    return estimate_startup(pair, estimate(pair, device, 1), Parallelism(), conditions)


def test_known_rate_narrows_the_range_of_a_transfer() -> None:
    open_ended, known = startup(), startup(StartConditions(rates=Rates(download=200 * MIB, read=500 * MIB)))
    for phase in (Phase.DOWNLOAD, Phase.LOAD):
        given, free = ({**each.before, **each.engine}[phase] for each in (known, open_ended))
        assert free.fastest < given.fastest < given.slowest < free.slowest
        assert given.slowest - given.fastest < 40


def test_slow_storage_takes_longer_than_the_range_without_a_rate() -> None:
    slow = startup(StartConditions(rates=Rates(read=10 * MIB)))
    assert slow.engine[Phase.LOAD].fastest > startup().engine[Phase.LOAD].slowest


def test_model_on_a_volume_is_not_downloaded() -> None:
    found = startup(StartConditions(downloads_target=False, downloads_draft=False))
    assert Phase.DOWNLOAD not in found.before
    assert found.before_s == found.before[Phase.IMAGE]


def test_caches_lower_the_fastest_end_only() -> None:
    cold, cached = startup(), startup(StartConditions(downloads_once=True, keeps_compiled=True))
    assert (cached.before[Phase.DOWNLOAD].fastest, cold.before[Phase.DOWNLOAD].fastest) == (0, 12)
    assert cached.engine[Phase.COMPILE].fastest < cold.engine[Phase.COMPILE].fastest
    assert cached.before_s.slowest == cold.before_s.slowest
    assert cached.engine_s.slowest == cold.engine_s.slowest


def test_eager_engine_neither_compiles_nor_captures() -> None:
    found = startup(limits=replace(ARTICLE_LIMITS, enforce_eager=True))
    assert list(found.engine) == [Phase.PROCESS, Phase.LOAD, Phase.WARM_UP]


def test_draft_is_loaded_compiled_and_captured_too() -> None:
    draft = find_geometry("meta-llama/Llama-3.2-1B-Instruct")
    alone = startup()
    drafting = startup(draft=draft, draft_precision=Precision.BF16, method="draft_model", num_speculative_tokens=3)
    for phase in (Phase.LOAD, Phase.COMPILE, Phase.GRAPHS):
        assert drafting.engine[phase].slowest > alone.engine[phase].slowest
    assert drafting.before[Phase.DOWNLOAD].slowest > alone.before[Phase.DOWNLOAD].slowest


def test_totals_are_sums_of_phases() -> None:
    found = startup()
    assert found.engine_s == Seconds(
        sum(each.fastest for each in found.engine.values()), sum(each.slowest for each in found.engine.values())
    )
