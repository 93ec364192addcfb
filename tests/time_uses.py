"""What in a test's program depends on time, on chance, or on what other programs of this machine do.

It is read off the syntax tree, whatever names imports have there, and off the programs that a test holds as text.
Kinds: `clock` reads the time or lets it pass; `patience` ends a wait after a number of seconds that is written there;
`chance` draws otherwise in every run; `shared` is a place that all processes of the machine share.
"""

from __future__ import annotations

import ast
import re
import textwrap
from typing import NamedTuple

CLOCKS = {  # module -> what in it reads a clock or lets time pass; () is all of it
    "time": (
        *("sleep", "time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "clock_gettime"),
        *("process_time", "process_time_ns", "thread_time", "thread_time_ns", "clock_gettime_ns"),
    ),
    "asyncio": ("sleep", "wait_for", "timeout"),
    "threading": ("Timer",),
    "os": ("times",),
    "datetime.datetime": ("now", "utcnow", "today"),
    "datetime.date": ("today",),
    "timeit": (),
    "sched": (),
    "torch.utils.benchmark": (),
}
DRAWS = {"os": ("urandom", "getrandom"), "secrets": (), "uuid": ("uuid1", "uuid4"), "random": ("SystemRandom",)}
GENERATORS = ("random.Random", "numpy.random.default_rng", "numpy.random.RandomState")  # seeded by what they are given
ENDS_A_WAIT = ("timeout", "deadline", "patience")  # arguments and attributes
WAITS = ("wait", "join", "communicate", "acquire", "settimeout", "result", "alarm", "setitimer")  # for their argument
CLOCK_IN_TEXT = re.compile(
    rf"\btime\.(?:{'|'.join(CLOCKS['time'])})\(|\bfrom time import\b|(?:^|[;&|]\s*)sleep [\d.]+", re.MULTILINE
)
SHARED = re.compile(r"^/(?:tmp|var/tmp|dev/shm)/")
IMPORT = re.compile(r"^\s*(?:import|from) \w", re.MULTILINE)


class Use(NamedTuple):
    line: int
    kind: str
    what: str


def uses_in(source: str) -> list[Use]:
    """What one program depends on."""
    return Uses(ast.parse(source)).found


class Uses(ast.NodeVisitor):
    def __init__(self, tree: ast.Module) -> None:
        self.found: list[Use] = []
        self.names = imported_names(tree)
        self.visit(tree)

    def note(self, node: ast.AST, kind: str, what: str) -> None:
        self.found.append(Use(getattr(node, "lineno", 0), kind, what))

    def dotted(self, node: ast.AST) -> str:
        """The full name of an expression, through imports; empty if it has none."""
        if isinstance(node, ast.Name):
            return self.names.get(node.id, "")
        if isinstance(node, ast.Attribute) and (before := self.dotted(node.value)):
            return f"{before}.{node.attr}"
        return ""

    def visit_Name(self, node: ast.Name) -> None:
        for kind, table in (("clock", CLOCKS), ("chance", DRAWS)):
            if is_in(self.dotted(node), table):
                self.note(node, kind, self.dotted(node))

    def visit_Attribute(self, node: ast.Attribute) -> None:
        for kind, table in (("clock", CLOCKS), ("chance", DRAWS)):
            if is_in(self.dotted(node), table):
                self.note(node, kind, self.dotted(node))
                return
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        name = self.dotted(node.func)
        if name in GENERATORS and not node.args and not node.keywords:
            self.note(node, "chance", f"{name}()")
        for one in node.keywords:
            if (one.arg and self.ends_a_wait(one.arg, one.value)) or (
                name == "datetime.timedelta" and number(one.value)
            ):
                self.note(node, "patience", f"{one.arg}={ast.unparse(one.value)}")
        if isinstance(node.func, ast.Attribute) and node.func.attr in WAITS and any(map(number, node.args)):
            self.note(node, "patience", ast.unparse(node))

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        for one in node.targets:
            if isinstance(one, ast.Attribute) and self.ends_a_wait(one.attr, node.value):
                self.note(node, "patience", ast.unparse(node))

    def ends_a_wait(self, name: str, value: ast.AST) -> bool:
        """Whether a number of seconds is given; the patience of a schedule is a whole number of validations."""
        return name in ENDS_A_WAIT and number(value) and not (name == "patience" and "." not in ast.unparse(value))

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        self.look_into(node, "".join(str(one.value) if isinstance(one, ast.Constant) else "_0" for one in node.values))
        for one in node.values:
            if isinstance(one, ast.FormattedValue):
                self.visit(one.value)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str):
            self.look_into(node, node.value)

    def look_into(self, node: ast.AST, text: str) -> None:
        """Look into a text that may be a program."""
        if SHARED.match(text):
            self.note(node, "shared", text)
        program = program_of(text) if IMPORT.search(text) else None
        if program is not None:
            for one in Uses(program).found:
                self.note(node, one.kind, f"{one.what} in a text")
        elif found := CLOCK_IN_TEXT.search(text):
            self.note(node, "clock", f"{found.group()} in a text")


def imported_names(tree: ast.Module) -> dict[str, str]:
    """What the names that a program imports stand for."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for one in node.names:
                first = one.name.partition(".")[0]
                found[one.asname or first] = one.name if one.asname else first
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.update({one.asname or one.name: f"{node.module}.{one.name}" for one in node.names})
    return found


def is_in(name: str, table: dict[str, tuple[str, ...]]) -> bool:
    return any(
        name in [f"{place}.{one}" for one in names] if names else name.startswith(f"{place}.")
        for place, names in table.items()
    )


def number(node: ast.AST) -> bool:
    """Whether an expression is a number above 0, written out."""
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError):
        return False
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0


def program_of(text: str) -> ast.Module | None:
    for one in (text, textwrap.dedent(text)):
        try:
            return ast.parse(one)
        except (SyntaxError, ValueError):
            continue
    return None
