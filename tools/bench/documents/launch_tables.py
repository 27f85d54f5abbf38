"""Generated tables about vLLM's command line: the argument of each field, and the differences between versions."""

import re
from collections.abc import Iterator

from specdecode_operator.enums import Platform
from specdecode_operator.vllm.arguments import ARGUMENTS
from specdecode_operator.vllm.profiles import KNOWN_VERSIONS, find_profile
from specdecode_operator.vllm.speculative_config import EXTRA_CONFIG, SPECULATIVE_KEYS

NEWEST = find_profile(KNOWN_VERSIONS[-1])
_VERSIONS = re.compile(r"(\| vLLM \|.*\n\| --- .*\n)(?:\|.*\n)*")


def with_version_rows(text: str) -> str:
    """Return docs/reference/launch.md with the rows of its table of versions as they are now."""
    body = "".join(f"| {' | '.join(row)} |\n" for row in _version_rows())
    return _VERSIONS.sub(lambda table: table[1] + body, text, count=1)


def argument_table() -> str:
    """Return the table of the arguments that fields become, with vLLM's default; the operator's own come last."""
    header = ("| field | becomes | vLLM's own default |", "| --- | --- | --- |")
    return "\n".join([*header, *(f"| {' | '.join(row)} |" for row in _field_rows()), ""])


def _field_rows() -> Iterator[tuple[str, ...]]:
    arguments = [
        (argument.field, f"`{argument.flag}`", _default(argument.flag))
        for argument in ARGUMENTS
        if argument.flag != "--speculative-config"
    ]
    keys = [(key.field, f"`{key.key}` in `--speculative-config`", "-") for key in SPECULATIVE_KEYS]
    rows = [*arguments, *keys, (EXTRA_CONFIG, "any other key of `--speculative-config`", "-")]
    for field in sorted({field for field, *_ in rows if field}):
        yield from ((f"`{field}`", *rest) for each, *rest in rows if each == field)
    yield from (("none: the operator's", *rest) for field, *rest in arguments if field is None)


def _default(flag: str) -> str:
    return f"`{NEWEST.defaults[flag]}`" if flag in NEWEST.defaults else "-"


def _version_rows() -> Iterator[tuple[str, ...]]:
    for version in reversed(KNOWN_VERSIONS):
        profile = find_profile(version)
        first = {name for name, since in _firsts().items() if since == version}
        gone = set(profile.removed_flags) - set(find_profile(_before(version)).removed_flags)
        yield (
            version,
            f"`{profile.images[Platform.GPU]}`",
            ", ".join(f"{method} {runner}" for method, runner in profile.runners.items()),
            str(profile.block_size_multiples[Platform.CPU]),
            ", ".join(f"`{name}`" for name in sorted(first)) or "-",
            ", ".join(f"`{name}`" for name in sorted(gone)) or "-",
        )


def _before(version: str) -> str:
    return KNOWN_VERSIONS[max(0, KNOWN_VERSIONS.index(version) - 1)]


def _firsts() -> dict[str, str]:
    """First version of each flag that the oldest version lacks; other spellings of it are left out."""
    later = find_profile(KNOWN_VERSIONS[0]).later_flags
    return {name: first for name, first in later.items() if find_profile(first).flags[name].name == name}
