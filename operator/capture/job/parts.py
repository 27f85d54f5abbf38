"""What a capture's Job has to do: each arm as often as was asked for, in an order that the seed draws."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Final

import msgspec

from specdecode_operator.capture.files.errors import CaptureError
from specdecode_operator.capture.files.manifest import Experiment
from specdecode_operator.capture.job.finish import Asked
from specdecode_operator.capture.job.places import Places
from specdecode_operator.capture.load.workload import ArmSettings, CheckSettings, RunSettings

NO_CHECKS: Final = CheckSettings()


@dataclass(frozen=True)
class Part:
    """One arm, once: an engine under the whole load."""

    settings: RunSettings  # with the engine of the arm
    asked: Asked
    places: Places
    arm: ArmSettings | None = None  # None where the engine's container itself starts the engine

    @property
    def checks(self) -> CheckSettings:
        """How much is asked to compare its answers with those of other arms: once is enough."""
        compares = self.asked.experiment is not None and self.places.repetition == 1
        return self.settings.checks if compares else NO_CHECKS

    def named(self, error: CaptureError) -> CaptureError:
        """Return an error that says whose it is."""
        if self.arm is None:
            return error
        whose = f"arm {self.arm.name}, repetition {self.places.repetition}"
        return CaptureError(error.reason, f"{whose}: {error.message}")


def order_of_arms(arms: Sequence[str], repetitions: int, seed: int) -> list[list[str]]:
    """Return the arms in the order in which they are measured, for each repetition.

    Two repetitions belong together: the first has an order that is drawn, the second the opposite one. What changes
    steadily meanwhile, such as a GPU that gets warmer, then meets all arms alike.
    """
    order: list[list[str]] = []
    while len(order) < repetitions:
        drawn = list(arms)
        Random(f"{seed}/arms/{len(order)}").shuffle(drawn)  # noqa: S311 - not for secrets
        order += [drawn, drawn[::-1]]
    return order[:repetitions]


def parts_of(settings: RunSettings, asked: Asked, attempt: str) -> list[Part]:
    """Return what is to be done, in this order."""
    root, namespace, capture = Path(settings.root), settings.namespace, settings.capture
    if not settings.arms:
        return [Part(settings, asked, Places(root, namespace, capture, attempt))]
    arms = {arm.name: arm for arm in settings.arms}
    order = order_of_arms(list(arms), settings.repetitions, settings.seed)
    experiment = _experiment(settings, order) if len(arms) > 1 else None
    return [
        Part(
            settings.model_copy(update={"engine": arms[name].engine}),
            msgspec.structs.replace(asked, context=arms[name].context, experiment=experiment),
            Places(root, namespace, capture, attempt, name, repetition),
            arms[name],
        )
        for repetition, names in enumerate(order, start=1)
        for name in names
    ]


def _experiment(settings: RunSettings, order: list[list[str]]) -> Experiment:
    return Experiment(
        arms=[arm.name for arm in settings.arms],
        baseline=settings.arms[0].name,
        repetitions=settings.repetitions,
        order=order,
        slo=settings.slo,
        lossy={arm.name: arm.lossy for arm in settings.arms if arm.lossy is not None},
    )
