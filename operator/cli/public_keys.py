"""Public keys that options name."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specdecode_operator.cli.options import fail
from specdecode_operator.problems import printable

if TYPE_CHECKING:
    from specdecode_operator.attestation.keys import PublicKey

KeysOption = Annotated[
    list[Path],
    typer.Option(
        "--key",
        metavar="FILE",
        help="Public key of who may have signed, such as cosign.pub. May be repeated, while one replaces another.",
    ),
]


def public_keys(files: Sequence[Path], option: str = "--key") -> "tuple[PublicKey, ...]":
    """Return the keys of files that an option names; end with the exit code of invalid input where one holds none."""
    from specdecode_operator.attestation.keys import KeyFormatError, PublicKey  # noqa: PLC0415
    from specdecode_operator.cli.text_files import DocumentError, read_text  # noqa: PLC0415

    keys = []
    for file in files:
        try:
            keys.append(PublicKey.read(read_text(str(file)).encode()))
        except KeyFormatError as error:
            fail(f"{option}: {printable(str(file))}: {error}")
        except DocumentError as error:
            fail(f"{option}: {error}")
    return tuple(keys)
