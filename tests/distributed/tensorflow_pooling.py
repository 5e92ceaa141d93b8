# SPDX-License-Identifier: Apache-2.0
"""Checks of tensorflow_worker.py: pooling at the owner beside that at the requester, in one call and across ranks."""

import contextlib
import sys

import numpy as np
import tensorflow as tf
from pooling_choice import pooling
from tensorflow_support import ids_of, own_rows, restart, tables_of

import sparse_operation_kit.tensorflow as sok
from sparse_operation_kit.tensorflow import runtime

# After tensorflow_support, which loads them.
import cases  # isort: skip
import reference  # isort: skip


def ranks_that_differ():
    """Each rank chooses on its own: every case, trained steps, and what all refuse together, however they choose."""
    worker = sys.modules["__main__"]
    for choices in (("owner", "requester"), ("requester", "owner")):
        with pooling(choices[sok.rank() % 2]):
            worker.lookups()
            worker.raise_together()
            worker.across_functions()
            worker.unlooked()
    with pooling(("owner", "requester", "auto")[sok.rank() % 3]):
        worker.training()
        worker.row_dtypes()
        worker.graph_session()


@contextlib.contextmanager
def messages():
    """What all_to_all sends and receives meanwhile on this rank: lists of (dtype, elements)."""
    exchange, sent, received = runtime.get().exchange, [], []
    all_to_all = exchange.all_to_all

    def recorded(tensor, *arguments, **options):
        result = all_to_all(tensor, *arguments, **options)
        sent.append((tensor.dtype, int(tf.size(tensor))))
        received.append((result.dtype, int(tf.size(result))))
        return result

    exchange.all_to_all = recorded
    try:
        yield sent, received
    finally:
        del exchange.all_to_all


def what_travels():
    """One message of keys and one of rows, whatever is pooled where; sums in place of rows at the owner."""
    n, rank = sok.num_ranks(), sok.rank()
    if n == 1:
        return
    spread = sok.Variable(np.arange(400, dtype=np.float32).reshape(100, 4), name="spread")
    whole = sok.Variable(np.arange(60, dtype=np.float32).reshape(20, 3), name="whole", mode=f"localized:{n - 1}")
    bags = 5 + rank
    splits = np.arange(bags + 1) * 6
    keys = [np.arange(6 * bags) % rows for rows in (100, 20)]
    ids = [tf.RaggedTensor.from_row_splits(values, splits) for values in keys]
    unique = [len(np.unique(values)) for values in keys]
    wanted = {
        "owner": (2 * 6 * bags + (n + 1) * (bags + 1), bags * (4 * n + 3)),
        "requester": (sum(unique), 4 * unique[0] + 3 * unique[1]),
    }
    for choice, (num_keys, elements) in wanted.items():
        with pooling(choice), messages() as (sent, received):
            outputs = sok.lookup_sparse([spread, whole], ids, combiners="sum")
        assert len(sent) == 2 and sent[0] == (tf.int64, num_keys), (choice, sent)
        assert received[1] == (tf.float32, elements), (choice, received)
        for output, values, width in zip(outputs, keys, (4, 3), strict=True):
            rows = values[:, None] * width + np.arange(width)
            np.testing.assert_array_equal(output, rows.reshape(bags, 6, width).sum(1))
    with pooling("owner"), messages() as (sent, received):  # a lookup with weights stays at the requester
        sok.lookup_sparse([spread, whole], ids, [None, ids[1].with_values(tf.ones(6 * bags))], combiners="sum")
    assert sent[0] == (tf.int64, 6 * bags + n * (bags + 1) + unique[1]), sent
    assert received[1] == (tf.float32, bags * 4 * n + 3 * unique[1]), received


def long_and_short_bags():
    """By default long bags of many keys are pooled at the owner and single keys are not, in one call; a rank has none.

    Rank 0 has long bags, rank 1 single keys, rank 2 no bags, the others both. One tf.function serves all.
    """
    n, rank = sok.num_ranks(), sok.rank()
    rng = np.random.default_rng(7)
    tables = (cases.Table(4000, 16), cases.Table(3000, 8, 0))

    def of(t, bags, length):
        splits = np.arange(bags + 1) * length
        return cases.Lookup(t, rng.integers(0, tables[t].num_rows, bags * length), splits, None, "mean")

    shapes = [[(40, 30), (40, 30)], [(40, 1), (40, 1)], [(0, 1), (0, 1)], [(40, 1), (40, 30)]]
    items = [[of(t, *shape) for t, shape in enumerate(shapes[r % 4])] for r in range(n)]
    call = cases.Call(tables, tuple(item for mine in items for item in mine), seed=0)
    mine = items[rank]
    variables = tables_of(call)
    ids = [ids_of(item, "ragged")[0] for item in mine]
    if n > 1:
        with pooling("auto"), messages() as (sent, _):
            sok.lookup_sparse(variables, ids)
        keys = 0
        for i, item in enumerate(mine):
            owners = n if tables[i].owner < 0 else 1
            parts = len(item.keys) + owners * (item.num_bags + 1)
            keys += parts if i in {0: [0, 1], 1: [], 2: [], 3: [1]}[rank % 4] else len(np.unique(item.keys))
        assert sent[0] == (tf.int64, keys), sent
    weights = [tf.constant(call.output_gradient(2 * rank + i)) for i in range(2)]

    @tf.function(reduce_retracing=True)
    def run(ids, weights):
        with tf.GradientTape() as tape:
            outputs = sok.lookup_sparse(variables, ids)
            loss = tf.add_n([tf.reduce_sum(o * w) for o, w in zip(outputs, weights, strict=True)])
        return outputs, [tf.convert_to_tensor(g) for g in tape.gradient(loss, variables)]

    for choice in ("auto", "owner", "requester"):
        with pooling(choice):
            outputs, gradients = run(ids, weights)
        for i, output in enumerate(outputs):
            number = 2 * rank + i
            reference.assert_close(output, call.output(number), magnitude=call.output(number, absolute=True))
        for t, gradient in enumerate(gradients):
            expected, terms = (own_rows(variables[t], call.row_gradient(t, absolute)) for absolute in (False, True))
            reference.assert_close(gradient, expected, magnitude=terms, message=f"{choice}, table {t}")


def gradients_that_are_used():
    """A gradient of sums does what one of rows does: clipped, scaled, dense, added up, in any optimizer, and divided by
    the number of ranks under init(gradient="mean").
    """
    import keras

    rng = np.random.default_rng(5)
    tables = (cases.Table(40, 8), cases.Table(15, 5, 1), cases.Table(23, 8, 0))
    items = tuple(
        cases.random_lookup(rng, t, tables[t].num_rows, 24, 4, combiner=c, weighted=w, skew=2)
        for t, c, w in ((0, "sum", False), (1, "mean", False), (0, "sqrtn", True), (2, "sqrtn", False))
    )
    call = cases.Call(tables, items, seed=3)
    parts, cuts = call.split(sok.num_ranks())
    part, rank = parts[sok.rank()], sok.rank()
    ids, weights = zip(*(ids_of(item, "ragged") for item in part.lookups), strict=True)
    incoming = [tf.constant(call.output_gradient(i)[c[rank] : c[rank + 1]]) for i, c in enumerate(cuts)]
    combiners = [item.combiner for item in part.lookups]

    def loss_of(variables):
        outputs = sok.lookup_sparse([variables[item.table] for item in part.lookups], ids, weights, combiners)
        return tf.add_n([tf.reduce_sum(o * g) for o, g in zip(outputs, incoming, strict=True)])

    def train(choices, make, change):
        """One lookup a choice and step, eagerly; with one choice a step in a tf.function."""
        variables = tables_of(call)
        optimizer = sok.OptimizerWrapper(make())

        def step(several):
            with tf.GradientTape() as tape:
                loss = 0.0
                for choice in several:
                    with contextlib.nullcontext() if choice is None else pooling(choice):
                        loss += loss_of(variables)
            gradients = change(tape.gradient(loss, variables))
            optimizer.apply_gradients(zip(gradients, variables, strict=True))

        compiled = tf.function(lambda: step([None, None]))
        for choice in choices:
            if isinstance(choice, tuple):
                step(choice)
            else:
                with pooling(choice):
                    compiled()
        return variables

    def doubled(gradients):
        return [tf.IndexedSlices(2 * g.values, g.indices, g.dense_shape) for g in gradients]

    optimizers = {
        "fused": lambda: keras.optimizers.Adagrad(0.1),
        "adam": lambda: keras.optimizers.Adam(0.1, epsilon=1e-3),
        "not fused": lambda: keras.optimizers.Adam(0.1, epsilon=1e-3, amsgrad=True),
    }
    changes = {
        "none": lambda gradients: gradients,
        "norm": lambda gradients: tf.clip_by_global_norm(gradients, 0.7)[0],
        "doubled": doubled,
        "dense": lambda gradients: [tf.convert_to_tensor(g) for g in gradients],
    }
    for name, make in optimizers.items():
        for kind, change in changes.items() if name == "fused" else [("none", changes["none"])]:
            wanted = train(["requester"] * 3, make, change)
            for choices in (["owner", "requester", "owner"], [("owner", "requester"), ("owner", "owner"), "owner"]):
                for got, table in zip(train(choices, make, change), wanted, strict=True):
                    message = f"{name}, {kind}, {choices}"
                    np.testing.assert_allclose(got, table, rtol=1e-4, atol=1e-5, err_msg=message)
    restart(gradient="mean")
    for choice in ("owner", "requester"):
        variables = tables_of(call)
        with pooling(choice), tf.GradientTape() as tape:
            loss = loss_of(variables)
        for t, gradient in enumerate(tape.gradient(loss, variables)):
            expected, terms = (
                own_rows(variables[t], call.row_gradient(t, absolute)) / sok.num_ranks() for absolute in (False, True)
            )
            reference.assert_close(tf.convert_to_tensor(gradient), expected, magnitude=terms, message=f"mean, {choice}")
    restart()


def concat():
    """One tensor for all lookups has the bits of the list, however each is pooled; so have tables trained by it.

    Batches that are not as many bags on one rank are an error on all, eagerly and in a function.
    """
    rng = np.random.default_rng(9)
    tables = (cases.Table(40, 8), cases.Table(15, 5, 1), cases.Table(23, 3, 0))
    shapes = ((0, "sum", 9, False), (1, "mean", 1, False), (0, "sqrtn", 3, True), (2, "mean", 6, False))
    items = [
        cases.random_lookup(rng, t, tables[t].num_rows, 24, longest, combiner=combiner, weighted=weighted)
        for t, combiner, longest, weighted in shapes
    ]
    call = cases.Call(tables, tuple(items), seed=4)
    rank = sok.rank()
    bags = np.linspace(0, 24, sok.num_ranks() + 1).astype(int)  # as many in each lookup
    part = [item.bags(bags[rank], bags[rank + 1]) for item in items]
    ids, weights = zip(*(ids_of(item, "ragged") for item in part), strict=True)
    incoming = [call.output_gradient(i)[bags[rank] : bags[rank + 1]] for i in range(4)]
    incoming = tf.constant(np.concatenate(incoming, 1))
    combiners = [item.combiner for item in items]

    def train(whole, compiled):
        variables = tables_of(call)
        optimizer = sok.OptimizerWrapper(tf.keras.optimizers.Adagrad(0.1))

        def step():
            with tf.GradientTape() as tape:
                given = [variables[item.table] for item in items]
                outputs = sok.lookup_sparse(given, ids, weights, combiners, concat=whole)
                outputs = outputs if whole else tf.concat(outputs, 1)
                loss = tf.reduce_sum(outputs * incoming)
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
            return outputs

        run = tf.function(step) if compiled else step
        return [run(), run(), *(table.numpy() for table in variables)]

    for choice in ("auto", "owner", "requester"):
        with pooling(choice):
            wanted = train(False, False)
            for compiled in (False, True):
                for got, expected in zip(train(True, compiled), wanted, strict=True):
                    np.testing.assert_array_equal(got, expected, err_msg=f"{choice}, compiled={compiled}")

    last = sok.num_ranks() - 1
    first, second = tables_of(call)[:2]
    good, short = (tf.ragged.constant(rows, dtype=tf.int64) for rows in ([[1], [2, 3]], [[1, 2]]))
    before = first.numpy()

    def eager(one, other):
        return sok.lookup_sparse([first, second], [one, other], concat=True)

    spec = tf.RaggedTensorSpec([None, None], tf.int64, 1)
    for look_up in (eager, tf.function(eager, input_signature=[spec] * 2)):
        try:
            look_up(good, short if rank == last else good)
        except (ValueError, tf.errors.InvalidArgumentError) as error:
            message = "lookup 1 has 1 and lookup 0 has 2" if rank == last else f"rank {last} could not"
            assert message in str(error), error
            assert isinstance(error, ValueError) == (rank == last and look_up is eager), error
        else:
            raise AssertionError("no error")
        assert look_up(good, good).shape == (2, 13)
    np.testing.assert_array_equal(first.numpy(), before)
