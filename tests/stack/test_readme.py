"""What the README shows is there: its code runs, and its commands, targets, extras and files exist."""

import re
import tomllib
from pathlib import Path

import pytest

from twell_lab import records
from twell_lab.app import cli, tables

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_first_screen_has_the_two_commands():
    first = README.splitlines()[:40]
    assert any(line.startswith("make tour") for line in first) and any(line.startswith("make test") for line in first)


def test_the_example_runs():
    (example,) = re.findall(r"```python\n(.*?)```", README, re.S)
    # The same calls, made short: fewer steps and held-out windows, a smaller layer to time.
    shortened = re.sub(r"steps=\d+", "steps=3, eval_windows=8", example).replace(
        "d_model=2048, d_ff=5632", "d_model=64, d_ff=256"
    )
    assert shortened.count("steps=3") == 1 and "d_ff=256" in shortened
    names = {}
    exec(compile(shortened, "README.md", "exec"), names)
    assert names["packed"].shape == (64, 5632) and names["run"].rows


@pytest.mark.parametrize("command", sorted(set(re.findall(r"`twell-lab (\w+)", README)) | {"train", "record"}))
def test_each_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as leaving:
        cli.main([command, "--help"])
    assert leaving.value.code == 0 and command in capsys.readouterr().out


def test_targets_extras_and_files_exist():
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    assert set(re.findall(r"(?:^|`)make (\w+)", README, re.M)) <= targets
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for named in re.findall(r"-e '\.\[([\w,]+)\]'", README):
        assert set(named.split(",")) <= set(extras)
    for name in re.findall(r"constraints/\w+\.txt|environment\.yml", README):
        assert (ROOT / name).is_file()
    for picture in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", README):
        assert (ROOT / picture).is_file(), picture


@pytest.mark.parametrize("table", [tables.attacks, tables.host, tables.calls, tables.model])
def test_a_table_of_records_is_that_of_the_newest(table):
    after = README.partition(
        '<!-- python -c "from twell_lab import records; from twell_lab.app import tables; '
        f'print(tables.{table.__name__}(records.load_all()))" prints this table -->\n'
    )[2]
    assert after.partition("\n\n")[0] == table(records.load_all())
