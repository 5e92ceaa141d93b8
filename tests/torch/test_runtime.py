# SPDX-License-Identifier: Apache-2.0
"""init() and the names that tell about ranks, in a process alone; several ranks are in tests/distributed."""

import inspect

import pytest
import torch

import sparse_operation_kit.torch as sok
from sparse_operation_kit.torch import runtime


def test_alone():
    assert (sok.rank(), sok.num_ranks(), sok.local_rank(), sok.num_gpus(), sok.global_gpu_id()) == (0, 1, 0, 1, 0)
    assert runtime.get().exchange is None and runtime.get().gradient_scale == 1.0


def test_second_call():
    sok.init()
    sok.init("torch", use_legacy_optimizer=False)
    with pytest.raises(ValueError, match="called before"):
        sok.init(seed=1)
    runtime.shutdown()
    sok.init(seed=1, gradient="mean", exchange="engine", comm_tool=" Torch ")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"comm_tool": "horovod"}, ValueError, '"torch"'),
        ({"comm_tool": "mpi"}, ValueError, "unknown comm_tool 'mpi'"),
        ({"gradient": "average"}, ValueError, '"sum", "mean"'),
        ({"exchange": "ucx"}, ValueError, "unknown exchange 'ucx'"),
        ({"seed": -1}, ValueError, "seed"),
        ({"seed": 2**63}, ValueError, "seed"),
        ({"seed": 0.5}, TypeError, "integer"),
    ],
)
def test_bad_arguments(options, error, message):
    runtime.shutdown()
    with pytest.raises(error, match=message):
        sok.init(**options)
    with pytest.raises(RuntimeError, match=r"sok\.init\(\)"):
        sok.rank()


def test_local_rank_of_torchrun(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert sok.local_rank() == 3


@pytest.mark.parametrize("name", ["rank", "num_ranks", "local_rank", "num_gpus", "global_gpu_id"])
def test_before_init(name, monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    runtime.shutdown()
    with pytest.raises(RuntimeError, match=r"sok\.init\(\)"):
        getattr(sok, name)()


def test_public_names():
    assert sorted(sok.__all__) == sorted(set(sok.__all__))
    for name in sok.__all__:
        value = getattr(sok, name)
        assert inspect.getdoc(value), name


def test_import_starts_no_cuda():
    assert not torch.cuda.is_initialized()
