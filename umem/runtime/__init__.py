"""The allocator in this process: native library, classification, statistics, hints, CUDA calls."""
