#!/usr/bin/env python3
"""The trainer run as a person runs it: bad input, full disks, NaN, resuming, reproducing. TRAINER names the program; run from the
repository root. Standard library only. Everything is written below one temporary folder whose name holds a space."""

import array
import ctypes
import hashlib
import itertools
import json
import math
import os
import random
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import unittest

TRAINER = os.path.abspath(os.environ.get("TRAINER", "train_gpt_nvfp4_cpu"))
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
MODEL = {"layers": 1, "width": 128, "heads": 2, "ffn": 128, "vocab": 256, "seq": 64}
MAGIC_U16, MAGIC_U32 = (20240520, 1), (20240801, 7)
TMP = None
NUMBER = itertools.count()


def setUpModule():
    global TMP
    if not os.access(TRAINER, os.X_OK):
        sys.exit(f"error: {TRAINER} is not there; build it ('make cpu') and name it by TRAINER")
    TMP = tempfile.mkdtemp(prefix="quartet trainer ")
    write_json("model.json", MODEL)
    make_data()


def tearDownModule():
    shutil.rmtree(TMP)


# ---------------------------------------------------------------------------------------------------------------------
# Files

def at(*names):
    return os.path.join(TMP, *names)


def fresh(kind="run"):
    return at(f"{kind} {next(NUMBER)}")


def read(path):
    with open(path, "rb") as f:
        return f.read()


def write(path, data):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as f:
        f.write(data)
    return path


def write_json(name, value):
    return write(at(name), json.dumps(value).encode())


def shard(tokens, magic=MAGIC_U16, count=None):
    head = struct.pack("<256i", magic[0], magic[1], len(tokens) if count is None else count, *[0] * 253)
    return head + array.array("H" if magic[0] == MAGIC_U16[0] else "I", list(tokens)).tobytes()


def sentences(count, seed):
    """Text with structure that a model of one layer learns at once: few words, one order."""
    draw = random.Random(seed)
    parts = [["the ", "a "], ["cat ", "dog ", "bird ", "fish "], ["sees ", "hears "], ["the ", "a "], ["tree.", "stone.", "river."]]
    return "".join("".join(draw.choice(p) for p in parts) + ("\n\n" if i % 8 == 7 else " ") for i in range(count))


def make_data():
    """data/: what prepare.py makes of a text. short/: three shards of odd lengths, 27 samples in all: an epoch ends within a run."""
    write(at("text.txt"), sentences(3000, 1).encode())
    prepare("--text", at("text.txt"), "--out", at("data"), "--val-share", "0.1", check=True)
    tokens = read(at("text.txt"))[:27 * 64 + 1]
    for i, (begin, end) in enumerate(((0, 501), (501, 1234), (1234, len(tokens)))):
        write(at("short", f"train_{i}.bin"), shard(tokens[begin:end]))


def prepare(*args, check=False):
    return subprocess.run([sys.executable, os.path.join(ROOT, "data", "prepare.py"), *args], capture_output=True, text=True, timeout=120, check=check)


def log_lines(out):
    """The log as objects; every line must be one."""
    return [json.loads(line) for line in read(os.path.join(out, "log.jsonl")).splitlines()]


def log_bytes(out):
    """The log's bytes without what may differ between two runs of one command: the objects "timing" and "machine"."""
    return re.sub(rb',"(timing|machine)":\{[^{}]*\}', b"", read(os.path.join(out, "log.jsonl")))


def checkpoint(out, step):
    return os.path.join(out, f"step_{step:08d}")


def folder_sums(folder):
    """Every file below a folder -> the hash of its bytes."""
    return {os.path.relpath(os.path.join(d, f), folder): hashlib.sha256(read(os.path.join(d, f))).hexdigest() for d, _, files in os.walk(folder) for f in files}


# ---------------------------------------------------------------------------------------------------------------------
# Runs

def command(options):
    """Defaults of these tests, then `options` (underscores for hyphens; None leaves one out, "" is an option without a value)."""
    merged = {"model": at("model.json"), "recipe": "bf16", "train_data": at("data", "train_*.bin"), "batch": 4, "steps": 4, "lr": 3e-3,
              "eval_every": 0, **options}
    return [TRAINER] + [w for k, v in merged.items() if v is not None for w in ("--" + k.replace("_", "-"), str(v)) if w]


def run(limit=None, unprivileged=False, **options):
    """limit: the most bytes a file may have, as if the disk were full there. unprivileged: root, too, minds a folder's permissions."""
    def restrict():
        if limit:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        if unprivileged:
            PR_CAPBSET_DROP, CAP_DAC_OVERRIDE = 24, 1
            ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_DAC_OVERRIDE)
    return subprocess.run(command(options), capture_output=True, text=True, errors="replace", timeout=300,
                          preexec_fn=restrict if limit or unprivileged else None)


class TrainerTest(unittest.TestCase):
    maxDiff = 2000

    def succeeds(self, **options):
        r = run(**options)
        self.assertEqual((r.returncode, r.stderr), (0, ""), f"{command(options)}\n{r.stdout[-2000:]}")
        return r

    def refuses(self, result, status, *words):
        """One line on stderr that begins as an error does and holds all words; the exit status; no signal."""
        kind = {1: "error: ", 2: "usage error: "}[status]
        self.assertEqual(result.returncode, status, result.stderr)
        self.assertTrue(result.stderr.startswith(kind), result.stderr)
        self.assertEqual(result.stderr.count("\n"), 1, result.stderr)
        for word in words:
            self.assertIn(word, result.stderr)

    def fails(self, status, *words, out=None, **options):
        """The run is refused and leaves no output folder behind."""
        out = out or fresh()
        self.refuses(run(out=out, **options), status, *words)
        self.assertFalse(os.path.exists(out), f"{out} was made")


class BadData(TrainerTest):
    def test_empty_text(self):
        r = prepare("--text", write(at("empty.txt"), b""), "--out", at("of empty"))
        self.assertEqual((r.returncode, r.stderr.count("\n")), (1, 1), r.stderr)
        self.assertIn("empty.txt", r.stderr)
        self.assertFalse(os.path.exists(at("of empty", "train_000000.bin")))

    def test_text_shorter_than_a_sample_or_a_batch(self):
        path = write(at("little", "train_0.bin"), shard([65] * 64))
        self.fails(1, path, "64 tokens", "smaller --seq", train_data=path)
        path = write(at("little", "train_1.bin"), shard([65] * 129))  # two samples, a batch of 4
        self.fails(1, path, "129 tokens", "--batch", train_data=path)
        self.fails(1, path, "129 tokens", "--batch", val_data=path)

    def test_damaged_shards(self):
        good = shard([65] * 1000)
        cases = [
            (shard([65] * 1000, (20240519, 1)), ["magic at byte 0 is 20240519", "prepare.py"]),
            (shard([65] * 1000, (MAGIC_U16[0], 2)), ["version at byte 4 is 2", "prepare.py"]),
            (shard([65] * 1000, (MAGIC_U32[0], 1)), ["version at byte 4 is 1", "prepare.py"]),
            (shard([65] * 1000, count=1001), ["1001 at byte 8", "cut short"]),
            (shard([65] * 1000, count=999), ["999 at byte 8", "too long"]),
            (shard([65] * 1000, count=-5), ["token count at byte 8 is -5"]),
            (shard([65] * 1000, count=2**31 - 1), ["2147483647 at byte 8", "cut short"]),
            (good[:2000], ["2000 bytes", "cut short"]),
            (good[:1000], ["1000 bytes", "header"]),
            (b"", ["0 bytes", "header"]),
            (shard([]), ["token count at byte 8 is 0", "empty"]),
        ]
        for i, (data, words) in enumerate(cases):
            with self.subTest(words=words):
                path = write(at("damaged", f"{i}.bin"), data)
                self.fails(1, path, *words, train_data=path)
                self.fails(1, path, *words, val_data=path)

    def test_no_such_data(self):
        self.fails(1, at("nowhere", "train_*.bin"), "prepare.py", train_data=at("nowhere", "train_*.bin"))
        self.fails(1, "not a regular file", train_data=at("short"))
        self.fails(2, "--train-data", train_data=None)

    def test_token_beyond_the_vocabulary(self):
        for magic, width, id_ in ((MAGIC_U16, 2, 300), (MAGIC_U32, 4, 2**32 - 1)):
            tokens = [65] * 1000
            tokens[777] = id_
            path, out = write(at("beyond", f"{width}.bin"), shard(tokens, magic)), fresh()
            r = run(train_data=path, out=out, steps=4)  # 15 samples: four batches of 4 hold them all
            self.refuses(r, 1, path, "token 777", f"byte {1024 + 777 * width}", str(id_), "vocabulary")
        # A model file with too few tokens for the data's meta.json.
        small = write_json("small.json", {**MODEL, "vocab": 128})
        self.fails(1, "256 tokens", small, "at least 256", model=small)

    def test_damaged_meta(self):
        for name, text, words in (("a", b'{"vocab_size": "256"}', ["vocab_size", "a number is expected"]), ("b", b'{"vocab_size": 256', ["not valid JSON"]),
                                  ("c", b'{"vocab_size": 256, "eot_token": 256, "val_bytes_per_token": 1}', ["eot_token", "255"])):
            write(at("meta " + name, "train_0.bin"), shard([65] * 1000))
            write(at("meta " + name, "meta.json"), text)
            self.fails(1, at("meta " + name, "meta.json"), *words, "prepare.py", train_data=at("meta " + name, "train_*.bin"))
        # A tokenizer of another vocabulary, or of another end of text, beside good data.
        for name, vocab, eot in (("d", 300, 255), ("e", 256, 254)):
            write(at("meta " + name, "train_0.bin"), shard([65] * 1000))
            write(at("meta " + name, "meta.json"), b'{"vocab_size": 256, "eot_token": 255, "val_bytes_per_token": 1}')
            write(at("meta " + name, "tokenizer.bin"), struct.pack("<256i", 20240328, 2, vocab, eot, *[0] * 252) + b"\x01a" * vocab)
            self.fails(1, at("meta " + name, "tokenizer.bin"), f"{vocab} tokens, end-of-text {eot}", "256 and 255", train_data=at("meta " + name, "train_*.bin"))


class BadOptions(TrainerTest):
    def test_shapes(self):
        def model(**changes):
            return write_json(f"shape {next(NUMBER)}.json", {**MODEL, **changes})
        self.fails(1, "width 192", "multiple of 128", model=model(width=192))
        self.fails(1, "ffn 200", "multiple of 128", "256", model=model(ffn=200))
        self.fails(1, "3 heads", "divide width 128", "2", model=model(heads=3))
        self.fails(1, "kv_heads 3", model=model(heads=4, kv_heads=3))
        self.fails(2, "--batch 1", "multiple of 128", "--batch 2", batch=1)
        self.fails(2, "--batch 5", "multiple of 128", batch=5)
        self.fails(2, "--total-batch 300", "256", total_batch=300)

    def test_json(self):
        cases = [
            ('{"stepz": 5}', ["stepz", '"steps"']),
            ('{"batch": "many"}', ["batch", "whole number"]),
            ('{"batch": 4.5}', ["batch", "4.5", "whole number"]),
            ('{"lr": "fast"}', ["lr", "a number"]),
            ('{"lr": true}', ["lr", "a number"]),
            ('{"schedule": "spiral"}', ["schedule", "cosine"]),
            ('{"recipe": 4}', ["recipe", "text"]),
            ('{"seed": 1, "seed": 2}', ["seed", "twice"]),
            ('{"seed": 1', ["not valid JSON"]),
            ("[]", ["object"]),
            ("", ["not valid JSON"]),
        ]
        for text, words in cases:
            with self.subTest(text=text):
                path = write(at(f"config {next(NUMBER)}.json"), text.encode())
                self.fails(1, path, *words, config=path)
        for text, words in [('{"layers": 1, "width": 128, "heads": 2, "vocab": 256, "hedas": 2}', ["hedas", '"heads"']),
                            ('{"layers": 1, "width": 128, "heads": 2}', ["vocab", "missing"]),
                            ('{"layers": "one", "width": 128, "heads": 2, "vocab": 256}', ["layers", "whole number"]),
                            ('{"layers": 0, "width": 128, "heads": 2, "vocab": 256}', ["layers"])]:
            with self.subTest(text=text):
                path = write(at(f"model {next(NUMBER)}.json"), text.encode())
                self.fails(1, path, *words, model=path)
        os.mkfifo(at("fifo.json"))                         # opening one for reading waits for a writer
        for name in ("config", "model"):
            self.fails(1, at("fifo.json"), "not a regular file", **{name: at("fifo.json")})
        self.fails(1, at("none.json"), "No such file", config=at("none.json"))
        self.fails(1, at("none.json"), "No such file", model=at("none.json"))

    def recipes(self):
        text = subprocess.run([TRAINER, "--help"], capture_output=True, text=True, check=True).stdout
        return re.findall(r"^  (\S+)", text.split("\nRecipes\n")[1].split("\n\n")[0], re.M)

    def test_readme_has_every_recipe(self):
        readme = read(os.path.join(ROOT, "README.md")).decode()
        for name in self.recipes():
            self.assertIn(f"| `{name}` |", readme)

    def test_unknown_names_list_the_known(self):
        recipes = self.recipes()
        self.assertTrue({"fp32", "bf16", "quartet2", "quartet2-no46"} <= set(recipes), recipes)
        self.fails(2, "--recipe fp3", *recipes, recipe="fp3")
        self.fails(2, "--model large", "tiny", "1.9B", model="large")
        self.fails(2, "--stepz", "--steps", stepz=5)
        self.fails(2, "--steps ten", "whole number", steps="ten")
        self.fails(2, "--lr nan", "a number", lr="nan")
        self.fails(2, "--lr", lr=None)  # a model file brings no learning rate
        self.fails(2, "--steps", "--tokens", steps=None)
        self.fails(2, "--eval-every 5", "--val-data", eval_every=5)
        self.fails(1, "--nvfp4-gemm native", "emulated", recipe="quartet2", nvfp4_gemm="native")


class SelfCheck(TrainerTest):
    """--check of the CPU program: no data, no model, no folder made; its exit status is what it found."""
    def check(self, out, **options):
        return run(out=out, check="", model=None, recipe=None, train_data=None, batch=None, steps=None, lr=None, eval_every=None, **options)

    def test_a_good_machine(self):
        out = at("not", "yet", "there")
        r = self.check(out)
        self.assertEqual((r.returncode, r.stderr), (0, ""), r.stdout)
        lines = r.stdout.splitlines()
        self.assertEqual(lines[-1], "self-check: all 3 checks are right")
        self.assertEqual([l.split()[0] for l in lines[:-1]], ["note", "ok", "ok", "note", "ok"], r.stdout)
        self.assertIn(TMP, lines[-2])
        self.assertFalse(os.path.exists(at("not")))

    def test_a_full_disk_is_found(self):
        r = self.check(fresh(), limit=1_000_000)
        self.assertEqual((r.returncode, r.stderr), (1, ""), r.stdout)
        self.assertRegex(r.stdout, r"(?m)^not ok  disk: .*writing stopped after 1000000 bytes: File too large")
        self.assertTrue(r.stdout.endswith("\nself-check: 1 of 3 checks failed: a run here would not be right\n"), r.stdout)

    def test_help_lists_it(self):
        text = subprocess.run([TRAINER, "--help"], capture_output=True, text=True, check=True).stdout
        self.assertRegex(text, r"(?m)^  --check +test this machine")


class BadOutput(TrainerTest):
    def test_folder_that_cannot_be_made(self):
        blocked = os.path.join(write(at("a file"), b"keep me"), "run")
        self.refuses(run(out=blocked), 1, at("a file"), "--out")
        self.assertEqual(read(at("a file")), b"keep me")

    def test_folder_without_write_permission(self):
        os.makedirs(at("locked"))
        os.chmod(at("locked"), 0o555)
        self.refuses(run(out=at("locked", "run"), unprivileged=True), 1, at("locked"), "Permission denied", "--out")
        self.refuses(run(out=at("locked"), unprivileged=True), 1, at("locked"), "Permission denied", "--out")

    def test_full_disk_keeps_what_was_good(self):
        """A checkpoint's largest file here is optimizer.safetensors, 1.4 MB; model.safetensors has 0.4 MB."""
        out = fresh()
        self.succeeds(out=out, steps=4, save_every=2)
        kept = {step: folder_sums(checkpoint(out, step)) for step in (2, 4)}
        for limit, name in ((100_000, "model.safetensors"), (1_000_000, "optimizer.safetensors")):
            r = run(out=out, steps=6, save_every=2, resume="auto", limit=limit)
            self.assertEqual(r.returncode, 1, r.stderr)
            self.assertIn("warning: ", r.stderr.splitlines()[0])  # --steps was 4
            self.refuses(subprocess.CompletedProcess([], 1, "", r.stderr.splitlines(True)[-1]), 1, name, "File too large", "step 6", "untouched")
            self.assertEqual({step: folder_sums(checkpoint(out, step)) for step in (2, 4)}, kept)
            self.assertEqual(sorted(d for d in os.listdir(out) if "step_" in d), ["step_00000002", "step_00000004"])
        r = run(out=out, steps=6, save_every=2, resume="auto")  # with room again, the run goes on
        self.assertEqual(r.returncode, 0, r.stderr)
        self.assertIn("resumed from", r.stdout)
        self.assertTrue(os.path.isdir(checkpoint(out, 6)))
        self.assertEqual([o["step"] for o in log_lines(out) if "step" in o], [1, 2, 3, 4, 5, 6])

    def test_log_that_cannot_grow(self):
        out = fresh()
        self.refuses(run(out=out, limit=1500), 1, os.path.join(out, "log.jsonl"), "File too large", "--resume auto")

    def test_a_folder_in_use_is_refused(self):
        out = fresh()
        self.succeeds(out=out, steps=2, save_every=2)
        before = folder_sums(out)
        self.refuses(run(out=out, steps=2, save_every=2), 1, out, "step_00000002", "--resume auto", "another --out")
        self.assertEqual(folder_sums(out), before)


class LossNotFinite(TrainerTest):
    # AdamW multiplies each matrix by 1 - lr * decay = -99 a step: the weights overflow within 20 steps, whatever the data.
    DIVERGES = {"lr": 10, "weight_decay": 10, "warmup": 0, "schedule": "constant", "clip": 0, "steps": 40}

    def test_stops_at_once_and_keeps_the_last_checkpoint(self):
        for recipe in ("bf16", "quartet2"):
            with self.subTest(recipe=recipe):
                out = fresh()
                r = run(out=out, recipe=recipe, save_every=1, **self.DIVERGES)
                self.refuses(r, 1, "training stops", "--lr", out)
                steps = [o for o in log_lines(out) if "step" in o]
                bad = [o["step"] for o in steps if o["loss"] is None or o["grad_norm"] is None]
                self.assertEqual(bad, [len(steps)])  # the last line, and no other: nothing was trained after it
                self.assertIn(f"step {bad[0]}: ", r.stderr)
                self.assertIn(f"step_{bad[0] - 1:08d}", r.stderr)
                self.assertEqual(sorted(d for d in os.listdir(out) if "step_" in d)[-1], f"step_{bad[0] - 1:08d}")
                weights = read(os.path.join(checkpoint(out, bad[0] - 1), "model.safetensors"))
                values = array.array("H", weights[8 + struct.unpack("<Q", weights[:8])[0]:])
                self.assertTrue(all(v & 0x7F80 != 0x7F80 for v in values), "the checkpoint holds NaN or infinity")
                # It loads: one more step at a small rate is reported as any other.
                r = run(out=fresh(), recipe=recipe, resume=checkpoint(out, bad[0] - 1), **{**self.DIVERGES, "steps": bad[0] - 1})
                self.assertEqual(r.returncode, 0, r.stderr)
                self.assertIn(f"resumed from {checkpoint(out, bad[0] - 1)}", r.stdout)
                # The bad step again, in a folder that has no checkpoint of its own: what is named is there.
                other = fresh()
                r = run(out=other, recipe=recipe, resume=checkpoint(out, bad[0] - 1), **self.DIVERGES)
                self.refuses(r, 1, "training stops", f"the last good checkpoint is {checkpoint(out, bad[0] - 1)}")
                self.assertNotIn(other, r.stderr)

    def test_without_a_checkpoint(self):
        self.refuses(run(out=fresh(), **self.DIVERGES), 1, "training stops", "no checkpoint", "--warmup")


class Resume(TrainerTest):
    SHORT = {"steps": 24, "save_every": 9, "keep": 9}  # an epoch of the short data is 6.75 steps

    def options(self, recipe, master):
        return {**self.SHORT, "recipe": recipe, "master_weights": master, "train_data": at("short", "train_*.bin")}

    def assert_same_run(self, one, other, step):
        self.assertEqual(log_bytes(one), log_bytes(other))
        self.assertEqual(folder_sums(checkpoint(one, step)), folder_sums(checkpoint(other, step)))

    def interrupt(self, number, options, tries=5):
        """Starts a run, sends the signal when step 5 is told, and returns what the run said and the step it stopped after. A machine
        under load may deliver the signal only when the run is over: then it is run again."""
        for _ in range(tries):
            shutil.rmtree(options["out"], ignore_errors=True)
            with subprocess.Popen(command(options), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as p:
                said = ""
                for line in p.stdout:
                    said += line
                    if line.startswith("step      5/"):
                        p.send_signal(number)
            done = int(re.findall(r"step +(\d+)/", said)[-1])
            if done < options["steps"]:
                return p.returncode, said, done
        self.fail(f"the run ended before signal {number} in each of {tries} tries")

    def test_interrupted_runs_go_on_to_the_same_bits(self):
        for recipe, master in (("bf16", "bf16"), ("quartet2", "bf16"), ("quartet2", "fp32")):
            with self.subTest(recipe=recipe, master=master):
                options, whole, cut = self.options(recipe, master), fresh(), fresh()
                self.succeeds(out=whole, **options)
                code, said, done = self.interrupt(signal.SIGINT, {"out": cut, **options})
                self.assertEqual(code, 0, said)
                self.assertIn(f"stopped by signal 2 after step {done}; go on with the same command and --resume auto", said)
                self.assertTrue(os.path.isdir(checkpoint(cut, done)))
                r = self.succeeds(out=cut, resume="auto", **options)
                self.assertIn(f"resumed from {checkpoint(cut, done)}: step {done} of 24", r.stdout)
                self.assert_same_run(whole, cut, 24)

    def test_killed_run_goes_on_from_its_last_checkpoint(self):
        """SIGKILL leaves a log that is ahead of the checkpoint; its lines are written anew."""
        options, whole, cut = {**self.options("quartet2", "bf16"), "save_every": 2, "keep": 2}, fresh(), fresh()
        self.succeeds(out=whole, **options)
        code, said, _ = self.interrupt(signal.SIGKILL, {"out": cut, **options})
        self.assertEqual(code, -signal.SIGKILL, said)
        self.assertGreater(len(os.listdir(cut)), 1)
        r = run(out=cut, resume="auto", **options)
        self.assertEqual(r.returncode, 0, r.stderr)
        self.assertIn("resumed from", r.stdout)
        self.assert_same_run(whole, cut, 24)

    def test_named_checkpoints(self):
        options, out = {**self.options("bf16", "bf16"), "steps": 6, "save_every": 3}, fresh()
        self.succeeds(out=out, **options)
        before = folder_sums(out)
        # Another folder may go on from it.
        other = fresh()
        self.succeeds(out=other, resume=checkpoint(out, 3), **options)
        self.assertEqual(folder_sums(checkpoint(other, 6)), folder_sums(checkpoint(out, 6)))
        # Missing: never a fresh start.
        self.fails(1, checkpoint(out, 4), "--resume", resume=checkpoint(out, 4), **options)
        # Another seed, model or text is another run.
        self.fails(1, "seed", resume=checkpoint(out, 3), **{**options, "seed": 2})
        self.fails(1, "ffn", resume=checkpoint(out, 3), **{**options, "model": write_json("wide.json", {**MODEL, "ffn": 256})})
        self.fails(1, "--train-data", resume=checkpoint(out, 3), **{**options, "train_data": at("data", "train_*.bin")})
        self.fails(1, "raise --steps", resume=checkpoint(out, 6), **{**options, "steps": 5})
        self.assertEqual(folder_sums(out), before)

    def test_damaged_checkpoints(self):
        options, out = {**self.options("bf16", "bf16"), "steps": 6, "save_every": 3}, fresh()
        self.succeeds(out=out, **options)
        log, newest = log_bytes(out), folder_sums(checkpoint(out, 6))
        for name in ("model.safetensors", "optimizer.safetensors", "trainer.json"):
            with self.subTest(name=name):
                path = os.path.join(checkpoint(out, 6), name)
                damaged = bytearray(read(path))
                damaged[len(damaged) // 2] ^= 1
                write(path, damaged)
                self.fails(1, path, resume=checkpoint(out, 6), out=fresh(), **options)
                if name == "trainer.json":
                    os.remove(path)
                    os.mkfifo(path)
                    self.fails(1, path, "not a regular file", resume=checkpoint(out, 6), out=fresh(), **options)
                r = run(out=out, resume="auto", **options)  # passes over it, saying why, and writes it anew
                self.assertEqual(r.returncode, 0, r.stderr)
                self.assertEqual(r.stderr.count("warning: "), 1, r.stderr)
                self.assertIn(path, r.stderr)
                self.assertIn(f"resumed from {checkpoint(out, 3)}", r.stdout)
                self.assertEqual(folder_sums(checkpoint(out, 6)), newest)
                self.assertEqual(log_bytes(out), log)


class Training(TrainerTest):
    def test_same_command_same_bytes(self):
        for recipe in ("bf16", "quartet2"):
            with self.subTest(recipe=recipe):
                outs = fresh(), fresh()
                for out in outs:
                    self.succeeds(out=out, recipe=recipe, val_data=at("data", "val_*.bin"), eval_every=2, eval_tokens=512, sample_every=4, sample_tokens=8,
                                  save_every=4)
                self.assertEqual(log_bytes(outs[0]), log_bytes(outs[1]))
                self.assertEqual(folder_sums(checkpoint(outs[0], 4)), folder_sums(checkpoint(outs[1], 4)))
                kinds = [next(iter(o)) for o in log_lines(outs[0])]
                self.assertEqual(kinds, ["run", "step", "step", "eval", "step", "step", "eval", "sample"])
                # A different seed is a different run: the comparison above can fail.
                other = fresh()
                self.succeeds(out=other, recipe=recipe, seed=2)
                self.assertNotEqual([o["loss"] for o in log_lines(other) if "loss" in o], [o["loss"] for o in log_lines(outs[0]) if "loss" in o])

    def test_logged_options_repeat_the_run(self):
        one, two = fresh(), fresh()
        self.succeeds(out=one, recipe="quartet2", schedule="wsd", warmup=1, clip=0.5)
        path = write_json("repeat.json", log_lines(one)[0]["run"]["options"])
        r = subprocess.run([TRAINER, "--config", path, "--out", two], capture_output=True, text=True, timeout=120)
        self.assertEqual((r.returncode, r.stderr), (0, ""))
        self.assertEqual(log_bytes(one), log_bytes(two))

    def test_interval_of_zero_means_never(self):
        out = fresh()
        r = self.succeeds(out=out, val_data=at("data", "val_*.bin"), log_every=0, eval_every=0, sample_every=0, save_every=0)
        self.assertNotRegex(r.stdout, r"(?m)^(step|eval|sample)")
        self.assertEqual([next(iter(o)) for o in log_lines(out)], ["run"] + ["step"] * 4)
        self.assertEqual(os.listdir(out), ["log.jsonl"])

    def test_accumulated_gradients_are_those_of_the_large_batch(self):
        """Two micro-batches of 4 samples hold the same 8 samples as one of 8. In float32 the losses differ by the order of sums of
        512 terms: below 512 * 2^-24 = 3e-5 of the value. After a step the weights differ where AdamW divides a gradient that is all
        rounding by its own size: at most 2 lr in a few weights, so 1e-4 of the loss, 1e-3 of the gradient's norm."""
        runs = []
        for options in ({"batch": 8}, {"batch": 4, "total_batch": 512}, {"batch": 4}):
            out = fresh()
            self.succeeds(out=out, recipe="fp32", master_weights="fp32", **options)
            runs.append([o for o in log_lines(out) if "step" in o])
        large, accumulated, small = runs
        self.assertEqual([o["tokens"] for o in accumulated], [512, 1024, 1536, 2048])
        for a, b in zip(large, accumulated):
            first = a["step"] == 1
            self.assertLess(abs(a["loss"] - b["loss"]), (3e-5 if first else 1e-4) * a["loss"])
            self.assertLess(abs(a["grad_norm"] - b["grad_norm"]), (3e-5 if first else 1e-3) * a["grad_norm"])
        self.assertGreater(abs(large[0]["grad_norm"] - small[0]["grad_norm"]), 1e-3 * large[0]["grad_norm"])

    def test_loss_falls_far_below_the_unigram_entropy(self):
        """The text has 2*4*2*2*3 = 96 sentences of some 25 bytes, all equally likely: ln(96)/25 = 0.18 nats a byte are to be had, its
        unigram entropy is near 2.6. Half of the way down within 60 steps is asked for, of both recipes, in bits per byte too."""
        with open(at("data", "meta.json"), encoding="utf-8") as f:
            meta = json.load(f)
        self.assertGreater(meta["val_unigram_entropy"], 2.0)
        for recipe in ("bf16", "quartet2"):
            with self.subTest(recipe=recipe):
                out = fresh()
                self.succeeds(out=out, recipe=recipe, steps=60, lr=1e-2, val_data=at("data", "val_*.bin"), eval_every=60, eval_tokens=2048)
                evaluation = log_lines(out)[-1]
                self.assertLess(evaluation["val_loss"], meta["val_unigram_entropy"] / 2)
                self.assertAlmostEqual(evaluation["bits_per_byte"], evaluation["val_loss"] / math.log(2) / meta["val_bytes_per_token"], places=5)


if __name__ == "__main__":
    unittest.main()
