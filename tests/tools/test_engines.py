"""Training engines (Lightning, Accelerate): a plain run of each gives the parameters of a plain torch loop."""

from __future__ import annotations

import pytest
import torch
from tests.tools.subjects import each_side, each_subject

from headwise.layers import own_names

STEPS = 4


def problem(subject, side):
    """The model, and inputs and a target for each step: two epochs of two batches."""
    model = subject.build(side)
    batches = []
    for step in range(STEPS // 2):
        inputs = subject.inputs(seed=step + 10)
        with torch.no_grad():
            out = subject.call(model, *inputs)
        target = torch.randn(out.shape, generator=torch.Generator().manual_seed(step))
        batches.append((*inputs, target))
    return model, batches


def loss_of(subject, model, batch):
    *inputs, target = batch
    return (subject.call(model, *inputs, **subject.hide(tuple(inputs))) - target).square().mean()


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)


def plain_loop(subject, side, dtype=None):
    """The parameters after all steps."""
    model, batches = problem(subject, side)
    optimizer = adam(model)
    for batch in 2 * batches:
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            loss = loss_of(subject, model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return parameters(model)


def parameters(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def same(got, want):
    assert list(got) == list(want)
    for name, tensor in want.items():
        torch.testing.assert_close(got[name], tensor, rtol=0, atol=0, msg=lambda text, at=name: f"{at}: {text}")


lightning_row = pytest.mark.tool(
    order=17,
    tool="Lightning",
    package="lightning",
    holds="a Trainer, resumed from a checkpoint too, trains what a plain loop trains; 32 bits and bf16-mixed",
)
quiet_lightning = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers",
    "ignore:`isinstance.treespec, LeafSpec.`",
    "ignore:Checkpoint directory .* exists and is not empty",
    "ignore:You're resuming from a checkpoint that ended before the epoch ended",
)


def fit(subject, model, batches, folder, steps, precision, resume=None):
    """A Trainer's run over the batches, with a checkpoint after each epoch."""
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Task(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = model

        def training_step(self, batch, index):
            return loss_of(subject, self.model, batch)

        def configure_optimizers(self):
            return adam(self.model)

    keep = ModelCheckpoint(dirpath=folder, filename="at-{step}", every_n_train_steps=2, save_top_k=-1)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        precision=precision,
        callbacks=[keep],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    loader = torch.utils.data.DataLoader(batches, batch_size=None)
    trainer.fit(Task(), loader, ckpt_path=resume, weights_only=None if resume is None else False)
    assert trainer.global_step == steps


@lightning_row
@quiet_lightning
@each_subject
@each_side
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_lightning(subject, side, precision, tmp_path):
    want = plain_loop(subject, side, torch.bfloat16 if precision == "bf16-mixed" else None)
    model, batches = problem(subject, side)
    fit(subject, model, batches, tmp_path, STEPS, precision)
    same(parameters(model), want)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["at-step=2.ckpt", "at-step=4.ckpt"]
    again = subject.build(side, seed=9)
    fit(subject, again, batches, tmp_path, STEPS, precision, tmp_path / "at-step=2.ckpt")
    same(parameters(again), want)


accelerate_row = pytest.mark.tool(
    order=17,
    tool="Accelerate",
    package="accelerate",
    holds="`prepare`, `backward`, `save_state` and `load_state` train what a plain loop trains",
)


@pytest.fixture
def accelerator(tmp_path):
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    yield Accelerator(cpu=True, project_dir=tmp_path)
    AcceleratorState._reset_state(True)


@accelerate_row
@each_subject
@each_side
def test_accelerate(subject, side, accelerator, tmp_path):
    """Half of the steps, saved, all spoiled, loaded, and the other half."""
    want = plain_loop(subject, side)
    model, batches = problem(subject, side)
    model, optimizer, loader = accelerator.prepare(
        model, adam(model), torch.utils.data.DataLoader(batches, batch_size=None)
    )

    def step(batch):
        optimizer.zero_grad()
        accelerator.backward(loss_of(subject, model, batch))
        optimizer.step()

    for batch in loader:
        step(batch)
    accelerator.save_state(str(tmp_path / "state"))
    for batch in loader:
        step(batch)
    accelerator.load_state(str(tmp_path / "state"))
    for batch in loader:
        step(batch)
    same(parameters(accelerator.unwrap_model(model)), want)


def named_for_offload(model, side):
    """accelerate looks the parameters up in `state_dict()`, so the two have to name them alike."""
    return own_names(model) if side == "split" else model


offload_row = pytest.mark.tool(
    order=17,
    tool="Accelerate",
    package="accelerate",
    holds="offloaded to memory or disk, with `own_names` where projections are split, a model gives the same",
    torch="`out_proj` is never called, so its weights stay on the meta device",
)


@offload_row
@each_subject
@each_side
@pytest.mark.parametrize("where", ["memory", "disk"])
def test_offload(subject, side, where, tmp_path):
    from accelerate import cpu_offload, disk_offload

    model = named_for_offload(subject.build(side).eval(), side)
    inputs = subject.inputs()
    with torch.no_grad():
        want = subject.call(model, *inputs, **subject.hide(inputs))
        if where == "memory":
            cpu_offload(model, torch.device("cpu"))
        else:
            disk_offload(model, str(tmp_path), torch.device("cpu"))
        assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
        for _ in range(2):
            torch.testing.assert_close(subject.call(model, *inputs, **subject.hide(inputs)), want, rtol=0, atol=0)


empty_row = pytest.mark.tool(
    order=17,
    tool="Accelerate",
    package="accelerate",
    holds="`init_empty_weights`, then `load_checkpoint_in_model` of what `save_model` saved",
)


@empty_row
@each_subject
@each_side
def test_empty_weights(subject, side, accelerator, tmp_path):
    from accelerate import init_empty_weights, load_checkpoint_in_model

    model = named_for_offload(subject.build(side).eval(), side)
    inputs = subject.inputs()
    want = subject.call(model, *inputs)
    accelerator.save_model(model, str(tmp_path))
    with init_empty_weights():
        empty = named_for_offload(subject.build(side, seed=9).eval(), side)
    assert {parameter.device.type for parameter in empty.parameters()} == {"meta"}
    load_checkpoint_in_model(empty, str(tmp_path), device_map={"": "cpu"})
    same(parameters(empty), parameters(model))
    torch.testing.assert_close(subject.call(empty, *inputs), want, rtol=0, atol=0)


@offload_row
@each_subject
def test_offload_with_torchs_names_raises(subject):
    """Split and without `own_names`: the names of `state_dict()` are not those of the parameters."""
    from accelerate import cpu_offload

    model = subject.build("split").eval()
    with torch.no_grad(), pytest.raises(KeyError, match=r"[qkv]_proj\.weight"):
        subject.call(cpu_offload(model, torch.device("cpu")), *subject.inputs())
