"""What docker and compose say of a container, by the words of a pod."""

import re
from typing import Any, Final

from specdecode_operator.documents.numbers import whole_number
from specdecode_operator.engine.environment import API_KEY_VARIABLE
from specdecode_operator.migration.environment import TOKEN_VARIABLES
from specdecode_operator.migration.sources.workload import Remarks

_UNITS: Final = {"": "", "b": "", "k": "Ki", "m": "Mi", "g": "Gi", "t": "Ti"}
MOST_USER_ID: Final = 2**31 - 1
"""Largest runAsUser and runAsGroup that Kubernetes takes (IsValidUserID of k8s.io/apimachinery)."""

_MOST_GPUS: Final = 99_999
"""More than any machine has."""

_VOLUMES: Final = "/var/lib/docker/volumes"


def as_text(word: str) -> str:
    """Return a word with what a pod would take for the name of a variable written as text."""
    return re.sub(r"\$(?=[$(])", "$$", word)


def add_variable(container: dict[str, Any], name: str, value: str | None, remarks: Remarks) -> None:
    """Give a container a variable; None is one whose value the machine has that runs it."""
    if value is None and name in {API_KEY_VARIABLE, *TOKEN_VARIABLES}:
        # It belongs into a Secret, wherever it comes from.
        value = ""
    if value is None:
        message = "has its value only on the machine that runs it: write NAME=VALUE, and import again"
        remarks.decide("spec.engine.env", name, message)
        return
    container.setdefault("env", []).append({"name": name, "value": as_text(value)})


def add_bind(
    container: dict[str, Any], volumes: list[dict[str, Any]], source: str, target: str, *, read_only: bool
) -> None:
    """Mount a folder of the machine, or a volume by its name, as a pod would."""
    name = f"volume-{len(volumes)}"
    # docker keeps what it calls a volume in a folder of its own.
    is_folder = source.startswith(("/", ".", "~", "$"))
    path = source if is_folder else f"{_VOLUMES}/{source or 'nameless'}/_data"
    volumes.append({"name": name, "hostPath": {"path": path}})
    mount = {"name": name, "mountPath": target} | ({"readOnly": True} if read_only else {})
    container.setdefault("volumeMounts", []).append(mount)


def bytes_quantity(amount: str) -> str:
    """Return docker's amount of memory, such as 20g, as Kubernetes writes it; anything else as it is."""
    match = re.fullmatch(r"(\d{1,18}(?:\.\d{1,9})?)\s?([bkmgt]?)i?b?", str(amount).lower())
    return f"{match[1]}{_UNITS[match[2]]}" if match else str(amount)


def gpus_of_devices(value: str) -> int | None:
    """Return how many GPUs ``--gpus`` means; None for all that there are."""
    text = value.strip("\"'")
    if (number := whole_number(text, _MOST_GPUS)) is not None:
        return number
    devices = re.search(r"device=([^\"']+)", text)
    if devices:
        return len([each for each in devices[1].split(",") if each and "=" not in each])
    count = re.search(r"count=(\d{1,5})\b", text)
    return int(count[1]) if count else None
