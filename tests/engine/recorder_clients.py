"""Clients of a tiny engine: streams, some of which are cut short or stopped by a string."""

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

import httpx

TIMEOUT_S = 300
WORDS = [20, 21, 22]
"""Token ids; a model that may only say these soon repeats itself, so that ngram finds drafts."""


@dataclass(frozen=True)
class Question:
    """One completion.

    Attributes
    ----------
    leaves_after
        Chunks after which the client goes; None: it stays to the end.
    """

    name: str
    prompt: list[int]
    max_tokens: int = 60
    leaves_after: int | None = None
    more: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """What came of it."""

    status: int
    chunks: int
    text: str
    finish_reasons: list[str]


def prompt(length: int, seed: int = 0) -> list[int]:
    """Return a prompt that repeats itself."""
    return [10 + (seed + position) % 7 for position in range(length)]


def repetitive(name: str, seed: int = 0, **more: Any) -> Question:
    """Return a question whose answer repeats itself."""
    length = more.pop("length", 60)
    rest = {key: more.pop(key) for key in ("max_tokens", "leaves_after") if key in more}
    return Question(name, prompt(length, seed), **rest, more={"allowed_token_ids": WORDS, **more})


def ask_all(url: str, questions: list[Question], at_once: int) -> dict[str, Answer]:
    """Return the answers by name, with so many streams at a time."""
    return asyncio.run(_ask_all(url, questions, at_once))


async def _ask_all(url: str, questions: list[Question], at_once: int) -> dict[str, Answer]:
    turn = asyncio.Semaphore(at_once)
    # A connection each: several servers then share them.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=TIMEOUT_S, limits=limits) as client:

        async def ask(question: Question) -> Answer:
            async with turn:
                return await _ask(client, question)

        answers = await asyncio.gather(*(ask(question) for question in questions))
    return {question.name: answer for question, answer in zip(questions, answers, strict=True)}


async def _ask(client: httpx.AsyncClient, question: Question) -> Answer:
    body = {
        "model": "tiny",
        "prompt": question.prompt,
        "max_tokens": question.max_tokens,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
        **question.more,
    }
    chunks, text, reasons = 0, "", []
    async with client.stream("POST", "/v1/completions", json=body, headers={"X-Request-Id": question.name}) as response:
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                chunks += 1
                text += choice["text"]
                reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
            if chunks == question.leaves_after:
                break
        return Answer(response.status_code, chunks, text, reasons)
