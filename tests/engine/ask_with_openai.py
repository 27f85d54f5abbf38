"""Asks a server with OpenAI's own library, in an environment that has it: prints what it saw of each request."""

import asyncio
import json
import sys
from typing import Any

from openai import AsyncOpenAI


async def main() -> None:
    """Read {url, model, api_key, requests: [[id, output tokens], ...]}, print what came, by id."""
    asked = json.load(sys.stdin)
    client = AsyncOpenAI(base_url=f"{asked['url']}/v1", api_key=asked["api_key"], max_retries=0)
    models = [card.id async for card in client.models.list()]
    requests = asked["requests"]
    found = await asyncio.gather(*(one(client, models[0], name, tokens) for name, tokens in requests))
    answers = dict(zip([name for name, _ in requests], found, strict=True))
    json.dump({"models": models, "answers": answers}, sys.stdout)


async def one(client: AsyncOpenAI, model: str, name: str, tokens: int) -> dict[str, Any]:
    """Ask once as a stream and once without, by completion or chat."""
    usual = {
        "model": model,
        "max_tokens": tokens,
        "extra_headers": {"X-Request-Id": name},
        "extra_body": {"return_token_ids": True},
    }
    chat = "chat" in name
    create = client.chat.completions.create if chat else client.completions.create
    prompt = {"messages": [{"role": "user", "content": "hello"}]} if chat else {"prompt": "hello"}
    if name.endswith("whole"):
        answer = await create(**usual, **prompt)
        choice = answer.choices[0]
        return {"usage": answer.usage.completion_tokens, "finish": choice.finish_reason, "bursts": [tokens_of(choice)]}
    bursts, usage, finish = [], None, None
    stream = await create(**usual, **prompt, stream=True, stream_options={"include_usage": True})
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            finish = choice.finish_reason or finish
            bursts.append(tokens_of(choice))
    return {"usage": usage.completion_tokens, "finish": finish, "bursts": [burst for burst in bursts if burst]}


def tokens_of(choice: Any) -> int:
    """Return how many tokens a choice has, by the ids that vLLM gives when it is asked for them."""
    return len(getattr(choice, "token_ids", None) or ())


if __name__ == "__main__":
    asyncio.run(main())
