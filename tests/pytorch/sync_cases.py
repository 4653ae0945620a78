"""What ``distopt.torch.synchronize`` must do, as functions that all ranks call; torch's own DDP is the reference."""

import io
import shutil
import tempfile

import numpy as np
import pytest
import torch
import torch.distributed as dist
from cases import Cases
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import distopt.torch as dt
from distopt.compress import DeepGradientCompression, ErrorFeedback, Half, Int8, OneBit, Packed, TopK

CASES = Cases()
case, case_of_two, case_with_four = CASES.case, CASES.case_of_two, CASES.case_with_four


class Net(nn.Module):
    """Convolution, normalization, a tied weight, an unused branch, and one used by some ranks only."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.first, self.second = nn.Linear(288, 288), nn.Linear(288, 10)
        self.tied = nn.Linear(288, 288, bias=False)
        self.tied.weight = self.first.weight
        self.unused, self.sometimes = nn.Linear(5, 5), nn.Linear(288, 288)

    def forward(self, x, branch=False):
        x = torch.relu(self.norm(self.conv(x))).flatten(1)
        x = self.tied(torch.relu(self.first(x)))
        return self.second(self.sometimes(x) if branch else x)


def net(seed=0):
    torch.manual_seed(seed + dist.get_rank())
    return Net()


def batch(step, size=8):
    g = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    return torch.randn(size, 3, 8, 8, generator=g), torch.randint(0, 10, (size,), generator=g)


def ddp(model):
    return DistributedDataParallel(model, find_unused_parameters=True, gradient_as_bucket_view=True)


def same(a, b, exact=True):
    for (name, x), (_, y) in zip(a, b, strict=True):
        if x is None or y is None:
            assert x is y, name
        elif exact and dist.get_world_size() == 2:  # of more numbers, in another order
            assert torch.equal(x, y), (name, (x - y).abs().max())
        else:
            torch.testing.assert_close(x, y, rtol=2e-5, atol=2e-6)


def gradients(model):
    return [(n, None if p.grad is None else p.grad.detach().clone()) for n, p in model.named_parameters()]


def everywhere_alike(model):
    for name, p in model.named_parameters():
        for x in (p.detach(), p.grad):
            if x is not None:
                everyone = [torch.empty(x.shape) for _ in range(dist.get_world_size())]
                dist.all_gather(everyone, x.contiguous())
                assert all(torch.equal(everyone[0].nan_to_num(), y.nan_to_num()) for y in everyone), name


def both(train, make=net, exact=True, **options):
    """Train with DDP and with synchronize; gradients and parameters must be the same."""
    theirs, mine = make(), make()
    reference = ddp(theirs)
    sync = dt.synchronize(mine, **options)
    train(reference, theirs, reference.no_sync)
    train(mine, mine, sync.no_sync)
    same(gradients(mine), gradients(theirs), exact)
    same(list(mine.named_parameters()), list(theirs.named_parameters()), exact)
    everywhere_alike(mine)
    sync.close()


def plain(model, owner, no_sync, steps=3, **zero):
    opt = torch.optim.SGD(owner.parameters(), 0.05, momentum=0.9)  # Adam blows up the noise of a bias before a norm
    for step in range(steps):
        x, y = batch(step)
        opt.zero_grad(**zero)
        nn.functional.cross_entropy(model(x), y).backward()
        opt.step()


@case
def a_plain_loop_is_that_of_ddp():
    both(plain)


@case
def buckets_may_leave_early():
    """The same bits; small buckets, of which the first leave while later gradients are computed."""
    for compressor in (None, Half()):
        models = [net(), net()]
        for model, overlap in zip(models, (False, dist.get_world_size() > 1), strict=True):
            sync = dt.synchronize(model, compressor, overlap=overlap, threshold=3000)
            plain(model, model, sync.no_sync, steps=4)
            for k in range(2):
                nn.functional.cross_entropy(model(batch(9)[0], branch=dist.get_rank() == k), batch(9)[1]).backward()
            sync.close()
        same(gradients(models[0]), gradients(models[1]))
        same(list(models[0].named_parameters()), list(models[1].named_parameters()))
        everywhere_alike(models[1])


@case
def gradients_may_be_zeroed_in_place():
    both(lambda *a: plain(*a, set_to_none=False))


@case
def batches_add_up_without_exchange():
    def train(model, owner, no_sync):
        opt = torch.optim.SGD(owner.parameters(), 0.1, momentum=0.9)
        for step in range(3):
            opt.zero_grad()
            with no_sync():
                for k in range(2):
                    x, y = batch(10 * step + k)
                    nn.functional.cross_entropy(model(x), y).backward()
            x, y = batch(10 * step + 2)
            nn.functional.cross_entropy(model(x), y).backward()
            opt.step()

    both(train)


@case
def a_branch_of_some_ranks_gets_zeros_from_the_others():
    def train(model, owner, no_sync):
        opt = torch.optim.SGD(owner.parameters(), 0.1)
        for step in range(4):
            x, y = batch(step)
            opt.zero_grad()
            nn.functional.cross_entropy(model(x, branch=dist.get_rank() == step % 3), y).backward()
            opt.step()

    both(train)


@case
def channels_last_parameters_keep_their_strides():
    def make():
        return net().to(memory_format=torch.channels_last)

    both(plain, make, exact=False)
    model = make()
    dt.synchronize(model)
    nn.functional.cross_entropy(model(batch(0)[0]), batch(0)[1]).backward()
    assert model.conv.weight.grad.stride() == model.conv.weight.stride()


@case
def gradients_may_be_clipped_and_learning_rates_scheduled():
    def train(model, owner, no_sync):
        opt = torch.optim.SGD(owner.parameters(), 0.05, momentum=0.9, foreach=True)
        schedule = torch.optim.lr_scheduler.StepLR(opt, 1, 0.5)
        for step in range(3):
            x, y = batch(step)
            opt.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            nn.utils.clip_grad_norm_(owner.parameters(), 0.5)
            opt.step()
            schedule.step()

    both(train)


@case
def a_closure_may_call_backward_several_times():
    def train(model, owner, no_sync):
        opt = torch.optim.LBFGS(owner.second.parameters(), 0.1, max_iter=3)
        x, y = batch(0)

        def closure():
            opt.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            return loss

        opt.step(closure)

    model = net()
    sync = dt.synchronize(model)
    train(model, model, sync.no_sync)
    everywhere_alike(model.second)


@case
def two_models_take_turns():
    one, other = net(), net(5)
    syncs = [dt.synchronize(one), dt.synchronize(other, ErrorFeedback(TopK(0.1)))]
    for step in range(3):
        x, y = batch(step)
        loss = nn.functional.cross_entropy(one(x), y) + nn.functional.cross_entropy(other(x), y)
        for model in (one, other):
            model.zero_grad()
        loss.backward()
        everywhere_alike(one)
        everywhere_alike(other)
    assert [sync.step_counter for sync in syncs] == [3, 3]


@case
def checkpointed_activations_are_computed_again():
    for reentrant in (False, True):

        def train(model, owner, no_sync, reentrant=reentrant):
            opt = torch.optim.SGD(owner.parameters(), 0.1)
            for step in range(2):
                x, y = batch(step)
                opt.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                opt.step()

        class Again(Net):
            def forward(self, x, reentrant=reentrant):
                x = torch.relu(self.norm(self.conv(x))).flatten(1)
                x = checkpoint(self.first, x, use_reentrant=reentrant)
                return checkpoint(self.second, torch.relu(x), use_reentrant=reentrant)

        def make():
            torch.manual_seed(dist.get_rank())
            return Again()

        mine = make()
        sync = dt.synchronize(mine)
        train(mine, mine, sync.no_sync)
        assert sync.step_counter == 2
        everywhere_alike(mine)


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise KeyError("in backward")


@case
def a_backward_pass_that_raises_on_one_rank_raises_on_all():
    """Each has one error for the batch, and all go on."""
    for overlap in (False, dist.get_world_size() > 1):
        model = net()
        sync = dt.synchronize(model, overlap=overlap, threshold=3000)
        plain(model, model, sync.no_sync, steps=1)
        assert sync.may_overlap == overlap
        x, y = batch(0)
        hidden = torch.relu(model.conv(x)).flatten(1)
        fails = dist.get_rank() == 0
        loss = nn.functional.cross_entropy(model.second(model.first(Fails.apply(hidden) if fails else hidden)), y)
        with pytest.raises((KeyError, RuntimeError)) as caught:
            loss.backward()
        if fails:
            assert caught.type is KeyError
            model(x)
        else:
            assert "rank 0: a backward pass has raised" in str(caught.value)
        plain(model, model, sync.no_sync)
        assert sync.step_counter == 4
        everywhere_alike(model)


@case
def compiled_models_are_synchronized():
    for wraps_first in (True, False):
        model = net()
        if wraps_first:
            sync = dt.synchronize(model)
            compiled = torch.compile(model, backend="aot_eager")
        else:
            compiled = torch.compile(model, backend="aot_eager")
            sync = dt.synchronize(compiled)
        plain(compiled, model, sync.no_sync)
        assert sync.step_counter == 3
        everywhere_alike(model)


@case
def gradients_of_earlier_passes_stay_or_count():
    """Without zero_grad: as with DDP, what is used again adds up, and what is not stays as it is."""

    def train(model, owner, no_sync):
        for step in range(3):
            x, y = batch(step)
            nn.functional.cross_entropy(model(x, branch=step == 0), y).backward()

    both(train)


@case
def layers_may_be_frozen_later_and_not_thawed():
    model = net()
    model.second.weight.requires_grad_(False)
    sync = dt.synchronize(model)
    plain(model, model, sync.no_sync, steps=1)
    assert model.second.weight.grad is None
    model.first.bias.requires_grad_(False)
    plain(model, model, sync.no_sync, steps=1)
    everywhere_alike(model)
    if dist.get_rank() == 0:
        model.second.weight.requires_grad_(True)
    with pytest.raises(ValueError, match=r"second\.weight: a parameter that requires a gradient must have been there"):
        plain(model, model, sync.no_sync, steps=1)


@case
def sparse_gradients_are_refused_on_every_rank():
    """Where no module says that they come, or one on a rank alone."""
    if dist.get_world_size() > 1:
        with pytest.raises(ValueError, match="ranks differ"):
            dt.synchronize(nn.Embedding(10, 3, sparse=dist.get_rank() == 0))
    model = nn.Linear(3, 10)
    dt.synchronize(model)
    with pytest.raises(TypeError, match="weight: a gradient must be dense"):
        nn.functional.embedding(torch.tensor([1, 2]), model.weight, sparse=dist.get_rank() == 0).sum().backward()


@case
def a_model_may_be_trained_by_parts():
    """Without its own forward: the gradients of parameters begin the exchange."""
    model = net()
    sync = dt.synchronize(model)
    model.second(torch.ones(2, 288) * dist.get_rank()).sum().backward()
    assert sync.step_counter == 1
    mean = sum(range(dist.get_world_size())) / dist.get_world_size()
    torch.testing.assert_close(model.second.weight.grad, torch.full((10, 288), 2 * mean))


@case
def bfloat16_models_are_summed_in_float32():
    model = net().to(torch.bfloat16)
    dt.synchronize(model)
    x, y = batch(0)
    nn.functional.cross_entropy(model(x.bfloat16()).float(), y).backward()
    assert model.second.weight.grad.dtype is torch.bfloat16
    for p in model.parameters():
        if p.grad is not None:
            everyone = [torch.empty(p.grad.shape) for _ in range(dist.get_world_size())]
            dist.all_gather(everyone, p.grad.float())
            assert all(torch.equal(everyone[0], g) for g in everyone)


@case
def every_mode_trains_and_leaves_the_ranks_alike():
    for compressor in (
        ErrorFeedback(Packed(TopK(0.05))),
        ErrorFeedback(OneBit()),
        ErrorFeedback(Int8()),
        DeepGradientCompression(TopK(0.05), momentum=0.9),
    ):
        for exchange in ("gather", "two_phase", "nodes"):
            model = net()
            opt = torch.optim.SGD(model.parameters(), 0.05)
            sync = dt.synchronize(model, compressor, exchange=exchange, optimizer=opt)
            plain(model, model, sync.no_sync)
            everywhere_alike(model)
            assert sync.step_counter == 3


@case
def a_ddp_script_is_compressed_by_one_line():
    """Without compression it is DDP to the bit; with, the ranks stay alike."""
    theirs, mine = net(), net()
    reference, hooked = ddp(theirs), ddp(mine)
    exchange = dt.compress(hooked)
    plain(reference, theirs, reference.no_sync)
    plain(hooked, mine, hooked.no_sync)
    same(list(mine.named_parameters()), list(theirs.named_parameters()))
    assert exchange.step_counter == 3
    for compressor in (ErrorFeedback(Packed(TopK(0.05))), ErrorFeedback(Int8())):
        model = net()
        hooked = DistributedDataParallel(model, bucket_cap_mb=0.01, find_unused_parameters=True)
        exchange = dt.compress(hooked, compressor, exchange="two_phase")
        plain(hooked, model, hooked.no_sync, steps=4)
        everywhere_alike(model)
        assert exchange.step_counter == 4


@case
def momentum_in_the_scripts_optimizer_is_refused_beside_dgc():
    for optimizer in (torch.optim.SGD, torch.optim.AdamW):
        model = nn.Linear(3, 4)
        opt = optimizer(model.parameters(), 0.1, **({"momentum": 0.9} if optimizer is torch.optim.SGD else {}))
        with pytest.raises(ValueError, match=r"got (SGD's momentum|AdamW's betas\[0\])=0.9 of group 0"):
            dt.synchronize(model, DeepGradientCompression(TopK(0.5)), optimizer=opt)
    with pytest.raises(ValueError, match=r"optimizer must be the script's with DeepGradientCompression, .* got None"):
        dt.synchronize(nn.Linear(3, 4), DeepGradientCompression(TopK(0.5)))


@case_of_two
def what_is_not_finite_is_so_on_every_rank_and_residuals_stay():
    model = net()
    sync = dt.synchronize(model, ErrorFeedback(TopK(0.05)))
    plain(model, model, sync.no_sync, steps=1)
    before = {n: a.clone() for n, a in sync.state_dict()["state"]["states"]["residual"].items()}
    x, y = batch(1)
    model.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    (loss * (np.inf if dist.get_rank() == 1 else 1.0)).backward()
    assert torch.isinf(model.second.weight.grad).all()
    for name, a in sync.state_dict()["state"]["states"]["residual"].items():
        np.testing.assert_array_equal(a, before[name])
    everywhere_alike(model)
    plain(model, model, sync.no_sync, steps=1)


@case
def scalers_of_all_ranks_skip_the_same_steps():
    """One rank's infinity: every rank skips and halves its scale; residuals are in the units of the loss."""
    results = []
    for scales in (True, False):
        model = net()
        opt = torch.optim.SGD(model.parameters(), 0.05)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2, enabled=scales)
        sync = dt.synchronize(model, ErrorFeedback(TopK(0.05)), optimizer=opt, scaler=scaler if scales else None)
        seen = []
        for step in range(6):
            opt.zero_grad()
            x, y = batch(step)
            loss = nn.functional.cross_entropy(model(x), y)
            bad = step == 3 and dist.get_rank() == dist.get_world_size() - 1
            scaler.scale(loss * (np.inf if bad else 1.0)).backward()
            if scales or step != 3:
                scaler.step(opt)
                scaler.update()
            seen.append(scaler.get_scale())
        everywhere_alike(model)
        assert sync.skipped == 1
        assert not scales or seen == [2.0**10, 2.0**11, 2.0**11, 2.0**10, 2.0**10, 2.0**11]
        results.append(([p.detach().clone() for p in model.parameters()], sync.state_dict()["state"]["states"]))
    (mine, residuals), (theirs, others) = results
    for a, b in zip(mine, theirs, strict=True):
        assert torch.equal(a, b)
    for name, a in residuals["residual"].items():
        assert torch.equal(a, others["residual"][name])


@case
def training_goes_on_from_a_state_to_the_same_bits():
    """What torch.save writes, and torch.load reads without pickled code."""

    def make(state=None):
        model = net() if state is None else Net()
        opt = torch.optim.AdamW(model.parameters(), 0.01)
        sync = dt.synchronize(model, ErrorFeedback(Packed(TopK(0.05))), exchange="two_phase")
        if state is not None:
            model.load_state_dict(state["model"])
            opt.load_state_dict(state["opt"])
            sync.load_state_dict(state["sync"])
        return model, opt, sync

    def train(model, opt, steps):
        for step in steps:
            opt.zero_grad()
            nn.functional.cross_entropy(model(batch(step)[0]), batch(step)[1]).backward()
            opt.step()

    model, opt, sync = make()
    train(model, opt, range(4))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "opt": opt.state_dict(), "sync": sync.state_dict()}, file)
    train(model, opt, range(4, 8))
    file.seek(0)
    other, opt, sync = make(torch.load(file, weights_only=True))
    assert sync.step_counter == 4
    train(other, opt, range(4, 8))
    for (name, a), b in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name


@case
def one_state_for_all_ranks_keeps_what_waits():
    """The mean of residuals, and of what owners owe, over ranks; the state of another rank is refused."""
    model = net()
    sync = dt.synchronize(model, ErrorFeedback(Packed(TopK(0.05))), exchange="two_phase")
    plain(model, model, sync.no_sync)
    mine, full = sync.state_dict(), sync.full_state_dict()
    states = mine["state"]["states"]
    for kind, arrays in full["state"]["states"].items():
        for name, mean in arrays.items():
            total = states.get(kind, {}).get(name, torch.zeros_like(mean)).double()
            dist.all_reduce(total)
            torch.testing.assert_close(mean, (total / dist.get_world_size()).to(mean.dtype))
    assert repr(sync).startswith("Synchronizer(unknown of the script, rank ")
    assert "compressor=ErrorFeedback(Packed(TopK(0.05" in repr(sync)
    sync.load_state_dict(full)
    again = sync.full_state_dict()
    for kind, arrays in full["state"]["states"].items():
        for name, mean in arrays.items():
            assert torch.equal(mean, again["state"]["states"][kind][name])
    with pytest.raises(ValueError, match=r"state must be that of rank \d of \d, got that of rank 7 of \d; save"):
        sync.load_state_dict(mine | {"rank": 7})
    with pytest.raises(ValueError, match=r"state must be what state_dict\(\) has returned, with .* got dict"):
        sync.load_state_dict({"step": 3})
    plain(model, model, sync.no_sync, steps=1)
    everywhere_alike(model)


@case
def a_checkpoint_folder_has_residuals_and_model():
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    model = net()
    sync = dt.synchronize(model, ErrorFeedback(TopK(0.05)))
    plain(model, model, sync.no_sync)
    sync.save(folder[0], extra={"model": {n: p.detach().numpy() for n, p in model.named_parameters()}})
    states = sync.state_dict()["state"]["states"]
    plain(model, model, sync.no_sync, steps=1)
    sync.load(folder[0], None)
    for name, a in sync.state_dict()["state"]["states"]["residual"].items():
        assert torch.equal(a, states["residual"][name])
    sync.close()
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])


@case
def what_cannot_be_synchronized_is_refused_at_once():
    model = net()
    dt.synchronize(model)
    with pytest.raises(ValueError, match="model must not be synchronized twice"):
        dt.synchronize(model)
    with pytest.raises(TypeError, match=r"model must not be a DistributedDataParallel, .* see compress"):
        dt.synchronize(DistributedDataParallel(net()))
    for wrong in (Int8, "int8"):
        with pytest.raises(TypeError, match="compressor must derive"):
            dt.synchronize(net(), wrong)


@case
def an_optimizer_of_another_model_is_refused():
    with pytest.raises(ValueError, match=r"optimizer must update parameters of the model, got a SGD of 2 others"):
        dt.synchronize(net(), optimizer=torch.optim.SGD(nn.Linear(2, 3).parameters(), 0.1))


@case
def a_layer_that_was_replaced_is_named():
    model = net()
    sync = dt.synchronize(model)
    plain(model, model, sync.no_sync, steps=1)
    model.second = nn.Linear(288, 10)
    with pytest.raises(ValueError, match=r"second\.weight: a parameter that requires a gradient must have been there"):
        plain(model, model, sync.no_sync, steps=1)
    sync.close()
    sync = dt.synchronize(model)
    plain(model, model, sync.no_sync, steps=1)
    everywhere_alike(model)


def meshes():
    """A mesh of replicas and shards."""
    shards = 2 if dist.get_world_size() == 4 else 1
    return init_device_mesh("cpu", (dist.get_world_size() // shards, shards), mesh_dim_names=("replicate", "shard"))


def sharded(model, mesh):
    """A model of fully_shard, two modules on their own; gloo has no mean, so that sums are asked for."""
    for module in (model.first, model.second, model):
        fully_shard(module, mesh=mesh)
        module.set_force_sum_reduction_for_comms(True)
    return model


class Plain(nn.Module):
    """Without buffers: fully_shard leaves those of every rank alone."""

    def __init__(self):
        super().__init__()
        self.conv, self.first, self.second = nn.Conv2d(3, 7, 3), nn.Linear(252, 61), nn.Linear(61, 10)

    def forward(self, x):
        return self.second(torch.relu(self.first(torch.relu(self.conv(x)).flatten(1))))


@case_with_four
def shards_of_fully_shard_are_exchanged_between_replicas():
    """Dense equals DDP over all ranks, and with batches that add up; compressed, replicas stay alike."""
    mesh = meshes()
    for compressor in (None, ErrorFeedback(Packed(TopK(0.05))), ErrorFeedback(Int8())):
        torch.manual_seed(1)
        model = sharded(Plain(), mesh["shard"])
        torch.manual_seed(1)
        theirs = Plain()
        reference = DistributedDataParallel(theirs)
        sync = dt.compress(model, compressor, group=mesh.get_group("replicate"))
        opts = [torch.optim.SGD(m.parameters(), 0.05, momentum=0.9) for m in (model, theirs)]
        for step in range(4):
            for m, opt, no_sync in ((model, opts[0], sync.no_sync), (reference, opts[1], reference.no_sync)):
                opt.zero_grad(set_to_none=step % 2 == 0)
                with no_sync():
                    nn.functional.cross_entropy(m(batch(step)[0]), batch(step)[1]).backward()
                nn.functional.cross_entropy(m(batch(step + 9)[0]), batch(step + 9)[1]).backward()
                opt.step()
        assert sync.step_counter == 4
        if compressor is None:
            for (name, a), b in zip(model.named_parameters(), theirs.parameters(), strict=True):
                torch.testing.assert_close(a.full_tensor(), b.detach(), rtol=1e-4, atol=1e-6, msg=name)
        for name, p in model.named_parameters():
            local = p.to_local().detach().clone()
            everyone = [torch.empty_like(local) for _ in range(mesh.shape[0])]
            dist.all_gather(everyone, local, group=mesh.get_group("replicate"))
            assert all(torch.equal(local, x) for x in everyone), name
        sync.close()


@case_with_four
def replicas_in_the_mesh_of_fully_shard_are_refused():
    mesh = meshes()
    if mesh.shape[0] > 1:
        model = sharded(Plain(), mesh)
        with pytest.raises(ValueError, match=r"a DTensor must be sharded over all of its mesh, got .*Replicate"):
            dt.compress(model, group=mesh.get_group("replicate"))
    with pytest.raises(ValueError, match=r"group must be the ranks that have the same shards, .* got None"):
        dt.compress(sharded(Plain(), mesh["shard"]))
    with pytest.raises(TypeError, match=r"model must be a DistributedDataParallel, .* got a Linear; see synchronize"):
        dt.compress(nn.Linear(2, 3))
    if dist.get_world_size() == 4:
        with pytest.raises(ValueError, match=r"group must be the ranks that have the same shards, got ranks .* others"):
            dt.compress(sharded(Plain(), mesh["shard"]), group=mesh.get_group("shard"))


@case_of_two
def parameter_groups_of_several_meshes_are_refused():
    """Of one module of fully_shard: their replicas would be other ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("replicate", "shard"))
    everyone = FSDPMeshInfo(mesh["replicate"], shard_mesh_dim=0)
    model = Plain()
    fully_shard(
        model,
        mesh=mesh["shard"],
        shard_placement_fn=lambda p: ShardPlacementResult(Shard(0), everyone) if p is model.conv.weight else None,
    )
    with pytest.raises(ValueError, match="all parameters must be sharded over one mesh, got meshes of the ranks"):
        dt.compress(model, group=mesh.get_group("replicate"))


@case_with_four
def a_group_of_the_script_exchanges_alone():
    """Neighbours train one model each."""
    rank, size = dist.get_rank(), dist.get_world_size()
    halves = [list(range(size // 2)), list(range(size // 2, size))] if size > 1 else [[0]]
    groups = [dist.new_group(half) for half in halves]
    mine = groups[0 if rank in halves[0] else -1]
    model = net(seed=40)
    sync = dt.synchronize(model, group=mine)
    plain(model, model, sync.no_sync)
    everyone = [torch.empty(10) for _ in range(size)]
    dist.all_gather(everyone, model.second.bias.detach())
    for half in halves:
        assert all(torch.equal(everyone[half[0]], everyone[r]) for r in half)
    assert size == 1 or not torch.equal(everyone[0], everyone[-1])
    with pytest.raises(TypeError, match="group must be a process group or a Communicator, got a int"):
        dt.synchronize(net(), group=3)


@case_of_two
def ranks_with_other_models_are_told_so():
    torch.manual_seed(0)
    model = nn.Linear(3, 4 + dist.get_rank())
    with pytest.raises(ValueError, match="ranks differ: rank 0 has parameter"):
        dt.synchronize(model)


cases_of = CASES.of


def run_all(comm):
    """{case: what it raised, as text}."""
    return CASES.run(comm)
