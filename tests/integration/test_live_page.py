"""The live page in a real browser: it draws what comes without being loaded again, for eyes and for the keyboard.

Screenshots lie in TRIDOCK_SCREENSHOTS, or else in the test's own folder, which it names.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image, ImageStat

from tests.integration.browser import Page, open_page
from tests.integration.test_report_page import chromium  # noqa: F401 - a fixture
from tests.patience import STEP_S
from tests.unit.report.test_page import HOSTILE, a_run
from tridock.ops.runs.watch import ask_folder
from tridock.report.live_server import LiveServer

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two runs; an event of the first holds markup."""
    folder = tmp_path_factory.mktemp("live")
    found = [a_run(folder / name, [7.0 * 0.99**step for step in range(300)]) for name in ("first", "second")]
    add(found[0], "events", {"event": "run_failed", "reason": HOSTILE.replace("\x00", "")})
    (found[0] / ".ranks.json").write_text('[[0, "train", 300, 0.5], [1, "train", 299, 0.5]]')
    return found


def add(run: Path, name: str, *records: dict[str, object]) -> None:
    with (run / f"{name}.jsonl").open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


@pytest.fixture(scope="module")
def server(runs: list[Path]) -> Iterator[LiveServer]:
    with LiveServer({run.name: ask_folder(run) for run in runs}) as made:
        made.watch()
        threading.Thread(target=made.serve_forever, args=(0.05,), daemon=True).start()
        yield made
        made.shutdown()


@pytest.fixture(scope="module")
def page(chromium: str, server: LiveServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:  # noqa: F811
    with open_page(chromium, tmp_path_factory.mktemp("browser")) as made:
        made.look(1280)
        made.call("Page.navigate", url=server.url)
        reached = "[...document.querySelectorAll('#summary td:nth-child(3)')].map((cell) => cell.textContent).join()"
        made.wait(f"{reached} === '300,300'")
        yield made
        own = server.url
        assert all(url.startswith((own, "data:", "about:")) for url in made.asked), made.asked
        assert made.said == []


@pytest.mark.parametrize(
    ("name", "width", "dark"),
    [
        pytest.param("light", 1280, False, marks=pytest.mark.full),
        ("dark", 1280, True),
        pytest.param("narrow", 400, False, marks=pytest.mark.full),
    ],
)
def test_it_shows(page: Page, tmp_path: Path, name: str, width: int, dark: bool) -> None:
    page.look(width, dark=dark)
    page.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    picture = page.shoot(tmp_path / "page.png")
    assert page.run("document.documentElement.scrollWidth") <= width
    with Image.open(picture) as image:
        brightness = ImageStat.Stat(image.convert("L")).median[0]
        counted = {colour: count for count, colour in image.convert("RGB").getcolors(1 << 24) or []}
    assert brightness < 60 if dark else brightness > 200
    for colour in ("#6cb0ff", "#ffa45c") if dark else ("#1f5fa8", "#c2540a"):
        assert counted.get(tuple(bytes.fromhex(colour[1:])), 0) > 300, colour
    if keep := os.environ.get("TRIDOCK_SCREENSHOTS"):
        Path(keep).mkdir(parents=True, exist_ok=True)
        picture = Path(shutil.copy(picture, Path(keep, f"live-{name}.png")))
    print(f"screenshot: {picture}")


def test_a_restart_and_new_points_come_without_loading_the_page_again(page: Page, runs: list[Path]) -> None:
    page.run("window.same = true")
    add(runs[0], "metrics", *({"iteration": step, "loss": 0.25} for step in range(301, 321)))
    add(runs[0], "events", {"event": "run_restarted", "attempt": 7, "iteration": 300, "reason": "rank 1 was killed"})
    page.wait("document.querySelector('#summary td:nth-child(3)').textContent === '320'")
    page.wait("document.querySelector('#summary td:nth-child(6)').textContent === '2'")
    page.wait("document.querySelector('#events').textContent.includes('rank 1 was killed')")
    assert page.run("document.querySelector('#chart-loss .reading').textContent").startswith("first 0.25 · first valid")
    assert page.run("window.same") is True


def test_what_a_run_contains_is_text(page: Page) -> None:
    assert HOSTILE.replace("\x00", "")[:20] in page.run("document.querySelector('#events').textContent")
    assert page.run("document.querySelectorAll('#events img, #events script').length") == 0


def test_the_keyboard_reaches_a_chart_and_reads_its_points(page: Page) -> None:
    page.run("document.activeElement.blur()")
    for _ in range(20):
        page.press("Tab")
        if page.run("document.activeElement.id") == "chart-loss":
            break
    assert page.run("document.activeElement.id") == "chart-loss"
    assert page.run("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    reading = "document.querySelector('#chart-loss .reading').textContent"
    page.press("Home")
    assert page.run(reading).startswith("iteration 1: first 7 · ")
    page.press("ArrowRight")
    assert page.run(reading).startswith("iteration 2: first 6.93 · ")
    assert page.run("document.getElementById('spoken').textContent") == page.run(reading)
    page.press("End")
    assert page.run(reading).startswith("iteration 3")
    page.press("Escape")
    assert not page.run(reading).startswith("iteration")


def test_the_page_says_that_the_command_has_ended(
    chromium: str,  # noqa: F811
    runs: list[Path],
    tmp_path: Path,
) -> None:
    argv = [sys.executable, "-m", "tridock.cli", "watch", str(runs[0])]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        try:
            name, address, metrics = (process.stdout.readline().split() for _ in range(3))
            assert (name, metrics) == (["first"], ["metrics", f"{address[1]}metrics"])
            with open_page(chromium, tmp_path) as page:
                page.call("Page.navigate", url=address[1])
                page.wait("document.body?.dataset.drawn")
                process.send_signal(signal.SIGINT)
                assert process.wait(STEP_S) == 0
                text = page.wait("document.querySelector('#moment.bad')?.textContent")
            assert text == "tridock watch has ended here, or does not answer: start it again."
        finally:
            process.kill()
