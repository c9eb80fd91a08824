"""The openai package against `kvctl up`: two models behind one address, streaming and not.

KVCTL names the binary; scripts/test-serve builds it and sets that.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

PATIENCE_SECONDS = 120
CONFIG = """
instances:
  - {name: first, model: "synthetic:tiny", engine: kvserve, engine_args: "--threads 1"}
  - {name: second, model: "synthetic:tiny:2", engine: kvserve, engine_args: ["--threads 1"]}
"""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A router with both models ready; at the end it must stop well and leave nothing."""
    folder = tmp_path_factory.mktemp("up")
    config = folder / "models.yaml"
    config.write_text(CONFIG)
    runtime = folder / "run"
    runtime.mkdir(mode=0o700)
    env = {name: value for name, value in os.environ.items() if not name.startswith(("KVCACHED_", "HF_"))}
    env |= {"KVCACHED_RUNTIME_DIR": str(runtime), "KVCACHED_HOST_BUDGET": "64M"}
    command = [os.environ["KVCTL"], "up", "--port", "0", "--config", str(config)]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT)
    try:
        found = wait_for_address(folder / "log", process)
        wait_until_ready(found)
        yield found
    finally:
        process.send_signal(signal.SIGTERM)
        code = process.wait(PATIENCE_SECONDS)
    assert code == 0, (folder / "log").read_text()
    assert list(runtime.iterdir()) == []


def wait_for_address(log: Path, process: subprocess.Popen[bytes]) -> str:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (found := re.search(r"^listening on (http://\S+)$", log.read_text(), re.MULTILINE)):
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.01)
    return found[1]


def wait_until_ready(url: str) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            with urllib.request.urlopen(f"{url}/health/all", timeout=PATIENCE_SECONDS):
                return
        except urllib.error.HTTPError as error:
            assert error.code == 503 and time.monotonic() < deadline, error
        time.sleep(0.01)


@pytest.fixture
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def test_models_are_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["first", "second"]


@pytest.mark.parametrize("model", ["first", "second", "synthetic:tiny:2", "default"])
def test_a_chat_whole_and_in_pieces_is_the_same(client: openai.OpenAI, model: str) -> None:
    asked = {"model": model, "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 20, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    pieces = list(client.chat.completions.create(**asked, stream=True))
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    assert whole.choices[0].message.content == text and len(pieces) > 2


def test_the_two_are_not_the_same_model(client: openai.OpenAI) -> None:
    texts = {
        client.completions.create(model=model, prompt="Hello", max_tokens=20, temperature=0).choices[0].text
        for model in ("first", "second")
    }
    assert len(texts) == 2


def test_refusals_are_exceptions_of_their_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="there is no model"):
        client.completions.create(model="third", prompt="x")
    # The engine's own refusal arrives as it is.
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model="first", prompt="x", temperature=9)
