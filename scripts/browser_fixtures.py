"""What every test of a page in a real browser needs; scripts/test-browser loads it as a pytest plugin.

    def test_it(open_page, picture):
        page = open_page("http://127.0.0.1:1234/", scheme="dark")
        expect(page.get_by_role("heading", level=1)).to_have_text("Pools")     # waits, and fails after a while
        picture(page, "pools-dark")                                            # kept where SCREENSHOTS says

A page that writes an error to its console, throws, or asks any other host for anything fails its test, unless the test
says which words it expects: open_page(..., expected=["401"]).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

# Only a hang reaches it, also on a machine that has much else to do.
PATIENCE_MS = 60_000

# Nothing of the browser's own that would reach out, and no sandbox, which root cannot have.
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--force-color-profile=srgb",
]

OpenPage = Callable[..., Page]


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """One browser for all tests; each page has a profile of its own."""
    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as playwright:
        # Playwright gives it a new --user-data-dir and removes that when it closes.
        browser = playwright.chromium.launch(executable_path=os.environ["CHROMIUM"], headless=True, args=FLAGS)
        try:
            yield browser
        finally:
            browser.close()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[OpenPage]:
    """Opens an address: `scheme` light or dark, `media` screen or print, `size` in pixels. Complaints fail the test."""
    complaints: list[str] = []
    contexts = []

    def open_one(
        url: str,
        scheme: str = "light",
        media: str = "screen",
        size: tuple[int, int] = (1280, 900),
        reduced_motion: bool = False,
        expected: list[str] | None = None,
    ) -> Page:
        expected = expected or []
        context = browser.new_context(
            color_scheme=scheme,
            viewport={"width": size[0], "height": size[1]},
            reduced_motion="reduce" if reduced_motion else "no-preference",
        )
        context.set_default_timeout(PATIENCE_MS)
        contexts.append(context)

        def complain(text: str) -> None:
            if not any(words in text for words in expected):
                complaints.append(text)

        page = context.new_page()
        page.emulate_media(media=media, color_scheme=scheme)
        page.on("console", lambda line: complain(f"console: {line.text}") if line.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: complain(f"thrown: {error}"))
        origin = urlsplit(url)[:2]

        def look(address: str) -> None:
            if urlsplit(address)[:2] != origin and not address.startswith(("data:", "blob:")):
                complain(f"asked another host: {address}")

        page.on("request", lambda request: look(request.url))
        page.goto(url)
        return page

    try:
        yield open_one
        assert complaints == []
    finally:
        for context in contexts:
            context.close()


@pytest.fixture
def picture() -> Callable[[Page, str], None]:
    """Keeps a picture of the whole page, where anybody wants pictures."""
    folder = os.environ.get("SCREENSHOTS")

    def take(page: Page, name: str) -> None:
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
            page.screenshot(path=Path(folder) / f"{name}.png", full_page=True)

    return take
