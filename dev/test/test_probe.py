#!/usr/bin/env python3
"""scripts/probe.sh: what it says and writes, and what it refuses. Run from the repository root."""
import os, subprocess, tempfile, unittest

HOMES = ["CUDA_HOME", "NCCL_HOME", "MPI_HOME", "CUDNN_HOME", "CJSON_HOME", "OPENBLAS_HOME"]


def probe(**variables):
    """-> exit status, standard output, standard error, and the text of the makefile fragment (None: not written)."""
    environment = {k: v for k, v in os.environ.items() if k not in HOMES}
    environment.update(variables, CUDA_HOME=variables.get("CUDA_HOME", ""))
    with tempfile.TemporaryDirectory(prefix="quartet probe ") as folder:
        out = os.path.join(folder, "config.mk")
        run = subprocess.run(["scripts/probe.sh", out], env=environment, capture_output=True, text=True)
        return run.returncode, run.stdout, run.stderr, open(out).read() if os.path.exists(out) else None


class Probe(unittest.TestCase):
    def test_finds_what_the_program_needs(self):
        status, said, _, written = probe()
        self.assertEqual(status, 0)
        for word in ("compiler", "OpenMP", "cJSON", "OpenBLAS", "cmocka", "MPI", "CUDA"):
            self.assertIn(word, said)
        self.assertIn("-lcjson", written)
        self.assertIn("CC := ", written)

    def test_a_home_that_is_no_folder_is_refused(self):
        for name in HOMES:
            with self.subTest(name):
                status, said, error, written = probe(**{name: "/no such folder"})
                self.assertEqual(status, 1)
                self.assertTrue(error.startswith(f"error: {name}=/no such folder"), error)
                self.assertEqual(error.count("\n"), 1)
                self.assertIsNone(written)

    def test_a_compiler_that_does_not_work_is_refused(self):
        status, _, _, written = probe(CC="/bin/false")
        self.assertEqual(status, 1)
        self.assertIsNone(written)


if __name__ == "__main__":
    unittest.main()
