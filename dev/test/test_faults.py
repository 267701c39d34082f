#!/usr/bin/env python3
"""The short form of dev/test/faults.py: a tenth of the damage, each kind at least twice. TRAINER names the program."""

import os
import re
import subprocess
import sys
import unittest

FAULTS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "faults.py")


class Faults(unittest.TestCase):
    def test_short_form(self):
        r = subprocess.run([sys.executable, FAULTS, "--short"], capture_output=True, text=True, timeout=900)
        said = f"{r.stdout[-6000:]}\n{r.stderr[-2000:]}"
        self.assertEqual(r.returncode, 0, said)
        tally = re.search(r"^faults: (\d+) injected, (\d+) survived, (\d+) bytes lost$", r.stdout, re.M)
        self.assertTrue(tally, said)
        self.assertGreaterEqual(int(tally[1]), 80, said)
        self.assertEqual((tally[2], tally[3]), (tally[1], "0"), said)

    def test_a_loss_is_seen(self):
        """A program that keeps no promise (it exits with status 0 and writes nothing) does not pass."""
        env = dict(os.environ, TRAINER="/bin/true")
        r = subprocess.run([sys.executable, FAULTS, "--short", "kill"], capture_output=True, text=True, timeout=300, env=env)
        self.assertNotEqual(r.returncode, 0, r.stdout)


if __name__ == "__main__":
    unittest.main()
