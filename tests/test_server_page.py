"""The status page in a real browser (Debian's Chromium), with made-up requests behind it."""

from __future__ import annotations

import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from fastapi import Depends, FastAPI, HTTPException, Request
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait
from served import IDLE, FakeBoost, FakeScheduler, disk, script, served, server
from servers import free_port

from kvboost.server import page, status
from kvboost.server.metrics import Metrics
from kvboost.server.work import Load
from kvboost.store import StoreStats

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER),
    reason="no chromium here: apt-get install --no-install-recommends chromium chromium-driver",
)
WIDE, NARROW = 1280, 390


class Browser:
    """Chromium without a window."""

    def __init__(self) -> None:
        options = webdriver.ChromeOptions()
        options.binary_location = str(CHROMIUM)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        for flag in ("headless=new", "disable-gpu", "disable-dev-shm-usage"):
            options.add_argument(f"--{flag}")
        if os.geteuid() == 0:  # its sandbox is not for root
            options.add_argument("--no-sandbox")
        self.driver = webdriver.Chrome(options, Service(str(DRIVER)))

    def open(self, url: str, width: int = WIDE, scheme: str = "light") -> None:
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        wish = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", wish)
        self.driver.get(url)

    def run(self, script: str) -> Any:
        return self.driver.execute_script(script)

    def text(self, selector: str) -> str:
        return str(self.driver.find_element(By.CSS_SELECTOR, selector).text)

    def until(self, selector: str, right: Callable[[str], bool]) -> None:
        WebDriverWait(self.driver, 20, 0.1).until(lambda _: right(self.text(selector)), selector)

    def live(self) -> None:
        self.until("#state", "live".__eq__)

    def complaints(self) -> list[str]:
        """What the console says, a broken content policy too."""
        return [entry["message"] for entry in self.driver.get_log("browser")]


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    browser = Browser()
    yield browser
    browser.driver.quit()


@pytest.fixture
def browser(chromium: Browser) -> Browser:
    """With nothing left from the test before."""
    chromium.driver.get("about:blank")
    chromium.complaints()
    return chromium


@contextmanager
def serving(
    metrics: Metrics,
    load: Load = IDLE,
    guard: Any = (),
    port: int = 0,
) -> Iterator[str]:
    app = FastAPI()
    app.include_router(metrics.router(FakeScheduler(load), guard))
    config = uvicorn.Config(app, port=port, log_level="error", lifespan="off", ws="none")
    running = uvicorn.Server(config)
    thread = threading.Thread(target=running.run)
    thread.start()
    try:
        while not running.started:
            assert thread.is_alive()
            time.sleep(0.01)
        yield f"http://127.0.0.1:{running.servers[0].sockets[0].getsockname()[1]}/"
    finally:
        running.should_exit = running.force_exit = True
        thread.join(20)


def busy(monkeypatch: pytest.MonkeyPatch) -> Metrics:
    """Five minutes of requests."""
    metrics, requests, now = Metrics(FakeBoost(disk(), server(up=False))), script(120), time.time()
    for n, request in enumerate(requests):
        at = now - 290 * (1 - n / len(requests))
        with monkeypatch.context() as patch:
            patch.setattr(status, "time", SimpleNamespace(time=lambda at=at: at))
            metrics.observe(request)
    metrics.refused(429)
    return metrics


def unused() -> Metrics:
    boost = FakeBoost(upgraded=0, waiting=0)
    boost.now = replace(boost.now, store=StoreStats(0, 0, 0, 4 << 30, 0, 0, 0))
    return Metrics(boost)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_it_shows_everything_and_complains_of_nothing(
    browser: Browser, monkeypatch: pytest.MonkeyPatch, width: int, scheme: str
) -> None:
    with serving(busy(monkeypatch), Load(3, 5, 8)) as url:
        browser.open(url, width, scheme)
        browser.live()
        assert re.fullmatch(r"[\d.]+ m?s", browser.text("#tile-warm"))
        assert browser.text("#tile-reuse").endswith("%")
        assert browser.text("#tile-served") == "120"
        assert browser.text("#tile-refused") == "and 1 refused"
        assert browser.text("#slots-text") == "5 of 8 slots answer"
        assert browser.text("#queue-text") == "3 requests wait"
        assert "1.4 GiB of 4.0 GiB (34 %)" in browser.text("#tiers")
        assert "out of use" in browser.text("#tiers")
        drawn = "return [...document.querySelectorAll('.dot')].length"
        assert browser.run(drawn) > 100
        assert browser.run("return document.querySelectorAll('#requests tbody tr').length") == 12
        assert browser.run("return document.querySelectorAll('#misses tbody tr').length") == 12
        assert not browser.run("return document.querySelector('#empty').checkVisibility()")
        overflow = "return document.documentElement.scrollWidth - window.innerWidth"
        assert browser.run(overflow) <= 0
        origins = "return performance.getEntriesByType('resource').map(e => new URL(e.name).origin)"
        assert {f"{origin}/" for origin in browser.run(origins)} == {url}
        assert browser.complaints() == []


def test_before_the_first_request_it_says_what_to_do(browser: Browser) -> None:
    metrics = unused()
    with serving(metrics) as url:
        browser.open(url)
        browser.live()
        assert "No requests yet" in browser.text("#empty")
        assert f"curl {url}v1/chat/completions" in browser.text("#curl")
        assert not browser.run("return document.querySelector('#requests').checkVisibility()")
        metrics.observe(served())
        browser.until("#tile-served", "1".__eq__)
        assert not browser.run("return document.querySelector('#empty').checkVisibility()")
        assert browser.complaints() == []


def test_misses_come_with_their_reason_and_what_to_do(browser: Browser) -> None:
    metrics = unused()
    metrics.observe(served(tenant="agents", misses={"sink": 310, "new": 4, "unheard of": 20}))
    with serving(metrics) as url:
        browser.open(url)
        browser.live()
        table = browser.text("#misses")
        assert "agents" in table
        assert status.REASONS["sink"].what in table
        assert status.REASONS["sink"].advice in table
        assert status.REASONS["new"].what not in table  # four tokens: a question
        assert "unheard of" in table


def test_words_of_others_stay_words(browser: Browser) -> None:
    metrics, evil = unused(), "<img src=x onerror=document.title='hurt'>"
    metrics.observe(served(tenant=evil, id=evil, policy=evil, outcome=evil))
    with serving(metrics) as url:
        browser.open(url)
        browser.live()
        assert evil in browser.text("#requests")
        assert browser.driver.title == "KVBoost"
        assert browser.run("return document.querySelectorAll('main img').length") == 0


def test_it_says_when_the_server_is_gone_and_starts_anew_with_another(browser: Browser) -> None:
    port, metrics = free_port(), unused()
    metrics.observe(served())
    metrics.observe(served())
    with serving(metrics, port=port) as url:
        browser.open(url)
        browser.live()
    browser.until("#state", "can't be reached".__eq__)
    assert re.search(r"since \d+:\d+:\d+ \(no connection\)", browser.text("#alert"))
    again = unused()
    again.observe(served(id="after the restart"))
    with serving(again, port=port):
        browser.live()
        assert browser.text("#tile-served") == "1"
        assert "after the restart" in browser.text("#requests")
        assert browser.run("return document.querySelectorAll('#requests tbody tr').length") == 1
        assert not browser.run("return document.querySelector('#alert').checkVisibility()")


def test_with_keys_it_asks_for_one(browser: Browser) -> None:
    def admin(request: Request) -> None:
        if request.headers.get("authorization") != "Bearer right":
            raise HTTPException(401)

    def enter(key: str) -> None:
        field = browser.driver.find_element(By.ID, "key")
        field.send_keys(key)
        field.submit()

    with serving(unused(), guard=[Depends(admin)]) as url:
        browser.open(url)
        browser.until("#state", "locked".__eq__)
        enter("wrong")
        browser.until("#state", "that key is not an admin key".__eq__)
        enter("right")
        browser.live()
        assert "Authorization: Bearer" in browser.text("#curl")
        assert "right" not in browser.text("#curl")
        assert not browser.run("return document.querySelector('#login').checkVisibility()")


def test_drawings_and_controls_have_names(
    browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(busy(monkeypatch)) as url:
        browser.open(url)
        browser.live()
        nameless = (
            "return [...document.querySelectorAll('svg')].filter(e => !e.ariaHidden && "
            "!e.ariaLabel).length + [...document.querySelectorAll('input, button')].filter("
            "e => !(e.labels?.length || e.textContent.trim())).length"
        )
        assert browser.run(nameless) == 0
        label = browser.run("return document.querySelector('#ttft svg').ariaLabel")
        assert re.match(r"Time to first token: \d+ requests that reused, median [\d.]+ m?s", label)
        assert browser.run("return document.documentElement.lang") == "en"


def luminance(colour: str) -> float:
    digits = colour if len(colour) == 6 else "".join(2 * c for c in colour)
    parts = [int(digits[n : n + 2], 16) / 255 for n in (0, 2, 4)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_colours_can_be_told_from_their_ground(scheme: int) -> None:
    """WCAG AA: 4.5 for text, 3 for what is drawn. (Amber is drawn with stripes or an outline.)"""
    css = Path(page.__file__).with_name("status.css").read_text(encoding="utf-8")
    block = re.findall(r":root \{(.*?)\}", css, re.DOTALL)[scheme]
    colours = dict(re.findall(r"--(\w+): #(\w+)", block))
    for ground in ("page", "card"):
        for name in ("text", "soft", "good", "bad"):
            assert contrast(colours[name], colours[ground]) >= 4.5, (name, ground)
    for name in ("exact", "recomputed", "computed"):
        assert contrast(colours[name], colours["card"]) >= 3, name
