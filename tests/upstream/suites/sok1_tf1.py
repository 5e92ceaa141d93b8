# SPDX-License-Identifier: Apache-2.0
"""SparseOperationKit 1.x's unit tests for TensorFlow 1.15, which make graphs: of one process, of two ranks of Horovod.

Smaller, in a clone as of `sok1`. What upstream starts by mpiexec horovodrun starts here.
"""

import sok1
from edits import GRAPHS, HOROVODRUN, NUMPY_2, of
from run import Edit, Run

COMMIT = sok1.COMMIT
FOLDER = sok1.FOLDER

TESTS = sok1.TESTS.replace("tf2", "tf1")
SCRIPTS = {"sparse": f"{TESTS}/test_sparse_emb_demo.py", "dense": f"{TESTS}/test_dense_emb_demo.py"}

POLICY = (
    Edit(
        r"^( +)from tensorflow\.python\.keras\.engine import base_layer_utils$",
        r"\1import tf_keras\n\1from tf_keras.src.engine import base_layer_utils",
        "where it is today",
    ),
    Edit(r"tf\.keras\.mixed_precision\.experimental\.Policy", "tf_keras.mixed_precision.Policy", "as above"),
    Edit(
        r"tf\.keras\.mixed_precision\.experimental\.set_policy",
        "tf_keras.mixed_precision.set_global_policy",
        "as above",
    ),
)
WAIT = sok1.waiting(
    r"^( +)if args\.rank_idx != 0:$",
    "rank_idx",
    r"^( +)# aggregate sok forward results from different worker$",
    "rank_size",
)
EDITS = (
    *of(f"{TESTS}/utils.py", GRAPHS, *sok1.UTILS),
    *of(f"{TESTS}/sparse_models.py", GRAPHS),
    *of(f"{TESTS}/dense_models.py", GRAPHS),
    *of(SCRIPTS["sparse"], GRAPHS, HOROVODRUN, *POLICY, *WAIT),
    *of(SCRIPTS["dense"], GRAPHS, HOROVODRUN, *POLICY, NUMPY_2, *WAIT),
)
SIZES = "--iter_num=5 --max_vocabulary_size_per_gpu=1024 --global_batch_size=240"
WIDTH = {"sparse": "--max_nnz=4", "dense": "--nnz_per_slot=4"}
LAYERS = {1: "--slot_num 6 --embedding_vec_size 4", 2: "--slot_num 4 2 --embedding_vec_size 4 8"}


def run(kind, name, options, ranks=1, layers=1, before=""):
    where = "one" if ranks == 1 else "Horovod"
    tool = "onedevice" if ranks == 1 else "horovod"
    return Run(
        name=f"{kind}/{where}/{name}",
        script=SCRIPTS[kind],
        arguments=f"--distributed_tool={tool} {SIZES} {WIDTH[kind]} {LAYERS[layers]} {options}",
        ranks=(ranks,),
        start="python" if ranks == 1 else "horovodrun",
        edits=EDITS,
        before=(f"{kind}/{where}/{before}",) if before else (),
        prints="saved parameters are consistent" if "--save_params=0" not in options else "consistent for 5 iterations",
    )


BOTH = [
    made
    for kind in ("dense", "sparse")
    for made in (
        run(kind, "adam", "--optimizer=adam"),
        run(kind, "compat", "--optimizer=compat_adam"),
        run(kind, "compat-mixed", "--optimizer=compat_adam --mixed_precision=1"),
        run(kind, "plugin", "--optimizer=plugin_adam"),
        run(kind, "plugin-mixed", "--optimizer=plugin_adam --mixed_precision=1"),
        run(kind, "rows", "--optimizer=adam --use_hashtable=0"),
        run(kind, "several", "--optimizer=plugin_adam", layers=2),
        run(kind, "several-mixed", "--optimizer=plugin_adam --mixed_precision=1", layers=2),
        run(
            kind,
            "restored-uint32",
            "--optimizer=plugin_adam --save_params=0 --restore_params=1 --key_dtype=uint32",
            before="adam",
        ),
        run(kind, "functional", "--optimizer=compat_adam --functional_api=1", 2),
        run(kind, "initializer", "--optimizer=compat_adam --use_tf_initializer=1", 2),
        run(kind, "compat-mixed", "--optimizer=compat_adam --mixed_precision=1", 2),
        run(kind, "adam", "--optimizer=adam", 2),
        run(kind, "several", "--optimizer=adam", 2, layers=2),
    )
]

RUNS = [
    *BOTH,
    run("dense", "dynamic", "--optimizer=adam --save_params=0 --use_hashtable=0 --dynamic_input=1"),
    run("dense", "initializer-uint32", "--optimizer=compat_adam --use_tf_initializer=1 --key_dtype=uint32", 2),
]
