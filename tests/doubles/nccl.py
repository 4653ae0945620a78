"""cupy.cuda.nccl on the GPUs of ``doubles.gpu``: raw pointers into host memory, enqueued on the given stream.

The ranks of an id meet on a board: in memory if they are threads of one process, else in a folder that is named after
the id.  A call's contribution is read when its stream comes to it, and its result is written when all ranks' are there.
All ranks must make the same calls, on memory that is allocated then and when the stream comes to it.  Sums go around in
a ring: each part of an array starts at another rank, and halves are rounded at every hop.

A host waits for the others where NCCL may let it wait: at a communicator's first call, for which they connect, and when
it is destroyed.  An abort waits for nobody, and what others have still to read of this rank is gone.
"""

import collections
import contextlib
import ctypes
import json
import os
import pathlib
import queue
import secrets
import shutil
import tempfile
import threading
import time
import weakref

import ml_dtypes
import numpy as np
from cupy.cuda import nccl as real

import distopt.comm.nccl as ours
from doubles import gpu, nccl_buffers

DTYPES = {
    real.NCCL_UINT8: np.uint8,
    real.NCCL_INT8: np.int8,
    real.NCCL_INT32: np.int32,
    real.NCCL_INT64: np.int64,
    real.NCCL_FLOAT16: np.float16,
    real.NCCL_FLOAT32: np.float32,
    real.NCCL_FLOAT64: np.float64,
    real.NCCL_BFLOAT16: ml_dtypes.bfloat16,
}
UNHANDLED_CUDA_ERROR, INVALID_USAGE, REMOTE_ERROR, IN_PROGRESS = 1, 5, 6, 7


class Faults:
    """What goes wrong, and where; a test sets it and ``install`` forgets it."""

    def __init__(self):
        self.version = 22809
        self.id = False  # making one fails
        self.start = None  # the rank on which a communicator cannot be made
        self.never = None  # the rank on which making one never comes back
        self.asynchronous = {}  # rank and number of one of its communicators -> (after how many calls, which status)
        self.refuses = None  # a rank whose next call is refused
        self.abort = 0.0  # seconds that an abort takes
        self.patience = 20.0  # seconds for all ranks to meet


faults = Faults()
boards = None  # a function of an id
_memory_lock = threading.Lock()
_memory: dict[bytes, dict] = {}
_made = collections.Counter()  # communicators, by rank
_group = threading.local()


class Memory:
    """A board for the threads of a process."""

    def __init__(self, unique_id):
        with _memory_lock:
            self.posts = _memory.setdefault(unique_id, {})

    def post(self, key, content):
        assert key not in self.posts, f"{key} is posted already"
        self.posts[key] = content

    def see(self, key):
        return self.posts.get(key)

    def overwrite(self, key, content):
        self.posts[key] = content

    def remove(self, key):
        self.posts.pop(key, None)

    def close(self):
        pass


class Folder:
    """A board for processes: one file for each post, there when it is complete."""

    def __init__(self, unique_id):
        self.path = pathlib.Path(tempfile.gettempdir()) / f"nccl-double-{unique_id[:16].hex()}"
        self.path.mkdir(exist_ok=True)

    def post(self, key, content):
        draft = self.path / f"{key}.draft"
        draft.write_bytes(content)
        os.rename(draft, self.path / key)

    overwrite = post

    def see(self, key):
        with contextlib.suppress(FileNotFoundError):
            return (self.path / key).read_bytes()

    def remove(self, key):
        (self.path / key).unlink(missing_ok=True)

    def close(self):
        """Whoever leaves last finds nothing but farewells."""
        with contextlib.suppress(FileNotFoundError):  # two who leave at once are both the last
            self._leave()

    def _leave(self):
        self.post(f"left {os.getpid()}", b"")
        here = [f.name for f in self.path.iterdir()]
        if sum(name.startswith("left") for name in here) == sum(name.startswith("born") for name in here):
            shutil.rmtree(self.path, ignore_errors=True)


def array(pointer, count, dtype):
    n = count * np.dtype(dtype).itemsize
    return np.frombuffer((ctypes.c_char * n).from_address(pointer) if n else bytearray(), dtype)


def check_memory(pointer, count, dtype):
    nbytes = count * np.dtype(dtype).itemsize
    assert gpu.allocated(pointer, nbytes), f"{nbytes} bytes at {pointer:#x} are not allocated (any more)"


def ring_sum(parts):
    """Parts of an array start at different ranks, as in a ring, and are rounded at every hop."""
    found = np.empty_like(parts[0])
    for start, cut in enumerate(np.array_split(np.arange(found.size), len(parts))):
        if cut.size:
            here = slice(cut[0], cut[-1] + 1)
            total = parts[start][here].copy()
            with np.errstate(over="ignore", invalid="ignore"):
                for hop in range(1, len(parts)):
                    total = (total + parts[(start + hop) % len(parts)][here]).astype(found.dtype)
            found[here] = total
    return found


class Call:
    """One call of one rank.

    When its stream comes to it, which is again at every replay of a graph, ``begin`` gives what this rank posts on the
    board, and the keys that must be there before ``take`` writes the results, given their contents.
    """

    def __init__(self, name, memory, begin, take):
        self.name, self.memory, self.begin, self.take = name, memory, begin, take


class NcclCommunicator:
    """cupy.cuda.nccl.NcclCommunicator."""

    def __init__(self, ndev, commId, rank, config=None):
        assert isinstance(commId, bytes)
        assert len(commId) == 128
        assert 0 <= rank < ndev
        if faults.start == rank:
            raise real.NcclError(2)
        self._n, self._rank, self._gpu = ndev, rank, gpu.machine()
        self.number = _made[rank]  # of this rank's communicators
        _made[rank] += 1
        self.board = boards(commId)
        self.collectives = self.calls = 0
        self.messages: dict[tuple, int] = {}
        self.old: list[str] = []  # own posts that all ranks have seen, once they come to a later one
        self.unread: set[str] = set()  # own posts of which it is not known that all ranks have seen them
        self.connected = self.aborted = self.destroyed = False
        self.comm = id(self)
        self.log = nccl_buffers.library.log  # an end that comes late is not of the next test
        self._meet("born", says=faults.never != rank)

    def _meet(self, word, says=True):
        """The host waits until all ranks have come here."""
        if says:
            self.board.post(f"{word} {self._rank}", b"")
        deadline = time.monotonic() + faults.patience
        while missing := [r for r in range(self._n) if self.board.see(f"{word} {r}") is None]:
            if time.monotonic() > deadline:
                raise real.NcclError(REMOTE_ERROR) from TimeoutError(f"ranks {missing} are not {word}")
            time.sleep(1e-4)

    def rank_id(self):
        return self._rank

    def size(self):
        return self._n

    def device_id(self):
        return self._gpu.number

    # ------------------------------------------------------------------------------------------- calls

    def allReduce(self, send, recv, count, dtype, op, stream):
        self._collective("allReduce", send, recv, count, dtype, (op,), stream, lambda parts: ring_sum(parts))

    def reduce(self, send, recv, count, dtype, op, root, stream):
        mine = recv if root == self._rank else 0
        self._collective("reduce", send, mine, count, dtype, (op, root), stream, lambda parts: ring_sum(parts))

    def broadcast(self, send, recv, count, dtype, root, stream):
        source = send if root == self._rank else recv
        self._collective("broadcast", source, recv, count, dtype, (root,), stream, lambda parts: parts[root])

    def bcast(self, buff, count, dtype, root, stream):
        self.broadcast(buff, buff, count, dtype, root, stream)

    def reduceScatter(self, send, recv, recvcount, dtype, op, stream):
        def mine(parts):
            return ring_sum(parts)[recvcount * self._rank :][:recvcount]

        total = recvcount * self._n
        self._collective("reduceScatter", send, recv, total, dtype, (op,), stream, mine, recvcount)

    def allGather(self, send, recv, count, dtype, stream):
        gathered = count * self._n
        self._collective("allGather", send, recv, count, dtype, (), stream, np.concatenate, gathered)

    def _collective(self, name, send, recv, count, dtype, more, stream, combine, received=None):
        received, kind, rank, n = count if received is None else received, DTYPES[dtype], self._rank, self._n
        assert all(op == real.NCCL_SUM for op in more[:1] if name in ("allReduce", "reduce", "reduceScatter"))
        header = json.dumps([name, count, np.dtype(kind).name, *more]).encode() + b"\n"
        memory = [(send, count, kind)] + [(recv, received, kind)] * bool(recv)

        def begin():
            number, self.collectives = self.collectives, self.collectives + 1
            keys = [f"collective {number} of {r}" for r in range(n)]
            return {keys[rank]: header + array(send, count, kind).tobytes()}, keys

        def take(contents):
            headers, parts = zip(*(c.split(b"\n", 1) for c in contents), strict=True)
            assert len(set(headers)) == 1, f"ranks differ: {headers}"
            if recv:
                array(recv, received, kind)[:] = combine([np.frombuffer(p, kind) for p in parts])

        self._submit(Call(name, memory, begin, take), stream)

    def send(self, buf, count, dtype, peer, stream):
        kind, keys = DTYPES[dtype], []
        header = json.dumps([count, np.dtype(kind).name]).encode() + b"\n"

        def begin():
            keys[:] = [self._message(self._rank, peer)]
            return {keys[0]: header + array(buf, count, kind).tobytes()}, [f"{keys[0]} wanted"]

        def take(contents):
            self.board.remove(f"{keys[0]} wanted")

        self._submit(Call("send", [(buf, count, kind)], begin, take), stream)

    def recv(self, buf, count, dtype, peer, stream):
        kind, keys = DTYPES[dtype], []

        def begin():
            keys[:] = [self._message(peer, self._rank)]
            return {f"{keys[0]} wanted": b""}, keys

        def take(contents):
            header, raw = contents[0].split(b"\n", 1)
            assert json.loads(header) == [count, np.dtype(kind).name], f"recv of {count} {kind}, but send of {header}"
            array(buf, count, kind)[:] = np.frombuffer(raw, kind)
            self.board.remove(keys[0])

        self._submit(Call("recv", [(buf, count, kind)], begin, take), stream)

    def _message(self, source, to):
        assert 0 <= source < self._n
        assert 0 <= to < self._n
        number = self.messages[source, to] = self.messages.get((source, to), 0) + 1
        return f"message {number} from {source} to {to}"

    def _submit(self, call, stream):
        assert not self.aborted
        assert not self.destroyed
        for piece in call.memory:
            check_memory(*piece)
        if faults.refuses == self._rank:
            faults.refuses = None
            raise real.NcclError(INVALID_USAGE)
        self.calls += 1
        if getattr(_group, "depth", 0):
            _group.calls.setdefault((self, stream), []).append(call)
        else:
            self.enqueue([call], stream)

    def enqueue(self, calls, stream):
        """Several calls as one operation: all contribute before one of them waits."""
        mine, done, needs = [], {}, {}
        name = " ".join(sorted({c.name for c in calls}))
        if gpu.gpu_of_stream(stream) is not self._gpu:
            raise real.NcclError(UNHANDLED_CUDA_ERROR)
        if not self.connected:
            self._meet("connected")
            self.connected = True

        def post():
            if self.aborted:
                return
            mine.clear()
            done.clear()
            for call in calls:
                for piece in call.memory:
                    check_memory(*piece)
                posts, keys = call.begin()
                needs[call] = list(keys)
                for key, content in posts.items():
                    self.board.post(key, content)
                    mine.append(key)
            self.unread.update(mine)

        def ready():
            if self.aborted:
                return True
            if self._failing():
                return False
            wanted = [key for call in calls for key in needs[call]]
            for key in wanted:
                if key not in done and (content := self.board.see(key)) is not None:
                    done[key] = content
            return all(key in done for key in wanted)

        def take():
            if self.aborted:
                return
            for call in calls:
                for piece in call.memory:
                    check_memory(*piece)
                call.take([done[key] for key in needs[call]])
            if any(key.startswith("collective") for key in mine):
                for key in self.old:
                    self.board.remove(key)
                self.unread.difference_update(self.old)
                self.old = [key for key in mine if key.startswith("collective")]

        self._gpu.enqueue(f"{name}: given", post, stream)
        self._gpu.enqueue(name, take, stream, ready=ready, outside=True)

    # ------------------------------------------------------------------------------------------- ends

    def _failing(self):
        after, _ = faults.asynchronous.get((self._rank, self.number), (1 << 60, 0))
        return self.calls > after

    def check_async_error(self):
        assert not self.aborted
        assert not self.destroyed
        if self._failing():
            status = faults.asynchronous[self._rank, self.number][1]
            raise KeyError(status) if status >= IN_PROGRESS else real.NcclError(status)

    def abort(self):
        """Tell the kernels to end, and wait for them; in a group, when all of it has been told."""
        self.aborted = True
        self.log.append("abort")
        if getattr(_group, "depth", 0):
            _group.ends.append(self.reclaim)
        else:
            self.reclaim()

    def reclaim(self):
        time.sleep(faults.abort)
        self.log.append("reclaim")
        for key in self.unread:
            content = self.board.see(key)
            if content is not None:
                header, end, elements = content.partition(b"\n")
                self.board.overwrite(key, header + end + bytes([gpu.POISON]) * len(elements))
        self.board.post(f"destroyed {self._rank}", b"")
        self.board.close()

    def destroy(self):
        assert not self.destroyed
        self.destroyed = True
        self.log.append("destroy")
        try:
            self._meet("destroyed")
        finally:
            self.board.close()


def get_unique_id():
    if faults.id:
        raise real.NcclError(2)
    return secrets.token_bytes(128)


def groupStart():
    if not getattr(_group, "depth", 0):
        _group.depth, _group.calls, _group.ends = 0, {}, []
    _group.depth += 1


def groupEnd():
    assert _group.depth > 0, "groupEnd without groupStart"
    _group.depth -= 1
    if not _group.depth:
        for (comm, stream), calls in _group.calls.items():
            comm.enqueue(calls, stream)
        for end in _group.ends:
            end()


def in_a_group():
    """Has this thread left a group open?"""
    return getattr(_group, "depth", 0) > 0


class Helpers:
    """The thread that ends a process's communicators: here one for each rank, which ends with it."""

    def __init__(self):
        self.queues = weakref.WeakKeyDictionary()

    def __call__(self):
        if gpu.process() not in self.queues:
            self.queues[gpu.process()] = jobs = queue.SimpleQueue()
            threading.Thread(target=self.work, args=[jobs], daemon=True).start()
            weakref.finalize(threading.current_thread(), jobs.put, None).atexit = False
        return self.queues[gpu.process()]

    @staticmethod
    def work(jobs):
        for job in iter(jobs.get, None):
            job()

    def cache_clear(self):
        self.queues.pop(gpu.process(), None)


def _engine():
    """The GPUs of a process go on while its host does something else."""
    while True:
        for machine in list(gpu.machines):
            machine.go_on()
        time.sleep(2e-4)


def install(patch=setattr, processes=False):
    """Let cupy.cuda.nccl be this; ``processes``: the ranks are processes instead of threads of this one."""
    global boards
    faults.__init__()
    _memory.clear()
    _made.clear()
    boards = Folder if processes else Memory
    for double in (NcclCommunicator, get_unique_id, groupStart, groupEnd):
        patch(real, double.__name__, double)
    patch(ours, "_alive", gpu.EachRank(list))
    patch(ours, "_helper", Helpers())
    patch(real, "get_version", lambda: faults.version)
    patch(real, "available", True)
    nccl_buffers.install(patch)
    if processes:
        threading.Thread(target=_engine, daemon=True).start()
