"""Names of the files beside run.json that are there while a run goes on."""

RESERVE = ".reserve"  # holds space for the last run.json
HEARTBEAT = ".heartbeat"  # which process keeps the record, and when it lived
CLAIM = ".end-by-another-rank"  # who made it writes the end in the place of rank 0
