"""The patterns of fields, and what they mean to whoever writes one: nobody should have to read a regular expression."""

from collections.abc import Mapping
from typing import Final

OBJECT_NAME: Final = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"
DATA_KEY: Final = r"^[-._a-zA-Z0-9]+$"
LABEL_VALUE: Final = r"^[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$"
VARIABLE_NAME: Final = r"^[-._a-zA-Z][-._a-zA-Z0-9]*$"
ENGINE_VERSION: Final = r"^[0-9]+\.[0-9]+$"
SERVED_NAME: Final = r"^[^\s-]( *\S)*$"
TEMPERATURE: Final = r"^[0-2](\.[0-9]{1,2})?$"
STRETCH: Final = r"^[1-9][0-9]{0,3}(\.[0-9]{1,3})?$"
RATE: Final = r"^(0\.[0-9]{0,2}[1-9]|[1-9][0-9]{0,5}(\.[0-9]{1,3})?)$"
GIBIBYTES: Final = r"^(0\.[0-9]{0,2}[1-9]|[1-9][0-9]{0,4}(\.[0-9]{1,3})?)$"
SIZE: Final = r"^[1-9][0-9]{0,8}(\.[0-9]{1,3})?(Ki|Mi|Gi|Ti|Pi|k|M|G|T|P)$"
PHASE_NAME: Final = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
SCHEDULE_NAME: Final = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"
CRON_LINE: Final = r"^\S+ +\S+ +\S+ +\S+ +\S+$"
TIME_ZONE: Final = r"^[A-Za-z0-9_+/-]+$"

CRON_FIX: Final = "write minute, hour, day, month and weekday, such as 0 3 * * 1-5"

MEANINGS: Final[Mapping[str, str]] = {
    OBJECT_NAME: "an object's name: use a-z, 0-9, - and ., with a letter or digit at both ends",
    DATA_KEY: "a key of a Secret: use letters, digits, -, _ and .",
    LABEL_VALUE: "a label's value: use letters, digits, -, _ and ., with a letter or digit at both ends",
    VARIABLE_NAME: "an environment variable's name: use letters, digits, _, - and ., not beginning with a digit",
    ENGINE_VERSION: "a version of vLLM: write two numbers and a dot, such as 0.32",
    SERVED_NAME: "a model's name: use no tabs and line ends, no spaces at its ends, and do not begin with -",
    TEMPERATURE: "a temperature: write a decimal below 3 in quotes, with two places at most, such as '0.7'",
    STRETCH: "a factor: write a decimal from 1 to below 10000 in quotes, with three places at most, such as '4.0'",
    RATE: "a rate: write a decimal above 0 and below 1000000 in quotes, with three places at most, such as '0.5'",
    GIBIBYTES: "a size in GiB: write a decimal above 0 and below 100000 in quotes, with three places at most, such as"
    " '14.5'",
    SIZE: "a size: write a number with its unit, such as 20Gi",
    PHASE_NAME: "a phase's name: use a-z, 0-9 and -, with a letter or digit at both ends",
    SCHEDULE_NAME: "a schedule's name: use a-z, 0-9 and -, beginning with a letter and not ending with -",
    CRON_LINE: f"a cron line: {CRON_FIX}",
    TIME_ZONE: "a time zone: write its IANA name, such as Europe/Berlin",
}
"""What stands after ``must match the pattern of``, by the pattern: a test knows them all."""
