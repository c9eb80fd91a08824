"""The openai package as people use it, streaming and not."""

from __future__ import annotations

import openai
import pytest


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


def test_models(client):
    assert [model.id for model in client.models.list()] == ["synthetic:tiny"]
    assert client.models.retrieve("synthetic:tiny").owned_by == "tidekv"


def test_a_completion_whole_and_streamed(client):
    request = {"model": "synthetic:tiny", "prompt": "Hello", "max_tokens": 24, "temperature": 0}
    whole = client.completions.create(**request)
    assert whole.choices[0].finish_reason == "length"
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens, whole.usage.total_tokens) == (6, 24, 30)
    chunks = list(client.completions.create(**request, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text != ""
    assert chunks[-1].usage.completion_tokens == 24 and chunks[-1].choices == []


def test_a_chat_whole_and_streamed(client):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello!"}]
    request = {"model": "default", "messages": messages, "max_completion_tokens": 24, "temperature": 0.8, "seed": 7}
    whole = client.chat.completions.create(**request)
    assert whole.choices[0].message.role == "assistant"
    chunks = list(client.chat.completions.create(**request, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content != ""
    assert chunks[-1].choices[0].finish_reason == "length"


def test_log_probabilities(client):
    messages = [{"role": "user", "content": "Hello!"}]
    chat = client.chat.completions.create(
        model="default", messages=messages, max_tokens=4, temperature=0, logprobs=True, top_logprobs=3
    )
    tokens = chat.choices[0].logprobs.content
    assert len(tokens) == 4 and all(len(token.top_logprobs) == 3 and token.logprob <= 0 for token in tokens)
    # Greedy: the likeliest token is the one that was taken.
    assert all(token.top_logprobs[0].bytes == token.bytes for token in tokens)
    text = client.completions.create(model="default", prompt="Hello", max_tokens=4, temperature=0, logprobs=2)
    assert len(text.choices[0].logprobs.token_logprobs) == len(text.choices[0].logprobs.text_offset) == 4


def test_stop_and_own_fields(client):
    request = {"model": "default", "prompt": "Hello", "max_tokens": 40, "temperature": 0}
    text = client.completions.create(**request, extra_body={"ignore_eos": True}).choices[0].text
    stop = text[5:8]
    cut = client.completions.create(**request, stop=[stop])
    assert cut.choices[0].text == text[: text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"


def test_refusals_are_the_right_exceptions(client):
    with pytest.raises(openai.NotFoundError, match="not served here") as unknown:
        client.completions.create(model="gpt-5", prompt="x")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="n = 1") as several:
        client.completions.create(model="default", prompt="x", n=3)
    assert several.value.param == "n"
    with pytest.raises(openai.BadRequestError, match="context") as long:
        client.completions.create(model="default", prompt="x", max_tokens=10**9)
    assert long.value.code == "context_length_exceeded"


def test_a_stream_that_is_left_is_cancelled(client, server):
    stream = client.completions.create(
        model="default", prompt="Hello", max_tokens=30_000, stream=True, extra_body={"ignore_eos": True}
    )
    for _, _chunk in zip(range(3), stream):
        pass
    stream.close()
    server.wait_until_idle()
