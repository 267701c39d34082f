#!/usr/bin/env python3
"""An independent reader of safetensors, for the tests: prints name, dtype, shape and each value's float32 bits, a line a tensor."""
import json, struct, sys

data = open(sys.argv[1], "rb").read()
(length,) = struct.unpack("<Q", data[:8])
header = json.loads(data[8:8 + length])
assert length % 8 == 0 and header.pop("__metadata__") == {"format": "pt"}
for name, t in header.items():
    begin, end = (8 + length + o for o in t["data_offsets"])
    code, shift = {"F32": ("I", 0), "BF16": ("H", 16)}[t["dtype"]]
    values = struct.unpack(f"<{(end - begin) // struct.calcsize(code)}{code}", data[begin:end])
    print(name, t["dtype"], *t["shape"], ":", *(f"{v << shift:08x}" for v in values))
