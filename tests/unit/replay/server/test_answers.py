import asyncio
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specdecode_operator.replay.drafting import AcceptanceSchedule
from specdecode_operator.replay.recorded_engine import Unmatched
from specdecode_operator.replay.server.playback_source import Mode, SourceSettings, read_source
from specdecode_operator.vllm.engine_metrics import read_metrics
from specdecode_operator.vllm.profiles import find_profile
from tests.support.replay_server import events, replay_server, texts
from tests.support.traces import record, write_trace

QUICK = {"ttft_ms": 1.0, "itl_ms": [1.0, 1.0]}
CAPTURE = Path(__file__).parents[3] / "data/captures/draft_model"
PLAIN_META = {"model": "tiny"}


async def metrics(client: Any) -> Any:
    return read_metrics((await client.get("/metrics")).text, find_profile("0.32"))


async def test_a_burst_is_one_event_with_all_its_tokens(tmp_path: Path) -> None:
    async with replay_server(tmp_path, [record(**QUICK)]) as client:
        found = await events(client)
    assert [len(text) for text in texts(found)] == [4, 12, 8]
    assert [event["choices"][0]["finish_reason"] for event in found] == [None, None, "length"]
    assert {event["object"] for event in found} == {"text_completion"}
    assert {event["model"] for event in found} == {"tiny"}


async def test_gaps_are_those_recorded(tmp_path: Path) -> None:
    loop = asyncio.get_running_loop()
    async with replay_server(tmp_path, [record(ttft_ms=50.0, itl_ms=[0.0, 80.0])]) as client:
        began_s = loop.time()
        await events(client)
    assert loop.time() - began_s >= 0.13


async def test_usage_comes_last_and_with_every_event_where_that_is_asked_for(tmp_path: Path) -> None:
    async with replay_server(tmp_path, [record(**QUICK, cached_tokens=16)] * 2) as client:
        found = await events(client, prompt="four" * 20, stream_options={"include_usage": True})
        assert all("usage" not in event for event in found[:-1])
        assert found[-1]["choices"] == []
        assert found[-1]["usage"] == {
            "prompt_tokens": 20,
            "completion_tokens": 6,
            "total_tokens": 26,
            "prompt_tokens_details": {"cached_tokens": 16},
        }
        found = await events(client, stream_options={"include_usage": True, "continuous_usage_stats": True})
        assert [event["usage"]["completion_tokens"] for event in found] == [1, 4, 6, 6]


async def test_a_completion_that_is_not_streamed_is_one_document(tmp_path: Path) -> None:
    async with replay_server(tmp_path, [record(**QUICK)]) as client:
        body = {"prompt": [1, 2, 3], "max_tokens": 50, "return_token_ids": True}
        answer = (await client.post("/v1/completions", json=body, headers={"X-Request-Id": "mine"})).json()
    (choice,) = answer["choices"]
    assert answer["id"] == "cmpl-mine"
    assert len(choice["text"]) == 24
    assert len(choice["token_ids"]) == 6
    assert choice["prompt_token_ids"] == [1, 2, 3]
    assert answer["usage"]["completion_tokens"] == 6


async def test_an_answer_counts_in_the_next_prompt_for_as_many_tokens(tmp_path: Path) -> None:
    async with replay_server(tmp_path, [record(**QUICK)] * 2) as client:
        first = (await client.post("/v1/completions", json={"prompt": "abcd", "max_tokens": 50})).json()
        text = "abcd" + first["choices"][0]["text"]
        second = (await client.post("/v1/completions", json={"prompt": text})).json()
    assert second["usage"]["prompt_tokens"] == 7


async def test_recorded_token_ids_are_returned(tmp_path: Path) -> None:
    async with replay_server(tmp_path, [record(**QUICK, output_token_ids=[9, 8, 7, 6, 5, 4])]) as client:
        found = await events(client, return_token_ids=True, prompt=[3, 4])
    assert [event["choices"][0]["token_ids"] for event in found] == [[9], [8, 7, 6], [5, 4]]
    assert [event["choices"][0]["prompt_token_ids"] for event in found] == [[3, 4], None, None]


async def test_a_chat_streams_and_answers_as_a_chat(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    async with replay_server(tmp_path, [record(**QUICK)] * 2) as client:
        found = await events(client, "/v1/chat/completions", messages=messages, max_tokens=None)
        body = {"messages": messages, "max_completion_tokens": 2}
        answer = (await client.post("/v1/chat/completions", json=body)).json()
    assert found[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [len(text) for text in texts(found)] == [0, 4, 12, 8]
    assert found[-1]["choices"][0]["finish_reason"] == "length"
    assert ["stop_reason" in each["choices"][0] for each in found] == [False, False, False, True]
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"]["role"] == "assistant"
    assert answer["usage"]["completion_tokens"] == 2


async def test_several_answers_each_get_a_record(tmp_path: Path) -> None:
    records = [record(**QUICK), record(**QUICK, output_tokens=9, arrival_ms=1.0, itl_tokens=[4, 4])] * 2
    async with replay_server(tmp_path, records) as client:
        body = {"prompt": ["a", "b"], "n": 2, "max_tokens": 99}
        answer = (await client.post("/v1/completions", json=body)).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [len(choice["text"]) // 4 for choice in answer["choices"]] == [6, 6, 9, 9]
    assert answer["usage"]["completion_tokens"] == 30


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_ends_before_a_stop_string(tmp_path: Path, stream: bool) -> None:
    async with replay_server(tmp_path, [record(**QUICK)] * 2) as client:
        whole = "".join(texts(await events(client)))
        stop = whole[10:14]
        if stream:
            found = await events(client, stop=["never", stop])
            text, choice = "".join(texts(found)), found[-1]["choices"][0]
        else:
            body = {"prompt": "a", "max_tokens": 99, "stop": stop}
            choice = (await client.post("/v1/completions", json=body)).json()["choices"][0]
            text = choice["text"]
    assert text == whole[:10]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)


async def test_speculation_is_counted_as_the_operator_reads_it(tmp_path: Path) -> None:
    async with replay_server(tmp_path, [record(**QUICK)], kv_cache_tokens=4096) as client:
        await events(client)
        reading = await metrics(client)
        page = (await client.get("/metrics")).text
    assert reading.speculation.drafts == 2
    assert reading.speculation.draft_tokens == 8
    assert reading.speculation.accepted_tokens == 3
    assert reading.speculation.accepted_per_position == (2, 1, 0, 0)
    assert reading.generation_tokens == 6
    assert (reading.kv_cache_tokens, reading.block_size, reading.num_gpu_blocks) == (4096, 16, 256)
    assert (reading.requests_running, reading.requests_waiting) == (0, 0)
    assert 'vllm:time_to_first_token_seconds_count{engine="0",model_name="tiny"} 1.0' in page
    assert 'vllm:inter_token_latency_seconds_count{engine="0",model_name="tiny"} 2.0' in page
    assert 'vllm:request_success_total{engine="0",finished_reason="length",model_name="tiny"} 1.0' in page


async def test_of_chunks_that_were_merged_no_more_than_k_tokens_count_as_accepted(tmp_path: Path) -> None:
    async with replay_server(tmp_path, [record(**QUICK | {"output_tokens": 20, "itl_tokens": [9, 9]})]) as client:
        assert [len(text) // 4 for text in texts(await events(client))] == [2, 9, 9]
        assert (await metrics(client)).speculation.accepted_per_position == (3, 2, 2, 2)


async def test_an_engine_without_speculation_has_no_metrics_of_it(tmp_path: Path) -> None:
    plain = record(ttft_ms=1.0, output_tokens=3, itl_ms=[1.0, 1.0], itl_tokens=None)
    async with replay_server(tmp_path, [plain], PLAIN_META) as client:
        await events(client)
        reading = await metrics(client)
    assert reading.speculation is None
    assert reading.generation_tokens == 3


async def test_load_counts_by_its_factor(tmp_path: Path) -> None:
    body = {"prompt": "a", "stream": True}
    async with (
        replay_server(tmp_path, [record(itl_ms=[10.0, 60_000.0])], load_factor=10) as client,
        client.stream("POST", "/v1/completions", json=body) as response,
    ):
        await anext(response.aiter_lines())
        assert (await metrics(client)).requests_running == 10


async def test_a_client_that_goes_frees_its_place(tmp_path: Path) -> None:
    async with replay_server(tmp_path, [record(itl_ms=[10.0, 60_000.0])]) as client:
        async with client.stream("POST", "/v1/completions", json={"prompt": "a", "stream": True}) as response:
            await anext(response.aiter_lines())
            assert (await metrics(client)).requests_running == 1
        async with asyncio.timeout(120):
            while (await metrics(client)).requests_running:
                pass
        page = (await client.get("/metrics")).text
    assert 'finished_reason="abort",model_name="tiny"} 1.0' in page


async def test_many_streams_at_once_are_all_answered(tmp_path: Path) -> None:
    async with replay_server(tmp_path, [record(ttft_ms=100.0)] * 50) as client:
        found = await asyncio.gather(*[events(client) for _ in range(50)])
    assert [len(each) for each in found] == [3] * 50


async def test_a_string_to_stop_at_may_lie_in_two_bursts(tmp_path: Path) -> None:
    async with replay_server(tmp_path, [record(**QUICK)] * 2) as client:
        whole = "".join(texts(await events(client)))
        # The first burst has four letters.
        found = texts(await events(client, stop=whole[1:5]))
    assert "".join(found) == whole[:1]


async def test_a_modelled_engine_gives_what_is_asked_for_in_bursts_of_k_and_one_at_most(tmp_path: Path) -> None:
    records = [record(arrival_ms=100.0 * place, itl_ctx=None) for place in range(20)]
    async with replay_server(tmp_path, records, mode=Mode.MODELLED, acceptance=AcceptanceSchedule.parse("1")) as client:
        found = await events(client, max_tokens=21)
        reading = await metrics(client)
    assert [len(text) // 4 for text in texts(found)] == [1, 5, 5, 5, 5]
    assert reading.speculation.accepted_per_position == (4, 4, 4, 4)


async def test_a_modelled_engine_takes_no_more_requests_at_once_than_it_is_told(tmp_path: Path) -> None:
    records = [record(arrival_ms=100.0 * place, itl_ctx=None) for place in range(20)]
    body = {"prompt": "a", "stream": True, "max_tokens": 10_000, "ignore_eos": True}
    async with (
        replay_server(tmp_path, records, mode=Mode.MODELLED, max_num_seqs=1) as client,
        client.stream("POST", "/v1/completions", json=body) as first,
    ):
        lines = first.aiter_lines()  # kept: the request ends with it
        await anext(lines)
        async with client.stream("POST", "/v1/completions", json=body):
            reading = await metrics(client)
    assert (reading.requests_running, reading.requests_waiting) == (1, 1)


async def test_a_modelled_engine_has_the_capture_s_longest_length(tmp_path: Path) -> None:
    records = [record(arrival_ms=100.0 * place, itl_ctx=None) for place in range(20)]
    shutil.copy(CAPTURE / "manifest.json", tmp_path)
    async with replay_server(tmp_path, records, mode=Mode.MODELLED) as client:
        response = await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 3000})
    assert response.status_code == 400
    assert "maximum context length is 2048 tokens" in response.json()["error"]["message"]


def test_who_models_a_cache_of_unknown_size_is_told(tmp_path: Path) -> None:
    records = [record(arrival_ms=100.0 * place, itl_ctx=None) for place in range(20)]
    settings = SourceSettings(traces=[write_trace(tmp_path / "trace.jsonl", records)], mode=Mode.MODELLED)
    assert "--kv-cache-tokens" in read_source(settings).notes[-1]
    assert not read_source(replace(settings, kv_cache_tokens=1000)).notes
    assert "--kv-cache-tokens" not in str(read_source(replace(settings, mode=Mode.STEPS)).notes)


async def test_a_modelled_engine_serves_what_no_record_is_left_for(tmp_path: Path) -> None:
    records = [record(**QUICK, arrival_ms=100.0 * place) for place in range(20)]
    async with replay_server(tmp_path, records, unmatched=Unmatched.MODELLED) as client:
        found = [texts(await events(client, max_tokens=50, ignore_eos=True)) for _ in range(21)]
    assert all(len("".join(each)) == 24 for each in found[:20])
    assert len("".join(found[20])) == 200


async def test_a_model_of_merged_chunks_counts_no_more_than_k_accepted_tokens(tmp_path: Path) -> None:
    merged = [record(arrival_ms=100.0 * n, ttft_ms=1.0, output_tokens=40, itl_tokens=[19, 20]) for n in range(20)]
    async with replay_server(tmp_path, merged, mode=Mode.MODELLED) as client:
        found = await events(client, max_tokens=40, ignore_eos=True)
        reading = await metrics(client)
    assert sum(len(text) // 4 for text in texts(found)) == 40
    assert len(reading.speculation.accepted_per_position) == 4


async def test_an_id_like_the_mark_of_our_own_templates_stays_an_id(tmp_path: Path) -> None:
    async with (
        replay_server(tmp_path, [record(ttft_ms=1.0, itl_ms=[1.0, 1.0])]) as client,
        client.stream(
            "POST",
            "/v1/completions",
            json={"prompt": "a", "stream": True},
            headers={"X-Request-Id": r"a\u0000b"},
        ) as response,
    ):
        lines = [line.removeprefix("data: ") async for line in response.aiter_lines() if line]
    assert {json.loads(line)["id"] for line in lines if line != "[DONE]"} == {r"cmpl-a\u0000b"}
