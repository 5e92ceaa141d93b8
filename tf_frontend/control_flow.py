# SPDX-License-Identifier: Apache-2.0
"""Lookups in a branch of tf.cond or tf.switch_case and in the body of tf.while_loop, whose gradients stay sparse.

Where one branch has no gradient of a variable, TensorFlow gives it zeros of the variable's size, and in a loop it adds
up gradients of that size: an optimizer would step every row. So a lookup in there takes the table together with a
tensor from outside, `rows`, which has the gradient in the table's stead. It is a variant whose zero is no rows at all
and whose sum is the rows of both.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow.python.framework import auto_control_deps
from tensorflow.python.ops import handle_data_util
from tensorflow.python.ops.control_flow_v2_func_graphs import ControlFlowFuncGraph

from sparse_operation_kit.tensorflow._ops import ops
from sparse_operation_kit.tensorflow.call import Tables
from sparse_operation_kit.tensorflow.gradient import PendingGradient, Summand
from sparse_operation_kit.tensorflow.table_variable import TableVariable


def is_within() -> bool:
    """Whether a branch or the body of a loop is being traced."""
    return not tf.executing_eagerly() and isinstance(tf.compat.v1.get_default_graph(), ControlFlowFuncGraph)


def handle(table: TableVariable) -> tf.Tensor:
    """The table as a lookup takes it, here."""
    if not is_within():
        return table.handle
    graph = tf.compat.v1.get_default_graph()
    graph._sok_stand_ins = True
    while isinstance(graph, ControlFlowFuncGraph):
        graph = graph.outer_graph
        graph._sok_stand_ins = True
    with graph.as_default():
        made = ops.sok_outside(tables=[table.handle], **Tables.of([table]).attributes())
        # Where tapes are nested TensorFlow makes zeros for `outside`, and asks what a handle is one of.
        no_rows = tf.TensorShape([0, table.placement.dimension])
        handle_data_util.set_handle_data(made.outside, handle_data_util.create_handle_data(no_rows, tf.float32))
    return ops.sok_inside(outside=made.outside, rows=made.rows)


@tf.RegisterGradient("SokInside")
def _inside_gradient(op: Any, gradient: Any) -> list[Any]:
    del op
    return [None, ops.sok_pack_rows(slots=gradient.indices, values=gradient.values)]


@tf.RegisterGradient("SokOutside")
def _outside_gradient(op: Any, _: Any, gradient: Any) -> PendingGradient:
    tables = Tables.of_op(op)
    slots, values = ops.sok_unpack_rows(rows=gradient, dimension=tables.dimensions[0])
    return PendingGradient(op.inputs[0], tables, [Summand(slots, values, tf.constant([], tf.int64))])


# Tapes of tapes go back through gradients too, which have none.
tf.no_gradient("SokPackRows")
tf.no_gradient("SokUnpackRows")


@auto_control_deps.register_acd_resource_resolver
def _as_tables(op: Any, reads: Any, writes: Any) -> bool:
    """Tells tf.function which ops use the same table, so that steps and lookups keep their order."""
    if not getattr(op.graph, "_sok_stand_ins", False):
        return False
    replaced = False
    for resources in (reads, writes):
        for resource in list(resources):
            table = _origin(resource)
            if table is not resource:
                resources.discard(resource)
                resources.add(table)
                replaced = True
    return replaced


def _origin(resource: Any) -> Any:
    """What a resource is outside of all branches and loops; itself where it is not used there."""
    found = resource
    while True:
        op = found.op
        if op.type in ("SokInside", "SokOutside"):
            found = op.inputs[0]
            continue
        if not isinstance(op.graph, ControlFlowFuncGraph):
            return found
        outside = next((external for external, internal in op.graph.captures if internal is found), None)
        if outside is None:
            return resource
        if isinstance(outside, tf.__internal__.EagerTensor):
            graph = op.graph
            while isinstance(graph, ControlFlowFuncGraph):
                graph = graph.outer_graph
            captures = getattr(graph, "captures", ())
            return next((internal for external, internal in captures if external is outside), resource)
        found = outside
