#!/usr/bin/env python3
"""data/prepare.py, run as a person runs it on small texts; its outputs are read back here by other code. Standard library only; the
BPE tests run where the 'tokenizers' package is installed."""

import array
import collections
import gzip
import hashlib
import importlib
import importlib.util
import json
import math
import os
import random
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
SCRIPT = os.path.join(ROOT, "data", "prepare.py")
HAS_TOKENIZERS = importlib.util.find_spec("tokenizers") is not None


def text_of(paragraphs, seed=1):
    """Paragraphs of words, all different."""
    draw = random.Random(seed)
    words = ["alpha", "beta", "gamma", "na\u00efve", "\u65e5\u672c\u8a9e", "\U0001F600", "delta", "<|endoftext|>", "epsilon", "zeta."]
    return "".join(" ".join(draw.choice(words) for _ in range(40)) + f" {i}\n\n" for i in range(paragraphs))


def read_shard(path):
    with open(path, "rb") as f:
        data = f.read()
    header = struct.unpack("<256i", data[:1024])
    assert header[:2] in ((20240520, 1), (20240801, 7)) and not any(header[3:]), path
    tokens = array.array("H" if header[0] == 20240520 else "I", data[1024:])
    assert len(tokens) == header[2] > 0, path
    return tokens


def read_tokenizer(path):
    with open(path, "rb") as f:
        data = f.read()
    header = struct.unpack("<256i", data[:1024])
    assert header[:2] == (20240328, 2), header[:2]
    table, at = [], 1024
    for _ in range(header[2]):
        table.append(data[at + 1:at + 1 + data[at]])
        at += 1 + data[at]
    assert at == len(data)
    return table, header[3]


class Output:
    """An output folder, read back."""

    def __init__(self, folder):
        self.names = sorted(os.listdir(folder))
        self.table, self.eot = read_tokenizer(os.path.join(folder, "tokenizer.bin"))
        with open(os.path.join(folder, "meta.json"), encoding="utf-8") as f:
            self.meta = json.load(f)
        self.shards = {side: [read_shard(os.path.join(folder, n)) for n in self.names if n.startswith(side + "_")] for side in ("train", "val")}
        self.tokens = {side: [t for s in shards for t in s] for side, shards in self.shards.items()}

    def documents(self, side):
        """The texts between end-of-text tokens, as bytes."""
        tokens, found = self.tokens[side], []
        assert tokens[0] == self.eot, "a document begins with end of text"
        for t in tokens:
            if t == self.eot:
                found.append([])
            else:
                found[-1].append(t)
        return [b"".join(self.table[t] for t in d) for d in found]


class PrepareTest(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="quartet test ")       # with a space, on purpose
        self.out = os.path.join(self.folder, "out")

    def tearDown(self):
        shutil.rmtree(self.folder)

    def put(self, name, content):
        path = os.path.join(self.folder, name)
        with open(path, "wb") as f:
            f.write(content if isinstance(content, bytes) else content.encode("utf-8"))
        return path

    def run_script(self, *args):
        return subprocess.run([sys.executable, SCRIPT, *map(str, args)], capture_output=True, text=True)

    def prepare(self, *args):
        r = self.run_script(*args, "--out", self.out)
        self.assertEqual(r.returncode, 0, r.stderr)
        self.assertEqual(r.stderr, "")
        return Output(self.out)

    def refuse(self, args, *words, status=1):
        r = self.run_script(*args)
        self.assertEqual(r.returncode, status, r.stderr + r.stdout)
        self.assertEqual(r.stdout, "")
        self.assertEqual(r.stderr.count("\n"), 1, r.stderr)
        self.assertTrue(r.stderr.startswith("usage error: " if status == 2 else "error: "), r.stderr)
        for word in words:
            self.assertIn(word, r.stderr)

    # -- what it writes

    def test_text_comes_back(self):
        text = text_of(400)
        o = self.prepare("--text", self.put("a.txt", text))
        train, val = o.documents("train"), o.documents("val")
        self.assertGreater(len(val), 0)
        self.assertGreater(len(train), len(val))
        # Every document lies in the text; put back in order they are the text, byte for byte.
        data = text.encode("utf-8")
        documents = sorted(train + val, key=data.index)
        self.assertEqual(b"".join(documents), data)
        for d in documents[:-1]:
            self.assertTrue(d.endswith(b"\n\n"))
            self.assertTrue(512 <= len(d) <= 1024, len(d))               # 120 kB / 256 is below the least, 512
        self.assertEqual(o.eot, 255)
        self.assertEqual(o.table[:255], [bytes([i]) for i in range(255)])
        self.assertEqual(o.table[255], b"<|endoftext|>")

    def test_meta(self):
        text = text_of(300)
        path = self.put("a.txt", text)
        o = self.prepare("--text", path, "--val-share", "0.1", "--seed", "3")
        m = o.meta
        self.assertEqual((m["vocab_size"], m["tokenizer"], m["eot_token"], m["token_bytes"]), (256, "bytes", 255, 2))
        for side in ("train", "val"):
            documents = o.documents(side)
            self.assertEqual(m[f"{side}_tokens"], len(o.tokens[side]))
            self.assertEqual(m[f"{side}_documents"], len(documents))
            self.assertEqual(m[f"{side}_bytes"], sum(map(len, documents)))
            self.assertEqual(m[f"{side}_bytes_per_token"], m[f"{side}_bytes"] / m[f"{side}_tokens"])
        self.assertEqual(m["train_bytes"] + m["val_bytes"], len(text.encode("utf-8")))
        counts = collections.Counter(o.tokens["val"])
        n = len(o.tokens["val"])
        # float64 sums of fewer than 256 terms below 1: 1e-12 is far above their rounding
        self.assertAlmostEqual(m["val_unigram_entropy"], math.log(n) - sum(c * math.log(c) for c in counts.values()) / n, delta=1e-12)
        with open(path, "rb") as f:
            data = f.read()
        self.assertEqual(m["corpus"], [{"name": "a.txt", "bytes": len(data), "text_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}])
        self.assertEqual((m["options"]["val_share"], m["options"]["seed"]), (0.1, 3))

    def test_reproducible(self):
        path = self.put("a.txt", text_of(300))
        first = self.prepare("--text", path)
        again = self.prepare("--text", path)
        other = self.prepare("--text", path, "--seed", "1")
        self.assertEqual(first.tokens, again.tokens)
        self.assertNotEqual(first.documents("val"), other.documents("val"))

    def test_val_share(self):
        # 2000 documents, a tenth of them: 200 with standard deviation 13.4; five of those are 67.
        path = self.put("a.txt", "".join(f"document {i}\n%%\n" for i in range(2000)))
        o = self.prepare("--text", path, "--separator", "%%\n", "--val-share", "0.1")
        self.assertEqual(len(o.documents("val")) + len(o.documents("train")), 2000)
        self.assertLess(abs(len(o.documents("val")) - 200), 67)
        self.assertEqual(sorted(o.documents("val") + o.documents("train")), sorted(f"document {i}\n".encode() for i in range(2000)))

    def test_copies_share_a_side(self):
        path = self.put("a.txt", "".join(f"document {i % 50}\n%%" for i in range(500)))
        o = self.prepare("--text", path, "--separator", "%%", "--val-share", "0.3")
        self.assertFalse(set(o.documents("val")) & set(o.documents("train")))
        self.assertEqual(len(o.documents("val")) + len(o.documents("train")), 500)

    def test_val_never_empty(self):
        # Draws of 1e-9 leave validation to the document with the smallest hash, wherever it stands and copies with it.
        for seed in range(8):
            path = self.put("a.txt", "".join(f"document {i % 7}\n%%" for i in range(14)))
            o = self.prepare("--text", path, "--separator", "%%", "--val-share", "1e-9", "--seed", seed)
            self.assertEqual(len(o.documents("val")), 2)
            self.assertEqual(len(set(o.documents("val"))), 1)
            self.assertEqual(len(set(o.documents("train"))), 6)

    def test_val_tokens(self):
        path = self.put("a.txt", "".join(f"document {i} " + "x" * 1000 + "%%" for i in range(2000)))
        o = self.prepare("--text", path, "--separator", "%%", "--val-share", "0.5", "--val-tokens", "1000")
        self.assertGreaterEqual(len(o.tokens["val"]), 1000)
        self.assertLess(len(o.tokens["val"]), 1000 + 2 * 65536)          # one batch of validation text more at most
        self.assertEqual(len(o.documents("val")) + len(o.documents("train")), 2000)

    def test_train_tokens(self):
        path = self.put("a.txt", "".join(f"document {i} " + "x" * 1000 + "%%" for i in range(6000)))
        o = self.prepare("--text", path, "--separator", "%%", "--train-tokens", "1e6")
        self.assertGreaterEqual(len(o.tokens["train"]), 10**6)
        self.assertLess(len(o.tokens["train"]), 10**6 + 1.01 * 2**20)        # one batch of training text more at most
        self.assertGreater(len(o.tokens["val"]), 0)
        self.assertLess(o.meta["train_bytes"] + o.meta["val_bytes"], os.path.getsize(path))
        self.assertNotIn("sha256", o.meta["corpus"][0])                  # not read to its end

    def test_shards(self):
        path = self.put("a.txt", text_of(200))
        whole = self.prepare("--text", path)
        cut = self.prepare("--text", path, "--shard-tokens", "1000")
        self.assertEqual(whole.tokens, cut.tokens)
        sizes = [len(s) for s in cut.shards["train"]]
        self.assertGreater(len(sizes), 3)
        self.assertEqual(set(sizes[:-1]), {1000})
        self.assertEqual(cut.meta["train_shards"], len(sizes))
        again = self.prepare("--text", path)                             # stale shards are gone
        self.assertEqual(again.names, ["meta.json", "tokenizer.bin", "train_000000.bin", "val_000000.bin"])

    def test_packed(self):
        data = text_of(300).encode("utf-8")
        plain = self.prepare("--text", self.put("a.txt", data))
        packed = self.prepare("--text", self.put("a.gz", gzip.compress(data)))
        self.assertEqual(plain.tokens, packed.tokens)

    def test_several_files(self):
        texts = [text_of(1, seed) for seed in range(300)]
        paths = [self.put(f"{i:03d}.txt", t) for i, t in enumerate(texts)]
        o = self.prepare("--text", *paths)                               # small files: a document each
        self.assertEqual(sorted(o.documents("train") + o.documents("val")), sorted(t.encode("utf-8") for t in texts))

    def test_dictionary(self):
        entries = [f"Word{i} \\Word{i}\\, n.\n   1. A meaning.\n\n   2. Another.\n" for i in range(200)]
        o = self.prepare("--text", self.put("tiny.dict.dz", gzip.compress(("\n\n" + "\n".join(entries)).encode())))
        self.assertEqual(sorted(o.documents("train") + o.documents("val")), sorted(e.encode() for e in entries))

    def test_chunk_borders(self):
        # More than two chunks of 2^20 bytes; characters of 2, 3 and 4 bytes cross the borders. No blank line or newline.
        for character in ("\u00e9", "\u20ac", "\U0001F600"):
            data = ("x" + character * (2400000 // len(character.encode()))).encode("utf-8")
            o = self.prepare("--text", self.put("a.txt", data), "--document-bytes", "1000")
            documents = o.documents("train") + o.documents("val")
            self.assertEqual(sum(map(len, documents)), len(data))
            for d in documents:
                d.decode("utf-8")
                self.assertLessEqual(len(d), 2000)

    def test_end_of_text_is_text(self):
        o = self.prepare("--text", self.put("a.txt", "one <|endoftext|> two\n\n" * 100))
        self.assertEqual(sum(d.count(b"<|endoftext|>") for d in o.documents("train") + o.documents("val")), 100)

    def test_repair(self):
        path = self.put("a.txt", text_of(50).encode("utf-8") + b"market\x92s fa\xe7ade \x81" + text_of(50, 2).encode("utf-8"))
        self.refuse(["--text", path, "--out", self.out], "a.txt", "not valid UTF-8", "--repair")
        o = self.prepare("--text", path, "--repair")
        text = b"".join(o.documents("train") + o.documents("val")).decode("utf-8")
        self.assertIn("market\u2019s fa\u00e7ade \x81", text)
        self.assertEqual(o.meta["repaired_bytes"], 3)

    # -- what it refuses

    def test_bad_text(self):
        good = text_of(50).encode("utf-8")
        cases = [("empty.txt", b"", "byte 0", "empty text"), ("blank.txt", b" \n\n", "one document of 0 bytes"),
                 ("short.txt", b"hello", "one document of 5 bytes", "--document-bytes"),
                 ("bad.txt", good + b"\xff" + good, f"byte {len(good)}", "0xff", "not valid UTF-8"),
                 ("cut.txt", good + "\u20ac".encode()[:2], f"byte {len(good)}", "not valid UTF-8"),
                 ("surrogate.txt", good + b"\xed\xa0\x80", f"byte {len(good)}", "not valid UTF-8"),
                 ("late.txt", b"x\n" * 2**20 + b"\xc0", f"byte {2**21}", "0xc0"),
                 ("cut.gz", gzip.compress(good)[:-20], "damaged gzip data"),
                 ("bad.gz", gzip.compress(good)[:30] + b"\0" * 40 + gzip.compress(good)[70:], "damaged gzip data"),
                 ("bad inside.gz", gzip.compress(good + b"\xff"), f"byte {len(good)} of the unpacked text")]
        for name, data, *words in cases:
            with self.subTest(name):
                self.refuse(["--text", self.put(name, data), "--out", self.out], name, *words)
                self.assertFalse(os.path.exists(self.out))
        self.refuse(["--text", os.path.join(self.folder, "none.txt"), "--out", self.out], "none.txt", "no such file")
        self.refuse(["--text", self.folder, "--out", self.out], self.folder, "is a folder")
        self.refuse(["--text", self.put("good.txt", good), self.put("bad.txt", b"\xff"), "--out", self.out], "bad.txt", "byte 0")

    def test_one_empty_file_among_others(self):
        r = self.run_script("--text", self.put("a.txt", text_of(50)), self.put("none.txt", b""), "--out", self.out)
        self.assertEqual(r.returncode, 0)
        self.assertIn("1 of 2 text files are empty", r.stderr)

    def test_bad_output(self):
        path = self.put("a.txt", text_of(50))
        self.refuse(["--text", path, "--out", path], "a.txt", "check the path")
        self.refuse(["--text", path, "--out", "/proc/none"], "/proc/none")

    def test_good_output_survives(self):
        """A run that fails, or is stopped, leaves what an earlier one wrote."""
        before = self.prepare("--text", self.put("a.txt", text_of(100))).tokens
        self.refuse(["--text", self.put("bad.txt", text_of(5000).encode("utf-8") + b"\xff"), "--out", self.out], "bad.txt")
        self.assertEqual(Output(self.out).tokens, before)
        big = self.put("big.txt", b"a line of text\n" * 10**6)
        child = subprocess.Popen([sys.executable, SCRIPT, "--text", *[big] * 60, "--out", self.out], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        partial = os.path.join(self.out, ".partial", "train_000000.bin")
        end = time.monotonic() + 60
        while not os.path.exists(partial) and time.monotonic() < end:
            time.sleep(0.01)
        child.send_signal(signal.SIGINT)
        out, err = child.communicate()
        self.assertEqual((child.returncode, out), (130, ""), err)
        self.assertEqual(err.count("\n"), 1, err)
        o = Output(self.out)
        self.assertEqual(o.tokens, before)
        self.assertNotIn(".partial", o.names)

    def test_usage(self):
        path = self.put("a.txt", text_of(50))
        for args, word in ((["--val-share", "0"], "--val-share"), (["--val-share", "1"], "--val-share"), (["--val-share", "nan"], "--val-share"),
                           (["--shard-tokens", "0"], "--shard-tokens"), (["--shard-tokens", "2147483648"], "--shard-tokens"),
                           (["--seed", "-1"], "--seed"), (["--val-tokens", "1.5"], "--val-tokens"), (["--train-tokens", "inf"], "--train-tokens"),
                           (["--train-bpe", "100"], "--train-bpe"), (["--separator", ""], "--separator"), (["--dataset", "c4"], "not allowed with"),
                           (["--nonsense"], "--nonsense"), (["--tokenizer", "gpt2", "--train-bpe", "4096"], "not allowed with")):
            with self.subTest(args):
                self.refuse(["--text", path, "--out", self.out, *args], word, status=2)

    @unittest.skipIf(HAS_TOKENIZERS, "the package is installed")
    def test_missing_package(self):
        path = self.put("a.txt", text_of(50))
        self.refuse(["--text", path, "--tokenizer", "gpt2", "--out", self.out], "pip install tokenizers")
        self.refuse(["--text", path, "--train-bpe", "300", "--out", self.out], "pip install tokenizers")

    @unittest.skipIf(importlib.util.find_spec("datasets"), "the package is installed")
    def test_missing_datasets(self):
        self.refuse(["--dataset", "c4", "--out", self.out], "pip install datasets")

    # -- public corpora: a stand-in for the package, so no network is needed

    def dataset(self, body, *args):
        folder = os.path.join(self.folder, "packages")
        os.makedirs(folder, exist_ok=True)
        with open(os.path.join(folder, "datasets.py"), "w", encoding="utf-8") as f:
            f.write("def load_dataset(*args, split, streaming, **options):\n    assert split == 'train' and streaming\n" + body)
        return subprocess.run([sys.executable, SCRIPT, "--out", self.out, *args], capture_output=True, text=True,
                              env={**os.environ, "PYTHONPATH": folder})

    def test_dataset(self):
        r = self.dataset("    assert args == ('allenai/c4', 'en')\n    yield from ({'text': f'document {i}\\n\\n' + 'x' * 300} for i in range(30000))\n",
                         "--dataset", "c4", "--train-tokens", "2000000")
        self.assertEqual((r.returncode, r.stderr), (0, ""))
        o = Output(self.out)
        self.assertGreaterEqual(len(o.tokens["train"]), 2000000)
        self.assertLess(o.meta["train_documents"] + o.meta["val_documents"], 30000)
        for d in o.documents("train") + o.documents("val"):              # a row is a document, whatever blank lines it has
            self.assertRegex(d, rb"\Adocument [0-9]+\n\nx{300}\Z")
        self.assertEqual(o.meta["corpus"], [{"name": "c4", "source": ["allenai/c4", "en"]}])

    def test_dataset_of_one_text(self):
        text = text_of(200).encode("utf-8")
        r = self.dataset(f"    assert options['sample_by'] == 'document'\n    yield {{'text': {text.decode('utf-8')!r}}}\n", "--dataset", "tinyshakespeare")
        self.assertEqual((r.returncode, r.stderr), (0, ""))
        o = Output(self.out)
        self.assertEqual(b"".join(sorted(o.documents("train") + o.documents("val"), key=text.index)), text)
        self.assertEqual(o.meta["corpus"][0]["sha256"], hashlib.sha256(text).hexdigest())

    def test_dataset_failure(self):
        r = self.dataset("    yield {'text': 'one'}\n    raise ConnectionError('no\\nroute')\n", "--dataset", "tinystories")
        self.assertEqual((r.returncode, r.stderr.count("\n")), (1, 1), r.stderr)
        self.assertRegex(r.stderr, "^error: --dataset tinystories .*no route.*network")
        self.assertFalse(os.path.exists(self.out))

    # -- BPE

    @unittest.skipUnless(HAS_TOKENIZERS, "needs the tokenizers package")
    def test_bpe(self):
        text = text_of(2000)
        path = self.put("a.txt", text)
        plain = self.prepare("--text", path)
        trained = self.prepare("--text", path, "--train-bpe", "600", "--workers", "1")
        self.assertLess(len(trained.tokens["train"]), len(plain.tokens["train"]) / 2)
        for side in ("train", "val"):                                    # '<|endoftext|>' of the text included
            self.assertEqual(trained.documents(side), plain.documents(side))
        self.assertEqual(trained.meta["vocab_size"], len(trained.table))
        vocabulary = shutil.copy(os.path.join(self.out, "tokenizer.json"), os.path.join(self.folder, "tokenizer.json"))
        for workers in (1, 3):                                           # the same tokens at any number of workers
            loaded = self.prepare("--text", path, "--tokenizer", vocabulary, "--workers", workers)
            self.assertEqual(loaded.tokens, trained.tokens)

    @unittest.skipUnless(HAS_TOKENIZERS, "needs the tokenizers package")
    def test_large_vocabulary(self):
        """More than 65536 ids: uint32 shards."""
        path = self.put("a.txt", text_of(300))
        self.prepare("--text", path, "--train-bpe", "400")
        with open(os.path.join(self.out, "tokenizer.json"), encoding="utf-8") as f:
            j = json.load(f)
        top = max(j["model"]["vocab"].values())
        j["model"]["vocab"].update({f"never{i}": top + 1 + i for i in range(70000)})
        o = self.prepare("--text", path, "--tokenizer", self.put("large.json", json.dumps(j)))
        self.assertEqual(o.meta["token_bytes"], 4)
        self.assertEqual(o.shards["train"][0].itemsize, 4)
        self.assertEqual(b"".join(sorted(o.documents("train") + o.documents("val"), key=text_of(300).encode().index)), text_of(300).encode())

    @unittest.skipUnless(HAS_TOKENIZERS, "needs the tokenizers package")
    def test_bad_tokenizer(self):
        path = self.put("a.txt", text_of(50))
        self.refuse(["--text", path, "--tokenizer", self.put("bad.json", "{}"), "--out", self.out], "bad.json", "not a tokenizer.json")
        self.refuse(["--text", path, "--tokenizer", os.path.join(self.folder, "none.json"), "--out", self.out], "none.json", "no such file")
        self.prepare("--text", path, "--train-bpe", "300")
        vocabulary = shutil.copy(os.path.join(self.out, "tokenizer.json"), os.path.join(self.folder, "t.json"))
        self.refuse(["--text", path, "--tokenizer", vocabulary, "--eot-token", "<nope>", "--out", self.out], "<nope>", "--eot-token")
        for workers in ("1", "2"):                                       # the token of a line end; a worker's error is one line, too
            self.refuse(["--text", path, "--tokenizer", vocabulary, "--eot-token", "\u010a", "--workers", workers, "--out", os.path.join(self.folder, "new")],
                        "'\u010a' for plain text", "--eot-token")


class ModuleTest(unittest.TestCase):
    """What is too large to run as a whole, called directly."""

    def setUp(self):
        sys.path.insert(0, os.path.dirname(SCRIPT))
        self.addCleanup(sys.path.pop, 0)
        self.corpus, self.prepare = importlib.import_module("corpus"), importlib.import_module("prepare")

    def test_wrong_separator(self):
        self.addCleanup(setattr, self.corpus, "MAX_DOCUMENT_BYTES", self.corpus.MAX_DOCUMENT_BYTES)
        self.corpus.MAX_DOCUMENT_BYTES = 1000
        chunks = [b"words of some text " * 30] * 3
        with self.assertRaisesRegex(self.corpus.Failure, "a.txt: .*--separator"):
            list(self.corpus.split_at("a.txt", iter(chunks), re.compile(b"%%")))

    @unittest.skipUnless(HAS_TOKENIZERS, "needs the tokenizers package")
    def test_order_of_workers(self):
        """Far more batches than the queue holds come out in their order, whichever worker ends first."""
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "a.txt")
            with open(path, "w", encoding="utf-8") as f:
                f.write(text_of(50))
            tokenizer = self.prepare.train_bpe(self.corpus.TextCorpus([path], None, None, False), 400, 0, 0.02)
        batches = [(i % 5 == 0, [text_of(1, i).encode("utf-8")] * (40 if i % 4 == 0 else 1)) for i in range(40)]
        one = list(self.prepare.encode_batches(iter(batches), tokenizer, 1))
        self.assertEqual([(side, n) for side, n, _, _ in one], [(side, len(documents)) for side, documents in batches])
        self.assertEqual(list(self.prepare.encode_batches(iter(batches), tokenizer, 3)), one)

    def test_uint32_shards(self):
        tokens = array.array("I", [0, 65536, 131071, 5, 6, 7, 8])
        with tempfile.TemporaryDirectory() as folder:
            writer = self.prepare.ShardWriter(folder, "train", 4, 3)
            writer.write(tokens[:5].tobytes(), 1, 5)
            writer.write(tokens[5:].tobytes(), 1, 2)
            writer.close()
            shards = [read_shard(os.path.join(folder, n)) for n in sorted(os.listdir(folder))]
        self.assertEqual([list(s) for s in shards], [[0, 65536, 131071], [5, 6, 7], [8]])
        self.assertTrue(all(s.itemsize == 4 for s in shards))


if __name__ == "__main__":
    unittest.main()
