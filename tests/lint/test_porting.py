"""The lines of a script that change when it is ported, of scripts as people write them."""

import difflib
import textwrap
from pathlib import Path

import pytest

from lockstep.errors import ConfigError
from lockstep.lint import changes, changes_in

EXAMPLES = Path(__file__).parents[2] / "examples"
WITHOUT_NEXT = (
    ", without iter() and next(); if the loop makes another number of steps than one pass: moving.md, cycle(loader)"
)


def advice(text):
    """The advice on each line, as {line: [advice]}."""
    found = {}
    for change in changes(textwrap.dedent(text)):
        for line in change.lines:
            found.setdefault(line, []).append(change.advice)
    return found


def test_the_example_on_one_device_changes_where_the_next_one_differs():
    before, after = ((EXAMPLES / name).read_text().splitlines() for name in ("01_single_device.py", "02_lockstep.py"))
    blocks = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    differ = {line + 1 for tag, first, last, _, _ in blocks if tag == "replace" for line in range(first, last)}
    told = {line for change in changes_in(str(EXAMPLES / "01_single_device.py")) for line in change.lines}
    title, evaluation = 1, 35  # of the whole set at once, which no loop shows
    assert differ - told == {title, evaluation}
    advised = " ".join(change.advice for change in changes_in(str(EXAMPLES / "01_single_device.py")))
    for line in (
        "run = lockstep.init(global_batch=128)",
        "model, optimizer, scheduler = run.prepare(model, optimizer, scheduler)",
        "for _ in run.epochs(10):",
        "for batch in run.batches(loader):",
        "run.backward(batch, loss_fn)",
    ):
        assert line in advised
        assert any(line in each for each in after)


def test_loops_are_found_through_the_functions_that_hold_them():
    found = advice(
        """
        import torch, torch.nn.functional as F
        from tqdm import tqdm
        def train(model, loader, opt):
            for i, (x, y) in enumerate(tqdm(loader, desc="train")):
                loss = F.cross_entropy(model(x), y) / 4
                scaler.scale(loss).backward()
        def main():
            opt = torch.optim.SGD(model.parameters(), 0.1)
            for epoch in range(1, args.epochs + 1):
                train(model, loader, opt)
        """
    )
    assert found[5][0].startswith("for i, batch in enumerate(tqdm(run.batches(loader), desc='train')):")
    assert found[7][0].startswith("loss = run.backward(batch, F.cross_entropy);")
    assert found[9] == ["below: run = lockstep.init(global_batch=B); model, opt = run.prepare(model, opt)"]
    assert found[4] == found[11] == ["give run to this function"]
    assert found[10] == ["for epoch in run.epochs(args.epochs):  # which counts from 0, not from 1"]


@pytest.mark.parametrize(
    ("loop", "said"),
    [
        ("for e in range(5):", "for e in run.epochs(5):  # from where a resumed run stands"),
        ("for e in range(start, 5):", "for e in run.epochs(5):  # from where a resumed run stands"),
        ("for e in range(0, 5):", "for e in run.epochs(5):  # from where a resumed run stands"),
        ("for e in range(2, 5):", "for e in run.epochs(3):  # which counts from 0, not from 2"),
        ("for e in range(1, n):", "for e in run.epochs(n - 1):  # which counts from 0, not from 1"),
        ("for e in tqdm(range(5)):", "for e in run.epochs(5):  # from where a resumed run stands"),
        ("while True:", "for epoch in run.epochs(N):"),
    ],
)
def test_loops_over_epochs(loop, said):
    found = advice(f"import torch\n{loop}\n    for x, y in loader:\n        f(model(x), y).backward()\n")
    assert found[2] == [said]
    assert found[4][0].startswith("loss = run.backward(batch, f)")


def test_a_loop_that_cuts_its_batches_itself_needs_a_data_set():
    found = advice("import torch\nfor i in range(0, len(x), 32):\n    f(model(x[i:i+32]), y[i:i+32]).backward()\n")
    assert "TensorDataset(x, y)" in found[2][0]


@pytest.mark.parametrize(
    ("read", "said"),
    [
        (
            "logger.log_every(data_loader, 10, header)",
            "logger.log_every(run.batches(data_loader), 10, header)",
        ),
        ("tqdm(enumerate(self.train_dl), total=9)", "tqdm(enumerate(run.batches(self.train_dl)), total=9)"),
        ("make_loader(dataset, 8)", "run.batches(make_loader(dataset, 8))"),
        ("monit.iterate('Train', self.loader)", "monit.iterate('Train', run.batches(self.loader))"),
        ("loaders['train']", "run.batches(loaders['train'])"),
    ],
)
def test_what_a_loop_over_batches_reads(read, said):
    found = advice(f"import torch\nfor x, y in {read}:\n    f(model(x), y).backward()\n")
    assert f" in {said}:" in found[2][0]


def test_a_bar_of_a_with_statement_is_what_it_shows():
    """A public Glow was told to read run.batches(pbar), where pbar counts to a number of steps."""
    found = advice(
        """
        with tqdm(train_loader) as progress:
            for i, (x, y) in enumerate(progress):
                loss = criterion(model(x), y)
                loss.backward()
        with tqdm(range(args.iter)) as bar:
            for i in bar:
                x, y = next(batches)
                loss = criterion(model(x), y)
                loss.backward()
        """
    )
    assert found[3][0].startswith("progress = tqdm(run.batches(train_loader)), and for i, batch in enumerate(progress)")
    assert found[7][0].startswith("for epoch in run.epochs(N): for batch in run.batches(")


def test_a_list_of_settings_is_no_data_to_evaluate():
    found = advice(
        """
        test_weights = [0.0, 0.5, 2.0]
        for x, y in train_loader:
            criterion(model(x), y).backward()
        model.eval()
        with torch.no_grad():
            for weight in test_weights:
                model.sample(weight)
            for x, y in test_loader:
                total += criterion(model(x), y)
        """
    )
    assert 7 not in found and "run.evaluate(test_loader" in found[9][0]


def test_sizes_of_what_the_loop_has_read_are_those_of_the_step():
    found = advice(
        """
        import torch
        for i, (x, y) in enumerate(loader):
            loss = f(model(x), y)
            loss.backward()
            seen += len(x)
            seen += y.size(0)
            seen += y.shape[0]
            length = x.size(1) + len(loader)
        """
    )
    for line in (6, 7, 8):
        assert found[line] == ["len(batch), where it counts samples: those of the step over all processes"]
    assert 9 not in found


def test_a_count_of_batches_is_no_loop_over_them():
    found = advice("import torch\nfor i in range(len(loader)):\n    x, y = next(it)\n    f(model(x), y).backward()\n")
    assert found[2] == [f"for epoch in run.epochs(N): for batch in run.batches(loader){WITHOUT_NEXT}"]


def test_data_sets_read_together():
    found = advice("import torch\nfor a, b in zip(one, other):\n    loss(model(a, b), b).backward()\n")
    assert found[2][0].startswith("for batch in run.batches((one, other)):")
    assert found[2][0].endswith("read once in an epoch, where zip() ends with the smallest")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (("loss = f(model(x), y, mask)",), "lambda output, target: f(output, target, mask)"),
        (("x, y = x.to(dev), y.to(dev)", "out = net(x)", "loss = f(out, y)"), "f"),
        (
            ("out = net(x, 3)", "loss = f(out, y)"),
            "lambda output, data: f(output, data[1]), forward=lambda data: net(data[0], 3)",
        ),
        (
            ("again, mu = net(x)", "loss = f(again, x, mu)"),
            "lambda output, data: f(output[0], data[0], output[1]), forward=lambda data: net(data[0])",
        ),
        (
            ("loss = net(ids=x, y=y).loss",),
            "lambda output, data: output.loss, forward=lambda data: net(ids=data[0], y=data[1])",
        ),
        (("x = x.reshape(-1, 784)", "loss = f(net(x), y)"), "loss_fn, forward=forward"),
        (("z = Variable(x)", "loss = f(net(z), y)"), "loss_fn, forward=forward"),
        (("x, y = x.view(-1, 9).cuda(), y.cuda()", "loss = f(net(x), y)"), "loss_fn, forward=forward"),
        (("z = x.float()", "loss = f(net(z), y)"), "loss_fn, forward=forward"),
        (("z = encoder(x)", "out = decoder(z)", "loss = f(out, y)"), "loss_fn, forward=forward"),
    ],
)
def test_the_model_and_its_loss_become_functions(body, said):
    lines = "\n    ".join((*body, "loss.backward()"))
    found = advice(f"import torch\nfor i, (x, y) in enumerate(data):\n    {lines}\n")
    assert found[len(body) + 3][0].startswith(f"loss = run.backward(batch, {said})")


def test_a_model_of_several_inputs_is_called_by_forward():
    found = advice(
        """
        import torch
        for batch in loader:
            a, b, y = [each.to(device) for each in batch]
            output = model(a, b).squeeze()
            loss = criterion(output, y) / parts
            loss.backward()
        """
    )
    assert found[7][0].startswith(
        "loss = run.backward(batch, lambda output, data: criterion(output, data[2]), "
        "forward=lambda data: model(data[0], data[1]).squeeze())"
    )


def test_a_batch_that_is_a_dict_is_taken_apart_by_forward_and_the_loss():
    found = advice(
        """
        import torch
        for b in DataLoader(rows, collate_fn=padded):
            logits = model(b["tokens"], b["lengths"])
            loss = loss_fn(logits.flatten(0, 1), b["tags"].flatten())
            loss.backward()
        """
    )
    assert found[6][0].startswith(
        "loss = run.backward(batch, lambda output, data: loss_fn(output.flatten(0, 1), data['tags'].flatten()), "
        "forward=lambda data: model(data['tokens'], data['lengths']))"
    )


def test_totals_of_outputs_become_means_beside_the_loss():
    found = advice(
        """
        import torch
        for x, y in loader:
            out = model(x)
            loss = f(out, y)
            loss.backward()
            total += loss.item()
            guess = out.argmax(1)
            hits += (guess == y).sum().item()
            seen += 1
        """
    )
    assert found[8][0].startswith("computed from out, which the loop does not have any more: loss, more =")
    assert 7 not in found and 10 not in found


def test_a_loss_that_the_model_returns():
    found = advice("import torch\nfor x in data:\n    total = model(**x).loss\n    total.backward()\n")
    assert found[4][0].startswith("total = run.backward(batch, lambda output, data: output.loss), once means.md")


def test_two_models_are_prepared_in_one_module_dict():
    found = advice(
        """
        import torch
        opt_d = torch.optim.Adam(net_d.parameters())
        opt_g = torch.optim.Adam(net_g.parameters())
        for x, y in torch.utils.data.DataLoader(data, batch_size=16):
            f(net_d(x), y).backward()
            f(net_g(x), y).backward()
        """
    )
    assert "models = nn.ModuleDict({'net_d': net_d, 'net_g': net_g})" in found[4][0]
    assert "models, opt_d, opt_g = run.prepare(models, opt_d, opt_g)" in found[4][0]
    assert any("a GAN" in each for each in found[6])


def test_a_model_is_found_through_lists_of_parameters():
    found = advice(
        """
        import torch
        params = list(decoder.parameters()) + list(encoder.head.parameters())
        optimizer = torch.optim.Adam(params)
        plain = Muon([{"params": self.net.body.parameters()}])
        unseen = torch.optim.SGD(groups)
        for x, y in loader:
            f(model(x), y).backward()
        """
    )
    models = "nn.ModuleDict({'decoder': decoder, 'encoder': encoder, 'net': self.net})"
    assert models in found[6][0]
    assert "models, optimizer, plain, unseen = run.prepare(models, optimizer, plain, unseen)" in found[6][0]


def test_an_optimizer_that_a_function_makes_is_known_by_what_is_called_of_it():
    found = advice(
        """
        import torch
        model = GPT(conf)
        optimizer = model.configure_optimizers(0.1)
        for x, y in loader:
            model.zero_grad()
            optimizer.zero_grad(set_to_none=True)
            f(model(x), y).backward()
        model.eval()
        """
    )
    assert found[4] == ["below: run = lockstep.init(global_batch=B); model, optimizer = run.prepare(model, optimizer)"]
    assert 3 not in found


def test_without_an_optimizer_in_the_file_the_run_begins_where_it_is_made():
    found = advice("import torch\ndef train(net, opt):\n    for x, y in loader:\n        f(net(x), y).backward()\n")
    assert found[1][1].startswith(
        "where the optimizer is made: run = lockstep.init(global_batch=B); model, optimizer ="
    )


def test_what_ddp_needs_is_left_out():
    found = advice(
        """
        import os
        import torch, torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel as DDP
        dist.init_process_group("nccl")
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        model = DDP(torch.nn.SyncBatchNorm.convert_sync_batchnorm(net.cuda()))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        sampler = torch.utils.data.DistributedSampler(data)
        loader = torch.utils.data.DataLoader(data, batch_size=8, sampler=sampler)
        for x, y in loader:
            loss = f(model(x.cuda()), y)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            dist.all_reduce(loss)
            if dist.get_rank() == 0:
                print(loss)
            print("all")
        dist.barrier()
        torch.save(model.state_dict(), "m.pt")
        """
    )
    assert "opens the process group" in found[5][0] and found[5] == found[6]
    assert any(".module" in each for each in found[7])
    assert any("sync_batch_norm=True" in each for each in found[7])
    assert "global_batch=8 * N" in found[8][0]
    assert "shuffle=True" in found[9][0]
    assert found[10] == found[9]  # the DataLoader stays; its sampler does not
    assert found[16][0].startswith("if run.is_main: instead, but not around")
    assert found[14] == ["run.clip_gradients(1.0)"]
    assert found[15][0].startswith("leave out, and a division by the number of processes")
    assert 17 not in found  # one process prints already
    assert found[18] == ["run.print(...), which prints on the main process only"]
    assert found[19] == ["leave out"]
    assert found[20][0].startswith("run.save() to resume")


def test_evaluations_are_loops_over_data_without_gradients():
    found = advice(
        """
        import torch
        for x, y in train:
            f(model(x), y).backward()
        @torch.no_grad()
        def test(loader):
            for x, y in loader:
                total += f(model(x), y).item() * len(x)
        with torch.inference_mode():
            for i, (x, y) in enumerate(self.val_loader):
                pass
            for k in topk:
                pass
            first, dl = DataLoader(a), DataLoader(b)
            error = sum(f(model(x), y) for x, y in dl)
            names = [each for each in data]
        """
    )
    assert found[7][0].startswith("instead of the loop: run.evaluate(loader, metric)")
    assert found[10][0].startswith("instead of the loop: run.evaluate(self.val_loader, metric)")
    assert 12 not in found and 16 not in found
    assert found[15][0].startswith("instead of the loop: run.evaluate(dl, metric)")


def test_gradient_accumulation_and_precision():
    found = advice(
        """
        import torch
        scaler = torch.cuda.amp.GradScaler()
        for i, (x, y) in enumerate(train):
            with torch.autocast("cuda", dtype=torch.float16):
                loss = f(model(x), y)
            scaler.scale(loss).backward()
            total += loss.item() * x.size(0)
            if (i + 1) % 4 == 0:
                scaler.step(optimizer)
        """
    )
    assert "precision=" in found[3][0] and "precision=" in found[5][0]
    assert found[7][0].startswith("loss = run.backward(batch, f)")
    assert found[8][0].startswith("len(batch), where it counts samples")
    assert found[10][0] == "optimizer.step()"
    assert "micro_batches" in found[10][1]


@pytest.mark.parametrize(
    ("text", "adapter"),
    [
        (
            "from accelerate import Accelerator\na = Accelerator()\na.backward(loss)\n",
            "integrations.accelerate",
        ),
        ("import lightning as L\nt = L.Trainer(max_epochs=1)\n", "integrations.lightning"),
        (
            "import pytorch_lightning as pl\nclass M(pl.LightningModule):\n    pass\n",
            "integrations.lightning",
        ),
        ("from transformers import Trainer\nt = Trainer(model=m)\n", "integrations.transformers"),
    ],
)
def test_a_trainer_with_an_adapter_is_replaced_and_nothing_else(text, adapter):
    (change,) = changes(text)
    assert change.lines == (2,)
    assert adapter in change.advice


def test_a_model_of_transformers_in_a_loop_of_ones_own_is_no_trainer():
    text = "from transformers import AutoModel\nfor x, y in data:\n    f(AutoModel()(x), y).backward()\n"
    assert [change.section for change in changes(text)] == ["Setup", "Setup", "The loop", "The loop"]


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("import lockstep\nrun = lockstep.init(global_batch=8)\n", "already. Check it: lockstep lint 'script.py'"),
        ("import torch\nprint(1)\n", "calls no loss.backward"),
        ("", "calls no loss.backward"),
        ("from torch.distributed.pipelining import ScheduleGPipe\n", "by a schedule of .*strategy='pipeline'"),
        ("for x in", "is not valid Python 3"),
    ],
)
def test_what_needs_no_port_is_refused(text, match):
    with pytest.raises(ConfigError, match=match):
        changes(text)


def test_lines_are_those_that_python_counts():
    (first, *_) = changes("# \x0c \u2028\nimport torch\r\nf(model(x), y).backward()\n")
    assert (first.lines, first.source) == ((2,), "import torch")


def test_lockstep_is_imported_below_what_must_come_first():
    found = advice('"""Title."""\nfrom __future__ import annotations\nimport torch\nf(model(x), y).backward()\n')
    assert found[3][0].startswith("add: import lockstep; and torch.manual_seed(0)")


def test_functions_need_the_run_only_if_it_begins_in_another():
    script = """
        import torch
        def log(text):
            print(text)
        def train(loader):
            for x, y in loader:
                f(model(x), y).backward()
        def fit():
            train(loader)
            log("done")
        def {name}():
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            fit()
        """
    found = advice(script.format(name="main"))
    give = ["give run to this function"]
    assert [line for line in found if give[0] in found[line]] == [3, 5, 8, 9, 10, 13]
    at_the_top = textwrap.dedent(script).replace("def {name}():", "if True:")
    assert not any(give[0] in each for each in advice(at_the_top).values())


def test_methods_use_the_run_of_their_object():
    text = """
        import torch
        class Trainer:
            def __init__(self, model, optimizer):
                {first}
            def fit(self):
                for x, y in self.loader:
                    f(self.model(x), y).backward()
        def make():
            {second}
            return model, opt
        """
    made = "self.opt = torch.optim.SGD(self.model.parameters(), 0.1)"
    found = advice(text.format(first=made, second="pass"))
    assert found[3] == ["in the methods of this class, run is self.run"]
    assert "self.model, self.opt = self.run.prepare(self.model, self.opt)" in found[5][0]
    found = advice(text.format(first="pass", second="opt = torch.optim.SGD(model.parameters(), 0.1)"))
    assert found[3] == ["in the methods of this class, run is self.run, which its __init__ takes"]
    assert found[10][0].endswith("model, opt = run.prepare(model, opt); return run as well")


def test_schedulers_and_averages_of_other_libraries_are_prepared_and_models_are_not():
    found = advice(
        """
        import torch
        from timm.utils import ModelEmaV3
        average = ModelEmaV3(net)
        optimizer = torch.optim.Adam(list(net.parameters()) + list(head.last.parameters()))
        schedule = get_schedule(optimizer, 100)
        for x, y in loader:
            head.zero_grad()
            f(net(x), y).backward()
            schedule.step()
        """
    )
    names = "models, average, optimizer, schedule"
    assert f"{names} = run.prepare({names})" in found[6][0]


def test_a_batch_that_a_function_takes_is_given_to_it():
    found = advice(
        """
        import torch
        def step(x, y):
            f(model(x), y).backward()
        for x, y in loader:
            step(x, y)
        """
    )
    assert found[4][0].endswith("; give batch to this function")


def test_nothing_is_printed_by_a_run_that_has_not_begun():
    found = advice(
        """
        import torch, wandb
        print(args)
        wandb.init()
        class Data:
            def load(self):
                print("loaded")
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for x, y in loader:
            f(model(x), y).backward()
        """
    )
    assert not {3, 7} & set(found)
    assert found[4] == ["below lockstep.init: under if run.is_main:"]


def test_best_weights_are_no_checkpoint_to_resume_from():
    found = advice(
        """
        import torch
        model.load_state_dict(torch.load("pretrained.pt"))
        for x, y in loader:
            f(model(x), y).backward()
        model.load_state_dict(torch.load("best.pt"))
        """
    )
    assert "resume=" in found[3][0]
    assert found[6][0].startswith("the best weights of this run: run.load_state_dict(")
    assert "if run.is_main else {}" in found[6][0]  # the other processes may be here before the file is written


def test_an_evaluation_that_switches_gradients_off_in_its_loop():
    found = advice(
        """
        import torch
        for epoch in range(3):
            for x, y in train_loader:
                f(model(x), y).backward()
            for x, y in test_loader:
                with torch.no_grad():
                    model(x)
            with torch.no_grad():
                for each in zip():
                    pass
        """
    )
    assert found[6][0].startswith("instead of the loop: run.evaluate(test_loader, metric)")
    assert len(found[3]) == len(found[4]) == 1


def test_what_launchers_and_scalers_need_is_left_out():
    found = advice(
        """
        import os, torch
        os.environ["MASTER_ADDR"] = "localhost"
        scaler = torch.amp.GradScaler()
        sampler = torch.utils.data.DistributedSampler(data)
        for epoch in range(3):
            sampler.set_epoch(epoch)
            for x, y in loader:
                scaler.scale(f(model(x), y)).backward()
                scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
        net = torch.nn.DataParallel(net)
        torch.save(net.module.state_dict(), "w.pt")
        """
    )
    assert "opens the process group" in found[3][0]
    assert found[7] == found[5]
    assert found[10] == found[12] == ["leave out, with the GradScaler"]
    assert found[11] == ["optimizer.step()"]
    assert any(".module" in each for each in found[14])


def test_batches_that_are_cut_within_a_loop_over_epochs():
    found = advice(
        """
        import torch
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        bar = tqdm(range(9))
        for epoch in bar:
            for i in range(0, len(x), size):
                f(model(x[i : i + size]), y[i : i + size]).backward()
        """
    )
    assert "lockstep.init(global_batch=size)" in found[3][0]
    assert found[5][0].startswith("for epoch in run.epochs(9):")
    assert found[6][0].startswith("for batch in run.batches(data); make a data set")


def test_a_part_of_a_sequence_is_no_batch():
    found = advice(
        """
        import torch
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for i in range(0, len(text), bptt):
            f(model(text[i:]), y).backward()
        """
    )
    assert "lockstep.init(global_batch=B)" in found[3][0]


def test_an_optimizer_and_its_schedule_that_one_function_makes():
    found = advice(
        """
        import torch
        opt, schedule = make(model)
        for x, y in loader:
            opt.zero_grad()
            f(model(x), y).backward()
            schedule.step()
        """
    )
    assert "model, opt, schedule = run.prepare(model, opt, schedule)" in found[3][0]


def test_a_closure_within_a_loop_over_the_whole_data_set():
    found = advice(
        """
        import torch
        for step in range(10):
            def closure():
                f(model(x), y).backward()
            optimizer.step(closure)
            closure()
        """
    )
    assert len(found[3]) == 1
    assert "(batch,) = run.batches(data), with global_batch its size or" in found[3][0]


@pytest.mark.parametrize(
    ("size", "said"),
    [
        (32, "32"),
        (100, "100, micro_batches=4"),
        (7, "7, micro_batches=7"),
        (1, "1, micro_batches=1"),
        (25, "25, micro_batches=5"),
    ],
)
def test_micro_batches_divide_the_batch(size, said):
    found = advice(
        f"""
        import torch
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for x, y in torch.utils.data.DataLoader(data, batch_size={size}):
            f(model(x), y).backward()
        """
    )
    assert f"lockstep.init(global_batch={said});" in found[3][0]


def test_epochs_within_a_loop_of_their_own_are_no_epochs_of_the_run():
    """``run.epochs(4)`` has nothing to do in the second rollout of PPO."""
    text = """
        import torch
        {before}
        for rollout in range(100):
            {within}
            for epoch in range(4):
                for x, y in loader:
                    f(model(x), y).backward()
        """
    made = "optimizer = torch.optim.SGD(model.parameters(), 0.1)"
    found = advice(text.format(before=made, within=""))
    assert found[6][0].startswith("stays, since each run.batches is the next epoch.")
    assert "the loop in line 4" in found[6][0]
    found = advice(text.format(before="", within=made))  # a fold of a cross-validation, with a run of its own
    assert found[6] == ["for epoch in run.epochs(4):  # from where a resumed run stands"]


@pytest.mark.parametrize(
    ("setup", "draw", "given"),
    [
        ("batches = cycle(loader)", "x, y = next(batches)", "loader"),
        (
            "a = iter(labelled)\nb = iter(unlabelled)",
            "(x, y), u = a.next(), next(b)",
            "(labelled, unlabelled)",
        ),
        ("batches = Endless(data, batch_size=8)", "x, y = batches.next()", "data"),
        ("batches = iter(loader)\nbar = Bar('training')", "bar.next(); x, y = next(batches)", "loader"),
    ],
)
def test_batches_that_a_loop_takes_one_by_one(setup, draw, given):
    found = changes(f"import torch\n{setup}\nfor step in range(9):\n    {draw}\n    f(model(x), y).backward()\n")
    said = f"for epoch in run.epochs(N): for batch in run.batches({given}){WITHOUT_NEXT}"
    assert said in [each.advice for each in found]


def test_epochs_of_counted_steps_are_epochs_of_the_run():
    found = advice(
        """
        import torch
        batches = iter(loader)
        for epoch in range(args.start, args.epochs):
            for step in range(1024):
                x, y = next(batches)
                f(model(x), y).backward()
        """
    )
    assert found[4] == ["for epoch in run.epochs(args.epochs):  # from where a resumed run stands"]
    assert "if the loop makes another number of steps than one pass" in found[5][0]


@pytest.mark.parametrize(
    ("setup", "over", "said"),
    [
        ("", "range(self.start, self.epochs + 1)", "run.epochs(self.epochs):  # which counts from 0, not from 1"),
        ("first = 1", "range(first, epochs + 1)", "run.epochs(epochs):  # which counts from 0, not from 1"),
        ("first = 0", "range(first, epochs + 1)", "run.epochs(epochs + 1):  # from where a resumed run stands"),
        ("first = 0", "range(first, epochs)", "run.epochs(epochs):  # from where a resumed run stands"),
        ("", "range(2, epochs + 1)", "run.epochs(epochs + 1 - 2):  # which counts from 0, not from 2"),
    ],
)
def test_epochs_from_a_number_that_a_checkpoint_sets(setup, over, said):
    found = advice(
        f"import torch\n{setup}\nfor epoch in {over}:\n    for x, y in loader:\n        f(x, y).backward()\n"
    )
    assert found[3] == [f"for epoch in {said}"]


def test_a_size_that_cuts_a_tensor_is_not_that_of_the_step():
    found = advice(
        """
        import torch
        for x, y in loader:
            loss = f(model(x + noise[: x.size(0)]), y)
            loss.backward()
            noise[: x.size(0)] = 0
            total += x.size(0)
        """
    )
    assert not any("len(batch)" in each for each in found[6])
    assert found[7] == ["len(batch), where it counts samples: those of the step over all processes"]


def test_a_loop_that_counts_batches_reads_none():
    found = advice("import torch\nfor i in range(N_batches):\n    f(model(draw()), y).backward()\n")
    assert found[2][0].startswith("for epoch in run.epochs(N): for batch in run.batches(data); make a data set")


def test_a_progress_bar_is_made_above_the_loop():
    found = advice(
        """
        import torch
        from tqdm import tqdm
        bar = tqdm(enumerate(loader), total=len(loader))
        for i, (x, y) in bar:
            f(model(x), y).backward()
        """
    )
    assert found[5][0].startswith(
        "bar = tqdm(enumerate(run.batches(loader)), total=len(loader)), and for i, batch in bar:"
    )


def test_the_loader_of_a_progress_bar_is_found_by_its_name():
    found = advice(
        """
        import torch
        from tqdm import tqdm
        def train(loader, valid):
            bar = tqdm(loader, smoothing=0)
            for i, (x, y) in enumerate(bar):
                f(model(x), y).backward()
            bar = tqdm(valid)
            with torch.no_grad():
                for x, y in bar:
                    total += f(model(x), y)
        """
    )
    assert found[6][0].startswith("bar = tqdm(run.batches(loader), smoothing=0), and for i, batch in enumerate(bar):")
    assert found[10][0].startswith("instead of the loop: run.evaluate(valid, metric)")


def test_gradients_of_a_part_of_the_model_are_clipped_by_torch():
    script = """
        import torch
        optimizer = torch.optim.SGD([*net.parameters(), *head.parameters()], 0.1)
        for x, y in loader:
            f(head(net(x)), y).backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 3.0)
        """
    assert advice(script)[6] == [
        "stays: run.clip_gradients clips by the norm of all gradients, and this by that of some"
    ]
    both = script.replace("(net.parameters(), 3", "([*net.parameters(), *head.parameters()], 3")
    assert advice(both)[6] == ["run.clip_gradients(3.0)"]
    one = script.replace("head", "net")
    assert advice(one)[6] == ["run.clip_gradients(3.0)"]
    two = one.replace("net.parameters(), 3.0)", "net.a.parameters(), 1), clip_grad_norm_(net.b.parameters(), 2)")
    assert advice(two)[6][0].startswith("stays: ")


def test_gradients_are_clipped_by_another_norm_or_group_by_group():
    """The advice was run.clip_gradients, which takes the 2-norm of all gradients: a port trained with other numbers."""
    script = """
        import torch
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for x, y in loader:
            f(net(x), y).backward()
            torch.nn.utils.clip_grad_norm_({clip})
        """
    for other in ("net.parameters(), 3.0, norm_type=float('inf')", "net.parameters(), 3.0, 1"):
        assert advice(script.format(clip=other))[6] == ["stays: run.clip_gradients takes the 2-norm"]
    for same in ("net.parameters(), 3.0, norm_type=2.0", "net.module.parameters(), 3.0", "self.net.parameters(), 3.0"):
        assert advice(script.format(clip=same))[6] == ["run.clip_gradients(3.0)"]
    assert advice(script.format(clip="net.head.parameters(), 3.0"))[6][0].endswith("and this by that of some")
    for over, given in (("group in optimizer.param_groups", "group['params']"), ("p in net.parameters()", "p")):
        each = script.replace("torch.nn", f"for {over}: torch.nn").format(clip=f"{given}, 3.0")
        assert advice(each)[6][0].endswith("and this by that of some")
    whole = script.replace("for x", "for net in nets:\n          for x").replace("\n            ", "\n              ")
    assert advice(whole.format(clip="net.parameters(), 3.0"))[7] == ["run.clip_gradients(3.0)"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("loss += 0.01 * penalty", "loss_fn, forward=forward)"),
        ("loss *= 0.5", "loss_fn, forward=forward)"),
        ("loss /= 4", "loss_fn, forward=forward)"),
        ("total += loss.item()", "F.mse_loss)"),
    ],
)
def test_a_loss_that_is_changed_in_place_is_not_that_of_its_source(change, said):
    """The advice left the penalty or the factor out, without a word."""
    text = """
        import torch.nn.functional as F
        for x, y in loader:
            loss = F.mse_loss(model(x), y)
            {change}
            loss.backward()
            {step}
        """
    assert advice(text.format(change=change, step="optimizer.step()"))[6][0].startswith(
        f"loss = run.backward(batch, {said}"
    )
    step = "if (i + 1) % 4 == 0: optimizer.step()"
    if change == "loss /= 4":
        assert advice(text.format(change=change, step=step))[6][0].startswith("loss = run.backward(batch, F.mse_loss)")


def test_a_division_stays_where_each_pass_is_a_step():
    """A division by a name was taken for that of an accumulation, and left out."""
    found = advice(
        """
        import torch.nn.functional as F
        for x, y in loader:
            loss = F.mse_loss(model(x), y) / factor
            loss.backward()
            optimizer.step()
        """
    )
    assert "output / factor" in found[5][0]


def test_a_number_that_a_loss_is_divided_by_is_none_of_the_output():
    found = advice(
        """
        for batch in loader:
            n = batch["x"].size(0)
            loss = f(model(batch["x"]), batch["y"]) / n
            loss.backward()
            optimizer.step()
            total += loss.item() * n
        """
    )
    assert 7 not in found


def test_a_backward_pass_in_each_branch_of_an_accumulation():
    """As under DDP, whose no_sync is around all passes but the last."""
    text = """
        import torch
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        loader = torch.utils.data.DataLoader(data, batch_size=16)
        for i, (x, y) in enumerate(loader):
            loss = f(model(x), y) / 4
            if (i + 1) % 4:
                with model.no_sync():
                    loss.backward()
                {other}
            else:
                loss.backward()
                optimizer.step()
        """
    assert any("global_batch=64)" in each for each in advice(text.format(other="pass"))[3])
    by_turns = advice(text.format(other="critic.step()"))
    assert any("global_batch=16)" in each for each in by_turns[3])
    assert not any("accumulates" in each for at in by_turns.values() for each in at)


def test_a_loop_that_trains_at_every_nth_step_accumulates_nothing():
    """As DQN or the generator of a WGAN do: the backward pass stands under the same condition as the step."""
    found = advice(
        """
        for i, (x, y) in enumerate(loader):
            g(critic(x), y).backward()
            other.step()
            if i % 5 == 0:
                f(model(x), y).backward()
                optimizer.step()
        """
    )
    assert not any("accumulates" in each for at in found.values() for each in at)


@pytest.mark.parametrize(
    ("size", "step", "said"),
    [
        ("16", "if (i + 1) % 4 == 0: optimizer.step()", "global_batch=64)"),
        ("size", "if (i + 1) % n == 0 or i + 1 == len(loader): optimizer.step()", "global_batch=size * n)"),
        ("3", "if not (i + 1) % 2: scaler.step(optimizer)", "global_batch=6, micro_batches=2)"),
        ("16", "if (i + 1) % n != 0: continue\n            optimizer.step()", "global_batch=16 * n)"),
        ("16", "optimizer.step()\n            if i % 100 == 0: scheduler.step()", "global_batch=16)"),
        ("16", "optimizer.step()\n            if i % 5 == 0: other.step()", "global_batch=16)"),
    ],
)
def test_accumulated_batches_are_one_batch(size, step, said):
    """The advice began with the batch size of one pass, whose gradients alone would have made a step."""
    found = advice(
        f"""
        import torch
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        loader = torch.utils.data.DataLoader(data, batch_size={size})
        for i, (x, y) in enumerate(loader):
            f(model(x), y).backward()
            {step}
        """
    )
    assert any(said in each for each in found[3]), found[3]


@pytest.mark.parametrize(
    ("outer", "batch", "over"),
    [
        ("while step < 30:", "next(batches)", "for epoch in run.epochs(N): for batch in run.batches(loader)"),
        ("for step in range(30):", "get_batch()", "for epoch in run.epochs(N): for batch in run.batches(data)"),
    ],
)
def test_batches_that_a_loop_within_the_step_adds_up_are_one_batch(outer, batch, over):
    """As in nanoGPT. The advice began with the batch size of one pass, and took the inner loop for one over steps."""
    found = advice(
        f"""
        import torch
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        loader = torch.utils.data.DataLoader(data, batch_size=16)
        batches = iter(loader)
        {outer}
            for part in range(n):
                x, y = {batch}
                loss = f(model(x), y) / n
                loss.backward()
            optimizer.step()
        """
    )
    assert any("global_batch=16 * n)" in each for each in found[3]), found[3]
    assert found[6][0].startswith(over)
    assert found[7][0].startswith("if this accumulates gradients: ") and "the loss is not divided" in found[7][0]
    assert found[10][0].startswith("loss = run.backward(batch, f")


@pytest.mark.parametrize("inner", ["for part in range(n):", "for x, y in loader:"])
def test_a_loop_within_which_the_optimizer_steps_accumulates_nothing(inner):
    found = advice(
        f"""
        import torch
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        loader = torch.utils.data.DataLoader(data, batch_size=16)
        for epoch in range(30):
            {inner}
                f(model(x), y).backward()
                optimizer.step()
            scheduler.step()
        """
    )
    assert any("global_batch=16)" in each for each in found[3]), found[3]
    assert not any("accumulates" in each for at in found.values() for each in at)


def test_a_pass_that_every_second_epoch_makes_accumulates_nothing():
    found = advice(
        """
        import torch
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for epoch in range(4):
            for x, y in torch.utils.data.DataLoader(data, batch_size=16):
                if epoch % 2 == 0:
                    f(model(x), y).backward()
                    optimizer.step()
        """
    )
    assert any("global_batch=16)" in each for each in found[3]) and 8 not in found


def test_a_loss_that_cannot_be_followed_gets_its_own_forward_pass():
    found = advice(
        """
        import torch
        for i, data in enumerate(loader):
            points, target = data
            points = points.transpose(2, 1)
            output, change = model(points)
            loss = f(output, target)
            loss += 0.1 * regularizer(change)
            loss.backward()
        """
    )
    assert found[9][0].startswith("loss = run.backward(batch, loss_fn, forward=forward), where forward(data)")


def test_what_a_loop_computes_between_the_loss_and_its_backward_pass():
    found = advice(
        """
        import torch
        for x, y in loader:
            t = torch.randint(10, (x.shape[0],))
            output = model(x, t)
            loss = f(output, y)
            correct += (output.argmax(1) == y).sum()
            meter.update(loss.item(), x.size(0))
            loss.backward()
        """
    )
    assert found[7][0].startswith("computed from output")
    assert found[8] == ["len(batch), where it counts samples: those of the step over all processes"]
    assert 4 not in found and 5 not in found


def test_the_forward_passes_of_a_later_backward_pass_are_parts_of_its_step():
    found = advice(
        """
        import torch
        for x, y in loader:
            fake = G(x)
            score = D(fake)
            loss = f(score, fake)
            loss.backward()
            score = D(fake.detach())
            other = 1 - D(y) + score
            other.backward()
            total += score.mean()
        """
    )
    assert 8 not in found and 9 not in found
    assert found[11][0].startswith("computed from score")


def test_a_schedule_that_is_stepped_above_the_loop_over_batches():
    found = advice(
        """
        import torch
        def fit(loader, model, optimizer, scheduler):
            for epoch in range(3):
                scheduler.step()
                train(loader, model, optimizer)
                scheduler.step(2)
        def train(loader, model, optimizer):
            for x, y in loader:
                f(model(x), y).backward()
                optimizer.step()
        """
    )
    assert found[5] == [
        "under if not run.position.done:, since a resumed run may go on within an epoch, and comes here again"
    ]
    assert 7 not in found


def test_updates_from_a_replay_buffer_are_epochs_of_their_own():
    script = """
        import torch
        def agent(steps):
            optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
            def update(data):
                compute(data).backward()
                optimizer.step()
            for t in range(steps):
                act(t)
                for j in range(4):
                    update(buffer.sample(32))
        """
    found = advice(script)
    assert found[8][0].startswith("stays if the loop in it takes other samples in each pass")
    assert found[10][0].startswith("stays; each update has (batch,) = run.batches(TensorDataset(...), shuffle=False)")
    assert 5 not in found  # a function within that of the run sees it
    places = advice(script.replace("buffer.sample(32)", "x[j * 32 : j * 32 + 32]"))
    assert places[8] == ["for t in run.epochs(steps):  # from where a resumed run stands"]


def test_a_method_of_the_model_is_no_call_of_the_function_of_its_name():
    found = advice(
        """
        import torch
        def accuracy(net, data):
            for x, y in data:
                net.eval()
                hits += (net(x).argmax(1) == y).sum()
                net.train()
        def train(net, loader, optimizer, epochs):
            for epoch in range(epochs):
                for x, y in loader:
                    f(net(x), y).backward()
                    optimizer.step()
        net, optimizer = make()
        train(net, loader, optimizer, 3)
        """
    )
    assert found[9] == ["for epoch in run.epochs(epochs):  # from where a resumed run stands"]
    assert found[8] == found[14] == ["give run to this function"]
    assert 7 not in found


def test_phases_of_an_epoch_are_taken_apart():
    """As in the tutorial on transfer learning."""
    found = advice(
        """
        import torch
        for epoch in range(9):
            for phase in ["train", "val"]:
                for x, y in loaders[phase]:
                    with torch.set_grad_enabled(phase == "train"):
                        output = model(x)
                        _, predicted = torch.max(output, 1)
                        loss = f(output, y)
                        if phase == "train":
                            loss.backward()
                            optimizer.step()
                    correct += torch.sum(predicted == y)
        """
    )
    assert found[3] == ["for epoch in run.epochs(9):  # from where a resumed run stands"]
    assert found[4][0].startswith("take the phases apart")
    assert found[13][0].startswith("computed from predicted")


def test_phases_that_have_a_name():
    """As in Sentence-VAE, where the loop over the splits was taken for that over the epochs."""
    found = advice(
        """
        import torch
        splits = ["train", "valid"] + (["test"] if args.test else [])
        for epoch in range(9):
            for split in splits:
                loader = make(split)
                for x, y in loader:
                    loss = f(model(x), y)
                    if split == "train":
                        loss.backward()
                        optimizer.step()
        """
    )
    assert found[4] == ["for epoch in run.epochs(9):  # from where a resumed run stands"]
    assert found[5] == [
        "take the phases apart: the steps of training, then run.evaluate(loader, metrics) instead of the others"
    ]


def test_sizes_of_what_the_body_takes_out_of_the_batch():
    found = advice(
        """
        import torch
        for epoch in range(9):
            for data in loader:
                image, label = data
                image = image.view(image.size(0), -1)
                loss = f(model(image), label)
                loss.backward()
                optimizer.step()
                seen += len(image)
                total += loss.item() * label.size(0)
        """
    )
    samples = ["len(batch), where it counts samples: those of the step over all processes"]
    assert found[10] == found[11] == samples


def test_numbers_of_a_script_whose_evaluation_computes_a_loss_of_the_same_name():
    """In a script without functions; as many of before torch 0.4, it leaves gradients on in its evaluation."""
    found = advice(
        """
        import torch
        for epoch in range(9):
            for x, y in loader:
                output = model(x)
                loss = f(output, y)
                hits = (output.argmax(1) == y).sum()
                loss.backward()
                optimizer.step()
            model.eval()
            for x, y in test_loader:
                output = model(x)
                loss = f(output, y)
            for x, y in test_loader:
                show(x)
        """
    )
    assert found[7][0].startswith("computed from output")
    assert found[8] == ["loss = run.backward(batch, f); leave out the model's call and the loss"]
    assert found[11] == [
        "instead of the loop: run.evaluate(test_loader, metric), the mean of metric(output, target) over all samples"
    ]
    assert 14 not in found


def test_the_parts_of_a_loss_are_lost_with_it():
    """Only of a loss that is a call was it said, and not of ``self``, which the loop still has."""
    found = advice(
        """
        import torch
        class Trainer:
            def fit(self):
                for x, y in loader:
                    output = self.model(x)
                    fit = f(output, y)
                    self.bound = 0.1 * g(output)
                    loss = fit + self.bound
                    loss.backward()
                    self.optimizer.step()
                    total += fit.item()
                    whole += loss.item()
        """
    )
    assert found[12][0].startswith("computed from fit, which the loop does not have any more")
    assert found.keys().isdisjoint({11, 13})


def test_a_download_is_made_before_the_run():
    found = advice(
        """
        import torch
        from torchvision.datasets import MNIST
        data = MNIST("data", download=True)
        test = MNIST("data", train=False, download=False)
        for x, y in DataLoader(data):
            f(model(x), y).backward()
        """
    )
    assert found[4] == ["leave out, and download once, before the run: its processes would do it at the same time"]
    assert 5 not in found


def test_a_loop_over_a_sampler_is_not_one_over_batches():
    """As in PPO; its advice was run.batches(BatchSampler(...)), which is refused."""
    found = advice(
        """
        import torch
        for index in BatchSampler(SubsetRandomSampler(range(len(memory))), batch_size=32, drop_last=False):
            f(model(state[index]), target[index]).backward()
            optimizer.step()
        """
    )
    assert found[3][0].startswith("for epoch in run.epochs(N): for batch in run.batches(data); make a data set of what")


def test_the_seed_stands_above_what_is_drawn_first():
    script = "import torch\na, b = torch.utils.data.random_split(d, (8, 2))\nf(model(x)).backward()\n"
    assert advice(script)[1][0] == "add: import lockstep; and torch.manual_seed(0) above the model and random_split"


def test_an_optimizer_that_takes_the_place_of_another_in_the_loop():
    found = advice(
        """
        import torch
        optimizer = torch.optim.Adam(model.parameters())
        for epoch in range(9):
            for x, y in loader:
                f(model(x), y).backward()
                optimizer.step()
            if epoch == 5:
                optimizer = torch.optim.ASGD(model.parameters())
        """
    )
    assert found[3][0].startswith("below: run = lockstep.init(")
    assert found[9] == [
        "make it above the loop, give it to run.prepare with the others, and choose in each epoch which one steps"
    ]


def test_weights_that_a_function_loads_after_the_training_are_the_best_of_this_run():
    script = """
        import torch
        def test(model):
            model.load_state_dict(torch.load("best.pt"))
        for epoch in range(9):
            for x, y in loader:
                f(model(x), y).backward()
        test(model)
        """
    assert advice(script)[4][0].startswith("the best weights of this run")
    trained = script.replace("for epoch in range(9):\n    ", "def fit():\n    ").replace(
        "        test(model)", "        fit(); test(model)"
    )
    assert advice(trained)[4][0].startswith("the best weights of this run")
    assert advice(script.replace("        test(model)\n", ""))[4][0].startswith("a checkpoint to resume from")


def test_a_scaler_that_makes_the_whole_step():
    """``NativeScaler`` of timm, as in MAE, DeiT and Swin: their training loops were told to be in another file."""
    found = advice(
        """
        import torch
        for x, y in loader:
            loss = f(model(x), y)
            loss_scaler(loss, optimizer, clip_grad=1.0, parameters=model.parameters())
        """
    )
    assert found[5] == [
        "below: optimizer.step(), with run.clip_gradients above it where it clips",
        "loss = run.backward(batch, f); leave out the model's call and the loss",
    ]


def test_one_of_two_backward_passes_is_made():
    found = advice(
        """
        import torch
        for x, y in loader:
            loss = f(model(x), y)
            if fp16:
                with amp.scale_loss(loss, optimizer) as scaled_loss:
                    scaled_loss.backward()
            else:
                loss.backward()
        """
    )
    assert not [each for line in found.values() for each in line if "several backward passes" in each]


def test_what_the_loop_computes_from_the_output():
    found = advice(
        """
        import torch
        for x, y in loader:
            output = model(x)
            loss = f(output, y)
            scaler.scale(loss).backward()
            total += loss.item()
            hits += (output.argmax(1) == y).sum()
        """
    )
    assert found[8][0].startswith("computed from output, which the loop does not have any more:")
    assert 7 not in found


def test_a_batch_whose_parts_have_names():
    found = advice(
        """
        import torch
        for batch in loader:
            images, masks = batch["image"], batch["mask"]
            loss = f(model(images), masks) + dice(model(images), masks)
            loss.backward()
        """
    )
    assert "forward=forward), where forward(data) returns the output" in found[6][0]


def test_a_batch_of_graphs():
    found = advice(
        """
        import torch
        for data in loader:
            output = model(data.x.float(), data.batch)
            loss = f(output, data.y)
            loss.backward()
            total += loss.item() * data.num_graphs
        """
    )
    assert "data: f(output, data.y), forward=lambda data: model(data.x.float(), data.batch))" in found[6][0]
    assert found[7] == ["len(batch), where it counts samples: those of the step over all processes"]


def test_a_loader_of_another_library_and_a_schedule_that_names_its_optimizer():
    found = advice(
        """
        import torch
        from torch_geometric.loader import DataLoader
        loader = DataLoader(data, 128, shuffle=True)
        optimizer = torch.optim.Adam(model.parameters())
        schedule = cosine_schedule(optimizer=optimizer)
        for data in loader:
            f(model(data.x, data.batch_size), data.y).backward()
            optimizer.step()
            schedule.step()
        """
    )
    assert found[4] == ["stays; the batch size of a step, for all devices together, is that of lockstep.init"]
    assert "global_batch=128); model, optimizer, schedule = run.prepare(model, optimizer, schedule)" in found[6][0]


def test_a_batch_whose_methods_are_called_has_no_parts():
    found = advice("import torch\nfor x in loader:\n    x = x.cuda()\n    f(model(x)).backward()\n")
    assert "lambda output, data: f(output), forward=lambda data: model(data))" in found[4][0]


def test_a_schedule_at_every_nth_step_accumulates_nothing():
    found = advice(
        """
        import torch
        for i, (x, y) in enumerate(loader):
            f(model(x), y).backward()
            optimizer.step()
            if i % 100 == 0:
                scheduler.step(evaluate(model))
        """
    )
    assert 7 not in found


def test_an_object_that_steps_an_optimizer():
    found = advice(
        """
        import torch
        adam = torch.optim.Adam(model.parameters())
        schedule = ScheduledOptim(adam, 512, 4000)
        for x, y in loader:
            schedule.zero_grad()
            f(model(x), y).backward()
            schedule.step()
        """
    )
    assert found[4] == [
        "below: run = lockstep.init(global_batch=B); model, adam = run.prepare(model, adam)",
        "below run.prepare, of the optimizer that it returns: this object steps what it is given",
    ]


def test_what_torch_shards_exchanges_and_writes_is_left_out():
    """Nothing was said of these lines, and the module of an average was called that of a wrapper."""
    found = advice(
        """
        import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
        from torch.distributed.optim import ZeroRedundancyOptimizer
        from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, fully_shard
        class Trainer:
            def __init__(self, net, average):
                self.net = net
                lr = 0.1 * dist.get_world_size()
                fully_shard(net)
                wrapped = FSDP(net)
                wrapped.register_comm_hook(None, hook)
                self.optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.Adam, lr=lr)
            def fit(self, wrapped, average):
                for x, y in self.loader:
                    with wrapped.no_sync():
                        f(wrapped(x), y).backward()
                    wrapped.clip_grad_norm_(1.0)
                    self.optimizer.step()
                    average.module.load_state_dict(wrapped.module.state_dict())
                with FSDP.state_dict_type(wrapped, kind):
                    dcp.save({"model": wrapped.state_dict()}, checkpoint_id=", ".join(names))
        """
    )
    assert "self.net, self.optimizer = self.run.prepare(self.net, self.optimizer)" in found[12][0]
    said = {line: told[-1] for line, told in found.items() if line in (8, 9, 11, 15, 20, 21)}
    assert said[8].startswith("leave out the number of processes: the learning rate") or "learning rate" in str(
        found[8]
    )
    assert said[9].startswith('leave out: lockstep.init(strategy="fsdp")')
    assert (said[11], said[15]) == ("leave out", "leave out")
    assert said[20] == "leave out: run.state_dict(), on all ranks"
    assert said[21].startswith("leave out: run.save()")
    assert "the optimizer that it is made of" in found[12][1]
    assert found[17] == ["run.clip_gradients(1.0)"]
    assert len(found[19]) == 1 and found[19][0].startswith("leave out, and .module")
    assert not advice("import torch\nmodel = DDP(net)\naverage.module\nf(model(x)).backward()\n").get(3)


@pytest.mark.parametrize(
    ("loader", "said"),
    [
        ("DataLoader(data, batch_size=batch // args.n_gpu, sampler=DistributedSampler(data))", "batch"),
        ("DataLoader(data, batch_size=share, sampler=DistributedSampler(data))", "args.batch"),
        ("DataLoader(data, batch_size=batch // world_size // 4, sampler=DistributedSampler(data))", "batch"),
        ("make_loader(data, batch_size=args.b)", "args.b"),
        ("Batches(data, **dict(batch_size=12))", "12, micro_batches=4"),
        ("draw(torch.randint(9, (batch_size,)))", "batch_size"),
        ("zip(make(batch_size=args.test_batch_size), make(batch_size=args.b))", "args.b"),
    ],
)
def test_the_batch_size_of_all_processes(loader, said):
    found = advice(
        f"""
        import torch
        from torch.utils.data import DataLoader, DistributedSampler
        share = args.batch / world_size
        def test(data, batch_size=100):
            DataLoader(data, batch_size=batch_size)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for x, y in {loader}:
            f(model(x), y).backward()
        """
    )
    assert f"lockstep.init(global_batch={said});" in found[7][0]


@pytest.mark.parametrize(
    "lines",
    [
        "output = model(features, adj); loss = F.nll_loss(output[train], labels[train])",
        "output = model(features); loss = F.nll_loss(output[train], labels[train])",
        "noise = torch.randn(x.shape); output = model(x + noise); loss = F.mse_loss(output, noise)",
        "value = model(x).gather(1, a); loss = F.mse_loss(value, y)",
        "output = model(x); y = y + 0.9 * frozen(x); loss = F.mse_loss(output, y)",
        "output = model(x); output = output[1:].view(-1, 5); loss = F.nll_loss(output, y)",
        "output = model(x); y = y[1:].view(-1); loss = F.nll_loss(output, y)",
        "output, hidden = model(x, hidden); loss = F.nll_loss(output, y)",
        "loss = model(x, y)",
    ],
)
def test_a_loss_of_more_than_output_and_target_is_not_given_as_it_is(lines):
    text = f"import torch.nn.functional as F\nx, y = load()\nfor step in range(9):\n    {lines}\n    loss.backward()\n"
    found = advice(text)
    assert found[5][0].startswith("loss = run.backward(batch, loss_fn, forward=forward), where forward(data) returns")


@pytest.mark.parametrize(
    "lines",
    [
        "output = model(x); loss = F.nll_loss(output, y)",
        "x, y = make(); output = self.model(x.to(device)); loss = F.nll_loss(output, y.to(device))",
        "y = xs[step : step + 32]; loss = F.nll_loss(model.forward(x), y)",
        "y = torch.LongTensor(labels); loss = F.nll_loss(model(x), y)",
        "y = batch['y'].cuda(); loss = F.nll_loss(model(x), y)",
    ],
)
def test_a_loss_of_output_and_target_is_given_as_it_is(lines):
    text = f"import torch.nn.functional as F\nx, y = load()\nfor step in range(9):\n    {lines}\n    loss.backward()\n"
    assert advice(text)[5][0].startswith("loss = run.backward(batch, F.nll_loss); ")


def test_half_of_a_loss_stays_half_of_it_where_each_pass_is_a_step():
    text = """
        import torch.nn.functional as F
        for x, y in loader:
            loss = F.mse_loss(model(x), y) / 2
            loss.backward()
            {step}
        """
    kept = advice(text.format(step="optimizer.step()"))[5][0]
    assert kept.startswith(
        "loss = run.backward(batch, lambda output, data: output / 2, forward=lambda data: F.mse_loss("
    )
    accumulated = advice(text.format(step="if i % 2: optimizer.step()"))[5][0]
    assert accumulated.startswith("loss = run.backward(batch, F.mse_loss); ")


def test_the_batch_size_that_another_method_of_the_class_gives_its_loader():
    found = advice(
        """
        import torch
        from torch.utils.data import DataLoader
        class Client:
            def loaders(self, data, held):
                return DataLoader(data, batch_size=self.size, shuffle=True), DataLoader(held, batch_size=len(held))
            def train(self, model):
                optimizer = torch.optim.SGD(model.parameters(), 0.1)
                for x, y in self.loader:
                    f(model(x), y).backward()
        """
    )
    assert found[8][0].startswith("below: self.run = lockstep.init(global_batch=self.size);")


def test_models_of_a_class_have_names_that_a_module_dict_takes():
    found = advice(
        """
        import torch
        class Agent:
            def __init__(self):
                self.a = torch.optim.Adam(self.actor.parameters())
                self.c = torch.optim.Adam(self.critic.parameters())
            def update(self, buffer):
                for _ in range(4):
                    f(buffer.sample_batch(32)).backward()
        """
    )
    assert "models = nn.ModuleDict({'actor': self.actor, 'critic': self.critic});" in found[6][0]
    assert found[8] == [
        "stays; each update has (batch,) = run.batches(TensorDataset(...), shuffle=False), of the samples drawn"
    ]


def test_backward_passes_with_a_step_between_them_are_calls_of_their_own():
    found = advice(
        """
        import torch
        for x, y in loader:
            f(model(x), y).backward()
            optimizer.first_step(zero_grad=True)
            f(model(x), y).backward()
            optimizer.second_step(zero_grad=True)
        """
    )
    (said,) = [each for each in found[4] if each.startswith("several backward passes")]
    assert (
        "where no step is between them, add their losses in one function; else each is a run.backward of its own"
        in said
    )


def test_an_object_of_an_optimizer_that_nothing_steps_is_made_of_the_prepared_one():
    """As the schedule of a class of one's own, without ``state_dict``, that is called; ``run.prepare`` refused it."""
    found = advice(
        """
        import torch
        from utility.step_lr import StepLR
        optimizer = SAM(model.parameters(), torch.optim.SGD, lr=0.1)
        schedule = StepLR(optimizer, 0.1, 200)
        for x, y in loader:
            optimizer.zero_grad()
            f(model(x), y).backward()
            optimizer.step()
            schedule(epoch)
        """
    )
    assert "model, optimizer = run.prepare(model, optimizer)" in found[5][0]
    assert found[5][1:] == ["below run.prepare, of the optimizer that it returns: this object steps what it is given"]


def test_samples_that_an_agent_draws_where_no_loop_is_in_the_file():
    found = advice(
        """
        import torch
        class Agent:
            def __init__(self):
                self.optimizer = torch.optim.Adam(self.net.parameters())
            def update(self, memory, n):
                state, action, value = memory.sample(batch_size=n)
                target, _ = self.policy.sample(state)
                f(self.net(state), target).backward()
                self.optimizer.step()
        """
    )
    assert found[7] == [
        "stays; each update has (batch,) = run.batches(TensorDataset(...), shuffle=False), of the samples drawn"
    ]
    assert 8 not in found


def test_files_that_each_process_would_write():
    found = advice(
        """
        import json, torch, wandb
        import numpy as np
        optimizer = torch.optim.Adam(model.parameters())
        experiment = wandb.init()
        for x, y in loader:
            f(model(x), y).backward()
            experiment.log({"step": 1})
        np.save("losses.npy", losses)
        json.dump(results, file)
        with open("losses.txt", "w") as file, open("data.txt") as data, open("wa.txt", mode="rb") as other:
            pass
        """
    )
    assert {line for line, said in found.items() if "under if run.is_main:" in said} == {5, 8, 9, 10, 11}


def test_a_run_that_begins_in_a_method_belongs_to_the_object():
    found = advice(
        """
        import torch
        class Engine:
            def train(self, model, loader):
                optimizer = torch.optim.SGD(model.parameters(), 0.1)
                for x, y in loader:
                    f(model(x), y).backward()
        """
    )
    assert found[3] == ["in the methods of this class, run is self.run"]
    assert "self.run = lockstep.init(" in found[5][0]


def test_what_python_says_of_a_line_ends_once():
    with pytest.raises(ConfigError, match=r"Did you mean print\(\.\.\.\)\.$"):
        changes("print 'done'")


def test_a_setting_of_torch_is_found_by_another_name():
    found = advice(
        """
        import torch
        import torch.backends.cudnn as cudnn
        cudnn.benchmark = True
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.optim.SGD(model.parameters(), 0.1)
        f(model(x), y).backward()
        """
    )
    assert all("threads=, precision= and deterministic=" in found[line][0] for line in (4, 5))


@pytest.mark.parametrize("parts", ["sorted(widths)", "zip(x.chunk(4), y.chunk(4))"])
def test_a_loop_that_adds_gradients_up_for_one_step_is_not_one_over_batches(parts):
    """Several widths of one model, chunks of a batch: ``run.batches(sorted(widths))`` was told."""
    found = advice(
        f"""
        import torch
        for epoch in range(3):
            for x, y in loader:
                optimizer.zero_grad()
                for part in {parts}:
                    loss_of(part, x, y).backward()
                optimizer.step()
        """
    )
    assert found[4][0].startswith("for batch in run.batches(loader):")
    assert 6 not in found


def test_a_loop_over_models_or_a_list_is_not_one_over_batches():
    """An ensemble, layers with optimizers of their own: ``run.batches((models, optimizers))`` was told."""
    found = advice(
        """
        import torch
        for x, y in loader:
            for model, optimizer in zip(models, optimizers):
                optimizer.zero_grad()
                f(model(x), y).backward()
                optimizer.step()
        """
    )
    assert found[3][0].startswith("for batch in run.batches(loader):")
    assert 4 not in found

    found = advice(
        """
        import torch
        class Layer(torch.nn.Linear):
            def train(self, x):
                for i in range(1000):
                    loss = self(x).mean()
                    loss.backward()
        for layer in layers:
            x = layer.train(x)
        """
    )
    assert not [each for told in found.values() for each in told if "run.batches(layers)" in each]

    found = advice(
        """
        import torch
        for step in range(1000):
            for domain in ["photos", "drawings"]:
                x, y = next(batches[domain])
                f(model(x), y).backward()
        """
    )
    assert not [each for told in found.values() for each in told if "run.batches(['photos'" in each]


@pytest.mark.parametrize(
    "loss",
    ["f(model(x), y).sum()", "F.mse_loss(model(x), y, reduction='sum')", "criterion(model(x), y)"],
)
def test_a_loss_that_is_a_sum_over_the_batch_is_told(loss):
    """``run.backward(batch, loss_fn)`` alone would take it for the mean, with another learning rate."""
    script = f"""
        import torch, torch.nn.functional as F
        criterion = torch.nn.MSELoss(reduction="sum")
        for x, y in loader:
            loss = {loss}
            loss.backward()
            optimizer.step()
        """
    assert "return the pair (sum, number of samples)" in advice(script)[6][0]
    for mean in ("f(model(x), y).sum() / len(x)", "f(model(x), y).sum(1).mean()", "other(model(x), y)"):
        assert "return the pair" not in advice(script.replace(loss, mean))[6][0]


def test_tensors_without_a_module_are_put_into_one():
    """Tutorials train tensors by hand: ``model, optimizer = run.prepare(model, optimizer)`` named an optimizer."""
    script = """
        import torch
        w = torch.randn(10, 1, requires_grad=True)
        b = torch.zeros(1, requires_grad=True)
        for t in range(500):
            loss = (x @ w + b - y).pow(2).mean()
            loss.backward()
            w -= 0.1 * w.grad
        """
    told = "below: run = lockstep.init(global_batch=B); [w, b] = run.prepare(torch.nn.ParameterList([w, b]))"
    assert told in advice(script)[4]
    alone = advice(script.replace("b = torch.zeros", "w = torch.zeros"))[4][0]
    assert "; [w] = run.prepare(torch.nn.ParameterList([w]))" in alone  # not the list itself
    for line in ("opt = torch.optim.SGD([w, b], 0.1)", "opt.step()"):  # the tensors of others may be those of inputs
        assert told not in advice(f"{script}\n        {line}\n").get(4, [])


def test_an_optimizer_of_each_epoch_is_made_above_the_loop():
    text = """
        import torch
        model = Net()
        for epoch in range(3):
            optimizer = torch.optim.SparseAdam(model.parameters())
            for batch, (x, y) in enumerate(Batches(data, 8)):
                hidden = model.begin() if batch == 0 else hidden
                output, memory = model(x, memory)
                loss_fn(output, y).backward()
                optimizer.step()
        class Batches:
            def __iter__(self):
                yield from self.data
        """
    found = advice(text)
    assert any(each.startswith("above the loop of line 4") and "run.prepare" in each for each in found[5])
    assert "refused, since gradients are added up as dense ones: torch.optim.Adam" in found[5]
    (loop,) = found[6]
    assert loop.startswith("for i, batch in enumerate(run.batches(")
    assert "of a class of your own" in loop
    assert any("A hidden state from batch to batch" in each for each in found[8])
    anew = advice(text.replace("            optimizer = ", "            model = Net(); optimizer = "))
    assert any(each.startswith("below: run = lockstep.init(") for each in anew[5]), "one training after another"


def test_a_state_that_begins_in_each_batch_is_not_carried():
    found = advice(
        """
        for epoch in range(3):
            for x, y in loader:
                hidden = model.begin(len(x))
                for t in range(5):
                    output, hidden = model(x[t], hidden)
                loss_fn(output, y).backward()
                optimizer.step()
        """
    )
    assert "hidden state" not in str(found)


def test_episodes_around_updates_from_a_replay_buffer_stay():
    found = advice(
        """
        class Agent:
            def update(self, memory):
                x, y = memory.sample(8)
                loss_fn(self.model(x), y).backward()
                self.optimizer.step()
        for episode in range(3):
            while not done:
                agent.update(memory)
        """
    )
    assert any(each.startswith("stays if the loop in it takes other samples") for each in found[7])
