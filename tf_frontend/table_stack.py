# SPDX-License-Identifier: Apache-2.0
"""TableStack: several tables that are one variable, and so cost the host what one does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from sparse_operation_kit import placement as _placement
from sparse_operation_kit.arguments import check_stack, check_table_dtype, of_table
from sparse_operation_kit.tensorflow import devices, runtime, saving
from sparse_operation_kit.tensorflow.table_variable import TableRows, TableVariable, as_table, is_table
from sparse_operation_kit.tensorflow.variable import Variable, initial_rows

_names = _placement.name_counter()


class Member(TableRows):
    """A table of a stack: this rank's rows of it, [local rows, dimension].

    `dump`, `load`, `assign`, `export`, `track_changes` and the functions of changed rows and of serving take it as they
    take a `sok.Variable`. Gradients are the stack's. Where a tensor is wanted it is one, a copy.

    Attributes:
      stack: the TableStack, the variable.
      placement, mode, key_map: those of the table by itself; `slots` are its rows among those of the stack.
    """

    def __init__(self, stack: TableStack, place: _placement.Member) -> None:
        self.stack, self.slots = stack, place.slots
        self._sok_name, self._placement = place.name, place.placement
        self._first_key = place.first_key

    name = TableRows.table_name

    @property
    def dtype(self) -> tf.DType:
        """That of the rows."""
        return self.stack.dtype

    @property
    def shape(self) -> tf.TensorShape:
        """[local rows, dimension]."""
        return tf.TensorShape(self._placement.local_shape)

    @property
    def global_shape(self) -> tf.TensorShape:
        """[rows, dimension] of the whole table."""
        return tf.TensorShape([self._placement.num_rows, self._placement.dimension])

    @property
    def weight(self) -> tf.Tensor:
        """This rank's rows, a copy."""
        return self.stack[self.slots]

    def numpy(self) -> Any:
        """This rank's rows as an array."""
        return self.weight.numpy()

    def assign(self, rows: Any) -> Any:
        """Overwrites this rank's rows [local rows, dimension]."""
        return self.stack[self.slots].assign(rows)

    def exported(self) -> tuple[tf.Tensor, tf.Tensor]:
        """(keys [n] int64, rows [n, dimension]) of this rank."""
        with tf.device(devices.HOST):
            keys = self.placement.global_keys(tf.range(self.placement.local_rows, dtype=tf.int64))
        return keys, self.weight

    def in_stack(self, keys: tf.Tensor) -> tf.Tensor:
        """Keys of this rank's part as those of the stack.

        Raises tf.errors.InvalidArgumentError, which names the table, for a key outside it or another rank's.
        """
        keys = tf.cast(keys, tf.int64)
        place, where = self.placement, f"table '{self.table_name}': a key"
        limit = tf.constant(place.num_rows, tf.int64)
        checks = [
            tf.debugging.assert_non_negative(keys, f"{where} is outside [0, {place.num_rows})"),
            tf.debugging.assert_less(keys, limit, f"{where} is outside [0, {place.num_rows})"),
            tf.debugging.assert_equal(
                place.owner_of(keys),
                tf.constant(place.rank, tf.int64),
                f"{where} is another rank's, not {place.rank}'s",
            ),
        ]
        with tf.control_dependencies([check for check in checks if check is not None]):
            return keys + self._first_key

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> tf.Tensor:
        return tf.convert_to_tensor(self.weight, dtype=dtype, name=name)

    def __repr__(self) -> str:
        return f"<Member '{self.table_name}' {self.global_shape.as_list()} of {self.stack.table_name!r}>"


class Selection:
    """What `TableStack.choose` gives: some tables of a stack, for `lookup_sparse` to look up in."""

    def __init__(self, stack: TableVariable, members: Sequence[_placement.Member]) -> None:
        self.stack = stack
        self.members = tuple(members)


class TableStack(Variable):
    """Several tables of one dimension, dtype and mode, all in one `tf.Variable`: to TensorFlow, to an optimizer and to
    the host a hundred small tables are one.

    Its members keep what they would have by themselves: names, the range of their keys and the error for one outside
    it, initial rows, the rows that each rank holds, and their files in a dump, so that a dump of a stack loads into
    separate tables and the reverse. What an optimizer keeps is one state for all of them.

    `lookup_sparse` takes flat ids for it: a `tf.RaggedTensor` or `tf.SparseTensor` of members * batch rows, those of
    the first member first. It gives [batch, members * dimension], the members' vectors side by side.

    Args:
      tables: name -> (rows, dimension); the dimension is the same for all.
      initializer: as of `sok.Variable`: one for all, or name -> one.
      dtype, mode, trainable: as of `sok.Variable`, of all members.
      name: names the stack in messages that are about no single member. None: numbered in creation order.
      **options: as of `tf.Variable`.

    The variable's shape is [local rows of all members, dimension]. With several ranks a member begins on all of them at
    the same slot, so a rank may hold a row that is none's.

    Raises:
      ValueError: no tables, different dimensions, and as `sok.Variable`, which see otherwise.
    """

    def __init__(
        self,
        tables: Mapping[str, Sequence[int]],
        *,
        initializer: Any = None,
        dtype: Any = None,
        mode: str | None = None,
        name: str | None = None,
        trainable: bool = True,
        **options: Any,
    ) -> None:
        state = runtime.get()
        owner = _placement.parse_mode(mode, state.num_ranks)
        stack_name = _placement.table_name(name, _names, "TableStack")
        rows, dimension = check_stack(tables, stack_name)
        if dtype is not None:
            check_table_dtype(tf.as_dtype(dtype), stack_name)
        place, self._members = _placement.stack(rows, dimension, owner, state.num_ranks, state.rank)
        table_dtype = tf.float32 if dtype is None else tf.as_dtype(dtype)

        def first_rows() -> tf.Tensor:
            parts: list[tf.Tensor] = []
            end = 0
            for member in self._members.values():
                if not member.placement.local_rows:
                    continue
                parts.append(tf.zeros([member.first_slot - end, dimension], table_dtype))
                own = of_table(initializer, member.name)
                chosen = "uniform" if own is None else own
                parts.append(initial_rows(chosen, member.placement, state.arguments.seed, member.name, table_dtype))
                end = member.slots.stop
            parts.append(tf.zeros([place.local_rows - end, dimension], table_dtype))
            return tf.concat(parts, axis=0)

        TableVariable.__init__(
            self,
            stack_name,
            place,
            initial_value=first_rows,
            trainable=trainable,
            dtype=table_dtype,
            shape=tf.TensorShape(place.local_shape),
            **options,
        )

    @property
    def members(self) -> dict[str, Member]:
        """The tables by name, in the order in which they were given."""
        return {name: Member(self, place) for name, place in self._members.items()}

    def member(self, name: str) -> Member:
        """One of them. KeyError for another name."""
        return Member(self, self._members[name])

    def choose(self, names: Sequence[str]) -> Selection:
        """What `lookup_sparse` takes in place of the stack to look up some members, in any order, some several times:
        flat ids have as many bags for each of `names` then, and the output their vectors.

        KeyError for a name that is no member's, ValueError for no names.
        """
        if not names:
            raise ValueError(f"stack '{self.table_name}': no members are named")
        return Selection(self, [self._members[name] for name in names])

    def __deepcopy__(self, memo: dict[int, Any]) -> TableStack:
        if not tf.executing_eagerly():
            raise NotImplementedError("tables can be copied in eager mode only")
        return _rebuild(*self._parts(self.read_value()))

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        if not tf.executing_eagerly():
            raise NotImplementedError("tables can be pickled in eager mode only")
        return _rebuild, self._parts(self.numpy())

    def _parts(self, rows: Any) -> tuple[Any, ...]:
        shapes = {
            name: (member.placement.num_rows, self._placement.dimension) for name, member in self._members.items()
        }
        return type(self), rows, self._placement, shapes, self._sok_name, self.trainable


def _rebuild(
    cls: type[TableStack], rows: Any, place: _placement.Placement, shapes: dict[str, Any], name: str, trainable: bool
) -> TableStack:
    """The stack of these rows of this rank."""
    stack = cls(shapes, initializer="zeros", dtype=rows.dtype, mode=place.mode, name=name, trainable=trainable)
    saving.check_pickled("stack", name, stack, place)
    stack.assign(np.asarray(rows))
    return stack


def table_of(param: Any) -> Any:
    """The variable that a lookup's `param` is about; TypeError where it is no table."""
    return as_table(param.stack if isinstance(param, Selection) else param)


def tables_or_stacks(vars: Iterable[Any]) -> list[Any]:
    """Variables as they are, and the stacks of members in place of these, each once."""
    found = [each.stack if isinstance(each, Member) else each for each in vars]
    return list({id(each): each for each in found}.values())


def members_of(param: Any) -> Sequence[_placement.Member]:
    """The members of a stack that a lookup's `param` names, in order; none where it is no stack."""
    if isinstance(param, Selection):
        return param.members
    table = as_table(param) if is_table(param) else None
    return tuple(table._members.values()) if isinstance(table, TableStack) else ()


def refuse_stack(var: Any, function: str) -> None:
    """Raises TypeError for a stack, where a function takes one table."""
    if members_of(var):
        raise TypeError(f"{function} takes one table: a member of the stack, stack.members[name]")
