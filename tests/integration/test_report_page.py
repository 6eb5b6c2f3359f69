"""The report in a real browser: it shows, asks nobody for anything, complains of nothing.

Screenshots lie in TRIDOCK_SCREENSHOTS, or else in the test's own folder, which it names.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from PIL import Image, ImageStat

from tests.patience import STEP_S
from tests.unit.report import logs
from tests.unit.report.test_page import HOSTILE, a_run
from tridock.report.page import write_report

WIDE, NARROW = (1280, 3200), (400, 5200)
# Where a browser looks for its updates, dictionaries and the time, whatever it shows.
ITS_OWN = ("google.com", "gvt1.com", "googleapis.com")
DARK = "--blink-settings=preferredColorScheme=0"


@pytest.fixture(scope="module")
def chromium() -> str:
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if found := shutil.which(name):
            return found
    pytest.skip("no Chromium is here (apt-get install --no-install-recommends chromium)")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs, one of which has faults and losses that are not finite, and a log with a hostile name and argument."""
    folder = tmp_path_factory.mktemp("report")
    losses = [7.0 * 0.99**step for step in range(300)]
    broken: list[float | None] = [*losses[:150], None, None, *losses[100:200]]
    log = folder / '<img src="http:evil">.log'
    argument = f"  name {'.' * 30} {HOSTILE}\n".replace("\x00", "")
    lines = (logs.today(step, 7.0 - step / 100, ms=250 + step) + logs.TIMES_TODAY for step in range(1, 200))
    log.write_text(logs.ARGUMENTS + argument + "".join(lines) + logs.MEMORY)
    runs = [a_run(folder / "calm", list(losses)), a_run(folder / "disturbed", broken, seed=2)]
    return write_report(runs, [log], folder / "report.html")[0]


def shoot(
    browser: str, page: Path, folder: Path, size: tuple[int, int], *arguments: str
) -> tuple[Path, str, list[str]]:
    """The screenshot, what the page said to the console, and every address that was asked for."""
    picture, network = folder / "page.png", folder / "network.json"
    argv = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr",
            "--disable-background-networking", "--no-first-run", f"--user-data-dir={folder / 'profile'}",
            f"--window-size={size[0]},{size[1]}", f"--log-net-log={network}", f"--screenshot={picture}", *arguments,
            page.as_uri()]  # fmt: skip
    done = subprocess.run(argv, capture_output=True, text=True, timeout=STEP_S, check=False)
    assert done.returncode == 0, done.stderr
    console = "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)
    return picture, console, asked_for(network)


def asked_for(network: Path) -> list[str]:
    """The addresses in the browser's own record of its network that a page's content can ask for."""
    record = json.loads(network.read_text())
    urls = [event.get("params", {}).get("url") for event in record["events"]]
    hosts = {url: urlsplit(url) for url in urls if url}
    return sorted(
        url
        for url, parts in hosts.items()
        if parts.scheme in ("http", "https", "ws", "wss", "ftp") and not (parts.hostname or "").endswith(ITS_OWN)
    )


def test_it_is_seen_that_a_page_asks_for_something(chromium: str, tmp_path: Path) -> None:
    """The other tests would pass for ever if nothing were noticed."""
    page = tmp_path / "bad.html"
    page.write_text("<img src='http://127.0.0.1:9/x.png'><script>console.error('said')</script>")
    _, console, addresses = shoot(chromium, page, tmp_path, (300, 300))
    assert "said" in console
    assert "http://127.0.0.1:9/x.png" in addresses


@pytest.mark.parametrize(
    ("name", "size", "arguments", "dark"),
    [
        ("light", WIDE, (), False),
        pytest.param("dark", WIDE, (DARK,), True, marks=pytest.mark.full),
        pytest.param("narrow", NARROW, (), False, marks=pytest.mark.full),
    ],
)
def test_the_page_in_a_browser(
    chromium: str,
    report: Path,
    tmp_path: Path,
    name: str,
    size: tuple[int, int],
    arguments: tuple[str, ...],
    dark: bool,
) -> None:
    picture, console, addresses = shoot(chromium, report, tmp_path, size, *arguments)
    assert console == ""
    assert addresses == []
    with Image.open(picture) as image:
        assert image.size == size
        # Nothing runs over the page's margin: what is wider than the page scrolls inside it.
        assert len(image.convert("RGB").crop((size[0] - 16, 0, *size)).getcolors() or []) == 1
        brightness = ImageStat.Stat(image.convert("L")).median[0]
        # The two series' colours, as they are on this ground, fill more than a speck: the charts are there.
        series = ("#6cb0ff", "#ffa45c") if dark else ("#1f5fa8", "#c2540a")
        counted = {colour: count for count, colour in image.convert("RGB").getcolors(1 << 24) or []}
        assert min(counted.get(tuple(bytes.fromhex(colour[1:])), 0) for colour in series) > 300
    assert brightness < 60 if dark else brightness > 200
    if keep := os.environ.get("TRIDOCK_SCREENSHOTS"):
        Path(keep).mkdir(parents=True, exist_ok=True)
        picture = Path(shutil.copy(picture, Path(keep, f"report-{name}.png")))
    print(f"screenshot: {picture}")


def test_it_prints(chromium: str, report: Path, tmp_path: Path) -> None:
    printed = tmp_path / "page.pdf"
    argv = [chromium, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}", DARK,
            f"--print-to-pdf={printed}", report.as_uri()]  # fmt: skip
    done = subprocess.run(argv, capture_output=True, text=True, timeout=STEP_S, check=False)
    assert done.returncode == 0, done.stderr
    assert printed.read_bytes().startswith(b"%PDF-")
    assert printed.stat().st_size > 50_000
