"""Colours of the report in light and dark mode, and the style sheet of the page.

Charts are drawn in the light colours. In the page's SVG each colour becomes a CSS variable, so that the browser's mode
decides.
"""

from pathlib import Path
from typing import Final

INK, SOFT, GRID, BAD = "#1b1f24", "#57606a", "#d8dee4", "#c4281c"
SERIES: Final = ("#1f5fa8", "#c2540a", "#1a7f4b", "#8a3ffc", "#9a6700", "#0b7285", "#b3306b", "#5c6670")
_DARK: Final = {
    INK: "#e6edf3",
    SOFT: "#9da7b3",
    GRID: "#30363d",
    BAD: "#ff7b72",
    SERIES[0]: "#6cb0ff",
    SERIES[1]: "#ffa45c",
    SERIES[2]: "#56d38d",
    SERIES[3]: "#c7a0ff",
    SERIES[4]: "#e3bd4f",
    SERIES[5]: "#4dd0e1",
    SERIES[6]: "#ff8fbc",
    SERIES[7]: "#aeb8c2",
}
VARIABLES: Final = {
    colour: f"--{name}"
    for colour, name in zip(_DARK, ("ink", "soft", "grid", "bad", *(f"s{n}" for n in range(8))), strict=True)
}


def series_colour(number: int) -> str:
    """Returns the colour of a subject by its position in the report."""
    return SERIES[number % len(SERIES)]


def themed(svg: str) -> str:
    """Replaces the light colours in an SVG by CSS variables."""
    for colour, variable in VARIABLES.items():
        svg = svg.replace(colour, f"var({variable})")
    return svg


def style() -> str:
    """Returns the page's style sheet, with the colours of both modes."""
    light = "".join(f"{variable}:{colour};" for colour, variable in VARIABLES.items())
    dark = "".join(f"{variable}:{_DARK[colour]};" for colour, variable in VARIABLES.items())
    rules = Path(__file__).with_name("style.css").read_text()
    return (
        f":root{{color-scheme:light dark;{light}--page:#ffffff;--card:#f6f8fa;--mark:#fff3d6}}\n"
        f"@media screen and (prefers-color-scheme:dark)"
        f"{{:root{{{dark}--page:#0d1117;--card:#161b22;--mark:#3b2f12}}}}\n\n{rules}"
    )
