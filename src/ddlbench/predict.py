"""python -m ddlbench.predict: see oracle/command.py."""

import sys

from ddlbench.oracle.command import main

if __name__ == "__main__":
    sys.exit(main())
