"""The rank map, in the terminal and drawn."""

import io
import itertools
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from rich.console import Console

from tests.experiments import make_plan
from tests.unit.plan.layouts import laid_out
from tridock.errors import RequestError
from tridock.experiment import parse_experiment
from tridock.plan import Plan
from tridock.report.rank_map import KEY, by_node, ink, legend, render, stage_colours
from tridock.report.rank_picture import MARGIN, lay_out, plot, tensor_outlines

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
╰─ and 7 alike, to n7 ────────────────────────────────────────────────────╯
╭─ n8 ────────────────────────────────────────────────────────────────────╮
│ slot 0   slot 1   slot 2   slot 3   slot 4   slot 5   slot 6   slot 7   │
│ r64      r65      r66      r67      r68      r69      r70      r71      │
│ 1.0.0.0  1.0.0.1  1.0.0.2  1.0.0.3  1.0.0.4  1.0.0.5  1.0.0.6  1.0.0.7  │
╰─ and 7 alike, to n15 ───────────────────────────────────────────────────╯
╭─ n16 ───────────────────────────────────────────────────────────────────╮
│ slot 0   slot 1   slot 2   slot 3   slot 4   slot 5   slot 6   slot 7   │
│ r128     r129     r130     r131     r132     r133     r134     r135     │
│ 2.0.0.0  2.0.0.1  2.0.0.2  2.0.0.3  2.0.0.4  2.0.0.5  2.0.0.6  2.0.0.7  │
╰─ and 7 alike, to n23 ───────────────────────────────────────────────────╯
╭─ n24 ───────────────────────────────────────────────────────────────────╮
│ slot 0   slot 1   slot 2   slot 3   slot 4   slot 5   slot 6   slot 7   │
│ r192     r193     r194     r195     r196     r197     r198     r199     │
│ 3.0.0.0  3.0.0.1  3.0.0.2  3.0.0.3  3.0.0.4  3.0.0.5  3.0.0.6  3.0.0.7  │
╰─ and 7 alike, to n31 ───────────────────────────────────────────────────╯
... 88 more nodes, n32 to n119: stages 4 to 14 ...
╭─ n120 ──────────────────────────────────────────────────────────────────╮
│ slot 0   slot 1   slot 2   slot 3   slot 4   slot 5   slot 6   slot 7   │
│ r960     r961     r962     r963     r964     r965     r966     r967     │
│ 15.0.0.0 15.0.0.1 15.0.0.2 15.0.0.3 15.0.0.4 15.0.0.5 15.0.0.6 15.0.0.7 │
╰─ and 7 alike, to n127 ──────────────────────────────────────────────────╯
r5: rank 5. Below it pp.dp.cp.tp: pipeline, data, context, tensor parallel rank
   stage 0 (r0 to r63)         stage 1 (r64 to r127)
   stage 2 (r128 to r191)      stage 3 (r192 to r255)
   stage 4 (r256 to r319)      stage 5 (r320 to r383)
   stage 6 (r384 to r447)      stage 7 (r448 to r511)
   stage 8 (r512 to r575)      stage 9 (r576 to r639)
   stage 10 (r640 to r703)     stage 11 (r704 to r767)
   stage 12 (r768 to r831)     stage 13 (r832 to r895)
   stage 14 (r896 to r959)     stage 15 (r960 to r1023)
"""


def shown(plan: Plan, captions: dict[int, str] | None = None, width: int = 80, colour: bool = False) -> str:
    file = io.StringIO()
    system = "truecolor" if colour else None
    console = Console(file=file, width=width, force_terminal=colour, color_system=system)  # type: ignore[arg-type]
    console.print(render(plan, captions))
    return "".join(f"{line.rstrip()}\n" for line in file.getvalue().splitlines())


def test_a_small_map() -> None:
    assert shown(laid_out(2, 2, slots=[2, 2]), {0: "12.3 GiB, tight"}) == SMALL


def test_of_many_nodes_those_alike_are_shown_once() -> None:
    assert shown(laid_out(8, 16, 1, 8, slots=[8] * 128)) == LARGE


def test_colour_adds_nothing_but_colour() -> None:
    plan = laid_out(2, 2, slots=[2, 2])
    coloured = shown(plan, {0: "12.3 GiB, tight"}, colour=True)
    bare = re.sub(r"\x1b\[[0-9;]*m", "", coloured)
    assert "".join(f"{line.rstrip()}\n" for line in bare.splitlines()) == SMALL
    assert (
        coloured.count("48;2;0;114;178m") == coloured.count("48;2;230;159;0m") == 5
    )  # two slots' two lines, the legend


def test_up_to_sixteen_nodes_every_rank_is_shown() -> None:
    plan = laid_out(2, 4, 2, 4, slots=[4] * 16)
    text = shown(plan)
    assert sorted(map(int, re.findall(r"\br(\d+) ", text.partition("r5: rank")[0]))) == list(range(64))
    assert "alike" not in text


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


def test_many_nodes_of_other_slots_are_not_alike() -> None:
    lines = shown(laid_out(data=34, slots=[2] * 10 + [1] * 6 + [2] * 4)).splitlines()
    assert [line for line in lines if "alike" in line] == [
        "╰─ and 9 alike, to n9 ──╯ ╰─ and 5 alike, to n15 ─╯ ╰─ and 3 alike, to n19 ─╯"
    ]


def test_of_very_many_kinds_of_nodes_the_first_and_the_last_are_shown() -> None:
    lines = shown(laid_out(data=30, slots=[2, 1] * 10)).splitlines()
    assert "... 15 more nodes, n4 to n18: stage 0 ..." in lines
    assert [name for line in lines for name in re.findall(r"─ (n\d+) ─", line)] == ["n0", "n1", "n2", "n3", "n19"]


def test_a_long_legend_joins_stages_with_the_same_caption() -> None:
    plan = laid_out(stages=20)
    captions = {0: "9 GiB", **dict.fromkeys(range(1, 19), "8 GiB")}
    assert [line.text for line in legend(plan, captions)] == [
        "stage 0 (r0): 9 GiB", "stages 1 to 18 (r1 to r18): 8 GiB", "stage 19 (r19)",
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


@given(st.lists(st.integers(1, 20), min_size=1, max_size=40), st.sampled_from([1, 2, 3, 4, 6, 8]))
def test_nothing_overlaps_on_the_sheet(slots: Sequence[int], tensor: int) -> None:
    missing = -sum(slots) % tensor
    slots = [*slots, missing] if missing else slots
    plan = laid_out(tensor, data=sum(slots) // tensor, slots=slots)
    nodes = by_node(plan)
    entries = ["a", "longer"]
    sheet = lay_out(plan, nodes, 3.0, entries, lambda text, points: 0.6 * points / 72 * len(text))
    boxes = []
    for number, ranks in enumerate(nodes.values()):
        left, bottom = sheet.node(number)
        boxes.append((left, bottom, left + sheet.node_width, bottom + sheet.node_height))
        inside = []
        for place in range(len(ranks)):
            x, y = sheet.slot_of(number, place)
            inside.append((x, y, x + sheet.slot.width, y + sheet.slot.height))
            assert left < x < x + sheet.slot.width < left + sheet.node_width
            assert bottom < y < y + sheet.slot.height < bottom + sheet.node_height - sheet.slot.line
        apart(inside)
    apart(boxes)
    foot = sheet.entry(0)[1]
    assert all(box[0] >= MARGIN and box[2] <= sheet.width - MARGIN + 1e-9 and box[1] > foot for box in boxes)
    assert max(box[3] for box in boxes) < sheet.height - MARGIN
    crosses = any(
        first.node != second.node for first, second in itertools.pairwise(plan.ranks) if second.tensor_parallel_rank
    )
    assert (True in {cut for cut, _ in tensor_outlines(plan, sheet, nodes)}) == crosses


def apart(boxes: Sequence[tuple[float, float, float, float]]) -> None:
    for one, other in itertools.combinations(boxes, 2):
        gaps = (one[0] - other[2], other[0] - one[2], one[1] - other[3], other[1] - one[3])
        assert max(gaps) > -1e-9


def test_a_group_that_continues_in_the_next_row_stays_open() -> None:
    plan = laid_out(3, data=3, slots=[1, 8])
    nodes = by_node(plan)
    sheet = lay_out(plan, nodes, 1.0, ["a"], lambda *_: 0.1)
    assert sheet.slots_across == 3
    lengths = [(cut, len(points)) for cut, points in tensor_outlines(plan, sheet, nodes)]
    # The first node's slot and the second's first two are cut off; then two groups of three, each in two rows.
    assert lengths == [(True, 5), (True, 5), (False, 4), (False, 4), (False, 4), (False, 4)]


def test_a_group_over_three_rows_is_open_on_both_sides_in_the_middle() -> None:
    plan = laid_out(17, data=2, slots=[34])
    nodes = by_node(plan)
    sheet = lay_out(plan, nodes, 1.0, ["a"], lambda *_: 0.1)
    assert sheet.slots_across == 8
    lengths = [len(points) for _, points in tensor_outlines(plan, sheet, nodes)]
    assert lengths == [4, 2, 2, 4, 4, 2, 2, 4]
