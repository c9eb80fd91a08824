"""`kvbench report` in a real browser: every plot is seen, nothing runs, and it reads light, dark, narrow and on paper."""

from __future__ import annotations

import json
import math
import os
import subprocess
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

REPOSITORY = Path(__file__).resolve().parents[4]


def times_ns(scale_ms: float, count: int = 400) -> dict:
    """A series whose curve has a long tail."""
    values = [int(1e6 * scale_ms * (0.6 + (i % 97) / 60 + (3 if i % 53 == 0 else 0))) for i in range(count)]
    ranked = sorted(values)
    rank = lambda percent: ranked[max(0, math.ceil(count * percent / 100) - 1)]  # noqa: E731
    return {
        "unit": "ns", "count": count, "min": ranked[0], "avg": sum(values) / count, "p50": rank(50), "p90": rank(90),
        "p99": rank(99), "max": ranked[-1], "thinned": False, "values": values,
    }  # fmt: skip


def serving(rate: float, kv_mode: str, repeat: int) -> dict:
    """What `kvbench serve` writes, of a server that slows down as it fills up."""
    slow = 1.0 if kv_mode == "elastic" else 1.35
    ttft = slow * (14 + rate**1.4) * (1 + repeat * 0.03)
    steps = range(0, 120)
    memory = lambda shift: [int(2**30 * (1.2 + math.sin((i + shift) / 15))) for i in steps]  # noqa: E731
    requests = range(300)
    return {
        "schema": "tidekv.bench.v1",
        "name": "serve",
        "args": {"request_rate": rate, "seed": repeat, "num_prompts": 300},
        "host": {"cpu": "AMD EPYC 9654 96-Core Processor", "cores": 2, "memory_bytes": 25276518400, "kernel": "6.8.0",
                 "commit": "1a2b3c4d5e6f", "build": "release", "date": f"2026-08-01T1{repeat}:00:00Z"},
        "samples": {"ttft": times_ns(ttft), "itl": times_ns(4 * slow), "e2e": times_ns(ttft + 300)},
        "summary": {"send_lag_ms": {"p50": 0.02, "p99": 0.4}, "ttft_ms": {"p50": ttft, "p99": ttft * 3}},
        "kv_mode": kv_mode,
        "command": ["kvbench", "serve", "--base-url", "http://127.0.0.1:8000", "--request-rate", str(rate)],
        "environment": {"vllm": "0.11", "torch": "2.9", "kvcached": "tidekv 0.1.0"},
        "duration": 300 / rate, "completed": 300, "failed": 0, "request_throughput": rate * 0.99, "throughput": rate * 0.99,
        "output_throughput": rate * 63, "median_ttft_ms": ttft, "p99_ttft_ms": ttft * 3, "ttft_p50": ttft, "itl_p50": 4 * slow,
        "e2e_p50": ttft + 300,
        "timeline": {
            "t_s": [i / 4 for i in steps],
            "columns": {
                "pool.chat.in_use_bytes": memory(0), "pool.chat.mapped_bytes": [value + 2**28 for value in memory(0)],
                "pool.code.in_use_bytes": memory(40),
                "nvml.0.utilization_percent": [50 + 40 * math.sin(i / 9) for i in steps],
            },
        },
        "requests": {
            "model": [["chat", "code"][i % 2] for i in requests], "intended_s": [i / 10 for i in requests],
            "ttft_ms": [None if i == 7 else ttft * (0.5 + (i * 37 % 100) / 60) for i in requests],
        },
    }  # fmt: skip


def make(folder: Path, *flags: str) -> str:
    """The page of a folder, as an address."""
    target = folder.parent / f"{folder.name}.html"
    subprocess.run([os.environ["KVBENCH"], "report", str(folder), "--output", str(target), *flags], check=True, capture_output=True)
    return target.as_uri()


def overhead() -> dict:
    """What an A/B benchmark writes: a sweep with repeats of both arms, and the ratio at each rate with its interval."""
    rates, arms, figures = (1, 4, 16, 64), (("static", 1.0), ("elastic", 1.01)), ("throughput", "ttft_p50", "itl_p50")
    row = lambda rate, arm, factor, repeat: {  # noqa: E731
        "request_rate": rate, "arm": arm, "repeat": repeat, "profile": "fixed", "throughput": rate / factor,
        "ttft_p50": (9 + rate / 4) * factor * (1 + repeat / 50), "ttft_p99": (30 + rate) * factor, "itl_p50": 4 * factor,
    }  # fmt: skip
    ratio = lambda rate: {  # noqa: E731
        "rate": rate, **{f"{figure}_ratio": 1 + i / 200 for i, figure in enumerate(figures)},
        "ci": {figure: [0.985 + i / 200, 1.012 + i / 200] for i, figure in enumerate(figures)},
        "elastic": {"ttft_p50_ms": 9.1}, "static": {"ttft_p50_ms": 9.0},
    }  # fmt: skip
    return {
        "schema": "tidekv.bench.v1", "name": "overhead", "args": {}, "host": {"cpu": "a cpu"}, "samples": {},
        "summary": {"rates": [ratio(rate) for rate in rates], "verdict": "no difference"},
        "sweep": [row(rate, arm, factor, repeat) for rate in rates for arm, factor in arms for repeat in range(3)],
    }  # fmt: skip


@pytest.fixture
def of_servers(tmp_path: Path) -> str:
    runs = tmp_path / "runs"
    for kv_mode in ("static", "elastic"):
        (runs / kv_mode).mkdir(parents=True)
        for rate in (2.0, 4.0, 8.0, 16.0):
            for repeat in range(2):
                text = json.dumps(serving(rate, kv_mode, repeat))
                (runs / kv_mode / f"rate{rate:g}-{repeat}.json").write_text(text)
    return make(runs, "--title", "Elastic and static memory")


def check_plots(page: Page) -> None:
    """Every plot has a size, words for those who do not see it, and no text that leaves it."""
    plots = page.locator("figure svg")
    assert plots.count() > 0
    for plot in plots.all():
        box = plot.bounding_box()
        assert box and box["width"] > 200 and box["height"] > 100
        assert plot.get_attribute("role") == "img"
        assert plot.locator("title").first.text_content() and plot.locator("desc").first.text_content()
    outside = page.evaluate(
        """() => [...document.querySelectorAll('figure svg')].flatMap(svg => {
            const outer = svg.getBoundingClientRect();
            return [...svg.querySelectorAll('text')].filter(text => {
                const inner = text.getBoundingClientRect();
                return inner.left < outer.left - 2 || inner.right > outer.right + 2 || inner.bottom > outer.bottom + 2;
            }).map(text => text.textContent);
        })"""
    )
    assert outside == []


def contrast(page: Page, selector: str) -> float:
    """How much an element's text differs from what is behind it, as WCAG counts it."""
    return page.evaluate(
        """selector => {
            const element = document.querySelector(selector);
            const parse = colour => colour.match(/[0-9.]+/g).map(Number);
            const light = colour => parse(colour).slice(0, 3).map(v => v / 255)
                .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
                .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
            let behind = element;
            while (behind && (parse(getComputedStyle(behind).backgroundColor)[3] ?? 1) === 0) behind = behind.parentElement;
            const style = getComputedStyle(element);
            const ink = element instanceof SVGElement ? style.fill : style.color;
            const pair = [light(ink), light(getComputedStyle(behind ?? document.body).backgroundColor)].sort((a, b) => b - a);
            return (pair[0] + 0.05) / (pair[1] + 0.05);
        }""",
        selector,
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_page_of_servers_is_seen_and_read(of_servers: str, open_page, picture, scheme: str) -> None:
    page = open_page(of_servers, scheme=scheme)
    expect(page.get_by_role("heading", level=1)).to_have_text("Elastic and static memory")
    for heading in ("Latency against rate", "Memory and latency over time", "Distributions", "Reproduce", "Environment"):
        expect(page.get_by_role("heading", name=heading, exact=True).first).to_be_visible()
    expect(page.get_by_role("img", name="Time to first token, median")).to_be_visible()
    check_plots(page)
    for selector in ("h1", ".lead", "td", "figure svg text", "nav a", "summary"):
        assert contrast(page, selector) >= 4.5, selector
    assert page.locator("script").count() == 0
    picture(page, f"report-serving-{scheme}")


def test_numbers_of_a_plot_are_a_key_away(of_servers: str, open_page) -> None:
    page = open_page(of_servers)
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="To the results")).to_be_focused()
    numbers = page.get_by_text("The numbers behind these plots")
    numbers.focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("cell", name="16.0").first).to_be_visible()
    page.get_by_role("navigation").get_by_role("link", name="Reproduce").click()
    expect(page.get_by_text("kvbench serve --base-url").first).to_be_in_viewport()


def test_nothing_is_wider_than_a_phone(of_servers: str, open_page, picture) -> None:
    page = open_page(of_servers, size=(390, 844))
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    picture(page, "report-serving-phone")


def test_paper_is_white_whatever_the_screen(of_servers: str, open_page, picture, tmp_path: Path) -> None:
    page = open_page(of_servers, scheme="dark", media="print", size=(794, 1123))
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    expect(page.get_by_role("navigation")).to_be_hidden()
    check_plots(page)
    picture(page, "report-serving-print")
    paper = tmp_path / "report.pdf"
    page.pdf(path=paper, format="A4")
    assert paper.read_bytes().startswith(b"%PDF")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_runs_of_every_other_benchmark(open_page, picture, tmp_path: Path, scheme: str) -> None:
    target = tmp_path / "all.html"
    runs = REPOSITORY / "benchmarks" / "runs"
    subprocess.run([os.environ["KVBENCH"], "report", str(runs), "--output", str(target)], check=True, capture_output=True)
    page = open_page(target.as_uri(), scheme=scheme)
    expect(page.get_by_role("heading", level=2, name="vmm", exact=True)).to_be_visible()
    check_plots(page)
    picture(page, f"report-kept-runs-{scheme}")


def test_an_overhead_has_its_ratios_in_a_band(open_page, picture, tmp_path: Path) -> None:
    runs = tmp_path / "overhead"
    runs.mkdir()
    (runs / "overhead.json").write_text(json.dumps(overhead()))
    page = open_page(make(runs))
    ratios = page.get_by_role("img", name="overhead: ratio of the two arms against rate")
    expect(ratios).to_be_visible()
    assert ratios.locator(".band").count() == 1 and ratios.locator("circle").count() >= 12
    expect(page.get_by_role("img", name="Time to first token, median")).to_be_visible()
    check_plots(page)
    picture(page, "report-overhead")


def test_text_of_a_stranger_is_text(open_page, tmp_path: Path) -> None:
    evil = "</style></script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
    result = serving(4.0, evil, 0)
    result.update(name=evil, warnings=[evil], environment={evil: evil}, command=["kvbench", evil])
    result["args"]["label"] = evil
    runs = tmp_path / "strange"
    runs.mkdir()
    (runs / "a.json").write_text(json.dumps(result))
    page = open_page(make(runs, "--title", evil))
    expect(page.get_by_role("heading", level=1)).to_have_text(evil)
    assert page.title() == f"{evil} - kvbench report"
    assert page.locator("img, script, iframe").count() == 0
