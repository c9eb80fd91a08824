"""The script of kvcached's benchmarking guide in its shape: httpx, a hundred chats at once, 50 tokens each."""

from __future__ import annotations

import asyncio

import httpx


def test_a_hundred_chats_at_once(server):
    body = {"model": "default", "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 50}

    async def all_of_them() -> list[httpx.Response]:
        async with httpx.AsyncClient(timeout=120.0) as client:
            requests = (client.post(f"{server.url}/v1/chat/completions", json=body) for _ in range(100))
            return await asyncio.gather(*requests)

    for response in asyncio.run(all_of_them()):
        assert response.status_code == 200, response.text
        assert response.json()["choices"][0]["message"]["content"]
        # A synthetic model never ends on its own.
        assert response.json()["usage"]["completion_tokens"] == 50
    server.wait_until_idle()
