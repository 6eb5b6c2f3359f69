"""What docs and reference files say of the schemas is what the schemas say."""

import importlib.util
from pathlib import Path

from tridock.experiment import load_experiment
from tridock.launchers.slurm import make_request

ROOT = Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("reference", ROOT / "tools" / "reference.py")
assert _spec is not None
assert _spec.loader is not None
reference = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(reference)


def test_the_experiment_reference_is_up_to_date_and_loads() -> None:
    path = ROOT / "configs" / "reference.yaml"
    assert path.read_text() == reference.experiment_reference(), "run make reference"
    load_experiment(path)


def test_the_reference_of_a_sites_profile_is_up_to_date_and_loads() -> None:
    path = ROOT / "configs" / "slurm" / "reference.yaml"
    assert path.read_text() == reference.slurm_reference(), "run make reference"
    made, without = (make_request(text, str(path), {"gpus_per_node": 8}) for text in (path.read_text(), ""))
    assert made == without


def test_the_cluster_page_is_up_to_date() -> None:
    page = (ROOT / "docs" / "cluster.md").read_text()
    assert page == reference.with_fields(page), "run make reference"
