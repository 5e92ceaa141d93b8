# SPDX-License-Identifier: Apache-2.0
"""Embeddings of classes that this package does not know: they look up by themselves where their table is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from sparse_operation_kit.hybrid import DistEmbeddingStrategy
from sparse_operation_kit.hybrid.layout import Layout, PlannedVariable, table_name
from sparse_operation_kit.tensorflow import communication, devices, keras_compat, runtime, strategies
from sparse_operation_kit.tensorflow._ops import ops
from sparse_operation_kit.tensorflow.dist_model_parallel import inputs, outputs
from sparse_operation_kit.tensorflow.dist_model_parallel.config import is_custom


def make_layer(config: Mapping[str, Any], sizes: Sequence[int] = ()) -> Any:
    """The layer of a config of a plan, built. sizes: rows of its tables, where several became one."""
    options = {name: value for name, value in config.items() if name not in ("layer_type", "cpu_offload")}
    drawn = options.get("embeddings_initializer")
    if len(sizes) > 1 and isinstance(drawn, list):
        from tensorflow import keras

        each = [keras.initializers.get(one) for one in drawn]
        options["embeddings_initializer"] = lambda shape, dtype=None, **rest: tf.concat(
            [one((rows, shape[1]), dtype=dtype, **rest) for one, rows in zip(each, sizes, strict=True)], 0
        )
    layer = config["layer_type"].from_config(options)
    layer.build(None)
    layer.built = True
    return layer


class CustomLayers:
    """The layers of this rank, by the number of their variable."""

    def __init__(self, owner: Any, layout: Layout, plan: DistEmbeddingStrategy) -> None:
        """owner: the Keras layer that is to list their weights. Raises as `check`."""
        self._layout, self._plan = layout, plan
        self._name = owner.name if any(is_custom(variable.config) for variable in layout.variables) else None
        self.check()
        self.layers: dict[int, Any] = {}
        for number in layout.of_rank(runtime.get().rank):
            variable = layout.variables[number]
            if is_custom(variable.config):
                self.layers[number] = _marked(variable)
        owner._custom_layers = list(self.layers.values())
        self._parts = [
            [part for part in parts if is_custom(layout.variables[part.variable].config)]
            for parts in layout.rank_lookups
        ]
        self._inputs = [
            [
                plan.input_groups[1][number]
                for number, part in zip(numbers, parts, strict=True)
                if is_custom(layout.variables[part.variable].config)
            ]
            for numbers, parts in zip(plan.input_ids_list, layout.rank_lookups, strict=True)
        ]

    def check(self) -> None:
        """Raises NotImplementedError within a strategy of several workers, where any rank has such layers."""
        if self._name is not None:
            strategies.check_own_variables(f"layer '{self._name}' has embeddings of classes that look up by themselves")

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """For what is made of inputs of such layers alone: what it refuses eagerly is an error of all ranks."""
        try:
            yield
        except Exception:
            self._tell()
            raise
        if tf.executing_eagerly() and self._name is not None:
            _agree(tf.constant(""))

    def call_parts(self, calls: Sequence[tuple[Any, Any]], told: Sequence[tf.Tensor] = ()) -> list[Any]:
        """What layers of this rank give for (one of their tables, its ids). told: messages of `within`.

        All ranks raise tf.errors.InvalidArgumentError where there is such a message, where an id is in another table of
        its layer, or where a layer refuses its ids eagerly; in a function that is an error of its rank alone.
        """
        if self._name is None:
            return []
        messages = [tf.constant(""), *told]
        try:
            found = [self._call_part(part, value, messages) for part, value in calls]
        except Exception:
            self._tell()
            raise
        with devices.on_host():
            agreed = _agree(tf.strings.join(messages))
        with tf.control_dependencies([] if agreed is None else [agreed]):
            return list(map(tf.identity, found))

    def _call_part(self, part: Any, value: Any, messages: list[tf.Tensor]) -> Any:
        variable = self._layout.variables[part.variable]
        member = variable.members[part.member]
        if len(variable.members) > 1:  # else another table's row would be found
            value, message = inputs.within(value, member.rows, table_name(str(self._name), member.table))
            messages.append(message)
        if member.first_row:
            value = value + tf.constant(member.first_row, value.dtype)
        return self.layers[part.variable](value)

    def _tell(self) -> None:
        if tf.executing_eagerly() and self._name is not None:
            with contextlib.suppress(tf.errors.InvalidArgumentError):
                _agree(tf.constant("this rank's own error says why"))

    def look_up(self, values: Mapping[int, Any], dtype: Any, told: Sequence[tf.Tensor] = ()) -> dict[int, Any]:
        """number of an input -> its vectors; values: of this rank's samples. told: as of `call_parts`."""
        state = runtime.get()
        parts, numbers = self._parts[state.rank], self._inputs[state.rank]
        wanted = dict(enumerate(self._inputs))
        own = inputs.dp_to_mp_input(values, wanted)
        calls = [(part, own[number]) for part, number in zip(parts, numbers, strict=True)]
        found = [tf.cast(output, dtype) for output in self.call_parts(calls, told)]
        if state.num_ranks == 1:
            return dict(zip(numbers, found, strict=True))
        batch = inputs.dynamic_batch(next(iter(values.values())))
        with devices.on_host():
            shares = communication.allgather(tf.reshape(batch, [1]), name="sok_outputs_batches")
        shares.set_shape([state.num_ranks])
        widths = [[self._layout.variables[part.variable].columns for part in each] for each in self._parts]
        pieces = outputs.send_back(found, widths, shares, dtype)
        joined: dict[int, list[Any]] = {}
        for number, piece in zip([number for each in self._inputs for number in each], pieces, strict=True):
            joined.setdefault(number, []).append(piece)
        return {number: each[0] if len(each) == 1 else tf.concat(each, -1) for number, each in joined.items()}


def _marked(variable: PlannedVariable) -> Any:
    layer = make_layer(variable.config, [member.rows for member in variable.members])
    for weight in layer.weights:
        weight.de_local = True
        inner = keras_compat.raw(weight)
        if inner is not weight:
            inner.de_local = True
    return layer


def _agree(message: tf.Tensor) -> Any:
    """Raises tf.errors.InvalidArgumentError on all ranks where one has a message; in a graph it gives what does."""
    state = runtime.get()
    with devices.on_host():
        code = tf.errors.INVALID_ARGUMENT * state.num_ranks + state.rank
        failed = tf.cast(tf.reshape(tf.not_equal(message, ""), [1]), tf.int64) * code
        highest = communication.allreduce(failed, "max", name="sok_own_layers")
        return ops.sok_raise_together(received=highest, message=message, num_ranks=state.num_ranks)
