"""Values of command lines that are checked before anything is started or measured."""

import math
import os
from argparse import ArgumentTypeError
from pathlib import Path


def positive(text: str) -> float:
    """Return a number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise ArgumentTypeError(f"{text!r}: use a number above 0, such as 10")
    return number


def whole(text: str) -> int:
    """Return a whole number."""
    try:
        return int(text)
    except ValueError as error:
        raise ArgumentTypeError(f"{text!r}: use a whole number, such as 7") from error


def count(text: str) -> int:
    """Return a whole number from 1 on."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise ArgumentTypeError(f"{text!r}: use a whole number from 1 on, such as 10")
    return number


def counts(text: str) -> tuple[int, ...]:
    """Return whole numbers from 1 on, with commas between them."""
    try:
        return tuple(count(each) for each in text.split(","))
    except ArgumentTypeError as error:
        raise ArgumentTypeError(f"{text!r}: use whole numbers from 1 on, such as 100,1000") from error


def output_file(text: str) -> Path:
    """Return a file that can be written."""
    file = Path(text)
    if not file.parent.is_dir():
        raise ArgumentTypeError(f"{text!r}: there is no folder {file.parent}: make it, or name another file")
    if file.is_dir():
        raise ArgumentTypeError(f"{text!r}: is a folder: name a file in it")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ArgumentTypeError(f"{text!r}: may not be written: name another file")
    return file
