"""Compare the arms of a capture: published folders in, a comparison out.

Besides the figures, this compares what the arms answer (greedy tokens and output formats), and notes what other
than the setting may explain a difference, such as another precision than the baseline's. In the capture's pod all
files were published just before; elsewhere they are untrusted.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Final

import msgspec
from pydantic import ValidationError

from specdecode_operator.api.capture import CaptureWorkload, Phase
from specdecode_operator.api.capture_status import ArmVerdict, Outputs
from specdecode_operator.capture.comparison.arm_folders import (
    ArmFolders,
    ArmManifest,
    find_arms,
    not_comparable,
    read_checks,
)
from specdecode_operator.capture.comparison.arm_totals import (
    ArmSums,
    drafting_of,
    engine_of,
    kv_cache_of,
    load_of,
    predicted_ratio,
    prefix_cache_of,
)
from specdecode_operator.capture.comparison.arm_verdict import Measured, arm_verdict, crossover, judge, sentence
from specdecode_operator.capture.comparison.client_requests import sends_at_a_rate
from specdecode_operator.capture.comparison.comparison_file import (
    COMPARISON,
    Arm,
    Comparison,
    Difference,
    Load,
    OutputsFound,
)
from specdecode_operator.capture.files.formats import CHECKS, Checks, GreedyAnswer, ParsingCheck
from specdecode_operator.capture.files.publish import write_whole
from specdecode_operator.capture.files.validate import RANDOM_PROMPTS, are_random
from specdecode_operator.problems import printable, shown
from specdecode_operator.stats.verdict import DEFAULT_LEVEL, FEWEST_STARTS
from specdecode_operator.version import __version__

CLOSE: Final = 0.25
"""Difference of log probability up to which two tokens are equally likely: logits from 16 to 32 have steps of 0.125 in
BF16, and either may be off by one step, as the order of sums depends on the batch."""

_BY_CHANCE: Final = 0.05


def compare_outputs(baseline: Checks | None, arm: Checks | None, lossy: str | None) -> OutputsFound:
    """Compare the answers of an arm with the baseline's."""
    pairs, structured, tool_calls = [], None, None
    if baseline is not None and arm is not None:
        pairs = [*_pairs(baseline, arm)]
        structured = _parsing(baseline.structured, arm.structured)
        tool_calls = _parsing(baseline.tool_calls, arm.tool_calls)
    differences = [found for one, other in pairs if (found := _difference(one, other)) is not None]
    explained = sum(each.explained for each in differences)
    first = next((each for each in differences if not each.explained), differences[0] if differences else None)
    return OutputsFound(
        outputs=_outputs(len(pairs), len(differences), explained, lossy).value,
        prompts=len(pairs),
        equal=len(pairs) - len(differences),
        explained=explained,
        different=len(differences) - explained,
        first_difference=first,
        structured=structured.shares if structured else None,
        tool_calls=tool_calls.shares if tool_calls else None,
        parses_less=any(each is not None and each.parses_less for each in (structured, tool_calls)),
        not_measured=list(_not_measured(baseline, arm, pairs)),
    )


def _outputs(prompts: int, differences: int, explained: int, lossy: str | None) -> Outputs:
    if lossy is not None:
        # A lossy setting is never called equal: the prompts prove nothing about other prompts.
        return Outputs.LOSSY
    if not prompts:
        return Outputs.NOT_CHECKED
    if differences > explained:
        return Outputs.DIFFERENT
    return Outputs.EXPLAINED if differences else Outputs.EQUAL


def _pairs(baseline: Checks, arm: Checks) -> Iterator[tuple[GreedyAnswer, GreedyAnswer]]:
    of_arm = {each.prompt_sha256: each for each in arm.greedy.answers}
    for each in baseline.greedy.answers:
        other = of_arm.get(each.prompt_sha256)
        # Two empty answers show nothing: an engine that answers nothing would do so for any prompt.
        if other is not None and (each.tokens or other.tokens):
            yield each, other


def _difference(baseline: GreedyAnswer, other: GreedyAnswer) -> Difference | None:
    """Return the first position at which two answers differ, or at which one has ended."""
    if baseline.tokens == other.tokens:
        return None
    shorter = min(len(baseline.tokens), len(other.tokens))
    position = next((at for at in range(shorter) if baseline.tokens[at] != other.tokens[at]), shorter)
    margins = [each.top2_margin[: len(each.tokens)][position : position + 1] for each in (baseline, other)]
    margin = next((each for each in chain(*margins) if each is not None), None)
    return Difference(
        prompt_sha256=baseline.prompt_sha256,
        position=position,
        baseline_margin=margin,
        explained=margin is not None and abs(margin) <= CLOSE,
    )


_MOST_ASKED: Final = 64


@dataclass(frozen=True)
class _Parsing:
    """Answers of one form that could be parsed, of an arm and of the baseline."""

    arm: ParsingCheck
    baseline: ParsingCheck

    @property
    def shares(self) -> tuple[float, float]:
        arm, baseline = (round(min(each.parsed, each.asked) / each.asked, 4) for each in (self.arm, self.baseline))
        return arm, baseline

    @property
    def parses_less(self) -> bool:
        """Whether the arm parses less often than chance explains: Fisher's exact test, one-sided."""
        (asked, parsed), (asked_before, parsed_before) = (
            (min(each.asked, _MOST_ASKED), min(each.parsed, each.asked, _MOST_ASKED))
            for each in (self.arm, self.baseline)
        )
        together, right = asked + asked_before, parsed + parsed_before
        as_few = sum(
            math.comb(asked, count) * math.comb(asked_before, right - count)
            for count in range(max(0, right - asked_before), parsed + 1)
        )
        return as_few / math.comb(together, right) <= _BY_CHANCE


def _parsing(baseline: ParsingCheck, arm: ParsingCheck) -> _Parsing | None:
    return _Parsing(arm, baseline) if baseline.asked and arm.asked else None


def _not_measured(
    baseline: Checks | None, arm: Checks | None, pairs: Sequence[tuple[GreedyAnswer, GreedyAnswer]]
) -> Iterator[str]:
    if baseline is None or arm is None:
        yield f"outputs were not checked: {'the baseline' if baseline is None else 'it'} has no {CHECKS}"
        return
    for what, of_baseline, of_arm in (
        ("greedy outputs", baseline.greedy, arm.greedy),
        ("structured outputs", baseline.structured, arm.structured),
        ("tool calls", baseline.tool_calls, arm.tool_calls),
    ):
        why = of_baseline.not_measured or of_arm.not_measured
        if why is None and of_baseline is baseline.greedy and not pairs:
            why = "no prompt has an answer with a token of both engines"
        if why is not None:
            yield f"{what} were not checked: {why}"


MOST_POINTS_LOST: Final = 5.0
"""Of acceptance, from where on a draft no longer fits a target that was quantized: a rule of thumb, which says where to
look. Goodput decides."""

_PRECISIONS: Final = {"targetQuantization": "its target is in", "kvCacheDtype": "its KV cache is in"}


def lossy_of(folders: ArmFolders, name: str) -> str | None:
    """Return why an arm may answer otherwise than the baseline by its settings, precision among them."""
    experiment = folders.experiment
    return experiment.lossy.get(name) or (_other_precision(folders, name) if name != experiment.baseline else None)


def precision_notes(folders: ArmFolders, arms: list[Arm]) -> Iterator[str]:
    """Yield what another precision did to acceptance, of arms that speculate as the baseline does."""
    baseline, *others = arms
    for arm in others:
        precision = _other_precision(folders, arm.name)
        if precision is None or arm.drafting is None or baseline.drafting is None or arm.engine is None:
            continue
        speculation = arm.engine.method, arm.drafting.k
        if baseline.engine is None or speculation != (baseline.engine.method, baseline.drafting.k):
            continue
        own, of_baseline = 100 * arm.drafting.acceptance, 100 * baseline.drafting.acceptance
        lost = of_baseline - own
        said = f"arm {arm.name}: acceptance is {own:.1f} %, the baseline's {of_baseline:.1f} %, and {precision}"
        if lost > MOST_POINTS_LOST:
            yield (
                f"{said}: {lost:.1f} points less, more than {MOST_POINTS_LOST:g}, say that the draft no longer fits:"
                " take a higher precision, a draft trained beside this one, or a smaller K"
            )
        else:
            yield f"{said}: it cost no more than {MOST_POINTS_LOST:g} points, the draft still fits"


def _other_precision(folders: ArmFolders, name: str) -> str | None:
    repetitions = folders.repetitions.get(name)
    if not repetitions:
        return None
    plans = [each.context.get("plan") for each in (repetitions[0].manifest, folders.first)]
    own, of_baseline = (each if isinstance(each, Mapping) else {} for each in plans)
    said = [
        f"{words} {shown(own[field], 40)}, the baseline's in {shown(of_baseline[field], 40)}"
        for field, words in _PRECISIONS.items()
        if field in own and field in of_baseline and own[field] != of_baseline[field]
    ]
    return " and ".join(said) or None


def confounds(folders: ArmFolders) -> Iterator[str]:
    """Yield what other than the compared setting may explain a difference."""
    experiment, first = folders.experiment, folders.first
    if are_random(first.workload):
        yield RANDOM_PROMPTS
    baseline = folders.repetitions[experiment.baseline]
    for name in experiment.arms:
        repetitions = folders.repetitions[name]
        missing = experiment.repetitions - len(repetitions)
        if missing:
            yield f"arm {name}: {missing} of {experiment.repetitions} repetitions are missing: no verdict on it"
        if lossy := lossy_of(folders, name):
            yield f"arm {name} may answer otherwise by its settings: {lossy}"
        if repetitions and name != experiment.baseline:
            yield from _differences(name, repetitions[0].manifest, baseline[0].manifest)
    commands = {name: found[0].manifest.context.get("command") for name, found in folders.repetitions.items() if found}
    of_first = commands[experiment.baseline]
    for name in experiment.arms[1:]:
        if of_first is not None and commands.get(name) == of_first:
            yield f"arm {name} starts the same engine as the baseline: an A/A test, which should be Inconclusive"
    for name, repetitions in folders.repetitions.items():
        places = {(each.manifest.node, *each.manifest.gpu_uuids) for each in repetitions}
        if len(places) > 1:
            yield f"arm {name}: its repetitions ran on other GPUs or nodes: how these differ is in the interval"


def _differences(name: str, arm: ArmManifest, baseline: ArmManifest) -> Iterator[str]:
    """Yield the settings and places that differ, although they are not compared."""
    for what, of_arm, of_baseline in (
        ("async scheduling", arm.config.async_scheduling, baseline.config.async_scheduling),
        ("eager execution", arm.config.enforce_eager, baseline.config.enforce_eager),
        ("prefix caching", arm.config.enable_prefix_caching, baseline.config.enable_prefix_caching),
        ("requests in a batch at most", arm.config.max_num_seqs, baseline.config.max_num_seqs),
        ("tokens in a step at most", arm.config.max_num_batched_tokens, baseline.config.max_num_batched_tokens),
        ("longest sequence", arm.config.max_model_len, baseline.config.max_model_len),
        ("vLLM", arm.vllm, baseline.vllm),
        ("image", arm.image_id, baseline.image_id),
        ("GPU", arm.gpu, baseline.gpu),
        ("GPUs", arm.gpu_uuids, baseline.gpu_uuids),
        ("node", arm.node, baseline.node),
        ("model", arm.model, baseline.model),
        ("graph mode", _graphs(arm), _graphs(baseline)),
    ):
        if of_arm != of_baseline:
            yield (
                f"arm {name}: {what} is {_word(of_arm)}, in the baseline {_word(of_baseline)}: part of the difference "
                "may be its"
            )


def _graphs(manifest: ArmManifest) -> Any:
    """Return the command's compilation settings: K by batch size and some drafts change the CUDA graphs."""
    command = manifest.context.get("command")
    words = [str(each) for each in command] if isinstance(command, list) else []
    for place, word in enumerate(words):
        if word.startswith("--compilation-config"):
            return word.partition("=")[2] or (words[place + 1] if place + 1 < len(words) else None)
    return None


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "not known" if value is None else shown(value)


def compare_capture(folder: Path, price_per_gpu_hour: float | None = None) -> Comparison:
    """Compare the arms of a capture.

    Parameters
    ----------
    folder
        Holds ``<arm>/<repetition>/`` with published files.
    price_per_gpu_hour
        In any currency; without it, cost is in GPU seconds only.

    Raises
    ------
    CaptureError
        Arms are missing, their workloads differ, or a file cannot be read.
    """
    folders = find_arms(folder)
    phases = _phases(folders)
    sums = _read(folders, phases)
    experiment = folders.experiment
    own = sums[experiment.baseline]
    loads = [load_of(own, own, phase, price_per_gpu_hour) for phase in phases]
    arms = [_arm(experiment.baseline, own, own, loads, "what the others are compared with")]
    arms += [_candidate(sums, name, folders, phases, loads, price_per_gpu_hour) for name in experiment.arms[1:]]
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
            *map(printable, confounds(folders)),
            *precision_notes(folders, arms),
            *(f"arm {arm.name}: {each}" for arm in arms if arm.outputs for each in arm.outputs.not_measured),
        ],
    )


def write_comparison(folder: Path, comparison: Comparison) -> Path:
    """Write ``comparison.json`` into a capture's folder atomically, and return its path."""
    path = folder / COMPARISON
    write_whole(path, comparison)
    return path


def _phases(folders: ArmFolders) -> Sequence[Phase]:
    try:
        return CaptureWorkload.parse(folders.first.workload, newer=True).phases
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, ("workload", *first["loc"])))
        raise not_comparable(f"manifest.json: {where}: {first['msg']}: fetch the capture anew") from error


def _read(folders: ArmFolders, phases: Sequence[Phase]) -> dict[str, ArmSums]:
    """Return the sums of all arms that are there; at most two repetitions' requests are in memory at once."""
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


def _arm(  # noqa: PLR0913  its figures
    name: str,
    own: ArmSums | None,
    baseline: ArmSums,
    loads: list[Load],
    message: str,
    *,
    verdict: str | None = None,
    lossy: str | None = None,
    crossing: float | None = None,
    outputs: OutputsFound | None = None,
) -> Arm:
    """Return an arm, without figures if none of its repetitions is there."""
    return Arm(
        name=name,
        verdict=verdict,
        message=message,
        lossy=lossy,
        repetitions=[each.number for each in own.repetitions] if own else [],
        engine=engine_of(own.manifest) if own else None,
        loads=loads,
        crossover_running=crossing,
        drafting=drafting_of(own, baseline) if own else None,
        prefix_cache=prefix_cache_of(own, baseline) if own else None,
        kv_cache=kv_cache_of(own) if own else None,
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
        message = "no verdict: none of its repetitions is there"
        return _arm(name, None, baseline, [], message, verdict=ArmVerdict.INCONCLUSIVE.value, lossy=lossy)
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
    return _arm(
        name, own, baseline, loads, message, verdict=verdict.value, lossy=lossy, crossing=crossing, outputs=outputs
    )


def _judged(  # noqa: PLR0913  as above
    sums: Mapping[str, ArmSums], name: str, comparable: Sequence[Phase], phase: Phase, load: Load, *, whole: bool
) -> Load:
    """Return a load with its verdict, or with the reason why there is none."""
    names = list(sums)
    own, baseline = sums[name], sums[names[0]]
    with_field = partial(msgspec.structs.replace, load)
    if phase not in comparable:
        why = "it sends at a rate, the same to all arms, and nothing says what counts as goodput: slo"
        return with_field(not_compared=why)
    for arm in (baseline, own):
        if not (phase.name in arm.phases and arm.phases[phase.name].outcomes["completed"]):
            return with_field(not_compared=f"no request of it was answered in arm {arm.name}")
    goodputs = [list(sums[each].goodputs[phase.name].values()) for each in names]
    measured = Measured(own.pairs[phase.name], goodputs, names.index(name), whole)
    # By Bonferroni's inequality the level holds for all loads of an arm together, also if they depend on each other.
    level = 1 - (1 - DEFAULT_LEVEL) / len(comparable)
    return with_field(compared=judge(measured, level, predicted_ratio(own, baseline, phase.name)))
