"""A rank of a training in the loop of accelerate, transformers or Lightning: ``trainer_cases.py LIBRARY PHASE FOLDER``.

Phases: ``whole``, first without distopt, then dense, then compressed; ``killed``, where rank 1 ends in the third epoch;
``resumed``, from the checkpoint before that.  Losses of each step and a digest of the parameters are left in a file.
"""

import hashlib
import json
import os
import signal
import sys
from pathlib import Path

import torch

import distopt
from distopt.compress import Dense, ErrorFeedback, Packed, TopK

EPOCHS, STEPS, BATCH, FEATURES = 4, 4, 8, 12
SENT = {"plain": None, "dense": Dense(), "compressed": ErrorFeedback(Packed(TopK(0.1)))}
RANKS = 2
DIES_AFTER = 2 * STEPS + 1  # steps


def model():
    torch.manual_seed(0)
    layers = torch.nn.Linear(FEATURES, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)
    return torch.nn.Sequential(*layers)


def data():
    x = torch.randn(RANKS * BATCH * STEPS, FEATURES, generator=torch.Generator().manual_seed(1))
    return x, x.sum(1, keepdim=True)


def end_if_it_is_time(phase, step):
    if phase == "killed" and distopt.world().rank == 1 and step == DIES_AFTER:
        os.kill(os.getpid(), signal.SIGKILL)


def with_accelerate(sent, phase, folder):
    from accelerate import Accelerator

    from distopt.torch.integrations.accelerate import compress

    accelerator, net, losses = Accelerator(cpu=True), model(), []
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*data()), BATCH)
    net, optimizer, loader = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), 0.01), loader)
    if sent:
        compress(accelerator, net, sent, optimizer=optimizer)
    first = 0
    if phase == "resumed":
        accelerator.load_state(f"{folder}/accelerate")
        first = 2
    for epoch in range(first, EPOCHS):
        for x, y in loader:
            end_if_it_is_time(phase, epoch * STEPS + len(losses) % STEPS)
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(net(x), y)
            accelerator.backward(loss)
            optimizer.step()
            losses.append(loss.item())
        if phase == "killed":
            accelerator.save_state(f"{folder}/accelerate")
    return losses, accelerator.unwrap_model(net)


def with_transformers(sent, phase, folder):
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from distopt.torch.integrations.transformers import TransformersCallback

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.drop = model(), torch.nn.Dropout(0.1)

        def forward(self, x, labels):
            return {"loss": torch.nn.functional.mse_loss(self.net(self.drop(x)), labels)}

    class Pairs(torch.utils.data.TensorDataset):
        def __getitem__(self, index):
            x, y = super().__getitem__(index)
            return {"x": x, "labels": y}

    class Ends(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            end_if_it_is_time(phase, state.global_step)

    arguments = TrainingArguments(
        f"{folder}/transformers",
        per_device_train_batch_size=BATCH,
        num_train_epochs=EPOCHS,
        learning_rate=0.01,
        logging_steps=1,
        save_strategy="no" if phase == "whole" else "steps",
        save_steps=STEPS + 2,  # in the middle of an epoch
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=3,
    )
    trainer = Trainer(Net(), arguments, train_dataset=Pairs(*data()), callbacks=[Ends()])
    if sent:
        trainer.add_callback(TransformersCallback(trainer, sent))
    trainer.train(resume_from_checkpoint=phase == "resumed")
    return [row["loss"] for row in trainer.state.log_history if "loss" in row], trainer.model


def with_lightning(sent, phase, folder):
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint

    from distopt.torch.integrations.lightning import LightningCallback

    class Net(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.losses = model(), []

        def training_step(self, batch, _):
            end_if_it_is_time(phase, self.global_step)
            loss = torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), 0.01)

    callbacks = [LightningCallback(sent)] if sent else []
    if phase == "killed":
        callbacks.append(ModelCheckpoint(f"{folder}/lightning", filename="{epoch}", save_top_k=-1))
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy="ddp",
        max_epochs=EPOCHS,
        callbacks=callbacks,
        enable_checkpointing=phase == "killed",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*data()), BATCH, shuffle=True)
    net = Net()
    trainer.fit(net, loader, ckpt_path=f"{folder}/lightning/epoch=1.ckpt" if phase == "resumed" else None)
    return net.losses, net


def main():
    library, phase, folder = sys.argv[1:]
    train = {"accelerate": with_accelerate, "transformers": with_transformers, "lightning": with_lightning}[library]
    found = {}
    for name in SENT if phase == "whole" else ["compressed"]:
        losses, net = train(SENT[name], phase, folder)
        weights = b"".join(p.detach().numpy().tobytes() for p in net.parameters())
        found[name] = {"losses": losses, "digest": hashlib.sha256(weights).hexdigest()}
    Path(folder, f"{phase}-{distopt.world().rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
