"""What the measurement counts, on graphs small enough to count by hand; and that the data are of this grid."""

import json

import pytest

torch = pytest.importorskip("torch")

from tests.memory.cases import BASE, CASES  # noqa: E402
from tests.memory.ledger import Ledger, Place, Saved  # noqa: E402
from tests.memory.state import count, named_tensors  # noqa: E402

ROWS, IN, OUT = 8, 16, 4
FLOAT = 4


def test_storages_count_once_and_as_long_as_they_live() -> None:
    ledger = Ledger(Place())
    with ledger:
        first = torch.ones(ROWS, IN)
        view = first.t()[1:]
        assert ledger.live == ROWS * IN * FLOAT
        second = first + 1
        assert ledger.live == ledger.peak == 2 * ROWS * IN * FLOAT
        del first
        assert ledger.live == 2 * ROWS * IN * FLOAT  # the view holds it
        del view
        assert ledger.live == ROWS * IN * FLOAT
        assert ledger.restart() == ledger.peak == ROWS * IN * FLOAT
        torch.empty(ROWS, device="meta")
        assert ledger.peak == ROWS * IN * FLOAT
        del second
    assert ledger.live == 0


def test_a_look_at_the_peak_sees_a_storage_that_grew() -> None:
    """As FSDP2's gathered weights do, without an operation of their own."""
    ledger = Ledger(Place())

    def step() -> None:
        kept, empty = torch.ones(ROWS), torch.empty(0)
        empty.untyped_storage().resize_(IN * FLOAT)
        del kept, empty

    with ledger:
        ledger.restart()
        step()
        ledger.look_at = ledger.peak_at
        ledger.restart()
        step()
    assert sum(size for _, size in ledger.looked.values()) == ledger.peak == (ROWS + IN) * FLOAT


def test_what_the_graph_saves() -> None:
    """A linear layer saves its input and its weight, gelu its input, and the square its input."""
    model = torch.nn.Sequential(torch.nn.Linear(IN, OUT), torch.nn.GELU())
    given = torch.ones(ROWS, IN)
    weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    saved = Saved(weights.__contains__, Place())
    with saved.counted():
        loss = model(given).square().sum()
        expected = (ROWS * IN + 2 * ROWS * OUT) * FLOAT
        assert saved.live == saved.peak == expected
        loss.backward()
        assert saved.at_first_backward == expected
        assert saved.live == 0
        with torch.no_grad():
            model(given)
        assert saved.peak == expected


def test_what_lives_between_steps_by_kind() -> None:
    ledger = Ledger(Place())
    with ledger:
        model = torch.nn.Linear(IN, OUT)
        tied = torch.nn.Linear(IN, OUT, bias=False)
        tied.weight = model.weight
        model.register_buffer("mask", torch.ones(3))
        optimizer = torch.optim.Adam(model.parameters())
        (model(torch.ones(ROWS, IN)) + tied(torch.ones(ROWS, IN))).sum().backward()
        optimizer.step()
        found = count([model, tied], {"model": model, "optimizer": optimizer}, ledger)
    elements = IN * OUT + OUT
    assert found == {
        "parameters": {"elements": elements, "bytes": elements * FLOAT},
        "gradients": {"grad": elements * FLOAT},
        "optimizer": {"step": 2 * FLOAT, "exp_avg": elements * FLOAT, "exp_avg_sq": elements * FLOAT},
        "other": {"model._buffers[mask]": 3 * FLOAT},
    }
    assert sum(entry.bytes for entry in ledger.entries.values()) == ledger.live
    assert named_tensors({"model": model})[model.bias.untyped_storage()._cdata] == "model._parameters[bias]"


def test_the_data_are_of_this_grid() -> None:
    """`make measure-memory` writes them again if the grid has changed."""
    from tests.memory.measure import RESULT

    data = json.loads(RESULT.read_text())
    assert data["base"] == BASE
    wanted = {name: (case.engine, case.world_size, dict(case.fields)) for name, case in CASES.items()}
    assert {
        name: (case["engine"], case["world_size"], case["fields"]) for name, case in data["cases"].items()
    } == wanted
    assert all(len(case["ranks"]) == case["world_size"] for case in data["cases"].values())
