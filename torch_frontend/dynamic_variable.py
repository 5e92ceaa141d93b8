# SPDX-License-Identifier: Apache-2.0
"""A dynamic table as a parameter: rows of any keys, which appear when they are first trained."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Mapping
from multiprocessing.context import get_spawning_popen
from typing import Any

import torch
from torch import Tensor

from sparse_operation_kit import dynamic
from sparse_operation_kit import placement as _placement
from sparse_operation_kit.arguments import check_initial_values, check_table_dtype
from sparse_operation_kit.placement import ANY_KEY, Placement
from sparse_operation_kit.stored_rows import StoredRows
from sparse_operation_kit.torch import keyed_shard, runtime
from sparse_operation_kit.torch.gradient import PendingGradient
from sparse_operation_kit.torch.held import DynamicTable
from sparse_operation_kit.torch.keyed_shard import KeyedShard, fill, not_distributed
from sparse_operation_kit.torch.stored import with_stored
from sparse_operation_kit.torch.table_parameter import TableParameter, keys_of, own_grad
from sparse_operation_kit.torch.turns import alone

_names = _placement.name_counter()
_shown_grad: Any = TableParameter.grad
_own_data: Any = Tensor.data


class Size(int):
    """How many keys a dynamic table holds on this rank. Called, it is ``torch.Tensor.size``, for those who ask the
    parameter for its shape.
    """

    _table: Tensor

    def __call__(self, dim: int | None = None) -> Any:
        return self._table.shape if dim is None else self._table.shape[dim]


@dataclasses.dataclass(frozen=True)
class _Made:
    """What a table was made with, of which the same can be made again."""

    var_type: str
    key_type: torch.dtype
    dtype: torch.dtype
    capacity: int
    init_capacity: int
    initializer: _placement.Initializer
    seed: int  # of its rows, with the name in it
    evict_strategy: str | None
    most_candidates: int  # how many keys may wait for a row
    policy: dynamic.Policy

    def core(self, place: Placement, name: str, device: torch.device) -> Any:
        spec = self.initializer
        return torch.classes.sok.DynamicTable(
            *(name, device, self.capacity, self.init_capacity, place.dimension, self.dtype, self.key_type),
            *(spec.kind, self.seed, spec.a, spec.b, list(self.policy)),
        )


class DynamicVariable(TableParameter):
    """An embedding table without a vocabulary, sharded over the ranks: any integer is a key, and a key gets a row when
    a lookup first trains it. A ``torch.nn.Parameter`` of this rank's slots.

    Args:
      dimension: elements a row.
      initializer: how rows of new keys begin: "uniform" or "random" (in [-0.05, 0.05)), "normal" (standard deviation
        0.05), "zeros", "ones", ... or a number. None is "uniform". A row's initial value depends on the seed, the
        table's name, the key and the column alone: it is that of a :class:`Variable` of this name.
      var_type: "hybrid": has a capacity, `max_capacity`, 2^26 rows a rank by default; "hbm": without `max_capacity`
        grows as memory allows.
      name: names the table in messages, checkpoints and its initial rows. None: numbered in creation order.
      constraint: None; of the TensorFlow frontend.
      trainable: becomes requires_grad.
      key_type: torch.int64, or torch.int32, which takes int32 ids alone.
      dtype: torch.float32, torch.float16 or torch.bfloat16, as of :class:`Variable`.
      mode: None or "distributed": key k is on rank k mod N; "localized:g": rank g holds all.
      seed: None: that of init().
      device: where the table lives; None: PyTorch's default device.
      init_capacity, max_capacity, max_hbm_for_vectors, evict_strategy, ...: see
        `sparse_operation_kit.dynamic.DynamicOptions`. A full table evicts by evict_strategy, or refuses new keys
        where that is None, as it is for "hbm".

    The parameter's own shape is [slots, dimension]: every key has a slot, in the order in which keys came. It grows in
    place when a lookup or :func:`assign` inserts keys, and so do the states that optimizers keep of it; detached
    tensors and views keep the shape that they were made with, and are not to be read after :meth:`shrink`, which gives
    their memory back. Lookups that train and steps run one at a time.

    As a parameter it is listed by ``module.parameters()``, left alone by DistributedDataParallel, copied by
    ``copy.deepcopy`` and pickled with its keys. It stays on its device and keeps its dtype.

    Raises:
      RuntimeError: before init().
      ValueError, TypeError, NotImplementedError: as of `check_options`; a mode that names a rank that is not there;
        another dtype or key_type; an initializer that is a function, or takes the number of rows.
      torch.OutOfMemoryError: no room for init_capacity rows, or no addresses for max_capacity of them.
    """

    _core: Any  # torch.classes.sok.DynamicTable
    _made: _Made
    _states: list[tuple[Any, int, float]]  # (weak reference, width, initial) of the columns that optimizers have

    def __new__(
        cls,
        dimension: int,
        initializer: Any = None,
        var_type: str = "hybrid",
        name: str | None = None,
        constraint: Any = None,
        trainable: bool = True,
        key_type: Any = torch.int64,
        dtype: torch.dtype = torch.float32,
        mode: str | None = None,
        *,
        seed: int | None = None,
        device: torch.device | str | None = None,
        **options: Any,
    ) -> DynamicVariable:
        state = runtime.get()
        text = _placement.table_name(name, _names, "dynamic_Variable")
        if constraint is not None:
            raise TypeError(f"table '{text}': PyTorch has no constraints of parameters, constraint must be None")
        owner = _placement.parse_mode(mode, state.num_ranks)
        check_table_dtype(dtype, text)
        chosen = dynamic.check_options(var_type, options, text)
        place = Placement(ANY_KEY, dynamic.check_dimension(dimension, text), owner, state.num_ranks, state.rank)
        spec = dynamic.check_initializer(initializer, place.dimension, text)
        check_initial_values(spec, dtype, text)
        if seed is None:
            seed = state.arguments.seed if spec.seed is None else spec.seed
        where = _device(device, chosen.device_id)
        if where.type == "meta":
            raise NotImplementedError(
                f"dynamic table '{text}' cannot be made on the meta device, and need not be, for it begins empty: give "
                "it device='cpu' or device='cuda'"
            )
        capacity = chosen.capacity(place.dimension * dtype.itemsize, _memory_of(where))
        made = _Made(
            chosen.var_type,
            getattr(torch, dynamic.check_key_type(key_type, text)),
            dtype,
            capacity,
            chosen.init_capacity,
            spec,
            _placement.as_signed(_placement.table_seed(seed, text)),
            chosen.evict_strategy,
            capacity if chosen.most_candidates is None else chosen.most_candidates,
            chosen.policy(place.dimension * dtype.itemsize),
        )
        self = cls._begin(made, place, text, trainable, where)
        if chosen.store is not None:  # which the table has once it is there
            self._stored = StoredRows(chosen.store, text, chosen.counts_uses)
        return self

    @classmethod
    def _begin(cls, made: _Made, place: Placement, name: str, trainable: bool, device: torch.device) -> DynamicVariable:
        core = made.core(place, name, device)
        self = cls._wrap(core.rows(), place, name, trainable, core.as_indexed())
        self._core = core
        core.follow(self)
        self._made, self._states = made, []
        return self

    @property
    def grad(self) -> Tensor | None:
        """As of TableParameter; its rows are those that the table has now."""
        self._grow_gradient()
        gradient: Tensor | None = _shown_grad.__get__(self)
        return gradient

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if isinstance(value, PendingGradient) and value.shape[0] < self.shape[0]:  # as of torch.autograd.grad, before
            value = value.grown(self.shape[0])
        _shown_grad.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def _grow_gradient(self) -> None:
        """Gives a gradient that somebody has looked at, or set, when the table had fewer slots the shape of now."""
        held: Any = own_grad.__get__(self)
        if held is None or held.shape[0] >= self.shape[0]:  # more: it was cleared, and a step refuses the gradient
            return
        if isinstance(held, PendingGradient):
            grown: Tensor = held.grown(self.shape[0])
        elif held.layout == torch.sparse_coo:
            grown = torch.sparse_coo_tensor(held._indices(), held._values(), self.shape)
        else:
            grown = torch.cat([held, held.new_zeros((self.shape[0] - held.shape[0], held.shape[1]))])
        own_grad.__set__(self, grown)

    @property
    def data(self) -> Tensor:
        """The slots of now, as a tensor."""
        data: Tensor = _own_data.__get__(self)
        return data

    @data.setter
    def data(self, value: Tensor) -> None:
        if value.device != self.device or value.dtype != self.dtype or value.data_ptr() != self.data_ptr():
            raise RuntimeError(
                f"dynamic table '{self._sok_name}' cannot be moved, converted or given other memory: make it with the "
                "device and dtype that it is to have"
            )

    def share_memory_(self) -> DynamicVariable:
        """Raises RuntimeError: its rows are the memory of a table of this process, which grows."""
        raise RuntimeError(
            f"dynamic table '{self._sok_name}' cannot be in memory that processes share: send the table itself to "
            "another process, which gets a copy, or use a sok.Variable"
        )

    def slots_of(self, keys: Tensor) -> Tensor:
        """See TableParameter."""
        slots: Tensor = self._core.locate(keys, False)
        return slots

    def keyed_slots(self) -> Tensor:
        """See TableParameter."""
        slots: Tensor = self._core.held()[1]
        return slots

    def exported(self) -> tuple[Tensor, Tensor]:
        """See TableParameter."""
        with alone([self]):
            keys, slots = self._core.held()
            keys, rows = with_stored(self, keys.cpu(), Tensor.detach(self)[slots].to("cpu"))
        return keys.to(self.key_type), rows

    def held(self) -> DynamicTable:
        """See TableParameter."""
        return DynamicTable(self)

    def add_column(self, width: int, initial: float, dtype: torch.dtype) -> Tensor:
        """See TableParameter."""
        column: Tensor = self._core.add_column(width, initial, dtype)
        if dtype == torch.float32:  # others are stamps
            self._states.append((weakref.ref(column), width, initial))
        return column

    def states(self) -> list[tuple[Tensor, int, float]]:
        """(column, width, initial) of the states of optimizers that there are of it."""
        return [(column, width, initial) for ref, width, initial in self._states if (column := ref()) is not None]

    def has_column(self, state: Tensor) -> bool:
        """See TableParameter. load_state_dict and copies bring others."""
        return not isinstance(state, KeyedShard) and bool(self._core.has(state))

    def new_state(self, key: str, initial: Tensor) -> Tensor:
        """See TableParameter."""
        values = initial.flatten().tolist()
        if initial.dim() > 2 or initial.dtype != torch.float32 or len(set(values)) != 1:
            raise NotImplementedError(
                f"the optimizer state '{key}' of a dynamic table must be one float32 number to begin with, in up to "
                f"two dimensions, not {initial!r}"
            )
        return self.add_column(initial.shape[1] if initial.dim() == 2 else 0, values[0], torch.float32)

    def shared(self) -> Tensor:
        """See TableParameter."""
        return keyed_shard.on_host(self)

    def taken(self, given: Tensor, assign: bool) -> Tensor:
        """See TableParameter: the table itself, which holds the rows then."""
        fill(self, keyed_shard.for_table(KeyedShard.of(given) if isinstance(given, DynamicVariable) else given, self))
        return self

    def share_states(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """See TableParameter."""
        return keyed_shard.share(self, state)

    def take_states(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """See TableParameter."""
        return keyed_shard.take(self, state)

    @property
    def size(self) -> Size:
        """How many keys this rank holds; called, the shape: ``table.size()``. On a GPU it waits."""
        size = Size(self._core.size())
        size._table = self
        return size

    @property
    def stored(self) -> int:
        """How many rows are in its store; `size` does not count them."""
        return 0 if self._stored is None else self._stored.size

    @property
    def capacity(self) -> int:
        """The most keys that this rank may hold."""
        return self._made.capacity

    @property
    def most_candidates(self) -> int:
        """How many keys may wait for a row; 0: none."""
        return self._made.most_candidates

    @property
    def device_rows(self) -> int:
        """With max_hbm_for_vectors: how many rows are in the memory of a GPU that it is on; 0: all."""
        return int(self._made.policy.device_rows)

    @property
    def dimension(self) -> int:
        """Elements a row."""
        return self._placement.dimension

    @property
    def key_type(self) -> torch.dtype:
        """torch.int64 or torch.int32."""
        return self._made.key_type

    @property
    def backend_type(self) -> str:
        """The var_type: "hbm" or "hybrid"."""
        return self._made.var_type

    @property
    def indices(self) -> Tensor:  # type: ignore[override]  # a method of Tensor
        """The keys that this rank holds, [n] of key_type where the table is, in the order of :func:`export`."""
        held: Tensor = self._core.held()[0]
        keys = held if self._stored is None else self.exported()[0].to(self.device)
        return keys.to(self.key_type)

    def _keys(self, keys: Any) -> Tensor:
        found = keys_of(self, keys)
        if found.dim() != 1:
            raise ValueError(f"keys of table '{self._sok_name}' must be [n], got {list(found.shape)}")
        return found.contiguous()

    @torch.no_grad()
    def erase(self, keys: Any) -> int:
        """Gives rows of this rank up, with all that belongs to them. A gradient for one of them is refused from now on.

        Args:
          keys: [n] int32 or int64; those that this rank does not hold are passed over.

        Returns:
          How many it held. On a GPU it waits.
        """
        found = self._keys(keys)
        with alone([self]):
            before = self.stored
            if self._stored is not None:  # first, as it may raise
                self._stored.erase(found.to("cpu", torch.int64).numpy())
            return int(self._core.erase(found)) + before - self.stored

    @torch.no_grad()
    def clear(self) -> None:
        """Gives up all rows of this rank, as :meth:`erase` does. Keeps their memory."""
        with alone([self]):
            if self._stored is not None:  # first, as it may raise
                self._stored.clear()
            self._core.clear()

    reset_parameters = clear

    @torch.no_grad()
    def shrink(self) -> int:
        """Gives memory back that no row uses, after many were erased or expired: rows move together, and the index is
        made anew. A gradient of a lookup before is refused from now on. Tensors over the table's memory (``detach()``,
        slices) must not be read any more. On a GPU it waits. Until it is done memory is needed for the new
        index, and 16 bytes a row.

        Returns:
          How many bytes.
        """
        with alone([self]):
            return int(self._core.shrink())

    def set_epoch(self, epoch: int) -> None:
        """The epoch of what is used from now on: rows of the oldest epoch are evicted first. It begins at 0, or at the
        newest of the rows that were loaded.

        Raises ValueError where evict_strategy is neither "epoch_lru" nor "epoch_lfu", and outside [0, 2^31 - 2], with
        "epoch_lfu" [0, 2046].
        """
        self._core.set_epoch(dynamic.check_epoch(epoch, self._made.evict_strategy, self._sok_name))

    @torch.no_grad()
    def scores(self, keys: Any) -> Tensor:
        """The ranks of rows where evict_strategy is "customized": 0, or as :meth:`set_scores` gave them.

        Args:
          keys: [n] int32 or int64.

        Returns:
          [n] int64 where the table is, -1 of keys that this rank does not hold.

        Raises ValueError for another evict_strategy.
        """
        slots, scores = self._scores_of(self._keys(keys))
        return torch.where(slots < 0, -1, dynamic.ranks_in(scores))

    @torch.no_grad()
    def set_scores(self, keys: Any, scores: Any) -> None:
        """Ranks rows where evict_strategy is "customized": of the lowest the one goes first that was used longest ago.

        Args:
          keys: [n] int32 or int64, each once; those that this rank does not hold are passed over.
          scores: [n] integers in [0, 2^31 - 2].

        Raises:
          ValueError: another evict_strategy, another shape, a score out of range. Nothing has changed.
          TypeError: scores that are no integers.
        """
        found = self._keys(keys)
        slots, before = self._scores_of(found)
        ranks = torch.as_tensor(scores, device=self.device)
        if ranks.is_floating_point() or ranks.is_complex() or ranks.dtype == torch.bool:
            raise TypeError(f"scores of table '{self._sok_name}' must be integers, not {ranks.dtype}")
        if ranks.shape != found.shape:
            raise ValueError(
                f"scores of table '{self._sok_name}' must be {list(found.shape)}, one a key, got {list(ranks.shape)}"
            )
        ranks = ranks.to(torch.int64)
        if len(ranks) and not 0 <= int(ranks.min()) <= int(ranks.max()) <= dynamic.MOST_SCORE:
            raise ValueError(f"scores of table '{self._sok_name}' must be in [0, {dynamic.MOST_SCORE}]")
        self._core.set_scores(slots, torch.where(slots < 0, 0, dynamic.with_ranks(before, ranks)))

    def _scores_of(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """(slots, scores as the core has them); -1 of keys that it does not hold, and any."""
        dynamic.check_has_scores(self._made.evict_strategy, self._sok_name)
        slots = self._core.locate(keys, False)
        scores = self._core.scores()
        return slots, scores[slots.clamp(min=0)] if len(scores) else torch.zeros_like(slots)

    def statistics(self) -> dynamic.Statistics:
        """What this rank's part holds, and what has happened to it since it was made. On a GPU it waits."""
        size = int(self._core.size())  # which also brings what the host has heard of insertions up to date
        return dynamic.Statistics.of(size, self.capacity, *self._core.counts())

    def __deepcopy__(self, memo: dict[int, Any]) -> DynamicVariable:
        if id(self) not in memo:
            memo[id(self)] = _rebuild(*self.__reduce_ex__(2)[1])
        copied: DynamicVariable = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        dynamic.refuse_store(self._stored, self._sok_name, "a copy")
        shard = KeyedShard.of(self)
        starting: Any = get_spawning_popen()
        if starting is not None:
            # The new process opens the memory of the copy: it must not go, and its file descriptors with it, when
            # all is pickled but the process not started yet. It goes with the Process.
            starting._sok_sent = [*getattr(starting, "_sok_sent", ()), shard]
        return _rebuild, (type(self), self._made, self._placement, self._sok_name, self.requires_grad, shard)

    # torch.distributed.checkpoint, given the table itself (state_dict(keep_vars=True)).

    def __create_write_items__(self, fqn: str, value: Any) -> list[Any]:
        raise not_distributed(self._sok_name)

    def __create_chunk_list__(self) -> list[Any]:
        raise not_distributed(self._sok_name)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        place = self._placement
        return (
            f"sok.DynamicVariable '{self._sok_name}' [{place.dimension}] {self.backend_type} {self.mode}, rank "
            f"{place.rank} of {place.num_ranks} holding {int(self.size)} of at most {self.capacity} rows:\n"
            f"{self.detach()!r}"
        )


def _rebuild(
    cls: type[DynamicVariable], made: _Made, place: Placement, name: str, trainable: bool, shard: KeyedShard
) -> DynamicVariable:
    """A table that holds `shard`, with the slots that it had: states of optimizers are copied by slot."""
    table = cls._begin(made, place, name, trainable, shard.device)
    fill(table, shard)
    return table


def _device(device: torch.device | str | None, number: int | None) -> torch.device:
    given = f"cuda:{number}" if device is None and number is not None else device
    return torch.empty(0, device=given).device  # with its number


def _memory_of(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return dynamic.host_memory_bytes()
