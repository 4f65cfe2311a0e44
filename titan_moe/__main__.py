"""`python -m titan_moe`: the door for torchrun."""

import sys

from titan_moe.cli import main

sys.exit(main())
