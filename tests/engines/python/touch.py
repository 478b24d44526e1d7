"""Maps every tensor of a model through blobd's socket and reads every page: `touch.py MODEL`.

Accesses the maps like an engine, without computing. Like every engine here, it prints `ready PID "TEXT"`, then keeps
the weights loaded until its standard input ends.
"""

import json
import mmap
import os
import sys

import blobd


def main() -> None:
    with blobd.open(sys.argv[1]) as model:
        maps = [model[tensor.name] for tensor in model.tensors]
        total = sum(sum(view[:: mmap.PAGESIZE]) + view[-1] for view in maps)
        text = f"{len(maps)} tensors, {sum(map(len, maps))} bytes, {total:x}"
        print("ready", os.getpid(), json.dumps(text), flush=True)
        sys.stdin.read()


main()
