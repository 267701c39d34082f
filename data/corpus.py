"""Text -> documents: reads files and public corpora in bounded memory, cuts them into documents and draws those that are
for validation. What prepare.py stands on; the rules are in data/README.md."""

import codecs
import gzip
import hashlib
import os
import re
import shutil
import sys
import time
import zlib

CHUNK_BYTES = 1 << 20            # text is read, and training text encoded, about this many bytes at a time
VAL_BATCH_BYTES = 1 << 16        # validation text: smaller, so that --val-tokens is met closely
MAX_DOCUMENT_BYTES = 1 << 26     # a longer one is taken for a wrong --separator

# --dataset NAME: arguments of datasets.load_dataset, and the field that holds the text.
DATASETS = {
    "fineweb-edu": (("HuggingFaceFW/fineweb-edu", "sample-100BT"), {}, "text"),
    "c4": (("allenai/c4", "en"), {}, "text"),
    "tinystories": (("roneneldan/TinyStories",), {}, "text"),
    "tinyshakespeare": (("text",), {"sample_by": "document", "data_files":
        "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"}, "text"),
}


class Failure(Exception):
    """Bad input or a failed machine: its text is the one line the person at the shell sees."""


def warn(message):
    print(f"warning: {message}", file=sys.stderr, flush=True)


def import_package(name):
    try:
        return __import__(name)
    except ImportError as e:
        raise Failure(f"the Python package '{name}' is missing ({e}): install it with `python3 -m pip install {name}`, "
                      "or use --text FILE --tokenizer bytes, which need no package") from None


# ----------------------------------------------------------------------------------------------------------------------
# Progress

def duration(seconds):
    seconds = int(seconds + 0.5)
    return f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}" if seconds >= 3600 else f"{seconds // 60}:{seconds % 60:02d}"


class Progress:
    """A bar with ETA on a terminal; elsewhere a line every ten seconds. Short work prints nothing."""

    def __init__(self, what, total):
        self.what, self.total, self.start, self.tty = what, total, time.monotonic(), sys.stderr.isatty()
        self.last = self.start if self.tty else self.start + 5
        self.every = 0.1 if self.tty else 10.0

    def update(self, done, note=""):
        now = time.monotonic()
        if now - self.last >= self.every:
            self.last = now
            elapsed = now - self.start
            if self.total:
                share = min(done / self.total, 1.0)
                eta = duration(elapsed * (1 - share) / share) if share > 0 else "?"
                bar = "#" * int(30 * share) + "." * (30 - int(30 * share))
                text = f"{self.what} [{bar}] {100 * share:5.1f} %  {note}  {duration(elapsed)} gone, {eta} left"
            else:
                text = f"{self.what}  {note}  {duration(elapsed)} gone"
            if self.tty:
                text = text[:shutil.get_terminal_size().columns - 1]
            print(f"\r{text}\033[K" if self.tty else text, end="" if self.tty else "\n", file=sys.stderr, flush=True)

    def close(self):
        if self.tty:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


# ----------------------------------------------------------------------------------------------------------------------
# Text -> documents. A document is a bytes object of valid UTF-8.

class HashingFile:
    """A file opened for reading that knows the SHA-256 and the number of the bytes read from it."""

    def __init__(self, path):
        self.file, self.sha256, self.count = open(path, "rb"), hashlib.sha256(), 0

    def read(self, size=-1):
        data = self.file.read(size)
        self.sha256.update(data)
        self.count += len(data)
        return data


def windows_1252(error):
    """Codec error handler: bytes that are not UTF-8 become the characters Windows-1252 (else Latin-1) gives them."""
    bad = error.object[error.start:error.end]
    windows_1252.count += len(bad)
    return "".join(b.to_bytes(1, "big").decode("cp1252", "ignore") or chr(b) for b in bad), error.end


windows_1252.count = 0
codecs.register_error("windows-1252", windows_1252)


def read_chunks(path, raw, repair):
    """Yields the text of a file, plain or gzip, in pieces of whole UTF-8 characters."""
    with open(path, "rb") as sniff:
        packed = sniff.read(2) == b"\x1f\x8b"
    stream = gzip.GzipFile(fileobj=raw, mode="rb") if packed else raw
    position, carry = 0, b""                             # bytes of text before data; the head of a character cut in two
    while True:
        try:
            fresh = stream.read(CHUNK_BYTES)
        except (EOFError, zlib.error, gzip.BadGzipFile) as e:
            raise Failure(f"{path}: byte {raw.count}: damaged gzip data ({one_line(e)}): copy the file again") from None
        data = carry + fresh
        if not data:
            return
        whole = len(data) - (utf8_tail(data) if fresh else 0)
        text, carry = data[:whole], data[whole:]
        try:
            decoded = text.decode("utf-8", "windows-1252" if repair else "strict")
        except UnicodeDecodeError as e:
            raise Failure(f"{path}: byte {position + e.start}{' of the unpacked text' if packed else ''}: 0x{text[e.start]:02x} is not valid UTF-8 "
                          f"({e.reason}): convert the file (iconv -t UTF-8), or pass --repair to read such bytes as Windows-1252") from None
        position += whole
        yield decoded.encode("utf-8") if repair else text


def utf8_tail(data):
    """Length of the incomplete character at the end of data, 0 to 3."""
    for n in (1, 2, 3):
        byte = data[-n] if n <= len(data) else 0
        if byte >= 0xC0:
            return n if n < (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4) else 0
        if byte < 0x80:
            break
    return 0


def cut_position(text, start, limit):
    """Where to end a document that begins at start: after a blank line, else a line, else a character, between limit and
    2*limit bytes on."""
    for mark in (b"\n\n", b"\r\n\r\n", b"\n"):
        at = text.find(mark, start + limit, start + 2 * limit)
        if at >= 0:
            return at + len(mark)
    at = start + 2 * limit
    while text[at] & 0xC0 == 0x80:
        at -= 1
    return at


def split_at_blank_lines(chunks, limit):
    """Documents of limit to 2*limit bytes (the last: up to 2*limit). Together they are the text, byte for byte."""
    text = b""
    for chunk in chunks:
        text, start = text + chunk, 0
        while len(text) - start > 2 * limit:
            end = cut_position(text, start, limit)
            yield text[start:end]
            start = end
        text = text[start:]
    if text:
        yield text


def split_at(path, chunks, separator):
    """Documents lie between the matches of a regular expression, which are not part of them."""
    text = b""
    for chunk in chunks:
        *whole, text = separator.split(text + chunk)
        yield from whole
        if len(text) > MAX_DOCUMENT_BYTES:
            raise Failure(f"{path}: the document that begins with {text[:40]!r} is longer than {MAX_DOCUMENT_BYTES} bytes: check --separator")
    yield text


def split_dictionary(path, chunks):
    """dictd format: an entry begins at an unindented line after a blank line. One document an entry."""
    for entry in split_at(path, chunks, re.compile(rb"\n\n+(?=[^ \n])")):
        yield entry.strip(b"\n") + b"\n"


class TextCorpus:
    """Text files. documents() may be called again: each call reads the files from the start."""

    def __init__(self, paths, separator, document_bytes, repair):
        self.paths, self.separator, self.document_bytes, self.repair = paths, separator, document_bytes, repair
        self.sizes = []
        for path in paths:
            if os.path.isdir(path):
                raise Failure(f"{path}: is a folder: name the files in it, for example {path.rstrip('/')}/*.txt")
            if not os.path.isfile(path):
                raise Failure(f"{path}: no such file: check --text")
            self.sizes.append(os.path.getsize(path))
        self.total = sum(self.sizes)
        self.done, self.parts = 0, [{"name": os.path.basename(path)} for path in paths]

    def documents(self):
        self.done, windows_1252.count = 0, 0
        for path, size, part in zip(self.paths, self.sizes, self.parts):
            raw, before, text_bytes = HashingFile(path), self.done, 0
            with raw.file:
                for document in self.split(path, read_chunks(path, raw, self.repair)):
                    self.done = before + raw.count
                    text_bytes += len(document)
                    yield document
            self.done = before + size
            part.update(bytes=raw.count, text_bytes=text_bytes, sha256=raw.sha256.hexdigest())
        empty = [p for p, part in zip(self.paths, self.parts) if part["text_bytes"] == 0]
        if len(empty) == len(self.paths):
            raise Failure(f"{empty[0]}: byte 0: empty text: give --text a file with text in it")
        if empty:
            warn(f"{len(empty)} of {len(self.paths)} text files are empty, the first is {empty[0]}")

    def split(self, path, chunks):
        if self.separator:
            return split_at(path, chunks, re.compile(re.escape(self.separator.encode("utf-8"))))
        if path.endswith((".dict", ".dict.dz", ".dict.gz")):
            return split_dictionary(path, chunks)
        limit = self.document_bytes
        if not limit:
            # A corpus should have some 256 documents, or there is little to draw validation text from: a file is cut
            # into its share of them, of 512 bytes to 64 KiB each. A file of more than one chunk counts as its first.
            first = next(chunks, b"")
            limit = min(max(len(first) * min(len(self.paths), 256) // 256, 512), 1 << 16)
            rest = chunks
            chunks = (c for part in ([first], rest) for c in part)
        return split_at_blank_lines(chunks, limit)


class DatasetCorpus:
    """A public corpus of the Hugging Face hub, streamed."""

    def __init__(self, name, document_bytes):
        self.name, self.document_bytes = name, document_bytes or 4096
        self.datasets = import_package("datasets")
        self.total, self.done, self.parts = 0, 0, [{"name": name, "source": DATASETS[name][0]}]

    def documents(self):
        args, options, field = DATASETS[self.name]
        sha256, size = hashlib.sha256(), 0
        try:
            for row in self.datasets.load_dataset(*args, split="train", streaming=True, **options):
                text = row[field].encode("utf-8", "replace")
                sha256.update(text)
                size += len(text)
                # Tiny Shakespeare is one text of 1.1 MB, the others are collections of documents.
                yield from split_at_blank_lines([text], self.document_bytes) if args[0] == "text" else [text]
        except (OSError, ValueError, KeyError, RuntimeError) as e:
            raise Failure(f"--dataset {self.name} ({args[0]}): {one_line(e)}: check the network, or use --text FILE") from None
        self.parts[0].update(text_bytes=size, sha256=sha256.hexdigest())


def one_line(e):
    return " ".join(str(e).split())[:300] or type(e).__name__


def split_documents(documents, seed, share):
    """Yields (in validation, document). A document's side is a hash of its content, so the draw is reproducible, copies of
    a document share a side, and a growing corpus keeps its validation text. Should the draw leave validation empty, the
    document with the smallest hash, held back from training until then, makes it up."""
    salt, limit = seed.to_bytes(16, "little"), int(share * 2.0**64)
    held, held_hash, have_val = [], None, False
    for document in documents:
        if not document or document.isspace():
            continue
        value = int.from_bytes(hashlib.blake2b(document, digest_size=8, salt=salt).digest(), "little")
        if value < limit:
            have_val = True
            yield True, document
        elif not have_val and (held_hash is None or value <= held_hash):
            if value == held_hash:
                held.append(document)
                continue
            previous, held, held_hash = held, [document], value
            for d in previous:
                yield False, d
        else:
            yield False, document
        if have_val and held:
            for d in held:
                yield False, d
            held = []
    for d in held:
        yield True, d


def batch_documents(sided_documents):
    """Gathers documents of one side into batches: yields (in validation, [document]). Validation documents never wait longer
    than a training batch."""
    pending, sizes, limits = ([], []), [0, 0], (CHUNK_BYTES, VAL_BATCH_BYTES)

    def flush(*sides):
        for side in sides:
            if pending[side]:
                yield bool(side), pending[side][:]
            pending[side].clear()
            sizes[side] = 0

    for side, document in sided_documents:
        pending[side].append(document)
        sizes[side] += len(document)
        if sizes[side] >= limits[side]:
            yield from flush(1) if side else flush(1, 0)
    yield from flush(0, 1)
