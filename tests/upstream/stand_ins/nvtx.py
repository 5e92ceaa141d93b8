# SPDX-License-Identifier: Apache-2.0
"""Stands in for nvtx: ranges that nobody looks at."""


def start_range(message, color=None):
    return message


def end_range(started):
    pass
