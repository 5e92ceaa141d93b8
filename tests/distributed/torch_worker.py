# SPDX-License-Identifier: Apache-2.0
"""What test_torch.py runs on every rank: `torchrun --nproc_per_node N torch_worker.py CHECK ...`.

Each check is a function of this module. All ranks run all of them in the same order; a failing one ends the job with
its traceback. Rank 0 prints "passed CHECK" for each.
"""

import dataclasses
import functools
import importlib.util
import pathlib
import sys
import time

import numpy as np

TESTS = pathlib.Path(__file__).resolve().parents[1]
_BESIDE = (
    "torch_model torch_exchanges following dumping torch_saving torch_pooling torch_concat torch_unusual torch_faults"
)
_BESIDE += " torch_dynamic torch_hybrid torch_hybrid_files stacked torch_stack torch_clipping torch_whole_models"
_MODULES = {
    "reference": "reference.py",
    "cases": "cases.py",
    "faults": "faults.py",
    "dict_store": "dict_store.py",
    "hybrid_model": "hybrid_model.py",
    "hybrid_examples": "hybrid_examples.py",
    "torch_harness": "torch/harness.py",
}
_MODULES |= {name: f"distributed/{name}.py" for name in _BESIDE.split()}
for _name, _path in _MODULES.items():
    _spec = importlib.util.spec_from_file_location(_name, TESTS / _path)
    sys.modules[_name] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules[_name])

import cases  # noqa: E402
import reference  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch_harness as harness  # noqa: E402
from torch_model import Model, batch_of, check_model, whole  # noqa: E402

import sparse_operation_kit.torch as sok  # noqa: E402
from sparse_operation_kit.torch import runtime  # noqa: E402
from sparse_operation_kit.torch._ops import ops  # noqa: E402
from sparse_operation_kit.torch.errors import PeerError  # noqa: E402
from sparse_operation_kit.torch.gradient import PendingGradient  # noqa: E402


def restart(**options):
    """init() anew, with other options."""
    runtime.shutdown()
    sok.init(**options)


def tables_of(call):
    return harness.tables(call, sok.num_ranks())


def sparse(item):
    indices, order = item.coordinates()
    return torch.sparse_coo_tensor(indices.T.copy(), item.keys[order], item.dense_shape, check_invariants=True)


def expect(error, message, call):
    """Calls, and wants that error; returns its text."""
    try:
        call()
    except error as caught:
        assert message in str(caught), str(caught)
        return str(caught)
    raise AssertionError(f"no {error.__name__}")


def lookups():
    """Forward pass and gradients of every case, from uneven batches, against the reference on the joined batch."""
    rank = sok.rank()
    for number, call in enumerate(cases.CASES):
        parts, cuts = call.split(sok.num_ranks())
        part, tables = parts[rank], tables_of(call)
        outputs, weights = harness.lookup(part, tables, sparse if number % 3 == 2 else harness.pair)
        gradients = []
        for i, output in enumerate(outputs):
            begin, end = cuts[i][rank], cuts[i][rank + 1]
            terms = call.output(i, absolute=True)[begin:end]
            reference.assert_close(output.detach(), call.output(i)[begin:end], 1e-6, terms, f"{call.name}: output {i}")
            gradients.append(torch.from_numpy(call.output_gradient(i)[begin:end]))
        torch.autograd.backward(outputs, gradients)
        for t, table in enumerate(tables):
            if all(item.table != t for item in call.lookups):
                assert table.grad is None
                continue
            assert isinstance(table.grad, PendingGradient)
            slots = table.grad.coalesce().indices()[0].tolist()
            rows = table.placement.rows
            touched = np.zeros(table.global_shape[0], bool)
            touched[call.touched(t)] = True
            assert slots == np.flatnonzero(touched[rows]).tolist()
            terms = call.row_gradient(t, absolute=True)[rows]
            message = f"{call.name}: gradient of table {t}"
            reference.assert_close(table.grad.to_dense(), call.row_gradient(t)[rows], 1e-6, terms, message)
        for i, given in enumerate(weights):
            if given is not None:
                first = call.lookups[i].splits[cuts[i][rank]]
                mine = slice(first, first + len(given))
                terms = call.weight_gradient(i, absolute=True)[mine]
                message = f"{call.name}: weight gradient {i}"
                reference.assert_close(given.grad, call.weight_gradient(i)[mine], 2e-6, terms, message)


def training():
    """20 steps with each optimizer: whole tables equal those of torch.optim on the joined batch, in float64."""
    for name, make in {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
        "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.1),
        "adam": lambda p: torch.optim.Adam(p, lr=0.01, eps=1e-3),
        "radam": lambda p: torch.optim.RAdam(p, lr=0.01, eps=1e-3),
    }.items():
        rng = np.random.default_rng(4)
        tables = (cases.Table(40, 8), cases.Table(15, 5, 1), cases.Table(9, 16, 0), cases.Table(23, 8))
        items = [
            cases.random_lookup(rng, t, tables[t].num_rows, 24, 3, combiner=c, weighted=w, skew=2)
            for t, c, w in (
                (0, "sum", True),
                (1, "mean", False),
                (2, "sqrtn", True),
                (0, "mean", False),
                (3, "sum", False),
            )
        ]
        call = cases.Call(tables, tuple(items), seed=11)
        variables, oracle = tables_of(call), harness.Oracle(call)
        touched = [torch.from_numpy(call.touched(t)) for t in range(len(tables))]
        rows = [torch.nn.Parameter(table.detach()[keys]) for table, keys in zip(oracle.tables, touched, strict=True)]
        optimizer, dense = sok.OptimizerWrapper(make(variables)), make(rows)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer.optimizer, 0.95)
        decay = torch.optim.lr_scheduler.ExponentialLR(dense, 0.95)
        for step in range(20):
            parts, cuts = call.split(sok.num_ranks(), seed=step)
            gradients = [call.output_gradient(i) * (1 + step % 3) for i in range(len(items))]
            optimizer.zero_grad()
            outputs, _ = harness.lookup(parts[sok.rank()], variables)
            mine = [
                torch.from_numpy(gradient[cut[sok.rank()] : cut[sok.rank() + 1]])
                for gradient, cut in zip(gradients, cuts, strict=True)
            ]
            torch.autograd.backward(outputs, mine)
            optimizer.step()
            scheduler.step()
            full = [
                torch.zeros_like(table).index_put((keys,), part)
                for table, keys, part in zip(oracle.tables, touched, rows, strict=True)
            ]
            bags = [
                harness.embedding_bag(full[item.table], item, weights)
                for item, weights in zip(items, oracle.weights, strict=True)
            ]
            dense.zero_grad()
            torch.autograd.backward(bags, [torch.from_numpy(gradient).double() for gradient in gradients])
            dense.step()
            decay.step()
        for t, variable in enumerate(variables):
            wanted = torch.from_numpy(call.rows(t)).double()
            wanted[touched[t]] = rows[t].detach()
            reference.assert_close(whole(variable), wanted, 2e-6, message=f"{name}, table {t}")


def accumulation():
    """Two backward passes, then one step, equal one step with their sum; zero_grad; a rank without any bag."""
    table, plain = sok.Variable(torch.ones(9, 3)), torch.ones(9, 3, requires_grad=True)
    optimizer, oracle = sok.OptimizerWrapper(torch.optim.Adagrad([table], lr=0.1)), torch.optim.Adagrad([plain], lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        oracle.zero_grad()
        for row in (4, 7):
            # Only the last rank has bags.
            mine = [row, row] if sok.rank() == sok.num_ranks() - 1 else []
            output = sok.lookup_sparse(table, (torch.tensor(mine, dtype=torch.int64), torch.tensor([0, len(mine)])))
            (output.sum() * row).backward()
            (plain[[row, row]].mean(0).sum() * row).backward()
        optimizer.step()
        oracle.step()
    torch.testing.assert_close(whole(table)[[4, 7]], plain.detach()[[4, 7]])
    untouched = whole(table)[[0, 1, 2, 3, 5, 6, 8]]
    assert torch.equal(untouched, torch.ones(7, 3))


def gradient_mean():
    """init(gradient="mean") divides summed gradients by the number of ranks, for every optimizer."""
    restart(gradient="mean")
    for wrap in (sok.OptimizerWrapper, lambda optimizer: optimizer):
        table = sok.Variable(torch.zeros(8, 2))
        ids = (torch.tensor([3, 3]), torch.tensor([0, 2]))
        optimizer = wrap(torch.optim.SGD([table], lr=1.0))
        sok.lookup_sparse(table, ids, combiners="sum").sum().backward()
        sok.lookup_sparse(table, ids, combiners="sum").sum().backward()
        optimizer.step()
        assert whole(table)[3].tolist() == [-4.0, -4.0]
    restart()


def initial_rows():
    """Rows depend on seed, name, key and column, not on the ranks or the mode."""
    from sparse_operation_kit import placement

    for kind in ("uniform", "normal"):
        results = []
        for mode in (None, f"localized:{sok.num_ranks() - 1}"):
            results.append(whole(sok.Variable(shape=(101, 7), initializer=kind, name="items", mode=mode)))
        alone = torch.empty(101, 7)
        spec, seed = placement.parse_initializer(kind, 101, 7), placement.table_seed(0, "items")
        ops.initialize(alone, spec.kind, seed - 2**64 if seed >= 2**63 else seed, spec.a, spec.b, None, 0, 1)
        assert all(torch.equal(result, alone) for result in results)


def row_dtypes():
    """Tables of one dtype and of several: each step is that of float32 tables with the same rows, rounded."""
    rng = np.random.default_rng(3)
    tables = (cases.Table(40, 8), cases.Table(15, 5, 1), cases.Table(9, 16, 0), cases.Table(23, 8))
    items = tuple(
        cases.random_lookup(rng, t, tables[t].num_rows, 24, 3, combiner=c, weighted=c == "mean", skew=2)
        for t, c in ((0, "sum"), (1, "mean"), (2, "sqrtn"), (0, "mean"), (3, "sum"))
    )
    call = cases.Call(tables, items, seed=12)
    for dtypes in ([torch.float16], [torch.bfloat16], [torch.float32, torch.float16, torch.bfloat16]):
        variables = tables_of(call)
        narrow = [
            sok.Variable(call.rows(t), dtype=dtypes[t % len(dtypes)], mode=table.mode, name=f"narrow{t}")
            for t, table in enumerate(variables)
        ]
        optimizers = [sok.OptimizerWrapper(torch.optim.Adagrad(x, lr=0.1)) for x in (variables, narrow)]
        for step in range(4):
            with torch.no_grad():
                for table, rounded in zip(variables, narrow, strict=True):
                    table.copy_(rounded)
            parts, cuts = call.split(sok.num_ranks(), seed=step)
            rank, results = sok.rank(), []
            for group, optimizer in zip((variables, narrow), optimizers, strict=True):
                optimizer.zero_grad()
                outputs, weights = harness.lookup(parts[rank], group)
                mine = [harness.gradients(call)[i][cut[rank] : cut[rank + 1]] for i, cut in enumerate(cuts)]
                torch.autograd.backward(outputs, mine)
                results.append((outputs, [w.grad for w in weights if w is not None]))
                optimizer.step()
            for output, wanted in zip(results[1][0], results[0][0], strict=True):
                assert torch.equal(output, wanted)
            for gradient, wanted in zip(results[1][1], results[0][1], strict=True):
                torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-4)
            for table, rounded in zip(variables, narrow, strict=True):
                assert rounded.grad is None or rounded.grad.dtype == rounded.dtype
                assert torch.equal(rounded.detach(), table.detach().to(rounded.dtype)), step


def placement_of_rows():
    """Shapes, modes and errors that depend on the number of ranks."""
    n, rank = sok.num_ranks(), sok.rank()
    table = sok.Variable(torch.arange(22, dtype=torch.float32).view(11, 2))
    assert table.global_shape == (11, 2) and table.num_gpus == n and table.target_gpu == -1
    assert torch.equal(table.detach()[:, 0], torch.arange(rank, 11, n) * 2.0)
    assert torch.equal(table.key_map(torch.arange(11)), torch.arange(11) // n)
    local = sok.Variable(torch.ones(5, 2), mode=f"localized:{n - 1}")
    assert local.target_gpu == n - 1 and local.shape == ((5, 2) if rank == n - 1 else (0, 2))
    assert local.key_map(4) == 4
    assert pickle_copy(local).shape == local.shape
    expect(ValueError, f"[0, {n})", lambda: sok.Variable(torch.ones(5, 2), mode="localized:7"))
    few = sok.Variable(torch.ones(1, 2))  # fewer rows than ranks
    assert few.shape == ((1, 2) if rank == 0 else (0, 2))
    output = sok.lookup_sparse(few, (torch.zeros(3, dtype=torch.int64), torch.tensor([0, 1, 3])), combiners="sum")
    assert output.tolist() == [[1, 1], [2, 2]]
    assert sok.num_gpus() == n and sok.global_gpu_id() == rank == sok.local_rank()


def pickle_copy(value):
    import pickle

    return pickle.loads(pickle.dumps(value))


def raise_together():
    """Bad input on one rank is that rank's own error and a PeerError that names it everywhere else; tables stay."""
    table, other = sok.Variable(torch.ones(10, 4), name="items"), sok.Variable(torch.ones(6, 2), mode="localized:0")
    n, rank = sok.num_ranks(), sok.rank()
    good = (torch.tensor([1, 2, 3]), torch.tensor([0, 1, 3]))
    bad = {
        "key": ((torch.tensor([1, 10, 3]), good[1]), None, IndexError, "key 10 is outside [0, 10)"),
        "dtype": ((torch.tensor([1.0, 2, 3]), good[1]), None, TypeError, "int32 or int64, not float32"),
        "offsets": ((good[0], torch.tensor([0, 9])), None, ValueError, "row_splits"),
        "weights": (good, torch.ones(2), ValueError, "3 ids"),
        "combiner": (good, None, ValueError, "'max'"),
    }
    for culprit in range(n):
        for name, (ids, weights, error, message) in bad.items():
            combiner = "max" if name == "combiner" else "sum"
            arguments = ([table, other], [ids, good], [weights, None], combiner)
            if rank == culprit:
                expect(error, message, functools.partial(sok.lookup_sparse, *arguments))
            else:
                text = expect(PeerError, "failed", lambda: sok.lookup_sparse([table, other], [good, good]))
                assert f"rank {culprit}" in text
    if n > 1:
        mine = (torch.tensor([99]), torch.tensor([0, 1])) if rank < 2 else good
        if rank < 2:
            expect(IndexError, "99", lambda: sok.lookup_sparse(table, mine))
        else:
            expect(PeerError, "ranks 0, 1", lambda: sok.lookup_sparse(table, mine))
        indices = torch.tensor([3, 11 if rank == 0 else 2])
        error = IndexError if rank == 0 else PeerError
        expect(error, "11" if rank == 0 else "rank 0", lambda: sok.all2all_dense_embedding(table, indices))
    # The next call works, and nothing has changed.
    assert torch.equal(sok.lookup_sparse(table, good), torch.ones(2, 4))
    assert torch.equal(whole(table), torch.ones(10, 4)) and table.grad is None


def table_io():
    """assign and export by global key; a key of another rank is refused."""
    n, rank = sok.num_ranks(), sok.rank()
    table = sok.Variable(torch.zeros(10, 2), name="items")
    keys = torch.arange(rank, 10, n)
    values = torch.stack([keys, -keys], 1).float()
    sok.assign(table, keys.flip(0).int(), values.flip(0))
    result = whole(table)
    assert torch.equal(result[:, 0], torch.arange(10.0)) and torch.equal(result[:, 1], -torch.arange(10.0))
    if n > 1:
        foreign = (rank + 1) % n
        expect(IndexError, "items", lambda: sok.assign(table, [rank, foreign], torch.ones(2, 2)))
        assert torch.equal(whole(table), result)
    exported_keys, rows = sok.export(table)
    rows.zero_()
    assert torch.equal(whole(table), result) and exported_keys.dtype == torch.int64


def collectives():
    """The module communication."""
    n, rank = sok.num_ranks(), sok.rank()
    communication = sok.communication
    assert communication.allreduce(torch.tensor([1.0 + rank])).item() == n * (n + 1) / 2
    assert communication.allreduce(torch.tensor(1.0 + rank), "average").item() == (n + 1) / 2
    assert communication.allreduce(torch.tensor(rank), "max").item() == n - 1
    assert communication.allreduce(torch.tensor(rank), op="min").item() == 0
    mine = torch.full((rank, 2), rank)
    wanted = [r for r in range(n) for _ in range(r)]
    assert communication.allgather(mine)[:, 0].tolist() == wanted
    sent = torch.tensor([[rank, r] for r in range(n) for _ in range(r)]).view(-1, 2)
    received = communication.alltoall(sent, list(range(n)))
    assert received.tolist() == [[r, rank] for r in range(n) for _ in range(rank)]
    even = communication.alltoall(torch.arange(2 * n))
    assert even.tolist() == [2 * rank, 2 * rank + 1] * n
    assert communication.broadcast(torch.tensor([rank]), n - 1).item() == n - 1
    expect(ValueError, f"[0, {n})", lambda: communication.broadcast(torch.tensor([rank]), n))
    expect(ValueError, "unknown op", lambda: communication.allreduce(torch.ones(1), "prod"))
    expect(ValueError, "splits", lambda: communication.alltoall(torch.ones(1), [1] * (n + 1)))

    weight, table = torch.full((2, 3), float(rank)), sok.Variable(torch.arange(8.0).view(8, 1))
    transposed = torch.full((3, 2), float(rank)).T
    before = table.detach().clone()
    sok.broadcast_variables([weight, table, transposed, None], root_rank=n - 1)
    assert (weight == n - 1).all() and (transposed == n - 1).all() and torch.equal(table.detach(), before)
    model = torch.nn.Linear(2, 2)
    torch.nn.init.constant_(model.weight, rank)
    sok.broadcast_variables(model.named_parameters())
    assert (model.weight == 0).all()


def make_sgd(parameters):
    # Not one of the adaptive optimizers, which hardly notice a gradient that is a constant factor too large.
    return torch.optim.SGD(parameters, lr=0.05)


def ddp():
    """DistributedDataParallel over a model with tables, no flags, equals one process on the joined batch."""
    restart(gradient="mean")
    model = Model()
    torch.nn.init.constant_(model.top.bias, float(sok.rank()))  # DDP gives every rank the values of rank 0
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    with torch.no_grad():
        model.top.bias.copy_(Model().top.bias)
    names = [name for name, _ in model.named_parameters()]
    assert "bags.tables.a" in names and not any("tables" in str(x) for x in parallel._get_ddp_logging_data())
    optimizer = sok.OptimizerWrapper(make_sgd(parallel.parameters()))
    for step in range(10):
        ids, labels = batch_of(step, sok.rank(), sok.num_ranks())
        optimizer.zero_grad()
        (parallel(ids) - labels).pow(2).mean().backward()
        assert isinstance(model.bags.tables["a"].grad, PendingGradient)
        optimizer.step()
    check_model(model, 10, make_sgd)
    root = torch.nn.Module()  # a table directly in the wrapped module
    root.table, root.weight = sok.Variable(torch.ones(6, 2)), torch.nn.Parameter(torch.ones(2))
    root.forward = lambda ids: sok.lookup_sparse(root.table, ids) * root.weight
    wrapped = torch.nn.parallel.DistributedDataParallel(root)
    wrapped((torch.tensor([1]), torch.tensor([0, 1]))).sum().backward()
    assert root.table.grad is not None and root.weight.grad is not None
    restart()


def distributed_optimizer():
    """DistributedOptimizer without DDP equals one process on the joined batch."""
    restart(gradient="mean")
    model = Model()
    torch.nn.init.constant_(model.top.bias, float(sok.rank()))
    with torch.no_grad():
        if sok.rank() == 0:
            model.top.bias.copy_(Model().top.bias)
    sok.broadcast_variables(model.parameters())
    optimizer = sok.DistributedOptimizer(make_sgd(model.parameters()))
    for step in range(10):
        ids, labels = batch_of(step, sok.rank(), sok.num_ranks())

        def closure(ids=ids, labels=labels):
            optimizer.zero_grad()
            loss = (model(ids) - labels).pow(2).mean()
            loss.backward()
            return loss

        assert torch.isfinite(optimizer.step(closure))
    check_model(model, 10, make_sgd)

    used, unused, nobody = (torch.nn.Parameter(torch.zeros(2)) for _ in range(3))
    optimizer = sok.DistributedOptimizer(torch.optim.SGD([used, unused, nobody], lr=1.0))
    used.grad = torch.full((2,), float(sok.rank()))
    if sok.rank() == 0:
        unused.grad = torch.full((2,), float(sok.num_ranks()))
    optimizer.step()
    assert torch.equal(used.detach(), torch.full((2,), -(sok.num_ranks() - 1) / 2))
    assert torch.equal(unused.detach(), -torch.ones(2)) and nobody.grad is None
    restart()


def other_ranks():
    """A table made for another number of ranks, and options of init()."""
    sok.init()  # again with the same arguments: nothing happens
    expect(ValueError, "called before", lambda: sok.init(seed=5))
    expect(ValueError, '"torch"', lambda: sok.init("horovod"))
    expect(ValueError, '"sum"', lambda: sok.init(gradient="max"))
    table = sok.Variable(torch.ones(4, 2), name="items")
    table._placement = dataclasses.replace(table._placement, num_ranks=sok.num_ranks() + 1)
    ids = (torch.tensor([1]), torch.tensor([0, 1]))
    expect(ValueError, f"made for {sok.num_ranks() + 1} ranks", lambda: sok.lookup_sparse(table, ids))


def crash():
    """The last rank raises on its own while the others wait for it in a lookup."""
    table = sok.Variable(torch.ones(10, 4))
    ids = (torch.tensor([1, 2, 3]), torch.tensor([0, 1, 3]))
    sok.lookup_sparse(table, ids)
    if sok.rank() == sok.num_ranks() - 1:
        raise ValueError("the reader of the last rank found no file")
    sok.lookup_sparse(table, ids)


def crash_in_backward():
    """The same between forward and backward."""
    table = sok.Variable(torch.ones(10, 4))
    output = sok.lookup_sparse(table, (torch.tensor([1, 2, 3]), torch.tensor([0, 1, 3])))
    if sok.rank() == sok.num_ranks() - 1:
        raise ValueError("the loss of the last rank is not finite")
    output.sum().backward()


def bad_key():
    """Bad input on one rank that nobody catches."""
    table = sok.Variable(torch.ones(10, 4), name="items")
    key = 77 if sok.rank() == 0 else 7
    sok.lookup_sparse(table, (torch.tensor([key]), torch.tensor([0, 1])))


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    sok.init()
    for name in sys.argv[1:]:
        start = time.monotonic()
        next(getattr(x, name) for x in map(sys.modules.get, ("__main__", *_MODULES)) if hasattr(x, name))()
        dist.barrier()
        if sok.rank() == 0:
            print(f"passed {name} in {time.monotonic() - start:.1f} s", flush=True)
    rank, table = sok.rank(), sok.Variable(torch.ones(10, 4))
    dist.destroy_process_group()
    if sok.num_ranks() > 1:
        expect(RuntimeError, "destroyed", lambda: sok.lookup_sparse(table, (torch.tensor([1]), torch.tensor([0, 1]))))
    print(f"ended rank {rank}", flush=True)


if __name__ == "__main__":
    main()
