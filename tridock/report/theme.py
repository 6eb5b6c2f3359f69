"""Colours of the report in light and dark mode, and the style sheet of the page.

Charts are drawn in the light colours. In the page's SVG each colour becomes a CSS variable, so that the browser's mode
decides.
"""

from __future__ import annotations

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
    """Returns the style sheet of the page."""
    light = "".join(f"{variable}:{colour};" for colour, variable in VARIABLES.items())
    dark = "".join(f"{variable}:{_DARK[colour]};" for colour, variable in VARIABLES.items())
    return (
        f":root{{color-scheme:light dark;{light}--page:#ffffff;--card:#f6f8fa;--mark:#fff3d6}}\n"
        f"@media screen and (prefers-color-scheme:dark)"
        f"{{:root{{{dark}--page:#0d1117;--card:#161b22;--mark:#3b2f12}}}}\n{_RULES}"
    )


_RULES: Final = """
*{box-sizing:border-box}
body{margin:0 auto;max-width:1180px;padding:24px 20px 60px;background:var(--page);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
h1{font-size:26px;line-height:1.25;margin:0 0 4px;overflow-wrap:anywhere}
h2{font-size:19px;margin:36px 0 10px;padding-bottom:4px;border-bottom:1px solid var(--grid)}
h3{font-size:15px;margin:18px 0 6px;overflow-wrap:anywhere}
p{margin:6px 0}
.soft{color:var(--soft)}
.bad{color:var(--bad);font-weight:600}
nav a{margin-right:14px;color:var(--s0)}
.chip{display:inline-block;width:12px;height:12px;border-radius:3px;margin-right:6px;vertical-align:-1px}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,480px),1fr));gap:16px}
figure{margin:0;padding:12px 12px 6px;background:var(--card);border:1px solid var(--grid);border-radius:8px;min-width:0}
figure h3{margin-top:0}
figure svg,figure img{display:block;width:100%;height:auto;margin:0 auto}
figcaption{font-size:13px;color:var(--soft);margin-top:4px;overflow-wrap:anywhere}
figure.paper{margin-bottom:12px;background:#ffffff;color:#1b1f24}
figure.paper figcaption{color:#57606a}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font-size:14px;width:100%}
th,td{text-align:left;vertical-align:top;padding:4px 14px 4px 0;border-bottom:1px solid var(--grid);
overflow-wrap:anywhere;min-width:72px}
thead th{color:var(--soft);font-weight:600;border-bottom:2px solid var(--grid)}
tbody th{font-weight:600}
table.events th:not(:nth-child(3)),table.events td:nth-child(2){white-space:nowrap;font-weight:400;width:1%}
td.number,th.number{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
td.mono,th.mono{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;font-size:13px}
tr.fault td{background:var(--mark)}
details{margin:8px 0}
summary{cursor:pointer;font-weight:600;overflow-wrap:anywhere}
@media print{
body{max-width:none;padding:0;font-size:11pt}
nav{display:none}
.charts{grid-template-columns:1fr 1fr}
figure,tr{break-inside:avoid}
h2,h3{break-after:avoid}
details::details-content{content-visibility:visible;display:block;height:auto}
.scroll{overflow:visible}
}
"""
