# SPDX-License-Identifier: Apache-2.0
"""lookup_sparse and all2all_dense_embedding: one call, all tables together (docs/ARCHITECTURE.md)."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sparse_operation_kit.arguments import COMBINERS, check_lookup
from sparse_operation_kit.torch import call as _call
from sparse_operation_kit.torch import graph_lookup as _graph_lookup  # noqa: F401  # its operators
from sparse_operation_kit.torch import ids as _ids
from sparse_operation_kit.torch import runtime, stored
from sparse_operation_kit.torch.compiling import is_exporting, may_break
from sparse_operation_kit.torch.table_parameter import TableParameter
from sparse_operation_kit.torch.table_stack import refuse_stack, table_of


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
    """Looks bags of ids up in tables and combines each bag to one vector.

    All tables of a call travel together: several ranks need one exchange of keys and one of rows, whatever the number
    of tables. Where bags hold many keys, the ranks that own their rows sum them, and the sums travel. With several
    ranks every rank must make the call (and run backward through it), an empty batch included, with the same tables in
    the same order.

    The tables of a call are on one device; ids and weights from elsewhere are copied there. On a GPU the call returns
    before the work is done, and an id outside its table is raised later: by the next call that uses tables there, at
    the latest before an optimizer changes one, or by :func:`check_errors`. Nothing has changed then.

    Args:
      params: a :class:`Variable`, a :class:`DynamicVariable`, a :class:`TableStack` or what its `choose` gives, or a
        list of them; one may occur several times.
      sp_ids: one or as many: 2-D sparse COO tensors (uncoalesced, unsorted and duplicate entries are ids like any
        other), jagged nested tensors, pairs ``(values [n], offsets [batch + 1])``, or objects with ``.values()`` and
        ``.offsets()``; int32 or int64, each in [0, rows of the table), or any for a dynamic
        table (int32 ones where its key_type is int32). Those of a stack are flat: offsets [members * batch + 1].
      sp_weights: None, or one or as many (None among them: weights of 1), floating point, differentiable: of the same
        kind as the ids or 1-D tensors with one weight an id.
      combiners: "sum", "mean" (sum(w r) / sum(w)) or "sqrtn" (sum(w r) / sqrt(sum(w^2))), any case; one for all or one
        a table. None is "mean". An empty bag, and one whose divisor is 0, gives zeros.
      use_low_frequency_filter: whether new keys of dynamic tables get rows with the probability `filter_ratio` of
        their table alone. Others read their initial values, and their gradients are dropped.
      training: for dynamic tables; static ones ignore it. True: a key that the table does not hold gets a row, where
        the table's gradient is recorded (it requires one, and not under torch.no_grad()). False, or where none is
        recorded: such a key reads its initial value, the table does not change, and no gradient goes to it.
      concat: True: one tensor with the vectors of all lookups side by side, as torch.cat(..., dim=1) of the list would
        make it, but without the copy and, where tables are many, in half of the host's time. All lookups must have as
        many bags.

    Returns:
      [batch, dimension] float32, of a stack [batch, members * dimension]; a list of them when params is a list; with
      `concat` [batch, sum of dimensions]. This rank's batch; ranks may differ in it.

    Gradients: a table's is a :class:`~sparse_operation_kit.torch.gradient.PendingGradient`, which OptimizerWrapper
    applies in place and other optimizers see as a sparse COO tensor over this rank's rows. Rows are summed over all
    ranks (divided by their number after ``init(gradient="mean")``). With several ranks each sees the gradients of its
    own rows: for scaled losses take torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler, which asks all ranks
    whether a step is skipped (torch.amp.GradScaler does not), and clip by :func:`clip_grad_norm_` of this package:
    PyTorch's own would scale the dense parameters of each rank by another factor.

    Ids, offsets and weights may be a buffer that the next batch is written into after backward(), before the optimizer
    steps, by PyTorch, or at any time by others (NumPy): the gradient is that of the ids that were looked up. Where
    PyTorch would not notice it otherwise they are copied, and where they were not backward() or the step raises.

    Under torch.export, in a process alone, tables in an :class:`EmbeddingBagCollection` are looked up, without
    gradients.

    Under torch.compile a lookup is part of the graph; one that records gradients only with fullgraph=True, else it runs
    between compiled parts (a graph break), which is quicker. Sparse COO ids, and tables with hooks in training, always
    do.

    Raises:
      RuntimeError: before init(); another rank failed in this call (PeerError).
      TypeError: params that are not tables, ids that are not integers, weights that are not floating point.
      ValueError: lengths or shapes that do not fit, an unknown combiner, a table moved to another dtype.
      IndexError: an id outside its table; the message names table, id and range. Nothing has changed.
      torch.OutOfMemoryError: a dynamic table has no room for the keys that are new; nothing has changed. With several
        ranks: the rank's next step or call raises it, its lookup gives zeros, and keys of other ranks were inserted.
    """
    mode = 2 if training and use_low_frequency_filter else int(bool(training))  # csrc/located_tables.h
    return look_up(params, sp_ids, sp_weights, combiners, concat, mode, runtime.get().gradient_scale)


def look_up(
    params: Any,
    sp_ids: Any,
    sp_weights: Any,
    combiners: Any,
    concat: bool = False,
    training: int = 1,
    gradient_scale: float = 1.0,
) -> Any:
    """`lookup_sparse`. training: as csrc/located_tables.h has it. gradient_scale: what gradients of tables are
    multiplied with where there are several ranks.
    """
    state = runtime.get()
    if state.exchange is not None and is_exporting():
        raise RuntimeError("torch.export is for a process alone: there sok.load reads what several ranks have dumped")
    arguments = (state, params, sp_ids, sp_weights, combiners, concat, training, gradient_scale)
    return (_lookup_outside_graphs if _leaves_graphs(params) else _lookup)(*arguments)


def all2all_dense_embedding(param: Any, indices: Any) -> Any:
    """Looks single ids up: no bags, no combiner.

    Args:
      param: a table, or a list of them, which are looked up together; one may occur several times. A dynamic one is
        trained, as :func:`lookup_sparse` says; under torch.no_grad() it is not changed.
      indices: int32 or int64 of any shape; as many as there are tables, in a list, where `param` is one.

    Returns:
      indices.shape + [dimension] float32, or a list of these.

    Otherwise as :func:`lookup_sparse`.
    """
    state = runtime.get()
    return (_dense_outside_graphs if _leaves_graphs(param) else _dense)(state, param, indices)


def _lookup(
    state: runtime.Runtime,
    params: Any,
    sp_ids: Any,
    sp_weights: Any,
    combiners: Any,
    concat: bool,
    training: int,
    gradient_scale: float,
) -> Any:
    single = not isinstance(params, (list, tuple))
    if single:
        # A pair (values, offsets) is one batch of ids here, not a list of two.
        params, sp_ids, sp_weights = [params], [sp_ids], [sp_weights]
    try:
        if single and isinstance(combiners, (list, tuple)):
            raise TypeError("combiners must not be a list when params is a single table")
        if not isinstance(sp_ids, (list, tuple)):
            raise TypeError(
                "params and sp_ids must both be lists or both be single: params is a list, sp_ids a "
                f"{type(sp_ids).__name__}"
            )
        tables, described, device = _call.distinct(params)
        checked = check_lookup(params, sp_ids, sp_weights, combiners)
        _check_device(tables, device)
        _call.check_ranks(described, state.num_ranks)
        numbers = list(map(COMBINERS.__getitem__, checked.combiners))
        concat = bool(concat)
        has_store = any(map(stored.has_store, tables))
        given = checked.ids if has_store else ()
        keys = [_ids.parse(each, None, f"lookup {i}", None).keys for i, each in enumerate(given)]
    except Exception:
        tell_peers(state, params)
        raise
    looked_up = stored.given(params, keys, state.num_ranks) if has_store else []
    with stored.alone(tables) if has_store else contextlib.nullcontext():
        try:
            if has_store:
                instead = stored.prepare(looked_up, bool(training))
                params = [instead.get(id(param), param) for param in params]
                tables, described, device = _call.distinct(params)
                checked = check_lookup(params, sp_ids, sp_weights, combiners)
            pairs = None
            if device is not None and checked.weights.count(None) == len(params):
                pairs = _ids.pairs(checked.ids)
        except Exception:
            tell_peers(state, params, has_met=True)
            raise
        if pairs is not None:
            # From here on C++ tells the other ranks.
            number = None if state.exchange is None else state.exchange.number
            outputs = described.handle.lookup_pairs(*pairs, numbers, device, concat, training, number, gradient_scale)
            if outputs is not None:
                return outputs[0] if single or concat else outputs
        try:
            batches = [
                _ids.parse(ids, weights, f"lookup {i} (table '{table._sok_name}')", device)
                for i, (table, ids, weights) in enumerate(
                    zip(checked.params, checked.ids, checked.weights, strict=True)
                )
            ]
            call = _call.make(tables, described, batches, numbers, concat, training)
        except Exception:
            tell_peers(state, params, has_met=True)
            raise
        outputs = _call.run(call, state.exchange, gradient_scale)
    return outputs[0] if single or concat else outputs


def _dense(state: runtime.Runtime, params: Any, indices: Any) -> Any:
    single = not isinstance(params, (list, tuple))
    if single:
        params, indices = [params], [indices]
    try:
        if not isinstance(indices, (list, tuple)):
            raise TypeError(f"param is a list, so indices must be one, got {type(indices).__name__}")
        if not params or len(indices) != len(params):
            raise ValueError(f"indices has {len(indices)} entries, but param has {len(params)} tables")
        for param in params:
            refuse_stack(param, "all2all_dense_embedding")
        tables, described, device = _call.distinct(params)
        _check_device(tables, device)
        _call.check_ranks(described, state.num_ranks)
        batches = [_ids.Bags(_flat(each), None, None).to(device) for each in indices]
        has_store = any(map(stored.has_store, tables))
    except Exception:
        tell_peers(state, params)
        raise
    looked_up = stored.given(params, [batch.keys for batch in batches], state.num_ranks) if has_store else []
    with stored.alone(tables) if has_store else contextlib.nullcontext():
        try:
            if has_store:
                instead = stored.prepare(looked_up, True)
                tables, described, device = _call.distinct([instead.get(id(param), param) for param in params])
            call = _call.make(tables, described, batches, [0] * len(batches))
        except Exception:
            tell_peers(state, params, has_met=True)
            raise
        outputs = _call.run(call, state.exchange, state.gradient_scale)
    shaped = [output.reshape(*each.shape, output.shape[1]) for output, each in zip(outputs, indices, strict=True)]
    return shaped[0] if single else shaped


def _flat(indices: Any) -> Tensor:
    if not isinstance(indices, Tensor) or indices.layout != torch.strided or indices.is_nested:
        raise TypeError(f"indices must be a dense tensor, got {type(indices).__name__}")
    if indices.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"indices must be int32 or int64, not {str(indices.dtype).removeprefix('torch.')}")
    return indices.reshape(-1)


def _check_device(tables: list[TableParameter], device: torch.device | None) -> None:
    if device is not None or torch.compiler.is_compiling():
        return
    for table in tables:
        if table.device != tables[0].device:
            raise ValueError(
                f"the tables of one call must be on one device: '{tables[0]._sok_name}' is on {tables[0].device}, "
                f"'{table._sok_name}' on {table.device}"
            )


_REASON = (
    "lookups in tables that have a store, and in those whose gradients have hooks run between compiled parts: leave "
    "fullgraph=True out (docs/PYTORCH.md)"
)
_lookup_outside_graphs = torch.compiler.disable(_lookup, reason=_REASON)
_dense_outside_graphs = torch.compiler.disable(_dense, reason=_REASON)


def _leaves_graphs(params: Any) -> bool:
    """Whether a call is traced that cannot be part of a graph: autograd would call the hooks a second time, or
    rows come from a store.
    """
    if not torch.compiler.is_compiling():
        return False
    given = params if isinstance(params, (list, tuple)) else [params]
    has_store = any(stored.has_store(table_of(param)) for param in given)
    if is_exporting():
        if has_store:
            raise NotImplementedError("torch.export does not take tables whose rows are in a store")
        return False
    if has_store:
        return True
    if not torch.is_grad_enabled():
        return False
    if may_break():  # which is quicker than a nested backward()
        return True
    return any(getattr(table_of(param), "_hooked", False) for param in given)


def tell_peers(state: runtime.Runtime, params: Sequence[Any], has_met: bool = False) -> None:
    """Takes part in the exchange of counts as the rank that failed, so that the others fail too instead of waiting.

    params: as the call has them; what is no table stands where the other ranks have one.
    has_met: the ranks have exchanged what they look up in tables with stores.
    """
    if state.exchange is not None:
        tables = list(map(table_of, params))
        if not has_met and any(map(stored.has_store, tables)):
            return stored.tell_peers(state.exchange)
        device = next((table.device for table in tables if isinstance(table, TableParameter)), torch.device("cpu"))
        k = len(set(map(id, tables))) + 2 * len(params) + 1  # as csrc/sharded_lookup.h has them
        state.exchange.handle.tell_of_failure(device, k)
