"""Programs: terms written down as instructions for the interpreter of ``csrc/nonlinear/tape.hpp``."""

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from ..._support import native
from ..._support.errors import ArgumentError
from .recording import STYLES, Function, OtherStyleError, Style, attempt, call, reason
from .terms import Tape, Term


@cache
def opcodes() -> dict[str, int]:
    """The number of each operation, as the compiled core has them."""
    listed = native.load().exptilt_tape_operations
    listed.restype = ctypes.c_char_p
    return {name: k for k, name in enumerate(listed().decode().split())}


class Tapes:
    """Functions of a state and their Jacobians, as programs of instructions.

    Program 2k gives the values of function k, program 2k + 1 these and then the Jacobian, row by row.
    """

    def __init__(self, states: int, inputs: int) -> None:
        self.n, self.r, self.registers, self.opcodes = states, inputs, states, opcodes()
        self.code: list[tuple[int, ...]] = []
        self.programs: list[tuple[int, int, int, int]] = []
        self.outputs: list[int] = []
        self.numbers: dict[float, int] = {}

    def record(self, function: Function, name: str, mean: np.ndarray, size: int) -> None:
        """Add a function from states to `size` numbers, in torch or in numpy; `mean` is a state to try.

        The recording is compared with the function at two points, and refused if they differ.
        """
        called, recorded = list[ArgumentError](), list[ArgumentError]()
        for style in STYLES:
            try:
                attempt(function, name, style, mean, size, self.r)
            except ArgumentError as error:
                called.append(error)
                continue
            try:
                tape, words = Tape(), (("x", self.n), ("u", self.r))
                terms = [[Term(tape, word, (i,)) for i in range(k)] for word, k in words]
                outputs = style.trace(function, terms[: 2 if self.r else 1])
                alone = Tapes(self.n, self.r)
                alone._write(outputs)
                alone._compare(function, style)
            except Exception as error:
                recorded.append(ArgumentError(f"{name} cannot be compiled: {reason(error)}"))
                continue
            self._write(outputs)
            self._write([*outputs, *tape.slopes(outputs, self.n)])
            return
        raise recorded[-1] if recorded else called[-1 if isinstance(called[0], OtherStyleError) else 0]

    def _compare(self, function: Function, style: Style) -> None:
        """Raise if the function and its recording give different values."""
        rng = np.random.default_rng(0)
        for _ in range(2):
            x, u = rng.uniform(0.5, 1.5, self.n), rng.uniform(0.5, 1.5, self.r)
            image = call(function, [style.make(value) for value in (x, u)[: 2 if self.r else 1]])
            want, got = np.asarray(image, dtype=np.float64), self.values(0, x[None], u)[0]
            if not np.allclose(got, want, rtol=1e-6, atol=1e-9, equal_nan=True):
                raise ArgumentError(
                    f"it gives {want}, its compiled form {got}. Write it with torch functions, or numpy's, "
                    "of its arguments alone."
                )

    def _write(self, outputs: Sequence[Any]) -> None:
        """Add the program of these outputs."""
        wanted, waiting, uses = dict[int, Term](), list[Term](), dict[int, int]()

        def use(args: Sequence[Any], kept: int) -> None:
            for arg in args:
                if isinstance(arg, Term):
                    waiting.append(arg)
                    uses[arg.number] = uses.get(arg.number, 0) + 1 + kept

        use(outputs, 1)  # one use more than there are reads: outputs keep their registers
        while waiting:
            term = waiting.pop()
            if term.number not in wanted:
                wanted[term.number] = term
                use(term.args, 0)
        fused = dict[int, Term]()  # by number of the sum: a product that only this sum reads
        for term in wanted.values():
            for arg in term.args if term.op == "add" else ():
                if isinstance(arg, Term) and arg.op == "mul" and uses[arg.number] == 1:
                    fused[term.number] = arg
        inside = {term.number for term in fused.values()}
        place, free, registers, first = dict[int, int](), list[int](), self.n, len(self.code)

        def operand(arg: Any) -> int:
            if isinstance(arg, Term):
                return place[arg.number]
            return ~(self.r + self.numbers.setdefault(float(arg), len(self.numbers)))

        for number in sorted(wanted):
            term = wanted[number]
            if term.op in ("x", "u"):
                place[number] = term.args[0] if term.op == "x" else ~term.args[0]
            if term.op in ("x", "u") or number in inside:
                continue
            op, args = term.op, term.args
            if number in fused:
                product = fused[number]
                op, args = "multiply_add", (*product.args, args[1] if args[0] is product else args[0])
            read = [operand(arg) for arg in args]
            for arg in args:
                if isinstance(arg, Term):
                    uses[arg.number] -= 1
                    if not uses[arg.number] and place[arg.number] >= self.n:
                        free.append(place[arg.number])
            if not free:
                free, registers = [registers], registers + 1
            place[number] = free.pop()
            self.code.append((self.opcodes[op], place[number], *(*read, 0, 0)[:3]))
        self.registers = max(self.registers, registers)
        self.programs.append((first, len(self.code) - first, len(self.outputs), len(outputs)))
        self.outputs += [operand(out) for out in outputs]

    def frame(self) -> tuple[Any, list[np.ndarray]]:
        """The struct ``Tapes`` of the compiled core, and the arrays whose addresses it holds."""
        tables: tuple[Any, ...] = self.code, self.programs, self.outputs
        arrays = [np.array(table, dtype=np.int32).reshape(-1) for table in tables]
        arrays.append(np.array([*self.numbers]))
        counts = (self.n, self.r, self.registers, len(self.numbers))
        return native.frame("Tapes")(*counts, *(array.ctypes.data for array in arrays)), arrays

    def values(self, program: int, x: np.ndarray, u: np.ndarray) -> np.ndarray:
        """Values of a program ``(points, outputs)`` at states ``(points, n)`` with inputs ``(r,)``."""
        tapes, _kept = self.frame()
        x, u = np.ascontiguousarray(x, dtype=np.float64), np.ascontiguousarray(u, dtype=np.float64)
        out = np.empty((len(x), self.programs[program][3]))
        where = (value.ctypes.data for value in (x, u, out))
        given = native.frame("TapeValues")(ctypes.addressof(tapes), program, len(x), *where)
        native.call("tape_values", given)
        return out
