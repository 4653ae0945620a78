"""PTX as C++ for the fibers of ``simt/simt.h``: what NVRTC made of a text runs on the CPU, thread for thread.

Each entry becomes a function whose registers are variables and whose labels are labels; every line of it says by
``#line`` where it stands in the PTX, so that whatever traps names that line.  Statements that no entry of this library
has are refused, not guessed.

PTX ISA 9, sections 8 (memory consistency is not modelled: threads run one at a time) and 9 (instructions).
"""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

TYPES = {
    **{f"u{bits}": f"uint{bits}_t" for bits in (8, 16, 32, 64)},
    **{f"s{bits}": f"int{bits}_t" for bits in (8, 16, 32, 64)},
    **{f"b{bits}": f"uint{bits}_t" for bits in (8, 16, 32, 64)},
    "f32": "float",
    "f64": "double",
    "pred": "bool",
}
SPECIAL = {
    f"%{name}.{axis}": f"{variable}.{axis}"
    for name, variable in (("tid", "threadIdx"), ("ntid", "blockDim"), ("ctaid", "blockIdx"), ("nctaid", "gridDim"))
    for axis in "xyz"
}
COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "lo": "<", "hs": ">="}
OPERATORS = {"add": "+", "sub": "-", "and": "&", "or": "|", "xor": "^"}
FLOATS = ("f32", "f64")
# Functions of ptx.h, each with all that may stand behind its name: of some, any type.
FUNCTIONS = {
    **dict.fromkeys(("div", "rem", "min", "max", "popc", "clz", "bfe", "bfi"), ""),
    **{"brev": "b32", "prmt": "b32", "bfind": "shiftamt.u32", "shf": "r.wrap.b32"},
}

_STATEMENT = re.compile(r"\s*(?:(\$\w+:)|([^;{}]*(?:\{[^;{}]*\}[^;{}]*)*);|([{}]))", re.S)
_ENTRY = re.compile(r"\.visible \.entry (\w+)\((.*?)\)(.*?)\n\{(.*?)\n\}\n", re.S)
_PARAMETER = re.compile(r"\.param (?:\.align \d+ )?\.(\w+) (?:\.ptr \.align \d+ )?(\w+)(?:\[(\d+)\])?")
_SHARED = re.compile(r"\.shared \.align (\d+) \.(\w+) (\w+)(?:\[(\d+)\])?;")
_LOCAL = re.compile(r"\.local \.align (\d+) \.b8 (\w+)\[(\d+)\]$")
_REGISTERS = re.compile(r"\.reg \.(\w+)\s+(%\w+)(?:<(\d+)>)?$")
_MAXIMUM = re.compile(r"\.maxntid (\d+)(?:, (\d+))?(?:, (\d+))?")


class Entry(NamedTuple):
    """A kernel of a module.

    Attributes:
        name: as its text and its ``real`` name it.
        parameters: the bytes of each.
        shared_bytes: of its shared memory, with the gaps between its variables.
        code: ``launch_<name>``, which takes the addresses of the arguments.
    """

    name: str
    parameters: list[int]
    shared_bytes: int
    code: str


def translate(ptx: str, file: str) -> list[Entry]:
    """Return the entries of a module; ``file``: what traps calls it.  ValueError for what no rule is known for."""
    return [_entry(found, ptx, file) for found in _ENTRY.finditer(ptx)]


def size_of(kind: str) -> int:
    """The bytes of a type."""
    return int(kind[1:]) // 8


def _entry(found: "re.Match[str]", ptx: str, file: str) -> Entry:
    name, parameters, directives, body = found.groups()
    sizes = {
        parameter: (number, size_of(kind) * int(count or 1))
        for number, (kind, parameter, count) in enumerate(_PARAMETER.findall(parameters))
    }
    most = [int(number) for number in _MAXIMUM.search(directives).groups("1")]
    line, shared, end = ptx.count("\n", 0, found.start(4)) + 1, dict[str, tuple[int, int]](), RED
    statements = list(_statements(body, line))
    for alignment, kind, of, count in _SHARED.findall(ptx):
        if re.search(rf"{re.escape(of)}\b", body):
            nbytes = size_of(kind) * int(count or 1)
            end = -(-end // int(alignment)) * int(alignment)
            shared[of] = end, nbytes
            end += nbytes + RED
    variables = ", ".join(f"{{{start}, {nbytes}}}" for start, nbytes in shared.values())
    about = f'"{name}", "{file}", {math.prod(most)}, {len(shared)}, {{{variables}}}'
    lines = [
        f"static const ptx::Entry entry_{name} = {{{about}}};",
        f"static void run_{name}(void *given) {{",
        "  void **const arguments = (void **)given;",
        f"  ptx::begin(entry_{name});",
        f'#line {line} "{file}"',
        "  ptx::check_threads(__LINE__);",
        "  ptx::Order now = {};",
    ]
    translator = _Translator(sizes, {of: start for of, (start, _) in shared.items()})
    for number, text in statements:
        try:
            code = translator.statement(text)
        except (KeyError, ValueError) as error:
            raise ValueError(f"{file}:{number}: no rule for {text!r}: {error!r}") from error
        if code:
            step = "" if text in "{}" or text.endswith(":") or text.startswith(".") else "PTX_STEP "
            lines.append(f'#line {number} "{file}"\n  {step}{code}')
    lines += [
        "}",
        f'extern "C" void launch_{name}(const unsigned *dims, size_t, void **arguments) {{',
        f"  simt::launch(dims, run_{name}, (void *)arguments);",
        "}",
        "",
    ]
    return Entry(name, [nbytes for _, nbytes in sizes.values()], end, "\n".join(lines))


RED = 64  # bytes between shared variables that belong to none of them


def _statements(body: str, line: int) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each statement; a label ends in a colon, and braces are statements."""
    body = re.sub(r"//[^\n]*", "", body)
    at = 0
    while body[at:].strip():
        found = _STATEMENT.match(body, at)
        if found is None:
            raise ValueError(f"line {line + body.count(chr(10), 0, at)}: {body[at : at + 60]!r}")
        label, text, brace = found.groups()
        begin = found.end() - len(found[0].lstrip())
        yield line + body.count("\n", 0, begin), label or brace or " ".join(text.split())
        at = found.end()


class _Translator:
    """Statements of one entry as statements of C++."""

    def __init__(self, parameters: dict[str, tuple[int, int]], shared: dict[str, int]):
        # parameters: number and bytes by name; shared: where variables lie
        self._parameters, self._shared = parameters, shared
        self._kinds = dict[str, str]()  # of registers
        self._pointers = dict[str, str]()  # registers with the address of a parameter
        self._label, self._targets = "", dict[str, list[str]]()  # the last label; what a brx.idx chooses from

    def statement(self, text: str) -> str:
        """Return a statement of C++; '' for what says nothing to a CPU."""
        if text in "{}":
            return text
        if text.endswith(":"):
            self._label = text[:-1]
            return f"{_variable(self._label)}:;"
        if text.startswith(".branchtargets"):
            self._targets[self._label] = [target.strip() for target in text.partition(" ")[2].split(",")]
            return ""
        if local := _LOCAL.match(text):
            alignment, name, nbytes = local.groups()
            return f"alignas({alignment}) char {name}[{nbytes}];"
        if text.startswith((".pragma", ".shared")):
            return ""
        if registers := _REGISTERS.match(text):
            kind, prefix, count = registers.groups()
            names = [f"{prefix}{k}" for k in range(1, int(count))] if count else [prefix]
            self._kinds.update(dict.fromkeys(names, kind))
            return f"{TYPES[kind]} {', '.join(map(_variable, names))};" if names else ""
        guard, operation, operands = re.match(r"(?:@(!?%\w+)\s+)?([\w.]+)\s*(.*)", text).groups()
        base, *suffixes = operation.split(".")
        found = [part for part in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*", operands)]
        code = getattr(self, f"_{base}", self._arithmetic)(base, suffixes, [part.strip() for part in found])
        if not guard:
            return code
        taken = guard.replace("%", "")
        return f"if ({f'PTX_BRANCH({taken})' if base == 'bra' else taken}) {{ {code} }}"

    # ------------------------------------------------------------------------------------------- operands

    def _value(self, text: str, kind: str) -> str:
        """Return an operand as a value of a type."""
        if text in SPECIAL:
            return f"({TYPES[kind]}){SPECIAL[text]}"
        if text in self._shared:
            return f"({TYPES[kind]}){self._shared[text]}"
        if text.startswith("__local_depot"):
            return f"({TYPES[kind]}){text}"
        if text.startswith("%"):
            variable = _variable(text)
            if kind in FLOATS and self._kinds[text] not in FLOATS:  # clang keeps floats in registers of bits
                return f"ptx::as<{TYPES[kind]}>({variable})"
            return variable if kind in (*FLOATS, "pred") else f"({TYPES[kind]}){variable}"
        if literal := re.fullmatch(r"0([fd])([0-9A-F]+)", text):
            if kind not in FLOATS:
                return f"({TYPES[kind]})0x{literal[2]}ull"
            return f"ptx::{'single' if literal[1] == 'f' else 'real64'}(0x{literal[2]}ull)"
        if literal := re.fullmatch(r"(-?\d+|0x[0-9a-fA-F]+)U?", text):
            return f"({TYPES[kind]}){literal[1]}{'ull' if int(literal[1], 0) >= 1 << 63 else 'll'}"
        raise ValueError(f"operand {text!r}")

    def _address(self, text: str) -> str:
        """Return what stands in brackets as an address, of as many bits as its register: a sum of 32 bits wraps."""
        name, offset = re.fullmatch(r"\[([%\w]+)(?:\+(-?\d+))?\]", text).groups()
        kind = f"u{self._kinds.get(name, 'b64')[1:]}"
        return f"{self._value(name, kind)} + ({TYPES[kind]})({offset or 0}ll)"

    def _assign(self, to: str, kind: str, value: str) -> str:
        """Return what gives a register a value of a type, or the bits of a float."""
        if kind in FLOATS and self._kinds[to] not in FLOATS:
            value = f"ptx::as<{TYPES[self._kinds[to]]}>(({TYPES[kind]})({value}))"
        return f"{_variable(to)} = {value};"

    # ------------------------------------------------------------------------------------------- statements

    def _bra(self, base: str, suffixes: list[str], operands: list[str]) -> str:
        return f"goto {_variable(operands[0])};"

    def _brx(self, base: str, suffixes: list[str], operands: list[str]) -> str:
        index, table = operands
        cases = " ".join(f"case {k}: goto {_variable(to)};" for k, to in enumerate(self._targets[table]))
        return f'switch ({_variable(index)}) {{ {cases} default: ptx::trap("no such branch", __LINE__); }}'

    def _ret(self, base: str, suffixes: list[str], operands: list[str]) -> str:
        return "return;"

    def _mov(self, base: str, suffixes: list[str], operands: list[str]) -> str:
        to, source = operands
        if to.startswith("{") or source.startswith("{"):
            parts = [_variable(part.strip()) for part in max(to, source, key=len).strip("{}").split(",")]
            if to.startswith("{"):
                kept = next(part for part in parts if part != "_")
                parts = [f"ptx::sink<decltype({kept})>" if part == "_" else part for part in parts]
                return f"ptx::unpack({_variable(source)}, {', '.join(parts)});"
            return f"{_variable(to)} = ptx::packed<decltype({_variable(to)})>({', '.join(parts)});"
        if suffixes[0] in ("b32", "b64") and source.startswith("%") and source not in SPECIAL:
            if self._kinds[to] != self._kinds[source]:
                return f"{_variable(to)} = ptx::as<{TYPES[self._kinds[to]]}>({_variable(source)});"
            return f"{_variable(to)} = {_variable(source)};"
        if source in self._parameters:
            self._pointers[to] = source
            return ""
        return f"{_variable(to)} = {self._value(source, suffixes[0])};"

    def _ld(self, base: str, suffixes: list[str], operands: list[str]) -> str:
        to, source = operands
        *where, kind = suffixes
        if where == ["param"]:
            name, _, offset = source.strip("[]").partition("+")
            number, nbytes = self._parameters[self._pointers.get(name, name)]
            if int(offset or 0) + size_of(kind) > nbytes:
                raise ValueError(f"beyond the {nbytes} bytes of {name}")
            return f"ptx::read<{TYPES[kind]}>((char *)arguments[{number}] + {offset or 0}, {_variable(to)});"
        return self._access("load", where, kind, to, source)

    def _st(self, base: str, suffixes: list[str], operands: list[str]) -> str:
        to, source = operands
        *where, kind = suffixes
        return self._access("store", where, kind, source, to)

    def _access(self, verb: str, where: list[str], kind: str, registers: str, address: str) -> str:
        """Return a load of registers, or a store."""
        space = next((name for name in ("shared", "local", "volatile", "global") if name in where), "generic")
        if unknown := set(where) - {"global", "shared", "local", "volatile", "wb", "v2", "v4"}:
            raise ValueError(f"{unknown}")
        parts = [part.strip() for part in registers.strip("{}").split(",")]
        if len(parts) != int(next((name[1:] for name in where if name in ("v2", "v4")), 1)):
            raise ValueError(f"{len(parts)} registers")
        given = [_variable(part) if part.startswith("%") else self._value(part, kind) for part in parts]
        call = f"ptx::{verb}<ptx::{space.upper()}, {TYPES[kind]}>"
        return f"{call}({self._address(address)}, now, __LINE__, {', '.join(given)});"

    def _cvta(self, base: str, suffixes: list[str], operands: list[str]) -> str:
        to, source = map(_variable, operands)
        if suffixes[0] in ("global", "local"):  # both are addresses of the CPU
            return f"{to} = {source};"
        call = f"to_global({source}, __LINE__)" if suffixes[0] == "to" else f"from_shared({source})"
        return f"{to} = ptx::{call};"

    def _cvt(self, base: str, suffixes: list[str], operands: list[str]) -> str:
        *how, to, source = suffixes
        value = self._value(operands[1], source)
        if how == ["rzi"] and to[0] == "s":
            value = f"ptx::towards_zero<{TYPES[to]}>({value})"
        elif how not in ([], ["rn"]):
            raise ValueError(f"rounding {how}")
        return self._assign(operands[0], to, f"({TYPES[to]}){value}")

    def _setp(self, base: str, suffixes: list[str], operands: list[str]) -> str:
        comparison, kind = suffixes
        to, *values = operands
        a, b = (self._value(value, kind) for value in values)
        if comparison == "nan":
            test = f"{a} != {a} || {b} != {b}"
        elif kind in FLOATS and comparison.endswith("u"):  # also if one is NaN
            opposite = {"neu": "==", "ltu": ">=", "leu": ">", "gtu": "<=", "geu": "<"}[comparison]
            test = f"!({a} {opposite} {b})"
        elif kind in FLOATS and comparison == "ne":
            test = f"{a} < {b} || {a} > {b}"
        else:
            test = f"{a} {COMPARISONS[comparison]} {b}"
        return f"{_variable(to)} = {test};"

    def _selp(self, base: str, suffixes: list[str], operands: list[str]) -> str:
        to, yes, no, predicate = operands
        kind = suffixes[0]
        return self._assign(to, kind, f"{_variable(predicate)} ? {self._value(yes, kind)} : {self._value(no, kind)}")

    def _bar(self, base: str, suffixes: list[str], operands: list[str]) -> str:
        if suffixes == ["warp", "sync"]:
            return f"__syncwarp({self._value(operands[0], 'u32')}); ++now.warps;"
        if suffixes == ["sync"] and operands == ["0"]:
            return "__syncthreads(); ++now.barriers;"
        if suffixes[:1] != ["red"]:
            raise ValueError("barrier")
        call = {"or": "__syncthreads_or", "and": "__syncthreads_and", "popc": "__syncthreads_count"}[suffixes[1]]
        to, barrier, predicate = operands
        if barrier != "0":
            raise ValueError("barrier")
        return f"{_variable(to)} = {call}({_variable(predicate)}); ++now.barriers;"

    def _shfl(self, base: str, suffixes: list[str], operands: list[str]) -> str:
        _, mode, _ = suffixes
        (to, _, inside), (value, by, clamp, mask) = operands[0].partition("|"), operands[1:]
        given = [self._value(part, "u32") for part in (value, by, clamp, mask)] + [_variable(inside)] * bool(inside)
        answer = f"ptx::shuffle<ptx::{mode.upper()}>({', '.join(given)}, __LINE__)"
        return f"{_variable(to)} = {answer}; ++now.warps;"

    def _vote(self, base: str, suffixes: list[str], operands: list[str]) -> str:
        call = {"ballot": "__ballot_sync", "any": "__any_sync", "all": "__all_sync"}[suffixes[1]]
        to, predicate, mask = operands
        answer = f"{call}({self._value(mask, 'u32')}, {_variable(predicate)})"
        return f"{_variable(to)} = {answer}; ++now.warps;"

    def _match(self, base: str, suffixes: list[str], operands: list[str]) -> str:
        if suffixes != ["any", "sync", "b32"]:
            raise ValueError("operation")
        to, value, mask = operands
        answer = f"__match_any_sync({self._value(mask, 'u32')}, {self._value(value, 'u32')})"
        return f"{_variable(to)} = {answer}; ++now.warps;"

    def _atom(self, base: str, suffixes: list[str], operands: list[str]) -> str:
        *order, space, operation, kind = suffixes
        if operation != "add" or order not in ([], ["relaxed", "gpu"]):  # which say the same
            raise ValueError("operation")
        to, address, value = operands
        given = f"{self._address(address)}, now, __LINE__, {self._value(value, kind)}"
        return f"{_variable(to)} = ptx::add<ptx::{space.upper()}, {TYPES[kind]}>({given});"

    def _nanosleep(self, base: str, suffixes: list[str], operands: list[str]) -> str:
        return "__nanosleep(0);"

    def _arithmetic(self, base: str, suffixes: list[str], operands: list[str]) -> str:
        """Return what computes one register of others."""
        *how, kind = suffixes
        to, *given = operands
        unsigned = f"u{kind[1:]}" if kind != "pred" and kind not in FLOATS else kind
        wrapping = unsigned if base in ("add", "sub", "neg", "not", "shl") else kind
        values = [self._value(value, wrapping) for value in given]
        c = TYPES[kind]
        if kind in FLOATS and base in ("add", "sub", "mul", "div", "rcp", "sqrt"):
            known = how == ["rn"]
        elif base in ("mul", "mad"):
            known = how in (["lo"], ["hi"], ["wide"])
        elif FUNCTIONS.get(base):
            known = FUNCTIONS[base] == ".".join(suffixes)
        else:
            known = not how
        if not known:
            raise ValueError("modifiers")
        if base in OPERATORS:
            code = f"{values[0]} {OPERATORS[base]} {values[1]}"
        elif base in ("mul", "mad") and kind not in FLOATS:
            bits, sign = 8 * size_of(kind), kind[0] == "s"
            wide = TYPES[f"{kind[0]}{2 * bits}"] if bits < 64 else f"{'' if sign else 'unsigned '}__int128"
            product = f"({wide}){values[0]} * ({wide}){values[1]}"
            code = {"wide": product, "lo": f"({c})({product})", "hi": f"({c})(({product}) >> {bits})"}[how[0]]
            if base == "mad":
                code = f"({TYPES[unsigned]})({code}) + ({TYPES[unsigned]}){values[2]}"
        elif kind in FLOATS and base in ("mul", "div"):
            code = f"{values[0]} {'*' if base == 'mul' else '/'} {values[1]}"
        elif base == "rcp":
            code = f"({c})1 / {values[0]}"
        elif base == "sqrt":
            code = f"std::sqrt({values[0]})"
        elif base == "abs" and kind in FLOATS:
            code = f"std::fabs({values[0]})"
        elif base == "neg":
            code = f"-{values[0]}"
        elif base == "not":
            code = f"!{values[0]}" if kind == "pred" else f"({c})~{values[0]}"
        elif base in ("shl", "shr"):
            code = f"ptx::{base}({values[0]}, {self._value(given[1], 'u32')})"
        elif base in FUNCTIONS:
            if base in ("bfe", "bfi"):
                values[-2:] = [self._value(value, "u32") for value in given[-2:]]
            code = f"ptx::{base}_({', '.join(values)})"
        else:
            raise ValueError("operation")
        return self._assign(to, kind, code)


def _variable(name: str) -> str:
    """Return the name in C++ of a register or a label."""
    return name.strip().lstrip("%$")
