# SPDX-License-Identifier: Apache-2.0
"""The stages of a call on several ranks (csrc/sharded_lookup.h): all ranks in this process, messages carried by hand;
and what its function of autograd minds, with an exchange of one rank.
"""

import itertools
import random

import pytest
import torch

import sparse_operation_kit.torch as sok
from sparse_operation_kit.torch import call, runtime
from sparse_operation_kit.torch.errors import PeerError
from sparse_operation_kit.torch.exchange import Exchange

NAMES, OWNERS, ROWS, DIMENSIONS = ["spread", "whole", "small"], [-1, 1, -1], [40, 11, 3], [4, 8, 1]
POSITIONS = [0, 1, 0, 2]  # the table of each lookup
NO_MEMBERS: tuple[list, ...] = ([], [], [], [])  # no table is a stack
COMBINERS = [0, 1, 2, 0]
SGD = ([0], [0], [0], [0.5] + [0.0] * 12, [2.0])  # runs, kinds, flags, numbers, scales


def shards_of(wholes, num_ranks):
    """[rank][table]"""
    return [
        [
            (w[r::num_ranks] if owner < 0 else w if owner % num_ranks == r else w[:0]).clone().contiguous()
            for w, owner in zip(wholes, OWNERS, strict=True)
        ]
        for r in range(num_ranks)
    ]


def batch_of(rng):
    """(keys, row splits) of each lookup."""
    result = []
    for table in POSITIONS:
        lengths = [rng.choice([0, 1, 2, 7]) for _ in range(rng.choice([0, 1, 5]))]
        keys = torch.tensor([rng.randrange(ROWS[table]) for _ in range(sum(lengths))], dtype=torch.int64)
        result.append((keys, torch.tensor([0, *lengths]).cumsum(0)))
    return result


def exchanged(messages, send):
    """What comes to each rank: messages[r] is cut by send[r]."""
    pieces = [message.split(sizes) for message, sizes in zip(messages, send, strict=True)]
    return [torch.cat([piece[r] for piece in pieces]) for r in range(len(messages))]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("choices", [["requester"], ["owner"], ["owner", "requester"]])
@pytest.mark.parametrize("concat", [False, True])
def test_is_what_one_process_does(monkeypatch, num_ranks, choices, concat):
    seed = random.randrange(2**31)
    print("seed", seed)
    rng = random.Random(seed)
    wholes = [torch.randn(n, d, generator=torch.Generator().manual_seed(seed)) for n, d in zip(ROWS, DIMENSIONS)]  # noqa: B905
    shards = shards_of(wholes, num_ranks)
    owners = [owner if owner < 0 else owner % num_ranks for owner in OWNERS]
    for table in itertools.chain(*shards):
        table.requires_grad_()
    lists = [torch.classes.sok.TableList(each, [], POSITIONS, NAMES, owners, ROWS, *NO_MEMBERS) for each in shards]
    batches = [batch_of(rng) for _ in range(num_ranks)]
    if concat:  # as many bags in each lookup
        batches = [
            [batch[0] if t == 0 else (batch[0][0] % ROWS[t], batch[0][1]) for t in POSITIONS] for batch in batches
        ]
    weights = [torch.rand(len(batch[2][0])) for batch in batches]
    for each in weights:
        each.requires_grad_()
    routed = []
    for rank, (tables, batch) in enumerate(zip(lists, batches, strict=True)):
        monkeypatch.setenv("SOK_POOLING", choices[rank % len(choices)])
        keys, splits = map(list, zip(*batch, strict=True))
        lookups = (keys, COMBINERS, splits, [0, 1, 2, 3], [weights[rank]], [2])
        routed.append(tables.route(*lookups, num_ranks, rank, concat))
    sent = [each.counts() for each in routed]
    assert all(each[:, -1].tolist() == [0] * num_ranks for each in sent)
    received = [torch.stack([each[r] for each in sent]) for r in range(num_ranks)]
    keys = [each.keys(s, r) for each, s, r in zip(routed, sent, received, strict=True)]
    send, receive, send_rows, receive_rows = zip(*(each.sizes() for each in routed), strict=True)
    assert [list(each) for each in zip(*send, strict=True)] == list(receive)
    assert [list(each) for each in zip(*send_rows, strict=True)] == list(receive_rows)
    came = exchanged(keys, send)
    rows = exchanged([each.gather(k) for each, k in zip(routed, came, strict=True)], send_rows)
    outputs = [each.combine(r) for each, r in zip(routed, rows, strict=True)]

    # Against PyTorch on whole tables, in float64: gradients of weights may be small differences of large numbers.
    wholes = [whole.double().requires_grad_() for whole in wholes]
    gradients, wanted_weights = [], []
    for rank, batch in enumerate(batches):
        other = weights[rank].detach().double().requires_grad_()
        wanted = []
        for i, (k, splits) in enumerate(batch):
            per_bag = splits.diff()
            bag = torch.arange(len(per_bag)).repeat_interleave(per_bag)
            w = other if i == 2 else torch.ones(len(k), dtype=torch.float64)
            summed = wholes[0].new_zeros(len(per_bag), DIMENSIONS[POSITIONS[i]])
            summed = summed.index_add(0, bag, wholes[POSITIONS[i]][k] * w[:, None])
            power = wholes[0].new_zeros(len(per_bag)).index_add(0, bag, w if COMBINERS[i] == 1 else w * w)
            divisor = power.clamp(min=1e-30).sqrt() if COMBINERS[i] == 2 else power.clamp(min=1e-30)
            wanted.append(summed if COMBINERS[i] == 0 else summed / divisor[:, None])
        if concat:
            wanted = [torch.cat(wanted, dim=1)]
        for got, expected in zip(outputs[rank], wanted, strict=True):
            torch.testing.assert_close(got, expected.detach().float(), rtol=1e-4, atol=1e-5)
        gradients.append([torch.randn(each.shape) for each in wanted])
        if not concat:
            gradients[-1][0] = None if rank == 0 else gradients[-1][0]
        torch.autograd.backward(
            [w for w, g in zip(wanted, gradients[-1], strict=True) if g is not None],
            [g.double() for g in gradients[-1] if g is not None],
        )
        wanted_weights.append(other.grad.float())
    spread = [each.spread(g, True, True) for each, g in zip(routed, gradients, strict=True)]
    for (_, got), expected in zip(spread, wanted_weights, strict=True):
        torch.testing.assert_close(got[0], expected, rtol=1e-3, atol=1e-4)
    values = exchanged([each[0] for each in spread], receive_rows)
    expected = shards_of([whole.grad.float() for whole in wholes], num_ranks)
    before = [[table.detach().clone() for table in each] for each in shards]
    for rank in range(num_ranks):
        gradients = routed[rank].gradients(values[rank])
        stepped = torch.classes.sok.OptimizerTables(shards[rank], [each.number() for each in gradients], NAMES)
        stepped.set_run(0, [0, 1, 2], [])
        stepped.step(*SGD, [], [], [], [], [], 0, -1, False)
        for table, gradient in enumerate(gradients):
            dense = torch.zeros_like(shards[rank][table])
            slots, summed = gradient.reduce(NAMES[table], *dense.shape, dense.device)
            assert torch.equal(slots, slots.unique())
            dense[slots] = summed
            torch.testing.assert_close(dense, expected[rank][table], rtol=1e-3, atol=1e-4)
            stepped = before[rank][table] - 0.5 * 2.0 * expected[rank][table]
            torch.testing.assert_close(shards[rank][table].detach(), stepped, rtol=1e-3, atol=1e-4)


def test_a_lookup_of_no_table():
    table = torch.zeros(6, 2)
    for position in (1, -1):
        with pytest.raises(ValueError, match=f"names table {position} of 1"):
            torch.classes.sok.TableList([table], [], [position], ["items"], [-1], [6], *NO_MEMBERS)


def routed_alone():
    table = torch.zeros(6, 2)
    tables = torch.classes.sok.TableList([table], [], [0], ["items"], [-1], [6], *NO_MEMBERS)
    return table, tables.route([torch.tensor([1, 3])], [0], [torch.tensor([0, 2])], [0], [], [], 1, 0, False)


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ([[2, 0]], r"counts must be \[ranks, 3\]"),
        ([[-1, 0, 0]], "must be in .*not -1"),
        ([[2**31, 0, 0]], "must be in .*not 2147483648"),
        ([[2, 1, 0]], "lookup 0 has 1 keys, but no row splits"),
        ([[3, 0, 0]], "fewer than 3 elements"),
    ],
)
def test_counts_that_cannot_be(counts, message):
    table, routed = routed_alone()
    with pytest.raises(ValueError, match=message):
        routed.keys(torch.tensor(counts), torch.tensor(counts))
    del table


def test_messages_of_the_wrong_size(monkeypatch):
    monkeypatch.setenv("SOK_POOLING", "requester")
    table, routed = routed_alone()
    with pytest.raises(RuntimeError, match="after the counts"):
        routed.gather(torch.tensor([1, 3]))
    with pytest.raises(RuntimeError, match="after the counts"):
        routed.combine(torch.zeros(4))
    with pytest.raises(RuntimeError, match="after the counts"):
        routed.sizes()
    counts = torch.tensor([[2, 0, 0]])
    keys = routed.keys(counts, counts)
    assert keys.tolist() == [1, 3] and [list(each) for each in routed.sizes()] == [[2], [2], [4], [4]]
    with pytest.raises(ValueError, match=r"keys has shape \[3\], must have \[2\]"):
        routed.gather(torch.tensor([1, 3, 5]))
    assert routed.gather(keys).tolist() == [0] * 4
    with pytest.raises(ValueError, match=r"floats has shape \[3\], must have \[4\]"):
        routed.combine(torch.zeros(3))
    with pytest.raises(ValueError, match=r"floats has shape \[5\], must have \[4\]"):
        routed.gradients(torch.zeros(5))
    del table


class OneRank(Exchange):
    """An exchange whose only rank is this one."""

    calls = 0

    def __init__(self):
        self._enlist(1, 0)

    def swap_counts(self, counts, failed=False):
        del failed
        return counts, counts

    def all_to_all(self, tensor, send, receive):
        assert send == receive == [len(tensor)]
        self.calls += 1
        return tensor.clone()


ONE_RANK = OneRank()


def looked_up(table, batch, weights=None, exchange=None):
    ids, offsets = batch
    tables, described, _ = call.distinct([table])
    lookups = call.Lookups(
        [ids], [0], [0], [offsets], [0], [] if weights is None else [weights], [0] * (weights is not None)
    )
    made = call.Call(tables, described, lookups)
    return call.run(made, exchange or ONE_RANK)[0]


@pytest.fixture(params=["owner", "requester"])
def batch(request, monkeypatch):
    monkeypatch.setenv("SOK_POOLING", request.param)
    return torch.tensor([1, 3, 3]), torch.tensor([0, 1, 3])


def test_backward_twice(batch):
    table = sok.Variable(torch.ones(6, 2))
    output = looked_up(table, batch)
    output.sum().backward(retain_graph=True)
    output.sum().backward()
    assert table.grad.to_dense()[:, 0].tolist() == [0, 2, 0, 4, 0, 0]
    with pytest.raises(RuntimeError, match="a second time"):
        output.sum().backward()


def test_batches_that_were_changed(batch):
    """Other ranks wait for the gradients: zeros are sent, and what comes next raises it, once."""
    table, right = sok.Variable(torch.ones(6, 2)), [tensor.clone() for tensor in batch]
    for place, following in (
        (0, lambda: ONE_RANK.handle.agree(table.device, False, False)),
        (1, lambda: looked_up(table, right)),
    ):
        output = looked_up(table, batch)
        batch[place].add_(0)
        output.sum().backward()
        assert not table.grad.to_dense().any()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            following()
        following()


def test_second_derivatives(batch):
    table = sok.Variable(torch.ones(6, 2))
    scale = torch.ones(2, requires_grad=True)
    output = looked_up(table, batch)
    with pytest.raises(NotImplementedError, match="differentiated again"):
        torch.autograd.grad((output * scale).sum(), [table], create_graph=True)


def test_only_what_is_wanted_is_exchanged(batch):
    exchange = OneRank()
    weights = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    for trainable, wanted in ((True, True), (True, False), (False, False)):
        table = sok.Variable(torch.ones(6, 2), trainable=trainable)
        output = looked_up(table, batch, weights, exchange)
        before = exchange.calls
        inputs = [weights, table] if wanted else [weights]
        gradients = torch.autograd.grad(output.sum(), inputs)
        assert gradients[0].tolist() == [2, 2, 2] and exchange.calls - before == int(wanted)
    with torch.no_grad():
        assert not looked_up(table, batch).requires_grad


def test_gradients_on_their_way(batch):
    """Hooks see gradients, and autograd carries what they return."""
    seen = []
    for hook in (
        lambda table: table.register_hook(lambda g: seen.append(g.to_dense()[3, 0].item()) or g * 2),
        lambda table: table.register_post_accumulate_grad_hook(lambda t: seen.append(t.grad.to_dense()[3, 0].item())),
    ):
        hooked, plain = sok.Variable(torch.ones(6, 2)), sok.Variable(torch.ones(6, 2))
        hook(hooked)
        (looked_up(hooked, batch).sum() + looked_up(plain, batch).sum()).backward()
        assert plain._unread[0] and not hooked._unread[0]
        assert hooked.grad.to_dense()[3, 0] == (4 if len(seen) == 1 else 2) and plain.grad.to_dense()[3, 0] == 2
    assert seen == [2, 2]
    table = sok.Variable(torch.ones(6, 2))
    output = looked_up(table, batch)
    output.grad_fn.register_hook(lambda gradients, _: seen.append(len(gradients)))
    output.sum().backward()
    assert seen[2:] == [1] and table.grad.to_dense()[3, 0] == 2


def test_recomputed_activations(batch):
    """The lookup of a segment that is computed again in backward() has its gradient once."""
    table, exchange = sok.Variable(torch.ones(6, 2)), OneRank()
    output = torch.utils.checkpoint.checkpoint(
        lambda: looked_up(table, batch, exchange=exchange).sin(), use_reentrant=False
    )
    output.sum().backward()
    assert table.grad.to_dense()[:, 0].tolist() == pytest.approx([0, 0.54030, 0, -0.83229, 0, 0], abs=1e-4)


class Failing(OneRank):
    """Fails in the exchange of this number."""

    fails = 0

    def all_to_all(self, tensor, send, receive):
        if self.calls == self.fails:
            self.calls += 1
            raise NotADirectoryError("no way to the other ranks")
        return super().all_to_all(tensor, send, receive)


def test_errors_of_the_exchange(batch):
    table = sok.Variable(torch.ones(6, 2))
    for calls, exchange in enumerate((Failing(), Failing(), Failing())):
        exchange.fails = calls
        if calls < 2:
            with pytest.raises(NotADirectoryError, match="no way"):
                looked_up(table, batch, exchange=exchange)
            continue
        output = looked_up(table, batch, exchange=exchange)
        with pytest.raises(NotADirectoryError, match="no way"):
            output.sum().backward()
        gradient = table.grad
        assert gradient is None
        output.sum().backward()  # nothing was released
        assert table.grad.to_dense()[:, 0].tolist() == [0, 1, 0, 2, 0, 0]


class Told(OneRank):
    """Hears of failures; another rank fails where `peer` is true."""

    def __init__(self, peer):
        super().__init__()
        self.peer, self.told = peer, []

    def swap_counts(self, counts, failed=False):
        self.told.append(counts[:, -1].tolist())
        assert counts.shape == (1, 4) and counts.device == torch.device("cpu") and failed == counts[:, -1].any()
        if self.peer:
            raise PeerError([7])
        return super().swap_counts(counts)


def test_the_other_ranks_are_told(batch):
    table = sok.Variable(torch.ones(6, 2))
    for ids, peer, error, message in (
        (torch.tensor([1, 6, 3]), False, IndexError, r"key 6 is outside \[0, 6\)"),
        (batch[0], True, PeerError, "rank 7"),
    ):
        exchange = Told(peer)
        with pytest.raises(error, match=message):
            looked_up(table, (ids, batch[1]), exchange=exchange)
        assert exchange.told == [[0 if peer else 1]]


def test_an_exchange_that_is_gone(batch):
    table, exchange = sok.Variable(torch.ones(6, 2)), OneRank()
    output = looked_up(table, batch, exchange=exchange)
    del exchange
    with pytest.raises(RuntimeError, match="do not exchange any more"):
        output.sum().backward()


def test_derivatives_that_there_are_none_of(batch):
    exchange = Told(False)
    table = sok.Variable(torch.ones(6, 2))
    with torch.autograd.forward_ad.dual_level():
        weights = torch.autograd.forward_ad.make_dual(torch.ones(3, requires_grad=True), torch.ones(3))
        with pytest.raises(NotImplementedError, match="forward-mode"):
            looked_up(table, batch, weights, exchange)
    assert exchange.told == [[1]]


def test_steps(batch):
    table = sok.Variable(torch.ones(6, 2))
    optimizer = sok.OptimizerWrapper(torch.optim.SGD([table], lr=1.0))
    for again in (False, True):
        table.data.fill_(1)
        optimizer.zero_grad()
        looked_up(table, batch).sum().backward()
        assert table._unread[0]
        if again:  # a second gradient: autograd's, of the two together
            looked_up(table, batch).sum().backward()
        optimizer.step()
        assert table.detach()[:, 0].tolist() == [1, -again, 1, -1 - 2 * again, 1, 1]
    assert runtime.get().exchange is None
