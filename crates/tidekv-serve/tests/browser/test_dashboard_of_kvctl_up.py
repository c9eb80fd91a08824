"""The same page from `kvctl up`: two real models, a real pool, a limit that kvctl sees too."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect
from test_dashboard import DRAWN, card, figure, row, use_key

PATIENCE_SECONDS = 120
KEY = "a key of this test"
MODELS = """
sleep_manager: {min_sleep_duration: 0}
instances:
  - {name: chat, model: 'synthetic:tiny', engine: kvserve, engine_args: '--threads 1'}
  - {name: code, model: 'synthetic:tiny:2', engine: kvserve, engine_args: '--threads 1'}
"""


class Up:
    """A running `kvctl up`."""

    def __init__(self, folder: Path) -> None:
        self.env = {name: value for name, value in os.environ.items() if not name.startswith("KVCACHED_")}
        self.env |= {"KVCACHED_RUNTIME_DIR": str(folder), "KVCACHED_HOST_BUDGET": "64M", "KVCACHED_WEB_API_KEY": KEY}
        config = folder / "models.yaml"
        config.write_text(MODELS)
        command = [os.environ["KVCTL"], "up", "--port", "0", "--config", str(config)]
        with (folder / "up.log").open("w") as log:
            self.process = subprocess.Popen(command, env=self.env, stdout=subprocess.PIPE, stderr=log, text=True)
        assert self.process.stdout is not None
        first = self.process.stdout.readline().strip()
        assert first.startswith("listening on "), first + (folder / "up.log").read_text()
        self.url = first.removeprefix("listening on ") + "/"

    def complete(self, model: str) -> dict:
        return json.loads(self.ask({"model": model, "prompt": "Hello", "max_tokens": 8}))

    def ask(self, body: dict) -> bytes:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}v1/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as answer:
            return answer.read()

    def kvctl(self, *args: str) -> str:
        return subprocess.run([os.environ["KVCTL"], *args], env=self.env, check=True, capture_output=True, text=True).stdout

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        self.process.communicate(timeout=PATIENCE_SECONDS)
        return self.process.returncode


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Up]:
    up = Up(tmp_path)
    try:
        yield up
        assert up.stop() == 0
    finally:
        up.process.kill()
        up.process.wait()
        # Instances end with their supervisor; this removes what a killed one left.
        up.kvctl("gc")


def pool_of(page: Page, model: str) -> str:
    """The name of a model's pool, as soon as the router knows it."""
    cell = row(page, model).get_by_role("cell").nth(8)
    expect(cell).to_contain_text("kvcached_")
    return cell.inner_text()


def test_it_shows_and_changes_what_really_is(up, open_page, picture) -> None:
    page = open_page(up.url, expected=["401"])
    for model in ["chat", "code"]:
        expect(row(page, model)).to_contain_text("ready")
        assert up.complete(model)["usage"]["completion_tokens"] == 8
    pool = pool_of(page, "chat")
    expect(card(page, pool)).to_contain_text("model chat")
    expect(card(page, pool).locator(".area").first).to_have_attribute("points", DRAWN)
    expect(figure(page, "host", "Budget of all pools")).to_have_text("64 MiB")
    # An answer that comes whole has no first token.
    expect(row(page, "chat")).not_to_contain_text("ms /")
    assert b"[DONE]" in up.ask({"model": "chat", "prompt": "Hello", "max_tokens": 8, "stream": True})
    expect(row(page, "chat")).to_contain_text("ms /")
    picture(page, "dashboard-of-kvctl-up")

    page.get_by_label(f"Change limit or share of {pool}").click()
    limit = card(page, pool).get_by_role("textbox", name="Limit")
    limit.fill("24M")
    limit.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text(f"The limit of {pool} was not changed: this needs the key")
    use_key(page, KEY)
    limit.press("Enter")
    expect(page.locator("#said")).to_have_text(f"The limit of {pool} is now 24M.")
    expect(figure(page, pool, "Limit")).to_have_text("24 MiB")
    pools = json.loads(up.kvctl("list", "--json"))
    assert [found["limit_bytes"] for found in pools if found["ipc"] == pool] == [24 << 20]

    weight = card(page, pool).get_by_role("spinbutton", name="Weight")
    weight.fill("3")
    weight.press("Enter")
    expect(figure(page, pool, "Weight, floor")).to_have_text("3, 0 B")

    page.get_by_role("button", name="Put chat to sleep").click()
    expect(row(page, "chat")).to_contain_text("sleeping")
    expect(figure(page, pool, "Needed")).to_have_text("0 B")
    assert up.complete("chat")["usage"]["completion_tokens"] == 8, "a request wakes it"
    expect(page.get_by_role("log")).to_contain_text("chat: wake up")
    expect(row(page, "chat")).to_contain_text("ready")
    page.get_by_role("button", name="Put chat to sleep").click()
    page.get_by_role("button", name="Wake chat").click()
    expect(page.get_by_role("button", name="Put chat to sleep")).to_be_visible()
