"""Reject arguments in spec.trainer.args that the operator sets, or that a training cannot have."""

from collections.abc import Mapping, Sequence
from typing import Final

from specdecode_operator.deployment.conditions import Blocked
from specdecode_operator.problems import shown

_REMOVE: Final = "the operator sets it; remove it"
_NO_NETWORK: Final = "the trainer runs offline, and the log of its container shows the progress; remove it"
_CODE: Final = "code from a model's repository is never executed; remove it"
_REJECTED: Final[Mapping[str, str]] = {
    "--config": "write the arguments into spec.trainer.args",
    "--dump-config": "the trainer would exit; remove it",
    "--dry-run": "the trainer would exit without training; remove it",
    "--help": "the trainer would exit; remove it",
    "--speculator-type": "use spec.method",
    "--from-pretrained": "use spec.from",
    "--epochs": "use spec.trainer.epochs",
    "--lr": "use spec.trainer.learningRate",
    "--total-seq-len": "use spec.trainer.sequenceLength",
    "--seed": "use spec.seed",
    "--target-layer-ids": "the operator chooses the layers whose hidden states are written; remove it",
    "--trust-remote-code": _CODE,
    "--logger": _NO_NETWORK,
    "--log-dir": _NO_NETWORK,
    "--run-name": _NO_NETWORK,
    "--vllm-endpoint": _NO_NETWORK,
}
"""Fix, by flag of `speculators train`."""

_SET_BY_US: Final = (
    *("--verifier-name-or-path", "--data-path", "--save-path", "--train-data-ratio", "--on-missing", "--on-generate"),
    *("--hidden-states-backend", "--hidden-states-path", "--no-resume-from-checkpoint", "--save-best", "--log-freq"),
    *("--mooncake-master", "--mooncake-metadata-server"),
)


def arguments_blocked(args: Sequence[str]) -> Blocked | None:
    """Return the blocking reason for the first argument that is rejected; None if all are allowed."""
    for number, argument in enumerate(args):
        flag, _, _ = argument.partition("=")
        if not flag.startswith("-") or _is_number(flag):
            continue
        fix = "write a flag with two dashes"
        if flag.startswith("--") and flag != "--":
            # The trainer also accepts abbreviated flags.
            named = next((each for each in (*_REJECTED, *_SET_BY_US) if each.startswith(flag)), None)
            if named is None:
                continue
            fix = _REJECTED.get(named, _REMOVE)
        message = f"spec.trainer.args[{number}]: {shown(argument)}: {fix} in another training"
        return Blocked("TrainerArgumentRejected", message, permanent=True)
    return None


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
