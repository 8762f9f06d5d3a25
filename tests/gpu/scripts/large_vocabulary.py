"""The model of ``recomputing.py`` with few blocks and a large vocabulary: ``MODE [STEPS]``."""

from __future__ import annotations

import json
import os
import sys

import recomputing

import umem

recomputing.WORDS, recomputing.LAYERS, recomputing.ROWS = 128_256, 4, 4

if __name__ == "__main__":
    if "UMEM_POLICY" in os.environ:
        umem.enable(os.environ["UMEM_POLICY"])
    print(json.dumps(recomputing.main(sys.argv[1], int(sys.argv[2]))))
