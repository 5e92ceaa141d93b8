# SPDX-License-Identifier: Apache-2.0
"""Hybrid-parallel layers at random: all ranks of a launch draw the same examples, and shrink together.

SOK_HYBRID_EXAMPLES is how many; SOK_HYBRID_SEED draws those of a launch that printed it anew.
"""

import os
import secrets
import traceback

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from sparse_operation_kit import core, placement
from sparse_operation_kit.hybrid import STRATEGIES
from sparse_operation_kit.hybrid.request import CHOICES


@st.composite
def _layers(draw):
    """The arguments of the frontends' comparisons."""
    tables = draw(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 9)), min_size=1, max_size=6))
    combiners = [draw(st.sampled_from([None, "sum", "mean"])) for _ in tables]
    tables_of = draw(st.lists(st.integers(0, len(tables) - 1), min_size=1, max_size=8))
    own_inputs, planned = draw(st.booleans()), draw(st.booleans())
    if own_inputs:
        tables_of += set(range(len(tables))) - set(tables_of)
    kinds = []
    for table in tables_of:
        dense = ["single", "column"] if own_inputs else ["single", "column", "dense"]
        kinds.append(draw(st.sampled_from(dense if combiners[table] is None else [*dense, "ragged", "sparse"])))
    # The batch of all ranks, which 1 to 4 of them share alike, or that of a rank.
    options = {"dp_input": not own_inputs, "batch": draw(st.integers(1, 2)) * 12 if own_inputs else draw(_SIZES)}
    options["equal"] = own_inputs or draw(st.booleans())
    options["step"] = draw(st.sampled_from(["tape", "optimizer", "adagrad"]))
    options["compiled"] = draw(st.booleans())
    if planned and not own_inputs:
        choices = st.sets(st.sampled_from(CHOICES)).map(lambda each: sorted(each | {"rows"}))
        wish = st.fixed_dictionaries({"choices": choices, "on_host": st.sampled_from([None, False, True])})
        options["constraints"] = draw(st.dictionaries(st.integers(0, len(tables) - 1), wish))
    else:
        options["strategy"] = draw(st.sampled_from(STRATEGIES))
        for name in ("column_slice_threshold", "row_slice_threshold", "data_parallel_threshold"):
            limit = 60 if name == "column_slice_threshold" else 180
            options[name] = draw(st.one_of(st.none(), st.integers(0, limit)))
    return tables, combiners, kinds, tables_of, options


_SIZES = st.integers(0, 12)
_IMPOSSIBLE = ("Not enough table", "know the number of samples")


def run(compare, group):
    """compare(tables, combiners, kinds, tables_of, **options) on every rank; group: as of a frontend."""
    given_seed = os.environ.get("SOK_HYBRID_SEED") or str(secrets.randbelow(1 << 32))
    drawn_with = int(group.allgather(given_seed.encode())[0])
    if group.rank == 0:
        print(f"SOK_HYBRID_SEED={drawn_with}", flush=True)
    counts = {"compared": 0, "impossible": 0}

    @seed(drawn_with)
    @settings(
        max_examples=int(os.environ.get("SOK_HYBRID_EXAMPLES", "12")),
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
    @given(_layers())
    def examples(layer):
        *arguments, options = layer
        assert len(set(group.allgather(repr(layer).encode()))) == 1, "ranks draw differently"
        failed = ""
        try:
            compare(*arguments, **options)
            counts["compared"] += 1
        except Exception as error:
            if isinstance(error, ValueError) and any(each in str(error) for each in _IMPOSSIBLE):
                counts["impossible"] += 1
            else:
                failed = f"{traceback.format_exc()}{layer}"
                print(failed, flush=True)  # others may wait for what it did not send
        failures = [each.decode() for each in group.allgather(failed.encode())]
        # The same error on all ranks, by which Hypothesis goes on alike.
        assert not any(failures), next(filter(None, failures))

    examples()
    if group.rank == 0:
        print(f"{counts['compared']} compared, {counts['impossible']} refused: a rank would have nothing", flush=True)


def first_rows(name, rows, width):
    """What a table of this name starts with in any framework, at any number of ranks."""
    spec = placement.parse_initializer("uniform", rows, width)
    return core.initialize(core.Initializer("uniform", spec.a, spec.b, placement.table_seed(0, name)), rows, width)
