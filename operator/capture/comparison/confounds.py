"""What beside the setting may make arms differ, and what else to know before believing a comparison."""

from collections.abc import Iterator
from typing import Any

from specdecode_operator.capture.comparison.precisions import lossy_of
from specdecode_operator.capture.comparison.reading.folders import ArmFolders, ArmManifest, Repetition
from specdecode_operator.capture.validation.prompts import RANDOM_PROMPTS, are_random
from specdecode_operator.problems import printable, shown


def notes_of(folders: ArmFolders) -> list[str]:
    """Return the confounds of a capture, a sentence each."""
    return [printable(each) for each in _notes(folders)]


def _notes(folders: ArmFolders) -> Iterator[str]:
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
    yield from _same_commands(folders)
    yield from _within_arms(folders)


def _differences(name: str, arm: ArmManifest, baseline: ArmManifest) -> Iterator[str]:
    """Yield what differs though nobody asked to compare it."""
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
    """Return what the command says of CUDA graphs: K by batch size and some drafts change it."""
    command = manifest.context.get("command")
    words = [str(each) for each in command] if isinstance(command, list) else []
    for place, word in enumerate(words):
        if word.startswith("--compilation-config"):
            return word.partition("=")[2] or (words[place + 1] if place + 1 < len(words) else None)
    return None


def _same_commands(folders: ArmFolders) -> Iterator[str]:
    experiment = folders.experiment
    of_first = _command(folders.repetitions[experiment.baseline])
    for name in experiment.arms[1:]:
        if of_first is not None and _command(folders.repetitions[name]) == of_first:
            yield f"arm {name} starts the same engine as the baseline: an A/A test, which should be Inconclusive"


def _command(repetitions: list[Repetition]) -> Any:
    return repetitions[0].manifest.context.get("command") if repetitions else None


def _within_arms(folders: ArmFolders) -> Iterator[str]:
    """Yield where repetitions of one arm were not on the same GPUs."""
    for name, repetitions in folders.repetitions.items():
        places = {(each.manifest.node, *each.manifest.gpu_uuids) for each in repetitions}
        if len(places) > 1:
            yield f"arm {name}: its repetitions ran on other GPUs or nodes: how these differ is in the interval"


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "not known" if value is None else shown(value)
