# SPDX-License-Identifier: Apache-2.0
"""Steps that are taken inside backward(), as PyTorch's own tutorial of them does: an optimizer a table, and a hook."""

import pytest
import torch

import sparse_operation_kit.torch as sok

ROWS, DIMENSION, STEPS = 40, 8, 5


def trained(make, in_backward, label):
    generator = torch.Generator().manual_seed(5)
    tables = [sok.Variable(torch.randn(ROWS, DIMENSION, generator=generator), name=f"{label} {i}") for i in range(3)]
    own = {table: sok.OptimizerWrapper(make([table])) for table in tables}
    together = sok.OptimizerWrapper(make(tables))

    def hook(table):
        own[table].step()
        own[table].zero_grad()

    if in_backward:
        for table in tables:
            table.register_post_accumulate_grad_hook(hook)
    for _ in range(STEPS):
        ids = [(torch.randint(0, ROWS, (24,), generator=generator), torch.arange(0, 25, 3)) for _ in range(4)]
        outputs = sok.lookup_sparse(tables, ids[:3], combiners="mean")
        again = sok.lookup_sparse(tables[0], ids[3], combiners="sum")  # another call of the same backward()
        (sum(outputs).sin() * again).sum().backward()
        if in_backward:
            assert all(table.grad is None for table in tables)
        else:
            together.step()
            together.zero_grad()
    return [table.detach().numpy() for table in tables]


@pytest.mark.parametrize(
    "make",
    [
        lambda tables: torch.optim.SGD(tables, lr=0.1),
        lambda tables: torch.optim.Adam(tables, lr=0.05),
        lambda tables: torch.optim.Adagrad(tables, lr=0.1),
    ],
    ids=["sgd", "adam", "adagrad"],
)
def test_equals_a_step_after_backward(make, request):
    label = request.node.name
    after, inside = trained(make, False, f"{label} after"), trained(make, True, f"{label} inside")
    for one, other in zip(after, inside, strict=True):
        assert one.tobytes() == other.tobytes()
