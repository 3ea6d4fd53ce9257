"""`tl.SparsityCallback` in transformers' Trainer: the recipe runs, and the penalty is what it says."""

import copy
from types import SimpleNamespace

import pytest
import torch

import twell_lab as tl
from tests.models.speaking import decoders
from twell_lab.core import InputError
from twell_lab.layers.find import firing_layers
from twell_lab.training.objective import SparsityCallback

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")


def texts(many: int, tokens: int = 16) -> list[dict]:
    """Sequences in which each token is the one before plus a step."""
    made = []
    for row in range(many):
        ids = (torch.arange(tokens) * (1 + row % 3) + row) % decoders.VOCABULARY
        made.append({"input_ids": ids, "labels": ids})
    return made


def trained(folder, *callbacks, model=None, loss=None, many=64, **how):
    model = tl.relufy(decoders.build("Llama", hidden_act="silu")) if model is None else model
    how = dict(max_steps=40, logging_steps=10, learning_rate=2e-3, per_device_train_batch_size=8) | how
    args = transformers.TrainingArguments(
        folder, report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True, **how
    )
    more = dict(train_dataset=texts(many), callbacks=[*callbacks], compute_loss_func=loss)
    trainer = transformers.Trainer(model, args, **more)
    trainer.train()
    return trainer


@pytest.mark.parametrize("swapped", [False, True])
def test_the_recipe_makes_fewer_neurons_fire(tmp_path, swapped):
    model = tl.relufy(decoders.build("Llama", hidden_act="silu"))
    model = tl.sparsify(model.train(), "twell") if swapped else model
    callback = tl.SparsityCallback(l1=1.0, delay=2, warmup=5, reinit=0.1, window=10)
    penalised = trained(tmp_path, callback, model=model)
    free = trained(tmp_path, tl.SparsityCallback(l1=0.0))
    logs, others = ([row for row in one.state.log_history if "density" in row] for one in (penalised, free))
    assert len(logs) == len(others) == 4
    assert logs[-1]["density"] < 0.6 * others[-1]["density"] and logs[-1]["loss"] < logs[0]["loss"]
    assert logs[-1]["mean_nnz"] == pytest.approx(48 * logs[-1]["density"])
    assert all(row["l1_penalty"] > 0 for row in logs) and not any(row["l1_penalty"] for row in others)
    assert all(0 <= row["dead"] <= 3 * 48 for row in logs) and "dead" not in others[-1]
    model = penalised.model.eval().requires_grad_(False)
    windows = torch.stack([row["input_ids"] for row in texts(8)])
    assert tl.profile(model, [windows]).tokens == windows.numel()
    assert not any(m._forward_pre_hooks for m in model.modules())  # all were taken off


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("swapped", [False, True])
def test_a_step_is_that_of_the_loss_and_the_penalty(tmp_path, parts, swapped):
    """One step of SGD, in one part or in several, beside the gradient computed by hand."""
    model = tl.relufy(decoders.build("Llama", hidden_act="silu"))
    by_hand = copy.deepcopy(model).train()
    if swapped:
        tl.sparsify(model, "twell")
    rows = torch.stack([row["input_ids"] for row in texts(8)])
    with tl.layer_terms(by_hand) as terms:
        loss = by_hand(rows, labels=rows).loss
    (loss + 0.05 * sum(term.l1 for term in terms) / len(terms)).backward()
    how = dict(learning_rate=1.0, lr_scheduler_type="constant", optim="sgd", max_grad_norm=0.0, max_steps=1, many=8)
    how |= dict(per_device_train_batch_size=8 // parts, gradient_accumulation_steps=parts)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    trained(tmp_path, SparsityCallback(l1=0.05), model=model, **how)
    for name, weight in by_hand.named_parameters():
        moved = before[name] - dict(model.named_parameters())[name].detach()
        torch.testing.assert_close(moved, weight.grad, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("family", ["Llama", "GPT-2", "Phi-3", "Mixtral"])
def test_dead_neurons_are_found_however_their_weights_are_stored(tmp_path, family):
    """By rows, by columns, gate and up as one, and all experts in one tensor."""
    model = tl.relufy(decoders.build(family))
    gates = [layer.pattern for layer in firing_layers(model)]
    with torch.no_grad():
        for gate in gates:
            gate.weight[5], bias = 0.0, gate.bias
            if bias is not None:
                bias[5] = 0.0
    before = [gate.weight.detach().clone() for gate in gates]
    still = dict(max_steps=4, logging_steps=2, learning_rate=0.0, lr_scheduler_type="constant")
    callback = tl.SparsityCallback(l1=0.0, reinit=0.5, window=2)
    logs = trained(tmp_path, callback, model=model, **still).state.log_history
    moved = [(gate.weight != was).any(1) for gate, was in zip(gates, before)]
    assert all(rows[5] for rows in moved)
    if family != "Mixtral":  # an expert that no token came to is as silent as its neurons
        assert all(rows.sum() < len(rows) / 2 for rows in moved)
    assert [row["dead"] for row in logs if "density" in row][0] >= len(gates)


def test_layers_that_run_again_in_the_backward_pass_count_once(tmp_path):
    logs = [
        trained(tmp_path, SparsityCallback(l1=0.5, delay=2), max_steps=4, logging_steps=1, gradient_checkpointing=again)
        for again in (False, True)
    ]
    first, second = ([(row["loss"], row["l1_penalty"]) for row in one.state.log_history[:4]] for one in logs)
    torch.testing.assert_close(first, second)
    assert [penalty > 0 for _, penalty in first] == [False, False, True, True]


@pytest.mark.parametrize(("averaged", "share"), [(True, 8), (False, 2)])
def test_processes_that_average_tokens_share_the_penalty(averaged, share):
    """The Trainer multiplies the loss by the number of processes then, four here, over which gradients are averaged."""
    model = tl.relufy(decoders.build("Llama", hidden_act="silu")).train()
    rows = torch.stack([row["input_ids"] for row in texts(8)])
    how = dict(gradient_accumulation_steps=2, world_size=4, average_tokens_across_devices=averaged)
    callback, losses = SparsityCallback(l1=0.5), []
    for args in (None, SimpleNamespace(label_smoothing_factor=0, n_gpu=1, seed=0, **how)):
        if args:
            callback.on_train_begin(args, SimpleNamespace(global_step=0), None, model=model)
        losses.append(model(rows, labels=rows, num_items_in_batch=torch.tensor(240)).loss.detach())
    callback.on_train_end()
    assert float(losses[1] - losses[0]) == pytest.approx(float(callback._sums[0]) / share, rel=1e-4)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (dict(l1=-1), "l1 is -1"),
        (dict(l1=1, delay=-1), "delay is -1"),
        (dict(l1=1, window=0), "window is 0"),
        (dict(l1=1, reinit=2), "reinit is 2"),
    ],
)
def test_wrong_arguments_are_named(how, words):
    with pytest.raises(InputError, match=words):
        SparsityCallback(**how)


def test_what_it_cannot_penalise_is_refused(tmp_path):
    with pytest.raises(InputError, match="on 2 GPUs"):
        SparsityCallback(l1=1).on_train_begin(
            SimpleNamespace(label_smoothing_factor=0, n_gpu=2), None, None, model=None
        )
    with pytest.raises(InputError, match="label_smoothing_factor is 0.1"):
        trained(tmp_path, SparsityCallback(l1=1), label_smoothing_factor=0.1)
    with pytest.raises(InputError, match="relufy"):
        trained(tmp_path, SparsityCallback(l1=1), model=decoders.build("Llama"))
    with pytest.raises(InputError, match="compute_loss_func"):
        trained(tmp_path, SparsityCallback(l1=1), loss=lambda outputs, labels, **_: outputs.logits.mean())
    with pytest.raises(InputError, match="reinit is 0.1 and the gate of .* is frozen"):
        model = tl.relufy(decoders.build("Llama"))
        model.model.layers[1].mlp.gate_proj.weight.requires_grad_(False)
        trained(tmp_path, SparsityCallback(l1=1, reinit=0.1), model=model)
