# SPDX-License-Identifier: Apache-2.0
"""The version: the package, the wheel and libsok_core.so take it from here."""

__version__ = "0.1.0"
