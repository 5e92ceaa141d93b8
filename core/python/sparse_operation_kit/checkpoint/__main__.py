# SPDX-License-Identifier: Apache-2.0
"""python -m sparse_operation_kit.checkpoint"""

import sys

from .cli import main

sys.exit(main())
