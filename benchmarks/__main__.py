# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks`: the benchmarks that a machine without a GPU can run."""

from benchmarks import lookup

lookup.main()
