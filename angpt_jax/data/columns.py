"""Text columns of Parquet and Arrow files, a batch of rows at a time."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from angpt_jax.data.corpus import unreadable
from angpt_jax.data.sources import Source

_ROWS = 256  # at once
_ARROW_FILE = b"ARROW1"  # begins the file format of Arrow; what save_to_disk writes is its stream format


def row_groups(source: Source, file: str) -> list[int]:
    """Bytes of text in each row group of a Parquet file."""
    with _errors(source, file), _parquet(source, file) as opened:
        facts = opened.metadata
        names = [facts.schema.column(i).path for i in range(facts.num_columns)]
        column = names.index(source.field)
        return [facts.row_group(i).column(column).total_uncompressed_size for i in range(facts.num_row_groups)]


def parquet_rows(source: Source, file: str, start: int, stop: int) -> Iterator[tuple[int, bytes | None]]:
    """(row, bytes of text) of row groups start … stop."""
    with _errors(source, file), _parquet(source, file) as opened:
        row = sum(opened.metadata.row_group(i).num_rows for i in range(start))
        groups = list(range(start, stop))
        for batch in opened.iter_batches(_ROWS, row_groups=groups, columns=[source.field], use_threads=False):
            values = _as_bytes(batch.column(0))
            yield from enumerate(values, start=row)
            row += len(values)


def arrow_rows(source: Source, file: str) -> Iterator[tuple[int, bytes | None]]:
    """(row, bytes of text) of an Arrow file."""
    pa = _pyarrow(source)
    with _errors(source, file), pa.OSFile(str(source.path(file))) as raw:
        is_file = raw.read(len(_ARROW_FILE)) == _ARROW_FILE
        raw.seek(0)
        opened = pa.ipc.open_file(raw) if is_file else pa.ipc.open_stream(raw)
        _check_field(source, file, opened.schema)
        batches = (opened.get_batch(i) for i in range(opened.num_record_batches)) if is_file else opened
        row = 0
        for batch in batches:
            column = batch.column(opened.schema.get_field_index(source.field))
            for first in range(0, len(column), _ROWS):
                values = _as_bytes(column.slice(first, _ROWS))
                yield from enumerate(values, start=row)
                row += len(values)


@contextmanager
def _parquet(source: Source, file: str) -> Iterator[Any]:
    _pyarrow(source)
    import pyarrow.parquet as parquet

    with parquet.ParquetFile(source.path(file), pre_buffer=False) as opened:
        _check_field(source, file, opened.schema_arrow)
        yield opened


def _check_field(source: Source, file: str, schema: Any) -> None:
    import pyarrow as pa

    path, there = source.path(file), ", ".join(schema.names)
    index = schema.get_field_index(source.field)
    if index < 0:
        raise source.wrong(f"no field {source.field} (there are {there})", str(path), "another --field")
    kind = schema.field(index).type
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
        raise source.wrong(f"field {source.field} is {kind}, not text (there are {there})", str(path), "text")


def _as_bytes(column: Any) -> list[bytes | None]:
    import pyarrow as pa

    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    return column.cast(pa.large_binary()).to_pylist()


@contextmanager
def _errors(source: Source, file: str) -> Iterator[None]:
    """What pyarrow says about a file, as a UserError."""
    pa = _pyarrow(source)
    try:
        yield
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        problem = str(error).partition("\n")[0]
        raise source.wrong(f"damaged or of another kind ({problem})", str(source.path(file)), source.kind) from error
    except OSError as error:
        if error.errno is None:  # pyarrow's word for damaged data
            problem = str(error).partition("\n")[0]
            raise source.wrong(f"damaged ({problem})", str(source.path(file)), f"a whole {source.kind} file") from error
        error.filename = error.filename or str(source.path(file))
        unreadable(error, source.key)


def _pyarrow(source: Source) -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise source.wrong("needs the package pyarrow", source.name, "pip install -e '.[data]'") from error
    return pyarrow
