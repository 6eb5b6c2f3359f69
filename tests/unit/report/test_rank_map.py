"""The rank map, in the terminal and drawn."""

import io
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from PIL import Image
from rich.console import Console

from tests.experiments import make_plan
from tests.unit.plan.layouts import laid_out
from tridock.errors import RequestError
from tridock.experiment import parse_experiment
from tridock.plan import Plan
from tridock.report.pictures import plot
from tridock.report.rank_map import KEY, RankMap, ink, legend, stage_colours

SMALL = """\
TP2 PP2 DP1: 4 ranks on 2 nodes
╭─ n0 ────────────╮ ╭─ n1 ────────────╮
│ slot 0  slot 1  │ │ slot 0  slot 1  │
│ r0      r1      │ │ r2      r3      │
│ 0.0.0.0 0.0.0.1 │ │ 1.0.0.0 1.0.0.1 │
╰─────────────────╯ ╰─────────────────╯
r5: rank 5. Below it pp.dp.cp.tp: pipeline, data, context, tensor parallel rank
   stage 0 (r0 to r1): 12.3 GiB, tight     stage 1 (r2 to r3)
"""
LARGE = """\
TP8 PP16 DP8: 1,024 ranks on 128 nodes
╭─ n0 ────────────────────────────────────────────────────────────────────╮
│ slot 0   slot 1   slot 2   slot 3   slot 4   slot 5   slot 6   slot 7   │
│ r0       r1       r2       r3       r4       r5       r6       r7       │
│ 0.0.0.0  0.0.0.1  0.0.0.2  0.0.0.3  0.0.0.4  0.0.0.5  0.0.0.6  0.0.0.7  │
╰─────────────────────────────────────────────────────────────────────────╯
… and 127 nodes more in the same way, to n127
r5: rank 5. Below it pp.dp.cp.tp: pipeline, data, context, tensor parallel rank
     stage 0 (r0 to r63): 9 GiB                 stage 1 (r64 to r127): 8 GiB
     stages 2 to 14 (r128 to r959): 7 GiB       stage 15 (r960 to r1023): 9 GiB
"""


def shown(plan: Plan, captions: dict[int, str] | None = None, width: int = 80, colour: bool = False) -> str:
    file = io.StringIO()
    system = "truecolor" if colour else None
    console = Console(file=file, width=width, force_terminal=colour, color_system=system)  # type: ignore[arg-type]
    console.print(RankMap(plan, captions or {}))
    return "".join(f"{line.rstrip()}\n" for line in file.getvalue().splitlines())


def test_a_small_map() -> None:
    assert shown(laid_out(2, 2, slots=[2, 2]), {0: "12.3 GiB, tight"}) == SMALL


def test_of_many_nodes_and_stages_the_first_are_shown() -> None:
    captions = {0: "9 GiB", 1: "8 GiB", **dict.fromkeys(range(2, 15), "7 GiB"), 15: "9 GiB"}
    assert shown(laid_out(8, 16, 1, 8, slots=[8] * 128), captions) == LARGE


def test_colour_adds_nothing_but_colour() -> None:
    plan = laid_out(2, 2, slots=[2, 2])
    coloured = shown(plan, {0: "12.3 GiB, tight"}, colour=True)
    bare = re.sub(r"\x1b\[[0-9;]*m", "", coloured)
    assert "".join(f"{line.rstrip()}\n" for line in bare.splitlines()) == SMALL
    assert (
        coloured.count("48;2;0;114;178m") == coloured.count("48;2;230;159;0m") == 5
    )  # two slots' two lines, the legend


@pytest.mark.parametrize(("width", "nodes"), [(80, 2), (200, 5), (280, 7), (290, 16)])
def test_nodes_that_fit_in_two_lines_are_all_shown(width: int, nodes: int) -> None:
    text = shown(laid_out(2, 4, 2, 4, slots=[4] * 16), width=width).partition("r5: rank")[0]
    assert sorted(map(int, re.findall(r"\br(\d+) ", text))) == list(range(4 * nodes))
    assert ("… and" in text) == (nodes < 16)


@pytest.mark.parametrize("width", [8, 20, 40, 80, 200])
def test_it_is_as_wide_as_the_terminal_at_most(width: int) -> None:
    text = shown(laid_out(2, 2, 1, 4, slots=[8, 6, 2]), width=width)
    assert max(map(len, text.splitlines())) <= width


def test_slots_that_do_not_fit_go_in_lines_of_the_same_length() -> None:
    lines = shown(laid_out(2, 2, 1, 2, slots=[8]), width=60).splitlines()
    assert lines[2] == "│ slot 0  slot 1  slot 2  slot 3  │"
    assert lines[5] == "│ slot 4  slot 5  slot 6  slot 7  │"


def test_the_hostfiles_slots_are_named() -> None:
    text = "name: a\nmodel: {num_layers: 1, hidden_size: 8, num_attention_heads: 2, seq_length: 16}\n"
    text += "batch: {micro_batch_size: 1}\ndata: {data_path: x}\ntrain: {train_iters: 1}\n"
    plan = make_plan(parse_experiment(text, "e.yaml"), {"[b]": [1, 5]}, "e.yaml")
    assert shown(plan).splitlines()[:5] == [
        "TP1 PP1 DP2: 2 ranks on 1 node",
        "╭─ [b] ───────────╮",
        "│ slot 1  slot 5  │",
        "│ r0      r1      │",
        "│ 0.0.0.0 0.1.0.0 │",
    ]


def test_a_long_legend_joins_stages_with_the_same_caption() -> None:
    plan = laid_out(stages=20)
    captions = {0: "9 GiB", **dict.fromkeys(range(1, 19), "8 GiB")}
    assert [line.text for line in legend(plan, captions)] == [
        "stage 0 (r0): 9 GiB", "stages 1 to 18 (r1 to r18): 8 GiB", "stage 19 (r19)",
    ]  # fmt: skip
    unlike = {stage: f"{20 - stage} GiB" for stage in range(20)}
    assert len(legend(plan, unlike)) == 20
    assert [line.text for line in legend(plan, unlike, is_short=True)] == [
        "stage 0 (r0): 20 GiB", "stage 1 (r1): 19 GiB", "stages 2 to 18 (r2 to r18)", "stage 19 (r19): 1 GiB",
    ]  # fmt: skip
    assert len(legend(laid_out(stages=16), {})) == 16


def test_the_legend_of_stages_that_are_neighbours() -> None:
    lines = [line.text for line in legend(laid_out(stages=2, data=4, stages_are_neighbours=True), {})]
    assert lines == ["stage 0 (4 ranks from r0 on)", "stage 1 (4 ranks from r1 on)"]
    alone = [line.text for line in legend(laid_out(stages=2, stages_are_neighbours=True), {})]
    assert alone == ["stage 0 (r0)", "stage 1 (r1)"]


def luminance(colour: str) -> float:
    shares = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    linear = [share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]
    return sum(weight * share for weight, share in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("stages", [1, 2, 8, 9, 16, 128])
def test_each_stage_has_a_colour_that_text_is_readable_on(stages: int) -> None:
    colours = stage_colours(stages)
    assert len(set(colours)) == len(colours) == stages
    for colour in colours:
        bright, dark = sorted((luminance(colour), luminance(ink(colour))), reverse=True)
        assert (bright + 0.05) / (dark + 0.05) >= 4.5, colour  # WCAG 2.1, level AA
    if stages > 8:  # distinct in grey as well, in the order of the stages
        assert [luminance(colour) for colour in colours] == sorted(luminance(colour) for colour in colours)


def svg_texts(path: Path) -> list[str]:
    return [element.text or "" for element in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")]


@pytest.mark.parametrize("slots", [[2, 2], [3, 1]])
def test_svg_holds_every_word(tmp_path: Path, slots: list[int]) -> None:
    plot(laid_out(2, 2, slots=slots), tmp_path / "map.svg", "a $1 title", {1: "tight"})
    crossing = slots == [3, 1]
    expected = [
        "a $1 title", "TP2 PP2 DP1: 4 ranks on 2 nodes",
        KEY,
        "n0", "n1", "r0", "r1", "r2", "r3", "0.0.0.0", "0.0.0.1", "1.0.0.0", "1.0.0.1",
        "stage 0 (r0 to r1)", "stage 1 (r2 to r3): tight", "tensor parallel group",
        *(["part of one that crosses nodes", "slot 0", "slot 1", "slot 2", "slot 0"] if crossing
          else ["slot 0", "slot 1"] * 2),
    ]  # fmt: skip
    assert sorted(svg_texts(tmp_path / "map.svg")) == sorted(expected)
    assert ("stroke-dasharray" in (tmp_path / "map.svg").read_text()) == crossing


def test_svg_holds_every_rank_of_a_large_map(tmp_path: Path) -> None:
    plot(laid_out(4, 16, 1, 4, slots=[4] * 64), tmp_path / "map.svg", "large")
    ranks = [text for text in svg_texts(tmp_path / "map.svg") if re.fullmatch(r"r\d+", text)]
    assert sorted(ranks) == sorted(f"r{rank}" for rank in range(256))


@pytest.mark.parametrize("name", ["map.png", "map.SVG"])
def test_the_same_plan_gives_the_same_bytes(tmp_path: Path, name: str) -> None:
    plan = laid_out(2, 3, slots=[4, 2])
    for folder in ("a", "b"):
        plot(plan, tmp_path / folder / name, "title")
    one, other = ((tmp_path / folder / name).read_bytes() for folder in ("a", "b"))
    assert one == other
    assert b"Matplotlib v" not in one  # its version would change the picture's bytes
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == [name]


@pytest.mark.parametrize(
    ("plan", "least", "most"),
    [(laid_out(2, 2, slots=[2, 2]), (600, 300), (1500, 1000)),
     (laid_out(4, 8, 1, 8, slots=[4] * 64), (1500, 1000), (5000, 4000))],
)  # fmt: skip
def test_png_is_a_picture_of_a_sensible_size(
    tmp_path: Path, plan: Plan, least: tuple[int, int], most: tuple[int, int]
) -> None:
    plot(plan, tmp_path / "map.png", "title")
    with Image.open(tmp_path / "map.png") as picture:
        picture.load()
        assert picture.format == "PNG"
        assert least[0] < picture.width < most[0]
        assert least[1] < picture.height < most[1]
        colours = {colour for _, colour in picture.convert("RGB").getcolors(1 << 24) or []}
    assert {tuple(bytes.fromhex(colour[1:])) for colour in stage_colours(plan.pipeline_model_parallel_size)} <= colours


@pytest.mark.parametrize(("name", "got"), [("map.pdf", ".pdf"), ("map", "no suffix"), ("map.svgz", ".svgz")])
def test_no_other_suffix(tmp_path: Path, name: str, got: str) -> None:
    with pytest.raises(RequestError) as caught:
        plot(laid_out(data=2), tmp_path / name, "title")
    assert str(caught.value) == (
        f"{tmp_path / name}: the rank map is drawn as PNG or SVG; got {got}; end the file's name in .png or .svg"
    )
    assert not list(tmp_path.iterdir())
