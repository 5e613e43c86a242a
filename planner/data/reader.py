"""Reads the records of training data. The checks at submission, previews, counting and training all use this one
reader. Does not import torch.

A record is the JSON value, the texts of the CSV cells, or the value that the types of Parquet and Arrow give. Its
content does not depend on other records, files or columns, and nothing is kept between two readings.
"""

from __future__ import annotations

import csv
import io
import os
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from typing import IO, Any, BinaryIO

from planner.data.json_rows import Row, json_rows
from planner.data.json_values import json_in
from planner.data.local_data import Kind, LocalData
from planner.data.records import Record
from planner.keys.source import shown
from planner.units import counted

__all__ = ["Reader", "Row", "rows_of"]

_TABLE_ROWS = 1000
"""The most rows of a table (Parquet or Arrow) that are read at a time; also the most rows of a table where only its
beginning is needed."""
_ROWS = 100_000
"""The most rows that are read where only a beginning is needed, which takes half a second. Without this limit, files of
short rows would take long to reach the limit in bytes."""
_BATCH_BYTES = 8 * 2**20
"""The most bytes of a table's rows that are read at a time, unless a single row is larger."""
_GROWTH = 8
"""How many times larger a batch may be than the one before it. The size of rows is known only from batches that were
read: a Parquet file of 40 kB may hold a text of 2 MB once and repeat it in a thousand rows."""


class Reader:
    """Reads the files of a dataset one after another; iterating gives their rows (`Row`).

    `most_bytes`: read only a beginning, of at most so many bytes of all files together and at most 100,000 rows; for
    Parquet and Arrow the bytes are those in memory. None: read everything. After an iteration, `whole` says whether
    everything was read, and `columns` has the names of the columns: those of CSV headers and table schemas and, where
    only a beginning was read, those of its records.
    """

    def __init__(self, data: LocalData, most_bytes: int | None = None) -> None:
        self._data, self._most_bytes = data, most_bytes
        self.whole = True
        self.columns: dict[str, None] = {}

    def __iter__(self) -> Iterator[Row]:
        """Yield the rows in order. Raises OSError, and ValueError for a file that cannot be read to its end."""
        kind, bytes_left, taken = self._data.kind, self._most_bytes, self._data.columns
        rows_left = sys.maxsize if bytes_left is None else _ROWS
        is_table = kind in ("parquet", "arrow")
        for path in self._data.files:
            with path.open("rb", buffering=0) as file:
                part = _Beginning(file, None if is_table else bytes_left)
                limit = _Limit(bytes_left) if is_table and bytes_left is not None else None
                rows = rows_of(
                    path.name,
                    io.BufferedReader(part),
                    kind,
                    whole=part.whole,
                    columns=self.columns,
                    delimiter=self._data.delimiter,
                    limit=limit,
                )
                with closing(rows):
                    for row in rows:
                        rows_left -= 1
                        if rows_left < 0:
                            break
                        if row.record is not None and taken is not None:
                            row = Row(row.place, {key: row.record[key] for key in taken if key in row.record})
                        if row.record is not None and bytes_left is not None:
                            self.columns |= dict.fromkeys(row.record)
                        yield row
            if taken is not None:
                self.columns = {column: None for column in self.columns if column in taken}
            self.whole &= part.whole and rows_left >= 0 and not (limit and limit.reached)
            if rows_left < 0:
                return
            if bytes_left is not None:
                bytes_left = max(0, bytes_left - (limit.bytes if limit else part.taken))

    def records(self, start: int = 0, stop: int | None = None) -> Iterator[Row]:
        """Yield the rows from record number `start` to before record number `stop`, counted from 0 (`stop` None: to the
        end). Rows that are no records are not counted; they come together with the record behind them."""
        number = 0
        for row in self:
            if number == stop:
                return
            if number >= start:
                yield row
            number += row.record is not None

    def count(self) -> int:
        """Return the number of records, after reading all files."""
        return sum(row.record is not None for row in self)


def rows_of(
    name: str,
    file: BinaryIO,
    kind: Kind,
    *,
    whole: bool = True,
    columns: dict[str, None] | None = None,
    delimiter: str = ",",
    limit: _Limit | None = None,
) -> Generator[Row]:
    """Yield the rows of one file. `name`: what places and errors call it. `whole`: `file` is the whole file, not only
    its beginning. `columns`: a dictionary to which the names in a CSV header or a table's schema are added. `limit`:
    how much of a table is read at most; None: all of it. Raises ValueError where the file cannot be read further."""
    columns = {} if columns is None else columns
    if kind == "json":
        return json_rows(name, file, whole=whole)
    if kind == "csv":
        return _csv_rows(name, file, whole, columns, delimiter)
    if kind == "text":
        return _text_rows(name, file, whole, columns)
    batches = (_parquet_batches if kind == "parquet" else _arrow_batches)(file, columns)
    return _table_rows(name, batches, limit)


class _Limit:
    """The limit for reading the beginning of a table: `most` bytes in memory and `_TABLE_ROWS` rows. `bytes` and `rows`
    count what is read so far. `reached`: reading stopped at the limit although there is more."""

    def __init__(self, most: int) -> None:
        self.most, self.bytes, self.rows, self.reached = most, 0, 0, False

    def room(self) -> int:
        """Return how many more rows may be read."""
        self.reached |= self.bytes >= self.most or self.rows >= _TABLE_ROWS
        return 0 if self.reached else _TABLE_ROWS - self.rows


class _Beginning(io.RawIOBase):
    """The first `most` bytes of a file, as a file. `whole`: the file has no more bytes than these; `taken`: bytes read
    so far."""

    def __init__(self, file: IO[bytes], most: int | None) -> None:
        self._file, self._most = file, sys.maxsize if most is None else most
        self.whole, self.taken = os.fstat(file.fileno()).st_size <= self._most, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, place: int, whence: int = io.SEEK_SET) -> int:
        return self._file.seek(place, whence)

    def tell(self) -> int:
        return self._file.tell()

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)[: max(0, self._most - self.taken)]
        count: int = self._file.readinto(view)  # type: ignore[attr-defined]
        self.taken += count
        return count


def _text_rows(name: str, file: BinaryIO, whole: bool, columns: dict[str, None]) -> Generator[Row]:
    """Yield the content of a text file as one record. Line ends are kept; a byte order mark is removed."""
    content = file.read()
    columns["text"] = None
    try:
        yield Row(name, {"text": content.decode("utf-8-sig")})
    except UnicodeDecodeError as error:
        if whole or error.end < len(content):
            yield Row(name, wrong=f"is not UTF-8: byte {error.start} is 0x{content[error.start]:02x}; save it as UTF-8")
        else:  # cut within a character
            yield Row(name, {"text": content[: error.start].decode("utf-8-sig")})


def _csv_rows(name: str, file: BinaryIO, whole: bool, columns: dict[str, None], delimiter: str) -> Generator[Row]:
    """Yield the rows of a CSV file as Python's `csv` reads them: column name of the header -> text of the cell. Where a
    row has fewer cells than the header, the last columns are missing in the record."""
    text = io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="")
    rows = _csv_lines(name, text, whole, delimiter)
    header = next((cells for _, cells in rows if cells[0].strip() or len(cells) > 1), [])
    if any(map(_undecoded, header)):
        raise ValueError(f"the header of {name} is not UTF-8; save it as UTF-8")
    if twice := next((column for column in header if column and header.count(column) > 1), None):
        raise ValueError(f"the header of {name} has the column {twice} twice; give each a name of its own")
    columns |= dict.fromkeys(column for column in header if column)
    for number, cells in rows:
        place = f"line {number} of {name}"
        if len(cells) > len(header):
            has = f"has {counted(len(cells), 'field')} for {counted(len(header), 'column')}"
            yield Row(place, wrong=f"{has}: texts with commas need quotes")
        elif byte := next(filter(None, map(_undecoded, cells)), ""):
            yield Row(place, wrong=f"is not UTF-8: it has the byte {byte}; save it as UTF-8")
        else:
            yield Row(place, {column: cell for column, cell in zip(header, cells, strict=False) if column})


def _csv_lines(name: str, text: io.TextIOWrapper, whole: bool, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the rows of a CSV file, each with the number of the line on which it begins. Empty lines are skipped.
    Raises ValueError for a quote that is not closed. Where `text` is only the beginning of the file (not `whole`), such
    a last row is skipped instead."""
    is_at_end = False

    def noted() -> Iterator[str]:
        nonlocal is_at_end
        for line in text:
            if not whole and not line.endswith(("\n", "\r")):
                break
            yield line
        is_at_end = True

    csv.field_size_limit(sys.maxsize)
    rows, start = csv.reader(noted(), delimiter=delimiter), 1
    try:
        for row in rows:
            if is_at_end:  # csv asked for another line, so the row was not complete
                if whole:
                    raise ValueError(f"{name}: the quote that line {start} opens is not closed")
                return
            if row:
                yield start, row
            start = rows.line_num + 1
    except csv.Error as error:
        raise ValueError(f"line {start} of {name} is no csv: {error}") from error


def _undecoded(text: str) -> str:
    """Return the first byte that is not UTF-8 in a text decoded with `surrogateescape`, as "0xe9"; "" for valid
    text."""
    if text.isascii():
        return ""
    return next((f"0x{ord(sign) - 0xDC00:02x}" for sign in text if "\udc80" <= sign <= "\udcff"), "")


def _parquet_batches(file: BinaryIO, columns: dict[str, None]) -> Iterator[Any]:
    """Yield the record batches of a Parquet file, of about `_BATCH_BYTES` each. Where the number of rows per batch must
    change, the row group is read again from its start, and the rows that were yielded already are skipped."""
    from pyarrow import parquet  # late: it is large, and hardly anybody needs it

    with parquet.ParquetFile(file) as content:
        columns |= dict.fromkeys(content.schema_arrow.names)
        rows, most = 1, _TABLE_ROWS
        for group in range(content.num_row_groups):
            yielded, is_over = 0, False
            while not is_over:
                passed = yielded
                for batch in content.iter_batches(rows, row_groups=[group]):
                    if passed >= batch.num_rows:
                        passed -= batch.num_rows
                        continue
                    better = batch.num_rows * _BATCH_BYTES // max(1, batch.nbytes)
                    batch, passed = batch.slice(passed), 0
                    yielded += batch.num_rows
                    yield batch
                    if rows > 1 and better < rows // 2:
                        rows = most = max(1, better)
                        break
                    if rows < most and better > rows:
                        rows = min(better, _GROWTH * rows, most)
                        break
                else:
                    is_over = True


def _arrow_batches(file: BinaryIO, columns: dict[str, None]) -> Iterator[Any]:
    """Yield the record batches of an Arrow stream, or of a file in Arrow's random access format."""
    import pyarrow as pa

    try:
        batches: Any = pa.ipc.open_stream(file)
    except pa.ArrowInvalid:
        file.seek(0)
        content = pa.ipc.open_file(file)
        columns |= dict.fromkeys(content.schema.names)
        batches = map(content.get_batch, range(content.num_record_batches))
    else:
        columns |= dict.fromkeys(batches.schema.names)
    yield from batches


def _pieces(batch: Any, limit: _Limit | None) -> Iterator[Any]:
    """Yield a record batch in parts of about `_BATCH_BYTES`, as far as `limit` allows. The caller turns each part into
    Python objects at once. Where rows may share a value's bytes (`_shares`), each part is one row, because only a row
    itself tells how large it is."""
    rows = min(_TABLE_ROWS, max(1, batch.num_rows * _BATCH_BYTES // max(1, batch.nbytes)))
    if any(_shares(field.type) for field in batch.schema):
        rows = 1
    start = 0
    while start < batch.num_rows:
        take = rows if limit is None else min(rows, limit.room())
        if not take:
            return
        piece = batch.slice(start, take)
        if limit is not None:
            limit.rows += piece.num_rows
            limit.bytes += piece.nbytes
        yield piece
        start += take


def _shares(kind: Any) -> bool:
    """Return whether rows of an Arrow type may share the bytes of a value, as with dictionaries, run-end encoding and
    views."""
    import pyarrow as pa

    views = (pa.ListViewType, pa.LargeListViewType, pa.DictionaryType, pa.RunEndEncodedType)
    if isinstance(kind, views) or pa.types.is_string_view(kind) or pa.types.is_binary_view(kind):
        return True
    return any(_shares(kind.field(place).type) for place in range(kind.num_fields))


def _table_rows(name: str, batches: Iterator[Any], limit: _Limit | None) -> Generator[Row]:
    """Yield the rows of a table. Keys whose value is null are left out, because in a table each record has the keys of
    all others."""
    number, schema = 0, None
    convert: _Convert = _same
    for batch in batches:
        if batch.schema is not schema:
            schema, convert = batch.schema, _struct_reader(batch.schema)
        for record in (record for piece in _pieces(batch, limit) for record in _pylist(piece)):
            number += 1
            place = f"row {number} of {name}"
            try:
                if isinstance(record, ValueError):
                    raise record
                yield Row(place, convert(record))
            except ValueError as error:
                yield Row(place, wrong=str(error))
        if limit is not None and limit.reached:
            return


def _pylist(batch: Any) -> Iterator[Any]:
    """Yield the records of a batch, or a ValueError in place of a record that cannot be read. Whether texts are UTF-8
    shows only when they are read."""
    try:
        yield from batch.to_pylist(maps_as_pydicts="strict")
    except (UnicodeDecodeError, KeyError, OverflowError):
        for number in range(batch.num_rows):
            try:
                yield from batch.slice(number, 1).to_pylist(maps_as_pydicts="strict")
            except UnicodeDecodeError as error:
                yield _not_utf8(error)
            except KeyError as error:
                yield ValueError(f"has a map with the key {error} twice")
            except OverflowError as error:
                yield ValueError(f"has a value that cannot be read: {error}")


def _not_utf8(error: UnicodeDecodeError) -> ValueError:
    text = error.object[max(0, error.start - 20) : error.start + 20].decode(errors="replace")
    return ValueError(f"has a text that is not UTF-8: 0x{error.object[error.start]:02x} in {shown(text)}")


_Convert = Callable[[Any], Any]


def _same(value: Any) -> Any:
    return value


def _reader_of(kind: Any) -> _Convert:
    """Return the function that turns a value of this Arrow type, as `to_pylist` gives it, into the record's value. The
    function raises ValueError for a value that is wrong."""
    import pyarrow as pa

    if getattr(kind, "extension_name", "") == "arrow.json":  # the Json columns of `datasets`
        return _read_json
    if pa.types.is_struct(kind):
        return _struct_reader(kind)
    if isinstance(kind, (pa.DictionaryType, pa.RunEndEncodedType)):
        return _reader_of(kind.value_type)
    lists = (pa.ListType, pa.LargeListType, pa.FixedSizeListType, pa.ListViewType, pa.LargeListViewType)
    if isinstance(kind, lists):
        inner = _reader_of(kind.value_type)
        return _same if inner is _same else lambda value: None if value is None else [inner(one) for one in value]
    if pa.types.is_map(kind):
        item = _reader_of(kind.item_type)
        if item is not _same:
            return lambda value: None if value is None else {key: item(one) for key, one in value.items()}
    return _same


def _struct_reader(fields: Any) -> _Convert:
    """Return the function that turns a struct, or a row of a table with this schema, into a record without null values.
    Raises ValueError where two fields have the same name."""
    readers = {field.name: _reader_of(field.type) for field in fields}
    if len(readers) < len(fields):
        names = [field.name for field in fields]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"a table has the column {twice} twice; give each a name of its own")

    def read(value: Record | None) -> dict[str, Any] | None:
        if value is None:
            return None
        return {key: readers[key](one) for key, one in value.items() if one is not None}

    return read


def _read_json(text: str | None) -> Any:
    if text is None:
        return None
    try:
        return json_in(text)
    except ValueError as error:
        raise ValueError(f"has a value in a column of JSON that {error}: {text[:80]}") from error
