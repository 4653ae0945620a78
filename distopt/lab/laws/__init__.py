"""The laws of training, which hold for every mode, optimizer and communicator (docs/concepts/laws.md).

1. Conservation: what a compressor sends and what it keeps are what it was given.
2. Nothing is lost: what was applied and what all ranks keep are the sum of all gradients.
3. N ranks are one rank with the whole batch.
4. A plan is a partition of the parameters.
5. All ranks hold the same bits.
6. Independence: threshold, overlap, sharding and capture change no bit.
7. Resuming is never having stopped.
8. The device computes the bits of the host.

The tests and ``distopt prove`` call the same functions: ``arrays`` has those of one array, ``ranks`` those of a
communicator, and ``references`` what both are held against, in numpy's float64.
"""
