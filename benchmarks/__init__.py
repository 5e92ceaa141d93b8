# SPDX-License-Identifier: Apache-2.0
"""Benchmarks: one harness, one file a subject, results as JSON and plots in results/."""
