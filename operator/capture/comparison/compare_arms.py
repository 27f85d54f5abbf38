"""Compare the arms of a capture: published folders in, a comparison out.

In addition to the figures, this compares the answers of the arms (greedy tokens and output formats), and notes other
explanations of a difference than the setting, such as another precision than the baseline's. In the capture's pod all
files were published just before; elsewhere they are untrusted.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, zip_longest
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
from specdecode_operator.capture.comparison.arm_verdict import arm_verdict, crossover, judge, sentence
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
from specdecode_operator.deployment.canaries import CLOSE_NATS
from specdecode_operator.problems import printable, shown
from specdecode_operator.stats.verdict import DEFAULT_LEVEL, FEWEST_STARTS
from specdecode_operator.version import __version__

_BY_CHANCE: Final = 0.05


_MOST_ASKED: Final = 64


def compare_outputs(baseline: Checks | None, arm: Checks | None, lossy: str | None) -> OutputsFound:
    """Compare the answers of an arm with the baseline's."""
    differences: list[Difference] = []
    prompts, structured, tool_calls = 0, None, None
    if baseline is not None and arm is not None:
        of_arm = {each.prompt_sha256: each for each in arm.greedy.answers}
        for each in baseline.greedy.answers:
            other = of_arm.get(each.prompt_sha256)
            # Two empty answers prove no equality: an engine that answers nothing would do so for any prompt.
            if other is not None and (each.tokens or other.tokens):
                prompts += 1
                if each.tokens != other.tokens:
                    differences.append(_difference(each, other))
        structured = _parsing(baseline.structured, arm.structured)
        tool_calls = _parsing(baseline.tool_calls, arm.tool_calls)
    explained = sum(each.explained for each in differences)
    if lossy is not None:
        # A lossy setting is never called equal: the prompts prove nothing about other prompts.
        outputs = Outputs.LOSSY
    elif not prompts:
        outputs = Outputs.NOT_CHECKED
    elif len(differences) > explained:
        outputs = Outputs.DIFFERENT
    else:
        outputs = Outputs.EXPLAINED if differences else Outputs.EQUAL
    return OutputsFound(
        outputs=outputs.value,
        prompts=prompts,
        equal=prompts - len(differences),
        explained=explained,
        different=len(differences) - explained,
        first_difference=min(differences, key=lambda each: each.explained, default=None),
        structured=structured[0] if structured else None,
        tool_calls=tool_calls[0] if tool_calls else None,
        parses_less=any(each is not None and each[1] for each in (structured, tool_calls)),
        not_measured=list(_not_measured(baseline, arm, prompts)),
    )


def _difference(baseline: GreedyAnswer, other: GreedyAnswer) -> Difference:
    """Return the first position at which two answers differ, or at which one has ended."""
    shorter = min(len(baseline.tokens), len(other.tokens))
    position = next((at for at in range(shorter) if baseline.tokens[at] != other.tokens[at]), shorter)
    margins = [each.top2_margin[: len(each.tokens)][position : position + 1] for each in (baseline, other)]
    margin = next((each for each in chain(*margins) if each is not None), None)
    return Difference(
        prompt_sha256=baseline.prompt_sha256,
        position=position,
        baseline_margin=margin,
        explained=margin is not None and abs(margin) <= CLOSE_NATS,
    )


def _parsing(of_baseline: ParsingCheck, of_arm: ParsingCheck) -> tuple[tuple[float, float], bool] | None:
    """Return the parsed shares of arm and baseline, and whether the arm's is lower than chance explains.

    The test is Fisher's exact one, one-sided.
    """
    if not of_baseline.asked or not of_arm.asked:
        return None
    own, before = (round(min(each.parsed, each.asked) / each.asked, 4) for each in (of_arm, of_baseline))
    (asked, parsed), (asked_before, parsed_before) = (
        (min(each.asked, _MOST_ASKED), min(each.parsed, each.asked, _MOST_ASKED)) for each in (of_arm, of_baseline)
    )
    together, right = asked + asked_before, parsed + parsed_before
    as_few = sum(
        math.comb(asked, count) * math.comb(asked_before, right - count)
        for count in range(max(0, right - asked_before), parsed + 1)
    )
    return (own, before), as_few / math.comb(together, right) <= _BY_CHANCE


def _not_measured(baseline: Checks | None, arm: Checks | None, prompts: int) -> Iterator[str]:
    if baseline is None or arm is None:
        yield f"outputs were not checked: {'the baseline' if baseline is None else 'it'} has no {CHECKS}"
        return
    for what, of_baseline, of_arm in (
        ("greedy outputs", baseline.greedy, arm.greedy),
        ("structured outputs", baseline.structured, arm.structured),
        ("tool calls", baseline.tool_calls, arm.tool_calls),
    ):
        why = of_baseline.not_measured or of_arm.not_measured
        if why is None and of_baseline is baseline.greedy and not prompts:
            why = "no prompt has an answer with a token of both engines"
        if why is not None:
            yield f"{what} were not checked: {why}"


MOST_POINTS_LOST: Final = 5.0
"""Loss of acceptance in points above which a draft no longer fits a quantized target.

A rule of thumb that shows where to look. Goodput decides.
"""

_PRECISIONS: Final = {"targetQuantization": "its target is in", "kvCacheDtype": "its KV cache is in"}


def lossy_of(folders: ArmFolders, name: str) -> str | None:
    """Return why an arm may answer otherwise than the baseline by its settings, precision among them."""
    experiment = folders.experiment
    return experiment.lossy.get(name) or (_other_precision(folders, name) if name != experiment.baseline else None)


def precision_notes(folders: ArmFolders, arms: list[Arm]) -> Iterator[str]:
    """Yield the effect of another precision on acceptance, for arms that speculate like the baseline."""
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
                f"{said}: a loss of {lost:.1f} points, more than {MOST_POINTS_LOST:g}, shows that the draft no longer"
                " fits: use a higher precision, a draft trained for this precision, or a smaller K"
            )
        else:
            yield f"{said}: the loss is at most {MOST_POINTS_LOST:g} points, so the draft still fits"


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
    """Yield differences other than the compared setting that may explain a result."""
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
            yield f"arm {name}: its repetitions ran on different GPUs or nodes: the interval includes how these differ"


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
    for word, after in zip_longest(words, words[1:]):
        if word.startswith("--compilation-config"):
            return word.partition("=")[2] or after
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
        If arms are missing, their workloads differ, or a file cannot be read.
    """
    folders = find_arms(folder)
    try:
        phases = CaptureWorkload.parse(folders.first.workload, newer=True).phases
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, ("workload", *first["loc"])))
        raise not_comparable(f"manifest.json: {where}: {first['msg']}: fetch the capture again") from error
    sums = _read(folders, phases)
    experiment = folders.experiment
    own = sums[experiment.baseline]
    loads = [load_of(own, own, phase, price_per_gpu_hour) for phase in phases]
    arms = [_arm(experiment.baseline, own, own, message="baseline of the other arms", loads=loads)]
    arms += [_candidate(sums, name, folders, loads, phases, price_per_gpu_hour) for name in experiment.arms[1:]]
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


def _read(folders: ArmFolders, phases: Sequence[Phase]) -> dict[str, ArmSums]:
    """Return the sums of all existing arms; at most two repetitions' requests are in memory at the same time."""
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


def _arm(name: str, own: ArmSums | None, baseline: ArmSums, **judged: Any) -> Arm:
    """Return an arm, without figures if it has no repetition."""
    undecided = {"verdict": None, "lossy": None, "crossover_running": None, "outputs": None}
    return Arm(
        name=name,
        repetitions=[each.number for each in own.repetitions] if own else [],
        engine=engine_of(own.manifest) if own else None,
        drafting=drafting_of(own, baseline) if own else None,
        prefix_cache=prefix_cache_of(own, baseline) if own else None,
        kv_cache=kv_cache_of(own) if own else None,
        **(undecided | judged),
    )


def _candidate(  # noqa: PLR0913, PLR0917  what an arm is compared with
    sums: Mapping[str, ArmSums],
    name: str,
    folders: ArmFolders,
    of_baseline: Sequence[Load],
    phases: Sequence[Phase],
    price: float | None,
) -> Arm:
    experiment = folders.experiment
    own, baseline = sums.get(name), sums[experiment.baseline]
    lossy = lossy_of(folders, name)
    if own is None:
        message, verdict = "no verdict: all of its repetitions are missing", ArmVerdict.INCONCLUSIVE
        return _arm(name, None, baseline, message=message, verdict=verdict.value, lossy=lossy, loads=[])
    there = {each.number for each in own.repetitions} & {each.number for each in baseline.repetitions}
    missing = experiment.repetitions - len(there)
    comparable = [each for each in phases if experiment.slo.given or not sends_at_a_rate(each)]
    loads = []
    for phase in phases:
        load = load_of(own, baseline, phase, price)
        if phase not in comparable:
            why = "all arms receive requests at the same rate, and goodput is not defined: set spec.slo"
            loads.append(msgspec.structs.replace(load, not_compared=why))
        elif silent := [each.name for each in (baseline, own) if not each.answered(phase.name)]:
            why = f"no request of it was answered in arm {silent[0]}"
            loads.append(msgspec.structs.replace(load, not_compared=why))
        else:
            goodputs = [list(each.goodputs[phase.name].values()) for each in sums.values()]
            # By Bonferroni's inequality the level holds for all loads of an arm together, also if they are dependent.
            level = 1 - (1 - DEFAULT_LEVEL) / len(comparable)
            predicted = predicted_ratio(own, baseline, phase.name)
            place = list(sums).index(name)
            found = judge(own.pairs[phase.name], goodputs, place, level, predicted, whole=not missing)
            loads.append(msgspec.structs.replace(load, compared=found))
    outputs = compare_outputs(read_checks(baseline.repetitions), read_checks(own.repetitions), lossy)
    verdict, crossing = arm_verdict(loads, outputs), crossover(of_baseline, loads)
    why_none = None
    if missing:
        why_none = f"no verdict, because {missing} of {experiment.repetitions} repetitions are missing"
    elif experiment.repetitions < FEWEST_STARTS:
        why_none = (
            "no verdict with one repetition, which does not show how engines vary from start to start: use 3 or 4"
        )
    return _arm(
        name,
        own,
        baseline,
        message=sentence(
            verdict, of_baseline, loads, outputs, crossing, DEFAULT_LEVEL, experiment.repetitions, why_none
        ),
        verdict=verdict.value,
        lossy=lossy,
        loads=loads,
        crossover_running=crossing,
        outputs=outputs,
    )
