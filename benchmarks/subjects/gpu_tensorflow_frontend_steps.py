# SPDX-License-Identifier: Apache-2.0
"""The project's TensorFlow frontend on a GPU with one output for all tables, twelve steps in a call of a tf.function.

A call costs the host some microseconds for each variable that the function uses; where tables are many and small that
is more than the step takes on the GPU. Keras has steps_per_execution for it.
"""

from __future__ import annotations

from benchmarks.subjects import gpu_tensorflow_frontend


class Subject(gpu_tensorflow_frontend.Subject):
    concat = True
    steps_per_call = 12
