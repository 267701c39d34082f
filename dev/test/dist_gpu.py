#!/usr/bin/env python3
"""Several processes on the GPU. Two on ONE card, exchanging through host memory (--dist-host-staged): the order of the CUDA side's work, ZeRO-1,
checkpoints at another number of ranks. And one a card, through NCCL, where there are several cards. Run by dev/test/gpu.sh from the repository root with
TRAINER=./train_gpt_nvfp4; the last line is "N passed, N failed"."""

import os
import re
import subprocess
import sys
import unittest
import unittest.mock

import test_dist as d
import test_trainer as t

STAGED = {"total_batch": 24 * 64, "batch": 4, "steps": 6, "save_every": 3, "keep": 9, "recipe": "bf16", "master_weights": "bf16", "dist_host_staged": "true"}
# A step of 8 micro-batches, on one card or spread over up to 8; a micro-batch is the same on any number, so that products are of one size everywhere.
SPREAD = {"total_batch": 16 * 64, "batch": 2, "steps": 6, "save_every": 3, "keep": 9, "recipe": "bf16", "master_weights": "bf16"}


def cards():
    """-> the cards that programs may use, as CUDA_VISIBLE_DEVICES names them."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return [c for c in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if c]
    try:
        return re.findall(r"(?m)^GPU (\d+):", subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout)
    except OSError:
        return []


VISIBLE = cards()[:int(os.environ.get("CARDS", 0)) or None]
CARDS = len(VISIBLE)


def setUpModule():
    d.setUpModule()
    SPREAD["train_data"] = STAGED["train_data"] = t.at("short", "train_*.bin")


tearDownModule = d.tearDownModule


class Seen(d.DistTest):
    """The trainer sees these cards and no others."""
    SEEN = []

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        for environment in (d.ENV, os.environ) if cls.SEEN else ():
            patch = unittest.mock.patch.dict(environment, CUDA_VISIBLE_DEVICES=",".join(cls.SEEN))
            patch.start()
            cls.addClassCleanup(patch.stop)


class OneCard(Seen):
    """Whatever the machine has, its first card alone."""
    SEEN = VISIBLE[:1]

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
        """Of three, no other is named: not when rank 0 alone waits for its card between steps, in evaluations of one batch."""
        for ranks, more in ((2, {}), (3, {"eval_every": 1, "eval_tokens": 4 * 64, "val_data": t.at("short", "val_*.bin")})):
            with self.subTest(ranks=ranks):
                group = d.start_tcp(ranks, out=t.fresh(), comm_timeout=5, **{**STAGED, "steps": 1000000, "total_batch": None, "keep": 2, **more})
                group.wait_for_step(7)
                os.kill(d.rank_process(group, 1), d.signal.SIGSTOP)
                self.assertEqual(group.processes[0].wait(30), 1)
                os.kill(d.rank_process(group, 1), d.signal.SIGKILL)
                self.assertIn("rank 1 on", group.said(1, 0))
                self.assertNotIn("rank 2 on", group.said(1, 0))
                group.wait(5)

    def test_nccl_refuses_one_card_for_two(self):
        self.ends(d.start_tcp(2, out=t.fresh(), **{**STAGED, "dist_host_staged": "false"}), 60, "one GPU|built without NCCL")

    @unittest.skipUnless(d.HAS_MPI, "no mpirun here, or the trainer was built without MPI")
    def test_one_rank_under_mpirun(self):
        out = t.fresh()
        r = subprocess.run(["mpirun", "-np", "1", *t.command({**STAGED, "out": out})], env=d.ENV, capture_output=True, text=True, timeout=120)
        self.assertEqual(r.returncode, 0, r.stderr)
        self.assertIn("run complete", r.stdout)


@unittest.skipUnless(CARDS >= 2, "one card here")
class Cards(Seen):
    """One process a card, exchanging by NCCL. CARDS=N says how many to use."""
    SEEN = VISIBLE
    RANKS = [n for n in (2, 4, 8) if n <= CARDS]

    def close_to_one(self, tolerance, **options):
        """Any number of cards against one; ZeRO-1 against ZeRO-0 on each; and a run repeats itself."""
        options = {**SPREAD, **options}
        one = self.trained(d.start_tcp, 1, **options)
        for ranks in self.RANKS:
            with self.subTest(options, ranks=ranks):
                whole = self.trained(d.start_tcp, ranks, **options)
                self.assert_close(one, whole, *tolerance)
                self.assert_same(whole, self.trained(d.start_tcp, ranks, **options), 6)
                sharded = self.trained(d.start_tcp, ranks, zero=1, **options)
                if ranks == 2:
                    self.assert_same(whole, sharded, 6)
                else:
                    self.assert_close(whole, sharded, *tolerance)
        return one

    def test_ranks_do_not_change_the_numbers(self):
        """As in test_dist: gradients differ by the order of float32 sums, BF16 weights where their rounding then goes another way. NCCL's all-reduce and
        reduce-scatter may add in different orders too, so that ZeRO-1 has ZeRO-0's bits for certain on two cards only, a sum of two having one order."""
        one = self.close_to_one((9e-5, 1e-3, 1e-2))
        other = self.trained(d.start_tcp, 2, **{**SPREAD, "total_batch": 8 * 64})      # the comparison can fail
        self.assertGreater(abs(d.steps_of(one)[0]["grad_norm"] - d.steps_of(other)[0]["grad_norm"]), 1e-3)

    def test_gradients_that_travel_in_bf16(self):
        """2^-9 of each gradient and less of the norm; sums of BF16 in another order differ by as much again."""
        self.close_to_one((2 ** -9, 1e-2, 2e-2), reduce_dtype="bf16")

    def test_quartet2_is_within_its_noise(self):
        """The noise of data is of the rank where the data is: another number of ranks draws other words (tolerances of test_dist)."""
        self.close_to_one((1e-2, 5e-2, 0.2), recipe="quartet2")

    def test_a_killed_rank_ends_all(self):
        for ranks in self.RANKS:
            for others in sorted({1, ranks // 2, ranks}):
                with self.subTest(ranks=ranks, others=others):
                    self.a_killed_rank_ends_all(d.start_tcp, ranks, others, zero=1, **{**SPREAD, "steps": 1000000, "total_batch": None, "save_every": 5, "keep": 2})

    def test_no_more_processes_than_cards(self):
        self.ends(d.start_tcp(CARDS + 1, out=t.fresh(), **{**SPREAD, "batch": 2, "total_batch": None}), 60, "at most one process a GPU|one GPU")

    @unittest.skipUnless(d.HAS_MPI, "no mpirun here, or the trainer was built without MPI")
    def test_under_mpirun(self):
        self.assert_same(self.trained(d.start_tcp, 2, **SPREAD), self.trained(d.start_mpi, 2, **SPREAD), 6)


if __name__ == "__main__":
    result = unittest.main(exit=False).result
    failed = len(result.failures) + len(result.errors)
    print(f"{result.testsRun - failed - len(result.skipped)} passed, {failed} failed")
    sys.exit(failed > 0)
