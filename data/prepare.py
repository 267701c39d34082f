#!/usr/bin/env python3
"""Text -> token shards, tokenizer.bin and meta.json, ready for --train-data and --val-data.

    data/prepare.py                                          Webster's 1913 dictionary (Debian's dict-gcide), as bytes
    data/prepare.py --text my/*.txt --out data/mine          any UTF-8 text, .gz and .dz read as they are
    data/prepare.py --text big.txt --train-bpe 4096          a byte-level BPE vocabulary learnt from the text
    data/prepare.py --dataset fineweb-edu --tokenizer gpt2 --train-tokens 1e9

The byte tokenizer needs the standard library alone. File formats, document rules and meta.json: data/README.md.
"""

import argparse
import array
import collections
import concurrent.futures
import json
import math
import multiprocessing
import os
import re
import shutil
import signal
import struct
import sys
import time

from corpus import (DATASETS, DatasetCorpus, Failure, Progress, TextCorpus, batch_documents, import_package, one_line,
                    split_documents, warn, windows_1252)

GCIDE = "/usr/share/dictd/gcide.dict.dz"
BPE_TRAIN_BYTES = 1 << 30        # --train-bpe looks at no more text than this
MAX_SHARD_TOKENS = 2**31 - 1     # the count is an int32 in the header
END_OF_TEXT = "<|endoftext|>"
KNOWN_EOT = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<|begin_of_text|>", "<s>")

# ----------------------------------------------------------------------------------------------------------------------
# Documents -> tokens. An encoder turns a batch of documents into the bytes of its tokens, each document led by end of text.

def little_endian(tokens):
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens.tobytes()


class ByteTokenizer:
    """Token = byte. End of text is 0xFF, which occurs in no UTF-8 text."""
    name, vocab_size, eot, width = "bytes", 256, 255, 2

    def encode(self, documents):
        joined = b"\xff" + b"\xff".join(documents)
        wide = bytearray(2 * len(joined))
        wide[::2] = joined
        return bytes(wide)

    def token_bytes(self):
        return [bytes([i]) for i in range(255)] + [END_OF_TEXT.encode()]


class BpeTokenizer:
    """A tokenizer of the Hugging Face `tokenizers` package."""

    def __init__(self, name, tokenizer, eot_token):
        self.name, self.tokenizer = name, tokenizer
        vocab = tokenizer.get_vocab(with_added_tokens=True)
        if not vocab:
            raise Failure(f"--tokenizer {name}: its vocabulary is empty: use another tokenizer.json")
        wanted = (eot_token,) if eot_token else KNOWN_EOT
        found = [t for t in wanted if t in vocab]
        if not found:
            raise Failure(f"--tokenizer {name}: the vocabulary has no end-of-text token ({', '.join(wanted)}): name one by --eot-token")
        self.eot_token, self.eot = found[0], vocab[found[0]]
        self.vocab_size = max(vocab.values()) + 1
        self.width = 2 if self.vocab_size <= 65536 else 4
        if not hasattr(tokenizer, "encode_special_tokens") or not hasattr(tokenizer, "encode_batch_fast"):
            raise Failure("this version of the Python package 'tokenizers' cannot encode the text of special tokens as plain text: "
                          "upgrade it with `python3 -m pip install --upgrade tokenizers`")
        tokenizer.encode_special_tokens = True           # '<|endoftext|>' in a corpus is text, not the token
        tokenizer.no_truncation()
        tokenizer.no_padding()

    def encode(self, documents):
        out = array.array("H" if self.width == 2 else "I")
        for ids in self.tokenizer.encode_batch_fast([d.decode("utf-8") for d in documents], add_special_tokens=False):
            if self.eot in (ids := ids.ids):
                raise Failure(f"--tokenizer {self.name}: it gives the end-of-text token {self.eot_token!r} for plain text: choose another by --eot-token")
            out.append(self.eot)
            out.extend(ids)
        return little_endian(out)

    def token_bytes(self):
        """The bytes each id stands for: b'' for ids that stand for nothing."""
        table = [b""] * self.vocab_size
        decoder = json.dumps(json.loads(self.tokenizer.to_str()).get("decoder"))
        if "ByteLevel" in decoder:
            # GPT-2's alphabet: printable bytes stand for themselves, the others follow from U+0100 in order.
            plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
            alphabet = {chr(b): b for b in plain}
            alphabet.update((chr(256 + i), b) for i, b in enumerate(b for b in range(256) if b not in plain))
            to_bytes = lambda t: bytes(alphabet[c] for c in t) if all(c in alphabet for c in t) else t.encode("utf-8")
        elif "ByteFallback" in decoder or "\u2581" in decoder or "Metaspace" in decoder:
            byte = re.compile(r"<0x([0-9A-Fa-f]{2})>")
            to_bytes = lambda t: bytes([int(byte.fullmatch(t)[1], 16)]) if byte.fullmatch(t) else t.replace("\u2581", " ").encode("utf-8")
        else:
            raise Failure(f"--tokenizer {self.name}: cannot tell which bytes its tokens stand for (decoder {decoder[:80]}): "
                          "use a byte-level or SentencePiece BPE")
        added = {t.content for t in self.tokenizer.get_added_tokens_decoder().values()}
        for token, i in self.tokenizer.get_vocab(with_added_tokens=True).items():
            table[i] = token.encode("utf-8") if token in added else to_bytes(token)
        return table


def load_tokenizer(name, eot_token):
    tokenizers = import_package("tokenizers")
    is_file = os.path.isfile(name)
    if not is_file and (name.endswith(".json") or name.count("/") > 1 or name.startswith((".", "/"))):
        raise Failure(f"{name}: no such file: --tokenizer takes 'bytes', a tokenizer.json, or a name of the Hugging Face hub")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(name) if is_file else tokenizers.Tokenizer.from_pretrained(name)
    except Exception as e:                               # the package raises bare Exception, for a bad file and for no network
        what = "not a tokenizer.json of the tokenizers package" if is_file else "not found on the Hugging Face hub"
        raise Failure(f"--tokenizer {name}: {what} ({one_line(e)})") from None
    bpe = BpeTokenizer(name, tokenizer, eot_token)
    probe, table = "The Caf\u00e9\n\n  x\ty  2.", bpe.token_bytes()
    seen = b"".join(table[i] for i in tokenizer.encode(probe, add_special_tokens=False).ids)
    if seen.lstrip(b" ") != probe.encode("utf-8"):
        warn(f"--tokenizer {name}: it does not keep the text as it is ({probe!r} becomes {seen!r}); bytes a token counts the original text")
    return bpe


def train_bpe(corpus, vocab_size, seed, share):
    """A byte-level BPE vocabulary from the training documents; end of text is token 0."""
    tokenizers = import_package("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=[END_OF_TEXT], show_progress=False,
                                             initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet())
    progress, failed = Progress("reading for BPE", corpus.total), []

    def texts():
        left = BPE_TRAIN_BYTES
        try:
            for side, document in split_documents(corpus.documents(), seed, share):
                if left <= 0:
                    return
                if not side:
                    left -= len(document)
                    progress.update(corpus.done, f"{(BPE_TRAIN_BYTES - left) / 1e6:.1f} MB")
                    yield document.decode("utf-8")
        except (Failure, OSError, KeyboardInterrupt) as e:    # the package would wrap it in its own exception
            failed.append(e)

    tokenizer.train_from_iterator(texts(), trainer)
    progress.close()
    if failed:
        raise failed[0]
    if tokenizer.get_vocab_size() < vocab_size:
        warn(f"--train-bpe {vocab_size}: the text gave only {tokenizer.get_vocab_size()} tokens")
    return BpeTokenizer(f"bpe{vocab_size}", tokenizer, END_OF_TEXT)


WORKER = {}                                              # the tokenizer of a worker process


def worker_start(name, tokenizer_json, eot_token):
    signal.signal(signal.SIGINT, signal.SIG_IGN)         # the parent ends the pool
    os.environ["TOKENIZERS_PARALLELISM"] = "false"       # one thread a process
    WORKER["tokenizer"] = BpeTokenizer(name, import_package("tokenizers").Tokenizer.from_str(tokenizer_json), eot_token)


def worker_encode(documents):
    return WORKER["tokenizer"].encode(documents)


def encode_batches(batches, tokenizer, workers):
    """Yields (in validation, documents, text bytes, token bytes), in the order of the batches at any number of workers."""
    size = lambda documents: (len(documents), sum(map(len, documents)))
    if workers <= 1 or isinstance(tokenizer, ByteTokenizer):
        for side, documents in batches:
            yield (side, *size(documents), tokenizer.encode(documents))
        return
    context = multiprocessing.get_context("spawn")
    start = (tokenizer.name, tokenizer.tokenizer.to_str(), tokenizer.eot_token)
    with concurrent.futures.ProcessPoolExecutor(workers, context, worker_start, start) as pool:
        queue = collections.deque()                      # bounded, so memory does not grow with the corpus
        try:
            for side, documents in batches:
                queue.append((side, *size(documents), pool.submit(worker_encode, documents)))
                if len(queue) > 2 * workers:
                    *head, future = queue.popleft()
                    yield (*head, future.result())
            while queue:
                *head, future = queue.popleft()
                yield (*head, future.result())
        except concurrent.futures.process.BrokenProcessPool:
            raise Failure("a tokenizer process died (out of memory?): use fewer --workers") from None
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


# ----------------------------------------------------------------------------------------------------------------------
# Tokens -> files

class ShardWriter:
    """Writes folder/name_000000.bin, ...: llm.c's shards of at most shard_tokens tokens. Counts what it writes."""

    def __init__(self, folder, name, width, shard_tokens):
        self.folder, self.name, self.width, self.shard_tokens = folder, name, width, shard_tokens
        self.file, self.room, self.shards = None, 0, 0
        self.tokens = self.text_bytes = self.documents = 0

    def write(self, tokens, documents, text_bytes):
        self.documents += documents
        self.text_bytes += text_bytes
        self.tokens += len(tokens) // self.width
        view = memoryview(tokens)
        while len(view):
            if not self.room:
                self.close()
                self.file = open(os.path.join(self.folder, f"{self.name}_{self.shards:06d}.bin"), "wb")
                self.file.write(bytes(1024))
                self.room, self.shards = self.shard_tokens, self.shards + 1
            part = view[:self.room * self.width]
            self.file.write(part)
            self.room -= len(part) // self.width
            view = view[len(part):]

    def close(self):
        if self.file:
            magic, version = (20240520, 1) if self.width == 2 else (20240801, 7)
            count = (self.file.tell() - 1024) // self.width
            self.file.seek(0)
            self.file.write(struct.pack("<3i", magic, version, count))
            sync_close(self.file)
            self.file = None


def sync_close(file):
    with file:
        file.flush()
        os.fsync(file.fileno())


def write_tokenizer(path, tokenizer):
    """llm.c's tokenizer.bin, version 2: 256 int32 header, then a length byte and the bytes of each token."""
    file = open(path, "wb")
    file.write(struct.pack("<256i", 20240328, 2, tokenizer.vocab_size, tokenizer.eot, *[0] * 252))
    longest = 0
    for token in tokenizer.token_bytes():
        longest = max(longest, len(token))
        token = token[:255]
        file.write(bytes([len(token)]) + token)
    sync_close(file)
    if longest > 255:
        warn(f"tokenizer.bin: a token of {longest} bytes is cut to 255, the format's longest: samples show it cut, training is not affected")


def publish(partial, out):
    """Moves the finished files in. meta.json goes first and comes last: a folder without one is not whole."""
    names = sorted(os.listdir(partial), key=lambda n: (n == "meta.json", n))
    if os.path.exists(os.path.join(out, "meta.json")):
        os.remove(os.path.join(out, "meta.json"))
    for name in names[:-1]:
        os.replace(os.path.join(partial, name), os.path.join(out, name))
    for name in os.listdir(out):
        if name not in names and re.fullmatch(r"(train|val)_\d{6,}\.bin", name):
            os.remove(os.path.join(out, name))
    os.replace(os.path.join(partial, names[-1]), os.path.join(out, names[-1]))


def entropy(counts):
    total = sum(counts.values())
    return -sum(n / total * math.log(n / total) for n in counts.values())


def write_shards(corpus, tokenizer, args, folder):
    """Encodes the corpus into folder. Returns (train writer, val writer, token counts of the validation text)."""
    train, val = (ShardWriter(folder, name, tokenizer.width, args.shard_tokens) for name in ("train", "val"))
    counts = collections.Counter()
    by_tokens = not corpus.total
    progress = Progress("tokenizing", args.train_tokens if by_tokens else corpus.total)
    batches = batch_documents(split_documents(corpus.documents(), args.seed, args.val_share))
    results = encode_batches(batches, tokenizer, args.workers)
    for side, documents, text_bytes, tokens in results:
        if side and val.tokens < args.val_tokens:
            val.write(tokens, documents, text_bytes)
            counts.update(array.array("H" if tokenizer.width == 2 else "I", tokens))
        else:
            train.write(tokens, documents, text_bytes)
        progress.update(train.tokens if by_tokens else corpus.done, f"{(train.tokens + val.tokens) / 1e6:.1f} M tokens")
        if args.train_tokens and train.tokens >= args.train_tokens and val.tokens:
            results.close()
            break
    train.close()
    val.close()
    progress.close()
    if not train.tokens or not val.tokens:
        lone = getattr(corpus, "paths", [args.dataset])[0]
        raise Failure(f"{lone}: the text is one document of {train.text_bytes + val.text_bytes} bytes, training and validation need one each: "
                      "give more text (1 kB or more), a smaller --document-bytes, or a --separator")
    return train, val, counts


def write_meta(path, corpus, tokenizer, args, train, val, counts):
    meta = {"vocab_size": tokenizer.vocab_size, "tokenizer": tokenizer.name, "eot_token": tokenizer.eot,
            "token_bytes": tokenizer.width}
    for side in (train, val):
        meta.update({f"{side.name}_tokens": side.tokens, f"{side.name}_bytes": side.text_bytes,
                     f"{side.name}_documents": side.documents, f"{side.name}_shards": side.shards,
                     f"{side.name}_bytes_per_token": side.text_bytes / side.tokens})
    meta["val_unigram_entropy"] = entropy(counts)
    meta["corpus"] = corpus.parts                        # no sha256: --train-tokens stopped before the end of this part
    meta["repaired_bytes"] = windows_1252.count
    meta["options"] = {k: v for k, v in vars(args).items() if k not in ("out", "workers")}
    with open(path, "w", encoding="utf-8") as f:
        json.dump(meta, f, indent=2, ensure_ascii=False)
        f.write("\n")
        f.flush()
        os.fsync(f.fileno())
    return meta


# ----------------------------------------------------------------------------------------------------------------------
# Command line

class Parser(argparse.ArgumentParser):
    def error(self, message):
        print(f"usage error: {message} (see data/prepare.py --help)", file=sys.stderr)
        sys.exit(2)


def count(least, most):
    """An argument type: a whole number, 1e9 allowed, from least to most."""
    def parse(text):
        try:
            value = int(text) if re.fullmatch(r"[0-9]+", text) else int(float(text)) if float(text).is_integer() else None
        except (ValueError, OverflowError):
            value = None
        if value is None or not least <= value <= most:
            raise argparse.ArgumentTypeError(f"'{text}' is not a whole number from {least} to {most}")
        return value
    return parse


def share(text):
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < 1.0:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number above 0 and below 1")
    return value


def parse_arguments(argv):
    p = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    source = p.add_mutually_exclusive_group()
    source.add_argument("--text", nargs="+", metavar="FILE", help=f"UTF-8 text, plain or gzip (default: {GCIDE})")
    source.add_argument("--dataset", choices=sorted(DATASETS), help="a public corpus, through the Python package 'datasets'")
    vocabulary = p.add_mutually_exclusive_group()
    vocabulary.add_argument("--tokenizer", default="bytes", metavar="NAME", help="'bytes', a tokenizer.json, or a name of the Hugging Face hub (default: bytes)")
    vocabulary.add_argument("--train-bpe", type=count(257, 2**20), metavar="VOCAB", help="learn a byte-level BPE of VOCAB tokens from the training text")
    p.add_argument("--out", metavar="DIR", help="output folder (default: data/CORPUS-TOKENIZER)")
    p.add_argument("--val-share", type=share, default=0.02, metavar="X", help="share of the documents drawn for validation (default: 0.02)")
    p.add_argument("--val-tokens", type=count(1, 10**12), default=10**7, metavar="N", help="draw no more for validation once it has N tokens (default: 1e7)")
    p.add_argument("--train-tokens", type=count(1, 10**15), metavar="N", help="stop once training has N tokens (default: the whole corpus)")
    p.add_argument("--shard-tokens", type=count(1, MAX_SHARD_TOKENS), default=10**8, metavar="N", help="tokens a shard (default: 1e8)")
    p.add_argument("--separator", metavar="TEXT", help="documents of --text end at this text, which is left out (default: see data/README.md)")
    p.add_argument("--document-bytes", type=count(16, 2**30), metavar="N", help="cut a text at blank lines into documents of N to 2N bytes (default: by its size)")
    p.add_argument("--eot-token", metavar="TEXT", help="the tokenizer's end-of-text token (default: <|endoftext|>, </s>, ...)")
    p.add_argument("--repair", action="store_true", help="read bytes that are not UTF-8 as Windows-1252 instead of refusing them")
    p.add_argument("--workers", type=count(1, 1024), default=len(os.sched_getaffinity(0)), metavar="N", help="BPE processes (default: one a core)")
    p.add_argument("--seed", type=count(0, 2**64 - 1), default=0, metavar="N", help="of the draw for validation (default: 0)")
    args = p.parse_args(argv)
    if args.separator == "":
        p.error("argument --separator: it is empty")
    return args


def stem(path):
    return re.sub(r"\.(txt|md|gz|dz|dict|json)$", "", re.sub(r"\.(gz|dz)$", "", os.path.basename(path))) or "text"


def open_corpus(args):
    """-> (corpus, its short name)"""
    if args.dataset:
        return DatasetCorpus(args.dataset, args.document_bytes), args.dataset
    if args.text:
        return TextCorpus(args.text, args.separator, args.document_bytes, args.repair), stem(args.text[0])
    if not os.path.isfile(GCIDE):
        raise Failure(f"{GCIDE}: the default text is missing: install it (sudo apt-get install dict-gcide), or give --text FILE")
    args.repair = True                                   # three stray Windows-1252 bytes in 40 MB
    return TextCorpus([GCIDE], args.separator, args.document_bytes, True), "gcide"


def prepare(args):
    start = time.monotonic()
    corpus, name = open_corpus(args)
    if args.train_bpe:
        tokenizer, short = train_bpe(corpus, args.train_bpe, args.seed, args.val_share), f"bpe{args.train_bpe}"
    elif args.tokenizer == "bytes":
        tokenizer, short = ByteTokenizer(), "bytes"
    else:
        tokenizer, short = load_tokenizer(args.tokenizer, args.eot_token), stem(args.tokenizer)
    out = args.out or os.path.join(os.path.dirname(os.path.abspath(__file__)), f"{name}-{short}")
    partial, is_new = os.path.join(out, ".partial"), not os.path.isdir(out)
    os.makedirs(out, exist_ok=True)
    shutil.rmtree(partial, ignore_errors=True)           # of a run that was killed
    os.mkdir(partial)
    try:
        train, val, counts = write_shards(corpus, tokenizer, args, partial)
        write_tokenizer(os.path.join(partial, "tokenizer.bin"), tokenizer)
        if not isinstance(tokenizer, ByteTokenizer):
            tokenizer.tokenizer.save(os.path.join(partial, "tokenizer.json"))
        meta = write_meta(os.path.join(partial, "meta.json"), corpus, tokenizer, args, train, val, counts)
        publish(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        if is_new and not os.listdir(out):
            os.rmdir(out)
    if meta["repaired_bytes"]:
        print(f"{meta['repaired_bytes']} bytes that were not UTF-8 were read as Windows-1252")
    for side in (train, val):
        print(f"{side.name + ':':<6} {side.tokens:>12,} tokens  {side.documents:>9,} documents  {side.shards:>3} shards  "
              f"{side.text_bytes / side.tokens:.4f} bytes a token")
    print(f"validation unigram entropy {meta['val_unigram_entropy']:.4f} nats a token; vocabulary {tokenizer.vocab_size}, end of text {tokenizer.eot}")
    print(f"wrote {out} in {time.monotonic() - start:.1f} s")


def main():
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    args = parse_arguments(sys.argv[1:])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))    # so that the partial output is removed
    try:
        prepare(args)
    except Failure as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    except OSError as e:
        print(f"error: {e.filename or args.out or 'the output folder'}: {e.strerror or one_line(e)}: check the path, its permissions and the free space", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("error: interrupted: what the output folder held is unchanged", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
