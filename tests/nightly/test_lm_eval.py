"""A swapped model goes through lm-eval, which is no dependency: the same answers as the dense one, on a task in a file."""

import json

import pytest
import torch

import twell_lab as tl
from tests.models.speaking import decoders
from twell_lab.models.tiny import EDGE

lm_eval = pytest.importorskip("lm_eval", reason="pip install lm_eval")

TASK = """
task: sums
dataset_path: json
dataset_kwargs: {data_files: FOLDER/data.jsonl}
test_split: train
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: gold
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""


def test_a_swapped_model_answers_as_the_dense_one(tmp_path, monkeypatch):
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    rows = [{"question": f"{n}+1=", "choices": [str(n + 1), str(n + 2)], "gold": 0} for n in range(9)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "sums.yaml").write_text(TASK.replace("FOLDER", str(tmp_path)))
    tokenizer = decoders.of_bytes(eos_token=EDGE, pad_token=EDGE)
    model = decoders.build("Llama", hidden_act="relu", vocab_size=len(tokenizer)).requires_grad_(False)

    def evaluated():
        manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
        judged = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=4)
        return lm_eval.simple_evaluate(judged, tasks=["sums"], task_manager=manager, bootstrap_iters=0)

    dense = evaluated()
    tl.sparsify(model, "twell")
    swapped = evaluated()
    assert swapped["results"]["sums"]["acc,none"] == dense["results"]["sums"]["acc,none"]
    answers = [[row["filtered_resps"] for row in one["samples"]["sums"]] for one in (dense, swapped)]
    a, b = (torch.tensor([[float(pair[0]) for pair in row] for row in one]) for one in answers)
    assert a.shape == (9, 2) and not torch.equal(a[0], a[1])
    torch.testing.assert_close(a, b, atol=1e-3, rtol=1e-4)
