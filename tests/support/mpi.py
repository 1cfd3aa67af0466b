"""The MPI launchers of the tests: command -> Debian package, and what they need to start ranks as root."""

from __future__ import annotations

MPI = {"mpirun.openmpi": "openmpi-bin", "mpirun.mpich": "mpich"}
AS_ROOT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
}
