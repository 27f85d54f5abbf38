"""Strict parser for whole numbers in untrusted text."""

from typing import Final

MOST_DIGITS: Final = 15
"""Digits of the largest number that is read: more than the bytes of memory of any machine, and exact as a float."""


def whole_number(text: object, most: int = 10**MOST_DIGITS - 1) -> int | None:
    """Return the number that ASCII digits stand for; None for any other value and for a number above ``most``.

    Python's ``int`` takes digits of all scripts, and raises an error for more than 4,300 of them.
    """
    digits = str(text) if isinstance(text, str) or (type(text) is int and 0 <= text <= most) else ""
    if not (digits.isascii() and digits.isdecimal() and len(digits) <= MOST_DIGITS):
        return None
    number = int(digits)
    return number if number <= most else None
