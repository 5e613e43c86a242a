"""The one reader of training data: submission, previews, counting and training get their records from it. No torch.

A record is the value of its JSON, the texts of its CSV cells, or the value that the types of Parquet and Arrow give.
Nothing is inferred from other records, files or columns, and nothing is kept between two readings.
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
"""The most rows of a table that are read at a time; also the most of a file where its beginning is enough."""
_ROWS = 100_000
"""The most rows that are read where a beginning is enough, which takes half a second. Without it short rows would stay
below the limit in bytes for long."""
_BATCH_BYTES = 8 * 2**20
"""The most bytes of the rows of a table that are read at a time, unless a single row is larger."""
_GROWTH = 8
"""How many times larger a batch may be than the one before: only a batch that was read tells how large rows are. A
Parquet file of 40 kB may hold a text of 2 MB once and repeat it in a thousand rows."""


class Reader:
    """Reads the files of an entry one after another.

    `most_bytes`: the most bytes to read of all files together, for tables counted in memory, and with it the limit of
    100,000 rows; None: everything is read. After a reading `whole` says whether that was all there is. `columns` has
    every column that was met; when everything is read, it has only the columns of headers and schemas.
    """

    def __init__(self, data: LocalData, most_bytes: int | None = None) -> None:
        self._data, self._most_bytes = data, most_bytes
        self.whole = True
        self.columns: dict[str, None] = {}

    def __iter__(self) -> Iterator[Row]:
        """The rows, in order. Raises OSError, and ValueError for a file that cannot be read to its end."""
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
        """The rows from record `start` to before record `stop`, numbered from 0. Rows that are no records have no
        number and come with the next record."""
        number = 0
        for row in self:
            if number == stop:
                return
            if number >= start:
                yield row
            number += row.record is not None

    def count(self) -> int:
        """How many records there are."""
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
    """The rows of one file called `name`. `whole`: `file` is the whole file, not its beginning. The header of a csv
    file and the schema of a table are put into `columns`. Of a table no more is read than `limit` allows. Raises
    ValueError where the file cannot be read on."""
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
    """The limit for a table whose beginning is enough: `most` bytes in memory, and `_TABLE_ROWS` rows. `bytes` and
    `rows` count what is read so far; `reached`: the limit ended the reading, and there is more."""

    def __init__(self, most: int) -> None:
        self.most, self.bytes, self.rows, self.reached = most, 0, 0, False

    def room(self) -> int:
        """How many rows may be read; 0 where nothing more may."""
        self.reached |= self.bytes >= self.most or self.rows >= _TABLE_ROWS
        return 0 if self.reached else _TABLE_ROWS - self.rows


class _Beginning(io.RawIOBase):
    """The first bytes of a file. `whole`: the file has no more than these; `taken`: bytes read so far."""

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
    """A text file is one record, with its line ends as they are and without a byte order mark."""
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
    """Each row is what Python's `csv` reads: a text for each name of the header. Cells that a row lacks are absent."""
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
    """The rows, each with the number of the line on which it begins. Empty lines are no rows. Raises ValueError for a
    quote that is not closed; where the file goes on (not `whole`) the last row is left out instead."""
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
    """The first byte of a text that is not UTF-8, as "0xe9"; "" where all of it is."""
    if text.isascii():
        return ""
    return next((f"0x{ord(sign) - 0xDC00:02x}" for sign in text if "\udc80" <= sign <= "\udcff"), "")


def _parquet_batches(file: BinaryIO, columns: dict[str, None]) -> Iterator[Any]:
    """The batches of a Parquet file, of about `_BATCH_BYTES`. To change the batch size, a row group is read again from
    its start, and rows that were given already are skipped."""
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
    """The batches of an Arrow stream, or of a file in Arrow's random access format."""
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
    """The batch in pieces of about `_BATCH_BYTES`, each of which becomes Python objects at once, as far as the limit
    goes. Where rows may share a value's bytes (`_shares`) a piece is one row, as only the row itself tells how large it
    is."""
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
    """Whether rows of an Arrow type may share a value's bytes, as in dictionaries, runs and views."""
    import pyarrow as pa

    views = (pa.ListViewType, pa.LargeListViewType, pa.DictionaryType, pa.RunEndEncodedType)
    if isinstance(kind, views) or pa.types.is_string_view(kind) or pa.types.is_binary_view(kind):
        return True
    return any(_shares(kind.field(place).type) for place in range(kind.num_fields))


def _table_rows(name: str, batches: Iterator[Any], limit: _Limit | None) -> Generator[Row]:
    """The rows of a table. A key whose value is null is left out: in a table every record has the keys of all
    others."""
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
    """The records of a batch; a ValueError in place of one that cannot be read. Only reading shows whether texts are
    UTF-8."""
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
    """The function that makes a record's value from a value of this Arrow type. It raises ValueError that says what is
    wrong."""
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
    """As `_reader_of`, for the fields of a struct's type or of a schema. Raises ValueError where two have one name."""
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
