"""Are the parameters of all ranks the same bits, as they should be?"""

import json
import zlib
from collections import Counter
from collections.abc import Mapping

import numpy as np

from distopt import device
from distopt.comm.control import ControlChannel, agreed, fingerprint


def check_divergence(control: ControlChannel, values: Mapping[str, np.ndarray], when: str) -> None:
    """Compare the ranks' parameters by checksum; RuntimeError on every rank alike if they differ.  Collective."""
    # A memory error, a script that changes parameters on one rank, or an optimizer that rolls dice makes them differ,
    # and no gradient ever brings them together again.
    on_host = [device.host_copy(v) if device.on_gpu(v) else v for v in values.values()]
    sums = [zlib.crc32(v.reshape(-1).view(np.uint8).data) for v in on_host]
    name = f"comparing parameters {when}"
    digests = control.vote(name, 0, list, report=f"{fingerprint(map(str, sums)):x}")
    if len(set(digests)) > 1:
        everyone = [json.loads(text) for text in control.vote(name, 1, list, report=json.dumps(sums))]
        first = next((n, row) for n, *row in zip(values, *everyone, strict=True) if len(set(row)) > 1)
        raise agreed(RuntimeError(f"ranks have diverged {when}: {_minority(*first)}"), control.rank == 0)


def _minority(name: str, row: list[int]) -> str:
    """Who differs; of two equal halves it is the one without rank 0."""
    common = max(Counter(row).items(), key=lambda item: (item[1], item[0] == row[0]))[0]
    differing = [rank for rank, value in enumerate(row) if value != common]
    ranks = f"rank{'s' * (len(differing) > 1)} {', '.join(map(str, differing))}"
    return f"{name} differs on {ranks} from the other {len(row) - len(differing)}"
