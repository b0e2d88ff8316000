"""Start, speak to and end the process that runs one reward function."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import weakref
from multiprocessing.connection import Connection

from lightning_rlstab.rollout import reward_functions, reward_worker
from lightning_rlstab.rollout.reward_functions import RewardError

__all__ = ["RewardWorker"]

_START_SECONDS = 120.0  # importing a function may import torch on a busy machine
# Loads the worker's two files without their packages, which would load torch: seconds and hundreds of megabytes for a
# process that mostly compares strings. The name is claimed first, so that the worker's own import finds it.
_BOOTSTRAP = """
import importlib.util, runpy, sys
spec = importlib.util.spec_from_file_location("lightning_rlstab.rollout.reward_functions", sys.argv[1])
sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules[spec.name])
runpy.run_path(sys.argv[2], run_name="__main__")
"""
_DISTRIBUTED_PREFIXES = ("TORCHELASTIC_", "TORCH_NCCL_", "NCCL_", "GLOO_", "PET_", "OMPI_", "PMI_", "SLURM_")
_DISTRIBUTED_NAMES = frozenset(
    {
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "NODE_RANK",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "ROLE_RANK",
        "ROLE_WORLD_SIZE",
        "ROLE_NAME",
        "MASTER_ADDR",
        "MASTER_PORT",
    }
)


class RewardWorker:
    """One worker process and its two pipes.

    Args:
        pickled: The reward function.
        name: Its name, for errors.
        time_limit_seconds: Longest time of one call, for the worker's own watchdog.
    """

    def __init__(self, pickled: bytes, *, name: str, time_limit_seconds: float) -> None:
        self._name = name
        self._owner = os.getpid()
        self._is_ready = False
        self._process = subprocess.Popen(
            [sys.executable, "-c", _BOOTSTRAP, reward_functions.__file__, reward_worker.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=_environment(),
            start_new_session=True,  # so that a kill reaches what the function itself has started
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        # The connections own copies: they and the Popen object each close their descriptors exactly once.
        self.requests = Connection(os.dup(self._process.stdin.fileno()), readable=False)
        self.replies = Connection(os.dup(self._process.stdout.fileno()), writable=False)
        self._process.stdin.close()
        self._process.stdout.close()
        self._finalizer = weakref.finalize(self, _kill, self._process, self._owner)
        with contextlib.suppress(BrokenPipeError):  # said better when its reply is awaited
            self.requests.send((name, pickled, time_limit_seconds))

    @property
    def exit_code(self) -> int | None:
        """Exit code of the ended process; negative for a signal."""
        return self._process.returncode

    def is_ours(self) -> bool:
        """Whether this process started the worker and it still runs; a forked copy must not share the pipes."""
        return self._owner == os.getpid() and self._process.poll() is None

    def wait_until_ready(self) -> None:
        """Wait until the function is imported.

        Raises:
            RewardError: If the worker cannot import it, or does not say so in time.
        """
        if self._is_ready:
            return
        try:
            reply = (
                self.replies.recv() if self.replies.poll(_START_SECONDS) else ("refused", "It did not start in time.")
            )
        except (EOFError, ConnectionError):
            reply = ("refused", f"Its process ended with exit code {self._process.wait()}.")
        if reply[0] != "ready":
            message = f"`{self._name}` must be importable in a worker process, got this instead: {reply[1]}"
            raise RewardError(message, function=self._name)
        self._is_ready = True

    def kill(self) -> None:
        """End the process group and collect the process."""
        self._finalizer()
        self.requests.close()
        self.replies.close()


def _kill(process: subprocess.Popen[bytes], owner: int) -> None:
    if owner != os.getpid():
        return
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _environment() -> dict[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in _DISTRIBUTED_NAMES and not name.startswith(_DISTRIBUTED_PREFIXES)
    }
    kept["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
    return kept
