#!/usr/bin/env python3
"""--init-from in the trainer: a run that begins with another run's weights, whole or split into shards, is that model. TRAINER names the
program. Uses the runs and helpers of test_trainer.py."""

import json
import os
import struct
import unittest

import test_trainer as t

setUpModule, tearDownModule = t.setUpModule, t.tearDownModule


def split(folder, into):
    """The folder's model.safetensors as two shards and an index, written by the format's description alone."""
    data = t.read(os.path.join(folder, "model.safetensors"))
    length = struct.unpack("<Q", data[:8])[0]
    header, values = json.loads(data[8:8 + length]), data[8 + length:]
    names = sorted(n for n in header if n != "__metadata__")
    weight_map = {}
    for part, mine in enumerate((names[::2], names[1::2]), 1):
        file, new, body = f"model-0000{part}-of-00002.safetensors", {}, b""
        for n in mine:
            begin, end = header[n]["data_offsets"]
            new[n] = {**header[n], "data_offsets": [len(body), len(body) + end - begin]}
            body += values[begin:end]
            weight_map[n] = file
        text = json.dumps(new).encode()
        t.write(os.path.join(into, file), struct.pack("<Q", len(text)) + text + body)
    t.write(os.path.join(into, "model.safetensors.index.json"), json.dumps({"metadata": {}, "weight_map": weight_map}).encode())
    t.write(os.path.join(into, "config.json"), t.read(os.path.join(folder, "config.json")))


class InitFrom(t.TrainerTest):
    def test_it_is_that_model(self):
        """One step at a rate of 1e-12: stochastic rounding moves a BF16 weight w by an ulp (2^-8 |w|) with probability at most
        1e-12 / 2^-9 |w|, that is for |w| >= 1e-5 one in 10^4 at most, each changing the loss far less than 1e-6."""
        options = {"recipe": "bf16", "val_data": t.at("data", "val_*.bin"), "eval_tokens": 2048}
        source, shards = t.fresh(), t.fresh()
        self.succeeds(out=source, steps=20, lr=1e-2, eval_every=20, save_every=20, **options)
        trained = t.log_lines(source)[-1]["val_loss"]
        split(t.checkpoint(source, 20), shards)
        for folder in (t.checkpoint(source, 20), shards):
            for model in (t.at("model.json"), None):  # None: the folder's config.json says it
                out = t.fresh()
                r = self.succeeds(out=out, model=model, steps=1, lr=1e-12, weight_decay=0, warmup=0, eval_every=1, init_from=folder, **options)
                self.assertIn(f"initial weights from {folder}: 12 tensors", r.stdout)
                self.assertAlmostEqual(t.log_lines(out)[-1]["val_loss"], trained, delta=1e-5)
        out = t.fresh()
        self.succeeds(out=out, steps=1, lr=1e-12, eval_every=1, **options)
        self.assertGreater(t.log_lines(out)[-1]["val_loss"], trained + 0.5)  # the seed's weights: the comparison can fail

    def test_a_resumed_run_does_not_begin_again(self):
        source, out, again = t.fresh(), t.fresh(), t.fresh()
        self.succeeds(out=source, steps=4, save_every=4)
        options = {"steps": 6, "save_every": 3, "init_from": t.checkpoint(source, 4)}
        whole = t.fresh()
        self.succeeds(out=whole, **options)
        self.succeeds(out=out, **options)
        r = self.succeeds(out=again, resume=t.checkpoint(out, 3), **options)
        self.assertNotIn("initial weights", r.stdout)
        self.assertEqual(t.folder_sums(t.checkpoint(again, 6)), t.folder_sums(t.checkpoint(whole, 6)))

    def test_refused(self):
        source = t.fresh()
        self.succeeds(out=source, steps=2, save_every=2)
        wide = t.write_json("wide model.json", {**t.MODEL, "ffn": 256})
        self.fails(1, "ffn is 128 there and 256", "config.json", model=wide, init_from=t.checkpoint(source, 2))
        self.fails(1, t.at("nothing"), "config.json", "No such file", init_from=t.at("nothing"))


if __name__ == "__main__":
    unittest.main()
