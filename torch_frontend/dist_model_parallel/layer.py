# SPDX-License-Identifier: Apache-2.0
"""DistributedEmbedding, a module around a list of embeddings."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sparse_operation_kit.checkpoint.group import agree
from sparse_operation_kit.hybrid import Plan, Report
from sparse_operation_kit.hybrid.dumping import LayerTables
from sparse_operation_kit.hybrid.layout import layout_of, table_name
from sparse_operation_kit.hybrid.plans import plan_layer, report_layer
from sparse_operation_kit.hybrid.transfer import Transfer, as_floats
from sparse_operation_kit.torch import communication, runtime
from sparse_operation_kit.torch.dist_model_parallel import inputs as _inputs
from sparse_operation_kit.torch.dist_model_parallel import outputs
from sparse_operation_kit.torch.dist_model_parallel.embedding import config_of, embedding_lookup
from sparse_operation_kit.torch.dist_model_parallel.planning import gpu_of, wait_for
from sparse_operation_kit.torch.dist_model_parallel.setup import ensure_initialised
from sparse_operation_kit.torch.dist_model_parallel.tables import Tables, fill_rows
from sparse_operation_kit.torch.group import Group

_numbers = itertools.count()


class _Mark:
    """Tells which layer a table is of. A copy or pickle of it tells nothing until the layer's copy is made."""

    def __init__(self, layer: DistributedEmbedding | None = None) -> None:
        self._layer = None if layer is None else weakref.ref(layer)

    def __call__(self) -> DistributedEmbedding | None:
        return None if self._layer is None else self._layer()

    def __reduce__(self) -> Any:
        return _Mark, ()


def _all_or_nothing(module: nn.Module, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
    """Where one entry of a state_dict does not fit, none is loaded: each table stays as it is."""
    given = {name: own for name, own in module.named_parameters(recurse=False) if prefix + name in state_dict}
    fits = {name for name, own in given.items() if getattr(state_dict[prefix + name], "shape", None) == own.shape}
    error_msgs = others[-1]
    if error_msgs or len(fits) < len(given):
        state_dict.update({prefix + name: given[name] for name in fits})


class DistributedEmbedding(nn.Module):
    """Embedding tables spread over the processes: replicated, whole, or by columns or rows.

    Args:
      embeddings: `Embedding`, nn.Embedding, nn.EmbeddingBag (of "sum" or "mean"), or (rows, width[, combiner]). Of
        modules only sizes, dtype, combiner and whether they are trained are taken, and of `Embedding` its initializer:
        make them on the device "meta". Tables of nn.Embedding and nn.EmbeddingBag start as theirs do.
      strategy: also "planned", which has `plan` choose by costs, with its defaults, or what `plan` gave. Ids [b, 1]
        without a combiner then give [b, 1, width], wherever their table lies.
      strategy, column_slice_threshold, row_slice_threshold, data_parallel_threshold, gpu_embedding_size,
        input_table_map: see `DistEmbeddingStrategy`. The thresholds for rows and for replication count only with
        several ranks and `dp_input`.
      dp_input: True: called with all inputs, this rank's samples of each. Ranks may have different numbers of samples.
        False: called with this rank's inputs alone, `strategy.input_ids_list[rank]`, all samples of each, in the order
        of ranks; their number is a multiple of that of ranks.
      name: with the number of a table it names the table in dumps and determines its initial rows: NAME/NUMBER, the
        same in TensorFlow. None: "distributed_embedding", numbered from the second one on. The same on all ranks.
      device: where the tables live; None: PyTorch's default device.

    Call it with a list of inputs, as of `Embedding`; dense ids [b] are bags of one. It returns a list in the order of
    inputs: [b, width] with a combiner or from ids [b]; without one ids.shape + [width], but [b, width] from ids [b, 1]
    of a table-parallel table with several ranks, as distributed-embeddings has it.

    Replicated tables are plain parameters, which DistributedDataParallel or `DistributedOptimizer` averages. All others
    are `sok.Variable`s, which DistributedDataParallel ignores; the gradient that they get from this module is divided
    by the number of ranks, whatever ``init(gradient=...)`` says. init() is called with its defaults where nobody has.

    Raises:
      ValueError: an unknown strategy, more ranks than there are slices, inputs that are too few or too many or whose
        batches differ; with dp_input=False a batch that is no multiple of the number of ranks, and ids without a
        combiner of more than one a sample.
      Otherwise as `sok.lookup_sparse`; an id outside its table is no error of other ranks where all are replicated.
    """

    def __init__(
        self,
        embeddings: Sequence[Any],
        strategy: str | Plan = "basic",
        column_slice_threshold: float | None = None,
        row_slice_threshold: float | None = None,
        dp_input: bool = True,
        input_table_map: Sequence[int] | None = None,
        data_parallel_threshold: float | None = None,
        gpu_embedding_size: float | None = None,
        *,
        name: str | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        ensure_initialised()
        state = runtime.get()
        self.world_size, self.rank, self.dp_input = state.num_ranks, state.rank, dp_input
        if name is None:
            number = next(_numbers)
            name = f"distributed_embedding_{number}" if number else "distributed_embedding"
        self.name = name
        self._gpu = gpu_of(device)
        plan, self._request = plan_layer(
            [config_of(embedding) for embedding in embeddings],
            strategy,
            column_slice_threshold,
            row_slice_threshold,
            dp_input,
            input_table_map,
            data_parallel_threshold,
            gpu_embedding_size,
            group=Group(),
            gpu=self._gpu,
        )
        self.strategy = plan
        self._layout = layout_of(plan)
        self._combiners = [plan.global_configs[table].get("combiner") for table in self._layout.tables_of]  # of inputs
        self._flattens = [plan.flattens(number, dp_input) for number in range(len(self._layout.tables_of))]
        self._replicated: dict[int, str] = {}  # table -> the parameter's name
        for table in plan.table_groups[0]:
            config = plan.global_configs[table]
            dtype = getattr(torch, config.get("dtype", "float32"))
            weight = torch.empty(config["input_dim"], config["output_dim"], dtype=dtype, device=device)
            fill_rows(weight, table_name(name, table), config, 0)
            self._replicated[table] = f"table_{table}"
            self.register_parameter(f"table_{table}", nn.Parameter(weight, config.get("trainable", True)))
        self._tables = Tables(name, self._layout, plan.global_configs, device)
        own = self._layout.of_rank(self.rank)
        trained = [number for number, variable in enumerate(self._tables.variables) if variable.requires_grad]
        if not set(own) & set(trained):
            own += trained[:1]  # without rows here: an optimizer's step is one of all ranks, which agree on it
        self._own = {number: self._parameter_name(number) for number in own}
        for number, text in self._own.items():
            self.register_parameter(text, self._tables.variables[number])
        self.register_load_state_dict_pre_hook(_all_or_nothing)  # after the one that checks tables
        self._mark()

    def _mark(self) -> None:
        """Its tables stand for all of it where they are dumped and loaded."""
        for parameter in self.parameters():
            parameter._sok_layer = _Mark(self)  # type: ignore[attr-defined]

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        self._mark()  # a copy's tables stand for the copy

    def layer_tables(self) -> LayerTables:
        """Its tables as `sok.dump` and `sok.load` take them."""
        configs = self.strategy.global_configs
        return LayerTables(
            self.name,
            self._layout,
            configs,
            [str(config.get("dtype", "float32")) for config in configs],
            {number: self._tables.variables[number] for number in self._layout.of_rank(self.rank)},
            {table: self.get_parameter(name) for table, name in self._replicated.items()},
        )

    def _parameter_name(self, number: int) -> str:
        whole = self._tables.variables[number]._sok_name
        return "table_" + whole.removeprefix(f"{self.name}/").removeprefix("tables_").replace("/", "_")

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        """Moves the tables of other ranks too, of which there are no rows here, and finds those that were replaced."""
        super()._apply(fn, recurse)
        variables = self._tables.variables
        for number, variable in enumerate(variables):
            if number in self._own:
                variables[number] = self._parameters[self._own[number]]  # type: ignore[call-overload]
            else:
                variable.data = fn(variable.data)
        self._tables.choose()
        self._mark()
        return self

    def forward(self, inputs: Sequence[Any]) -> list[Tensor]:
        """See the class."""
        for number, variable in enumerate(self._tables.variables):
            if number not in self._own:
                variable.grad = None  # no rows are here, and no optimizer has it to forget what backward left
        own = not (self.dp_input or self.world_size == 1)
        try:
            bags = self._bags_of(inputs, own)
            results = [] if own else self._look_up_replicated(bags)
        except Exception:
            self._tables.tell_peers(own)
            raise
        if own:
            return self._look_up_own(bags)
        if self._tables.inputs:
            for number, output in zip(self._tables.inputs, self._tables.look_up(bags), strict=True):
                results[number] = bags[number].shaped(output)
        return results

    def _bags_of(self, inputs: Sequence[Any], own: bool) -> list[_inputs.Bags]:
        """The bags of all inputs of the layer, or with `own` of those of this rank."""
        if not isinstance(inputs, (list, tuple)):
            raise ValueError(f"a DistributedEmbedding is called with a list of inputs, got a {type(inputs).__name__}")
        plan = self.strategy
        numbers = plan.inputs_of(self.rank, self.dp_input, len(inputs))
        same: dict[Any, Tensor] = {}
        bags = [
            _inputs.as_bags(ids, self._combiners[number], f"input {number}", self._flattens[number], same)
            for number, ids in zip(numbers, inputs, strict=True)
        ]
        _inputs.check_batches(bags, 1 if self.dp_input else self.world_size)
        if own:
            for number, each in zip(numbers, bags, strict=True):
                if each.inner or each.jagged is not None:
                    raise ValueError(
                        f"input {number}: with dp_input=False, on several ranks, ids without a combiner must be "
                        "[batch] or [batch, 1]"
                    )
            return bags
        return bags if self.dp_input else plan.in_input_order(bags)

    def _look_up_replicated(self, bags: Sequence[_inputs.Bags]) -> list[Any]:
        """The outputs of inputs of replicated tables among those of all inputs."""
        plan = self.strategy
        results: list[Any] = [None] * len(bags)
        for number, place in zip(plan.input_groups[0], plan.map_groups[0], strict=True):
            table = plan.table_groups[0][place]
            each = bags[number]
            weight = self._parameters[self._replicated[table]]
            assert weight is not None
            ids = _inputs.within(each.values.to(weight.device), len(weight), table_name(self.name, table))
            bags_on_device = ids, each.offsets.to(weight.device)
            results[number] = each.shaped(embedding_lookup(weight, bags_on_device, self._combiners[number] or "sum"))
        return results

    def _look_up_own(self, bags: Sequence[_inputs.Bags]) -> list[Tensor]:
        """Of inputs that are this rank's own, with the samples of all ranks: each rank's samples go back to it."""
        pooled = self._tables.look_up_own(bags, self.rank)
        batches = communication.allgather(torch.tensor([bags[0].batch], device=pooled[0].device)).tolist()
        if len(set(batches)) > 1:
            raise ValueError(f"All input need to have same batchsize. got {batches}, the samples that the ranks have")
        pieces = outputs.send_back(pooled, self._layout.rank_widths, bags[0].batch)
        return self.strategy.joined(pieces, lambda parts: torch.cat(parts, -1))

    @torch.no_grad()
    def report(self, inputs: Sequence[Any] | None = None, *, repeats: int = 5, **options: Any) -> Report:
        """What each rank holds and how long the stages of a step take, estimated, and beside it what was measured: the
        bytes of tables, and with `inputs` the time of a lookup. Called by every rank.

        Args:
          inputs: a batch, as the module is called with; with dp_input the estimate is for it.
          repeats: lookups that are timed, after one that is not; the median counts, of the slowest rank.
          options: of `plan`: batch_size, hotness, skew, samples, optimizer, topology; where there are none, those of
            the plan count.
        """
        own = [self._tables.variables[number] for number in self._own]
        held = [*own, *(self.get_parameter(name) for name in self._replicated.values())]
        measured: dict[str, Any] = {"device_bytes": 0, "host_bytes": 0}
        for table in held:
            on_host = self._gpu is not None and not table.is_cuda
            measured["host_bytes" if on_host else "device_bytes"] += table.numel() * table.element_size()
        if inputs is not None and (self.dp_input or self.world_size == 1):
            bags = [_inputs.as_bags(ids, "sum", where="report") for ids in inputs]
            given = bags if self.dp_input else self.strategy.in_input_order(bags)
            measured["keys"] = [len(each.values) for each in given]
            measured["samples"] = given[0].batch if given else 0
            if "skew" not in options:
                options.setdefault("samples", [each.values.cpu().numpy() for each in given])
        look_up = None if inputs is None else lambda: wait_for(self(inputs))
        return report_layer(
            self.strategy,
            self._request,
            measured,
            look_up,
            repeats,
            group=Group(),
            gpu=self._gpu,
            **options,
        )

    @torch.no_grad()
    def get_weights(self, all_ranks: bool = False) -> list[Any]:
        """All tables, whole, in the order of `embeddings`. Called by every rank.

        Returns:
          NumPy arrays [input_dim, output_dim], those of bfloat16 tables as float32; [] on ranks other than 0 unless
          `all_ranks`.
        """
        transfer = Transfer(self.strategy, self._layout, self.rank)
        wanted = all_ranks or self.rank == 0
        tables: list[Any] = []
        if wanted:
            for table, config in enumerate(self.strategy.global_configs):
                name = config.get("dtype", "float32")
                shape = config["input_dim"], config["output_dim"]
                tables.append(np.empty(shape, "float32" if name == "bfloat16" else name))
                if table in self._replicated:
                    tables[table][:] = self.get_parameter(self._replicated[table]).float().cpu().numpy()
        for batch in transfer.batches():
            rows = [self._tables.variables[each.variable].data[transfer.own(each)] for each in batch]
            flat = torch.cat([torch.zeros(0, device="cpu"), *(each.float().cpu().reshape(-1) for each in rows)])
            if all_ranks:
                came = communication.allgather(flat)
            else:
                came = communication.alltoall(flat, [len(flat), *[0] * (self.world_size - 1)])
            if wanted:
                transfer.put(tables, batch, came.numpy())
        return tables

    @torch.no_grad()
    def set_weights(self, weights: Sequence[Any], chunk: int = 134217728, use_lock: bool = False) -> None:
        """Sets all tables. Called by every rank, with the same tables.

        Args:
          weights: for each of `embeddings` an array or tensor [input_dim, output_dim], or the path of a .npy file, of
            which a rank reads what it holds.
          chunk: how many elements are written at once.
          use_lock: ranks write one after another, where the host is short of memory.

        Raises, on all ranks when on one; nothing has changed then:
          ValueError: another number of tables, or another shape. TypeError: a dtype that is no number. OSError.
        """
        group = Group()
        transfer = Transfer(self.strategy, self._layout, self.rank)
        given: list[Any] = []
        arrays = [each.detach().float().cpu().numpy() if isinstance(each, Tensor) else each for each in weights]
        agree(group, lambda: given.extend(transfer.check(arrays, chunk)))
        for turn in range(self.world_size if use_lock else 1):
            if turn == self.rank or not use_lock:
                for table, name in self._replicated.items():
                    self.get_parameter(name).copy_(torch.from_numpy(as_floats(given[table])))
                for number, first, rows in transfer.writes(given, chunk):
                    variable = self._tables.variables[number]
                    variable[first : first + len(rows)] = torch.from_numpy(as_floats(rows)).to(variable)
            if use_lock:
                group.allgather(b"")
