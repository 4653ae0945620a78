"""Arithmetic of cupy's arrays on the GPUs of ``doubles.gpu``: what numpy makes of their memory, enqueued.

As cupy does, it refuses to mix with numpy's arrays, and to record calls of CUDA's libraries in a graph: matrix
products, solvers and random numbers.  Whatever a result's shape and dtype depend on but the shapes and dtypes of what
it is made of is missing here.
"""

import ctypes
import operator

import cupy
import numpy as np

from doubles import gpu

OPERATORS = "add sub mul truediv pow matmul eq ne lt le gt ge and or xor".split()
REDUCTIONS = "sum mean max min argmax argmin".split()
LIBRARIES = {
    **dict.fromkeys("matmul dot vdot inner outer tensordot einsum".split(), "cuBLAS"),
    **dict.fromkeys("solve inv lstsq svd qr eigh cholesky".split(), "cuSOLVER"),
}
RANDOM = "random standard_normal uniform normal randint".split()


def place(x):
    """Where an array's elements are, without keeping them there: whoever frees it meanwhile has made a mistake."""
    return x.data.ptr, x.shape, x.dtype, x.strides


def look(pointer, shape, dtype, strides):
    """The elements at a place."""
    span = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + dtype.itemsize if all(shape) else 0
    raw = (ctypes.c_char * span).from_address(pointer) if span else b""
    return np.ndarray(shape, dtype, raw, strides=strides)


class Place(tuple):
    """Of an array among arguments."""


def each(given, change):
    """Arguments with all arrays in them changed."""
    if isinstance(given, tuple | list) and not isinstance(given, Place):
        return type(given)(each(x, change) for x in given)
    return change(given)


def arrays_as_places(x):
    if isinstance(x, np.ndarray):
        raise TypeError(f"Unsupported type {type(x)}: cupy does not mix with it")
    return Place(place(x)) if isinstance(x, cupy.ndarray) else x


def zeros_there(x):
    return np.zeros(x[1], x[2]) if isinstance(x, Place) else x


def elements_there(x):
    return look(*x) if isinstance(x, Place) else x


def refuse_in_capture(library):
    """What each of cupy's wrappers of a library's functions does first."""
    if cupy.cuda.get_current_stream().is_capturing():
        raise NotImplementedError(f"calling {library} API during stream capture is currently unsupported")


def compute(name, function, *given, **options):
    """A new array, which has what the function makes of the arguments when the stream comes to it."""
    if name in LIBRARIES:
        refuse_in_capture(LIBRARIES[name])
    places = each(given, arrays_as_places)
    with np.errstate(all="ignore"):
        like = np.asarray(function(*each(places, zeros_there), **options))
    found = cupy.empty(like.shape, like.dtype)
    write(name, found, lambda: function(*each(places, elements_there), **options))
    return found


def write(name, to, make):
    """Enqueue that an array becomes what ``make()`` returns."""
    there = place(to)

    def run():
        with np.errstate(all="ignore"):
            look(*there)[...] = make()

    gpu.machine().enqueue(name, run)


def method(name, function):
    """A method, or an operator, of arrays."""

    def call(self, *given, **options):
        return compute(name, function, self, *given, **options)

    return call


def reflected(name, function):
    return lambda self, other: compute(name, function, other, self)


def in_place(name, function):
    def call(self, other):
        mine, others = place(self), arrays_as_places(other)
        write(name, self, lambda: function(look(*mine), elements_there(others)))
        return self

    return call


def getting(plain):
    """By slices a view, as always, else a copy."""

    def get(self, key):
        keys = key if isinstance(key, tuple) else (key,)
        if any(isinstance(k, cupy.ndarray | np.ndarray | list) for k in keys):
            return compute("take", operator.getitem, self, key)
        return plain(self, key)

    return get


def put(self, key, value):
    mine, places, others = place(self), each(key, arrays_as_places), arrays_as_places(value)

    def run():
        look(*mine)[each(places, elements_there)] = elements_there(others)

    gpu.machine().enqueue("put", run)


def reshaping(plain):
    """A view where that is possible, as always, else a copy."""

    def reshape(self, *shape, **options):
        if self.flags.c_contiguous:
            return plain(self, *shape, **options)
        return compute("reshape", lambda x: x.reshape(*shape), self)

    return reshape


def ufunc(self, function, how, *given, out=None, **options):
    """What numpy's functions do when they are given such arrays."""
    assert how == "__call__"
    assert out is None
    return compute(function.__name__, function, *given, **options)


def function(self, function, types, given, options):
    return compute(function.__name__, function, *given, **options)


def value(kind):
    return lambda self: kind(asnumpy(self).item())


def asnumpy(x):
    """A copy, for which the host waits."""
    cupy.cuda.get_current_stream().synchronize()
    return look(*place(x)).copy()


def asarray(x, dtype=None, copy=None, subok=False):
    assert not copy
    return x if isinstance(x, cupy.ndarray) else gpu.array(x, dtype)


def ascontiguousarray(x):
    return x if x.flags.c_contiguous else compute("ascontiguousarray", np.ascontiguousarray, x)


def zeros(shape, dtype=float):
    return gpu.array(np.zeros(shape, dtype))


def drawing(name):
    """One of cupy.random's functions."""

    def draw(*given, **options):
        refuse_in_capture("cuRAND")
        return gpu.array(getattr(np.random.default_rng(0), name.replace("randint", "integers"))(*given, **options))

    return draw


def install(patch=setattr):
    """Let arrays do so from now on, in this process; with a monkeypatch's ``setattr`` until that is undone."""
    array = cupy.ndarray
    for name in OPERATORS:
        function_of = getattr(operator, f"{name}_" if name in ("and", "or") else name)
        patch(array, f"__{name}__", method(name, function_of))
        if name not in ("eq", "ne", "lt", "le", "gt", "ge"):
            patch(array, f"__r{name}__", reflected(name, function_of))
            if name != "matmul":
                patch(array, f"__i{name}__", in_place(name, function_of))
    for name in REDUCTIONS:
        patch(array, name, method(name, getattr(np, name)))
    for name, double in {
        "__neg__": method("neg", operator.neg),
        "__getitem__": getting(array.__getitem__),
        "reshape": reshaping(array.reshape),
        "__setitem__": put,
        "__float__": value(float),
        "__int__": value(int),
        "__bool__": value(bool),
        "__array_ufunc__": ufunc,
        "__array_function__": function,
        "astype": method("astype", lambda x, dtype: x.astype(dtype)),
        "copy": method("copy", np.copy),
    }.items():
        patch(array, name, double)
    for name, double in {
        "array": asarray,
        "asarray": asarray,
        "ascontiguousarray": ascontiguousarray,
        "asnumpy": asnumpy,
        "zeros": zeros,
        "pad": method("pad", np.pad),
        "dot": method("dot", np.dot),
        "tensordot": method("tensordot", np.tensordot),
    }.items():
        patch(cupy, name, double)
    for name in RANDOM:
        patch(cupy.random, name, drawing(name))
