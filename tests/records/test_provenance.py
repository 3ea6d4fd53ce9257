"""The hash of a kernel: comments, white space, names and folders of files do not change it, all else does; and what
depends on it."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from twell_lab import core, records
from twell_lab.core import RecordError
from twell_lab.records import provenance

CUDA = """#include "shared.cuh"
#define SQUARE(x) ((x) * (x))
#define EMPTY
extern "C" __global__ void scale(float* y, const int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;   // one thread a value
    if (i < n) y[i] = SQUARE(y[i]) + 1'000.5e-3f;    /* in place */
    asm volatile("{ // not a comment: part of the string\\n}" ::: "memory");
    char slash = '/', quote = '"';
}
"""
SHARED = """#pragma once
#define WIDE 4
"""
LAUNCH = '''"""A module."""
import os  # for the environment

from . import tools
from .sizes import BLOCK

UNUSED = 1


def scale(y, *, stream=None):
    """Docstring."""
    if stream is None:
        stream = f"{y!r:>{10}} # kept {{braces}}"
    return tools.run("smxx_scale.cu", [y,
            stream], BLOCK)


def other():
    return UNUSED
'''
TOOLS = """from .core import InputError

LIMIT = 7


class Kept:
    room: int = 3

    def of(self, y):
        return self.room


def run(file, arguments, block):
    import simulator
    if len(arguments) > LIMIT:
        raise InputError("too many")
    return Kept().of(arguments), block
"""
SIZES = "BLOCK = 128\nGRID = 64\n"
REGISTRY = """_ALONE = ("launch.scale",)
KERNELS = {kernel.name: kernel for kernel in (Kernel("smxx_scale", (*_ALONE,), macros.each, oldest=(8, 0)),)}
"""


@pytest.fixture
def tree_of_one(tmp_path):
    """A function that writes a small tree with one kernel, some texts replaced, and returns the kernel's hash."""
    made = iter(range(1000))

    def tree(**changed: str) -> str:
        top = tmp_path / str(next(made))
        texts = {
            "cuda": CUDA,
            "shared": SHARED,
            "launch": LAUNCH,
            "tools": TOOLS,
            "sizes": SIZES,
            "cuda/registry": REGISTRY,
            "core/errors": "class InputError(Exception):\n    pass\n",
        }
        for name, text in (texts | changed).items():
            folder = "kernels" if name in ("cuda", "shared") else "twell_lab"
            file = {"cuda": "smxx_scale.cu", "shared": "shared.cuh"}.get(name, f"{name}.py")
            (top / folder / file).parent.mkdir(parents=True, exist_ok=True)
            (top / folder / file).write_text(text)
        return provenance.kernel_hashes(top)["smxx_scale"]

    return tree


@pytest.mark.parametrize(
    "old, new",
    [
        ("// one thread a value", ""),
        ("/* in place */", "/* something\n else * entirely // here */ /**/"),
        ("    int i =", "\tint\n  i  =  // here\n "),
        ("(float* y, const int n)", "(float *y,const int n)"),
        ("#define EMPTY\n", "#define EMPTY   // nothing\n\n\n"),
        ("((x) * (x))", "\\\n   ((x)*(x))"),
        ("extern", "// a comment that goes on \\\n over the next line\nextern"),
    ],
)
def test_comments_and_white_space_in_cuda_do_not_count(tree_of_one, old, new):
    assert old in CUDA
    assert tree_of_one() == tree_of_one(cuda=CUDA.replace(old, new, 1))


@pytest.mark.parametrize(
    "old, new",
    [
        ("i < n", "i <= n"),
        ("int i", "inti"),
        ("+ 1'000.5e-3f", "- 1'000.5e-3f"),
        ("// not a comment", "//  not a comment"),
        ("SQUARE(x) (", "SQUARE (x) ("),
        ("#define EMPTY\n", "#define EMPTY "),
        ("((x) * (x))", "((x) + (x))"),
        ("'/'", "' '"),
        ("y[i] = ", "y[i] += "),
        ("y[i]) + 1", "y[i]) + + 1"),
    ],
)
def test_code_in_cuda_counts(tree_of_one, old, new):
    assert old in CUDA
    assert tree_of_one() != tree_of_one(cuda=CUDA.replace(old, new, 1))


def test_two_plus_signs_are_not_one_increment(tree_of_one):
    assert tree_of_one(cuda="int f(int a) { return a+ +a; }") != tree_of_one(cuda="int f(int a) { return a++a; }")


@pytest.mark.parametrize(
    "text, old, new",
    [
        (LAUNCH, "  # for the environment", ""),
        (LAUNCH, "[y,\n            stream]", "[y, stream]"),
        (LAUNCH, "\n\n\ndef", "\n# more\n\ndef"),
        (LAUNCH, "    ", "  "),
        (LAUNCH, '"""Docstring."""', '"""Another."""'),
        (LAUNCH, "def scale(y, *, stream=None):", "def scale(y: list, *, stream: int | None = None) -> tuple:"),
        (LAUNCH, "UNUSED = 1", "UNUSED = 2"),
        (LAUNCH, "smxx_scale.cu", "smxx_other.cu"),
        (LAUNCH, "return UNUSED", "return -UNUSED"),
        (LAUNCH, "import os", "import sys"),
        (TOOLS, "LIMIT = 7", "LIMIT: int = 7"),
        (TOOLS, "import simulator", "import something"),
    ],
)
def test_what_decides_nothing_in_python_does_not_count(tree_of_one, text, old, new):
    assert old in text
    assert tree_of_one() == tree_of_one(**{"launch" if text is LAUNCH else "tools": text.replace(old, new)})


@pytest.mark.parametrize(
    "name, text, old, new",
    [
        ("launch", LAUNCH, "is None", "is not None"),
        ("launch", LAUNCH, "# kept", "#  kept"),
        ("launch", LAUNCH, "{10}", "{11}"),
        ("launch", LAUNCH, "stream], BLOCK)", "stream], 2 * BLOCK)"),
        ("launch", LAUNCH, "import BLOCK", "import GRID as BLOCK"),
        ("tools", TOOLS, "LIMIT = 7", "LIMIT = 8"),
        ("tools", TOOLS, "room: int = 3", "room: int = 4"),
        ("tools", TOOLS, "return self.room", "return -self.room"),
        ("tools", TOOLS, 'raise InputError("too many")', "pass"),
        ("sizes", SIZES, "128", "256"),
        ("cuda/registry", REGISTRY, "oldest=(8, 0)", "oldest=(9, 0)"),
        ("cuda/registry", REGISTRY, "oldest=", "newest="),
        ("cuda/registry", REGISTRY, "macros.each", "macros.gated"),
        ("shared", SHARED, "WIDE 4", "WIDE 8"),
    ],
)
def test_what_is_reached_counts(tree_of_one, name, text, old, new):
    assert old in text
    assert tree_of_one() != tree_of_one(**{name: text.replace(old, new)})


def test_a_name_of_the_functions_own_hides_the_modules(tree_of_one):
    """`UNUSED` inside scale is its own variable here, so the constant of that name is not reached."""
    own = LAUNCH.replace("    if stream", "    UNUSED = y\n    if stream")
    assert tree_of_one(launch=own) == tree_of_one(launch=own.replace("UNUSED = 1", "UNUSED = 2"))


def test_moved_and_renamed_files_keep_their_hash(tree_of_one):
    before = tree_of_one()
    elsewhere = REGISTRY.replace("launch.scale", "elsewhere.scale")
    moved = LAUNCH.replace("from . import tools", "from . import others as tools").replace(
        "from .sizes", "from .numbers"
    )
    assert before == tree_of_one(**{"cuda/registry": elsewhere}, elsewhere=moved, others=TOOLS, numbers=SIZES)


def test_the_hash_of_a_known_tree_is_the_same_on_every_python(tree_of_one):
    """A fixed value: a Python version that parses differently would change every record's hashes."""
    assert tree_of_one() == "2f0ef8d9855174f62225a3c966da28efc3488dcb49721bc12e47649d0ee1b979"


def test_what_cannot_be_read_is_named(tree_of_one):
    with pytest.raises(RecordError, match="smxx_scale.cu.*line 2"):
        tree_of_one(cuda='int n;\nconst char* s = "open;\n')
    with pytest.raises(RecordError, match="launch.py cannot be hashed"):
        tree_of_one(launch="def f():\n    '''open\n")
    with pytest.raises(RecordError, match="missing.cuh cannot be hashed"):
        tree_of_one(cuda='#include "missing.cuh"\n')
    with pytest.raises(RecordError, match="launch.scale, which launches a kernel, is not there"):
        tree_of_one(launch="def another():\n    pass\n")


def test_every_kernel_of_this_tree_has_a_hash_of_its_own_and_a_new_one_must_be_declared(copy):
    found = provenance.kernel_hashes(copy)
    assert set(found) == {path.stem for path in core.kernels_dir().glob("*.cu")}
    assert len(set(found.values())) == len(found) and found == provenance.kernel_hashes()
    (copy / "kernels" / "smxx_new.cu").write_text("int n;\n")
    with pytest.raises(RecordError, match="smxx_new.cu is in kernels/, and .*registry.py does not declare it"):
        provenance.kernel_hashes(copy)


def test_the_declaration_of_another_kernel_does_not_count(copy):
    before = provenance.kernel_hashes(copy)
    table = copy / "twell_lab" / "cuda" / "registry.py"
    text = table.read_text()
    entry = '    Kernel("smxx_pack"'
    assert text.count(entry.strip()) == 1
    table.write_text(
        text.replace(entry.strip(), 'Kernel("smxx_new", ("ops.portable.pack",), macros.each), ' + entry.strip())
    )
    (copy / "kernels" / "smxx_new.cu").write_text("int n;\n")
    after = provenance.kernel_hashes(copy)
    assert after.pop("smxx_new") not in before.values() and after == before
    sizes = copy / "kernels" / "smxx_transpose.cu"
    sizes.write_text(sizes.read_text().replace("#define SIDE 64", "#define SIDE 32"))
    changed = [name for name, value in provenance.kernel_hashes(copy).items() if value != before.get(name)]
    assert set(changed) == {"smxx_transpose", "smxx_new"}  # a number that its launch reads is in its source


def test_a_change_of_one_kernel_is_its_own_alone(copy):
    before = provenance.kernel_hashes(copy)
    kernel = copy / "kernels" / "smxx_transpose.cu"
    kernel.write_text(kernel.read_text() + "\n__device__ int one_more;\n")
    assert [name for name, value in provenance.kernel_hashes(copy).items() if value != before[name]] == [
        "smxx_transpose"
    ]


# ---- kernels and GPU evidence belong together ------------------------------------------------------------


def test_this_tree_keeps_its_promise():
    """Fails when a kernel changed without a new GPU test report or an entry in UNVERIFIED.json."""
    records.verify()


@pytest.fixture
def copy(tmp_path):
    """A copy of this tree's kernels and package, with no records."""
    shutil.copytree(core.kernels_dir(), tmp_path / "kernels")
    package = Path(provenance.Sources.of().package)
    shutil.copytree(package, tmp_path / "twell_lab", ignore=shutil.ignore_patterns("__pycache__", "course"))
    (tmp_path / "data" / "records").mkdir(parents=True)
    return tmp_path


def report(tree: Path, date: str = "2026-01-01T00:00:00Z", **tests) -> Path:
    """A synthetic GPU test report for the kernels of this tree, saved into it."""
    record = records.Record(
        name="gpu-tests",
        purpose="a test's own",
        rows=[],
        date=date,
        commit=None,
        dirty=None,
        kernels=provenance.kernel_hashes(tree),
        machine={},
        notes={"gpu_tests": {"passed": 3, "failed": 0, **tests}},
    )
    return record.save(tree / "data" / "records")


def excuse(tree: Path, **changes) -> None:
    entry = {"kernels": provenance.kernel_hashes(tree), "why": "no GPU at hand", "date": "2026-01-02"}
    (tree / "data" / "records" / "UNVERIFIED.json").write_text(json.dumps({**entry, **changes}))


def change_a_kernel(tree: Path) -> str:
    """Change the first one; its name."""
    kernel = sorted((tree / "kernels").glob("*.cu"))[0]
    kernel.write_text(kernel.read_text() + "\n__device__ int one_more;\n")
    return kernel.stem


def test_a_changed_kernel_fails_until_it_is_tested_or_named(copy):
    report(copy)
    assert "tested on a GPU on 2026-01-01" in records.verify(tree=copy)
    changed = change_a_kernel(copy)
    with pytest.raises(RecordError, match=rf"no GPU test report carries: {changed} \([0-9a-f]{{12}}\); tested"):
        records.verify(tree=copy)
    excuse(copy)
    assert records.verify(tree=copy).startswith("1 of") and "no GPU at hand" in records.verify(tree=copy)
    change_a_kernel(copy)
    with pytest.raises(RecordError, match="UNVERIFIED.json does not name them"):
        records.verify(tree=copy)
    report(copy, date="2026-01-03T00:00:00Z")
    records.verify(tree=copy)


def test_changed_launch_code_and_formats_fail_too(copy):
    report(copy)
    for module, old, new, kernel in (
        ("ops/portable", "_PACK_TILES = {1: 128", "_PACK_TILES = {1: 256", "smxx_pack"),
        ("formats/twell", "WORDS = 256, 32", "WORDS = 128, 32", "smxx_down"),
    ):
        path = copy / "twell_lab" / f"{module}.py"
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))
        with pytest.raises(RecordError, match=kernel):
            records.verify(tree=copy)
        path.write_text(text)
    records.verify(tree=copy)


def test_a_reworded_comment_needs_no_new_evidence(copy):
    report(copy)
    for kernel in (copy / "kernels").glob("*.cu*"):
        kernel.write_text("// a remark\n" + kernel.read_text())
    records.verify(tree=copy)


def test_no_evidence_at_all_fails(copy):
    with pytest.raises(RecordError, match="no GPU test report"):
        records.verify(tree=copy)


@pytest.mark.parametrize("tests", [{"failed": 1}, {"passed": 0}, {"failed": None}])
def test_a_report_of_failure_is_no_evidence(copy, tests):
    report(copy, **tests)
    with pytest.raises(RecordError, match="no evidence"):
        records.verify(tree=copy)


@pytest.mark.parametrize("changes", [{"why": " "}, {"why": None}, {"kernels": {"smxx_pack": "0" * 64}}, {"kernels": 7}])
def test_an_excuse_needs_the_present_hash_and_a_reason(copy, changes):
    excuse(copy, **changes)
    with pytest.raises(RecordError, match="UNVERIFIED"):
        records.verify(tree=copy)


def test_the_newest_report_decides(copy):
    report(copy, date="2026-01-05T00:00:00Z")
    change_a_kernel(copy)
    report(copy, date="2026-01-04T00:00:00Z")
    with pytest.raises(RecordError):
        records.verify(tree=copy)


def test_the_ordinary_suite_fails_when_a_kernel_changes(copy):
    """The proof for the suite itself: pytest runs the test above on a copy with a changed kernel."""
    target = copy / "tests" / "records"
    target.mkdir(parents=True)
    shutil.copy(__file__, target / "test_provenance.py")

    def suite() -> subprocess.CompletedProcess:
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "--rootdir",
            str(copy),
            "-k",
            "test_this_tree_keeps_its_promise",
            str(target / "test_provenance.py"),
        ]
        return subprocess.run(
            command,
            cwd=copy,
            capture_output=True,
            text=True,
            timeout=120,
            env={"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"},
        )

    report(copy)
    before = suite()
    change_a_kernel(copy)
    after = suite()
    excuse(copy)
    named = suite()
    assert before.returncode == 0, before.stdout + before.stderr
    assert after.returncode == 1 and "1 failed" in after.stdout, after.stdout + after.stderr
    assert named.returncode == 0, named.stdout + named.stderr
