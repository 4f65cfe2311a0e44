"""`python -m titan_moe`: the entry point for torchrun."""

import sys

from titan_moe.cli import main

sys.exit(main())
