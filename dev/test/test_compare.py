#!/usr/bin/env python3
"""scripts/compare.py on logs written here, whose every figure is known. Standard library only; the plot is tested where matplotlib is
installed."""

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
HAS_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None


class CompareTest(unittest.TestCase):
    def setUp(self):
        self.tmp = tempfile.mkdtemp(prefix="quartet compare ")
        self.out = os.path.join(self.tmp, "out folder")

    def tearDown(self):
        shutil.rmtree(self.tmp)

    def log(self, name, recipe, steps, offset, evals, end="\n", sample=None, **options):
        """A run of 100 tokens a step whose loss is 5 - step/100 + offset, evaluated after the steps `evals`. -> its folder"""
        lines = [{"run": {"options": {"recipe": recipe, "lr": 0.001, "seed": 1, **options}}, "machine": {}}]
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
        self.assertEqual(rows, [["recipe", "val_loss", "gap", "bits_per_byte", "tokens_per_s"],
                                ["quartet2", "3.850000", "0.050000", "5.850000", "1010.5"], ["bf16", "3.800000", "0.000000", "5.800000", "1010.5"]])
        self.assertIn("+0.0500", text)
        self.assertNotIn("note:", text)

    def test_runs_are_compared_after_equal_tokens(self):
        """One run is further on, another was cut within a line."""
        text, rows = self.summary(self.log("b", "bf16", 30, 0, {10, 20, 30}), self.log("q", "quartet2", 20, 0.05, {10, 20}, end='\n{"step":21,"tok'))
        self.assertEqual([r[1] for r in rows[1:]], ["3.800000", "3.850000"])
        self.assertIn("note: bf16 has gone on", text)

    def test_without_bf16_the_first_run_is_the_baseline_and_folders_tell_twins_apart(self):
        text, rows = self.summary(self.log("one", "quartet2", 10, 0, {10}), self.log("two", "quartet2", 10, -0.25, {10}, lr=0.002))
        self.assertEqual([r[0] for r in rows[1:]], ["quartet2 (one)", "quartet2 (two)"])
        self.assertEqual([r[2] for r in rows[1:]], ["0.000000", "-0.250000"])
        self.assertIn("note: quartet2 (two) was run with --lr 0.002", text)

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


if __name__ == "__main__":
    unittest.main()
