#!/usr/bin/env python3
"""scripts/compare.py on logs written here, whose every figure is known, and scripts/compare.sh with the trainer that TRAINER names. Standard
library only; the plots are tested where matplotlib is installed."""

import csv
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
SCRIPT = os.path.join(ROOT, "scripts", "compare.py")
TRAINER = os.path.abspath(os.environ.get("TRAINER", os.path.join(ROOT, "train_gpt_nvfp4_cpu")))
HAS_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None


class CompareTest(unittest.TestCase):
    def setUp(self):
        self.tmp = tempfile.mkdtemp(prefix="quartet compare ")
        self.out = os.path.join(self.tmp, "out folder")

    def tearDown(self):
        shutil.rmtree(self.tmp)

    def log(self, name, recipe, steps, offset, evals, end="\n", sample=None, **options):
        """A run of 100 tokens a step whose loss is 5 - step/100 + offset, evaluated after the steps `evals`. -> its folder"""
        lines = [{"run": {"options": {"recipe": recipe, "lr": 0.001, "seed": 1, **options}, "memory_bytes": 3 << 29}, "machine": {}}]
        for s in range(1, steps + 1):
            lines.append({"step": s, "tokens": 100 * s, "loss": 5 - s / 100 + offset, "grad_norm": 1, "lr": 0.001, "timing": {"tokens_per_s": 1000.0 + s}})
            if s in evals:
                lines.append({"eval": s, "tokens": 100 * s, "val_loss": 4 - s / 100 + offset, "bits_per_byte": 6 - s / 100 + offset, "timing": {}})
        if sample:
            lines.append({"sample": steps, "text": sample})
        folder = os.path.join(self.tmp, name)
        os.makedirs(folder)
        with open(os.path.join(folder, "log.jsonl"), "w", encoding="utf-8") as f:
            f.write("\n".join(json.dumps(l) for l in lines) + end)
        return folder

    def compare(self, *args):
        return subprocess.run([sys.executable, SCRIPT, "--out", self.out, *args], capture_output=True, text=True, timeout=120)

    def summary(self, *args):
        r = self.compare(*args)
        self.assertEqual((r.returncode, r.stderr), (0, ""))
        with open(os.path.join(self.out, "summary.csv"), newline="") as f:
            return r.stdout, list(csv.reader(f))

    def refuses(self, *args, words):
        r = self.compare(*args)
        self.assertEqual(r.returncode, 1, r.stderr)
        self.assertTrue(r.stderr.startswith("error: ") and r.stderr.count("\n") == 1, r.stderr)
        for w in words:
            self.assertIn(w, r.stderr)
        self.assertFalse(os.path.exists(os.path.join(self.out, "summary.csv")))

    def test_table_against_the_bf16_run(self):
        """The baseline is bf16 wherever it stands; losses are those of the last evaluation; the speed is the median of 1001 ... 1020."""
        text, rows = self.summary(self.log("q", "quartet2", 20, 0.05, {10, 20}), self.log("b", "bf16", 20, 0, {10, 20}))
        self.assertEqual(rows, [["recipe", "seeds", "val_loss", "gap", "spread", "bits_per_byte", "tokens_per_s", "memory_gib"],
                                ["quartet2", "1", "3.850000", "0.050000", "", "5.850000", "1010.5", "1.500"],
                                ["bf16", "1", "3.800000", "0.000000", "", "5.800000", "1010.5", "1.500"]])
        self.assertIn("+0.0500", text)
        self.assertNotIn("note:", text)

    def test_runs_are_compared_after_equal_tokens(self):
        """One run is further on, another was cut within a line."""
        text, rows = self.summary(self.log("b", "bf16", 30, 0, {10, 20, 30}), self.log("q", "quartet2", 20, 0.05, {10, 20}, end='\n{"step":21,"tok'))
        self.assertEqual([r[2] for r in rows[1:]], ["3.800000", "3.850000"])
        self.assertIn("note: bf16 has gone on", text)

    def test_without_bf16_the_first_run_is_the_baseline_and_folders_tell_twins_apart(self):
        text, rows = self.summary(self.log("one", "quartet2", 10, 0, {10}), self.log("two", "quartet2", 10, -0.25, {10}, lr=0.002))
        self.assertEqual([r[0] for r in rows[1:]], ["quartet2 (one)", "quartet2 (two)"])
        self.assertEqual([r[3] for r in rows[1:]], ["0.000000", "-0.250000"])
        self.assertIn("note: quartet2 (two) was run with --lr 0.002", text)

    def test_seeds_of_a_recipe_are_one_row(self):
        """Gaps are taken seed by seed: 0.05 and 0.07 where the losses' own spread would hide them; a seed that bf16 lacks is held against its mean."""
        runs = [self.log(f"b{s}", "bf16", 10, o, {10}, seed=s) for s, o in ((1, 0), (2, 0.4))]
        runs += [self.log(f"q{s}", "quartet2", 10, o, {10}, seed=s) for s, o in ((1, 0.05), (2, 0.47), (3, 0.23))]
        text, rows = self.summary(*runs)
        self.assertEqual([r[0:2] for r in rows[1:]], [["bf16", "2"], ["quartet2", "3"]])
        self.assertEqual([r[2:5] for r in rows[1:]], [["4.100000", "0.000000", "0.400000"], ["4.150000", "0.050000", "0.040000"]])
        self.assertRegex(text, r"quartet2 +4\.1500 +\+0\.0500 +3 +0\.0400")

    def test_unigram_entropy_and_samples(self):
        meta = os.path.join(self.tmp, "meta.json")
        with open(meta, "w") as f:
            json.dump({"val_unigram_entropy": 3.25}, f)
        text, _ = self.summary("--meta", meta, self.log("b", "bf16", 10, 0, {10}, sample="so it was \u00e9"))
        self.assertRegex(text, r"(?m)^unigram entropy +3\.2500")
        with open(os.path.join(self.out, "samples.txt"), encoding="utf-8") as f:
            self.assertEqual(f.read(), "bf16, after step 10:\nso it was \u00e9\n\n")

    @unittest.skipUnless(HAS_MATPLOTLIB, "matplotlib is not installed for this python3")
    def test_plot(self):
        runs = [self.log("b", "bf16", 60, 0, {20, 40, 60})] + [self.log(f"q{i}", f"recipe{i}", 60, 0.01 * i, {20, 40, 60}) for i in range(12)]
        for chosen in (runs, runs[:1]):
            self.summary(*chosen)
            with open(os.path.join(self.out, "loss.png"), "rb") as f:
                self.assertEqual(f.read(8), b"\x89PNG\r\n\x1a\n")
        self.assertFalse(os.path.exists(os.path.join(self.out, "quant.png")))

    def test_bad_input(self):
        good = self.log("b", "bf16", 10, 0, {10})
        self.refuses(os.path.join(self.tmp, "nowhere"), words=["nowhere", "No such file"])
        self.refuses(good, self.log("early", "quartet2", 10, 0, set()), words=["early", "no evaluation yet"])
        self.refuses(good, self.log("apart", "quartet2", 10, 0, {5}), words=["same number of tokens"])
        broken = self.log("broken", "quartet2", 10, 0, {10})
        with open(os.path.join(broken, "log.jsonl"), "r+") as f:
            f.write("x")
        self.refuses(good, broken, words=["broken", "line 1"])
        self.refuses("--meta", os.path.join(self.tmp, "none.json"), good, words=["none.json", "No such file"])
        self.refuses("--meta", os.path.join(broken, "log.jsonl"), good, words=["val_unigram_entropy"])
        with open(self.out, "w"):
            pass
        self.refuses(good, words=["out folder", "--out"])


@unittest.skipUnless(os.access(TRAINER, os.X_OK), "the trainer is not built")
class CompareScriptTest(unittest.TestCase):
    """compare.sh with the trainer itself, on a model of one layer and made text."""

    def setUp(self):
        self.tmp = tempfile.mkdtemp(prefix="quartet compare ")
        self.out = os.path.join(self.tmp, "runs here")
        text, data, model = (os.path.join(self.tmp, n) for n in ("text.txt", "data", "model.json"))
        self.check([sys.executable, os.path.join(ROOT, "dev/test/made_text.py"), text, "60000"])
        self.check([sys.executable, os.path.join(ROOT, "data/prepare.py"), "--tokenizer", "bytes", "--val-share", "0.3", "--document-bytes", "2000",
                    "--text", text, "--out", data])
        with open(model, "w") as f:
            json.dump({"layers": 1, "width": 128, "heads": 2, "ffn": 128, "vocab": 256, "seq": 64}, f)
        self.options = ["--model", model, "--train-data", data + "/train_*.bin", "--val-data", data + "/val_*.bin", "--batch", "4", "--eval-tokens", "512",
                        "--eval-every", "2", "--save-every", "2", "--steps", "6", "--lr", "1e-3", "--quant-stats", "3"]

    def tearDown(self):
        shutil.rmtree(self.tmp)

    def check(self, command):
        r = subprocess.run(command, capture_output=True, text=True, timeout=120)
        self.assertEqual((r.returncode, r.stderr), (0, ""), r.stdout)
        return r.stdout

    def script(self, *args, program=TRAINER):
        return subprocess.run([os.path.join(ROOT, "scripts/compare.sh"), "--program", program, "--out", self.out, *args], capture_output=True, text=True, timeout=300)

    def losses(self, name):
        with open(os.path.join(self.out, name, "log.jsonl"), encoding="utf-8") as f:
            return [o["loss"] for o in map(json.loads, f) if "step" in o]

    def test_trains_resumes_and_does_not_repeat(self):
        """What an interruption after step 4 leaves is resumed, and its losses are those of the run that nothing happened to."""
        r = self.script("--recipes", "bf16,quartet2", *self.options)
        self.assertEqual(r.returncode, 0, r.stderr)
        whole = self.losses("quartet2")
        self.assertEqual(len(whole), 6)
        shutil.rmtree(os.path.join(self.out, "quartet2", "step_00000006"))
        path = os.path.join(self.out, "quartet2", "log.jsonl")
        with open(path) as f:
            lines = f.read().splitlines(keepends=True)
        with open(path, "w") as f:
            f.writelines(l for l in lines if not any(l.startswith(f'{{"{k}":{s},') for k in ("step", "eval", "quant") for s in (5, 6)))
        r = self.script("--recipes", "bf16,quartet2", *self.options)
        self.assertEqual(r.returncode, 0, r.stderr)
        self.assertIn("bf16: finished before", r.stdout)
        self.assertIn("resumed from", r.stdout)
        self.assertEqual(self.losses("quartet2"), whole)
        with open(os.path.join(self.out, "summary.csv"), newline="") as f:
            rows = list(csv.DictReader(f))
        self.assertEqual([row["recipe"] for row in rows], ["bf16", "quartet2"])
        self.assertTrue(all(float(row["memory_gib"]) > 0 for row in rows))
        if HAS_MATPLOTLIB:
            self.assertTrue(os.path.exists(os.path.join(self.out, "quant.png")))
        r = self.script("--recipes", "bf16", *self.options, "--clip", "0.5")
        self.assertEqual((r.returncode, r.stderr.count("\n")), (1, 1))
        self.assertIn("--clip", r.stderr)
        self.assertIn("other options", r.stderr)

    def test_seeds_and_usage(self):
        r = self.script("--recipes", "bf16", "--seeds", "1,2", *self.options)
        self.assertEqual(r.returncode, 0, r.stderr)
        self.assertNotEqual(self.losses("bf16-seed1"), self.losses("bf16-seed2"))
        for args, word in ((("--recipes",), "needs a value"), (("--recipes", "bf16", "--recipe", "x"), "--recipes"), (("--recipes", "bf16", "--resume", "auto"), "by itself")):
            r = self.script(*args)
            self.assertEqual(r.returncode, 2)
            self.assertIn(word, r.stderr)
        r = self.script("--recipes", "bf16", program=os.path.join(self.tmp, "none"))
        self.assertEqual((r.returncode, r.stderr.count("\n")), (1, 1))
        r = self.script("--recipes", "bf17", *self.options)
        self.assertNotEqual(r.returncode, 0)
        self.assertIn("no such recipe", r.stderr)


if __name__ == "__main__":
    unittest.main()
