#!/usr/bin/env python3
"""Two processes on ONE card, exchanging through host memory (--dist-host-staged): the order of the CUDA side's work, ZeRO-1, checkpoints at another number
of ranks. Run by dev/test/gpu.sh from the repository root with TRAINER=./train_gpt_nvfp4; the last line is "N passed, N failed"."""

import os
import shutil
import subprocess
import sys
import unittest

import test_dist as d
import test_trainer as t

STAGED = {"total_batch": 24 * 64, "batch": 4, "steps": 6, "save_every": 3, "keep": 9, "recipe": "bf16", "master_weights": "bf16", "dist_host_staged": "true"}


def setUpModule():
    d.setUpModule()
    STAGED["train_data"] = t.at("short", "train_*.bin")


tearDownModule = d.tearDownModule


class OneCard(d.DistTest):
    def single(self, **options):
        out = t.fresh()
        r = t.run(out=out, **options)
        self.assertEqual(r.returncode, 0, r.stderr)
        return out

    def test_two_ranks_are_one(self):
        """Products of other sizes may take other algorithms, whose sums round to BF16 differently here and there: 2^-9 of single values, 1e-3 of the
        first mean loss; later as in test_dist."""
        for options in ({}, {"total_batch": 8 * 64}, {"grad_dtype": "bf16"}):
            whole = self.trained(d.start_tcp, 2, **{**STAGED, **options})
            one = self.single(**{**STAGED, **options})
            self.assert_close(one, whole, 1e-3, 5e-3, 3e-2)
            self.assert_same(whole, self.trained(d.start_tcp, 2, **{**STAGED, **options}), 6)

    def test_zero_is_the_same_bits(self):
        for options in ({}, {"reduce_dtype": "bf16"}, {"grad_dtype": "bf16", "master_weights": "fp32"}, {"recipe": "quartet2"}, {"total_batch": 8 * 64}):
            with self.subTest(options):
                whole = self.trained(d.start_tcp, 2, **{**STAGED, **options})
                self.assert_same(whole, self.trained(d.start_tcp, 2, zero=1, **{**STAGED, **options}), 6)

    def test_resume_on_another_number_of_ranks(self):
        whole = self.trained(d.start_tcp, 2, zero=1, **STAGED)
        same = self.trained(d.start_tcp, 2, zero=1, resume=t.checkpoint(whole, 3), **STAGED)
        self.assertEqual(t.folder_sums(t.checkpoint(whole, 6)), t.folder_sums(t.checkpoint(same, 6)))
        one = self.single(resume=t.checkpoint(whole, 3), **STAGED)
        for x, y in zip(d.steps_of(whole)[3:], d.steps_of(one)):
            self.assertEqual(x["step"], y["step"])
            self.assertLess(abs(x["loss"] - y["loss"]), 5e-3 * x["loss"])

    def test_the_rank_of_a_bad_loss_is_named(self):
        self.names_the_rank_of_a_bad_loss(d.start_tcp, **STAGED)

    def test_a_rank_that_hangs_is_named(self):
        group = d.start_tcp(2, out=t.fresh(), comm_timeout=5, **{**STAGED, "steps": 1000000, "total_batch": None, "keep": 2})
        group.wait_for_step(7)
        os.kill(d.rank_process(group, 1), d.signal.SIGSTOP)
        self.assertEqual(group.processes[0].wait(30), 1)
        os.kill(d.rank_process(group, 1), d.signal.SIGKILL)
        self.assertIn("rank 1 on", group.said(1, 0))
        group.wait(5)

    def test_nccl_refuses_one_card_for_two(self):
        self.ends(d.start_tcp(2, out=t.fresh(), **{**STAGED, "dist_host_staged": "false"}), 60, "one GPU|built without NCCL")

    @unittest.skipUnless(shutil.which("mpirun"), "no mpirun here")
    def test_one_rank_under_mpirun(self):
        out = t.fresh()
        r = subprocess.run(["mpirun", "-np", "1", *t.command({**STAGED, "out": out})], env=d.ENV, capture_output=True, text=True, timeout=120)
        self.assertEqual(r.returncode, 0, r.stderr)
        self.assertIn("run complete", r.stdout)


if __name__ == "__main__":
    result = unittest.main(exit=False).result
    failed = len(result.failures) + len(result.errors)
    print(f"{result.testsRun - failed - len(result.skipped)} passed, {failed} failed")
    sys.exit(failed > 0)
