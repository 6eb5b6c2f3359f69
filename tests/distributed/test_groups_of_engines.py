"""The communication groups are those that the engines themselves make, whatever the layout."""

import importlib
import itertools
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import MethodType, ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.megatron_source import patched_source
from tests.unit.plan.layouts import laid_out
from tridock.layout.groups import Group, Kind, make_groups

pytestmark = pytest.mark.distributed

CORE_LAYOUTS = [
    sizes
    for sizes in itertools.product((1, 2, 3, 4, 8), (1, 2, 3, 4), (1, 2, 3, 4), (1, 2, 3, 5))
    if sizes[0] * sizes[1] * sizes[2] * sizes[3] <= 96
]
"""Tensor, pipeline, context and data parallel sizes."""
DEEPSPEED_LAYOUTS = [
    sizes for sizes in itertools.product((1, 2, 3, 4, 8), (1, 2, 3, 4, 8), (1, 2, 3, 4, 5)) if sizes[0] * sizes[1] > 1
]
"""Tensor, pipeline and data parallel sizes."""


ORDERS = {False: "tp-cp-ep-dp-pp", True: "tp-cp-ep-pp-dp"}
"""Of initialize_model_parallel, without and with use_tp_pp_dp_mapping."""


def in_order(groups: Iterable[Iterable[int]]) -> list[Group]:
    """Sorted by their first ranks: the order in which an engine makes its groups is its own matter."""
    return sorted(tuple(group) for group in groups)


def in_pair(one: int, other: int) -> Group:
    return min(one, other), max(one, other)


def test_there_are_hundreds_of_layouts() -> None:
    assert len(CORE_LAYOUTS) > 200
    assert len(DEEPSPEED_LAYOUTS) > 100


@pytest.mark.parametrize("mapping", ORDERS)
def test_megatron_core_numbers_the_ranks_so(mapping: bool) -> None:
    state: Any = pytest.importorskip("megatron.core.parallel_state")
    kinds: dict[Kind, str] = {
        "tensor": "tp", "context": "cp", "data": "dp", "data_with_context": "dp-cp", "pipeline": "pp", "model": "tp-pp",
    }  # fmt: skip
    for tensor, stages, context, data in CORE_LAYOUTS:
        if mapping and min(stages, context) > 1:
            continue  # refused
        theirs = state.RankGenerator(tp=tensor, ep=1, dp=data, pp=stages, cp=context, order=ORDERS[mapping])
        ours = make_groups(laid_out(tensor, stages, context, data, stages_are_neighbours=mapping)).members
        for kind, token in kinds.items():
            assert list(ours[kind]) == in_order(theirs.get_ranks(token)), (kind, tensor, stages, context, data)
        embedding = [state.default_embedding_ranks(pipeline) for pipeline in theirs.get_ranks("pp")]
        assert list(ours["embedding"]) == in_order(embedding)


@pytest.mark.parametrize("mapping", ORDERS)
def test_megatron_core_numbers_the_ranks_of_experts_so(mapping: bool) -> None:
    state: Any = pytest.importorskip("megatron.core.parallel_state")
    kinds: dict[Kind, str] = {"expert": "ep", "expert_tensor": "tp", "expert_data": "dp", "pipeline": "pp"}
    seen = 0
    for (tensor, stages, context, data), experts, shared in itertools.product(CORE_LAYOUTS, (1, 2, 4, 6), (1, 2, 4)):
        ranks = tensor * context * data
        if ranks % (experts * shared) or (mapping and stages > 1 and experts * shared != tensor * context):
            continue  # refused
        theirs = state.RankGenerator(
            tp=shared, ep=experts, dp=ranks // (experts * shared), pp=stages, cp=1, order=ORDERS[mapping]
        )
        plan = laid_out(
            tensor, stages, context, data, stages_are_neighbours=mapping, experts=experts, expert_tensor=shared
        )
        ours = make_groups(plan).members
        for kind, token in kinds.items():
            assert list(ours[kind]) == in_order(theirs.get_ranks(token)), (kind, tensor, stages, context, data, experts)
        seen += 1
    assert seen > 50


@pytest.fixture
def worlds() -> Iterator[Any]:
    """Starts torch.distributed as one rank of a world that is not there; collectives do nothing."""
    dist: Any = pytest.importorskip("torch.distributed")
    fake: Any = pytest.importorskip("torch.testing._internal.distributed.fake_pg")

    def enter(world_size: int) -> Iterator[int]:
        for rank in range(world_size):
            dist.init_process_group("fake", rank=rank, world_size=world_size, store=fake.FakeStore())
            yield rank
            dist.destroy_process_group()

    yield enter
    if dist.is_initialized():
        dist.destroy_process_group()
    if "megatron.core.parallel_state" in sys.modules:
        sys.modules["megatron.core.parallel_state"].destroy_model_parallel()


@pytest.mark.parametrize(
    ("tensor", "stages", "context", "data", "virtual", "mapping"),
    [
        *((2, 2, 2, 2, 1, False), (1, 4, 1, 3, 2, False), (4, 1, 2, 2, 1, False), (2, 3, 1, 2, 2, False)),
        *((1, 1, 4, 2, 1, False), (1, 2, 1, 2, 3, False), (1, 4, 1, 3, 2, True), (4, 1, 2, 2, 1, True)),
        *((2, 3, 1, 2, 2, True), (1, 2, 1, 2, 3, True)),
    ],
)
def test_megatron_core_forms_these_groups(
    worlds: Any, tensor: int, stages: int, context: int, data: int, virtual: int, mapping: bool
) -> None:
    dist: Any = pytest.importorskip("torch.distributed")
    state: Any = pytest.importorskip("megatron.core.parallel_state")
    plan = laid_out(tensor, stages, context, data, virtual=virtual, stages_are_neighbours=mapping)
    formed: dict[Kind, set[Group]] = defaultdict(set)
    for rank in worlds(plan.world_size):
        state.initialize_model_parallel(
            tensor,
            stages,
            virtual_pipeline_model_parallel_size=virtual if virtual > 1 else None,
            context_parallel_size=context,
            order=ORDERS[mapping],
            create_gloo_process_groups=False,
        )
        groups: dict[Kind, Any] = {
            "tensor": state.get_tensor_model_parallel_group(),
            "context": state.get_context_parallel_group(),
            "data": state.get_data_parallel_group(),
            "data_with_context": state.get_data_parallel_group(with_context_parallel=True),
            "pipeline": state.get_pipeline_model_parallel_group(),
            "model": state.get_model_parallel_group(),
        }
        place = plan.ranks[rank]
        if place.pipeline_parallel_rank in (0, stages - 1):
            groups["embedding"] = state.get_embedding_group()
        for kind, group in groups.items():
            formed[kind].add(tuple(dist.get_process_group_ranks(group)))
        if stages > 1 and (virtual > 1 or place.pipeline_parallel_rank < stages - 1):
            formed["pipeline_neighbours"].add(in_pair(rank, state.get_pipeline_model_parallel_next_rank()))
        assert place.tensor_parallel_rank == state.get_tensor_model_parallel_rank()
        assert place.context_parallel_rank == state.get_context_parallel_rank()
        assert place.data_parallel_rank == state.get_data_parallel_rank()
        assert place.pipeline_parallel_rank == state.get_pipeline_model_parallel_rank()
        state.destroy_model_parallel()
    for kind, ours in make_groups(plan).members.items():
        assert set(ours) == formed[kind], kind


def of_rank(rank: int, world_size: int, made: list[Group] | None = None) -> SimpleNamespace:
    """In the place of ``torch.distributed``: a group is the tuple of its ranks, and ``made`` collects them."""

    def new_group(ranks: Iterable[int]) -> Group:
        (made if made is not None else []).append(tuple(ranks))
        return tuple(ranks)

    return SimpleNamespace(
        get_rank=lambda group=None: rank if group is None else group.index(rank),
        get_world_size=lambda group=None: world_size if group is None else len(group),
        is_initialized=lambda: True,
        new_group=new_group,
    )


def test_deepspeed_numbers_a_pipelines_ranks_so(monkeypatch: pytest.MonkeyPatch) -> None:
    topology: Any = pytest.importorskip("deepspeed.runtime.pipe.topology")
    monkeypatch.setattr(topology, "print", lambda *_: None, raising=False)
    for tensor, stages, data in DEEPSPEED_LAYOUTS:
        plan = laid_out(tensor, stages, 1, data, engine="megatron-deepspeed", strategy="zero")
        ours = make_groups(plan).members
        theirs = topology.PipeModelDataParallelTopology(num_pp=stages, num_mp=tensor, num_dp=data)
        assert list(ours["tensor"]) == in_order(theirs.get_axis_comm_lists("model"))
        assert list(ours["data"]) == in_order(theirs.get_axis_comm_lists("data"))
        assert list(ours["pipeline"]) == in_order(theirs.get_axis_comm_lists("pipe"))
        assert ours["data_with_context"] == ours["data"]
        made: list[Group] = []
        monkeypatch.setattr(topology, "dist", of_rank(0, plan.world_size, made))
        grid = topology.PipelineParallelGrid(topology=theirs)
        assert list(ours["model"]) == in_order(made[:data])
        # The grid also pairs each last stage with its first, and only an interleaved schedule would send there.
        pairs = {in_pair(*pair) for pair in grid.p2p_groups if theirs.get_coord(pair[0]).pipe < stages - 1}
        assert set(ours["pipeline_neighbours"]) == pairs


def test_deepspeed_ties_the_embedding_of_these_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    topology: Any = pytest.importorskip("deepspeed.runtime.pipe.topology")
    module: Any = pytest.importorskip("deepspeed.runtime.pipe.module")
    monkeypatch.setattr(topology, "print", lambda *_: None, raising=False)
    embedding = module.TiedLayerSpec("embed", module.nn.Embedding)
    for tensor, stages, data in DEEPSPEED_LAYOUTS:
        if stages == 1:
            continue  # both ends are one layer then, and there is nothing to sum
        plan = laid_out(tensor, stages, 1, data, engine="megatron-deepspeed", strategy="zero")
        theirs = topology.PipeModelDataParallelTopology(num_pp=stages, num_mp=tensor, num_dp=data)
        made: list[Group] = []
        for name in (topology, module):
            monkeypatch.setattr(name, "dist", of_rank(0, plan.world_size, made))
        grid = topology.PipelineParallelGrid(topology=theirs)
        made.clear()
        # Upstream's GPT2ModelPipe: three layers before the transformer's and four after them, tied in their midst.
        specs = [dict, embedding, dict, *[dict] * stages, dict, dict, embedding, dict]
        weights = [0, 0, 0, *[1] * stages, 0, 0, 0, 0]
        pipe = SimpleNamespace(_topo=theirs, _grid=grid, _layer_specs=specs, global_rank=0, num_stages=stages)
        pipe.parts = module.ds_utils.partition_balanced(weights=weights, num_parts=stages)
        pipe._num_layers = len(specs)
        pipe.stage_owner = MethodType(module.PipelineModule.stage_owner, pipe)
        pipe.tied_modules = {"embed": SimpleNamespace(parameters=list)}
        pipe.tied_weight_attrs = {"embed": "weight"}
        module.PipelineModule._index_tied_modules(pipe)
        assert list(make_groups(plan).members["embedding"]) == in_order(made)


@pytest.fixture(scope="module")
def groups_of_v115(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """``megatron.mpu.initialize`` of Megatron-LM v1.1.5, without the packages around it."""
    pytest.importorskip("torch")
    source: Path = patched_source(tmp_path_factory.mktemp("megatron") / "source")
    package = ModuleType("mpu_of_v115")
    package.__path__ = [str(source / "megatron" / "mpu")]
    sys.modules["mpu_of_v115"] = package
    yield importlib.import_module("mpu_of_v115.initialize")
    for name in [name for name in sys.modules if name.partition(".")[0] == "mpu_of_v115"]:
        del sys.modules[name]


@pytest.mark.parametrize("piped", [False, True])
def test_megatron_v115_forms_these_groups(
    groups_of_v115: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], piped: bool
) -> None:
    topology: Any = pytest.importorskip("deepspeed.runtime.pipe.topology")
    layouts = [(t, p, d) for t, p, d in itertools.product((1, 2, 3, 4, 8), (1, 2, 4), (1, 2, 3, 5)) if (p > 1) == piped]
    for tensor, stages, data in layouts:
        plan = laid_out(tensor, stages, 1, data, engine="megatron-deepspeed", strategy="zero" if piped else "ddp")
        formed: dict[Kind, set[Group]] = defaultdict(set)
        theirs = topology.PipeModelDataParallelTopology(stages, tensor, data) if piped else None
        for place in plan.ranks:
            for name in ("_MODEL", "_DATA", "_PIPE"):
                monkeypatch.setattr(groups_of_v115, f"{name}_PARALLEL_GROUP", None)
            monkeypatch.setattr(
                groups_of_v115, "torch", SimpleNamespace(distributed=of_rank(place.rank, plan.world_size))
            )
            groups_of_v115.initialize_model_parallel(tensor, theirs)
            formed["tensor"].add(groups_of_v115.get_model_parallel_group())
            formed["data"].add(groups_of_v115.get_data_parallel_group())
            assert groups_of_v115.get_model_parallel_rank() == place.tensor_parallel_rank
            assert groups_of_v115.get_data_parallel_rank() == place.data_parallel_rank
            if piped:
                formed["pipeline"].add(groups_of_v115.get_pipe_parallel_group())
                assert groups_of_v115.get_pipe_parallel_rank() == place.pipeline_parallel_rank
        for kind, groups in formed.items():
            assert set(make_groups(plan).members[kind]) == groups, (kind, tensor, stages, data)
    capsys.readouterr()


@pytest.mark.parametrize("strategy", ["ddp", "zero"])
def test_all_ranks_of_the_torch_engine_are_one_data_parallel_group(strategy: str) -> None:
    for world in range(1, 17):
        ours = make_groups(laid_out(data=world, engine="torch", strategy=strategy)).members
        everyone, alone = tuple(range(world)), tuple((rank,) for rank in range(world))
        assert ours == {
            "tensor": alone, "context": alone, "data": (everyone,), "data_with_context": (everyone,),
            "pipeline": alone, "pipeline_neighbours": (), "embedding": alone, "model": alone,
        }  # fmt: skip
