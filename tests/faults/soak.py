"""Many steps in random modes with periodic faults: ``distopt run -n 4 tests/faults/soak.py [STEPS]``.

Each fault is refused on all ranks and leaves no trace, so the run ends with the bits of one without faults; memory
stays as it is.
"""

import hashlib
import resource
import sys
import time
from pathlib import Path

import numpy as np

import distopt
from distopt.compress import DeepGradientCompression, ErrorFeedback, Half, Packed, Threshold, TopK

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000
SHAPES = ((300, 20), (300,), (1000,), (), (64, 3, 3))
COMPRESSORS = (
    None,
    Half(),
    ErrorFeedback(Half("bfloat16")),
    ErrorFeedback(TopK(0.01)),
    TopK(0.05, per_tensor=True),
    ErrorFeedback(Threshold(1.5)),
    ErrorFeedback(Packed(TopK(0.02), value="int8")),
    DeepGradientCompression(Packed(TopK(0.01)), weight_decay=1e-3),
)
FAULTS = ("nan", "shape", "dtype", "raise", "missing", "unknown", "mode", "threshold")
world = distopt.world()


def resident():
    """Megabytes that this process has now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def spoiled(fault, pairs):
    """What one rank's backward pass yields."""
    match fault:
        case "nan":
            pairs[1][1][7] = np.nan
        case "shape":
            pairs[1] = pairs[1][0], np.zeros(301, np.float32)
        case "dtype":
            pairs[1] = pairs[1][0], np.zeros(300)
        case "missing":
            del pairs[2]
        case "unknown":
            pairs.append((distopt.Parameter("stranger", np.zeros(3, np.float32)), np.zeros(3, np.float32)))
    yield from pairs
    if fault == "raise":
        raise KeyError("lost")


def run(with_faults):
    """Digests of the parameters, and memory at a tenth of the run and at its end."""
    rng = np.random.default_rng(1)  # alike on all ranks
    params = [distopt.Parameter(f"p{k}", np.zeros(s, np.float32)) for k, s in enumerate(SHAPES)]
    opt = distopt.DistOpt(distopt.optim.RMSProp(lr=1e-3), world, threshold=2000, check_every=100)
    refused = early = 0
    for step in range(STEPS):
        mine = np.random.default_rng([step, world.rank])
        compressor = COMPRESSORS[rng.integers(len(COMPRESSORS))]
        culprit, fault = int(rng.integers(world.size)), FAULTS[step // 50 % len(FAULTS)]
        if rng.random() < 0.002:
            opt.threshold = int(rng.choice([0, 500, 2000, 10**6]))
        grads = [mine.standard_normal(s).astype(np.float32) for s in SHAPES]
        if with_faults and step % 50 == 49:
            bad = fault if world.rank == culprit else ""
            kept, other = opt.threshold, TopK(0.5) if bad == "mode" else compressor
            opt.threshold += bad == "threshold"
            try:
                opt.step(spoiled(bad, [(p, g.copy()) for p, g in zip(params, grads, strict=True)]), other)
            except (ValueError, TypeError, FloatingPointError, RuntimeError):
                refused += 1
            opt.threshold = kept
        opt.step(zip(params, grads, strict=True), compressor)
        if step == STEPS // 10:
            early = resident()
    opt.close()
    digest = hashlib.sha256(b"".join(p.data.tobytes() for p in params)).hexdigest()
    return digest, refused, early, resident()


started = time.monotonic()
digest, refused, early, late = run(with_faults=True)
expected, *_ = run(with_faults=False)
assert digest == expected, "a refused step has left a trace"
assert set(world.control.gather(digest)) == {digest}, "ranks differ"
assert refused == STEPS // 50, refused
assert late - early < 8, f"memory grew from {early:.1f} to {late:.1f} MB"
if world.rank == 0:
    print(f"{STEPS} steps, {refused} refused, {early:.1f} MB -> {late:.1f} MB, {time.monotonic() - started:.0f} s")
