"""The kernel hash: blind to comments and white space, sensitive to everything else; and what hangs on it."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twell_lab import paths, records
from twell_lab.errors import RecordError

CUDA = '''#include "twell.cuh"
#define SQUARE(x) ((x) * (x))
#define EMPTY
extern "C" __global__ void scale(float* y, const int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;   // one thread a value
    if (i < n) y[i] = SQUARE(y[i]) + 1'000.5e-3f;    /* in place */
    asm volatile("{ // not a comment: part of the string\\n}" ::: "memory");
    char slash = '/', quote = '"';
}
'''
PYTHON = '''"""A module."""
import os  # for the environment


def launch(name, *, stream=None):
    """Docstring."""
    if stream is None:
        stream = f"{name!r:>{10}} # kept {{braces}}"
    return [name,
            stream]
'''


def tree(folder: Path, cuda: str = CUDA, python: str = PYTHON) -> str:
    """The hash of a small tree with these two sources."""
    (folder / "kernels").mkdir(parents=True, exist_ok=True)
    (folder / "twell_lab").mkdir(exist_ok=True)
    (folder / "kernels" / "smxx_scale.cu").write_text(cuda)
    (folder / "twell_lab" / "launch.py").write_text(python)
    return records.kernel_hash(folder)


@pytest.mark.parametrize("old, new", [
    ("// one thread a value", ""),
    ("/* in place */", "/* something\n else * entirely // here */ /**/"),
    ("    int i =", "\tint\n  i  =  // here\n "),
    ("(float* y, const int n)", "(float *y,const int n)"),
    ("#define EMPTY\n", "#define EMPTY   // nothing\n\n\n"),
    ("((x) * (x))", "\\\n   ((x)*(x))"),
    ("extern", "// a comment that goes on \\\n over the next line\nextern"),
])
def test_comments_and_white_space_in_cuda_do_not_count(tmp_path, old, new):
    assert old in CUDA
    assert tree(tmp_path / "a") == tree(tmp_path / "b", cuda=CUDA.replace(old, new, 1))


@pytest.mark.parametrize("old, new", [
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
])
def test_code_in_cuda_counts(tmp_path, old, new):
    assert old in CUDA
    assert tree(tmp_path / "a") != tree(tmp_path / "b", cuda=CUDA.replace(old, new, 1))


def test_two_plus_signs_are_not_one_increment(tmp_path):
    assert tree(tmp_path / "a", cuda="int f(int a) { return a+ +a; }") \
        != tree(tmp_path / "b", cuda="int f(int a) { return a++a; }")


@pytest.mark.parametrize("old, new", [
    ("  # for the environment", ""),
    ("[name,\n            stream]", "[name, stream]"),
    ("\n\n\ndef", "\n# more\n\ndef"),
    ("    ", "  "),
    ("name, *, stream", "name,*,  stream"),
])
def test_comments_and_white_space_in_python_do_not_count(tmp_path, old, new):
    assert old in PYTHON
    assert tree(tmp_path / "a") == tree(tmp_path / "b", python=PYTHON.replace(old, new))


@pytest.mark.parametrize("old, new", [
    ("is None", "is not None"),
    ("# kept", "#  kept"),
    ("{10}", "{11}"),
    ("    return [name,\n            stream]", "        return [name, stream]"),
    ('"""Docstring."""', '"""Another."""'),
])
def test_code_in_python_counts(tmp_path, old, new):
    assert old in PYTHON
    assert tree(tmp_path / "a") != tree(tmp_path / "b", python=PYTHON.replace(old, new))


def test_names_and_number_of_files_count(tmp_path):
    before = tree(tmp_path)
    (tmp_path / "kernels" / "smxx_scale.cu").rename(tmp_path / "kernels" / "smxx_other.cu")
    renamed = records.kernel_hash(tmp_path)
    (tmp_path / "kernels" / "twell.cuh").write_text("")
    assert len({before, renamed, records.kernel_hash(tmp_path)}) == 3


def test_files_outside_kernels_and_launch_code_do_not_count(tmp_path):
    before = tree(tmp_path)
    (tmp_path / "kernels" / "README.md").write_text("words")
    (tmp_path / "twell_lab" / "plots.py").write_text("x = 1")
    assert records.kernel_hash(tmp_path) == before


def test_the_hash_of_a_known_tree_is_the_same_on_every_python(tmp_path):
    """A fixed value: a Python version that tokenizes differently would change every record's hash."""
    assert tree(tmp_path) == "e8dae71207163a61b03e8fd2815a89eb40200f2ab60037b4babfeb639efaf9c0"


def test_a_source_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(RecordError, match="smxx_scale.cu.*line 2"):
        tree(tmp_path, cuda='int n;\nconst char* s = "open;\n')
    with pytest.raises(RecordError, match="launch.py"):
        tree(tmp_path, python="def f():\n    '''open\n")


words = st.sampled_from(["a", "b1", "0x1f", "1.5e-3f", "\"s // t\"", "'c'", "->", "<<=", "++", "+", "(", ")",
                         "{", "}", ";", "<", ">", "::"])
gaps = st.sampled_from([" ", "\n", "\t", "  // note\n", " /* a */ ", "\\\n ", "\n\n"])


@settings(max_examples=150, deadline=None)
@given(st.lists(words, max_size=30), st.data())
def test_only_the_tokens_of_cuda_matter(tokens, data):
    def spelled():
        return "".join(word + data.draw(gaps) for word in tokens)
    assert records._cuda_tokens(spelled()) == records._cuda_tokens(spelled()) == tokens


# ---- kernels and GPU evidence belong together ------------------------------------------------------------


def test_this_tree_keeps_its_promise():
    """Fails when a kernel changed without a new GPU test report or an entry in UNVERIFIED.json."""
    records.verify()


@pytest.fixture
def copy(tmp_path):
    """A copy of this tree's kernels, launch code and records, with evidence for exactly these kernels."""
    shutil.copytree(paths.kernels_dir(), tmp_path / "kernels")
    package = Path(records.__file__).parent
    (tmp_path / "twell_lab").mkdir()
    for name in records.LAUNCH_CODE:
        if (package / name).exists():
            shutil.copy(package / name, tmp_path / "twell_lab" / name)
    (tmp_path / "data" / "records").mkdir(parents=True)
    return tmp_path


def report(tree: Path, date: str = "2026-01-01T00:00:00Z", **tests) -> Path:
    """A synthetic GPU test report for the kernels of this tree, saved into it."""
    record = records.Record(name="gpu-tests", purpose="a test's own", rows=[], date=date, commit=None,
                            dirty=None, kernel_hash=records.kernel_hash(tree), machine={},
                            notes={"gpu_tests": {"passed": 3, "failed": 0, **tests}})
    return record.save(tree / "data" / "records")


def excuse(tree: Path, **changes) -> None:
    entry = {"kernel_hash": records.kernel_hash(tree), "why": "no GPU at hand", "date": "2026-01-02"}
    (tree / "data" / "records" / "UNVERIFIED.json").write_text(json.dumps({**entry, **changes}))


def change_a_kernel(tree: Path) -> None:
    kernel = sorted((tree / "kernels").glob("*.cu"))[0]
    kernel.write_text(kernel.read_text() + "\n__device__ int one_more;\n")


def test_a_changed_kernel_fails_until_it_is_tested_or_named(copy):
    report(copy)
    assert "tested on a GPU on 2026-01-01" in records.verify(tree=copy)
    change_a_kernel(copy)
    with pytest.raises(RecordError, match="newest GPU test report carries"):
        records.verify(tree=copy)
    excuse(copy)
    assert "no GPU at hand" in records.verify(tree=copy)
    change_a_kernel(copy)
    with pytest.raises(RecordError, match="UNVERIFIED.json names"):
        records.verify(tree=copy)
    report(copy, date="2026-01-03T00:00:00Z")
    records.verify(tree=copy)


def test_changed_launch_code_fails_too(copy):
    report(copy)
    launcher = copy / "twell_lab" / "launch.py"
    launcher.write_text((launcher.read_text() if launcher.exists() else "") + "\nBLOCK = 7\n")
    with pytest.raises(RecordError):
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


@pytest.mark.parametrize("changes", [{"why": " "}, {"why": None}, {"kernel_hash": "0" * 64}])
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
    shutil.copytree(Path(records.__file__).parent, copy / "twell_lab", dirs_exist_ok=True)
    target = copy / "tests" / "records"
    target.mkdir(parents=True)
    shutil.copy(__file__, target / "test_kernel_hash.py")

    def suite() -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(copy),
                   "-k", "test_this_tree_keeps_its_promise", str(target / "test_kernel_hash.py")]
        return subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=120,
                              env={"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"})

    report(copy)
    before = suite()
    change_a_kernel(copy)
    after = suite()
    excuse(copy)
    named = suite()
    assert before.returncode == 0, before.stdout + before.stderr
    assert after.returncode == 1 and "1 failed" in after.stdout, after.stdout + after.stderr
    assert named.returncode == 0, named.stdout + named.stderr
