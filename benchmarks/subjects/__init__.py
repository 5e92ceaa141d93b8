# SPDX-License-Identifier: Apache-2.0
"""One file a subject: the project's frontends and the peers it is measured against."""
