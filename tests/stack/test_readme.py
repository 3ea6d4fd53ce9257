"""What the README and the pages of docs/ show is there: code runs, commands, targets, extras and files exist, tables are
those of the newest records."""

import importlib.util
import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest

from twell_lab import records
from twell_lab.app import cli, tables

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = {path.name: path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md"))}


def test_the_first_screen_has_the_two_commands():
    first = README.splitlines()[:20]
    assert any(line.startswith("make tour") for line in first) and any(line.startswith("make test") for line in first)


def test_the_short_example_runs():
    (example,) = re.findall(r"```python\n(.*?)```", README, re.S)
    short = re.sub(r"steps=\d+", "steps=3, eval_windows=8", example)
    names = {}
    exec(compile(short, "README.md", "exec"), names)
    kinds = {type(module).__name__ for module in names["model"].modules()}
    assert short.count("steps=3") == 1 and "SparseFFN" not in kinds


def test_the_long_example_runs():
    example, _ = re.findall(r"```python\n(.*?)```", PAGES["library.md"], re.S)
    # The same calls, made short: fewer steps and held-out windows, a smaller layer to time.
    shortened = re.sub(r"steps=\d+", "steps=3, eval_windows=8", example).replace(
        "d_model=2048, d_ff=5632", "d_model=64, d_ff=256"
    )
    assert shortened.count("steps=3") == 1 and "d_ff=256" in shortened
    names = {}
    exec(compile(shortened, "README.md", "exec"), names)
    assert names["packed"].shape == (64, 5632) and names["run"].rows


@pytest.fixture
def own_model(tmp_path, monkeypatch):
    """A small model of transformers with its tokenizer, and a text, under the names that docs/library.md has for them."""
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    spelled = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    spelled.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    sizes = dict(vocab_size=256, hidden_size=16, ffn_dim=40, num_hidden_layers=2, num_attention_heads=2)
    config = transformers.OPTConfig(**sizes, word_embed_proj_dim=16, max_position_embeddings=512)
    transformers.OPTForCausalLM(config).save_pretrained(tmp_path / "build" / "my-model")
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=spelled)
    made.save_pretrained(tmp_path / "build" / "my-model")
    (tmp_path / "my-text.txt").write_text("a text of some thousand letters, line after line\n" * 300)
    monkeypatch.chdir(tmp_path)


def test_the_example_of_a_model_of_ones_own_runs(own_model, capsys):
    _, example = re.findall(r"```python\n(.*?)```", PAGES["library.md"], re.S)
    names = {}
    exec(compile(example, "library.md", "exec"), names)
    assert "model.decoder.layers.0" in capsys.readouterr().out
    assert sum(type(module).__name__ == "SparseFFN" for module in names["model"].modules()) == 2


def test_the_commands_for_a_model_of_ones_own_run(own_model, capsys):
    (lines,) = re.findall(r"```sh\n(twell-lab profile .*?)```", PAGES["library.md"], re.S)
    short = {"profile": "--windows 2", "sparsify": "--windows 2 --tokens 1", "sample": "--tokens 5"}
    short |= {"bench": "--tokens 8 --batches 1 --seconds 0.05"}
    for line in lines.splitlines():
        _, *arguments = shlex.split(line)
        assert (
            cli.main([*arguments, *shlex.split(short[arguments[0]]), *(["--device", "cpu"] * ("profile" not in line))])
            == 0
        )
    shown = capsys.readouterr().out
    assert "the same text" in shown and "bench: " in shown


@pytest.mark.parametrize("command", sorted(set(re.findall(r"`twell-lab (\w+)", README + PAGES["library.md"]))))
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


@pytest.mark.parametrize(("page", "text"), [("README.md", README), *((f"docs/{name}", t) for name, t in PAGES.items())])
def test_links_and_pictures_lead_somewhere(page, text):
    for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", text):
        assert (ROOT / page).parent.joinpath(link).exists(), f"{page}: {link}"


@pytest.mark.parametrize(
    ("page", "table"),
    [
        (README, tables.headline),
        *(
            (PAGES["measured.md"], each)
            for each in (
                *(
                    tables.layer,
                    tables.calls,
                    tables.model,
                    tables.sizes,
                    tables.heavy,
                    tables.training,
                    tables.steps,
                    tables.model_paths,
                    tables.trained,
                    tables.trained_speed,
                    tables.profiling,
                ),
                *(tables.host, tables.comparison, tables.activations, tables.padding, tables.experts, tables.few_bits),
                *(
                    tables.pruning,
                    tables.chosen,
                    tables.chosen_from,
                    tables.operands,
                    tables.adapters,
                    tables.attacks,
                    tables.course,
                ),
            )
        ),
    ],
)
def test_a_table_of_records_is_that_of_the_newest(page, table):
    after = page.partition(
        '<!-- python -c "from twell_lab import records; from twell_lab.app import tables; '
        f'print(tables.{table.__name__}(records.load_all()))" prints this table -->\n'
    )[2]
    assert after.partition("\n\n")[0].rstrip() == table(records.load_all())


def test_the_picture_is_drawn_from_the_newest_record_and_stops_paying_where_the_words_say():
    spec = importlib.util.spec_from_file_location("picture", ROOT / "docs" / "picture.py")
    picture = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(picture)
    drawn = json.loads(picture.text_in(picture.PICTURE.read_bytes()))
    assert drawn == picture.points(records.load_all())
    alone, split = (dict(drawn["firing"][name]) for name in list(drawn["firing"])[:2])
    assert alone[60] > 1 > alone[120] and "stops paying between 60 and 120" in " ".join(README.split())
    assert split[120] > alone[120]
    by_tokens = dict(next(iter(drawn["tokens"].values())))
    least = sorted(by_tokens, key=by_tokens.get)[:2]
    assert {*least} == {256, 2048} and "least is gained from 256 to 2,048 tokens" in " ".join(README.split())
