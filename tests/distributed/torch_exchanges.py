# SPDX-License-Identifier: Apache-2.0
"""The check of torch_worker.py that asks which exchange there is."""

import torch

import sparse_operation_kit.torch as sok
from sparse_operation_kit.nccl import NcclUnavailable
from sparse_operation_kit.torch import runtime
from sparse_operation_kit.torch.exchange import Exchange, NcclExchange


def exchanges():
    """Which exchange init() makes of each name; on the CPU all move the same."""
    ids = (torch.arange(sok.rank() + 3), torch.tensor([0, 1, sok.rank() + 3]))
    outputs = []
    for name in ("auto", "torch", "engine"):
        runtime.shutdown()
        sok.init(exchange=name)
        exchange = runtime.get().exchange
        if sok.num_ranks() > 1:
            assert type(exchange) is (NcclExchange if name == "auto" else Exchange)
            assert runtime.get().arguments.exchange == ("auto" if name == "auto" else "torch")
        outputs.append(sok.lookup_sparse(sok.Variable(shape=(20, 4), name="exchanged"), ids))
    assert all(torch.equal(outputs[0], other) for other in outputs)
    if sok.num_ranks() > 1 and not torch.cuda.is_available():
        runtime.shutdown()
        try:
            sok.init(exchange="nccl")
        except NcclUnavailable as error:
            assert "needs a GPU" in str(error)
        else:
            raise AssertionError("no error")
    runtime.shutdown()
    sok.init()
