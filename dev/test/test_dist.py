#!/usr/bin/env python3
"""Several processes train one model: the same numbers as one process, and all of them end when one does. The launchers are mpirun (skipped
where it, or MPI in the build, is not there) and plain environment variables over TCP. TRAINER names the program; run from the
repository root. Standard library only."""

import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import unittest

import test_trainer as t

# 27 samples of 64 tokens in three shards of odd lengths; a step takes 24, so that epochs end within steps.
SHORT = {"train_data": None, "total_batch": 24 * 64, "batch": 2, "steps": 6, "save_every": 3, "keep": 9, "recipe": "fp32", "master_weights": "fp32"}
# A run that ends only when something ends it.
LONG = {**SHORT, "steps": 1000000, "total_batch": None, "save_every": 5, "keep": 2}
# Threads that spin cost processes that share cores far more than they bring.
os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
# The last: where there is no /sys (a bare chroot) MPI's hwloc says so, and what a run says on standard error is compared.
ENV = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "HWLOC_HIDE_ERRORS": "2"}
HAS_MPI = shutil.which("mpirun") is not None and b"libmpi" in t.read(t.TRAINER) if os.path.exists(t.TRAINER) else False


def setUpModule():
    t.TMP = tempfile.mkdtemp(prefix="quartet dist ")
    t.write_json("model.json", {**t.MODEL, "layers": 2})
    t.make_data()
    SHORT["train_data"] = LONG["train_data"] = t.at("short", "train_*.bin")


def tearDownModule():
    shutil.rmtree(t.TMP)


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Group:
    """Processes that were started together; their outputs go to files."""
    def __init__(self, commands, environments):
        self.files = [(open(t.fresh("out"), "w+"), open(t.fresh("err"), "w+")) for _ in commands]
        self.processes = [subprocess.Popen(c, env=e, stdout=f[0], stderr=f[1]) for c, e, f in zip(commands, environments, self.files)]

    def said(self, which, rank):
        with open(self.files[rank][which].name, errors="replace") as f:
            return f.read()

    @property
    def stdout(self):
        return self.said(0, 0)

    @property
    def stderr(self):
        return "".join(self.said(1, r) for r in range(len(self.files)))

    def wait(self, seconds):
        """-> exit statuses; whoever has not ended by then is killed, and its status is None."""
        end = time.monotonic() + seconds
        codes = []
        for p in self.processes:
            try:
                codes.append(p.wait(max(0.01, end - time.monotonic())))
            except subprocess.TimeoutExpired:
                codes.append(None)
                p.kill()
                p.wait()
        for f in self.files:
            f[0].close()
            f[1].close()
        return codes

    def wait_for_step(self, step, seconds=60):
        end = time.monotonic() + seconds
        while not re.search(rf"(?m)^step +{step}/", self.stdout):
            if time.monotonic() > end or self.processes[0].poll() is not None:
                raise AssertionError(f"step {step} did not come: {self.stdout[-500:]}{self.stderr}")
            time.sleep(0.05)


def start_tcp(ranks, size=None, special=None, **options):
    """ranks: a number, or the list of those that are started. special: rank -> options that only it gets."""
    listed = list(range(ranks)) if isinstance(ranks, int) else ranks
    common = {"WORLD_SIZE": str(size or len(listed)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return Group([t.command({**options, **(special or {}).get(r, {})}) for r in listed],
                 [{**ENV, **common, "RANK": str(r), "LOCAL_RANK": str(r)} for r in listed])


def start_mpi(ranks, special=None, **options):
    command = ["mpirun", "--oversubscribe"]
    for r in range(ranks):
        command += ([":"] if r else []) + ["-np", "1"] + t.command({**options, **(special or {}).get(r, {})})
    return Group([command], [ENV])


def rank_process(group, rank):
    """The process of a rank: under mpirun, the one of its children whose environment says so."""
    if len(group.processes) > 1:
        return group.processes[rank].pid
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            parent = int(re.search(r"PPid:\s+(\d+)", t.read(f"/proc/{pid}/status").decode()).group(1))
            if parent == group.processes[0].pid and f"OMPI_COMM_WORLD_RANK={rank}".encode() in t.read(f"/proc/{pid}/environ").split(b"\0"):
                return int(pid)
        except OSError:
            pass  # it ended while we looked
    raise AssertionError(f"mpirun has no child of rank {rank}")


def steps_of(out):
    return [o for o in t.log_lines(out) if "step" in o]


class DistTest(unittest.TestCase):
    maxDiff = 2000

    def trained(self, launch, ranks, **options):
        """-> the folder of a run that went well, about which no rank but the first said anything."""
        out = t.fresh()
        group = launch(ranks, out=out, **options)
        self.assertEqual(set(group.wait(120)), {0}, group.stderr)
        self.assertEqual(group.stderr, "")
        self.assertEqual(group.stdout.count("run complete"), 1)
        return out

    def assert_close(self, one, other, first, later, norm):
        """Relative differences of losses (that of the first step; of later ones) and of gradient norms."""
        a, b = steps_of(one), steps_of(other)
        self.assertEqual([o["step"] for o in a], [o["step"] for o in b])
        for x, y in zip(a, b):
            self.assertLess(abs(x["loss"] - y["loss"]), (first if x["step"] == 1 else later) * x["loss"])
            self.assertLess(abs(x["grad_norm"] - y["grad_norm"]), (first if x["step"] == 1 else norm) * x["grad_norm"])

    def assert_same(self, one, other, step):
        logs = [re.sub(rb'"memory_bytes":\d+', b"", t.log_bytes(out)) for out in (one, other)]
        self.assertEqual(*logs)
        self.assertEqual(t.folder_sums(t.checkpoint(one, step)), t.folder_sums(t.checkpoint(other, step)))

    def ends(self, group, seconds, *words):
        """No process goes on, none ends well, and all the words are said."""
        codes = group.wait(seconds)
        self.assertNotIn(None, codes, f"not ended after {seconds} s\n{group.stderr}")
        self.assertNotIn(0, codes, group.stderr)
        for word in words:
            self.assertRegex(group.stderr, word)

    def a_killed_rank_ends_all(self, launch, ranks, others, **options):
        """options: of LONG's kind. others: how many ranks go on from the checkpoint."""
        out = t.fresh()
        group = launch(ranks, out=out, **options)
        group.wait_for_step(12)
        os.kill(rank_process(group, 1), signal.SIGKILL)
        self.ends(group, 15, r"rank 1 ")
        # The last checkpoint stands. The same samples a step, whatever the ranks.
        saved = max(int(name[5:]) for name in os.listdir(out) if re.fullmatch(r"step_\d{8}", name))
        again = launch(others, out=out, resume="auto", **{**options, "total_batch": ranks * options["batch"] * 64, "batch": ranks * options["batch"] // others,
                                                          "steps": saved + 5})
        self.assertEqual(set(again.wait(60)), {0}, again.stderr)
        self.assertIn("resumed from", again.stdout)
        self.assertEqual(steps_of(out)[-1]["step"], saved + 5)

    def names_the_rank_of_a_bad_loss(self, launch, **options):
        """From an lm_head of 1.7e38 (BF16 0x7F00) no logits are finite, and no loss. All ranks have it: the first is named."""
        source, folder = t.fresh(), t.fresh()
        self.assertEqual(t.run(out=source, **{**options, "steps": 1, "save_every": 1}).returncode, 0)
        weights = t.read(os.path.join(t.checkpoint(source, 1), "model.safetensors"))
        data = 8 + int.from_bytes(weights[:8], "little")
        begin, end = (data + at for at in json.loads(weights[8:data])["lm_head.weight"]["data_offsets"])
        t.write(os.path.join(folder, "model.safetensors"), weights[:begin] + b"\x00\x7f" * ((end - begin) // 2) + weights[end:])
        t.write(os.path.join(folder, "config.json"), t.read(os.path.join(t.checkpoint(source, 1), "config.json")))
        group = launch(2, out=t.fresh(), init_from=folder, **options)
        self.ends(group, 60, r"step 1: loss is nan, gradient norm nan, the loss first on rank 0 \(\S+\): training stops")


class Equal:
    """What holds under either launcher."""

    def test_ranks_do_not_change_the_numbers(self):
        """A step has the same samples on any number of ranks, so losses and gradients differ by the order of float32 sums of up to 1536
        terms: below 1536 * 2^-24 = 9e-5 of the value, in the first step. Then as in test_trainer's accumulated gradients: AdamW divides
        gradients that are all rounding by their own size, so 3e-4 of the loss and 3e-3 of the norm. With BF16 weights the rounding of the
        weights (2^-8 of each) goes another way where their float32 values differ in the last bits: some of 2e5 weights, 1e-3 and 1e-2."""
        for recipe, master, tolerance in (("fp32", "fp32", (9e-5, 3e-4, 3e-3)), ("bf16", "bf16", (9e-5, 1e-3, 1e-2))):
            options = {**SHORT, "recipe": recipe, "master_weights": master}
            one = t.fresh()
            t.TrainerTest.succeeds(self, out=one, **options)
            for ranks in self.RANKS:
                with self.subTest(recipe=recipe, ranks=ranks):
                    whole = self.trained(self.launch, ranks, **options)
                    self.assert_close(one, whole, *tolerance)
                    sharded = self.trained(self.launch, ranks, zero=1, **options)
                    self.assert_same(whole, sharded, 6)
        # The comparison can fail: another global batch has another loss.
        other = t.fresh()
        t.TrainerTest.succeeds(self, out=other, **{**SHORT, "total_batch": 12 * 64})
        self.assertGreater(abs(steps_of(other)[0]["grad_norm"] - steps_of(whole)[0]["grad_norm"]), 1e-3)

    def test_resume_on_another_number_of_ranks(self):
        whole = self.trained(self.launch, 2, zero=1, **SHORT)
        same = self.trained(self.launch, 2, resume=t.checkpoint(whole, 3), **SHORT)
        self.assertEqual(t.folder_sums(t.checkpoint(whole, 6)), t.folder_sums(t.checkpoint(same, 6)))
        other = self.trained(self.launch, 3, zero=1, resume=t.checkpoint(whole, 3), **SHORT)
        one = t.fresh()
        t.TrainerTest.succeeds(self, out=one, resume=t.checkpoint(whole, 3), **SHORT)
        expected = steps_of(whole)[3:]
        for out in (other, one):
            for x, y in zip(expected, steps_of(out)):
                self.assertEqual(x["step"], y["step"])
                self.assertLess(abs(x["loss"] - y["loss"]), (9e-5 if x["step"] == 4 else 3e-4) * x["loss"])
            self.assertEqual(steps_of(out)[-1]["step"], 6)

    def test_a_killed_rank_ends_all(self):
        self.a_killed_rank_ends_all(self.launch, 3, 1, **LONG)

    def test_other_data_on_one_rank(self):
        other = t.write(t.at("other", "train_0.bin"), t.shard([66] * 1729))
        self.ends(self.launch(3, special={1: {"train_data": other}}, out=t.fresh(), **SHORT), 15, "rank 1 on .* another text to train on than rank 0")

    def test_a_signal_on_any_rank_stops_all_after_one_step(self):
        out = t.fresh()
        group = self.launch(2, out=out, zero=1, **LONG)
        group.wait_for_step(7)
        os.kill(rank_process(group, 1), signal.SIGUSR1)
        self.assertEqual(set(group.wait(15)), {0}, group.stderr)
        done = int(re.search(rf"stopped by signal {signal.SIGUSR1.value} after step (\d+);", group.stdout).group(1))
        self.assertTrue(os.path.isdir(t.checkpoint(out, done)))
        self.assertEqual(steps_of(out)[-1]["step"], done)


@unittest.skipUnless(HAS_MPI, "no mpirun here, or the trainer was built without MPI")
class Mpi(DistTest, Equal):
    RANKS = (2, 3, 4)
    launch = staticmethod(start_mpi)


class Tcp(DistTest, Equal):
    RANKS = (3,)
    launch = staticmethod(start_tcp)

    @unittest.skipUnless(HAS_MPI, "no mpirun here, or the trainer was built without MPI")
    def test_the_same_bits_as_under_mpirun(self):
        self.assert_same(self.trained(start_tcp, 2, zero=1, **SHORT), self.trained(start_mpi, 2, zero=1, **SHORT), 6)

    def test_bf16_exchange(self):
        exact = self.trained(self.launch, 2, **SHORT)
        whole = self.trained(self.launch, 2, reduce_dtype="bf16", **SHORT)
        self.assert_same(whole, self.trained(self.launch, 2, reduce_dtype="bf16", zero=1, **SHORT), 6)
        # Gradients rounded to 8 bits: the norm's error is far below 2^-9, the loss follows.
        self.assert_close(exact, whole, 2 ** -9, 1e-2, 2e-2)
        self.assertNotEqual(steps_of(exact)[1]["loss"], steps_of(whole)[1]["loss"])

    def test_a_tied_model(self):
        """lm_head's gradient is the embedding's: complete last, not first."""
        options = {**SHORT, "tied": "true"}
        t.TrainerTest.succeeds(self, out=(one := t.fresh()), **options)
        whole = self.trained(self.launch, 2, **options)
        self.assert_close(one, whole, 9e-5, 3e-4, 3e-3)
        self.assert_same(whole, self.trained(self.launch, 2, zero=1, **options), 6)

    def test_noise_is_of_the_rank_where_data_is(self):
        """Quantized: ZeRO-1 is still ZeRO-0, a run repeats itself, and validation takes every batch once."""
        options = {**SHORT, "recipe": "quartet2", "master_weights": "bf16", "total_batch": 12 * 64, "val_data": t.at("data", "val_*.bin"), "eval_every": 3,
                   "eval_tokens": 5 * 128}
        whole = self.trained(self.launch, 3, **options)
        self.assert_same(whole, self.trained(self.launch, 3, zero=1, **options), 6)
        one = t.fresh()
        t.TrainerTest.succeeds(self, out=one, **options)
        self.assert_close(one, whole, 1e-2, 5e-2, 0.2)
        self.assertNotEqual(steps_of(one)[0]["grad_norm"], steps_of(whole)[0]["grad_norm"])  # other noise
        exact = {**options, "recipe": "fp32", "steps": 3, "lr": 1e-9}
        t.TrainerTest.succeeds(self, out=(alone := t.fresh()), **exact)
        val = [next(o["val_loss"] for o in t.log_lines(out) if "eval" in o) for out in (alone, self.trained(self.launch, 3, **exact))]
        self.assertLess(abs(val[0] - val[1]), 1e-6 * val[0])

    def test_a_rank_that_hangs_is_named(self):
        out = t.fresh()
        group = self.launch(3, out=out, comm_timeout=5, **LONG)
        group.wait_for_step(7)
        stopped = rank_process(group, 2)
        os.kill(stopped, signal.SIGSTOP)
        for r in (0, 1):
            self.assertEqual(group.processes[r].wait(20), 1)
        os.kill(stopped, signal.SIGCONT)
        self.ends(group, 15, r"rank 2 on \S+ hangs: rank \d has waited")
        # Rank 0 cannot tell of itself: the others do.
        group = self.launch(2, out=t.fresh(), comm_timeout=5, **LONG)
        group.wait_for_step(7)
        os.kill(rank_process(group, 0), signal.SIGSTOP)
        self.assertEqual(group.processes[1].wait(25), 1)
        self.assertIn("rank 0 on", group.said(1, 1))
        os.kill(rank_process(group, 0), signal.SIGKILL)
        group.wait(5)

    def test_missing_ranks_are_named(self):
        self.ends(self.launch([0, 2], size=4, out=t.fresh(), comm_timeout=4, **SHORT), 25, "rendezvous: after 4 s 2 of 4 processes are here, rank 1, 3 is missing")
        self.ends(self.launch([1], size=2, out=t.fresh(), comm_timeout=2, **SHORT), 20, "rank 0 is missing")

    def test_wrong_environments(self):
        for change, word in (({"RANK": "two"}, "RANK=two"), ({"RANK": "5"}, "RANK=5"), ({"RANK": ""}, "RANK is not set"), ({"MASTER_ADDR": ""}, "MASTER_ADDR is not set")):
            with self.subTest(change):
                environment = {**ENV, "WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), **change}
                r = subprocess.run(t.command({**SHORT, "out": t.fresh()}), env=environment, capture_output=True, text=True, timeout=30)
                self.assertEqual((r.returncode, r.stderr.count("\n")), (2, 1), r.stderr)
                self.assertIn(word, r.stderr)

    def test_other_options_on_one_rank(self):
        for options, word in (({"lr": 0.5}, r'"lr":0.5 there, "lr":0.003 here'), ({"zero": 1}, '"zero":1 there')):
            self.ends(self.launch(2, special={1: options}, out=t.fresh(), **SHORT), 15, "rank 1 on .* another configuration than rank 0.*" + word)

    def test_an_option_of_the_gpu_is_refused(self):
        r = t.run(out=t.fresh(), **SHORT, dist_host_staged="true")
        t.TrainerTest.refuses(self, r, 1, "--dist-host-staged", "leave it out")

    def test_an_error_on_one_rank_ends_all(self):
        group = self.launch(3, special={2: {"train_data": t.at("nothing", "*.bin")}}, out=t.fresh(), **SHORT)
        self.ends(group, 15)
        self.assertRegex(group.said(1, 0), r"error: rank 0 on \S+: rank 2 on \S+: .*no file matches")

    def test_nan_stops_all(self):
        out = t.fresh()
        group = self.launch(2, out=out, **{**SHORT, **t.LossNotFinite.DIVERGES, "total_batch": 4 * 64, "save_every": 1})
        self.ends(group, 30, "training stops")
        bad = [o["step"] for o in steps_of(out) if o["loss"] is None or o["grad_norm"] is None]
        self.assertEqual(bad, [len(steps_of(out))])
        self.assertEqual(group.said(1, 0).count("\n"), 1, group.stderr)
        self.assertEqual(group.said(1, 1), "")
        self.assertTrue(os.path.isdir(t.checkpoint(out, bad[0] - 1)))
        self.assertTrue(math.isfinite(steps_of(out)[bad[0] - 2]["loss"]))

    def test_the_rank_of_a_bad_loss_is_named(self):
        self.names_the_rank_of_a_bad_loss(self.launch, **SHORT)

    def test_total_batch_counts_all_ranks(self):
        out = self.trained(self.launch, 3, **{**SHORT, "total_batch": None})
        self.assertEqual(steps_of(out)[0]["tokens"], 3 * 2 * 64)
        self.ends(self.launch(3, out=t.fresh(), **{**SHORT, "total_batch": 4 * 64}), 15, "--total-batch 256 is not a multiple of batch x seq x ranks = 384 tokens")


if __name__ == "__main__":
    unittest.main()
