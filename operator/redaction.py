"""Mask secrets in messages, then shorten them."""

import re
from collections.abc import Iterator
from functools import cache, lru_cache
from typing import Final

HIDDEN: Final = "(a secret)"

_BOUND: Final = 65_536
"""Characters of a text that `clip` reads: several times the longest message that it returns."""
_LONGEST_WORD: Final = 8192
"""Characters without a space in which a secret may begin and not end: the largest request header of most servers."""
_ELLIPSIS: Final = "…"
_WORD_AT_THE_END: Final = 40
"""Characters that are given up to end with a whole word."""
_WORDS_OF_A_HEADER: Final = 3
"""Words that a key and its value take, as in ``password = swordfish``."""
_SHORT_CHARACTERS: Final = 256
_SHORT_TEXTS_KEPT: Final = 2048
"""For texts that many objects share. Most others take 3 microseconds to redact, and would take megabytes here."""

_EDGE: Final = (
    r"(?:(?<![A-Za-z0-9])|(?<=%[0-9A-Fa-f]{2})|(?<=\\[bfnrt])|(?<=\\x[0-9A-Fa-f]{2})|(?<=\\u[0-9A-Fa-f]{4})"
    r"|(?<=[0-9;\[]m))"
)
"""Where a token may begin: after percent-encoding, JSON escapes and colours, too."""

_EQUALS: Final = r"(?:=|%3[Dd])"
_WORDS: Final = (
    r"(?i:a|add|an|and|are|as|authentication|but|by|can|cannot|could|empty|expired|false|for|found|from|give|given|had"
    r"|has|have|if|in|incorrect|invalid|is|it|key|list|may|missing|must|name|needs|neither|nil|no|none|nor|not|null|of"
    r"|off|on|optional|or|put|read|refused|remove|required|reserved|set|should|string|takes|than|that|the|then|this|to"
    r"|true|undefined|unknown|unset|use|was|were|when|where|which|with|without|write|wrong)"
)
_REFERENCE: Final = (
    rf"[<\[{{(]|{_ELLIPSIS}(?!\w)|[,;:.)\]}}>]{{1,8}}(?:\s|$)|\*{{2,64}}(?![\w*])|WITHHELD\b|\$[({{A-Z_]"
    r"|[/~](?:[\w.-]{1,64}/|run\b|etc\b)|\./|name [\w.-]{1,253}, key "
    r"|\.[A-Z][a-z]{1,16}\.[A-Za-z]|\|[a-z_]{1,64}\|>|class '|type=|secretKeyRef\b|valueFrom\b"
    r"|(?<=[<\[{(])(?i:filtered|hidden|masked|omitted|redacted)\b"
)
_OF_ENGINE: Final = (
    r"vLLM (?:\d{1,4}\.\d{1,4} )?(?:can|does|has|is|knows|needs|no longer|reads|refuses|serves|takes|verifies|would) "
)
_NO_SECRET: Final = rf"(?!{_REFERENCE}|{_OF_ENGINE}|{_WORDS}(?=[\s\"',.;:)\]}}>]|$))"
_NO_SECRET_IN_QUOTES: Final = rf"(?!{_REFERENCE}|{_WORDS}[>)\]}}]{{0,8}}\\?[\"'])"
"""What follows a key and is no secret: a variable, a placeholder, a path, and the words of a sentence about the key.

A sentence without quotes may begin with vLLM: "--password: vLLM 0.33 has no such flag".
"""

_KEY: Final = (
    r"(?i:passw(?:or)?d|passwort|passphrase|(?<![a-z])pwd|[_-]pass"
    r"|(?:api|access|account|client|private|secret|shared)[_-]?(?:access[_-]?)?(?:key|secret|signature)(?:[_-]?id)?"
    r"|(?:access|api|auth|bearer|bot|deploy|gh|github|gitlab|hf|hub|id|refresh|security|session|vault|wandb)[_-]?token|client-key-data)"
    r"|(?:TOKEN|SECRET|CREDENTIALS?|_KEY|_PASS|_PWD)(?:_[0-9]{1,3})?"
)
"""How variables, fields and parameters are called whose value is a secret."""

_OPEN: Final = r"(?:[\[({<]{1,8}\s{0,8}(?!\\{0,4}[\"'\s\[({<]|a\b))?"
"""Opening brackets of a value. They stay, and what follows is judged as a value without brackets; not before a quote,
which opens a list or an object, and not of "(a secret)"."""

_PERHAPS_KEY: Final = r"(?<![A-Za-z_-])(?i:token|secret|credentials?)"
"""Words that name a secret, or something else: their value must look like one."""
_LOOKS_RANDOM: Final = (
    r"(?![\d.,]{1,64}(?![\w-]))"
    r"(?=[^\s\"']{0,64}[0-9]|[^\s\"']{0,64}[A-Z][^\s\"']{0,64}[a-z]|[^\s\"']{12})"
)
_FLAG: Final = (
    r"(?<![\w.-])--?[\w.-]{0,64}(?i:secret|passw(?:or)?d|passphrase|credentials?|token"
    r"|(?:api|access|auth|encryption|master|private|secret|signing)[_-]?key)"
)
_IS: Final = r"\s{0,8}(?:=>|[=:]|%3[AaDd])\s{0,8}(?:[\[(](?=\\{0,4}[\"']))?"


def _values(key: str, between: str, looks: str = "", least: int = 1) -> Iterator[str]:
    start = rf"(?P<before>(?:{key})(?:\\{{0,4}}[\"'])?{between}"
    yield (
        rf"{start}(?P<quote>[\"']){_OPEN}){_NO_SECRET_IN_QUOTES}{looks}"
        rf"(?:\\.|(?!(?P=quote))[^\\\n]){{{least},}}"
    )
    yield rf"{start}\\{{1,4}}[\"']{_OPEN}){_NO_SECRET_IN_QUOTES}{looks}[^\"'\\\n]{{{least},}}"
    # A comma or a semicolon may be part of it; a full stop at its end belongs to the sentence.
    more = r"(?:[^\s\"']+(?<![,;:.)\]}]))?" if least == 1 else rf"[^\s\"']{{{least - 1},}}(?<![,;:.)\]}}])"
    yield rf"{start}{_OPEN}){_NO_SECRET}{looks}[^\s\"'\\]{more}"


_Form = tuple[frozenset[str], tuple[str, ...], str | None]


def _form(marks: str, *patterns: str, gate: str | None = None) -> _Form:
    """Return one form of secrets; the group ``before`` of a pattern is kept.

    A text is searched only if it has one of the ``marks`` and matches the ``gate``. Both are in lower case, and save
    time: most messages have no secret. All patterns take linear time: adjacent repetitions match different characters.
    """
    return frozenset(marks.split()), patterns, gate


# Compiling all patterns takes 20 ms, a tenth of the time of a short command. Most commands need none.
_compiled: Final = cache(re.compile)


_KEY_MARKS: Final = "pass pwd key secret token signature credential"
_KEY_WORDS: Final = r"(?:pass(?:w(?:or)?d|wort|phrase)?|pwd|key|secret|token|signature|credentials?)"
_KEY_GATE: Final = rf"{_KEY_WORDS}(?:[_-]?id|-data|_\d{{1,3}})?[\"'\\]{{0,5}}\s{{0,8}}(?:=|:|%3)"
_FORMS: Final = (
    # PEM, of OpenSSL, OpenSSH and GnuPG; its lines may be escaped.
    _form(
        "-----begin",
        r"(?P<before>)-----BEGIN [A-Z ]{0,40}PRIVATE KEY(?: BLOCK)?-----(?:(?:(?!-----)[\s\S])*"
        r"-----END [A-Z ]{0,40}PRIVATE KEY(?: BLOCK)?-----|[A-Za-z0-9+/=\\\s]*)",
    ),
    # A user and a password, a token alone, and a password whose @ somebody has cut off: no port is a word.
    _form(
        ":/ :\\",
        r"(?P<before>:\\{0,4}/\\{0,4}/)(?!\[)(?:[^\s/:@\"'<>(]*:(?!\d{1,5}(?:[/,?#;\"')\]}\s]|$))"
        r"(?:<?[^\s/\"'<>]+>?(?=@)|(?:(?!:\\{0,4}/\\{0,4}/)[^\s\"'<>])+(?=@))|[^\s/:@\"'<>(]{16,}(?=@))",
    ),
    _form(
        "http:// https:// redis:// rediss:// postgres:// postgresql:// mysql:// mongodb:// amqp:// socks5:// ftp://",
        r"(?P<before>(?i:https?|rediss?|postgres(?:ql)?|mysql|mongodb|amqps?|socks5h?|s?ftp)://)[^\s/:@\[\"'<>()$]+:"
        r"(?!\d{1,5}(?!\w)|(?i:port)\b|[{$<(:])[^\s/@\"'<>)]+",
    ),
    _form(
        "%3a%2f%2f",
        r"(?P<before>(?i:%3a%2f%2f))(?:(?!(?i:%3a|%2f|%40))[^\s\"'&]){0,256}(?i:%3a)(?:(?!(?i:%40|%2f%2f))[^\s\"'&]){1,512}(?=%40)",
    ),
    # What hubs, forges, clouds and model providers give out; JSON Web Tokens, such as those of service accounts.
    # A short part of a token of the hub has capitals; hf_overrides and the like are names.
    _form("hf_", r"(?P<before>)hf_(?:[A-Za-z0-9]{16,}|(?=[a-z0-9]{0,64}[A-Z])[A-Za-z0-9]{6,})"),
    _form("akia asia abia acca", rf"(?P<before>){_EDGE}(?:AKIA|ASIA|ABIA|ACCA)[A-Za-z0-9]{{12,}}"),
    _form(
        "gh github_pat_ npm_ r8_ api_org_",
        rf"(?P<before>){_EDGE}(?:(?:gh[opsur]_|github_pat_)[A-Za-z0-9_]{{16,}}|(?:npm_|r8_|api_org_)[A-Za-z0-9]{{30,}})",
    ),
    _form(
        "sk- glpat- gldt- glrt- xox nvapi- gsk_ dckr_ aiza ya29. eyj k_live_ k_test_ hvs. sg. lsv2_ xapp- pypi-ag",
        rf"(?P<before>){_EDGE}(?:sk-|gl(?:pat|dt|rt)-|xox[abeprs]-|xapp-|nvapi-|gsk_|dckr_[op]at_|AIza|ya29\.|eyJ"
        r"|[rs]k_(?:live|test)_|hvs\.|SG\.|lsv2_|pypi-Ag)[A-Za-z0-9_.-]{16,}",
    ),
    _form(
        "bearer",
        r"(?P<before>(?i:bearer)(?:\s|%20){1,4})(?!(?i:auth\w*|tokens?|credentials?|challenge|scheme|realm|headers?)\b)"
        r"[A-Za-z0-9._~+/=%!$&*|:-]{8,}(?<![:.])",
    ),
    _form(
        "basic",
        r"(?P<before>(?i:basic)(?:\s|%20){1,4})(?!(?i:auth))(?=[a-z]{0,64}[A-Z0-9+/=])[A-Za-z0-9+/=]{8,}",
    ),
    _form(
        "authorization",
        rf"(?P<before>(?i:authorization)(?:\\{{0,4}}[\"'])?{_IS}(?:\\{{0,4}}[\"'])?"
        rf"(?:(?i:token|apikey|api-key|negotiate|ntlm|aws4-hmac-sha256)\s{{1,4}})?{_OPEN})"
        rf"{_NO_SECRET}(?!(?i:bearer|basic|digest|header|negotiate|ntlm|token)\b)[^\s\"'\\]{{6,}}",
    ),
    _form(
        "cookie",
        rf"(?P<before>(?i:cookie)(?:\\{{0,4}}[\"'])?{_IS}(?:\\{{0,4}}[\"'])?{_OPEN}){_NO_SECRET}[\w.-]{{1,64}}=[^\n\"'\\]+",
    ),
    # By which a URL is good for a while, such as those that hubs send downloads to: of S3, GCS, Azure and CloudFront.
    _form(
        "signature security-token credential sig token key",
        rf"(?P<before>(?i:signature|security-token|x-(?:amz|goog)-credential|(?<![a-z])sig|[?&;](?:token|key)|access_token)"
        rf"{_EQUALS})[A-Za-z0-9%+/_~.=-]{{6,}}",
    ),
    _form(_KEY_MARKS, *_values(_KEY, _IS), gate=_KEY_GATE),
    _form("token secret credential", *_values(_PERHAPS_KEY, _IS, _LOOKS_RANDOM, 6), gate=_KEY_GATE),
    _form("-", *_values(_FLAG, r"(?:,\s{0,8}|\s{1,8})"), gate=rf"-[\w.-]{{0,64}}{_KEY_WORDS}[\"']?[,\s]"),
    # Variables of a pod, as JSON and YAML have them.
    _form(
        "value",
        *_values(rf"(?:{_KEY})(?:\\{{0,4}}[\"'])?(?:,\s{{0,8}}|\s{{1,8}})(?:\\{{0,4}}[\"'])?value", _IS),
        gate=rf"{_KEY_WORDS}(?:_\d{{1,3}})?[\"'\\,\s]{{1,16}}value",
    ),
    # Registries, in a Docker configuration.
    _form("auth", r"(?P<before>\\{0,4}\"auth\\{0,4}\"\s{0,8}:\s{0,8}\\{0,4}\")[A-Za-z0-9+/=]{6,}"),
)
_MARKS: Final = tuple({mark for marks, _, _ in _FORMS for mark in marks})

_PEM_END: Final = re.compile(r"-----END [A-Z ]{0,40}PRIVATE KEY(?: BLOCK)?-----")
_PEM_BODY: Final = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/=\\ \r\n\t"
_PEM_LINE: Final = re.compile(r"[A-Za-z0-9+/=]{24,}")
_CUT_INPUT: Final = re.compile(r"(?<=input_value=)[^\n]{0,64}?\.\.\.[^\n]{0,64}?(?=, input_type=)")
"""A value that pydantic has shortened in its middle: half of a secret has no form."""
_SPACE: Final = re.compile(r"\s+")
_COLOURS: Final = re.compile(r"\x1b\[[0-9;]{0,32}[A-Za-z]")


def redact(text: str, hidden: str = HIDDEN) -> str:
    """Replace everything that has the form of a secret."""
    # Names, numbers and repeated messages come again with every reconcile of every object.
    return _short_redacted(text, hidden) if len(text) <= _SHORT_CHARACTERS else _redacted(text, hidden)


def _redacted(text: str, hidden: str) -> str:
    if "\x1b" in text:
        # Colours within a token hide its form.
        plain = _COLOURS.sub("", text)
        masked = _masked(plain, hidden)
        if masked != plain:
            return masked
    return _masked(text, hidden)


def _masked(text: str, hidden: str) -> str:
    small = text.lower()
    present = [mark for mark in _MARKS if mark in small]
    for marks, patterns, gate in _FORMS if present else ():
        if not marks.isdisjoint(present) and (gate is None or _compiled(gate).search(small)):
            for pattern in patterns:
                text = _compiled(pattern).sub(lambda found: f"{found['before']}{hidden}", text)
    if "-----end" in small:
        # A key whose first lines were cut off.
        kept, begin = [], 0
        for end in _PEM_END.finditer(text):
            kept += [text[begin : end.start()].rstrip(_PEM_BODY), " ", hidden]
            begin = end.end()
        text = "".join([*kept, text[begin:]]).lstrip() if kept else text
    return _CUT_INPUT.sub(_ELLIPSIS, text) if "input_value=" in small else text


_short_redacted = lru_cache(maxsize=_SHORT_TEXTS_KEPT)(_redacted)


def is_secret_flag(word: str) -> bool:
    """Test whether a word is an option with a secret as its value, such as ``--api-key``."""
    return re.fullmatch(_FLAG, word) is not None


def clip(text: str, limit: int) -> str:
    """Mask secrets in a text, then shorten it to at most ``limit`` characters, if possible between two words."""
    text = redact(text if len(text) <= _BOUND else _before_cut(text[:_BOUND]))
    if len(text) <= limit:
        return text
    room = max(limit - len(_ELLIPSIS), 0)
    space = max(text.rfind(each, room - min(_WORD_AT_THE_END, room // 3), room + 1) for each in " \n\t")
    return text[: space if space > 0 else room].rstrip() + _ELLIPSIS[:limit]


def clip_start(text: str, limit: int) -> str:
    """Return the last ``limit`` characters of a text without secrets, from the first whole word on."""
    text = redact(text if len(text) <= _BOUND else after_cut(text[-_BOUND:]))
    if len(text) <= limit:
        return text
    room = max(limit - len(_ELLIPSIS), 0)
    start = len(text) - room
    space = _SPACE.search(text, start - 1, start + min(_WORD_AT_THE_END, room // 3))
    return _ELLIPSIS[:limit] + text[space.end() if space else start :]


def after_cut(text: str) -> str:
    """Return the safe part of a text whose beginning was cut off.

    A secret at the cut has lost the key or the prefix that identifies it. So the first line is left out; of a single
    line, as many words as a key and its value take. Lines that look like the middle of a private key are left out too.
    """
    text = redact(text)
    _, newline, rest = text.partition("\n")
    if not newline:
        return " ".join(text.split(None, _WORDS_OF_A_HEADER)[_WORDS_OF_A_HEADER:])
    lines = rest.split("\n")
    while lines and _PEM_LINE.fullmatch(lines[0].strip()):
        del lines[0]
    return "\n".join(lines)


def before_cut(text: str) -> str:
    """Return the safe part of a text whose end was cut off, up to its last whole word."""
    return redact(_before_cut(text))


def _before_cut(text: str) -> str:
    space = max(text.rfind(each, len(text) - _LONGEST_WORD if len(text) > _LONGEST_WORD else 0) for each in " \n\t")
    return text[: space if space >= 0 else max(len(text) - _LONGEST_WORD, 0)]
