#!/usr/bin/env python3
"""dev/bench/blackwell_model.py: sizes counted again from the definitions, sums that add up, and answers that move the right way. Run from the repository root."""
import json, subprocess, sys, unittest

sys.path.insert(0, "dev/bench")
import blackwell_model as model

SHARE = {"bf16": 0.8, "fp4": 0.75, "memory": 0.875, "issue": 0.65, "launch": 2e-6}


def run(*options):
    return subprocess.run([sys.executable, "dev/bench/blackwell_model.py", *options], capture_output=True, text=True)


def with_(card, **changes):
    return {**model.CARDS[card], **changes}


class Model(unittest.TestCase):
    def test_bytes_and_flops_of_a_layer(self):
        """Stored sizes, counted tensor by tensor: codes, scales and BF16 of each operand."""
        M, N, K = 1024, 512, 256
        def packed(r, c): return r * c // 2 + r * c // 16
        k = {x["name"]: x for phase in model.quartet2_kernels(M, N, K).values() for x in phase}
        self.assertEqual(len(k), 11)
        self.assertEqual(k["quantize X"]["bytes"], 2 * M * K + packed(M, K))
        self.assertEqual(k["quantize W"]["bytes"], 2 * N * K + packed(N, K))
        self.assertEqual(k["forward GEMM"]["bytes"], packed(M, K) + packed(N, K) + 2 * M * N)
        self.assertEqual(k["dgrad GEMM"]["bytes"], packed(M, N) + packed(K, N) + 2 * M * K)
        self.assertEqual(k["wgrad GEMM"]["bytes"], packed(N, M) + packed(K, M) + 2 * N * K)
        c = 2 * M * N // 16                                # a BF16 for each block of 16
        self.assertEqual(k["dY both ways"]["bytes"], 2 * M * N + 2 * (M * N // 2 + c))
        self.assertEqual(k["scales of dY"]["bytes"], 2 * (c + M * N // 16))
        self.assertEqual(k["X again"]["bytes"] + k["scales of X"]["bytes"], packed(M, K) + packed(M, K) + 2 * (2 * M * K // 16))
        for kernels in (model.quartet2_kernels(M, N, K), model.bf16_kernels(M, N, K)):
            self.assertEqual(sum(x["flops"] for phase in kernels.values() for x in phase), 3 * 2 * M * N * K)
        b = {x["name"]: x for phase in model.bf16_kernels(M, N, K).values() for x in phase}
        self.assertEqual(len(b), 3)
        self.assertTrue(all(x["bytes"] == 2 * (M * N + N * K + M * K) for x in b.values()))

    def test_weights_are_shared_by_micro_batches(self):
        one, four = ({x["name"]: x for x in model.quartet2_kernels(256, 256, 256, micro_batches=n)["forward"]} for n in (1, 4))
        self.assertEqual(one["quantize W"]["bytes"], 4 * four["quantize W"]["bytes"])
        self.assertEqual(one["quantize X"]["bytes"], four["quantize X"]["bytes"])

    def test_sums_add_up(self):
        for card in model.CARDS.values():
            for size in model.SIZES:
                r = model.predict(size, card, SHARE)
                for recipe in ("bf16", "quartet2"):
                    total = sum(k["seconds"] for k in r["kernels"] if k["recipe"] == recipe)
                    self.assertAlmostEqual(total, r[recipe]["both"], delta=1e-12)
                gemms = sum(k["seconds"] for k in r["kernels"] if k["recipe"] == "quartet2" and k["flops"])
                self.assertAlmostEqual(gemms / r["quartet2"]["both"], r["gemm_share"], places=9)
                self.assertAlmostEqual(r["bf16"]["both"] / r["quartet2"]["both"], r["speedup_both"], places=9)

    def test_a_kernel_takes_its_slowest_bound(self):
        card = {"bf16": 1e3, "fp4": 1e4, "memory": 100.0, "fp32": 20.0}
        full = {"bf16": 1.0, "fp4": 1.0, "memory": 1.0, "issue": 1.0, "launch": 0.5}
        self.assertEqual(model.kernel_seconds(model.kernel("", "", 300.0), card, full), 3.5)
        self.assertEqual(model.kernel_seconds(model.kernel("", "", 300.0, instructions=40.0), card, full), 4.5)
        self.assertEqual(model.kernel_seconds(model.kernel("", "", 300.0, flops=5e4), card, full), 5.5)
        self.assertEqual(model.kernel_seconds(model.kernel("", "", 300.0, flops=5e4, rate="bf16"), card, full), 50.5)

    def test_faster_parts_never_make_it_slower(self):
        for card in model.CARDS:
            for size in model.SIZES:
                for rate in ("memory", "fp32", "fp4", "bf16"):
                    times = [model.predict(size, with_(card, **{rate: model.CARDS[card][rate] * f}), SHARE) for f in (0.25, 0.5, 1, 2, 4)]
                    for recipe in ("bf16", "quartet2"):
                        seconds = [t[recipe]["both"] for t in times]
                        self.assertEqual(seconds, sorted(seconds, reverse=True), (card, size, rate, recipe))
                bandwidth = [model.predict(size, with_(card, memory=model.CARDS[card]["memory"] * f), SHARE)["speedup_both"] for f in (0.5, 1, 2)]
                self.assertEqual(bandwidth, sorted(bandwidth))   # what quantizing costs is bytes; BF16's GEMMs are bound by FLOPs
                self.assertLessEqual(model.predict(size, model.CARDS[card], SHARE)["quartet2"]["both"],
                                     model.predict(size, model.CARDS[card], SHARE, conversions="software")["quartet2"]["both"])

    def test_the_ceiling_is_the_ratio_of_peaks(self):
        """No launches, endless memory and issue: what is left are the GEMMs."""
        share = {"bf16": 1.0, "fp4": 1.0, "memory": 1.0, "issue": 1.0, "launch": 0.0}
        for card, ratio in (("b200", 4.0), ("rtx5090", 8.0)):
            r = model.predict("7B", with_(card, memory=1e30, fp32=1e30), share)
            self.assertAlmostEqual(r["speedup_both"], ratio, places=6)
            self.assertAlmostEqual(r["gemm_share"], 1.0, places=6)
            self.assertTrue(all(model.predict(s, model.CARDS[card], share)["speedup_both"] < ratio for s in model.SIZES))

    def test_larger_layers_gain_more(self):
        """Quantizing grows with the sides of the matrices, multiplying with their product."""
        for card in model.CARDS.values():
            gains = [model.predict(s, card, SHARE)["speedup_both"] for s in model.SIZES]
            self.assertEqual(gains, sorted(gains))

    def test_implied_share_gives_the_speedup(self):
        card = model.CARDS["rtx5090"]
        for size, paper in model.PAPER["rtx5090"].items():
            share = model.implied_fp4(size, paper, card, SHARE)
            self.assertAlmostEqual(model.predict(size, card, {**SHARE, "fp4": share})["speedup_both"], paper, places=6)
        self.assertIsNone(model.implied_fp4("7B", 1000.0, card, SHARE))

    def test_what_it_prints(self):
        text = run()
        self.assertEqual(text.returncode, 0, text.stderr)
        self.assertIn("not measured", text.stdout)
        for card in model.CARDS.values():
            self.assertIn(card["source"], text.stdout)
        data = json.loads(run("--json", "--card", "rtx5090", "--tokens", "8192").stdout)
        self.assertEqual(data["tokens"], 8192)
        self.assertEqual([r["size"] for r in data["results"]["rtx5090"]], list(model.SIZES))
        self.assertEqual([r["paper"] for r in data["results"]["rtx5090"]], [3.1, 3.6, 3.9, 4.2])
        self.assertGreater(len(data["assumptions"]), 8)
        self.assertTrue(all(len(x) == 3 and all(x) for x in data["assumptions"]))
        kernels = run("--kernels", "--card", "b200").stdout
        for k in data["results"]["rtx5090"][0]["kernels"]:
            self.assertIn(k["name"], kernels)

    def test_what_it_refuses(self):
        for options in (["--card", "h100"], ["--tokens", "0"], ["--bf16-gemm", "0"], ["--memory", "nan"], ["--launch-us", "-1"], ["--issue", "x"], ["more"]):
            r = run(*options)
            self.assertEqual(r.returncode, 2, options)
            self.assertEqual(r.stdout, "")


if __name__ == "__main__":
    unittest.main()
