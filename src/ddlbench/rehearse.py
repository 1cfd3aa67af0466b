"""python -m ddlbench.rehearse: see oracle/rehearsal.py."""

import sys

from ddlbench.oracle.rehearsal import main

if __name__ == "__main__":
    sys.exit(main())
