"""A training of two workers of Ray Train: ``ray_training.py FOLDER``.

They train once as a whole, which Ray learns nothing of, then once more; a worker dies, and Ray starts both again.
"""

import hashlib
import json
import os
import signal
import sys
import tempfile
from pathlib import Path

import ray
import ray.train
import torch
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model

import distopt
import distopt.torch as dt
from distopt.compress import ErrorFeedback, TopK

EPOCHS, STEPS = 4, 3


def train(config):
    if not ray.train.get_checkpoint():
        run(config["folder"], "whole", report=lambda found, checkpoint: None)
    run(config["folder"], "killed", report=ray.train.report)


def run(folder, name, report):
    """Train, from Ray's checkpoint if there is one, and write down what came of it."""
    torch.manual_seed(0)
    rank = ray.train.get_context().get_world_rank()
    net = torch.nn.Sequential(torch.nn.Linear(12, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(net.parameters(), 0.01)
    model = prepare_model(net)
    sync = dt.compress(model, ErrorFeedback(TopK(0.1)), optimizer=optimizer)
    first = 0
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as saves:
            saved = torch.load(f"{saves}/model.pt")
            net.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            sync.load_state_dict(torch.load(f"{saves}/rank{rank}.pt"))
        first = saved["epoch"] + 1
    for epoch in range(first, EPOCHS):
        for step in range(STEPS):
            if name == "killed" and first == 0 and (epoch, step, rank) == (2, 1, 1):
                os.kill(os.getpid(), signal.SIGKILL)
            x = torch.randn(8, 12, generator=torch.Generator().manual_seed(100 * epoch + 10 * step + rank))
            optimizer.zero_grad()
            loss = (model(x) - x.square().sum(1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
        weights = b"".join(p.detach().numpy().tobytes() for p in net.parameters())
        found = {"digest": hashlib.sha256(weights).hexdigest(), "loss": loss.item(), "first": first}
        with tempfile.TemporaryDirectory() as saves:
            torch.save(sync.state_dict(), f"{saves}/rank{rank}.pt")
            if rank == 0:
                state = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
                torch.save(state, f"{saves}/model.pt")
            report(found, checkpoint=Checkpoint.from_directory(saves))
    Path(folder, f"{name}-{rank}.json").write_text(json.dumps(found | {"world": repr(distopt.world())}))


def main(folder):
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 * 2**20, log_to_driver=False)
    TorchTrainer(
        train,
        train_loop_config={"folder": folder},
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
        torch_config=TorchConfig(backend="gloo"),
        run_config=RunConfig(storage_path=f"{folder}/ray", failure_config=FailureConfig(max_failures=1)),
    ).fit()
    ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
