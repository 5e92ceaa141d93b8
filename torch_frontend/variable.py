# SPDX-License-Identifier: Apache-2.0
"""A table as a parameter: this rank's shard, and where its rows stand in the whole table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from sparse_operation_kit import placement as _placement
from sparse_operation_kit.arguments import check_initial_values, check_table_dtype, check_table_shape
from sparse_operation_kit.placement import Placement
from sparse_operation_kit.torch import runtime, saving
from sparse_operation_kit.torch._ops import ops
from sparse_operation_kit.torch.table_parameter import TableParameter

_names = _placement.name_counter()


class Initial(NamedTuple):
    """What fills a table: an `initializer` of :class:`Variable`, and the seed of init()."""

    initializer: Any
    seed: int


class Variable(TableParameter):
    """A 2-D embedding table sharded over the ranks; a ``torch.nn.Parameter`` of this rank's rows.

    Args:
      initial_value: the whole table [rows, dimension]: a tensor, array or nested list. Each rank copies its rows.
      shape: (rows, dimension) of the whole table, with `initializer`, instead of `initial_value`.
      initializer: "uniform" (in [-0.05, 0.05)), "normal" (standard deviation 0.05), "zeros", "ones", "glorot_uniform",
        ..., a number, or a function ``f(shard) -> None`` that fills this rank's rows in place, as those of
        torch.nn.init do. None is "uniform". The rows a name gives depend on the seed of init(), the table's name, key
        and column alone: they are the same for every number of ranks and in both frontends. Only the shard is ever in
        memory.
      dtype: torch.float32, torch.float16 or torch.bfloat16. None: that of `initial_value`, else float32. An
        `initial_value` of another dtype is converted only when it is given.
      mode: None or "distributed": rank g of N holds rows g, g + N, ...; "localized:g": rank g holds all, the others
        none.
      name: names the table in messages, checkpoints and its initial rows. None: numbered in creation order.
      trainable: becomes requires_grad.
      device: where the shard lives; None: PyTorch's default device.

    The parameter's own shape is that of the shard, [local rows, dimension]; :attr:`global_shape` is the table's. Row k
    is slot ``key_map(k)`` of the rank that holds it.

    As a parameter it is listed by ``module.parameters()``, moved by ``module.to(device)``, copied by ``copy.deepcopy``,
    pickled whole, and saved in a ``state_dict`` as this rank's rows (`saving.TableShard`): torch.save keeps them for as
    many ranks, torch.distributed.checkpoint for any number.
    DistributedDataParallel leaves it alone without being told (sparse_operation_kit.torch wraps its constructor).
    ``module.bfloat16()`` and the like convert it too; a lookup refuses a table that ``module.double()`` has converted.

    Rows of float16 and bfloat16 halve the memory of the table and what a step reads and writes of it. All arithmetic is
    in float32: looked-up vectors are float32 (cast them where the model wants another dtype), so are optimizer states,
    and a step rounds each changed row once, to nearest. ``grad.dtype`` is the table's, as PyTorch asks, but the
    optimizers of this package read the float32 gradient; only who takes it as a tensor gets it rounded. Steps smaller
    than half the distance between neighbouring numbers (2^-11 of a float16, 2^-8 of a bfloat16) change nothing.

    Raises:
      RuntimeError: before init().
      ValueError: neither or both of `initial_value` and `shape`; not two dimensions; no rows; a mode that names a rank
        that is not there.
      TypeError: another dtype than these three.
    """

    _initial: Initial | None = None

    def __new__(
        cls,
        initial_value: Any = None,
        *,
        shape: Sequence[int] | None = None,
        initializer: str | float | Callable[[Tensor], object] | None = None,
        dtype: torch.dtype | None = None,
        mode: str | None = None,
        name: str | None = None,
        trainable: bool = True,
        device: torch.device | str | None = None,
    ) -> Variable:
        state = runtime.get()
        if (initial_value is None) == (shape is None):
            raise ValueError("a table needs either initial_value or shape (with initializer)")
        owner = _placement.parse_mode(mode, state.num_ranks)
        text = _placement.table_name(name, _names)
        if dtype is not None:
            check_table_dtype(dtype, text)
        if initial_value is not None:
            if initializer is not None:
                raise ValueError(f"table '{text}': initializer goes with shape, not with initial_value")
            value = _as_tensor(initial_value)
            num_rows, dimension = check_table_shape(value.shape, text)
            if dtype is None:
                check_table_dtype(value.dtype, text)
                dtype = value.dtype
        else:
            assert shape is not None
            num_rows, dimension = check_table_shape(shape, text)
        place = Placement(num_rows, dimension, owner, state.num_ranks, state.rank)
        shard = torch.empty(place.local_shape, dtype=dtype or torch.float32, device=device)
        self = cls._wrap(shard, place, text, trainable)
        if initial_value is not None:
            shard.copy_(value[place.rows])
        else:
            self._initial = Initial("uniform" if initializer is None else initializer, state.arguments.seed)
            self.reset_parameters()
        return self

    def reset_parameters(self) -> None:
        """Gives this rank's rows their initial values anew, as after ``module.to_empty(device=...)`` of a module that
        was made on the meta device.

        Raises RuntimeError for a table that does not know them: it was made with `initial_value`, or unpickled.
        """
        if self._initial is None:
            raise RuntimeError(
                f"table '{self._sok_name}' does not know its initial rows, for it was made with initial_value or "
                "unpickled: copy rows to it, or load a state_dict or a dump"
            )
        self._fill(Tensor.detach(self), self._initial)

    def _fill(self, rows: Tensor, initial: Initial) -> None:
        fill(rows, self._placement, initial.initializer, initial.seed, self._sok_name)

    def with_rows(self, rows: Tensor) -> Self:
        """See TableParameter."""
        table = super().with_rows(rows)
        table._initial = self._initial
        return table

    @property
    def global_shape(self) -> torch.Size:
        """[rows, dimension] of the whole table."""
        return torch.Size((self._placement.num_rows, self._placement.dimension))

    def __deepcopy__(self, memo: dict[int, Any]) -> Variable:
        if id(self) not in memo:
            memo[id(self)] = self.with_rows(self.data.clone())
        copied: Variable = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.data, self._placement, self._sok_name, self.requires_grad)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        place = self._placement
        return (
            f"sok.Variable '{self._sok_name}' [{place.num_rows}, {place.dimension}] {self.mode}, rank {place.rank} of "
            f"{place.num_ranks} holding {place.local_rows} rows:\n{self.data!r}"
        )

    def detach(self) -> saving.TableShard:
        """This rank's rows, the same memory, as state_dict() gives them: a tensor that knows whose rows it holds."""
        return saving.TableShard.wrap(Tensor.detach(self), saving.Layout.of(self._sok_name, self._placement))

    def shared(self) -> Tensor:
        """See TableParameter."""
        return self.detach()

    def taken(self, given: Tensor, assign: bool) -> Tensor:
        """See TableParameter."""
        layout = saving.Layout.of(self._sok_name, self._placement)
        rows = saving.rows_for(given.detach() if hasattr(given, "_sok_name") else given, layout, tuple(self.shape))
        return self.with_rows(rows) if assign else rows

    def share_states(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """See TableParameter."""
        return saving.share(state, saving.Layout.of(self._sok_name, self._placement), self.shape[0])

    def take_states(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """See TableParameter."""
        return saving.take(state, saving.Layout.of(self._sok_name, self._placement), self.shape[0])

    # torch.distributed.checkpoint, given the table itself (state_dict(keep_vars=True)).

    def __create_write_items__(self, fqn: str, value: Any) -> list[Any]:
        return self.detach().__create_write_items__(fqn, value)

    def __create_chunk_list__(self) -> list[Any]:
        return self.detach().__create_chunk_list__()

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        return self.detach().__get_tensor_shard__(index)


def _rebuild(cls: type[Variable], shard: Tensor, place: Placement, name: str, trainable: bool) -> Variable:
    return cls._wrap(shard, place, name, trainable)


def _as_tensor(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach()
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else torch.as_tensor(value)


def fill(shard: Tensor, place: Placement, initializer: Any, seed: int, name: str) -> None:
    """Gives this rank's rows of table `name` their initial values; rows on the meta device have none."""
    if shard.is_meta:
        return
    if callable(initializer):
        with torch.no_grad():
            initializer(shard)
        return
    spec = _placement.parse_initializer(initializer, place.num_rows, place.dimension)
    check_initial_values(spec, shard.dtype, name)
    drawn_with = _placement.table_seed(seed if spec.seed is None else spec.seed, name)
    ops.initialize(
        shard, spec.kind, _placement.as_signed(drawn_with), spec.a, spec.b, None, place.first_key, place.key_stride
    )
