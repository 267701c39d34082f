#!/usr/bin/env python3
"""dev/bench/cost.py and scaling.py: counted again by hand and against the trainer; the headers of scripts/run_*.sh are cost.py's. And the scripts
themselves: run_reference.sh goes on until the run is complete, the launchers start what they should. Run from the repository root."""

import glob
import os
import re
import subprocess
import sys
import tempfile
import unittest

import test_trainer as t

sys.path.insert(0, "dev/bench")
import cost
import scaling


def setUpModule():
    t.TMP = tempfile.mkdtemp(prefix="quartet cost ")
    t.make_data()
    os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")


def tearDownModule():
    t.shutil.rmtree(t.TMP)


class Cost(unittest.TestCase):
    def test_headers_are_what_cost_says(self):
        scripts = [s for s in glob.glob("scripts/run_*.sh") if not s.endswith(("run_reference.sh", "_gap.sh"))]   # test_gap.py has that one
        self.assertEqual(len(scripts), 6)
        for script in scripts:
            text = t.read(script).decode()
            asked = re.search(r"# cost: (\S+) (\S+)", text)
            self.assertEqual(cost.header_of(text), text, f"{script}: run dev/bench/cost.py --headers")
            # What the script runs is what the header is of.
            model, tokens = re.search(r'run_reference\.sh" (\S+) ([\d.]+)B', text).groups()
            self.assertEqual((model, float(tokens) * 1e9), (asked.group(1), float(asked.group(2))))

    def test_counts_of_the_trainer(self):
        """The trainer's own parameters and FLOPs a token of a preset; its vocabulary is the data's, 256."""
        out = t.fresh()
        r = t.run(out=out, model="tiny", train_data=t.at("data", "train_*.bin"), steps=1)
        self.assertEqual(r.returncode, 0, r.stderr)
        run = t.log_lines(out)[0]["run"]
        p = cost.presets()["tiny"]
        self.assertEqual(p["vocab"], 256)
        self.assertEqual((cost.parameters(p), cost.flops_per_token(p)), (run["params"], run["flops_per_token"]))

    def test_memory_is_near_what_was_measured(self):
        """GiB of one H200 in dev/bench/h200.md (bf16): the estimate counts no overlap of gradients and activations, so up to 15 % more, and no less than 5 %."""
        table = dict(re.findall(r"(?m)^(\S+) +\d+x\d+ +bf16 .* ([\d.]+) +\d+ met +[\d.]+ +[\d.]+ +loss", t.read("dev/bench/h200.md").decode()))
        self.assertGreaterEqual(len(table), 4)
        for model, measured in table.items():
            p = cost.presets()[model]
            self.assertLess(abs(cost.gib(cost.state_bytes(p) + cost.activation_bytes(p, p["batch"])) / float(measured) - 1.05), 0.10, model)
        self.assertAlmostEqual(cost.state_bytes(p, 8, 1) / cost.parameters(p), 7)

    def test_bad_arguments(self):
        for arguments in ([], ["30M"], ["31M", "3e9"], ["30M", "many"]):
            r = subprocess.run([sys.executable, "dev/bench/cost.py", *arguments], capture_output=True, text=True)
            self.assertEqual((r.returncode, r.stderr.count("\n")), (2, 1))


class Scaling(unittest.TestCase):
    def rows(self, *arguments):
        return scaling.table(scaling.options(arguments))

    def test_one_gpu_is_the_measured_step(self):
        for model, ms in scaling.STEP_MS.items():
            p = cost.presets()[model]
            row = self.rows("--model", model, "--total-batch", str(p["batch"] * p["seq"]))[0]
            self.assertAlmostEqual(row[2] * 1e3, ms)
            self.assertEqual(row[3], 0)
        self.assertEqual([r[0] for r in self.rows()], [2 ** k for k in range(11)])

    def test_communication_by_hand(self):
        a = scaling.options(["--nvlink", "100", "--network", "1", "--efficiency", "0.5", "--latency", "0"])
        self.assertAlmostEqual(scaling.collective(a, 1e9, 4, 2), 2 * 3 / 4 * 1e9 / 50e9)
        self.assertAlmostEqual(scaling.collective(a, 1e9, 16, 1), 15 / 16 * 1e9 / (0.5 * 8e9))
        self.assertEqual(sum(scaling.buckets(cost.presets()["1.9B"])), cost.parameters(cost.presets()["1.9B"]))

    def test_answers_move_the_right_way(self):
        base = self.rows()
        self.assertTrue(all(a[5] >= b[5] for a, b in zip(base, base[1:]) if b[5] is not None))
        slow, half = self.rows("--network", "5"), self.rows("--network", "5", "--reduce-dtype", "bf16")
        for a, b, c in zip(base, slow, half):
            if a[2] is not None:
                self.assertTrue(a[2] <= b[2] and c[2] <= b[2])
        self.assertLess(half[5][3], slow[5][3])
        self.assertIsNone(base[-1][2])                     # 512 tokens a GPU are no sequence of 2048

    def test_bad_arguments(self):
        for arguments in (["--model", "30M", "--efficiency", "2"], ["--model", "200M"], ["--step-ms", "1"]):
            r = subprocess.run([sys.executable, "dev/bench/scaling.py", *arguments], capture_output=True, text=True)
            self.assertEqual(r.returncode, 2, r.stderr)


class Scripts(unittest.TestCase):
    def reference(self, *arguments, **environment):
        return subprocess.run(["scripts/run_reference.sh", "tiny", "6144", "--data", t.at("data"), "--program", t.TRAINER, "--total-batch", "1024", "--batch", "4",
                               "--eval-tokens", "512", *arguments], capture_output=True, text=True, timeout=120, env={**os.environ, **environment})

    def test_runs_until_done(self):
        """A launcher that dies after its first start's third step: the second start goes on."""
        out = t.fresh()
        once = t.at("once.sh")
        t.write(once, f'#!/bin/bash\nif [ ! -e "{t.at("died")}" ]; then touch "{t.at("died")}"; "$@" --steps 3; exit 7; fi\nexec "$@"\n'.replace("--steps 3", "--save-every 2").encode())
        os.chmod(once, 0o755)
        link = tempfile.mkdtemp() + "/once.sh"             # LAUNCH is split at spaces
        os.symlink(once, link)
        r = self.reference("--out", out, "--save-every", "2", LAUNCH=link)
        self.assertEqual(r.returncode, 0, r.stderr)
        self.assertIn("the run failed (status 7); it goes on from", r.stdout)
        self.assertIn("resumed from", r.stdout)
        self.assertEqual([o["step"] for o in t.log_lines(out) if "step" in o], [1, 2, 3, 4, 5, 6])

    def test_a_run_that_gets_nowhere_is_not_tried_again(self):
        r = self.reference("--out", t.fresh(), LAUNCH="false")
        self.assertEqual(r.returncode, 1)
        self.assertIn("without getting further than its start", r.stderr)
        r = self.reference("--out", t.fresh(), "--lr", "fast")
        self.assertEqual(r.returncode, 2, r.stderr)
        for arguments in ([], ["tiny"], ["tiny", "1M", "--recipe"], ["tiny", "1M", "--resume", "none"]):
            r = subprocess.run(["scripts/run_reference.sh", *arguments], capture_output=True, text=True)
            self.assertEqual((r.returncode, r.stderr.count("\n")), (2, 1), r.stderr)

    def test_slurm_tasks_find_each_other(self):
        """srun and scontrol of this test: two tasks of this host, numbered as SLURM does."""
        bin_ = tempfile.mkdtemp()
        t.write(bin_ + "/scontrol", b"#!/bin/bash\necho localhost\n")
        t.write(bin_ + "/srun", b'#!/bin/bash\nshift\nexport SLURM_NTASKS=2\nSLURM_PROCID=1 SLURM_LOCALID=1 "$@" & SLURM_PROCID=0 SLURM_LOCALID=0 "$@"; rc=$?; wait $! || rc=1; exit $rc\n')
        for name in ("scontrol", "srun"):
            os.chmod(f"{bin_}/{name}", 0o755)
        out = t.fresh()
        r = self.reference("--out", out, LAUNCH="scripts/launch_slurm.sh", PATH=bin_ + ":" + os.environ["PATH"], SLURM_JOB_ID=str(os.getpid()),
                           SLURM_JOB_NODELIST="localhost", SLURM_SUBMIT_DIR=os.getcwd())
        self.assertEqual(r.returncode, 0, r.stderr)
        self.assertIn("ranks     2", r.stdout)
        self.assertEqual(t.log_lines(out)[0]["machine"]["ranks"], 2)
        r = subprocess.run(["scripts/launch_slurm.sh", "true"], capture_output=True, text=True, env={k: v for k, v in os.environ.items() if not k.startswith("SLURM")})
        self.assertEqual((r.returncode, r.stderr.count("\n")), (1, 1))

    @unittest.skipUnless(t.shutil.which("mpirun") and b"libmpi" in t.read(t.TRAINER), "no mpirun here, or the trainer was built without MPI")
    def test_mpirun_starts_ranks(self):
        out = t.fresh()
        r = self.reference("--out", out, "--zero", "1", LAUNCH="scripts/launch_mpirun.sh -n 2")
        self.assertEqual(r.returncode, 0, r.stderr)
        self.assertEqual(t.log_lines(out)[0]["machine"]["ranks"], 2)
        for arguments in ([], ["-n", "two", "true"], ["-n", "2"], ["-k", "true"]):
            r = subprocess.run(["scripts/launch_mpirun.sh", *arguments], capture_output=True, text=True)
            self.assertEqual((r.returncode, r.stderr.count("\n")), (2, 1), r.stderr)


if __name__ == "__main__":
    unittest.main()
