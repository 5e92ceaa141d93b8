# SPDX-License-Identifier: Apache-2.0
"""SparseOperationKit 1.x's tutorials, smaller, in a clone as of `sok1`: DenseDemo, mixed precision, the DLRM benchmark.

They train on random data and check nothing: to pass is to come to the end.
"""

import os

import sok1
from edits import HOROVODRUN, NO_REDUCTION, of
from run import KERAS, Edit, Run

COMMIT = sok1.COMMIT
FOLDER = sok1.FOLDER

BOTH = tuple(KERAS)
TUTORIALS = "sparse_operation_kit/documents/tutorials"
DEMO = f"{TUTORIALS}/DenseDemo"
MIXED = f"{TUTORIALS}/MixedPrecision/amp_tf2.py"
DLRM = f"{TUTORIALS}/DLRM_Benchmark"

UTILS = of(f"{sok1.TESTS}/utils.py", *sok1.UTILS)
SOK = Edit(
    r"^from utility import sparse_operation_kit as sok$",
    "import sparse_operation_kit as sok",
    "utility has no such name",
)
PORT = Edit("port = 12345", f"port = {10000 + os.getpid() % 20000}", "another one for each run of the suite")
# --- DenseDemo --------------------------------------------------------------------------------------------------------

SIZES = "--global_batch_size=240 --slot_num=4 --nnz_per_slot=3"
TRAINED = f"{SIZES} --max_vocabulary_size_per_gpu=1024 --num_dense_layers=2 --embedding_vec_size=4 --optimizer=adam"


def demo(name, script, options, edits=(), keras_3=(), **more):
    path = f"{DEMO}/{script}.py"
    return Run(
        name=f"dense-demo/{name}",
        script=path,
        arguments=options,
        edits=UTILS + of(path, *edits),
        keras_3_edits=of(path, *keras_3),
        **{"keras": BOTH, **more},
    )


DATA = demo(
    "data",
    "gen_data",
    f"{SIZES} --iter_num=10 --vocabulary_size=1024 --filename=data.file",
    ranks=(1, 2, 3),
    start="python",
)
SPLIT = demo(
    "split",
    "split_data",
    "--filename=data.file --split_num={ranks} --save_prefix=data_",
    ranks=(2, 3),
    start="python",
    before=(DATA.name,),
)
DENSE_DEMO = [
    DATA,
    SPLIT,
    demo(
        "mirrored",
        "run_sok_MirroredStrategy",
        f"--data_filename=data.file {TRAINED}",
        (SOK,),
        (NO_REDUCTION,),
        start="python",
        before=(DATA.name,),
        prints="Iteration: 9",
    ),
    demo(
        "workers",
        "run_sok_MultiWorker_mpi",
        f"--data_filename=data_ --data_splited=1 {TRAINED}",
        (SOK, HOROVODRUN, PORT),
        (NO_REDUCTION, sok1.AGGREGATE, sok1.NO_ALL_REDUCE),
        ranks=(2, 3),
        before=(SPLIT.name,),
        prints="Iteration: 9",
    ),
    demo(
        "Horovod",
        "run_sok_horovod",
        f"--data_filename_prefix=data_ {TRAINED}",
        (SOK, sok1.IF_GPUS),
        (
            NO_REDUCTION,
            Edit(
                r"hvd\.(DistributedGradientTape|broadcast_variables)\((?!emb_tape)",
                r"sok.\1(",
                "Horovod's do not know variables of Keras 3",
            ),
            Edit(r"dense_optimizer\.variables\(\)", "dense_optimizer.variables", "a property"),
        ),
        ranks=(2, 3),
        before=(SPLIT.name,),
        prints="Iteration: 9",
    ),
]

# --- mixed precision --------------------------------------------------------------------------------------------------

MIXED_PRECISION = Run(
    name="mixed-precision",
    script=MIXED,
    keras=BOTH,
    start="python",
    edits=(*UTILS, *of(MIXED, Edit(r"global_batch_size = 1024", "global_batch_size = 240", "smaller batches"))),
    keras_3_edits=of(
        MIXED,
        NO_REDUCTION,
        sok1.MIXED[0],
        Edit(r"optimizer\.get_unscaled_gradients\((\w+)\)", r"\1", sok1.MIXED[1].why),
        Edit(r"zip\(emb_grads, emb_vars\)", "zip([*emb_grads, *other_grads], [*emb_vars, *other_vars])", "one call"),
        Edit(r"^( +)optimizer\.apply_gradients\(zip\(other_grads, other_vars\)\)$", r"\1pass", "they are in it"),
    ),
    prints="step 9",
)

# --- the DLRM benchmark -----------------------------------------------------------------------------------------------

RANDOM = f"{DLRM}/preprocess/generate_random_dataset.py"
DLRM_DATA = Run(
    name="dlrm/data",
    script=RANDOM,
    arguments="../data 240 4",
    ranks=(1, 2),
    keras=BOTH,
    start="python",
    edits=of(
        RANDOM,
        Edit(
            r"^(    label = )",
            r"    vocab_sizes = [min(size, 1000) for size in vocab_sizes]\n\1",
            "its tables have 80 GB",
        ),
    ),
)


def dlrm(name, options):
    trainer = f"{DLRM}/trainer.py"
    mixed = "--amp" in options
    return Run(
        name=f"dlrm/{name}",
        script=f"{DLRM}/main.py",
        arguments=f"--data_dir=data --global_batch_size=240 --eval_in_last --epochs=2 --lr=0.1 {options}",
        ranks=(1, 2),
        keras=BOTH,
        keras_3_edits=of(
            trainer,
            sok1.AGGREGATE,
            Edit(r"\.lr\.assign", ".learning_rate.assign", "its new name"),
            Edit(
                r"hvd\.broadcast_variables", "sok.broadcast_variables", "Horovod's does not know variables of Keras 3"
            ),
            Edit(r"_dense_optimizer\.variables\(\)", "_dense_optimizer.variables", "a property"),
            *(LOSS_SCALE if mixed else ()),
        ),
        before=("dlrm/data",),
        prints="Evaluate in the end",
    )


LOSS_SCALE = (
    Edit(r",\s+dynamic=False", "", "Keras 3's scale is always dynamic"),
    sok1.MIXED[0],
    Edit(
        r"^( +)dense_grads = self\._embedding_optimizer\.get_unscaled_gradients\(dense_grads\)$",
        r"\1dense_grads = [hvd.allreduce(grad) for grad in dense_grads]",
        "averaged before the one call",
    ),
    Edit(
        r"^( +)embedding_grads = self\._embedding_optimizer\.get_unscaled_gradients\(.*\)$",
        r"\1pass",
        sok1.MIXED[1].why,
    ),
    Edit(
        r"zip\(embedding_grads, embedding_vars\)",
        "zip([*embedding_grads, *dense_grads], [*embedding_vars, *dense_vars])"
        " if self._amp else zip(embedding_grads, embedding_vars)",
        "one call",
    ),
    Edit(r"^( +)(self\._dense_optimizer\.apply_gradients\()", r"\1self._amp or \2", "they are in it"),
)

RUNS = [
    *DENSE_DEMO,
    MIXED_PRECISION,
    DLRM_DATA,
    dlrm("compress", "--compress"),
    dlrm("mixed", "--amp"),
]
