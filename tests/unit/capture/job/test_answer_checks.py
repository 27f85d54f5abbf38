"""Checks of the engine's answers before a load."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from specdecode_operator.capture.files.formats import Checks
from specdecode_operator.capture.job.answer_checks import check_answers
from specdecode_operator.capture.load.prompts import Prompt, PromptSource, prompt_source
from specdecode_operator.capture.load.run_settings import CheckSettings, RunSettings, read_settings
from tests.support.capture_pods import environment
from tests.support.completion_server import CompletionServer, Received, completion_server, document, rejection

ASKED = CheckSettings.model_validate({"greedyPrompts": 3, "structuredRequests": 2})
FORM = {"answer": "no", "certain": True, "score": 3}
WORKLOAD = {
    "prompts": {"synthetic": {"promptTokens": 12, "outputTokens": 500}},
    "phases": [
        {"name": "one", "pattern": "Closed", "concurrency": 1, "requests": 3},
        {"name": "two", "pattern": "Closed", "concurrency": 2, "requests": 3},
    ],
}


class Texts:
    """A source of texts, as a dataset is one."""

    ignore_eos = False

    def first(self, phase: str, index: int) -> Prompt:
        return Prompt(f"{phase} {index}")

    message = first

    def output_tokens(self, phase: str, index: int) -> int:
        return 7

    def recorded_s(self, phase: str) -> list[float]:
        raise AssertionError(phase)


@pytest.fixture
async def server() -> AsyncIterator[CompletionServer]:
    async with completion_server() as found:
        found.answer = answer_well
        yield found


def likeliest(request: Received) -> dict[str, Any]:
    """Return as many tokens as were asked for, the likeliest as far before the next as their number says."""
    tokens = range(request.body["max_tokens"])
    return {
        "choices": [
            {
                "text": "?",
                "token_ids": list(tokens),
                "finish_reason": "length",
                "logprobs": {"top_logprobs": [{"token_id:1": -3.0, "token_id:2": -1.0 - token} for token in tokens]},
            }
        ],
        "usage": {"prompt_tokens": 99},
    }


def said(form: Any) -> dict[str, Any]:
    """Return a form as the answer to either question for one."""
    text = form if isinstance(form, str) else json.dumps(form)
    call = {"function": {"name": "answer", "arguments": text}}
    return {"choices": [{"text": text, "message": {"tool_calls": [call]}, "finish_reason": "stop"}]}


async def answer_well(request: Received, writer: asyncio.StreamWriter) -> None:
    writer.write(document(likeliest(request) if "logprobs" in request.body else said(FORM)))


def settings(server: CompletionServer) -> RunSettings:
    return read_settings(environment(Path("/nowhere"), server.url, workload=WORKLOAD)["SPECDECODE_CAPTURE"])


async def checked(
    server: CompletionServer, asked: CheckSettings = ASKED, source: PromptSource | None = None, budget_s: float = 60
) -> Checks:
    run = settings(server)
    return await check_answers(run, asked, source or prompt_source(run), budget_s)


class TestGreedy:
    async def test_greedy_answers_have_tokens_and_margins(self, server: CompletionServer) -> None:
        found = (await checked(server)).greedy
        assert found.not_measured is None
        assert len(found.answers) == 3
        for each in found.answers:
            assert (each.prompt_tokens, len(each.tokens)) == (12, 128), "no more than 128"
            assert each.tokens == list(range(128))
            assert each.top2_margin == [abs(token - 2.0) for token in range(128)]
        assert len({each.prompt_sha256 for each in found.answers}) == 3

    async def test_greedy_requests_send_first_prompts_one_at_a_time(self, server: CompletionServer) -> None:
        await checked(server)
        bodies = [each.body for each in server.received if "logprobs" in each.body]
        for body in bodies:
            assert (body["temperature"], body["seed"], body["logprobs"], body["ignore_eos"]) == (0, 0, 2, True)
        assert len({body["cache_salt"] for body in bodies}) == 3, "nothing that the load left in the cache counts"
        assert server.most_in_flight == 1
        run = settings(server)
        source = prompt_source(run)
        prompts = [source.first("one", 0), source.first("two", 0), source.first("one", 1)]
        assert [body["prompt"] for body in bodies] == [each.content for each in prompts]

    async def test_repeated_checks_have_equal_results(self, server: CompletionServer) -> None:
        first, second = await checked(server), await checked(server)
        assert first == second

    async def test_text_prompts_are_counted_by_engine_and_may_end_at_eos(self, server: CompletionServer) -> None:
        found = (await checked(server, source=Texts())).greedy
        assert [(each.prompt_tokens, len(each.tokens)) for each in found.answers] == [(99, 7)] * 3
        assert not any(each.body["ignore_eos"] for each in server.received if "logprobs" in each.body)

    async def test_margin_is_none_without_second_token(self, server: CompletionServer) -> None:
        async def one(request: Received, writer: asyncio.StreamWriter) -> None:
            answer = likeliest(request)
            answer["choices"][0]["logprobs"] = {"top_logprobs": [None, {"token_id:1": -1.0}]}
            writer.write(document(answer))

        server.answer = one
        (first, *_) = (await checked(server)).greedy.answers
        assert first.top2_margin == [None] * 128

    async def test_refused_prompt_is_left_out(self, server: CompletionServer) -> None:
        async def refuses_second(request: Received, writer: asyncio.StreamWriter) -> None:
            if len(server.received) == 2:
                writer.write(rejection(400, b'{"error": {"message": "too long"}}'))
            else:
                await answer_well(request, writer)

        server.answer = refuses_second
        found = (await checked(server)).greedy
        assert (len(found.answers), found.not_measured) == (2, None)

    @pytest.mark.parametrize(
        ("answer", "why"),
        [
            (rejection(400, b'{"error": {"message": "no logprobs here"}}'), "HTTP 400: no logprobs here"),
            (rejection(500, b"broken"), "HTTP 500: broken"),
            (document({"choices": []}), "an unreadable answer"),
            (document({"choices": [{"text": "a"}]}), "does not return the token ids"),
            (document({"choices": [{"token_ids": [-1]}]}), "an unreadable answer"),
            (
                document({"choices": [{"token_ids": [1], "logprobs": {"top_logprobs": [["a"]]}}]}),
                "an unreadable answer",
            ),
            (b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n[[[[[", "an unreadable answer"),
            (b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n" + b" " * (2**22 + 1), "more than 4194304 bytes"),
            (b"", "RemoteProtocolError"),
        ],
    )
    async def test_unusable_greedy_answers_are_not_measured(
        self, server: CompletionServer, answer: bytes, why: str
    ) -> None:
        async def answers(_request: Received, writer: asyncio.StreamWriter) -> None:
            writer.write(answer)

        server.answer = answers
        found = (await checked(server)).greedy
        assert found.answers == []
        assert found.not_measured is not None
        assert why in found.not_measured

    async def test_checks_without_time_budget_send_nothing(self, server: CompletionServer) -> None:
        found = await checked(server, budget_s=0)
        reasons = {found.greedy.not_measured, found.structured.not_measured, found.tool_calls.not_measured}
        assert (reasons, server.received) == ({"there was no time for any"}, [])


class TestForms:
    async def test_valid_forms_count_as_parsed(self, server: CompletionServer) -> None:
        found = await checked(server)
        assert (found.structured.asked, found.structured.parsed, found.structured.failures) == (2, 2, [])
        assert found.tool_calls == found.structured

    @pytest.mark.parametrize(
        "form",
        ['{"answer": "no"', {**FORM, "more": 1}, {**FORM, "answer": "perhaps"}, {**FORM, "score": 6}, " \n" * 64, []],
    )
    async def test_invalid_forms_fail_without_keeping_their_content(self, server: CompletionServer, form: Any) -> None:
        async def wrong(request: Received, writer: asyncio.StreamWriter) -> None:
            writer.write(document(said(form)))

        server.answer = wrong
        found = await checked(server)
        for check in (found.structured, found.tool_calls):
            assert (check.asked, check.parsed, check.not_measured) == (2, 0, None)
            assert all(each.endswith("do not match the schema, ended by stop") for each in check.failures)

    async def test_call_of_another_function_is_a_failure(self, server: CompletionServer) -> None:
        async def another(request: Received, writer: asyncio.StreamWriter) -> None:
            answer = said(FORM)
            answer["choices"][0]["message"]["tool_calls"][0]["function"]["name"] = "rm"
            writer.write(document(answer))

        server.answer = another
        assert (await checked(server)).tool_calls.failures == ["1 calls instead of one call of the named function"] * 2

    async def test_refused_tool_calls_are_not_measured(self, server: CompletionServer) -> None:
        """A tokenizer without a chat template, say, or no parser of tool calls."""
        server.pages["/v1/chat/completions"] = (400, '{"error": {"message": "requires --tool-call-parser to be set"}}')
        found = await checked(server)
        assert found.tool_calls.not_measured == "HTTP 400: requires --tool-call-parser to be set"
        assert (found.tool_calls.asked, found.structured.parsed) == (0, 2)

    async def test_engine_error_counts_as_failed_tool_call(self, server: CompletionServer) -> None:
        server.pages["/v1/chat/completions"] = (500, "grammar rejected tokens")
        found = (await checked(server)).tool_calls
        assert (found.asked, found.parsed, found.failures) == (2, 0, ["HTTP 500: grammar rejected tokens"] * 2)

    async def test_questions_are_built_in_for_token_ids_and_from_dataset_for_texts(
        self, server: CompletionServer
    ) -> None:
        await checked(server)
        await checked(server, source=Texts())
        chats = [each.body["messages"][0]["content"] for each in server.received if "messages" in each.body]
        assert chats == [
            "Is 0 an even number? Answer through the function.",
            "Is 1 an even number? Answer through the function.",
            "one 0",
            "two 0",
        ]


async def test_engine_api_key_is_sent(server: CompletionServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY", "secret")
    run = settings(server)
    run = run.model_copy(update={"engine": run.engine.model_copy(update={"api_key_variable": "KEY"})})
    await check_answers(run, ASKED, prompt_source(run))
    assert {each.headers["authorization"] for each in server.received} == {"Bearer secret"}
