"""`python -m rollout`: the command line, where the script `rollout` is not on the path."""

import sys

from rollout.cli import main

sys.exit(main())
