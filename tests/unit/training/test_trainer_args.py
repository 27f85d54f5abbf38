"""Arguments for the trainer."""

import pytest

from tests.support.trainings import decided, surroundings, training, training_spec


def reason(*args: str) -> str | None:
    decision, _ = decided(training(training_spec(trainer={"image": "i", "args": list(args)})), surroundings())
    if decision.writes.job is not None:
        return None
    assert "spec.trainer.args[" in decision.readiness.message
    return decision.readiness.reason


@pytest.mark.parametrize(
    "args",
    [
        (),
        ("--ttt-steps", "3"),
        ("--num-layers=2", "--optimizer", "adamw"),
        ("--weight-decay", "-0.1"),
        ("--max-steps", "5"),
    ],
)
def test_accepted(args: tuple[str, ...]) -> None:
    assert reason(*args) is None


@pytest.mark.parametrize(
    "args",
    [
        ("--save-path", "/tmp"),
        ("--ttt-steps", "3", "--save-path=/tmp"),
        ("--save-p", "/tmp"),  # argparse takes it for --save-path
        ("--trust-remote-code",),
        ("--logger", "wandb"),
        ("--lr", "1"),
        ("-h",),
        ("--",),
    ],
)
def test_rejected(args: tuple[str, ...]) -> None:
    assert reason(*args) == "TrainerArgumentRejected"
