"""What docs and reference files say of the schemas is what the schemas say."""

import re
from pathlib import Path

import pytest

from tests.tools import tool
from tridock.cli import main
from tridock.experiment import load_experiment
from tridock.launchers.slurm.profile import make_request

ROOT = Path(__file__).parents[2]


reference, jean_zay = tool("reference"), tool("jean_zay")


def test_the_experiment_reference_is_up_to_date_and_loads() -> None:
    path = ROOT / "configs" / "reference.yaml"
    assert path.read_text() == reference.experiment_reference(), "run make reference"
    load_experiment(path)


def test_the_base_images_are_up_to_date() -> None:
    page = (ROOT / "docs" / "gpus.md").read_text()
    assert page == reference.with_base_images(page), "run make reference"


def test_the_options_of_the_commands_are_up_to_date() -> None:
    page = (ROOT / "docs" / "commands.md").read_text()
    assert page == reference.with_options(page), "run make reference"


def test_the_keys_of_config_json_are_up_to_date() -> None:
    page = (ROOT / "docs" / "config-json.md").read_text()
    assert page == reference.with_config_keys(page), "run make reference"


def test_the_reference_of_a_sites_profile_is_up_to_date_and_loads() -> None:
    path = ROOT / "configs" / "slurm" / "reference.yaml"
    assert path.read_text() == reference.slurm_reference(), "run make reference"
    made, without = (make_request(text, str(path), {"gpus_per_node": 8}) for text in (path.read_text(), ""))
    assert made == without


def test_the_cluster_page_is_up_to_date() -> None:
    page = (ROOT / "docs" / "cluster.md").read_text()
    assert page == reference.with_fields(page), "run make reference"


def test_the_table_of_jean_zay_is_up_to_date() -> None:
    page = (ROOT / "docs" / "results.md").read_text()
    assert page == jean_zay.with_table(page), "run make reference"


def test_the_readmes_rank_map_is_up_to_date(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--nodes", "4", "--gpus-per-node", "4", "--gpu", "v100-32gb", "--plot"]
    assert main(["plan", str(ROOT / "configs" / "jean-zay" / "7.5b.yaml"), *arguments, str(tmp_path / "map.svg")]) == 0
    drawn, shown = (path.read_text() for path in (tmp_path / "map.svg", ROOT / "docs" / "pictures" / "rank-map.svg"))
    assert re.findall(r"<text.*?</text>", shown) == re.findall(r"<text.*?</text>", drawn) != [], "run make reference"


def test_its_figures_are_what_the_paper_reckons() -> None:
    """By hand, from the paper's own formula for an iteration with recomputation: 96 B s l h^2 (1 + s/6h + V/16lh)."""
    for run, (layers, hidden, length, gpus) in zip(
        jean_zay.MEASURED, ((36, 4096, 512, 16), (48, 7168, 1024, 64)), strict=True
    ):
        found = jean_zay.figures(run)
        share = 1 + length / (6 * hidden) + 50688 / (16 * layers * hidden)
        whole = 96 * 4 * length * layers * hidden**2 * share
        assert found.gpus == gpus
        assert found.hardware_tflops == pytest.approx(whole / run.seconds / gpus / 1e12)
        assert found.mfu == pytest.approx(found.model_tflops / 125.0)
        assert found.model_tflops < found.hardware_tflops < 4 / 3 * found.model_tflops
