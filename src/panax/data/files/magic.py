"""Detection of a file's format by its first bytes: its name may be wrong or missing."""

HEADER_BYTES = 2**13
"""Number of bytes of a file that identify its format."""

_COMPRESSED = (
    (b"\x1f\x8b", "gzip"), (b"BZh", "bz2"), (b"\xfd7zXZ\x00", "xz"), (b"\x28\xb5\x2f\xfd", "zstd"), (b"\x04\x22\x4d\x18", "lz4"),
    (b"\x1f\x9d", "compress"), (b"\x5d\x00\x00", "lzma"),
)  # fmt: skip
_OTHERS = (
    (b"PAR1", "Parquet"),
    (b"ARROW1", "Arrow"),
    (b"PK\x03\x04", "zip"),
    (b"SQLite format 3", "SQLite"),
    (b"%PDF-", "PDF"),
)
_IMAGES = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF87a", b"GIF89a", b"II*\x00", b"MM\x00*")
_PORTABLE = tuple(b"P%d%c" % (kind, space) for kind in range(1, 7) for space in b" \t\r\n")


def detect_compression(begin: bytes) -> str | None:
    """Return the compression format of a file with this beginning; None if it is not compressed.

    >>> detect_compression(b"BZh91AY"), detect_compression(b"the oak")
    ('bz2', None)
    """
    # A zstd frame may be preceded by skippable frames.
    if len(begin) >= 4 and begin[1:4] == b"\x2a\x4d\x18" and 0x50 <= begin[0] <= 0x5F:
        return "zstd"
    return next((name for magic, name in _COMPRESSED if begin.startswith(magic)), None)


def detect_format(begin: bytes) -> str | None:
    """Return the format of a file with this beginning if it is a known binary format; None otherwise."""
    return detect_compression(begin) or next((name for magic, name in _OTHERS if begin.startswith(magic)), None)


def is_image(begin: bytes) -> bool:
    """Return True if a file with this beginning is an image of a supported kind."""
    bitmap = begin[:2] == b"BM" and begin[6:10] == bytes(4)
    webp = begin[:4] == b"RIFF" and begin[8:12] == b"WEBP"
    return bitmap or webp or begin.startswith((*_IMAGES, *_PORTABLE))
