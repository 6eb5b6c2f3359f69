"""GPUs and MIG slices as nvidia-smi lists them, and what a rank sees of them. The lists are on record."""

from __future__ import annotations

import pytest

from tridock.contracts.devices import listed_devices, rank_devices

WHOLE = """\
GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-5f0f4cbb-3f2a-0bb8-0bf5-6d0c7c3e2a11)
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-83a1d6de-25c9-1c0f-90f2-0d4b0f1a7a10)
"""
SLICED = """\
GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-e86cb44c-6756-fd30-cd4a-1e6da3caf9b0)
  MIG 3g.20gb     Device  0: (UUID: MIG-c7384736-a75d-5afc-978f-d2f1294409fd)
  MIG 3g.20gb     Device  1: (UUID: MIG-a28ad590-3fda-56dd-84fc-0a0b96edc58d)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-0b757f86-2a2b-5b6c-8b0c-3d1b9e1ff5c2)
"""


@pytest.mark.parametrize(
    ("listing", "expected"),
    [
        (WHOLE, ["GPU-5f0f4cbb-3f2a-0bb8-0bf5-6d0c7c3e2a11", "GPU-83a1d6de-25c9-1c0f-90f2-0d4b0f1a7a10"]),
        (
            SLICED,
            [
                "MIG-c7384736-a75d-5afc-978f-d2f1294409fd",
                "MIG-a28ad590-3fda-56dd-84fc-0a0b96edc58d",
                "GPU-0b757f86-2a2b-5b6c-8b0c-3d1b9e1ff5c2",
            ],
        ),
        ("No devices found.\n", []),
    ],
)
def test_a_divided_gpu_counts_as_its_slices(listing: str, expected: list[str]) -> None:
    assert list(listed_devices(listing)) == expected


@pytest.mark.parametrize(
    ("own", "slots", "seen"),
    [
        ("2,3", "0,1", "2,3"),
        ("4,5,6,7", "1,3", "5,7"),
        ("GPU-aa,GPU-bb", "0,1", "GPU-aa,GPU-bb"),
        ("MIG-aa,MIG-bb", "0,1", "MIG-bb"),
        ("", "0,1", ""),
        ("2", "0,1", "2"),
    ],
)
def test_slots_are_places_in_the_nodes_list(own: str, slots: str, seen: str) -> None:
    env = {"TRIDOCK_DEVICES": own, "CUDA_VISIBLE_DEVICES": slots, "LOCAL_RANK": "1"}
    assert rank_devices(env) == {"CUDA_VISIBLE_DEVICES": seen}


def test_a_node_without_a_list_of_its_own_keeps_what_the_launcher_set() -> None:
    assert rank_devices({"CUDA_VISIBLE_DEVICES": "0,1"}) == {}
