"""Keeps secrets that stand in a server as plain text out of what is printed."""

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from specdecode_operator.kube.untyped import objects

if TYPE_CHECKING:
    from specdecode_operator.migration.builder import SpecBuilder

_NAME: Final = re.compile(
    r"(?:^|[_-])(?:SECRET|TOKEN|PASSWORD|PASSWD|PASSPHRASE|PASS|CREDENTIALS?|(?:API|ACCESS|PRIVATE|SECRET)_?KEY)$"
    r"|[_-]PWD$",
    re.IGNORECASE,
)
"""How variables are called whose value is a secret."""

_VALUE: Final = re.compile(
    r"(?P<address>\b[a-z][a-z0-9+.-]{0,31}://)[^\s/@:]{0,512}:[^\s/@]{1,512}@"
    r"|\b(?:hf_[A-Za-z0-9]{16,512}|sk-[A-Za-z0-9_-]{16,512}|gh[pousr]_[A-Za-z0-9]{16,512}|glpat-[\w-]{16,512}"
    r"|AKIA[A-Z0-9]{16}|nvapi-[\w-]{16,512})"
    r"|\bBearer\s+[A-Za-z0-9._~+/-]{16,4096}"
    # A token of a tokenizer is none, a value of $(VARIABLE), in a file or in a Secret stands elsewhere.
    r"|(?P<key>(?i:secret|passw(?:or)?d|passphrase|(?:api|access|private|secret)[_-]?key"
    r"|(?:access|api|auth|hf|hub|refresh|security|session)[_-]?token)[\"']?\s{0,8}[=:]\s{0,8}[\"']?)"
    r"(?![$/]|(?:null|none|true|false)\b|name [\w.-]{1,253}, key )[^\s\"',}]{1,4096}",
)
"""How tokens of the hub, of model services, of repositories and clouds look, passwords in addresses, and secrets in
JSON and options, by their keys."""

_WITHHELD: Final = "WITHHELD"
_MESSAGE: Final = "stands there as plain text: put it into a Secret, and name that in podTemplate, by valueFrom"


def is_secret_variable(name: str, value: str) -> bool:
    """Return whether a variable holds a secret, by its name or by what it looks like."""
    return bool(value) and (_NAME.search(name) is not None or _VALUE.search(value) is not None)


def without_secrets(text: str) -> str:
    """Return a text with what looks like a token or a password replaced."""
    return _VALUE.sub(
        lambda found: f"{found['address'] or found['key'] or ''}{_WITHHELD}{'@' if found['address'] else ''}", text
    )


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
        return [_without(part, f"{path}[{index}]", builder) for index, part in enumerate(value)]
    if isinstance(value, str) and _VALUE.search(value):
        builder.decide(
            path, without_secrets(value)[:64], "holds a secret as plain text: put it into a Secret, or remove it"
        )
        return without_secrets(value)
    return value
