# SPDX-License-Identifier: Apache-2.0
"""The variables of a plan, what their rows are at the start, and the one lookup of all of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparse_operation_kit import placement as _placement
from sparse_operation_kit.hybrid.layout import Layout, Member, Part, PlannedVariable, chunks, table_name
from sparse_operation_kit.hybrid.strategy import Config
from sparse_operation_kit.placement import Initializer
from sparse_operation_kit.torch import runtime
from sparse_operation_kit.torch._ops import ops
from sparse_operation_kit.torch.dist_model_parallel.inputs import Bags
from sparse_operation_kit.torch.lookup import look_up, tell_peers
from sparse_operation_kit.torch.table_stack import Selection
from sparse_operation_kit.torch.variable import Variable

CHUNK = 1 << 24
"""Elements that are drawn at once where columns of a table are."""


class _Lookup(NamedTuple):
    """One call of `look_up`: which of the layer's lookups it does, their tables and combiners."""

    numbers: list[int]
    params: list[Variable | Selection]
    combiners: list[str]


class Tables:
    """The variables of all ranks, of which this one has rows of some."""

    def __init__(self, layer: str, layout: Layout, configs: Sequence[Config], device: Any) -> None:
        """layer: its name. configs: of all tables. device: where variables are that are not offloaded."""
        self.layout = layout
        self.inputs = [number for number, parts in enumerate(layout.lookups) if parts]
        """Those of the layer that are looked up here."""
        self._layer, self._configs = layer, configs
        self.variables = [self._make(planned, device) for planned in layout.variables]
        for number, variable in enumerate(self.variables):
            variable._placement = dataclasses.replace(variable.placement, contents=layout.contents(number))
        self.choose()

    def choose(self) -> None:
        """Makes what lookups name, anew where a variable was replaced."""
        self._chosen = [
            [self._choose(variable, planned, number) for number in range(len(planned.members))]
            for variable, planned in zip(self.variables, self.layout.variables, strict=True)
        ]
        self._lookups = self._calls([part for parts in self.layout.lookups for part in parts])
        self._own_lookups = self._calls([part for parts in self.layout.rank_lookups for part in parts])

    def _choose(self, variable: Variable, planned: PlannedVariable, number: int) -> Variable | Selection:
        state = runtime.get()
        member = planned.chosen(number, self._layer, state.num_ranks, state.rank)
        return variable if member is None else Selection(variable, [member])

    def _make(self, planned: PlannedVariable, device: Any) -> Variable:
        config = planned.config

        def fill(shard: Tensor) -> None:
            if not len(shard):
                return
            state = runtime.get()
            place = planned.placement(state.num_ranks, state.rank)
            for member in planned.members:
                if planned.owner >= 0:
                    rows = shard[member.first_row : member.first_row + member.rows]
                    fill_rows(rows, self._name(member), self._configs[member.table], member.first_column)
                else:
                    keys = place.first_key, place.key_stride
                    fill_rows(shard, self._name(member), self._configs[member.table], 0, *keys)

        return Variable(
            shape=(planned.rows, planned.columns),
            initializer=fill,
            dtype=getattr(torch, config.get("dtype", "float32")),
            mode=planned.mode,
            name=planned.name(self._layer, self.layout.widths),
            trainable=config.get("trainable", True),
            device="cpu" if config.get("cpu_offload") else device,
        )

    def _name(self, member: Member) -> str:
        return table_name(self._layer, member.table)

    def _calls(self, parts: Sequence[Part]) -> list[_Lookup]:
        """One for the tables of each device, which are one unless some are offloaded."""
        calls: dict[torch.device, _Lookup] = {}
        for number, part in enumerate(parts):
            call = calls.setdefault(self.variables[part.variable].device, _Lookup([], [], []))
            call.numbers.append(number)
            call.params.append(self._chosen[part.variable][part.member])
            call.combiners.append(self.layout.variables[part.variable].config.get("combiner") or "sum")
        return list(calls.values())

    def tell_peers(self, own: bool) -> None:
        """Tells the other ranks, which are in `look_up`, with `own` in `look_up_own`, that this one failed before."""
        for call in (self._own_lookups if own else self._lookups)[:1]:
            tell_peers(runtime.get(), call.params)

    def look_up(self, bags: Sequence[Bags]) -> list[Tensor]:
        """The pooled vectors of all inputs of these tables: one lookup. bags: of all inputs of the layer."""
        lookups = self.layout.lookups
        outputs = _look_up(self._lookups, [bags[i] for i, parts in enumerate(lookups) for _ in parts])
        if len(outputs) == len(self.inputs):
            return outputs
        return self.layout.joined(self.inputs, outputs, lambda parts: torch.cat(parts, -1))

    def look_up_own(self, bags: Sequence[Bags], rank: int) -> list[Tensor]:
        """The pooled vectors of the inputs that are this rank's own."""
        splits = torch.zeros(1, dtype=torch.int64, device=self.variables[0].device)
        nothing = Bags(splits[:0], splits, (), 0)
        lookups, mine = self.layout.own_lookups(rank, bags, nothing)
        return _look_up(self._own_lookups, [each for _, each in lookups])[mine]


def _look_up(calls: Sequence[_Lookup], bags: Sequence[Bags]) -> list[Tensor]:
    """The vectors of all lookups, on the GPU if some are. Gradients are those of the mean of the ranks' losses,
    whatever init() says.
    """
    scale = 1.0 / runtime.get().num_ranks
    outputs: list[Any] = [None] * len(bags)
    for call in calls:
        ids = [(bags[number].values, bags[number].offsets) for number in call.numbers]
        found = look_up(call.params, ids, None, call.combiners, gradient_scale=scale)
        for number, output in zip(call.numbers, found, strict=True):
            outputs[number] = output
    if len(calls) == 1:
        return outputs
    target = max((output.device for output in outputs), key=lambda device: device.type == "cuda")
    return [output.to(target) for output in outputs]


def fill_rows(
    rows: Tensor, name: str, config: Config, first_column: int, first_key: int = 0, key_stride: int = 1
) -> None:
    """Fills rows, or columns of rows from `first_column` on, with what the table of this name starts with."""
    initializer = config.get("embeddings_initializer", "uniform")
    width, columns = config["output_dim"], rows.shape[1]
    if callable(initializer):
        whole = rows if columns == width else rows.new_empty(config["input_dim"], width)
        with torch.no_grad():
            initializer(whole)
            if whole is not rows:
                rows.copy_(whole[:, first_column : first_column + columns])
        return
    spec = initializer
    if not isinstance(spec, Initializer):
        spec = _placement.parse_initializer(initializer, config["input_dim"], width)
    seed = runtime.get().arguments.seed if spec.seed is None else spec.seed
    drawn_with = spec.kind, _placement.as_signed(_placement.table_seed(seed, name)), spec.a, spec.b, None
    if first_column == 0:  # a row's first elements are the same, whatever its width
        ops.initialize(rows, *drawn_with, first_key, key_stride)
        return
    end = first_column + columns
    for first, count in chunks(len(rows), end, CHUNK):
        drawn = rows.new_empty(count, end)
        ops.initialize(drawn, *drawn_with, first_key + first * key_stride, key_stride)
        rows[first : first + count] = drawn[:, first_column:]
