"""A run that saves and resumes: what faults are done to.  ``saving.py FOLDER STEPS EVERY [MODE]``."""

import hashlib
import sys
import time

import numpy as np

import distopt
from distopt.compress import ErrorFeedback, Packed, TopK

STEPS = {
    "dense": lambda opt, loss: opt(loss),
    "topk": lambda opt, loss: opt.backward_and_sparse_update(loss, spars=0.05, topK=True),
    "partial": lambda opt, loss: opt.backward_and_partial_update(loss),
}
LOCAL = {  # whose steps are ``opt(loss)``
    "local": {"every": 7, "compressor": ErrorFeedback(Packed(TopK(0.05)))},
    "streaming": {"every": 6, "fragments": 3, "delay": 4, "alpha": 0.5},
}


def train(folder, steps, every, mode="topk"):
    """Go on from what is saved in a folder, up to a number of steps; return a digest of the parameters."""
    world, steps, every = distopt.world(), int(steps), int(every)
    params = [distopt.Parameter(f"p{k}", np.zeros(n, np.float32)) for k, n in enumerate((1000, 30, 5000))]
    make = distopt.LocalSteps if mode in LOCAL else distopt.DistOpt
    opt = make(distopt.optim.Adam(lr=0.01), world, threshold=2000, **LOCAL.get(mode, {}))
    opt.save_when_stopped(folder, params, lambda: {"ended after": opt.step_counter})
    extra, step = opt.load(folder, params), STEPS.get(mode, STEPS["dense"])
    print(f"from step {opt.step_counter} with {extra}", flush=True)
    for k in range(opt.step_counter, steps):
        rng = np.random.default_rng([k, world.rank])
        step(opt, [(p, rng.standard_normal(p.data.shape).astype(np.float32)) for p in params])
        if every and (k + 1) % every == 0:
            opt.save(folder, params)
        time.sleep(0.002)
    digest = hashlib.sha256(b"".join(p.data.tobytes() for p in params)).hexdigest()
    print(f"digest {digest} after {opt.step_counter} steps")
    return digest


if __name__ == "__main__":
    train(*sys.argv[1:])
