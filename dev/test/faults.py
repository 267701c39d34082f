#!/usr/bin/env python3
"""Damage done on purpose: does a run lose anything?

    dev/test/faults.py             200 kills and the rest (some minutes)
    dev/test/faults.py --short     a tenth of it, for CI
    dev/test/faults.py kill disk   only these kinds

TRAINER names the program (default ./train_gpt_nvfp4_cpu). Every fault is done to a run of a tiny model, which then goes on as a
person would (--resume auto) and is compared with a run that nothing happened to: last checkpoint and log, bit for bit. "Bytes
lost" are bytes of those that differ or are missing. Files lie below one temporary folder, which is removed.
The last lines are the tally and "N passed, N failed" (a kind each). Exit status 0 only if every fault was survived."""

import array
import contextlib
import ctypes
import json
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

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
TRAINER = os.path.abspath(os.environ.get("TRAINER", os.path.join(ROOT, "train_gpt_nvfp4_cpu")))
MODEL = {"layers": 1, "width": 128, "heads": 2, "ffn": 128, "vocab": 256, "seq": 64}
STEPS = 24
FILES = ("model.safetensors", "config.json", "optimizer.safetensors", "trainer.json")
NOISE = (300, 500)
DRAW = random.Random(20260701)


class Fault(Exception):
    """A fault that was not survived."""


class World:
    """The temporary folder, the uninterrupted run, and the counts."""

    def __init__(self, folder, short):
        self.folder, self.short, self.number = folder, short, 0
        self.injected = self.survived = self.lost = 0
        with open(self.at("model.json"), "w", encoding="utf-8") as f:
            json.dump(MODEL, f)
        tokens = [65 + (i * i // 7 + i // 64) % 26 for i in range(40 * 64 + 1)]
        self.shard("train.bin", tokens)
        # An alphabet again and again, which is learned at once, and in 800 samples two of noise: their steps are outliers.
        tokens = [65 + i % 26 for i in range(800 * 64 + 1)]
        for sample in NOISE:
            tokens[64 * sample:64 * sample + 64] = [DRAW.randrange(256) for _ in range(64)]
        self.shard("noisy.bin", tokens)
        self.shim = self.shims = None
        self.running = []
        self.whole = self.fresh()
        started = time.monotonic()
        self.expect(self.run(out=self.whole), 0)
        self.seconds = time.monotonic() - started

    def at(self, *names):
        return os.path.join(self.folder, *names)

    def fresh(self):
        self.number += 1
        return self.at(f"run {self.number}")

    def count(self, full):
        return max(full // 10, 2) if self.short else full

    def shard(self, name, tokens):
        with open(self.at(name), "wb") as f:
            f.write(struct.pack("<256i", 20240520, 1, len(tokens), *[0] * 253) + array.array("H", tokens).tobytes())

    # -----------------------------------------------------------------------------------------------------------------
    # Runs

    def command(self, options):
        merged = {"model": self.at("model.json"), "recipe": "quartet2", "train_data": self.at("train.bin"), "batch": 4, "steps": STEPS,
                  "lr": 3e-3, "save_every": 3, "keep": 2, "resume": "auto", **options}
        return [TRAINER] + [w for k, v in merged.items() for w in ("--" + k.replace("_", "-"), str(v))]

    def start(self, faults=None, before=None, **options):
        env = dict(os.environ, OMP_WAIT_POLICY="passive", OMP_NUM_THREADS="2")
        if faults:
            env.update(LD_PRELOAD=self.compiled_shim(), ASAN_OPTIONS="verify_asan_link_order=0:detect_leaks=0", **{k: str(v) for k, v in faults.items()})
        p = subprocess.Popen(self.command(options), env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace", preexec_fn=before)
        self.running = [q for q in self.running if q.poll() is None] + [p]
        return p

    def run(self, **options):
        p = self.start(**options)
        return self.end(p)

    def end(self, p):
        out, err = p.communicate(timeout=300)
        if "LD_PRELOAD" in err:
            raise Fault(f"the fault was not injected: {err.splitlines()[0]}")
        return subprocess.CompletedProcess(p.args, p.returncode, out, err)

    def compiled_shim(self):
        if not self.shim:
            self.shims = tempfile.mkdtemp(prefix="quartet-shim-")  # LD_PRELOAD cannot name a path with spaces
            self.shim = os.path.join(self.shims, "shim.so")
            subprocess.run([os.environ.get("CC", "cc"), "-std=c11", "-D_GNU_SOURCE", "-O1", "-fPIC", "-shared",
                            os.path.join(ROOT, "dev", "test", "fault_shim.c"), "-o", self.shim, "-ldl"], check=True)
        return self.shim

    # -----------------------------------------------------------------------------------------------------------------
    # Judging

    def expect(self, result, status, *words):
        """The exit status; a failure tells one error, and its line holds the words (warnings may stand around it)."""
        if result.returncode != status:
            raise Fault(f"exit status {result.returncode}, not {status}: {result.stderr.strip()[-300:]}")
        errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
        if len(errors) != (status != 0):
            raise Fault(f"{len(errors)} errors are told: {result.stderr!r}")
        said = errors[0] if status else result.stdout + result.stderr
        for word in words:
            if word not in said:
                raise Fault(f"{word!r} is not in: {said}")
        return result

    def compare(self, out, whole=None, step=STEPS):
        """Bytes of the last checkpoint and the log that are not as in the run that nothing happened to."""
        lost = 0
        for name in FILES:
            lost += differing(read(os.path.join(whole or self.whole, f"step_{step:08d}", name)), left_of(os.path.join(out, f"step_{step:08d}", name)))
        lost += differing(log_bytes(whole or self.whole), log_bytes(out) if os.path.exists(os.path.join(out, "log.jsonl")) else b"")
        self.lost += lost
        if lost:
            raise Fault(f"{lost} bytes differ from the uninterrupted run's")
        left = [n for n in os.listdir(out) if n.startswith((".tmp-", ".old-"))]
        if left:
            raise Fault(f"{left} were left behind")

    def go_on(self, out, **options):
        """The same command again, to the end; the result compared. -> what it said."""
        r = self.expect(self.run(out=out, **options), 0, f"run complete: {STEPS} of {STEPS} steps")
        self.compare(out)
        shutil.rmtree(out)
        return r

    @contextlib.contextmanager
    def fault(self, what):
        self.injected += 1
        try:
            yield
            self.survived += 1
        except (Fault, OSError, subprocess.TimeoutExpired) as e:
            print(f"    {what}: {e}")


def read(path):
    with open(path, "rb") as f:
        return f.read()


def left_of(path):
    """What a run left of a file: nothing, where it is not there. (Of what it is compared with, that would be an error.)"""
    return read(path) if os.path.exists(path) else b""


def differing(a, b):
    return abs(len(a) - len(b)) + (0 if a[:len(b)] == b[:len(a)] else sum(x != y for x, y in zip(a, b)))


def log_bytes(out):
    return re.sub(rb',"(timing|machine)":\{[^{}]*\}', b"", read(os.path.join(out, "log.jsonl")))


def checkpoints(out):
    return sorted(n for n in os.listdir(out) if n.startswith("step_")) if os.path.isdir(out) else []


def wait_for(condition, p):
    while p.poll() is None and not condition():
        time.sleep(0.0005)


def saving(out):
    return os.path.isdir(out) and any(n.startswith(".tmp-step_") for n in os.listdir(out))


# ---------------------------------------------------------------------------------------------------------------------
# The kinds of damage. Each returns words for its line.

def kill(w):
    """SIGKILL at a random moment; every second one while a checkpoint is being written. What stood must stand, and the end be the same."""
    while_saving = 0
    for i in range(w.count(200)):
        with w.fault(f"kill {i}"):
            out = w.fresh()
            p = w.start(out=out)
            if i % 2:
                w_after = DRAW.randrange(0, STEPS // 3)  # let some checkpoints pass first
                wait_for(lambda: len(checkpoints(out)) >= min(w_after, 2) and saving(out), p)
                time.sleep(DRAW.random() * 0.004)
            else:
                time.sleep(DRAW.random() * w.seconds)
            stood = checkpoints(out)
            p.kill()
            w.end(p)
            while_saving += os.path.isdir(out) and saving(out)
            after = checkpoints(out)
            if stood and (not after or after[-1] < stood[-1]):
                raise Fault(f"{stood[-1]} stood before the kill, {after} after")
            said = w.go_on(out)
            if after and "resumed from" not in said.stdout:
                raise Fault(f"began anew although {after} stood")
            if "passing over" in said.stderr:
                raise Fault(f"a kill spoiled a checkpoint: {said.stderr}")
    return f"{while_saving} of them within a save"


def signals(w):
    """SIGINT, SIGTERM, SIGUSR1 at random moments: the step is finished and saved, exit status 0, and the line says how to go on."""
    for i in range(w.count(60)):
        number = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)[i % 3]
        with w.fault(f"signal {number}"):
            out = w.fresh()
            p = w.start(out=out)
            line = p.stdout.readline()           # the program catches signals before it says anything
            time.sleep(DRAW.random() * w.seconds)
            p.send_signal(number)
            r = w.end(p)
            r.stdout = line + r.stdout
            w.expect(r, 0)
            stopped = re.search(rf"stopped by signal {int(number)} after step (\d+); go on with the same command and --resume auto", r.stdout)
            if not stopped and "run complete" not in r.stdout:
                raise Fault(f"did not say how to go on: {r.stdout[-300:]}")
            if stopped and int(stopped[1]) > 0 and checkpoints(out)[-1] != f"step_{int(stopped[1]):08d}":
                raise Fault(f"stopped after step {stopped[1]}, but {checkpoints(out)} stand")
            w.go_on(out)


def full(w):
    """The disk is full after so many bytes, at random; then there is room again."""
    each = sum(len(read(os.path.join(w.whole, f"step_{STEPS:08d}", name))) for name in FILES)
    for i in range(w.count(60)):
        with w.fault(f"full disk {i}"):
            out = w.fresh()
            r = w.run(out=out, faults={"FAULT_WRITE_BYTES": DRAW.randrange(0, STEPS // 3 * each)})
            w.expect(r, 1, "No space left on device", "free some space")
            w.go_on(out)


@contextlib.contextmanager
def small_disk(w, megabytes):
    path = w.at(f"disk {megabytes}")
    os.makedirs(path, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", path], check=True, capture_output=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", path], check=True)


def disk(w):
    """A real file system of a few MiB that another program fills; and one too small for the plan, which is refused at the start."""
    try:
        with small_disk(w, 3) as path, w.fault("a disk too small for the plan"):
            out = os.path.join(path, "run")
            w.expect(w.run(out=out), 1, "3 checkpoints of", "MiB free", "--keep")
            if os.path.exists(out):
                raise Fault("something was written")
    except (OSError, subprocess.CalledProcessError) as e:
        return f"left out: no file system may be mounted here ({type(e).__name__}); 'full' has done it from below"
    for i in range(w.count(20)):
        with small_disk(w, 8) as path, w.fault(f"a disk that fills {i}"):
            out, filler = os.path.join(path, "run"), os.path.join(path, "other")
            p = w.start(out=out, faults={"FAULT_FSYNC_MS": 1})
            wait_for(lambda: len(checkpoints(out)) >= 1 + i % 2, p)
            with contextlib.suppress(OSError), open(filler, "wb", buffering=0) as f:
                while f.write(bytes(DRAW.randrange(1, 65536))):
                    pass
            r = w.end(p)
            w.expect(r, 1, "No space left on device", "free some space")
            os.remove(filler)
            w.go_on(out)
    return ""


def unprivileged():
    """root, too, minds a folder's permissions."""
    PR_CAPBSET_DROP, CAP_DAC_OVERRIDE = 24, 1
    ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_DAC_OVERRIDE)


def readonly(w):
    """A folder that cannot be written at the start, and one that becomes so during the run."""
    with w.fault("read-only from the start"):
        out = w.fresh()
        os.makedirs(out, mode=0o555)
        w.expect(w.run(out=out, before=unprivileged), 1, out, "Permission denied", "--out")
        os.chmod(out, 0o755)
        w.go_on(out)
    for i in range(w.count(20)):
        with w.fault(f"read-only {i}"):
            out = w.fresh()
            p = w.start(out=out, before=unprivileged, faults={"FAULT_FSYNC_MS": 5})  # slow enough to be still running
            wait_for(lambda: len(checkpoints(out)) >= 1 + i % 2, p)
            os.chmod(out, 0o555)
            r = w.end(p)
            os.chmod(out, 0o755)
            w.expect(r, 1, out, "Permission denied")
            w.go_on(out)


def syncs(w):
    """The disk says that a flush failed: the checkpoint does not count, and the run says so."""
    for i in range(1, 1 + w.count(30)):
        with w.fault(f"fsync {i} fails"):
            out = w.fresh()
            r = w.run(out=out, faults={"FAULT_FSYNC_FAILS": i})
            w.expect(r, 1, "Input/output error")
            w.go_on(out)


def damage(w):
    """Each file of the newest checkpoint cut at 50 places and changed at 50: refused by checksum, the older one taken."""
    out = w.fresh()
    shutil.copytree(w.whole, out)
    step, older = f"step_{STEPS:08d}", f"step_{STEPS - 3:08d}"
    for name in FILES:
        path = os.path.join(out, step, name)
        whole = read(path)
        for i in range(2 * w.count(50)):
            cut = i % 2 == 0
            place = DRAW.randrange(len(whole)) if i > 2 else (0, len(whole) - 1, len(whole) // 2)[i]
            with w.fault(f"{name} {'cut' if cut else 'changed'} at byte {place}"):
                bad = bytearray(whole[:place] if cut else whole)
                if not cut:
                    for j in range(place, min(place + DRAW.choice((1, 1, 2, 16)), len(bad))):
                        bad[j] ^= DRAW.randrange(1, 256)
                with open(path, "wb") as f:
                    f.write(bad)
                w.expect(w.run(out=out), 0, f"{step}/{name}", "passing over this checkpoint", f"resumed from {out}/{older}")
                w.compare(out)


def clock(w):
    """Every reading of a clock is off by up to ten years, forward and backward."""
    for i in range(w.count(20)):
        with w.fault(f"clock {i}"):
            out = w.fresh()
            p = w.start(out=out, faults={"FAULT_CLOCK": 1})
            if i % 2:
                time.sleep(DRAW.random() * w.seconds)
                p.kill()
                w.end(p)
            else:
                w.expect(w.end(p), 0)
                times = [o["timing"]["time_s"] for o in map(json.loads, read(os.path.join(out, "log.jsonl")).splitlines()) if "timing" in o]
                if max(map(abs, times)) < 1e6:
                    raise Fault("the clock did not jump: the test does not test")
            w.go_on(out, faults={"FAULT_CLOCK": 1})


def two(w):
    """A second run in the same folder is refused and harms nothing; a lock left by a dead run is no obstacle."""
    for i in range(w.count(20)):
        with w.fault(f"two runs {i}"):
            out = w.fresh()
            p = w.start(out=out, faults={"FAULT_FSYNC_MS": 20})
            wait_for(lambda: os.path.exists(os.path.join(out, "log.jsonl")), p)
            time.sleep(DRAW.random() * w.seconds / 2)
            second = w.run(out=out, resume=("auto", "none")[i % 2])
            if p.poll() is not None:
                raise Fault("the first run ended before the second was judged")
            w.expect(second, 1, "another run is writing there", f"process {p.pid} on ", "another --out")
            if i % 4 == 3:
                p.kill()
                w.end(p)
                if not os.path.exists(os.path.join(out, ".lock")):
                    raise Fault("no lock was left by the killed run: the test does not test")
            else:
                w.expect(w.end(p), 0)
                if os.path.exists(os.path.join(out, ".lock")):
                    raise Fault("a lock was left by a run that ended")
                w.compare(out)
            w.go_on(out)


def shrink(w):
    """A token shard is cut to nothing while it is being read."""
    path = w.at("train.bin")
    data = read(path)
    for i in range(w.count(20)):
        with w.fault(f"shard cut {i}"):
            out = w.fresh()
            p = w.start(out=out, faults={"FAULT_FSYNC_MS": 5})
            wait_for(lambda: os.path.exists(os.path.join(out, "log.jsonl")), p)
            time.sleep(DRAW.random() * w.seconds / 2)
            os.truncate(path, 0)
            try:
                w.expect(w.end(p), 1, "a token shard was cut short", "--resume auto")
            finally:
                with open(path, "wb") as f:
                    f.write(data)
            w.go_on(out)


def slow(w):
    """A disk that takes 100 ms a flush: steps go on meanwhile (five flushes a save; a run that waited would take ten times as long)."""
    with w.fault("slow disk"):
        out = w.fresh()
        r = w.expect(w.run(out=out, steps=STEPS * 4, save_every=STEPS, faults={"FAULT_FSYNC_MS": 100}), 0)
        stood = [(float(a), float(b)) for a, b in re.findall(r"training stood still for ([\d.]+) s, written in ([\d.]+) s", r.stdout)]
        if len(stood) != 4 or not all(written >= 0.5 and still < written / 5 for still, written in stood):
            raise Fault(f"(stood still, written): {stood}")
        # Lines of later steps stand between the save's step and the line that it is written.
        first = r.stdout.index("training stood still")
        steps = [int(s) for s in re.findall(r"^step +(\d+)/", r.stdout[:first], re.M)]
        if max(steps) <= STEPS:
            raise Fault(f"no step ended while step {STEPS} was written")


def spikes(w):
    """A sample of noise in the data: its steps are outliers and are left out, on the way and after a kill alike."""
    options = {"train_data": w.at("noisy.bin"), "steps": 200, "save_every": 20, "outlier_z": 8, "recipe": "bf16", "warmup": 4, "seed": 3}
    whole = w.fresh()
    w.expect(w.run(out=whole, **options), 0)
    skipped = [o["step"] for o in map(json.loads, read(os.path.join(whole, "log.jsonl")).splitlines()) if "skipped" in o]
    with w.fault("outliers"):
        # Where seed 3 draws samples 300 and 500 in the epoch of 200 steps: losses near 2 among losses near 0.001.
        if skipped != [105, 173]:
            raise Fault(f"skipped: {skipped}")
    for i in range(w.count(10)):
        with w.fault(f"killed among outliers {i}"):
            out = w.fresh()
            p = w.start(out=out, **options)
            wait_for(lambda: len(checkpoints(out)) and int(checkpoints(out)[-1][5:]) >= 100, p)
            time.sleep(DRAW.random() * w.seconds)
            p.kill()
            w.end(p)
            w.expect(w.run(out=out, **options), 0)
            w.compare(out, whole, 200)
    # Weights that overflow (each step multiplies them by -99): not finite for good. Skipping goes on for ten steps, then stops.
    for policy, lines in (("stop", 1), ("skip", 10)):
        with w.fault(f"--on-nan {policy}"):
            out = w.fresh()
            r = w.run(out=out, lr=10, weight_decay=10, warmup=0, schedule="constant", clip=0, steps=60, recipe="bf16", save_every=1, on_nan=policy)
            w.expect(r, 1, "training stops", "the last good checkpoint is")
            bad = [o for o in map(json.loads, read(os.path.join(out, "log.jsonl")).splitlines()) if o.get("skipped") == "not finite"]
            if len(bad) != lines:
                raise Fault(f"{len(bad)} steps were not finite, {lines} expected")
            stored = read(os.path.join(out, checkpoints(out)[-1], "model.safetensors"))
            values = array.array("H", stored[8 + struct.unpack("<Q", stored[:8])[0]:])
            if any(v & 0x7F80 == 0x7F80 for v in values):
                raise Fault("the checkpoint holds NaN or infinity")


KINDS = (kill, signals, full, disk, readonly, syncs, damage, clock, two, shrink, slow, spikes)


def main():
    names = [a for a in sys.argv[1:] if not a.startswith("-")]
    if any(a not in ("--short",) for a in sys.argv[1:] if a.startswith("-")) or any(n not in [k.__name__ for k in KINDS] for n in names):
        sys.exit(f"usage: dev/test/faults.py [--short] [{' '.join(k.__name__ for k in KINDS)}]")
    if not os.access(TRAINER, os.X_OK):
        sys.exit(f"error: {TRAINER} is not there; build it ('make cpu') and name it by TRAINER")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("error: ended by SIGTERM"))  # so that what was mounted and written goes
    folder = tempfile.mkdtemp(prefix="quartet faults ")
    passed = failed = 0
    w = None
    try:
        w = World(folder, "--short" in sys.argv)
        for kind in KINDS:
            if names and kind.__name__ not in names:
                continue
            before, started = (w.injected, w.survived, w.lost), time.monotonic()
            words = kind(w)
            injected, survived, lost = w.injected - before[0], w.survived - before[1], w.lost - before[2]
            good = injected == survived
            passed, failed = passed + good, failed + (not good)
            print(f"{kind.__name__:10s} {injected:4d} injected, {survived:4d} survived, {lost} bytes lost  ({time.monotonic() - started:.0f} s)"
                  + (f"  {words}" if words else "") + ("" if good else "  FAILED"), flush=True)
        print(f"faults: {w.injected} injected, {w.survived} survived, {w.lost} bytes lost")
    finally:
        for p in w.running if w else []:
            p.kill()
            p.wait()
        shutil.rmtree(folder)
        if w and w.shims:
            shutil.rmtree(w.shims)
    print(f"{passed} passed, {failed} failed")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
