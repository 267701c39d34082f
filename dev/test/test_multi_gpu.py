#!/usr/bin/env python3
"""dev/bench/multi_gpu.py with the CPU program: what it runs, what it makes of the logs, and what it says when something is wrong. TRAINER names the
program; run from the repository root."""

import json
import os
import re
import subprocess
import sys
import tempfile
import unittest

TRAINER = os.path.abspath(os.environ.get("TRAINER", "train_gpt_nvfp4_cpu"))
SMALL = ["--models", "tiny", "--batch", "1", "--seq", "128", "--recipes", "bf16", "--steps", "3"]
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


class MultiGpu(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="quartet multi ")
        self.addCleanup(folder.cleanup)
        self.folder, self.out = folder.name, os.path.join(folder.name, "rows.jsonl")

    def bench(self, *arguments, program=TRAINER):
        return subprocess.run([sys.executable, "dev/bench/multi_gpu.py", "--program", program, "--out", self.out, *arguments], env=ENV, capture_output=True, text=True, timeout=120)

    def cells(self, result):
        """-> the rows of a table, each a list of its cells."""
        self.assertEqual(result.returncode, 0, result.stderr)
        return [[c.strip() for c in line.split("|")[1:-1]] for line in result.stdout.splitlines() if re.match(r"\| [^m-]", line)]

    def rows(self):
        with open(self.out) as f:
            return [json.loads(line) for line in f]

    def script(self, text):
        path = os.path.join(self.folder, "program")
        with open(path, "w") as f:
            f.write(f"#!/bin/sh\n{text}\n")
        os.chmod(path, 0o755)
        return path

    def refuses(self, result, status, *words):
        self.assertEqual(result.returncode, status, result.stdout)
        for word in words:
            self.assertIn(word, result.stderr)
        self.assertNotIn("Traceback", result.stderr)

    def test_runs_what_is_asked_for_once(self):
        cells = self.cells(self.bench(*SMALL, "--ranks", "2,3"))
        self.assertEqual([c[1:5] for c in cells], [["bf16", n, zero, "float32"] for n, zero in (("1", "0"), ("2", "0"), ("2", "1"), ("3", "0"), ("3", "1"))])
        rows = self.rows()
        for row in rows:
            self.assertAlmostEqual(row["tokens_per_s"] * row["step_s"], 128 * row["ranks"], places=6)
        # Optimizer state is 8 bytes a parameter (1.115 M of them), shared by the ranks under ZeRO-1 and only there.
        self.assertEqual(rows[0]["memory_bytes"], rows[1]["memory_bytes"])
        self.assertAlmostEqual((rows[3]["memory_bytes"] - rows[4]["memory_bytes"]) / (8 * 1.115e6 * 2 / 3), 1, delta=0.02)
        # What is there is not run again: this program could not. Other rows are added.
        self.assertEqual(self.cells(self.bench(*SMALL, "--ranks", "2,3", program=self.script("exit 3"))), cells)
        self.assertEqual(len(self.cells(self.bench(*SMALL, "--ranks", "2", "--zero", "0", "--reduce-dtype", "bf16"))), 6)
        self.assertEqual(len(self.rows()), 6)

    def test_table_by_hand(self):
        row = {"model": "100M", "recipe": "bf16", "zero": 0, "reduce_dtype": "float32", "ranks": 1, "batch": 128, "seq": 512, "step_s": 0.1, "tokens_per_s": 655360.0,
               "mfu": 0.5, "memory_bytes": 2 ** 34, "device": "NVIDIA H200", "revision": "1", "date": "2026-01-01"}
        eight = {**row, "zero": 1, "ranks": 8, "step_s": 0.104, "tokens_per_s": 8 * 65536 / 0.104, "mfu": 0.48, "memory_bytes": 3 * 2 ** 32}
        with open(self.out, "w") as f:
            f.write("\n".join(map(json.dumps, (eight, row))) + "\n")         # in any order
        cells = self.cells(self.bench("--table"))
        scaling = subprocess.run([sys.executable, "dev/bench/scaling.py", "--model", "100M", "--step-ms", "100", "--zero", "1", "--weak"], capture_output=True, text=True)
        foreseen = re.search(r"(?m)^ +8 .* ([\d.]+)%$", scaling.stdout).group(1) + " %"
        self.assertEqual(cells, [["100M, 128 x 512", "bf16", "1", "0", "float32", "100.00", "655360", "50.0 %", "-", "-", "-", "16.00"],
                                 ["100M, 128 x 512", "bf16", "8", "1", "float32", "104.00", "5041231", "48.0 %", "96.2 %", foreseen, "4.00", "12.00"]])

    def test_a_sitting_ends(self):
        r = self.bench(*SMALL, "--ranks", "2", "--minutes", "0")
        self.assertEqual(self.cells(r), [])
        self.assertIn("the same command goes on", r.stderr)

    def test_what_goes_wrong(self):
        self.refuses(self.bench("--models", "2M"), 2, "2M", "the presets are")
        self.refuses(self.bench("--zero", "2"), 2, "--zero")
        self.refuses(self.bench(program=os.path.join(self.folder, "none")), 1, "is not there")
        self.refuses(self.bench(*SMALL, program=self.script("echo no card >&2; exit 3")), 1, "rank 0 ended with status 3: no card")
        # A program that does not know of the others trains alone.
        alone = self.script(f'[ "$RANK" = 0 ] || exit 0; unset WORLD_SIZE RANK; exec "{TRAINER}" "$@"')
        self.refuses(self.bench(*SMALL, "--ranks", "2", "--zero", "0", program=alone), 1, "trained as 1 processes where 2 were started")
        with open(self.out, "a") as f:
            f.write('{"model": "tiny"}\n')
        self.refuses(self.bench("--table"), 1, "line 2", "is not a row")


if __name__ == "__main__":
    unittest.main()
