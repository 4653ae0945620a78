"""Text that everybody has who has Python: the sources of its standard library, as bytes.

Some files are held out.  None of these has much that training files have too, and losses on them are comparable between
trainings on the same text alone: ``text.json`` has the SHA-256 of those that are known, by version of Python.
"""

import functools
import hashlib
import json
import platform
import sysconfig
from pathlib import Path
from typing import NamedTuple

import numpy as np

CONTEXT = 128  # bytes that a prediction sees at most
KNOWN = Path(__file__).with_name("text.json")
# What some systems leave out or make themselves, what is no text, and tests.
LEFT_OUT = {
    *("test", "tests", "idle_test", "idlelib", "lib2to3", "distutils", "tkinter", "turtledemo", "ensurepip"),
    *("encodings", "pydoc_data", "site-packages", "dist-packages", "__pycache__"),
}
LONG = 30  # characters of a line that is counted as a copy, if another file has it
COPIED = 0.25  # of the long lines of a file that is not held out


class Text(NamedTuple):
    """Bytes to train on and bytes to be tested on, with the names of the files that are held out."""

    training: np.ndarray
    held_out: np.ndarray
    names: list

    def sha256(self):
        return hashlib.sha256(self.training.tobytes() + self.held_out.tobytes()).hexdigest()


@functools.cache
def read():
    """The text of this Python: one file of twenty is held out, by a hash of its name."""
    root, texts = Path(sysconfig.get_path("stdlib")), {}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if not (LEFT_OUT & set(name.parts) or name.parts[0].startswith(("config-", "_sysconfigdata"))):
            texts[name.as_posix()] = path.read_bytes()
    aside = {name for name in texts if hashlib.sha256(name.encode()).digest()[0] < 256 // 20}
    lines = {line for name in texts if name not in aside for line in long_lines(texts[name])}
    held_out = []
    for name in sorted(aside):
        found = long_lines(texts[name])
        if sum(line in lines for line in found) <= COPIED * len(found):
            held_out.append(name)
    parts = ([texts[name] for name in texts if name not in aside], [texts[name] for name in held_out])
    return Text(*(np.frombuffer(b"\0".join(part), np.uint8) for part in parts), held_out)


def long_lines(text):
    return [line for line in map(bytes.strip, text.splitlines()) if len(line) >= LONG]


def windows(text):
    """As many stretches of CONTEXT bytes as there are, each with the byte that follows it: ``(n, CONTEXT + 1)``."""
    starts = CONTEXT * np.arange((len(text) - 1) // CONTEXT)
    return np.lib.stride_tricks.sliding_window_view(text, CONTEXT + 1)[starts]


def known():
    """The hash of this text, if it is the one that ``text.json`` has for this version of Python; else ''."""
    found = json.loads(KNOWN.read_text()).get(platform.python_version(), {}).get("sha256", "")
    return found if found == read().sha256() else ""


if __name__ == "__main__":  # notes the text of this Python
    text = read()
    every = json.loads(KNOWN.read_text()) if KNOWN.exists() else {}
    sizes = {"training bytes": len(text.training), "held-out bytes": len(text.held_out)}
    every[platform.python_version()] = {"sha256": text.sha256(), **sizes, "held out": text.names}
    KNOWN.write_text(json.dumps(every, indent=1, sort_keys=True) + "\n")
    print(platform.python_version(), sizes, text.names)
