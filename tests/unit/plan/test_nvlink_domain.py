"""GPUs whose NVLink connects several hosts: NVL72 racks, of which a plan uses 64 GPUs together."""

from dataclasses import replace

from tests.experiments import with_fields
from tests.plan_command import JEAN_ZAY
from tridock.experiment import load_experiment
from tridock.gpus import GPUS
from tridock.layout.traffic import Traffic
from tridock.plan import Assessment, Assumptions, assess
from tridock.plan.search import search

BASE = load_experiment(JEAN_ZAY / "30b.yaml")


def planned(nodes: int, gpu: str = "gb200", network: float | None = None, **parallel: int) -> Assessment:
    fields = {f"parallel.{name}_model_parallel_size": size for name, size in parallel.items()}
    experiment = with_fields(BASE.model_dump(exclude_unset=True), {**fields, "batch.global_batch_size": 1024})
    slots = {f"node-{number}": range(4) for number in range(nodes)}
    return assess(experiment, slots, "e", Assumptions(GPUS[gpu], network))


def traffic(found: Assessment) -> dict[str, Traffic]:
    assert found.cost is not None, found.problems
    return {one.group: one for one in found.cost.traffic}


def test_a_rack_has_no_network() -> None:
    rack = planned(16, tensor=8, pipeline=4)
    assert {one.link for one in traffic(rack).values()} == {"node"}
    assert rack.warnings == ()
    assert not any("network" in note for note in rack.notes)
    hosts = planned(16, "b200", tensor=8, pipeline=4)
    assert {one.link for one in traffic(hosts).values()} == {"network"}
    assert "tensor parallel groups cross nodes" in hosts.warnings[0]


def test_several_racks_share_their_hosts_network() -> None:
    racks = planned(32, tensor=8, pipeline=4)
    assert {name: one.link for name, one in traffic(racks).items()} == {
        "tensor": "node", "pipeline": "network", "data": "node", "embedding": "network",
    }  # fmt: skip
    assert racks.cost is not None
    assert racks.cost.rates.network_gb_s == 64 * 400 / 8
    assert racks.cost.rates.network_source == "assumed: 64 x 400 Gbit/s, as DGX GB200"
    given = planned(32, network=1600, tensor=8, pipeline=4)
    assert given.cost is not None
    assert given.cost.rates.network_gb_s == 64 * 400 / 8


def test_the_search_lets_tensor_parallel_groups_cross_hosts_of_a_rack() -> None:
    slots = {f"node-{number}": range(4) for number in range(16)}
    sizes = {
        gpu: {one.experiment.parallel.tensor_model_parallel_size for one in search(BASE, slots, "e", assumed).found}
        for gpu, assumed in ((gpu, Assumptions(GPUS[gpu])) for gpu in ("gb200", "b200"))
    }
    assert 8 in sizes["gb200"]
    assert max(sizes["b200"]) == 4


def test_a_gpu_without_a_domain_keeps_its_nodes() -> None:
    alone = replace(GPUS["gb200"], domain=None)
    assert Assumptions(alone).shape(BASE, 64, 4).slots == 4
    assert Assumptions(GPUS["gb200"]).shape(BASE, 8, 4).slots == 8
    assert Assumptions(GPUS["gb200"]).shape(BASE, 256, 8).slots == 64
