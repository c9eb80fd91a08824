"""The dashboard in a real browser, against a router of a few lines: what people see, hear and change."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from axe_playwright_python.sync_playwright import Axe
from dashboard_router import KEY, MIB, PAGE, Router, model, pool, running
from playwright.sync_api import Locator, Page, expect

# Two points at least.
DRAWN = re.compile(r"^[\d.]+,[\d.]+ .+")


@pytest.fixture
def router() -> Iterator[Router]:
    with running() as router:
        yield router


def card(page: Page, name: str) -> Locator:
    return page.get_by_role("article").filter(has=page.get_by_role("heading", name=name, level=3, exact=True))


def figure(page: Page, of: str, name: str) -> Locator:
    """The value beside a name in the table of a pool or device."""
    return card(page, of).locator("tr").filter(has=page.get_by_role("rowheader", name=name, exact=True)).locator("td")


def row(page: Page, name: str) -> Locator:
    table = page.get_by_role("table", name="Every model")
    return table.get_by_role("row").filter(has=page.get_by_role("rowheader", name=name, exact=True))


def use_key(page: Page, key: str = KEY) -> None:
    page.get_by_label("Key", exact=True).fill(key)
    page.get_by_role("button", name="Use", exact=True).click()
    expect(page.get_by_text("kept in this tab")).to_be_visible()


def assert_usable_by_all(page: Page) -> None:
    violations = Axe().run(page).response["violations"]
    assert [(found["id"], [node["html"] for node in found["nodes"]]) for found in violations] == []


def test_the_page_is_small() -> None:
    assert sum(file.stat().st_size for file in PAGE.iterdir()) < 60 * 1024


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_shows_everything_to_everybody(router, open_page, picture, scheme) -> None:
    router.decisions.append(
        {"time": 1700000000, "model": "chat", "pool": "kvcached_chat", "action": "weight 3", "reason": "TTFT p99 900 ms"}
    )
    page = open_page(router.url, scheme=scheme)
    expect(page).to_have_title("tidekv")
    expect(page.locator("#link")).to_have_text("live")
    for words in ["ready", "3.25", "41.5 ms / 180 ms", "9.2 ms / 21.0 ms", "kvcached_chat"]:
        expect(row(page, "chat")).to_contain_text(words)
    expect(row(page, "code")).to_contain_text("sleeping")
    shown = {"Needed": "300 MiB", "Cached": "30 MiB", "Idle": "10 MiB", "Demand": "0 B", "Limit": "700 MiB", "Fair share": "512 MiB (50 %)"}
    for name, value in shown.items():
        expect(figure(page, "kvcached_chat", name)).to_have_text(value)
    expect(figure(page, "kvcached_chat", "Weight, floor")).to_have_text("1, 0 B")
    expect(figure(page, "kvcached_code", "Limit")).to_have_text("none")
    for name, value in {"Others": "1020 MiB", "Free of the budget": "644 MiB", "Total": "4 GiB", "Budget of all pools": "1 GiB"}.items():
        expect(figure(page, "host", name)).to_have_text(value)
    expect(page.get_by_role("log")).to_contain_text("chat, pool kvcached_chat: weight 3 – TTFT p99 900 ms")
    plot = card(page, "kvcached_chat").get_by_role("img")
    expect(plot).to_have_accessible_name(
        "Needed, cached and idle, last 3 minutes. 300 MiB needed, 30 MiB cached, 10 MiB idle, limit 700 MiB."
    )
    expect(plot.locator(".area").first).to_have_attribute("points", DRAWN)
    for step in range(30):
        in_use = 200 + 12 * step
        router.pools[0] |= {"needed_bytes": in_use * MIB, "demand_bytes": max(0, step - 18) * 8 * MIB}
        router.models[0] |= {"request_rate": 3 + step % 7, "ttft_ms": {"p50": 40 + step, "p99": 180 + 9 * (step % 5)}}
        expect(figure(page, "kvcached_chat", "Needed")).to_have_text(f"{in_use} MiB")
    page.get_by_label("Change limit or share of kvcached_chat").click()
    picture(page, f"dashboard-{scheme}")
    assert_usable_by_all(page)


def test_it_fits_a_phone(router, open_page, picture) -> None:
    page = open_page(router.url, size=(380, 800))
    expect(figure(page, "kvcached_chat", "Needed")).to_have_text("300 MiB")
    picture(page, "dashboard-phone")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "nothing but tables scrolls sideways"


def test_it_follows_what_comes_and_goes(router, open_page) -> None:
    page = open_page(router.url)
    expect(figure(page, "kvcached_chat", "Needed")).to_have_text("300 MiB")
    router.pools[0]["needed_bytes"] = 512 * MIB
    expect(figure(page, "kvcached_chat", "Needed")).to_have_text("512 MiB")
    router.models.append(model("third"))
    router.pools.append(pool("kvcached_third"))
    expect(row(page, "third")).to_contain_text("ready")
    expect(card(page, "kvcached_third")).to_be_visible()
    router.models, router.pools = router.models[1:], router.pools[1:]
    expect(row(page, "chat")).to_have_count(0)
    expect(card(page, "kvcached_chat")).to_have_count(0)
    router.pools = []
    expect(page.get_by_text("No pool yet.")).to_be_visible()


def test_a_limit_is_not_changed_without_the_key_and_is_with_it(router, open_page) -> None:
    page = open_page(router.url, expected=["401", "422"])
    page.get_by_label("Change limit or share of kvcached_chat").click()
    limit = card(page, "kvcached_chat").get_by_role("textbox", name="Limit")
    limit.fill("256M")
    card(page, "kvcached_chat").get_by_role("button", name="Set limit").click()
    alert = page.get_by_role("alert")
    expect(alert).to_contain_text("The limit of kvcached_chat was not changed: this needs the key of this router")
    expect(alert).to_contain_text("(enter the key above)")
    assert router.changed == []

    use_key(page, "wrong")
    limit.press("Enter")
    expect(alert).to_contain_text("(the key above is not the right one)")
    expect(limit).to_have_value("256M")

    use_key(page)
    limit.press("Enter")
    expect(page.locator("#said")).to_have_text("The limit of kvcached_chat is now 256M.")
    expect(alert).to_be_empty()
    expect(figure(page, "kvcached_chat", "Limit")).to_have_text("256 MiB")
    assert router.changed == [("/api/pools/kvcached_chat/limit", {"size": "256M"})]

    limit.fill("much")
    limit.press("Enter")
    expect(alert).to_contain_text("is not a size: write 512M or 2G")
    alert.get_by_role("button", name="Dismiss").click()
    expect(alert).to_be_empty()
    assert page.evaluate("localStorage.length") == 0, "the key is kept in this tab alone"
    page.get_by_role("button", name="Forget").click()
    assert page.evaluate("sessionStorage.length") == 0


def test_a_share_is_changed_by_keyboard_alone(router, open_page) -> None:
    page = open_page(router.url)
    use_key(page)
    summary = page.get_by_label("Change limit or share of kvcached_code")
    expect(summary).to_be_visible()
    keys = 0
    while not summary.evaluate("element => element === document.activeElement"):
        page.keyboard.press("Tab")
        keys += 1
        assert keys < 60, "the tabulator comes by"
    page.keyboard.press("Enter")
    # Past the limit and its button to the weight.
    for _ in range(3):
        page.keyboard.press("Tab")
    page.keyboard.type("4")
    page.keyboard.press("Enter")
    expect(page.locator("#said")).to_have_text("The share of kvcached_code is changed.")
    expect(figure(page, "kvcached_code", "Weight, floor")).to_have_text("4, 0 B")
    assert router.changed == [("/api/pools/kvcached_code/share", {"weight": 4})]


def test_a_model_is_put_to_sleep_and_woken(router, open_page) -> None:
    page = open_page(router.url)
    use_key(page)
    page.get_by_role("button", name="Put chat to sleep").click()
    expect(row(page, "chat")).to_contain_text("sleeping")
    page.get_by_role("button", name="Wake chat").click()
    expect(row(page, "chat")).to_contain_text("ready")
    assert [path for path, _ in router.changed] == ["/action/sleep/chat", "/action/wakeup/chat"]


def test_it_says_when_the_router_is_gone_and_comes_back_with_it(router, open_page) -> None:
    page = open_page(router.url, expected=["503"])
    expect(page.locator("#link")).to_have_text("live")
    router.is_up = False
    expect(page.locator("#link")).to_contain_text("not connected: the router is shutting down; trying again")
    router.pools[0]["needed_bytes"] = 444 * MIB
    router.is_up = True
    expect(page.locator("#link")).to_have_text("live")
    expect(figure(page, "kvcached_chat", "Needed")).to_have_text("444 MiB")


def test_what_is_being_typed_stays_and_a_pause_is_a_pause(router, open_page) -> None:
    page = open_page(router.url)
    page.get_by_label("Change limit or share of kvcached_chat").click()
    limit = card(page, "kvcached_chat").get_by_role("textbox", name="Limit")
    limit.press_sequentially("12")
    router.pools[0]["needed_bytes"] = 310 * MIB
    expect(figure(page, "kvcached_chat", "Needed")).to_have_text("310 MiB")
    expect(limit).to_be_focused()
    expect(limit).to_have_value("12")
    page.get_by_role("button", name="Pause").click()
    router.pools[0]["needed_bytes"] = 320 * MIB
    router.decisions.append({"time": 1700000000, "model": "chat", "pool": None, "action": "sleep", "reason": "idle"})
    # Decisions are kept while it is paused, and tell us that the page has heard of the rest.
    expect(page.get_by_role("log")).to_contain_text("chat: sleep – idle")
    expect(figure(page, "kvcached_chat", "Needed")).to_have_text("310 MiB")
    page.get_by_role("button", name="Pause").click()
    expect(figure(page, "kvcached_chat", "Needed")).to_have_text("320 MiB")


def test_names_cannot_become_a_part_of_the_page(router, open_page) -> None:
    evil = '<img src=x onerror="document.title=1">'
    router.pools = [pool(evil, model=evil, device="host")]
    router.models = [model(evil)]
    router.decisions.append({"time": "now", "model": evil, "pool": evil, "action": evil, "reason": evil})
    page = open_page(router.url)
    expect(card(page, evil)).to_be_visible()
    expect(page.get_by_role("log")).to_contain_text(evil)
    assert page.locator("img[src]").count() == 0
    expect(page).to_have_title("tidekv")


def test_who_asked_for_less_motion_gets_figures_at_once(router, open_page) -> None:
    page = open_page(router.url, reduced_motion=True)
    expect(figure(page, "kvcached_chat", "Needed")).to_have_text("300 MiB")
    router.pools[0]["needed_bytes"] = 512 * MIB
    expect(figure(page, "kvcached_chat", "Needed")).to_have_text("512 MiB")
    assert page.evaluate("getComputedStyle(document.getElementById('pause')).transitionDuration") == "0s"
