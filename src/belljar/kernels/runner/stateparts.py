"""The file a session's variables sleep in: what is in it and that it is whole. Knows nothing of what the bytes mean.

A magic line, then parts: a kind, a length, a checksum, the content. The pickle stream is cut into parts; large buffers
are parts of their own, written straight from the memory they are in (`statewriter`) and read straight into the memory
they will be in (`statereader`).
"""

from __future__ import annotations

import queue
import struct
import threading
import zlib

MAGIC = b"belljar state\n"
FORMAT = 1
HEADER, STREAM, BUFFER, END = b"H", b"S", b"B", b"E"
CHUNK_BYTES = 8 * 1024 * 1024
THREADED_BYTES = 4 * CHUNK_BYTES
PART = struct.Struct("!cQI")


class Checksum:
    """Of a content that comes in chunks. For a large one a thread counts while the next chunk is on its way.

    Counting takes as long as writing to the page cache, about 1 GB/s each.
    """

    def __init__(self, size: int) -> None:
        self.value = 0
        self._chunks: queue.SimpleQueue[memoryview | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._count, daemon=True) if size > THREADED_BYTES else None

    def __enter__(self) -> Checksum:
        if self._thread is not None:
            try:
                self._thread.start()
            except RuntimeError:  # a sandbox limits the number of its threads
                self._thread = None
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread is not None:
            self._chunks.put(None)
            self._thread.join()

    def add(self, chunk: memoryview) -> None:
        """The next chunk; it must not change any more."""
        if self._thread is None:
            self.value = zlib.crc32(chunk, self.value)
        else:
            self._chunks.put(chunk)

    def _count(self) -> None:
        for chunk in iter(self._chunks.get, None):
            self.value = zlib.crc32(chunk, self.value)
