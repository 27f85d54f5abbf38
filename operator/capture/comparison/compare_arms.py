"""Compares the arms of a capture: published folders in, a comparison out.

Where it is called in the pod, all files were published just before; elsewhere they may be anything.
"""

import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
from pydantic import ValidationError

from specdecode_operator.api.capture_workload import CaptureWorkload, Phase
from specdecode_operator.api.status.comparison import ArmVerdict
from specdecode_operator.capture.comparison.arms import (
    ArmSums,
    drafting_of,
    engine_of,
    kv_cache_of,
    load_of,
    predicted_ratio,
    prefix_cache_of,
)
from specdecode_operator.capture.comparison.checked import compare_outputs
from specdecode_operator.capture.comparison.confounds import notes_of
from specdecode_operator.capture.comparison.judged import Measured, judge
from specdecode_operator.capture.comparison.precisions import lossy_of, precision_notes
from specdecode_operator.capture.comparison.reading.blocks import sends_at_a_rate
from specdecode_operator.capture.comparison.reading.folders import ArmFolders, find_arms, not_comparable, read_checks
from specdecode_operator.capture.comparison.result import COMPARISON, Arm, Comparison, Load, OutputsFound
from specdecode_operator.capture.comparison.sentences import arm_verdict, crossover, sentence
from specdecode_operator.capture.files.formats import PART_SUFFIX
from specdecode_operator.evidence.series import DEFAULT_LEVEL
from specdecode_operator.evidence.starts import FEWEST_STARTS
from specdecode_operator.version import __version__

_MOST_BYTES: Final = 8 * 2**20


def compare_capture(folder: Path, price_per_gpu_hour: float | None = None) -> Comparison:
    """Return what the arms of a capture come to.

    Parameters
    ----------
    folder
        That of the capture: ``<arm>/<repetition>/`` with published files in each.
    price_per_gpu_hour
        In any currency; without it cost is said in GPU seconds alone.

    Raises
    ------
    CaptureError
        Arms are missing, their workloads differ, or a file cannot be read.
    """
    folders = find_arms(folder)
    phases = _phases(folders)
    sums = _read(folders, phases)
    experiment = folders.experiment
    baseline = sums[experiment.baseline]
    arms = [_baseline(baseline, phases, price_per_gpu_hour)]
    arms += [_candidate(sums, name, folders, phases, arms[0].loads, price_per_gpu_hour) for name in experiment.arms[1:]]
    return Comparison(
        specdecode=__version__,
        namespace=folders.first.namespace,
        capture=folders.first.capture,
        baseline=experiment.baseline,
        level=DEFAULT_LEVEL,
        repetitions=experiment.repetitions,
        slo=experiment.slo,
        price_per_gpu_hour=price_per_gpu_hour,
        arms=arms,
        notes=[
            *notes_of(folders),
            *precision_notes(folders, arms),
            *(note for arm in arms for note in _unchecked(arm)),
        ],
    )


def write_comparison(folder: Path, comparison: Comparison) -> Path:
    """Write ``comparison.json`` into a capture's folder, whole or not at all, and return it."""
    path = folder / COMPARISON
    part = path.with_name(f"{COMPARISON}{PART_SUFFIX}")
    try:
        with part.open("wb") as stream:
            stream.write(msgspec.json.format(msgspec.json.encode(comparison), indent=2) + b"\n")
            stream.flush()
            os.fsync(stream.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return path


def read_comparison(folder: Path) -> Comparison | None:
    """Return what was written there; None where nothing was, or nothing that can be read."""
    try:
        with (folder / COMPARISON).open("rb") as stream:
            return msgspec.json.decode(stream.read(_MOST_BYTES), type=Comparison)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _phases(folders: ArmFolders) -> Sequence[Phase]:
    try:
        return CaptureWorkload.parse(folders.first.workload, newer=True).phases
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, ("workload", *first["loc"])))
        raise not_comparable(f"manifest.json: {where}: {first['msg']}: fetch the capture anew") from error


def _read(folders: ArmFolders, phases: Sequence[Phase]) -> dict[str, ArmSums]:
    """Return the sums of all arms that are there; the requests of two are held at once, of one repetition."""
    experiment = folders.experiment
    sums = {name: ArmSums(name, found) for name, found in folders.repetitions.items() if found}
    for number in range(1, experiment.repetitions + 1):
        of_baseline = None
        for name in experiment.arms:
            arm = sums.get(name)
            repetition = next((each for each in arm.repetitions if each.number == number), None) if arm else None
            if arm is None or repetition is None:
                continue
            own = arm.read(repetition, experiment.slo)
            if name == experiment.baseline:
                of_baseline = own
            elif of_baseline is not None:
                arm.pair(number, phases, of_baseline, own)
    return sums


def _baseline(sums: ArmSums, phases: Sequence[Phase], price: float | None) -> Arm:
    loads = [load_of(sums, sums, phase, price) for phase in phases]
    return _measured(sums, sums, loads, "what the others are compared with")


def _measured(  # noqa: PLR0913  what is said of it
    own: ArmSums,
    baseline: ArmSums,
    loads: list[Load],
    message: str,
    *,
    verdict: str | None = None,
    lossy: str | None = None,
    crossing: float | None = None,
    outputs: OutputsFound | None = None,
) -> Arm:
    """Return an arm of which there are files."""
    return Arm(
        name=own.name,
        verdict=verdict,
        message=message,
        lossy=lossy,
        repetitions=[each.number for each in own.repetitions],
        engine=engine_of(own.manifest),
        loads=loads,
        crossover_running=crossing,
        drafting=drafting_of(own, baseline),
        prefix_cache=prefix_cache_of(own, baseline),
        kv_cache=kv_cache_of(own),
        outputs=outputs,
    )


def _candidate(  # noqa: PLR0913, PLR0917  what an arm is compared with
    sums: Mapping[str, ArmSums],
    name: str,
    folders: ArmFolders,
    phases: Sequence[Phase],
    of_baseline: Sequence[Load],
    price: float | None,
) -> Arm:
    experiment = folders.experiment
    own, baseline = sums.get(name), sums[experiment.baseline]
    lossy = lossy_of(folders, name)
    if own is None:
        return _missing(name, lossy)
    there = [each.number for each in own.repetitions if each.number in {one.number for one in baseline.repetitions}]
    comparable = [each for each in phases if experiment.slo.given or not sends_at_a_rate(each)]
    judged = partial(_judged, sums, name, comparable, whole=len(there) == experiment.repetitions)
    loads = [judged(phase, load_of(own, baseline, phase, price)) for phase in phases]
    outputs = compare_outputs(read_checks(baseline.repetitions), read_checks(own.repetitions), lossy)
    verdict, crossing = arm_verdict(loads, outputs), crossover(of_baseline, loads)
    missing = experiment.repetitions - len(there)
    why = (
        f"no verdict, as {missing} of {experiment.repetitions} repetitions are missing"
        if missing
        else "no verdict with one repetition, which does not show how engines differ from start to start: take 3 or 4"
        if experiment.repetitions < FEWEST_STARTS
        else None
    )
    message = sentence(verdict, of_baseline, loads, outputs, crossing, DEFAULT_LEVEL, experiment.repetitions, why)
    return _measured(
        own, baseline, loads, message, verdict=verdict.value, lossy=lossy, crossing=crossing, outputs=outputs
    )


def _judged(  # noqa: PLR0913  as above
    sums: Mapping[str, ArmSums], name: str, comparable: Sequence[Phase], phase: Phase, load: Load, *, whole: bool
) -> Load:
    """Return the figures of a load with its verdict, or why there is none."""
    names = list(sums)
    own, baseline = sums[name], sums[names[0]]
    if phase not in comparable:
        return msgspec.structs.replace(
            load, not_compared="it sends at a rate, the same to all arms, and nothing says what counts as goodput: slo"
        )
    for arm in (baseline, own):
        if not (phase.name in arm.phases and arm.phases[phase.name].outcomes["completed"]):
            return msgspec.structs.replace(load, not_compared=f"no request of it was answered in arm {arm.name}")
    goodputs = [list(sums[each].goodputs[phase.name].values()) for each in names]
    measured = Measured(own.pairs[phase.name], goodputs, names.index(name), whole)
    # All loads of an arm together hold with the level: by Bonferroni's inequality, whatever they have in common.
    level = 1 - (1 - DEFAULT_LEVEL) / len(comparable)
    return msgspec.structs.replace(load, compared=judge(measured, level, predicted_ratio(own, baseline, phase.name)))


def _missing(name: str, lossy: str | None) -> Arm:
    return Arm(
        name=name,
        verdict=ArmVerdict.INCONCLUSIVE.value,
        message="no verdict: none of its repetitions is there",
        lossy=lossy,
        repetitions=[],
        engine=None,
        loads=[],
        crossover_running=None,
        drafting=None,
        prefix_cache=None,
        kv_cache=None,
        outputs=None,
    )


def _unchecked(arm: Arm) -> list[str]:
    return [f"arm {arm.name}: {each}" for each in arm.outputs.not_measured] if arm.outputs is not None else []
