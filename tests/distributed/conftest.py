"""Functions run on several forked gloo processes, each with its rank, and their results brought back."""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import socket
import traceback
import warnings
from datetime import timedelta

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist

LIGHTNING_WARNINGS = (
    "ignore:.*LeafSpec.*:FutureWarning",  # lightning 2.6 with torch 2.13
    "ignore:.*does not have many workers.*",
    "ignore:.*The number of training batches.*",
)

TIMEOUT = timedelta(seconds=10)
"""Of a collective in a test: long enough for two busy cores, short enough to name a deadlock."""


def pytest_configure(config):
    for line in LIGHTNING_WARNINGS:
        config.addinivalue_line("filterwarnings", line)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _worker(function, args, rank, world_size, port, pipe):
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        GROUP_RANK="0",
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_RUN_ID="tests",
        GLOO_SOCKET_IFNAME="lo",
    )
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    try:
        outcome = (True, function(*args))
    except BaseException as error:
        outcome = (False, "".join(traceback.format_exception(error)))
    try:
        pipe.send_bytes(pickle.dumps(outcome))
    finally:
        pipe.close()
        if dist.is_initialized() and outcome[0]:
            dist.destroy_process_group()
        os._exit(0)  # no interpreter shutdown: the parent's state was forked along


@pytest.fixture
def run_on_ranks():
    """``run_on_ranks(function, *args, world_size=2)``: the function's result of every rank, in rank order.

    Every rank runs the function in a process forked from the test, so closures are fine; results are pickled. A rank
    that raises fails the test with its traceback; a rank that hangs fails it when its collective times out.
    """

    def run(function, *args, world_size=2, deadline=60.0):
        context = multiprocessing.get_context("fork")
        port = _free_port()
        workers, pipes = [], []
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            worker = context.Process(target=_worker, args=(function, args, rank, world_size, port, sender), daemon=True)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 on forks beside threads
                worker.start()
            sender.close()
            workers.append(worker)
            pipes.append(receiver)
        try:
            outcomes = [_received(pipe, rank, deadline) for rank, pipe in enumerate(pipes)]
        finally:
            for worker in workers:
                worker.join(0.5)
                if worker.is_alive():
                    worker.kill()
        failures = [f"rank {rank}:\n{outcome}" for rank, (is_fine, outcome) in enumerate(outcomes) if not is_fine]
        if failures:
            pytest.fail("\n".join(failures), pytrace=False)
        return [outcome for _, outcome in outcomes]

    return run


def _received(pipe, rank, deadline):
    if not pipe.poll(deadline):
        return False, f"no answer within {deadline} s"
    try:
        return pickle.loads(pipe.recv_bytes())
    except EOFError:
        return False, "the process died without an answer"


@pytest.fixture
def on_ranks():
    """A Trainer for the strategy of the given name within ``run_on_ranks``; strategies get the tests' time-out."""

    def trainer(strategy, root, **flags):
        from lightning_rlstab.strategies import RLStabDDP, RLStabFSDP, RLStabSingleDevice

        kinds = {"rlstab": RLStabSingleDevice, "rlstab_ddp": RLStabDDP, "rlstab_fsdp": RLStabFSDP}
        options = flags.pop("options", {})
        if isinstance(strategy, str) and strategy in kinds:
            if strategy != "rlstab":
                options = {"timeout": TIMEOUT, **options}
            strategy = kinds[strategy](**options)
        return pl.Trainer(
            accelerator="cpu",
            devices=int(os.environ.get("WORLD_SIZE", "1")),
            strategy=strategy,
            default_root_dir=root,
            max_epochs=flags.pop("max_epochs", 1),
            logger=flags.pop("logger", False),
            enable_checkpointing=flags.pop("enable_checkpointing", False),
            enable_progress_bar=False,
            enable_model_summary=False,
            **flags,
        )

    return trainer
