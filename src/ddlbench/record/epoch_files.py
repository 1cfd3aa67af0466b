"""A table that grows by one file an epoch: steps.parquet and ranks.parquet.

While the run is on it is a folder with one file for each epoch, which pandas.read_parquet reads as one table: so a run
that is killed leaves its epochs. The end of the run makes one file of them. What is held in memory at a time does not
grow with the number of ranks or epochs.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Generator, Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ddlbench.record.schema import Column

TYPES = {"int": pa.int64(), "float": pa.float64(), "bool": pa.bool_(), "text": pa.string()}
TABLES_IN_A_GROUP = 64  # of ranks in a row group: one each would make the file's index larger than its rows


def schema_of(columns: Iterable[Column]) -> Any:
    return pa.schema([(column.name, TYPES[column.kind]) for column in columns])


class EpochFiles:
    """A file has its name only when it is complete."""

    def __init__(self, path: Path, schema: Any) -> None:
        self.path = path
        self.schema = schema

    def append(self, epoch: int, tables: Iterable[Any]) -> None:
        """Tables with the schema, in their order. Raises OSError, and then leaves nothing of this epoch."""
        self.path.mkdir(exist_ok=True)
        growing = self.path / f".epoch-{epoch:06}"  # readers pass over hidden files
        rest = iter(tables)
        with _removed_on_failure(growing), pq.ParquetWriter(growing, self.schema) as writer:
            while group := list(islice(rest, TABLES_IN_A_GROUP)):
                writer.write_table(pa.concat_tables(group))
        growing.replace(self.path / f"epoch-{epoch:06}.parquet")

    def close(self) -> None:
        """Put one file in the place of the folder. Raises OSError, also for a damaged file of an epoch, and then the
        epochs can be read as before."""
        if not self.path.is_dir():
            return
        complete, epochs = self.path.with_name(f".{self.path.name}"), self.path.with_name(f".{self.path.name}-epochs")
        with _removed_on_failure(complete), pq.ParquetWriter(complete, self.schema) as writer:
            for epoch in sorted(self.path.glob("epoch-*.parquet")):
                self._copy(epoch, writer)
        self.path.rename(epochs)
        complete.rename(self.path)
        shutil.rmtree(epochs, ignore_errors=True)

    @staticmethod
    def _copy(epoch: Path, writer: Any) -> None:
        try:
            with pq.ParquetFile(epoch) as file:
                for group in range(file.num_row_groups):
                    writer.write_table(file.read_row_group(group))
        except (pa.ArrowException, ValueError) as error:
            raise OSError(f"{epoch} is damaged: {error}") from error


@contextlib.contextmanager
def _removed_on_failure(file: Path) -> Generator[None]:
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            file.unlink()
        raise
