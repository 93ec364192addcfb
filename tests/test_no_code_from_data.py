"""Nothing in the package makes code of data: no loader that can run what it reads, but for our own processes' pickles and files that a
user names."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "shoestring"
# modules that run what they read
LOADERS = {
    "pickle",
    "cPickle",
    "_pickle",
    "marshal",
    "shelve",
    "dill",
    "cloudpickle",
    "joblib",
    "yaml",
    "runpy",
    "code",
    "jsonpickle",
}
BUILT_IN = {"eval", "exec", "compile", "__import__"}
IMPORTS = {"import_module", "exec_module", "load_module", "spec_from_file_location", "SourceFileLoader"}
# where one of these is used, and why nothing that a file says reaches it
ALLOWED = {
    "training/execution/scripts/sent_job.py": {
        "pickle",
        "import_module",
        "exec_module",
        "spec_from_file_location",
        "SourceFileLoader",
    },
    # a script's job for its own processes, in a private folder; never of a run
    "federated/simulation/shared_buffer.py": {"pickle"},  # between forked processes, in shared memory
    "jobfile.py": {"exec_module", "spec_from_file_location"},  # the job file that the user named
    "compression/distillation/job.py": {"exec_module", "spec_from_file_location"},  # --noise FILE.py
    "measure/instructions.py": {"exec"},  # our own constant, in a child process
    "__init__.py": {"import_module"},  # tables of our own modules
    "core/command_line/command.py": {"import_module"},
    "core/private.py": {"import_module"},
    "compression/edit_registry.py": {"import_module"},
    "processes/group/fork_server_main.py": {"import_module"},
    "training/commands/job_flags.py": {"import_module"},
    "serving/replicas/model_process.py": {"import_module"},  # what our own front was given as a function
}


def called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def is_true(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is True


def dangers(source: str) -> Iterator[str]:
    """What in a source file could run what it reads."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (one.name.split(".")[0] for one in node.names if one.name.split(".")[0] in LOADERS)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in LOADERS:
            yield (node.module or "").split(".")[0]
        elif isinstance(node, ast.Call):
            words = {one.arg: one.value for one in node.keywords}
            name, of = called(node), node.func.value if isinstance(node.func, ast.Attribute) else None
            of_name = of.id if isinstance(of, ast.Name) else ""
            if (name in BUILT_IN and of is None) or name in IMPORTS:
                yield name
            if name == "load" and of_name == "torch" and not is_true(words.get("weights_only")):
                yield "torch.load"
            if name in ("load", "fromregex") and of_name in ("np", "numpy"):
                yield f"numpy.{name}"
            if (
                is_true(words.get("allow_pickle"))
                or is_true(words.get("shell"))
                or is_true(words.get("trust_remote_code"))
            ):
                yield "a keyword"
            if name in ("system", "popen") and of_name == "os":
                yield f"os.{name}"


def test_nothing_that_is_read_can_be_run() -> None:
    found = {
        str(path.relative_to(ROOT)): names
        for path in sorted(ROOT.rglob("*.py"))
        if (names := set(dangers(path.read_text(encoding="utf-8"))))
    }
    assert found == ALLOWED


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from yaml import load",
        "import joblib.memory",
        "torch.load(file)",
        "torch.load(file, weights_only=False)",
        "np.load(file, allow_pickle=True)",
        "eval(text)",
        "exec(open(path).read())",
        "importlib.import_module(manifest['job'])",
        "spec.loader.exec_module(module)",
        "subprocess.run(text, shell=True)",
        "AutoModel.from_pretrained(path, trust_remote_code=True)",
        "os.system(text)",
    ],
)
def test_the_search_sees(line: str) -> None:
    assert list(dangers(line))


@pytest.mark.parametrize(
    "line", ["torch.load(file, weights_only=True)", "model.eval()", "ast.literal_eval(text)", "re.compile(x)"]
)
def test_the_search_does_not_see(line: str) -> None:
    assert not list(dangers(line))
