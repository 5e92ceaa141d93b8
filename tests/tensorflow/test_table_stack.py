# SPDX-License-Identifier: Apache-2.0
"""TableStack, and EmbeddingBagCollection with stacks: what separate tables give, at the cost of one."""

import copy
import datetime
import pickle

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import sparse_operation_kit.tensorflow as sok
from sparse_operation_kit.tensorflow.embedding import layer_class
from sparse_operation_kit.tensorflow.table_stack import Member

ROWS = {"a": 5, "b": 30, "c": 1, "d": 12}
OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "row-wise": lambda: sok.RowWiseAdagrad(0.1),
    "adam": lambda: keras.optimizers.Adam(0.1),
    "adamw": lambda: keras.optimizers.AdamW(0.1),
    "adamax": lambda: keras.optimizers.Adamax(0.1),
    "adadelta": lambda: keras.optimizers.Adadelta(0.1),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.1),
    "ftrl": lambda: keras.optimizers.Ftrl(0.1),
    "of rows": lambda: keras.optimizers.Nadam(0.1),
}


def wrapped(name):
    made = OPTIMIZERS[name]()
    return made if name == "row-wise" else sok.OptimizerWrapper(made)


def stack_and_tables(dimension=4, **options):
    shapes = {name: (rows, dimension) for name, rows in ROWS.items()}
    options = {"initializer": "normal", **options}
    tables = [sok.Variable(shape=shape, name=name, **options) for name, shape in shapes.items()]
    return sok.TableStack(shapes, **options), tables


def flat_ids(random, names=tuple(ROWS), batch=3, dtype=np.int64):
    """(flat ids, ids of each)."""
    each = []
    for name in names:
        n = random.integers(0, 4, batch)
        each.append(tf.RaggedTensor.from_row_lengths(random.integers(0, ROWS[name], n.sum()).astype(dtype), n))
    return tf.concat(each, axis=0), each


def check_rows(stack, tables):
    for member, table in zip(stack.members.values(), tables, strict=True):
        np.testing.assert_allclose(member.numpy(), table.numpy(), rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "tf.function"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_trains_as_separate_tables(name, compiled):
    random = np.random.default_rng(3)
    stack, tables = stack_and_tables()
    for member, table in zip(stack.members.values(), tables, strict=True):
        np.testing.assert_array_equal(member.numpy(), table.numpy())
    of_stack, of_tables = wrapped(name), wrapped(name)

    def step(ids, each, loss, weights, combiner):
        apart = None if weights is None else list(tf.split(weights, len(ROWS)))
        with tf.GradientTape(persistent=True) as tape:
            output = sok.lookup_sparse(stack, ids, None if weights is None else ids.with_values(weights), combiner)
            given = None if apart is None else [x.with_values(w) for x, w in zip(each, apart, strict=True)]
            expected = tf.concat(sok.lookup_sparse(tables, each, given, [combiner] * len(tables)), 1)
            total, wanted = tf.reduce_sum(output * loss), tf.reduce_sum(expected * loss)
        of_stack.apply_gradients([(tape.gradient(total, stack), stack)])
        of_tables.apply_gradients(zip(tape.gradient(wanted, tables), tables, strict=True))
        return output, expected

    run = tf.function(step) if compiled else step
    for number in range(3):
        ids, each = flat_ids(random, dtype=(np.int64, np.int32)[number % 2])
        weights = None
        if number == 2:
            each = [tf.RaggedTensor.from_row_lengths(random.integers(0, rows, 4), [1, 0, 3]) for rows in ROWS.values()]
            ids, weights = tf.concat(each, 0), tf.constant(random.integers(1, 9, 16) / 8, tf.float32)
        loss = random.standard_normal((3, 16)).astype(np.float32)
        output, expected = run(ids, each, loss, weights, ("sum", "mean", "sqrtn")[number])
        np.testing.assert_allclose(output, expected, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(stack, np.concatenate([table.numpy() for table in tables]), atol=2e-5)


@pytest.mark.parametrize("concat", [False, True])
def test_some_members_beside_tables(concat):
    random = np.random.default_rng(4)
    stack, tables = stack_and_tables()
    other = sok.Variable(random.standard_normal((9, 3)).astype(np.float32), name="other")
    ids, each = flat_ids(random, ("d", "a", "d"))
    of_other = tf.ragged.constant([[3], [], [8]], dtype=tf.int64)
    every, of_every = flat_ids(random)
    loss = random.standard_normal((3, 7 * 4 + 3)).astype(np.float32)
    with tf.GradientTape(persistent=True) as tape:
        params = [stack.choose(["d", "a", "d"]), other, stack]
        outputs = sok.lookup_sparse(params, [ids, of_other, every], combiners="sum", concat=concat)
        outputs = outputs if concat else tf.concat(outputs, 1)
        apart = [tables[3], tables[0], tables[3], other, *tables]
        expected = tf.concat(sok.lookup_sparse(apart, [*each, of_other, *of_every], combiners="sum"), 1)
        totals = [tf.reduce_sum(x * loss) for x in (outputs, expected)]
    np.testing.assert_array_equal(outputs, expected)
    found = tf.convert_to_tensor(tape.gradient(totals[0], stack))
    wanted = tf.concat([tf.convert_to_tensor(g) for g in tape.gradient(totals[1], tables)], 0)
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)


def test_gradient_of_weights():
    random = np.random.default_rng(5)
    stack, _ = stack_and_tables()
    ids, each = flat_ids(random)
    values = tf.constant(random.random(ids.values.shape[0]), tf.float32)
    with tf.GradientTape() as tape:
        tape.watch(values)
        output = sok.lookup_sparse(stack, ids, ids.with_values(values), "sum")
        total = tf.reduce_sum(output * tf.range(16.0))
    rows = np.concatenate([m.numpy()[e.values] @ np.arange(4 * i, 4 * i + 4) for i, (m, e) in enumerate(
        zip(stack.members.values(), each, strict=True)
    )])  # fmt: skip
    np.testing.assert_allclose(tape.gradient(total, values), rows, rtol=1e-4, atol=1e-5)


def test_errors():
    stack, _ = stack_and_tables()
    failed = tf.errors.InvalidArgumentError
    with pytest.raises(failed, match=r"'c': key 1 is outside \[0, 1\)"):
        sok.lookup_sparse(stack, ragged([4, 29, 1, 0]))
    with pytest.raises(failed, match="5 bags, and the stack has 4 tables"):
        sok.lookup_sparse(stack, ragged([0] * 5))
    with pytest.raises(TypeError, match=r"stack.members\[name\]"):
        sok.all2all_dense_embedding(stack, tf.constant([0]))
    for function in (sok.export, lambda table: sok.assign(table, [0], tf.zeros([1, 4]))):
        with pytest.raises(TypeError, match=r"stack.members\[name\]"):
            function(stack)
    with pytest.raises(KeyError, match="'e'"):
        stack.choose(["a", "e"])
    with pytest.raises(ValueError, match="no members"):
        stack.choose([])
    with pytest.raises(ValueError, match="'empty' has no tables"):
        sok.TableStack({}, name="empty")
    with pytest.raises(ValueError, match="one dimension"):
        sok.TableStack({"a": (3, 4), "b": (3, 5)})
    before = stack.numpy()
    for key in (12, -1):
        with pytest.raises(failed, match=r"'d'.*\[0, 12\)"):
            sok.assign(stack.member("d"), [key], tf.zeros([1, 4]))
    np.testing.assert_array_equal(stack.numpy(), before)


def ragged(keys):
    return tf.RaggedTensor.from_row_splits(tf.constant(keys, tf.int64), range(len(keys) + 1))


def test_members():
    shapes = {name: (rows, 4) for name, rows in ROWS.items()}
    stack = sok.TableStack(shapes, initializer={"a": "ones", "b": 2.0}, mode="localized:0")
    a, b, c, d = stack.members.values()
    assert (a.numpy() == 1).all() and (b.numpy() == 2).all() and 0 < abs(c.numpy()).max() <= 0.05 and d.name == "d"
    assert b.global_shape == (30, 4) and b.mode == "localized:0" and b.key_map(7) == 7 and b.shape == (30, 4)
    np.testing.assert_array_equal(tf.gather(b, [3]), [[2.0] * 4])
    sok.assign(b, [7, 0], tf.constant([[1.0] * 4, [3.0] * 4]))
    keys, rows = sok.export(b)
    assert keys.numpy().tolist() == list(range(30))
    assert rows[7].numpy().tolist() == [1.0] * 4 and rows[0].numpy().tolist() == [3.0] * 4
    assert (stack[12].numpy() == 1).all() and (a.numpy() == 1).all()
    assert sok.filter_variables([stack, tf.Variable(1.0)])[0][0] is stack
    for copied in (copy.deepcopy(stack), pickle.loads(pickle.dumps(stack))):
        np.testing.assert_array_equal(copied.member("b").numpy(), b.numpy())
        assert copied.members.keys() == stack.members.keys()
    assert "'b' [30, 4]" in repr(b)


@pytest.mark.parametrize("name", ["sgd", "adagrad", "row-wise", "adam"])
def test_a_dump_is_that_of_separate_tables(name, tmp_path):
    random = np.random.default_rng(6)
    stack, tables = stack_and_tables()
    optimizers = [wrapped(name), wrapped(name)]
    ids, each = flat_ids(random)
    for optimizer, params, given in zip(optimizers, (stack, tables), (ids, each), strict=True):
        with tf.GradientTape() as tape:
            outputs = sok.lookup_sparse(params, given)
            outputs = outputs if params is stack else tf.concat(outputs, 1)
            total = tf.reduce_sum(outputs * tf.range(16.0))
        variables = [stack] if params is stack else tables
        optimizer.apply_gradients(zip(tape.gradient(total, variables), variables, strict=True))
    sok.dump(tmp_path / "stack", [stack], optimizers[0])
    sok.dump(tmp_path / "tables", tables, optimizers[1])
    files = {path.name: path.read_bytes() for path in (tmp_path / "tables").iterdir() if "manifest" not in path.name}
    assert len(files) >= 8
    for file, content in files.items():
        assert (tmp_path / "stack" / file).read_bytes() == content, file
    new_stack, new_tables = stack_and_tables(initializer="zeros")
    new = [wrapped(name), wrapped(name)]
    sok.load(tmp_path / "tables", [new_stack], new[0])
    sok.load(tmp_path / "stack", new_tables, new[1])
    check_rows(stack, new_tables)
    np.testing.assert_array_equal(new_stack.numpy(), stack.numpy())
    sok.dump(tmp_path / "again", new_stack.member("b"), new[0])
    for file in (tmp_path / "again").iterdir():
        if "manifest" not in file.name:
            assert file.read_bytes() == files[file.name], file


def test_changed_rows_of_members():
    stack, _ = stack_and_tables()
    optimizer = sok.OptimizerWrapper(keras.optimizers.SGD(0.1))
    sok.track_changes([stack])
    since = datetime.datetime.now(datetime.timezone.utc)
    ids = tf.ragged.constant([[4], [29, 3], [0], [7]], dtype=tf.int64)
    with tf.GradientTape() as tape:
        total = tf.reduce_sum(sok.lookup_sparse(stack, ids))
    optimizer.apply_gradients([(tape.gradient(total, stack), stack)])
    sok.assign(stack.member("d"), [2], tf.zeros([1, 4]))
    keys, values = sok.incremental_model_dump([stack], since)
    assert [each.tolist() for each in keys] == [[4], [3, 29], [0], [2, 7]]
    copied, separate = stack_and_tables()
    sok.load_incremental((keys, values), [copied])
    sok.load_incremental((keys, values), separate)
    np.testing.assert_array_equal(copied.numpy(), stack.numpy())
    check_rows(stack, separate)
    (of_d,), _ = sok.incremental_model_dump(stack.member("d"), since)
    assert of_d.tolist() == [2, 7]


class KeyedJaggedTensor:
    """What TorchRec's has of this name."""

    def __init__(self, names, values, offsets, weights=None):
        self._parts = (names, values, offsets, weights)

    def keys(self):
        return self._parts[0]

    def values(self):
        return self._parts[1]

    def offsets(self):
        return self._parts[2]

    def weights_or_none(self):
        return self._parts[3]


SHAPES = {"a": (5, 4), "b": (30, 4), "narrow": (7, 2), "c": (6, 4)}
FEATURES = {"x": "b", "y": "narrow", "z": "a", "u": "b", "v": "c"}


def collections(module=keras, **options):
    options = {"combiners": {"x": "sum", "y": "mean", "z": "sum", "u": "mean", "v": "sum"}, **options}
    return [layer_class(module)(SHAPES, FEATURES, stack=stack, **options) for stack in (True, False)]


def feature_ids(random, kind, batch=3):
    if kind == "dense":
        return {f: tf.constant(random.integers(0, SHAPES[t][0], (batch, 2))) for f, t in FEATURES.items()}
    ids = {}
    for feature, table in FEATURES.items():
        lengths = random.integers(0, 3, batch)
        keys = tf.constant(random.integers(0, SHAPES[table][0], lengths.sum()))
        ids[feature] = tf.RaggedTensor.from_row_lengths(keys, lengths)
    if kind == "sparse":
        return {feature: each.to_sparse() for feature, each in ids.items()}
    return ids


@pytest.mark.parametrize("kind", ["dense", "ragged", "sparse", "weighted", "uneven", "mixed"])
@pytest.mark.parametrize(("module", "concat"), [(keras, False), (keras, True), (tf_keras, False)])
def test_a_collection_stacks_its_tables(module, concat, kind):
    random = np.random.default_rng(7)
    stacked, apart = collections(module, concat=concat and kind != "uneven")
    assert sorted(v.shape[0] for v in stacked.trainable_variables) == [7, 41] and len(apart.trainable_variables) == 4
    assert list(stacked.tables) == list(apart.tables) == list(SHAPES)
    for name in SHAPES:
        np.testing.assert_array_equal(stacked.tables[name].numpy(), apart.tables[name].numpy())
    assert isinstance(stacked.tables["a"], Member) and not isinstance(stacked.tables["narrow"], Member)
    make = module.optimizers.Adagrad
    optimizers = [sok.OptimizerWrapper(make(0.1)), sok.OptimizerWrapper(make(0.1))]
    for _ in range(2):
        ids = feature_ids(random, kind)
        weights = None
        if kind == "uneven":
            ids["u"] = tf.ragged.constant([[3]], dtype=tf.int64)
        if kind == "mixed":
            ids["z"] = ids["z"].to_sparse()
        if kind == "weighted":
            weights = {"x": ids["x"].with_values(tf.random.uniform(ids["x"].values.shape))}
        results = []
        for layer, optimizer in zip((stacked, apart), optimizers, strict=True):
            with tf.GradientTape() as tape:
                output = layer(ids, weights)
                if not layer.concat:
                    assert list(output) == list(FEATURES)
                    output = tf.concat([tf.reshape(vector, [-1]) for vector in output.values()], 0)
                total = tf.reduce_sum(output**2)
            variables = layer.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(total, variables), variables, strict=True))
            results.append(output.numpy())
        np.testing.assert_array_equal(*results)
        for name in SHAPES:
            np.testing.assert_allclose(stacked.tables[name].numpy(), apart.tables[name].numpy(), rtol=1e-5, atol=1e-6)


def test_batches_of_unknown_size():
    stacked, apart = collections(concat=True)
    signature = tf.RaggedTensorSpec([None, None], tf.int64)
    run = [tf.function(layer, input_signature=[dict.fromkeys(FEATURES, signature)]) for layer in (stacked, apart)]
    random = np.random.default_rng(10)
    for batch in (2, 5):
        ids = feature_ids(random, "ragged", batch)
        np.testing.assert_array_equal(run[0](ids), run[1](ids))
    ids["u"] = ids["u"][:1]
    with pytest.raises(tf.errors.InvalidArgumentError):
        run[0](ids)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", ["ragged", "sparse"])
def test_ids_that_do_not_fit_their_feature(kind, compiled):
    """They would be another feature's."""
    layer, _ = collections()
    call = tf.function(layer) if compiled else layer
    ids = feature_ids(np.random.default_rng(11), kind)
    call(ids)
    if kind == "sparse":
        ids["z"] = tf.SparseTensor([[3, 0]], tf.constant([1], tf.int64), [3, 1])
        message = "feature 'z'"
    else:
        values = tf.constant([1, 2, 3], tf.int64)
        ids["z"] = tf.RaggedTensor.from_row_splits(values, tf.constant([0, 1, 1, 2], tf.int64), validate=False)
        message = "row_splits"
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        call(ids)
        sok.check_errors()  # of a tf.function on a GPU the next call would say it


def test_ids_in_one_tensor():
    random = np.random.default_rng(8)
    ids = feature_ids(random, "ragged")
    for names in (list(FEATURES), ["v", "y", "u", "z", "x"]):
        every = tf.concat([ids[name] for name in names], 0)
        weights = tf.random.uniform(every.values.shape)
        ends = np.cumsum([0, *(len(ids[name].values) for name in names)])
        apart = {n: ids[n].with_values(weights[a:b]) for n, a, b in zip(names, ends, ends[1:], strict=False)}
        for layer in collections():
            outputs, expected = layer(KeyedJaggedTensor(names, every.values, every.row_splits)), layer(ids)
            for name in FEATURES:
                np.testing.assert_array_equal(outputs[name], expected[name])
            outputs = layer(KeyedJaggedTensor(names, every.values, every.row_splits, weights))
            expected = layer(ids, apart)
            for name in FEATURES:
                np.testing.assert_array_equal(outputs[name], expected[name])
    layer = sok.EmbeddingBagCollection({"a": (5, 4), "b": (30, 4)}, concat=True)
    keyed = KeyedJaggedTensor(["a", "b"], tf.constant([4, 29, 3]), tf.constant([0, 1, 1, 2, 3]))
    assert layer(keyed).shape == (2, 8)
    with pytest.raises(TypeError, match="weights_or_none"):
        layer.call(keyed, {"a": tf.ones([1])})
    with pytest.raises(tf.errors.InvalidArgumentError, match="'a': key 5"):
        layer(KeyedJaggedTensor(["a", "b"], tf.constant([5, 5]), tf.constant([0, 1, 2])))


@pytest.mark.parametrize("stack", [True, False])
def test_dtypes_of_ids_and_weights(stack):
    """Ids of a feature are never cast to what those of another one are, nor weights."""
    layer = sok.EmbeddingBagCollection({"a": (5, 4), "b": (30, 4)}, stack=stack, combiners="sum", initializer="ones")
    good = {"a": tf.constant([[1]], tf.int64), "b": tf.constant([[1]], tf.int32)}
    np.testing.assert_array_equal(layer(good)["b"], np.ones((1, 4)))
    for dtype in (tf.float32, tf.float64, tf.uint8, tf.uint64, tf.int16, tf.bool):
        ids = tf.cast([[1.9]], dtype)
        for wrong in (ids, tf.RaggedTensor.from_tensor(ids), tf.SparseTensor([[0, 0]], ids[0], [1, 1])):
            for name, other in (("a", "b"), ("b", "a")):
                with pytest.raises(TypeError, match=f"'{name}'.* must be int32 or int64, got {dtype.name}"):
                    layer.call({name: wrong, other: good[other]})
        with pytest.raises(TypeError, match=f"must be int32 or int64, got {dtype.name}"):
            layer.call({"a": ids, "b": ids})
    for dtype in (tf.float64, tf.float16):
        weighted = layer(good, {"a": tf.constant([[0.5]]), "b": tf.constant([[1.5]], dtype)})
        np.testing.assert_array_equal(weighted["b"], np.full((1, 4), 1.5))
    for given in ({"b": tf.constant([[2]])}, {"a": tf.constant([[0.5]]), "b": tf.constant([[2]], tf.int64)}):
        with pytest.raises(TypeError, match=f"'b'.* must be floating, got {given['b'].dtype.name}"):
            layer.call(good, given)
    with pytest.raises(TypeError, match=r"'b'.* got a NoneType"):
        layer.call({"a": good["a"], "b": None})
    with pytest.raises(TypeError, match="must be int32 or int64, got float32"):
        tf.function(layer)({"a": good["a"], "b": tf.constant([[1.9]])})
    for kept in (keras, tf_keras):
        inputs = {name: kept.Input((1,), dtype=dtype, name=name) for name, dtype in (("a", "int64"), ("b", "float32"))}
        with pytest.raises(TypeError, match="must be int32 or int64, got float32"):
            other = layer_class(kept)({"a": (5, 4), "b": (30, 4)}, stack=stack)
            kept.Model(inputs, other(inputs))({"a": good["a"], "b": tf.constant([[1.9]])})


@pytest.mark.parametrize("stack", [True, False])
def test_ids_in_one_tensor_that_do_not_fit_its_keys(stack):
    layer = sok.EmbeddingBagCollection({"b": (5, 4), "a": (30, 4)}, stack=stack, initializer="normal")
    values, offsets = tf.constant([1, 2, 3]), tf.constant([0, 1, 2, 3])
    for names in (["a", "b"], []):
        with pytest.raises(ValueError, match=r"offsets of 4 entries are not those of as many bags for each of \["):
            layer(KeyedJaggedTensor(names, values, offsets))
    with pytest.raises(ValueError, match="offsets of 4 entries"):
        tf.function(lambda: layer(KeyedJaggedTensor(["a", "b"], values, offsets)))()

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)] * 2)
    def of_any_size(values, offsets):
        return layer(KeyedJaggedTensor(["a", "b"], values, offsets))

    with pytest.raises(tf.errors.InvalidArgumentError, match=r"offsets .* as many bags for each of"):
        of_any_size(tf.cast(values, tf.int64), tf.cast(offsets, tf.int64))
    outputs = of_any_size(tf.constant([1, 2], tf.int64), tf.constant([0, 1, 2], tf.int64))
    np.testing.assert_array_equal(outputs["a"][0], layer.tables["a"].numpy()[1])
    np.testing.assert_array_equal(outputs["b"][0], layer.tables["b"].numpy()[2])


@pytest.mark.parametrize("module", [keras, tf_keras])
def test_weight_files_are_of_single_tables(module, tmp_path):
    stacked, apart = collections(module, initializer="normal")
    other, separate = collections(module, initializer="zeros")
    ids = feature_ids(np.random.default_rng(9), "dense")

    def model(layer):
        inputs = {name: module.Input([2], dtype="int64", name=name) for name in FEATURES}
        return module.Model(inputs, layer(inputs))

    model(stacked).save_weights(tmp_path / "stacked.weights.h5")
    model(apart).save_weights(tmp_path / "apart.weights.h5")
    model(other).load_weights(tmp_path / "apart.weights.h5")
    model(separate).load_weights(tmp_path / "stacked.weights.h5")
    for name in SHAPES:
        np.testing.assert_array_equal(other.tables[name].numpy(), stacked.tables[name].numpy())
        np.testing.assert_array_equal(separate.tables[name].numpy(), apart.tables[name].numpy())
    again = type(stacked).from_config(stacked.get_config())
    assert isinstance(again.tables["a"], Member)
    assert not isinstance(type(apart).from_config(apart.get_config()).tables["a"], Member)
    assert set(again(ids)) == set(FEATURES)
