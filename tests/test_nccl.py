# SPDX-License-Identifier: Apache-2.0
"""How ranks decide together whether they have a communicator; the communicator itself is a stand-in."""

import threading
import typing
from typing import Any

import pytest

from sparse_operation_kit import core, nccl

NUM_RANKS = 3


class Communicator:
    """Remembers what it was made with and how it ended."""

    made: typing.ClassVar[list] = []
    refused: typing.ClassVar[set] = set()

    def __init__(self, device, id, num_ranks, rank):
        if (device, rank) in Communicator.refused:
            raise OSError("the ranks did not all join")
        self.arguments, self.ended = (device, id, num_ranks, rank), []
        Communicator.made.append(self)

    @staticmethod
    def make_id():
        return bytes(range(136))

    def abort(self):
        self.ended.append("abort")

    def close(self):
        self.ended.append("close")


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    Communicator.made, Communicator.refused = [], set()
    monkeypatch.setattr(core, "Communicator", Communicator)
    monkeypatch.setattr(core, "nccl_properties", lambda: core.NcclProperties(22803, "libnccl.so.2"))
    monkeypatch.setattr(core, "device_uuid", lambda device: f"gpu{device}")


def connect(devices=(0, 1, 2)):
    """[what connect() returned or raised] of each rank."""
    barrier = threading.Barrier(NUM_RANKS)
    slots = [b""] * NUM_RANKS
    results: list[Any] = [None] * NUM_RANKS

    def run(rank):
        def allgather(data):
            slots[rank] = data
            barrier.wait(30)
            everything = list(slots)
            barrier.wait(30)
            assert len({len(item) for item in everything}) == 1
            return everything

        try:
            results[rank] = nccl.connect(devices[rank], NUM_RANKS, rank, allgather)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(NUM_RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_all_have_one():
    results = connect()
    assert all(isinstance(result, Communicator) for result in results)
    assert [result.arguments for result in results] == [
        (rank, bytes(range(136)), NUM_RANKS, rank) for rank in range(NUM_RANKS)
    ]
    assert not any(result.ended for result in results)


def test_ranks_that_share_a_gpu():
    for result in connect((0, 1, 0)):
        assert isinstance(result, nccl.SharedGpu)
        assert "ranks 0 and 2 share a GPU" in str(result) and "set_device" in str(result)
    assert not Communicator.made


def test_ranks_that_may_share_a_gpu(monkeypatch):
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    assert all(isinstance(result, Communicator) for result in connect((0, 1, 0)))


@pytest.mark.parametrize("may_share", [("True", "False"), ("False", "True"), ("False", "False")])
def test_both_ranks_have_to_share_willingly(may_share):
    """The ranks' environments may differ; here they would be one."""
    first, second = may_share
    with pytest.raises(nccl.SharedGpu, match="NCCL_MULTI_RANK_GPU_ENABLE=1 on all ranks"):
        nccl._check_gpus([("gpu0", first), ("gpu1", "True"), ("gpu0", second)])
    nccl._check_gpus([("gpu0", first), ("gpu1", second)])


@pytest.mark.parametrize("error", [OSError("NCCL was not found"), NotImplementedError("no CUDA"), ValueError("no GPU")])
def test_one_rank_has_none(monkeypatch, error):
    def uuid(device):
        if device == 1:
            raise error
        return f"gpu{device}"

    monkeypatch.setattr(core, "device_uuid", uuid)
    for result in connect():
        assert type(result) is nccl.NcclUnavailable
        assert str(result) == f"NCCL cannot be used on rank 1: {error}"


def test_a_long_message_is_cut(monkeypatch):
    monkeypatch.setattr(core, "nccl_properties", lambda: (_ for _ in ()).throw(OSError("é" * 5000)))
    for result in connect():
        assert isinstance(result, nccl.NcclUnavailable) and "é" * 200 in str(result)


def test_one_rank_does_not_join():
    """The others give theirs up."""
    Communicator.refused = {(2, 2)}
    for result in connect():
        assert isinstance(result, nccl.NcclUnavailable)
        assert "rank 2: the ranks did not all join" in str(result)
    assert len(Communicator.made) == 2
    assert all(made.ended == ["abort", "close"] for made in Communicator.made)


def test_no_id(monkeypatch):
    monkeypatch.setattr(Communicator, "make_id", lambda: (_ for _ in ()).throw(OSError("no network")))
    for result in connect():
        assert "rank 0: no network" in str(result)
