# SPDX-License-Identifier: Apache-2.0
"""DistributedEmbedding, a layer of either Keras around a list of embeddings."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from sparse_operation_kit.hybrid import DistEmbeddingStrategy, Plan, Report
from sparse_operation_kit.hybrid.dumping import LayerTables
from sparse_operation_kit.hybrid.plans import plan_layer, report_layer
from sparse_operation_kit.hybrid.strategy import config_of
from sparse_operation_kit.tensorflow import devices, keras_compat, layer_tables, runtime
from sparse_operation_kit.tensorflow._autograph import as_written
from sparse_operation_kit.tensorflow.dist_model_parallel import inputs as _inputs
from sparse_operation_kit.tensorflow.dist_model_parallel import outputs as _outputs
from sparse_operation_kit.tensorflow.dist_model_parallel import weights as _weights
from sparse_operation_kit.tensorflow.dist_model_parallel.config import is_custom
from sparse_operation_kit.tensorflow.dist_model_parallel.custom import CustomLayers
from sparse_operation_kit.tensorflow.dist_model_parallel.planned import Planned
from sparse_operation_kit.tensorflow.dist_model_parallel.planning import constraints_of, wait_for
from sparse_operation_kit.tensorflow.dist_model_parallel.replicated import Replicated
from sparse_operation_kit.tensorflow.dist_model_parallel.setup import ensure_initialised
from sparse_operation_kit.tensorflow.dist_model_parallel.tables import Tables
from sparse_operation_kit.tensorflow.group import Group, check_between_steps


def make_distributed_embedding(keras: Any) -> Any:
    """DistributedEmbedding as a layer of the given Keras."""

    @keras.utils.register_keras_serializable(package="sparse_operation_kit")
    class DistributedEmbedding(keras.layers.Layer):  # type: ignore[misc]
        """Embedding tables spread over the processes: replicated, whole, or by columns or rows.

        Args:
          embeddings: layers that are not built: Keras's Embedding, this package's, or of any class with `get_config`
            and `from_config` that has `input_dim` and `output_dim`. Only their configs are read. A class that this
            package does not know looks up by its own `call`, on the rank that holds the table.
          strategy: also "planned", which has `plan` choose by costs, with its defaults, or what `plan` gave. Ids [b, 1]
            without a combiner then give [b, 1, width], wherever their table lies.
          strategy, column_slice_threshold, row_slice_threshold, data_parallel_threshold, gpu_embedding_size,
            input_table_map: see `DistEmbeddingStrategy`. The thresholds for rows and for replication count only with
            several ranks and `dp_input`.
          dp_input: True: called with all inputs, this rank's samples of each. Ranks may have different numbers of
            samples. False: called with this rank's inputs alone, `strategy.input_ids_list[rank]`, all samples of each,
            in the order of ranks; their number is a multiple of that of ranks.
          **kwargs: as of a Keras layer. Its name, and the number of a table, name the table in dumps and determine its
            initial rows: NAME/NUMBER. It must be the same on all ranks.

        Call it with a list of inputs: dense ids [b] or [b, ...], `tf.RaggedTensor` or `tf.SparseTensor`, of any mixture
        and of sizes that are known when it runs. It returns a list in the order of inputs, in the layer's compute
        dtype: [b, width] with a combiner or from ids [b]; without a combiner ids.shape + [width], but [b, width] from
        ids [b, 1] of a table-parallel table with several ranks, as distributed-embeddings has it; of ragged ids without
        a combiner a `tf.RaggedTensor`.

        `init()` is called with its defaults, and Horovod's, where nobody has. `weights` are this rank's: replicated
        tables, then variables of table-parallel ones, then rows of row-sliced ones (row k is on rank k mod N). What is
        not replicated has the attribute `de_local`. The gradients of those are sums over all ranks, whatever optimizer
        applies them; `DistributedGradientTape` and `DistributedOptimizer` of this module divide them by the number of
        ranks, as they average those of all others.

        Raises:
          ValueError: an unknown strategy, more ranks than there are slices; inputs that are too few or too many, or
            whose batches differ; with dp_input=False a batch that is no multiple of the number of ranks; a row-sliced
            table of an unknown class; an embeddings_constraint of a table that is not replicated.
          NotImplementedError: embeddings of an unknown class within a strategy of several workers.
          tf.errors.InvalidArgumentError: an id outside its table, on all ranks, or on its own where all tables are
            replicated; nothing changes then.
        """

        def __init__(
            self,
            embeddings: Sequence[Any],
            strategy: str | Plan | Mapping[str, Any] = "basic",
            column_slice_threshold: float | None = None,
            row_slice_threshold: float | None = None,
            dp_input: bool = True,
            input_table_map: Sequence[int] | None = None,
            data_parallel_threshold: float | None = None,
            gpu_embedding_size: float | None = None,
            **kwargs: Any,
        ) -> None:
            kwargs.setdefault("autocast", False)
            super().__init__(**kwargs)
            layer_tables.prepare(self)
            ensure_initialised()
            self.world_size, self.rank = runtime.session.num_ranks(), runtime.session.rank()
            configs = [config_of(embedding) for embedding in embeddings]
            plan, request = plan_layer(
                configs,
                strategy,
                column_slice_threshold,
                row_slice_threshold,
                dp_input,
                input_table_map,
                data_parallel_threshold,
                gpu_embedding_size,
                group=Group(),
                gpu=devices.gpu_of(),
                constraints=constraints_of(configs),
            )
            self.dp_input = dp_input
            self.column_slice_threshold = plan.column_slice_threshold
            self.row_slice_threshold = plan.row_slice_threshold
            self.data_parallel_threshold = plan.data_parallel_threshold
            self.gpu_embedding_size = plan.gpu_embedding_size
            custom = [table for table, config in enumerate(plan.global_configs) if is_custom(config)]
            by_rows = sorted(set(custom) & set(plan.table_groups[2]))
            if by_rows:
                raise ValueError(
                    f"tables {by_rows} are of a class that looks up by itself, which cannot be sliced by rows: "
                    "raise row_slice_threshold"
                )
            whole = set(range(len(plan.global_configs))) - set(plan.table_groups[0]) - set(custom)
            held = [table for table in sorted(whole) if plan.global_configs[table].get("embeddings_constraint")]
            if held:
                raise ValueError(
                    f"tables {held} have an embeddings_constraint, which changes rows that a step does not "
                    "name: only replicated tables (data_parallel_threshold) can have one"
                )
            # tf_keras would make wrappers of its own around lists and dicts of an attribute that it can look into.
            self._planned = Planned(plan, request, strategy)
            self.dp_layers: Any = []
            self.local_embedding_layers: Any = []
            self.row_layers: Any = []
            self.col_inputs_offsets = [offset or None for offset in plan.local_input_offsets[self.rank]]
            by_rows_offsets = plan.row_inputs_offsets[self.rank] if plan.table_groups[2] else []
            self.row_inputs_offsets = [offset or None for offset in by_rows_offsets]

        @property
        def strategy(self) -> DistEmbeddingStrategy:
            """The plan."""
            return self._planned.strategy

        # --- variables ------------------------------------------------------------------------------------------------

        def build(self, input_shape: Any = None) -> None:
            """Makes the variables. No input shape is needed."""
            planned = self._planned
            if hasattr(planned, "tables"):
                return
            plan = planned.strategy
            initializers = planned.initializers(keras)
            planned.replicated = Replicated(self, keras, plan, initializers)
            with tf.init_scope():
                planned.tables = Tables(self.name, planned.layout, initializers)
            planned.custom = CustomLayers(self, planned.layout, plan)
            own = planned.layout.of_rank(self.rank)
            # The gradient of a lookup is exchanged by all ranks: each has a table that it leads to, if without rows.
            asked = {part.variable for parts in planned.layout.lookups for part in parts}
            tables = planned.tables.variables
            trained = [i for i, table in enumerate(tables) if i in asked and table is not None and table.trainable]
            if not set(trained) & set(own):
                own = [*own, *trained[:1]]
            self._own_tables = [tables[i] for i in own if tables[i] is not None]
            for table in self._own_tables:
                for variable in (table, keras_compat.track(self, table)):
                    variable.de_local = True
            for variable in (*self._own_tables, *planned.dense_tables()):
                keras_compat.raw(variable)._sok_layer = weakref.ref(self)
            self.dp_layers = planned.replicated.layers
            self.local_embedding_layers = planned.local_tables(self.rank, row_sliced=False)
            self.row_layers = planned.local_tables(self.rank, row_sliced=True)
            self.built = True

        def __call__(self, inputs: Any, *args: Any, **options: Any) -> Any:
            self.build()
            return super().__call__(inputs, *args, **options)

        # --- the lookup -----------------------------------------------------------------------------------------------

        @as_written
        def call(self, inputs: Any, training: Any = None) -> list[Any]:
            """See the class."""
            planned = self._planned
            planned.custom.check()
            parallel = self.dp_input or self.world_size == 1
            results = self._look_up(inputs) if parallel else self._look_up_own(inputs)
            results = [tf.cast(result, self.compute_dtype) for result in results]
            planned.add_losses(self, keras, results, self.rank, self.world_size)
            return results

        def _ids_of(self, inputs: Any) -> list[Any]:
            """The inputs as `as_ids` gives them."""
            if not isinstance(inputs, (list, tuple)):
                raise ValueError(
                    f"a DistributedEmbedding is called with a list of inputs, got a {type(inputs).__name__}"
                )
            self.strategy.inputs_of(self.rank, self.dp_input, len(inputs))
            values = [_inputs.as_ids(value) for value in inputs]
            _inputs.check_batches(values, 1 if self.dp_input else self.world_size)
            return values

        def _look_up(self, inputs: Any) -> list[Any]:
            planned = self._planned
            plan = planned.strategy
            numbers = [*plan.input_groups[1], *plan.input_groups[2]]
            configs = {number: plan.global_configs[planned.tables_of[number]] for number in numbers}
            custom = [number for number in numbers if is_custom(configs[number])]
            bags = {}
            with planned.together(numbers):
                values = self._ids_of(inputs)
                if not self.dp_input:
                    values = plan.in_input_order(values)
                results: list[Any] = [None] * len(values)
                messages: list[tf.Tensor] = []
                for number, place in zip(plan.input_groups[0], plan.map_groups[0], strict=True):
                    ids, told = planned.replicated.checked(place, values[number], alone=not numbers)
                    messages += told
                    results[number] = planned.replicated.look_up(place, ids)
                _inputs.refuse_sparse(*(values[number] for number in custom))
                for number, config in configs.items():
                    if not is_custom(config):
                        flat_single = plan.flattens(number, self.dp_input)
                        bags[number] = _inputs.as_bags(
                            values[number], config.get("combiner"), config["output_dim"], flat_single=flat_single
                        )
            if bags:
                pooled = planned.tables.look_up([(i, each.ids) for i, each in bags.items()], messages)
                for (number, each), output in zip(bags.items(), pooled, strict=True):
                    results[number] = each.shaped(output)
            if custom:
                own = {number: values[number] for number in custom}
                found = planned.custom.look_up(own, self.compute_dtype, [] if bags else messages)
                for number, output in found.items():
                    results[number] = output
            return results

        def _look_up_own(self, inputs: Any) -> list[Any]:
            """Of inputs that are this rank's own, with the samples of all ranks: each rank's samples go back to it."""
            planned = self._planned
            plan = planned.strategy
            configs = [plan.global_configs[planned.tables_of[number]] for number in plan.input_ids_list[self.rank]]
            bags: list[Any] = []
            with planned.together(None):
                values = self._ids_of(inputs)
                for config, value, width in zip(configs, values, planned.rank_widths[self.rank], strict=True):
                    if not config.get("combiner") and value.shape.rank != 1 and value.shape[1:] != [1]:
                        raise ValueError(
                            f"with dp_input=False, on several ranks, ids without a combiner must be [batch] or "
                            f"[batch, 1], got the shape {value.shape}"
                        )
                    bags.append(None if is_custom(config) else _inputs.as_bags(value, config.get("combiner"), width))
            pooled = planned.tables.look_up_own([each and each.ids for each in bags], self.rank)
            parts = planned.layout.rank_lookups[self.rank]
            calls = [(part, value) for part, each, value in zip(parts, bags, values, strict=True) if each is None]
            found = iter(planned.custom.call_parts(calls))
            outputs = [
                next(found) if each is None else each.shaped(output) for each, output in zip(bags, pooled, strict=True)
            ]
            outputs = [tf.cast(output, self.compute_dtype) for output in outputs]
            batch = _inputs.dynamic_batch(values[0])
            shares = _outputs.equal_shares(batch, self.world_size)
            beside = next((table for table in planned.tables.variables if table is not None), None)
            pieces = _outputs.send_back(outputs, planned.rank_widths, shares, self.compute_dtype, beside)
            return plan.joined(pieces, lambda parts: tf.concat(parts, -1))

        def layer_tables(self) -> LayerTables:
            """Its tables as `sok.dump` and `sok.load` take them."""
            self.build()
            return self._planned.layer_tables(self.name, self.rank)

        # --- what it costs --------------------------------------------------------------------------------------------

        def report(self, inputs: Any = None, *, repeats: int = 5, **options: Any) -> Report:
            """What each rank holds and how long the stages of a step take, estimated, and beside it what was measured:
            bytes of tables, and with `inputs` the time of a lookup. Called by every rank, eagerly.

            Args:
              inputs: a batch, as the layer is called with; with dp_input the estimate is for it.
              repeats: lookups that are timed, after one that is not; the median counts, of the slowest rank.
              options: of `plan`: batch_size, hotness, skew, samples, optimizer, topology; where there are none, those
                of the plan count.
            """
            check_between_steps("report")
            self.build()
            planned, plan = self._planned, self._planned.strategy
            measured = planned.held_bytes(self.rank)
            if inputs is not None and (self.dp_input or self.world_size == 1):
                values = [_inputs.as_ids(value) for value in inputs]
                given = values if self.dp_input else plan.in_input_order(values)
                ids = [_inputs.flat_ids(value).numpy() for value in given]
                measured["keys"] = [len(each) for each in ids]
                measured["samples"] = int(_inputs.dynamic_batch(given[0])) if given else 0
                if "skew" not in options:
                    options.setdefault("samples", ids)
            look_up = None if inputs is None else lambda: wait_for(self(inputs))
            return report_layer(
                plan,
                planned.request,
                measured,
                look_up,
                repeats,
                group=Group(),
                gpu=devices.gpu_of(),
                **options,
            )

        # --- weights --------------------------------------------------------------------------------------------------

        def get_weights(self, all_ranks: bool = False) -> list[Any]:
            """All tables, whole, in the order of `embeddings`. Called by every rank.

            Returns:
              NumPy arrays [input_dim, output_dim]; [] on ranks other than 0 unless `all_ranks`.
            """
            self.build()
            return _weights.get_weights(self._planned, all_ranks)

        def set_weights(self, weights: Sequence[Any], chunk: int = 134217728, use_lock: bool = False) -> None:
            """Sets all tables. Called by every rank, with the same tables.

            Args:
              weights: for each of `embeddings` an array [input_dim, output_dim], or the path of a .npy file, of which a
                rank reads what it holds.
              chunk: how many elements are written at once.
              use_lock: ranks write one after another, where the host is short of memory.

            Raises, on all ranks when on one; nothing has changed then:
              ValueError: the layer is not built; another number of tables, or another shape.
              TypeError: a dtype that is not floating. OSError: a file that cannot be read.
            """
            if not hasattr(self._planned, "tables"):
                raise ValueError(
                    f"You called `set_weights(weights)` on layer {self.name} with a weight list of length "
                    f"{len(weights)}, but the layer was expecting 0 weights. Call build() first, which needs no input."
                )
            _weights.set_weights(self._planned, weights, chunk, use_lock)

        # --- Keras ----------------------------------------------------------------------------------------------------

        def compute_output_shape(self, input_shape: Any) -> Any:
            shapes = [tuple(shape) for shape in input_shape]
            plan, tables_of = self._planned.strategy, self._planned.tables_of
            alone = self.world_size == 1
            if not (alone or self.dp_input):
                size = shapes[0][0] if shapes else None
                batch = None if size is None else size // self.world_size
                return [(batch, plan.global_configs[table]["output_dim"]) for table in tables_of]
            if not self.dp_input:
                shapes = plan.in_input_order(shapes)
            result = []
            for number, (shape, table) in enumerate(zip(shapes, tables_of, strict=True)):
                config = plan.global_configs[table]
                flat = plan.flattens(number, self.dp_input) and shape[1:] == (1,)
                pooled = config.get("combiner") is not None
                inner = shape[:1] if len(shape) == 1 or flat else shape[:-1] if pooled else shape
                result.append((*inner, config["output_dim"]))
            return result

        def compute_output_spec(self, inputs: Any, *args: Any, **options: Any) -> Any:
            shapes = self.compute_output_shape([value.shape for value in inputs])
            return [keras.KerasTensor(shape, self.compute_dtype) for shape in shapes]

        def get_config(self) -> dict[str, Any]:
            return {
                **super().get_config(),
                "embeddings": self._planned.serialized(keras),
                "strategy": self._planned.given_strategy,
                "column_slice_threshold": self.column_slice_threshold,
                "row_slice_threshold": self.row_slice_threshold,
                "dp_input": self.dp_input,
                "input_table_map": list(self._planned.tables_of),
                "data_parallel_threshold": self.data_parallel_threshold,
                "gpu_embedding_size": self.gpu_embedding_size,
            }

        @classmethod
        def from_config(cls, config: dict[str, Any]) -> Any:
            config = dict(config)
            config["embeddings"] = [keras.layers.deserialize(each) for each in config["embeddings"]]
            if "dtype" in config:
                config["dtype"] = keras_compat.policy_name(config["dtype"])
            return cls(**config)

    return DistributedEmbedding
