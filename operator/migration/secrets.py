"""Keeps plain-text secrets of a server out of the imported spec and out of the report."""

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from specdecode_operator.kube.untyped import objects
from specdecode_operator.redaction import is_secret_flag, redact

if TYPE_CHECKING:
    from specdecode_operator.migration.builder import SpecBuilder

_NAME: Final = re.compile(
    r"(?:^|[_-])(?:SECRET|TOKEN|PASSWORD|PASSWD|PASSPHRASE|PASS|CREDENTIALS?|(?:API|ACCESS|PRIVATE|SECRET)_?KEY)$"
    r"|[_-]PWD$|(?:^|[_-])(?:SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?)(?:V?\d+)?(?:[_-]|$)",
    re.IGNORECASE,
)
"""How variables are called whose value is a secret."""

_PERHAPS: Final = re.compile(r"(?:^|[_-])(?:TOKEN|KEY)(?:V?\d+)?(?:[_-]|$)", re.IGNORECASE)
"""How variables are called whose value is a secret, unless it is a number or a switch."""

_ABOUT: Final = re.compile(r"[_-](?:FILE|PATH|DIR|NAME)$", re.IGNORECASE)
_SETTING: Final = re.compile(r"[+-]?\d{1,9}(?:\.\d{1,9})?|true|false|on|off|yes|no|none|auto", re.IGNORECASE)

_NO_VALUE: Final = r"(?![\"']?[-$/<>|&;])"
_WITHHELD: Final = "WITHHELD"
_MESSAGE: Final = "stands there as plain text: put it into a Secret, and name that in podTemplate, by valueFrom"


def is_secret_variable(name: str, value: str) -> bool:
    """Return whether a variable holds a secret, by its name or by what it looks like."""
    by_name = _NAME.search(name) or (_PERHAPS.search(name) and not _SETTING.fullmatch(value))
    return bool(value) and (bool(by_name and not _ABOUT.search(name)) or without_secrets(value) != value)


def without_secrets(text: str) -> str:
    """Return a text with everything that has the form of a secret replaced."""
    return redact(text, _WITHHELD)


def withhold_secrets(builder: "SpecBuilder") -> None:
    """Take secrets out of the spec; ask for each."""
    for container in _containers(builder):
        kept = []
        for each in objects(container, "env"):
            name = str(each.get("name"))
            if is_secret_variable(name, str(each.get("value") or "")):
                builder.decide("spec.podTemplate", f"env {name} of {container.get('name')}", _MESSAGE)
            else:
                kept.append(each)
        if "env" in container:
            container["env"] = kept
    builder.spec = _without(builder.spec, "spec", builder)


def _containers(builder: "SpecBuilder") -> Iterator[dict[str, Any]]:
    """Return copies of the containers of the podTemplate, put into their place: they are the source's own."""
    pod = builder.get("podTemplate.spec")
    for key in ("containers", "initContainers"):
        if isinstance(pod, dict) and isinstance(pod.get(key), list):
            pod[key] = [dict(each) if isinstance(each, dict) else each for each in pod[key]]
            yield from objects(pod, key)


def _without(value: Any, path: str, builder: "SpecBuilder") -> Any:
    if isinstance(value, dict):
        return {key: _without(part, f"{path}.{key}", builder) for key, part in value.items()}
    if isinstance(value, list):
        before = ["", *value]
        return [
            _withheld(f"{path}[{index}]", f"{flag} {_WITHHELD}", _WITHHELD, builder)
            if _is_behind_flag(flag, part)
            else _without(part, f"{path}[{index}]", builder)
            for index, (flag, part) in enumerate(zip(before, value, strict=False))
        ]
    if isinstance(value, str):
        cleaned = without_secrets(value)
        return value if cleaned == value else _withheld(path, cleaned, cleaned, builder)
    return value


def _is_behind_flag(flag: Any, value: Any) -> bool:
    """Return whether a word is the value of a flag for a password."""
    both = isinstance(flag, str) and isinstance(value, str)
    return both and is_secret_flag(flag) and re.match(rf"{_NO_VALUE}.", value) is not None


def _withheld(path: str, shown: str, cleaned: str, builder: "SpecBuilder") -> str:
    builder.decide(path, shown, "holds a secret as plain text: put it into a Secret, or remove it")
    return cleaned
