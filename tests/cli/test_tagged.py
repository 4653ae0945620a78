"""Output of several ranks: whole lines, nothing lost, whoever holds a pipe open, or reads no more."""

import os
import threading

import pytest

from distopt.run.tagged import Tagged


def copied(out, tagged):
    """All that is written to a pipe; both of its ends are closed then."""
    read, write = out
    pieces = []
    reader = threading.Thread(target=lambda: pieces.extend(iter(lambda: os.read(read, 1 << 16), b"")))
    reader.start()
    tagged.close()
    os.close(write)
    reader.join(10)
    os.close(read)
    return b"".join(pieces)


def test_lines_are_whole_however_they_come():
    out, one, two = os.pipe(), os.pipe(), os.pipe()
    tagged = Tagged({one[0]: 1, two[0]: 2}, out[1])
    for piece in (b"a", b"b\n\nc", b"\xff\n"):
        os.write(one[1], piece)
        os.write(two[1], piece.upper())
    os.write(two[1], b"the end")
    os.close(one[1])
    os.close(two[1])
    lines = copied(out, tagged).splitlines()
    assert [line for line in lines if line[1:2] == b"1"] == [b"[1] ab", b"[1] ", b"[1] c\xff"]
    assert [line for line in lines if line[1:2] == b"2"] == [b"[2] AB", b"[2] ", b"[2] C\xff", b"[2] the end"]
    assert len(lines) == 7


def test_a_pipe_that_somebody_holds_open_does_not_delay_the_end():
    out, held = os.pipe(), os.pipe()
    tagged = Tagged({held[0]: 0}, out[1])
    os.write(held[1], b"one\ntwo")
    assert copied(out, tagged) == b"[0] one\n[0] two\n"
    os.close(held[1])


def test_more_lines_than_a_pipe_takes_at_once():
    out, pipe = os.pipe(), os.pipe()
    os.set_blocking(out[1], False)
    tagged = Tagged({pipe[0]: 3}, out[1])
    lines = [f"{k} " + "x" * (k * 37 % 9000) for k in range(100)]
    text = "\n".join(lines).encode()

    def write():
        rest = text
        while rest:
            rest = rest[os.write(pipe[1], rest) :]
        os.close(pipe[1])

    writer = threading.Thread(target=write)
    writer.start()
    read = []
    reader = threading.Thread(target=lambda: read.extend(iter(lambda: os.read(out[0], 1000), b"")))
    reader.start()
    writer.join(10)
    tagged.close()
    os.close(out[1])
    reader.join(10)
    os.close(out[0])
    assert b"".join(read).decode() == "".join(f"[3] {line}\n" for line in lines)


def test_ranks_cannot_write_when_nobody_reads_any_more():
    out, pipe = os.pipe(), os.pipe()
    tagged = Tagged({pipe[0]: 0}, out[1])
    os.close(out[0])
    os.write(pipe[1], b"one\n")
    tagged.close()
    with pytest.raises(BrokenPipeError):
        os.write(pipe[1], b"two\n")
    os.close(pipe[1])
    os.close(out[1])
