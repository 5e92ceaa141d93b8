# SPDX-License-Identifier: Apache-2.0
"""The tests and examples of distributed-embeddings 1.0, with our module of the same name in place of its own.

Its tests run on 1, 2 and 4 ranks, eagerly, in graph mode, with mixed precision and with both. Clone
https://github.com/NVIDIA-Merlin/distributed-embeddings. Its tables are made smaller; other edits are those of
docs/MIGRATING.md.
"""

from edits import NO_REDUCTION, of
from run import KERAS, Edit, Run

COMMIT = "4cb42d4ae21e2f4ded5c8984a4ed3b18b354e2b5"
FOLDER = ":(exclude)third_party"  # a link in it to CUDA cannot be unpacked

RANKS = (1, 2, 4)
BOTH = tuple(KERAS)
LAYERS = "distributed_embeddings/python/layers"
TESTS = f"{LAYERS}/dist_model_parallel_test.py"
OLDER = "tests/dist_model_parallel_test.py"  # of an earlier version: no modes, fewer tests, seeds from the clock
LOOKUPS = "distributed_embeddings/python/ops/embedding_lookup_ops_test.py"
DLRM = "examples/dlrm"
SYNTHETIC = "examples/benchmarks/synthetic_models"


# --- edits under both Keras -------------------------------------------------------------------------------------------

MODULE = Edit(
    r"^from distributed_embeddings\S* import dist_model_parallel as dmp$",
    "from sparse_operation_kit.tensorflow import dist_model_parallel as dmp",
    "the import",
)
LAYER_MODULE = Edit(
    r"^from distributed_embeddings\S* import embedding$",
    "from sparse_operation_kit.tensorflow import dist_model_parallel as embedding",
    "the import",
)
WHOLE = Edit(
    r"^import distributed_embeddings$",
    "from sparse_operation_kit.tensorflow import dist_model_parallel as distributed_embeddings",
    "the import",
)
NAMES = Edit(
    r"^from distributed_embeddings\S* import (Embedding|IntegerLookup|embedding_lookup|_dp_to_mp_input)$",
    r"from sparse_operation_kit.tensorflow.dist_model_parallel import \1",
    "the import",
)
SMALLER = (
    Edit(
        r"^( *\[1000000, 128\].*\[10000001, 8\]\])$",
        "\\1\nlarge_testcase_sizes = [[max(rows // 100, 2), width] for rows, width in large_testcase_sizes]",
        "the large cases have 2.6 GB of tables, several times on each rank",
    ),
    Edit(r"_threshold=(\d+)00\b", r"_threshold=\1", "smaller tables are placed as the large ones were"),
)
IN_ORDER = Edit(
    r"(test_model\.fit\(dup_ids, label, epochs=1, steps_per_epoch=1)",
    r"\1, shuffle=False",
    "each rank shuffles by itself, and losses in float16, which have to be alike, depend on the order",
)
OWN_SEEDS = Edit(
    r"\+ self\.hvd_rank\)$",
    "+ 1000 * self.hvd_rank)",
    "ranks that read the clock a second apart had the same seed, where a test wants other weights",
)
KERAS_INTERNALS = (
    Edit(r"^from keras\.layers\.preprocessing import integer_lookup$", "integer_lookup = tf.keras.layers", "Keras 2"),
    Edit(
        r"^from keras\.testing_infra import",
        "from tf_keras.src.testing_infra import",
        "Keras 2's decorators of tests are in tf_keras",
    ),
)
ON_ONE = Edit(
    r"self\.distributed = .*",
    "self.distributed = True",
    "on one process it makes no DistributedEmbedding, but asks one for its weights at the end",
)
HERE = Edit(r"os\.path\.join\('/tmp', ", "os.path.join('.', ", "weights go beside the script")
FEWER_ROWS = Edit(
    r"^  model_config = synthetic_models_v3\[FLAGS\.model\]$",
    "  model_config = synthetic_models_v3[FLAGS.model]\n"
    "  model_config = model_config._replace(embedding_configs=[\n"
    "      c._replace(num_rows=max(c.num_rows // 2000, 10)) for c in model_config.embedding_configs])",
    "a 2000th of the rows: they are 4 GB",
)
ON_CPU = Edit(r'"/GPU:0"', '"/CPU:0"', "the device of the inputs, which may be no other")

# --- edits under Keras 3 ----------------------------------------------------------------------------------------------

NOT_CALL = (
    Edit(r"^  @tf\.function\n(  def call)", r"\1", "a tf.function goes around a model and not around its call"),
    Edit(
        r"tf\.cumsum\((ref|test)_model\((\w+)\)",
        r"tf.cumsum(tf.function(lambda x: \1_model(x))(\2)",
        "so that graph mode is one",
    ),
)
ITS_OWN = Edit(
    r"^    optimizer\.apply_gradients\(",
    "    tf.keras.optimizers.SGD(learning_rate=1.5).apply_gradients(",
    "an optimizer of Keras 3 has the variables of one model",
)
LEGACY = Edit(r"optimizers\.legacy\.", "optimizers.", "Keras 3 has no legacy optimizers")
MOMENTUM = Edit(r"momentum=0\)", "momentum=0.0)", "Keras 3 takes no integer")
OURS = Edit(
    r"hvd\.(DistributedGradientTape|broadcast_variables)\(",
    r"dmp.\1(",
    "Horovod's do not know variables of Keras 3",
)
BY_NAME = Edit(r'add_weight\("params",', 'add_weight(name="params",', "the first argument is the shape")
VALUES = Edit(
    r"zip\((gs|ref_gs), (layer|ref_layer)\.weights\)",
    r"zip(\1, [weight.value for weight in \2.weights])",
    "optimizers of TensorFlow 1 take its own variables",
)
DATA_SET = (
    Edit(r"self\.num_batches", "self.number", "the name is one of Keras 3's data sets"),
    Edit(
        r"numerical_features, cat_features\), labels\)\)",
        "numerical_features, tuple(cat_features)), labels))",
        "no lists",
    ),
)
MODELS = (ITS_OWN, LEGACY, MOMENTUM, OURS, BY_NAME)


# --- runs -------------------------------------------------------------------------------------------------------------

MODES = {
    "eager": "",
    "graph": "--graph_mode",
    "mixed": "--mixed_precision_policy=mixed_float16",
    "graph-mixed": "--graph_mode --mixed_precision_policy=mixed_float16",
}


def modes():
    """The tests of layers in each mode."""
    for mode, flags in MODES.items():
        changes = (MODULE, NAMES, *SMALLER, *([IN_ORDER] if "mixed" in mode else []))
        yield Run(
            f"layers-{mode}",
            TESTS,
            flags,
            RANKS,
            BOTH,
            edits=of(TESTS, *changes),
            keras_3_edits=of(TESTS, *NOT_CALL, *MODELS),
            timeout=900,
        )


def dlrm(name, flags):
    sizes = "--batch_size=64 --num_batches=6 --embedding_dim=16 --top_mlp_dims=32,1 --bottom_mlp_dims=32,16"
    main, utils = f"{DLRM}/main.py", f"{DLRM}/utils.py"
    return Run(
        f"dlrm-{name}",
        main,
        f"{sizes} {flags}",
        RANKS,
        BOTH,
        edits=of(main, MODULE, LAYER_MODULE, ON_ONE, HERE),
        keras_3_edits=(
            *of(main, Edit(r"SGD\(lr=", "SGD(learning_rate=", "the name of the rate"), MOMENTUM, NO_REDUCTION),
            *of(utils, Edit(r"optimizer\.lr\.", "optimizer.learning_rate.", "the name of the rate")),
        ),
    )


def synthetic(name, flags):
    main, models = f"{SYNTHETIC}/main.py", f"{SYNTHETIC}/synthetic_models.py"
    return Run(
        f"synthetic-{name}",
        main,
        f"--model=tiny --batch_size=64 --num_steps=20 {flags}",
        RANKS,
        BOTH,
        edits=(*of(main, MODULE, FEWER_ROWS, ON_CPU), *of(models, MODULE, WHOLE)),
        keras_3_edits=(
            *of(models, *DATA_SET),
            *of(main, LEGACY, MOMENTUM, Edit(r"horovod\.tensorflow\.keras", "horovod.tensorflow", "for tf_keras")),
        ),
    )


RUNS = (
    *modes(),
    Run(
        "older-layers",
        OLDER,
        ranks=RANKS,
        keras=BOTH,
        edits=of(OLDER, MODULE, OWN_SEEDS),
        keras_3_edits=of(OLDER, *MODELS),
    ),
    *(
        Run(name, path, keras=BOTH, start="python", edits=of(path, *changes), keras_3_edits=of(path, *keras_3))
        for name, path, changes, keras_3 in (
            ("embedding", f"{LAYERS}/embedding_test.py", [LAYER_MODULE], [VALUES]),
            ("older-embedding", "tests/embedding_test.py", [LAYER_MODULE], [VALUES]),
            ("integer-lookup", f"{LAYERS}/integer_lookup_test.py", [NAMES, *KERAS_INTERNALS], []),
            ("lookup-ops", LOOKUPS, [NAMES], []),
        )
    ),
    dlrm("own-inputs", ""),
    dlrm("dp-input", "--dp_input"),
    dlrm("combiner", "--dp_input --test_combiner"),
    dlrm("own-inputs-combiner", "--test_combiner"),
    *(
        synthetic(f"{name}{'-amp' * amp}", f"{flags}{' --amp' * amp}")
        for amp in (False, True)
        for name, flags in (
            ("own-inputs-sgd", "--optimizer=sgd"),
            ("dp-input-adagrad", "--dp_input --optimizer=adagrad"),
            ("fit-adam", "--use_model_fit --optimizer=adam"),
        )
    ),
)
