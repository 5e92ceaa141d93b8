# SPDX-License-Identifier: Apache-2.0
"""The variables of a plan, what their rows are at the start, and the one lookup of all of them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from sparse_operation_kit import placement as _placement
from sparse_operation_kit.hybrid.layout import Layout, Member, Part, PlannedVariable, chunks, table_name
from sparse_operation_kit.placement import Initializer, Placement
from sparse_operation_kit.tensorflow import devices, initializers, keras_compat, runtime
from sparse_operation_kit.tensorflow.dist_model_parallel import inputs
from sparse_operation_kit.tensorflow.dist_model_parallel.config import is_custom
from sparse_operation_kit.tensorflow.lookup import pooled, together
from sparse_operation_kit.tensorflow.table_stack import Selection
from sparse_operation_kit.tensorflow.variable import Variable

CHUNK = 1 << 24
"""Elements that are drawn or written at once."""


class Tables:
    """The variables of all ranks, of which this one has rows of some.

    A plain object, so that tf_keras does not list the variables of other ranks as weights of the layer. Where a layer
    of its own class looks up there is None.
    """

    def __init__(self, layer: str, layout: Layout, initializer_of: Callable[[int], Any]) -> None:
        """layer: its name. initializer_of: of a table, by its number."""
        self.layout = layout
        self._layer, self._widths, self._initializer_of = layer, layout.widths, initializer_of
        self.variables: list[Any] = [None if is_custom(v.config) else self._make(v) for v in layout.variables]
        for number, variable in enumerate(self.variables):
            if variable is not None:
                variable._placement = dataclasses.replace(variable.placement, contents=layout.contents(number))

    def _choose(self, part: Part) -> Any:
        """What a lookup names."""
        state, variable = runtime.get(), self.variables[part.variable]
        planned = self.layout.variables[part.variable]
        member = planned.chosen(part.member, self._layer, state.num_ranks, state.rank)
        return variable if member is None else Selection(variable, [member])

    def _make(self, planned: PlannedVariable) -> Variable:
        config = planned.config
        options = {
            "mode": planned.mode,
            "name": planned.name(self._layer, self._widths),
            "trainable": config.get("trainable", True),
            "dtype": tf.as_dtype(keras_compat.variable_dtype(config.get("dtype"))),
        }
        shape = (planned.rows, planned.columns)
        first = planned.members[0]
        on_host = config.get("cpu_offload", False)
        with tf.device(devices.HOST) if on_host else contextlib.nullcontext():
            if len(planned.members) == 1 and planned.columns == self._widths[first.table]:
                return Variable(shape=shape, initializer=self._initializer_of(first.table), **options)
            variable = Variable(shape=shape, initializer="zeros", **options)
            for member in planned.members if variable.placement.local_rows else ():
                for slots, rows in self._first_rows(member, variable.dtype):
                    variable.write_slots(slots, rows)
        return variable

    def _first_rows(self, member: Member, dtype: tf.DType) -> Iterator[tuple[tf.Tensor, tf.Tensor]]:
        """(slots, rows) of a member, those that its columns have in the whole table; some rows at a time."""
        end = member.first_column + member.columns
        name, initializer = table_name(self._layer, member.table), self._initializer_of(member.table)
        width = self._widths[member.table]
        spec = initializers.as_spec(initializer, Placement(member.rows, width))
        given: Any = draw(initializer, name, (member.rows, width), dtype) if spec is None else None
        for first, count in chunks(member.rows, end, CHUNK):
            slots = tf.range(member.first_row + first, member.first_row + first + count, dtype=tf.int64)
            if spec is None:
                rows = given[first : first + count, :end]
            else:
                rows = initializers.initialize_rows(spec, first, count, end, _seed(spec, name), dtype)
            yield slots, rows[:, member.first_column :]

    def asked(self, numbers: Sequence[int] | None) -> list[Part]:
        """What is looked up in tables for these inputs. None: for the inputs of `look_up_own`."""
        lookups = self.layout.rank_lookups if numbers is None else [self.layout.lookups[i] for i in numbers]
        return [part for parts in lookups for part in parts if self.variables[part.variable] is not None]

    @contextlib.contextmanager
    def together(self, parts: Sequence[Part]) -> Iterator[None]:
        """For what is made of inputs before these are looked up: what it refuses the other ranks are told, as by the
        lookup itself.
        """
        try:
            yield
        except Exception:
            with together(self._of_devices(parts)[0][1]):
                raise

    def look_up(self, batches: Sequence[tuple[int, inputs.Ids]], messages: Sequence[tf.Tensor] = ()) -> list[tf.Tensor]:
        """The pooled vectors of (number of an input, its bags): one lookup for all tables. messages: as of `pooled`."""
        outputs = self._look_up([(part, bags) for i, bags in batches for part in self.layout.lookups[i]], messages)
        return self.layout.joined([i for i, _ in batches], outputs, lambda parts: tf.concat(parts, -1))

    def look_up_own(self, bags: Sequence[inputs.Ids], rank: int) -> list[Any]:
        """The pooled vectors of the inputs that are this rank's own."""
        lookups, mine = self.layout.own_lookups(rank, bags, inputs.nothing())
        return self._look_up(lookups)[mine]

    def _look_up(
        self, lookups: Sequence[tuple[Part, inputs.Ids]], messages: Sequence[tf.Tensor] = ()
    ) -> list[tf.Tensor]:
        """One lookup_sparse for the tables of each device, which are one unless some are offloaded."""
        outputs: list[Any] = [None] * len(lookups)
        for group, params in self._of_devices([part for part, _ in lookups]):
            ids = [lookups[i][1] for i in group]
            configs = [self.layout.variables[lookups[i][0].variable].config for i in group]
            combiners = [config.get("combiner") or "sum" for config in configs]
            for i, output in zip(group, pooled(params, ids, None, combiners, messages=messages), strict=True):
                outputs[i] = output
        return outputs

    def _of_devices(self, parts: Sequence[Part]) -> list[tuple[list[int], list[Any]]]:
        """Of each device the lookups whose tables are there, by position, and what they name."""
        places: dict[str, list[int]] = {}
        for i, part in enumerate(parts):
            if self.variables[part.variable] is not None:
                places.setdefault(self.variables[part.variable].handle.device, []).append(i)
        return [(group, [self._choose(parts[i]) for i in group]) for group in places.values()]


class LocalTable(NamedTuple):
    """What a rank holds of a table, or of tables that are one variable."""

    input_dim: int
    output_dim: int
    combiner: str | None
    embeddings: Any


def draw(initializer: Any, name: str, shape: tuple[int, int], dtype: tf.DType) -> tf.Tensor:
    """[rows, width]: the first rows of the table of this name, whole."""
    whole = Placement(*shape)
    spec = initializers.as_spec(initializer, whole)
    if spec is None:
        return tf.cast(tf.convert_to_tensor(initializer(shape, dtype="float32")), dtype)
    return initializers.initialize(spec, whole, _seed(spec, name), dtype)


def _seed(spec: Initializer, name: str) -> int:
    return _placement.table_seed(runtime.get().arguments.seed if spec.seed is None else spec.seed, name)
