# SPDX-License-Identifier: Apache-2.0
"""lookup_sparse and all2all_dense_embedding."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import resource_variable_ops

from sparse_operation_kit.arguments import COMBINERS, check_lookup
from sparse_operation_kit.tensorflow import control_flow, devices, keras_compat, runtime, sok2, stored
from sparse_operation_kit.tensorflow import ids as _ids
from sparse_operation_kit.tensorflow._autograph import as_written
from sparse_operation_kit.tensorflow._ops import ops
from sparse_operation_kit.tensorflow.call import NO_MEMBERS, Lookups, Members, Tables, distinct
from sparse_operation_kit.tensorflow.exchange import Exchange
from sparse_operation_kit.tensorflow.ids import Batch
from sparse_operation_kit.tensorflow.table_stack import Selection, members_of, refuse_stack, table_of
from sparse_operation_kit.tensorflow.table_variable import TableVariable, as_table, is_table

_TRAINED: Mapping[str, bool] = MappingProxyType({"admit": True, "filter": False})
"""Which new keys of dynamic tables get rows, as SokLocate has it: those of a lookup that trains."""


@sok2.keywords(use_filter="use_low_frequency_filter")
@as_written
def lookup_sparse(
    params: Any,
    sp_ids: Any,
    sp_weights: Any = None,
    combiners: Any = None,
    use_low_frequency_filter: bool = False,
    *,
    training: bool = True,
    concat: bool = False,
) -> Any:
    """Looks up rows by key and pools those of each bag; all tables of a call travel together.

    Every rank must make the same calls in the same order, with its own batch, which may be empty. So where a call is in
    a branch of tf.cond or tf.switch_case, all ranks must take the same branch; a loop must have as many rounds on all
    of them, and tf.while_loop takes parallel_iterations=1, or the rounds may overtake each other.

    Args:
      params: a table (`sok.Variable` or `sok.DynamicVariable`), a `sok.TableStack` or what its `choose` gives, or a
        list of them in which a table may occur several times. A single value is a list of one here and in the other
        arguments; a combiner alone is that of all lookups.
      sp_ids: for each table a 2-D `tf.SparseTensor` or `tf.RaggedTensor` of int32 or int64 keys, in [0, rows) for a
        static table; row i is bag i. Entries of a sparse tensor may come in any order. Those of a stack are flat:
        members * batch rows.
      sp_weights: for each table None or the weights of its keys, of the same kind and shape as the ids, floating. None:
        1. Gradients flow to them; a process alone reads the rows again for it, so take it before tables change.
      combiners: "sum", "mean" (the default) or "sqrtn", in any case: with weights w and rows r a bag gives sum(w r),
        sum(w r) / sum(w), or sum(w r) / sqrt(sum(w^2)). An empty bag, and one whose divisor is 0, gives zeros.
      use_low_frequency_filter: whether new keys of dynamic tables get rows with the probability `filter_ratio` of
        their table alone. Others read their initial values, and their gradients are dropped. use_filter is another name
        for it.
      training: for dynamic tables; static ones ignore it. True: keys that the table lacks are inserted, with their
        initial rows. False: such keys read these, the table does not change, and no gradient goes to it.
      concat: True: one tensor with the vectors of all lookups side by side, as tf.concat(..., axis=1) of the list would
        make it, but without the copy, and with less of the host's time where tables are many. All lookups must have as
        many bags.

    Returns:
      [local batch, dimension] float32, of a stack [local batch, members * dimension], or a list of them when `sp_ids`
      is one; with `concat` [local batch, sum of dimensions]. The gradient of a table is a `tf.IndexedSlices` over this
      rank's rows, summed over all ranks (see init(gradient=...)).

    Raises:
      RuntimeError: before init().
      NotImplementedError: inside a function that XLA compiles. (On a GPU `model.compile` of Keras 3 chooses XLA by
        itself unless a layer says no, as EmbeddingBagCollection does: give it jit_compile=False.)
      TypeError: params that are not tables, ids that are not sparse or ragged tensors of int32 or int64, weights of
        another kind than the ids.
      ValueError: lists of different lengths, an unknown combiner, ids that are not 2-D, weights of another shape,
        tables on different devices, `concat` of batches of different sizes.
      tf.errors.ResourceExhaustedError: a dynamic table has no room for the keys that are new; nothing has changed.
      tf.errors.InvalidArgumentError: a key outside its table; weights of another shape, or batches of different sizes
        with `concat`, that are known only when it runs.
        With several ranks all of them raise it, and no table changes. On a GPU it is raised later, before tables are
        used again: see `check_errors`.

    Example::

        table = sok.Variable(shape=(1000, 16), initializer="uniform", name="items")
        ids = tf.ragged.constant([[1, 5], [], [7, 7, 7]], dtype=tf.int64)
        sok.lookup_sparse(table, ids, combiners="sum")  # [3, 16]
    """
    return pooled(params, sp_ids, sp_weights, combiners, use_low_frequency_filter, training=training, concat=concat)


def pooled(
    params: Any,
    sp_ids: Any,
    sp_weights: Any,
    combiners: Any,
    use_low_frequency_filter: bool = False,
    *,
    training: bool = True,
    concat: bool = False,
    messages: Sequence[tf.Tensor] = (),
) -> Any:
    """`lookup_sparse`. messages: of `message_unless`; where one is not empty the call is refused, on all ranks."""
    state = runtime.get_in_strategy()
    _refuse_xla()
    with tf.name_scope("sok_lookup"):
        with _together(state, params):
            arguments = check_lookup(params, sp_ids, sp_weights, combiners)
            tables = [table_of(param) for param in arguments.params]
            members = Members.of([members_of(param) for param in arguments.params])
            batches, message = _ids.prepare(
                tables, arguments.ids, arguments.weights, defer_errors=state.exchange is not None
            )
            if concat:
                _ids.check_bags_are_as_many(batches, message, members.counts)
        codes = [COMBINERS[combiner] for combiner in arguments.combiners]
        if training:
            keras_compat.warn_in_layers(tables)
        train = {"admit": True, "filter": bool(use_low_frequency_filter)} if training else None
        checks = []
        if state.exchange is None:
            checks = [tf.debugging.Assert(tf.equal(each, ""), [each]) for each in messages]
        with tf.control_dependencies(checks) if checks else contextlib.nullcontext():
            told = [*messages, *([] if message is None else [message])]
            outputs = _lookup(state, tables, batches, codes, told, bool(concat), train, members)
    return outputs if arguments.was_list and not concat else outputs[0]


@as_written
def all2all_dense_embedding(param: Any, indices: Any) -> Any:
    """Looks up one row for each index; otherwise as `lookup_sparse`.

    Args:
      param: a table, or a list of them, which are looked up together; one may occur several times. A dynamic one
        inserts the keys that it lacks.
      indices: int32 or int64 keys of any shape; see there. As many as there are tables, in a list, where `param` is
        one.

    Returns:
      indices.shape + [dimension], float32, or a list of these.

    Raises:
      As `lookup_sparse`.
    """
    state = runtime.get_in_strategy()
    _refuse_xla()
    single = not isinstance(param, (list, tuple))
    params = [param] if single else param
    with tf.name_scope("sok_dense_lookup"):
        with _together(state, params):
            given = [indices] if single else indices
            if not isinstance(given, (list, tuple)):
                raise TypeError(f"param is a list, so indices must be one, got {type(indices).__name__}")
            if not params or len(given) != len(params):
                raise ValueError(f"indices has {len(given)} entries, but param has {len(params)} tables")
            for each in params:
                refuse_stack(each, "all2all_dense_embedding")
            tables = [as_table(each) for each in params]
            batches, keys = zip(*map(_ids.dense, tables, given), strict=True)
        keras_compat.warn_in_layers(tables)
        rows = _lookup(state, tables, batches, [COMBINERS["sum"]] * len(tables), ())
        return _shaped(rows[0], keys[0]) if single else list(map(_shaped, rows, keys))


def message_unless(condition: tf.Tensor, make: Callable[[], tf.Tensor]) -> tf.Tensor:
    """What `make` gives, the reason why a lookup is refused, a string; empty where the condition holds."""
    with devices.on_host():
        return tf.cond(condition, lambda: tf.constant(""), make)


def _shaped(rows: tf.Tensor, keys: tf.Tensor) -> tf.Tensor:
    """keys.shape + [dimension] from [number of keys, dimension]."""
    result = tf.reshape(rows, tf.concat([tf.shape(keys), [rows.shape[1]]], axis=0))
    result.set_shape(keys.shape.concatenate(rows.shape[1:]))
    return result


def own_rows(table: TableVariable, keys: Any) -> tf.Tensor:
    """Rows of a dynamic table's part on this rank, by keys of any shape, keys.shape + [dimension] float32; no other
    rank takes part. Inserts keys that it lacks.

    Raises TypeError, and tf.errors.InvalidArgumentError for a key of another rank.
    """
    _refuse_xla()
    batch, indices = _ids.dense(table, keys)
    resource_variable_ops.variable_accessed(table)
    lookups = Lookups.of([batch], [0], [COMBINERS["sum"]], NO_MEMBERS)
    with stored.alone([table], [batch.keys]):
        stored.bring(table, batch.keys)
        handles = [control_flow.handle(table)]
        outputs = _lookup_here(handles, Tables.of([table]), lookups, 1, by_key=False, train=_TRAINED)
        (rows,) = _after_which_steps_end([table], outputs)
    return tf.reshape(rows, tf.concat([tf.shape(indices), [table.placement.dimension]], axis=0))


def _refuse_xla() -> None:
    if devices.is_in_xla():
        raise NotImplementedError(
            "lookups of tables cannot be compiled by XLA: use jit_compile=False in tf.function and in model.compile "
            "(on a GPU Keras 3 turns XLA on by itself)"
        )


def together(params: Sequence[Any]) -> contextlib.AbstractContextManager[None]:
    """For what is made of inputs before they are looked up in `params`: what it refuses the other ranks are told, as by
    the lookup itself.
    """
    return _together(runtime.get_in_strategy(), params)


@contextlib.contextmanager
def _together(state: runtime.Runtime, params: Any, has_met: bool = False) -> Iterator[None]:
    """Tells the other ranks when this one refuses its arguments, so that all raise instead of waiting for it.

    has_met: the ranks have exchanged what they look up in tables with stores.

    Only eagerly: while a tf.function is traced nothing can be sent. There the process that raised has to end, and
    the engine then ends the others.
    """
    try:
        yield
    except Exception:
        if state.exchange is not None and tf.executing_eagerly():
            # What is no table stands where the other ranks have one. The first names the exchange: without it there is
            # nothing the others could be told.
            listed = [_raw(param) for param in (params if isinstance(params, (list, tuple)) else [params])]
            stores = [] if has_met else list(filter(stored.has_store, listed))
            if stores:
                stored.tell_peers(state, stores[0], "store")
            elif listed and isinstance(listed[0], TableVariable):
                columns = len(set(map(id, listed))) + 2 * len(listed) + 1  # those of SokRoute's counts
                sent = np.zeros((state.num_ranks, columns), np.int64)
                sent[:, -1] = 1
                with devices.beside(listed[0]):
                    state.exchange.swap_counts(tf.constant(sent), f"{_exchange_name(Tables.of(listed[:1]))}_counts")
        raise


def _raw(param: Any) -> Any:
    """The table that `param` is or wraps; anything else as it is."""
    return table_of(param) if is_table(param) or isinstance(param, Selection) else param


def _exchange_name(tables: Tables) -> str:
    """Ranks meet by the names of the exchanges. In a graph TensorFlow makes them unique, alike on all ranks."""
    return "sok_" + tables.names[0].replace("/", "_")


def _lookup(
    state: runtime.Runtime,
    tables: Sequence[TableVariable],
    batches: Sequence[Batch],
    combiners: Sequence[int],
    messages: Sequence[tf.Tensor],
    concat: bool = False,
    train: Mapping[str, bool] | None = _TRAINED,
    members: Members = NO_MEMBERS,
) -> list[tf.Tensor]:
    """The outputs of the lookups, or one of all of them.

    train: which new keys of dynamic tables get rows, as SokLocate has it; None: rows are read by key.
    """
    looked_up = stored.given(state, tables, batches)
    with stored.alone(tables, [keys for _, keys in looked_up]):
        if looked_up:
            with _together(state, tables, has_met=True):
                tables = stored.prepare(looked_up, tables, train is not None)
        variables, positions = distinct(tables)
        for table in variables:
            _check_ranks(table, state)
            resource_variable_ops.variable_accessed(table)  # lets tapes watch it, as any read does
        devices.check_together(variables)
        described, lookups = Tables.of(variables), Lookups.of(batches, positions, combiners, members)
        num_outputs = 1 if concat else len(batches)
        by_key = bool(described.indexed) and train is None
        handles = [control_flow.handle(table) for table in variables]
        if state.exchange is None:
            outputs = _lookup_here(handles, described, lookups, num_outputs, by_key, train or {})
        else:
            outputs = _lookup_everywhere(
                state.exchange, variables, handles, described, lookups, messages, num_outputs, by_key, train or {}
            )
        reads_again = state.exchange is None and bool(lookups.weights)  # for the gradient of the weights
        if by_key or reads_again:
            return outputs
        return _after_which_steps_end([variables[i] for i in described.indexed], outputs)


def _after_which_steps_end(tables: Sequence[TableVariable], outputs: list[tf.Tensor]) -> list[tf.Tensor]:
    """The outputs of a lookup in training, which is a step of the dynamic tables that nothing trains: no optimizer will
    say so, and until then keys that were refused rows keep slots. Not in branches and loops: tapes would go back
    through the table there.
    """
    frozen = [table for table in tables if not table.trainable]
    if not frozen or control_flow.is_within():
        return outputs
    with tf.control_dependencies(outputs):
        ended = [table.end_step() for table in frozen]
    if tf.executing_eagerly():
        return outputs
    with tf.control_dependencies(ended):
        return [tf.identity(output) for output in outputs]


def _lookup_here(
    handles: Sequence[Any],
    tables: Tables,
    lookups: Lookups,
    num_outputs: int,
    by_key: bool,
    train: Mapping[str, bool],
) -> list[tf.Tensor]:
    """What this rank holds."""
    generations: list[tf.Tensor] = []
    if tables.indexed and not by_key:
        lookups, generations = _inserted(handles, tables, lookups, num_outputs < len(lookups.tables), train)
    elif lookups.members.counts:
        lookups = _located(tables, lookups)
    return list(
        ops.sok_gather_combine(
            tables=handles,
            generations=generations,
            num_outputs=num_outputs,
            by_key=by_key,
            **lookups.arguments(),
            **tables.attributes(),
        )
    )


def _located(tables: Tables, lookups: Lookups) -> Lookups:
    """The lookups with slots in place of the keys of stacks."""
    stacked, places = lookups.of_stacks()
    static = sorted(set(stacked.tables))
    stacked = dataclasses.replace(stacked, tables=list(map(static.index, stacked.tables)))
    own = tables.only(*static).counted_attributes()
    slots = ops.sok_insert(indexed_tables=[], concat=False, **stacked.arguments(), **own).slots
    keys = list(lookups.keys)
    for i, found in zip(places, slots, strict=True):
        keys[i] = found
    return dataclasses.replace(lookups, keys=keys)


def checked_ids(ids: tf.Tensor, rows: int, name: str) -> tf.Tensor:
    """Ids of any shape in a table that TensorFlow alone knows, int64. On a GPU those outside [0, rows) become -1, and
    the next call that uses tables raises what is wrong, or `check_errors`.

    Raises tf.errors.InvalidArgumentError on the CPU.
    """
    batch = Batch(tf.reshape(ids, [-1]), tf.constant([], tf.int64))
    members = Members((1,), (name,), (0,), (rows,))
    tables = Tables((name,), (rows,), (1,), (0,), 1, 0)
    (slots,) = _located(tables, Lookups.of([batch], [0], [COMBINERS["sum"]], members)).keys
    return tf.reshape(slots, tf.shape(ids))


def _inserted(
    handles: Sequence[Any], tables: Tables, lookups: Lookups, concat: bool, train: Mapping[str, bool]
) -> tuple[Lookups, list[tf.Tensor]]:
    """The lookups with slots in place of keys, which dynamic tables hold all of then, and the generations of the slots
    of these.
    """
    located = ops.sok_insert(
        indexed_tables=[handles[table] for table in tables.indexed],
        concat=concat,
        **train,
        **lookups.arguments(),
        **tables.counted_attributes(),
    )
    return dataclasses.replace(lookups, keys=list(located.slots)), [located.generations]


def _lookup_everywhere(
    exchange: Exchange,
    variables: Sequence[TableVariable],
    handles: Sequence[Any],
    tables: Tables,
    lookups: Lookups,
    messages: Sequence[tf.Tensor],
    num_outputs: int,
    by_key: bool,
    train: Mapping[str, bool],
) -> list[tf.Tensor]:
    """The stages in turn: route, exchange, locate, gather, exchange, combine.

    Where dynamic tables insert, the ranks agree that all of them could, before rows travel.

    The stages run beside the tables, also those that take none of them; where the exchange runs is its own affair.
    Which lookups are pooled here and which at the owner is decided when they run; the exchanges are the same.
    """
    attributes = tables.counted_attributes()
    name = _exchange_name(tables)
    concat = num_outputs < len(lookups.tables)
    with devices.beside(variables[0]):
        routed = ops.sok_route(
            batch_messages=list(messages), table=handles[0], concat=concat, **lookups.arguments(), **attributes
        )
    sent, received = exchange.swap_counts(routed.counts, name=f"{name}_counts")
    with devices.beside(variables[0]):
        sizes = ops.sok_exchange_sizes(
            sent=sent,
            received=received,
            message=routed.message,
            unique_keys=routed.unique_keys,
            bag_keys=routed.bag_keys,
            bag_splits=routed.bag_splits,
            dimensions=attributes["dimensions"],
            lookup_tables=lookups.tables,
            rank=tables.rank,
        )
    keys = exchange.all_to_all(sizes.keys, sizes.key_send_splits, sizes.key_receive_splits, name=f"{name}_keys")
    with devices.beside(variables[0]):
        inputs = {
            "indexed_tables": [] if by_key else [handles[table] for table in tables.indexed],
            "keys": keys,
            "counts": received,
            "lookup_tables": lookups.tables,
            **tables.counted_attributes(),
        }
        located = ops.sok_locate(**inputs, **train)
    slots = located.slots
    if tables.indexed and not by_key:
        slots = exchange.agree(located, functools.partial(_agreed, located, inputs), f"{name}_located")
    with devices.beside(variables[0]):
        rows = ops.sok_gather(
            tables=handles,
            slots=slots,
            bag_splits=located.bag_splits,
            counts=received,
            generations=[located.generations] if tables.indexed and not by_key else [],
            lookup_tables=lookups.tables,
            by_key=by_key,
            **tables.attributes(),
        )
    rows = exchange.all_to_all(rows, sizes.row_send_splits, sizes.row_receive_splits, name=f"{name}_rows")
    with devices.beside(variables[0]):
        outputs = ops.sok_combine(
            rows=rows,
            inverse=routed.inverse,
            order=routed.order,
            unique_splits=routed.unique_splits,
            requests=sent,
            num_outputs=num_outputs,
            **lookups.arguments(),
            **attributes,
        )
    return list(outputs)


def _agreed(located: Any, inputs: Mapping[str, Any], received: tf.Tensor) -> tf.Tensor:
    """SokAgreed; inputs: those of SokLocate."""
    return ops.sok_agreed(
        slots=located.slots, failed=located.failed, message=located.message, received=received, **inputs
    )


def _check_ranks(table: TableVariable, state: runtime.Runtime) -> None:
    if table.placement.num_ranks != state.num_ranks:
        raise ValueError(
            f"table '{table.table_name}' was made for {table.placement.num_ranks} ranks, but there are "
            f"{state.num_ranks}"
        )
